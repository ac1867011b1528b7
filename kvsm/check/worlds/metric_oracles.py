"""A second count of the metrics that follow from events and ledger, to compare with `kvsm.explain.metrics`.

Each metric is computed by itself, from the whole log or from all slots. So no count depends on another count
or on running totals. Metrics of whole transfers, waits and admissions have their oracles in `past_metrics`,
and the metrics in `BY_ENGINE` are compared with what the engine has counted (`run_figures`). No world judges
those in `UNJUDGED`, which has the reasons.

The counts are compared at rest: then nothing is in flight and no request is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvsm import events as ev
from kvsm.core.ledger import Ledger
from kvsm.errors import PropertyBroken
from kvsm.events import HintOutcome, OffloadingEvent, RejectReason, SkipReason
from kvsm.explain.metric_table import BY_FINISH, COUNTED_KINDS, OF_COPIES_OUT, OF_LOADS, OF_STORES
from kvsm.explain.metrics import Metrics
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.states.block import BlockState
from kvsm.states.lease import LeaseState
from kvsm.states.words import STATE_MASK
from kvsm.tiers.hand_over.leases import LeaseEnd

Log = Sequence[OffloadingEvent]
Oracle = Callable[[Log, Ledger], Any]


def _named(log: Log, kind: str, **fields: object) -> int:
    """The number of events of this kind whose fields have these values."""
    return sum(
        type(event).__name__ == kind and all(getattr(event, name) == value for name, value in fields.items())
        for event in log
    )


def _length(log: Log, kind: type[OffloadingEvent], field: str) -> int:
    """The number of entries in this field of all events of this kind."""
    return sum(len(to_list(getattr(event, field))) for event in log if isinstance(event, kind))


def _blocks_skipped(log: Log, _ledger: Ledger) -> dict[str, int]:
    skipped = [event for event in log if isinstance(event, ev.StoreSkipped)]
    return {why.value: sum(len(one.keys) for one in skipped if one.reason is why) for why in SkipReason}


def _allocation_failures(log: Log, _ledger: Ledger) -> int:
    skipped = [event for event in log if isinstance(event, ev.StoreSkipped)]
    return sum(len(one.owners) or 1 for one in skipped if one.reason is SkipReason.POOL_FULL)


def _key_bytes(log: Log, _ledger: Ledger) -> int:
    listed = sum(len(key) for event in log for key in getattr(event, "keys", ()))
    return listed + sum(len(getattr(event, "missed", None) or b"") for event in log)


def _slow_hits(log: Log, _ledger: Ledger) -> dict[str, int]:
    return {
        "declined": _named(log, "SlowHitFound", declined=True),
        "loaded": _named(log, "SlowHitFound", declined=False),
    }


def _requests(log: Log, _ledger: Ledger) -> dict[str, int]:
    ends, copies = {BY_FINISH: 0, "aborted": 0}, set[str]()
    for event in log:
        if isinstance(event, ev.RequestArrived) and event.target:
            copies.add(event.request)
        if isinstance(event, ev.Restarted):
            copies.clear()
        if isinstance(event, ev.RequestFinished):
            ends["aborted" if event.aborted else BY_FINISH] += event.request not in copies
            copies.discard(event.request)
    return ends


def _transfers_planned(log: Log, _ledger: Ledger) -> dict[str, int]:
    loads = [event for event in log if isinstance(event, ev.LoadPlanned) and not event.voided]
    out = sum(bool(load.target) for load in loads)
    return {OF_STORES: _named(log, "StorePlanned"), OF_LOADS: len(loads) - out, OF_COPIES_OUT: out}


def _events(log: Log, _ledger: Ledger) -> dict[str, int]:
    kinds = Counter(map(type, log))
    return {kind.__name__: kinds[kind] for kind in COUNTED_KINDS}


def _by_state(_log: Log, ledger: Ledger) -> dict[str, int]:
    states = Counter(word & STATE_MASK for word in ledger.blocks.words)
    return {state.name: states[state] for state in BlockState}


def _in_states(*states: BlockState) -> Oracle:
    return lambda log, ledger: sum(_by_state(log, ledger)[state.name] for state in states)


def _life(log: Log, _ledger: Ledger) -> int:
    return max((event.life for event in log if isinstance(event, ev.Restarted)), default=1)


ORACLES: Mapping[str, Oracle] = {
    "blocks_evicted": lambda log, _: _length(log, ev.BlocksEvicted, "slots"),
    "blocks_skipped": _blocks_skipped,
    "allocation_failures": _allocation_failures,
    "slow_hits": _slow_hits,
    "keys_recalled": lambda log, _: sum(len(one.keys) for one in log if isinstance(one, ev.KeysRecalled)),
    "key_bytes": _key_bytes,
    "requests": _requests,
    "hints": lambda log, _: {one.value: _named(log, "HintAnswered", outcome=one) for one in HintOutcome},
    "hand_overs": lambda log, _: {
        end.value: _named(log, "RequestFinished", hand_over=end.value) for end in LeaseEnd
    },
    "preemptions": lambda log, _: _named(log, "RequestPreempted"),
    "deferrals": lambda log, _: _named(log, "RequestDeferred"),
    "loads_voided": lambda log, _: _named(log, "LoadPlanned", voided=True),
    "transfers_planned": _transfers_planned,
    "transfers_flushed": lambda log, _: _length(log, ev.FlushRequested, "transfers"),
    "reports_rejected": lambda log, _: {
        why.value: _named(log, "ReportRejected", reason=why) for why in RejectReason
    },
    "resets": lambda log, _: _named(log, "CacheReset"),
    "restarts": lambda log, _: _named(log, "Restarted"),
    "events": _events,
    "capacity_blocks": lambda _, ledger: len(ledger.blocks.words),
    "blocks": _by_state,
    "resident_blocks": _in_states(BlockState.STORED, BlockState.LOADING),
    "quarantined_blocks": _in_states(BlockState.QUARANTINED),
    "retired_blocks": _in_states(BlockState.RETIRED),
    "free_blocks": _in_states(BlockState.FREE, BlockState.EVICTED),
    "retired_device_blocks": lambda _, ledger: sum(
        word & STATE_MASK == LeaseState.RETIRED for word in ledger.leases.words
    ),
    "pinned_blocks": lambda _log, _ledger: 0,
    "in_flight_blocks": lambda _log, _ledger: 0,
    "live_transfers": lambda _log, _ledger: {"store": 0, "load": 0},
    "draining_transfers": lambda _log, _ledger: 0,
    "known_requests": lambda _log, _ledger: 0,
    "deferred_requests": lambda _log, _ledger: 0,
    "life": _life,
}

BY_ENGINE = (
    "blocks_stored",
    "blocks_imported",
    "blocks_loaded",
    "blocks_copied_out",
    "blocks_asked",
    "matches",
    "disk_blocks_stored",
    "disk_blocks_loaded",
)
"""Compared with what the engine of the world has counted."""

_MEASURED = (
    "a clock or the workers' own counts measure it, and no event has it; tests/in_vllm judges the sums"
)
_BY_WRITER = "the log cannot say what is missing from it: the writer counts, and tests/core/log judges it"
UNJUDGED: Mapping[str, str] = {
    **dict.fromkeys(("log_events_dropped", "log_broken"), _BY_WRITER),
    **dict.fromkeys(("copied_bytes", "copy_seconds", "copy_bytes", "lookup_seconds"), _MEASURED),
    "hand_overs_missed": "a refused hand-over leaves no event; tests/in_vllm refuse some, and count them",
    "serves_without": "whether files can be used at the start, which no event says",
    "config_info": "copies options; it counts nothing",
    "disk_blocks": "the size of the disk's index, which worlds compare with the slots on the disk",
    "disk_blocks_not_stored": "the tier queues and drops blocks without an event; tests/tiers judges it",
    "leased_blocks": "the count of the leases themselves, which the world of hints compares with its books",
}
"""Metrics that no world judges, each with the reason."""


def check_metrics(metrics: Metrics, log: Log) -> None:
    """Compare the metrics of a whole log at rest with the second count. Raises `PropertyBroken`."""
    values = metrics.values() | metrics.gauges()
    for name, oracle in ORACLES.items():
        if (counted := oracle(log, metrics.ledger)) != values[name]:
            message = f"the metric {name} says {values[name]}, but a second count gives {counted}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
