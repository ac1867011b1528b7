"""The definition of each metric: name, kind, help, labels and bounds.

The metrics in `METRICS` follow from events and ledger, so a log gives the same values as the process that
wrote it (`kvsm.explain.metrics`). vLLM's connector and its workers count all others. docs/metrics.md lists
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Literal, NamedTuple

from kvsm import events as ev
from kvsm.events import KINDS, HintOutcome, RejectReason, SkipReason
from kvsm.states.block import BlockState
from kvsm.states.transfer import CANCELLED, COMPLETED, DRAINED, FAILED, LOST
from kvsm.tiers.hand_over.leases import LeaseEnd

# Values of labels.
OUTCOMES: dict[int, str] = {
    state: state.name.lower() for state in (COMPLETED, FAILED, CANCELLED, DRAINED, LOST)
}
BY_TRANSFER, BY_TIMEOUT, BY_FINISH, BY_PREEMPTION = "woken", "timed out", "finished", "preempted"
CUT_OFF = "cut off"
"""The end of a wait or a copy whose process ended first. `BY_*` are the other ends of a wait."""
ENDS = (*OUTCOMES.values(), CUT_OFF)
ON_DEVICE, ON_HOST, NOWHERE = "on the device", "on the host", "nowhere"
COUNTED_KINDS = [kind for kind in KINDS if kind is not ev.LogOpened]

_DIRECTIONS = {"direction": ("store", "load")}
OF_STORES, OF_LOADS, OF_COPIES_OUT = "store", "load", "copy out"
_COPIED = {"direction": (OF_STORES, OF_LOADS, OF_COPIES_OUT)}
"""A store copies to the host, a load to the device, and a copy out to the disk below the host."""
_BLOCKS = tuple([1 << power for power in range(13)])
_BYTES = tuple([4096 << 2 * power for power in range(12)])
SECONDS_BOUNDS = tuple([figure / 10**place for place in (4, 3, 2, 1, 0) for figure in (1, 2.5, 5)])
_STEPS = (0, *_BLOCKS)

# The bounds of vLLM's own histograms, so that ours can be exported under its names, too.
_COPY_BYTES = tuple([1e6 * figure for figure in (1, 5, 10, 20, 40, 60, 80, 100, 150, 200)])
_ALLOCATION_BLOCKS = tuple([4**power for power in range(10)])
_LOOKUP_SECONDS = tuple([figure / 10**place for place in (5, 4, 3, 2, 1, 0) for figure in (1, 5)][:-1])
_DEFERRAL_SECONDS = tuple([figure / 10**place for place in (4, 3, 2, 1, 0, -1) for figure in (1, 5)][:-1])


class Metric(NamedTuple):
    """The definition of one metric.

    labels: label -> its values.
    bounds: of a histogram, the largest value in each bucket. One more bucket takes larger values.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Mapping[str, tuple[str, ...]] = {}
    bounds: tuple[float, ...] = ()

    def series(self) -> Iterator[tuple[str, ...]]:
        """Yield (name, *values of the labels) of each series."""
        for values in product(*self.labels.values()):
            yield (self.name, *values)


METRICS = (
    Metric("blocks_stored", "counter", "Blocks whose store completed on every worker."),
    Metric(
        "blocks_imported",
        "counter",
        "Stored blocks that came from another engine or the disk. blocks_stored counts them, too.",
    ),
    Metric("blocks_loaded", "counter", "Blocks whose load to the device completed on every worker."),
    Metric(
        "blocks_copied_out",
        "counter",
        "Blocks read for a copy to the disk; disk_blocks_stored counts the copies that succeeded.",
    ),
    Metric("blocks_matched", "counter", "Host slots that admitted requests matched."),
    Metric(
        "blocks_asked",
        "counter",
        "Device blocks of prompts, by where they were when the request was admitted. A request that reads no "
        "cache, or is admitted again after a preemption or a failed load, is not counted.",
        {"found": (ON_DEVICE, ON_HOST, NOWHERE)},
    ),
    Metric("blocks_evicted", "counter", "Blocks evicted to make room."),
    Metric(
        "blocks_skipped",
        "counter",
        "Blocks offered and not stored, by reason. A block that is offered again counts again.",
        {"reason": tuple([reason.value for reason in SkipReason])},
    ),
    Metric(
        "allocation_failures",
        "counter",
        "Offers of a request for which the host had no room for some or all of the blocks. A repeated offer "
        "counts once.",
    ),
    Metric("keys_recalled", "counter", "Offered keys that the policy remembers evicting (ghost hits)."),
    Metric(
        "slow_hits",
        "counter",
        "Hits expected to take at least as long to load as to compute, by what the request did. One in "
        "sixteen is loaded, to measure loads.",
        {"result": ("declined", "loaded")},
    ),
    Metric("key_bytes", "counter", "Bytes of the keys that events contain."),
    Metric(
        "matches",
        "counter",
        "Admitted requests, as in blocks_asked, by whether the host served a block.",
        {"result": ("hit", "miss")},
    ),
    Metric("requests", "counter", "Requests that finished or were aborted.", {"end": (BY_FINISH, "aborted")}),
    Metric(
        "hand_overs",
        "counter",
        "Requests that held blocks for another engine, by how the hold ended. The metric requests counts "
        "them, too.",
        {"end": tuple([end.value for end in LeaseEnd])},
    ),
    Metric(
        "hints",
        "counter",
        "Agent hints by their answer (accepted, clipped or refused), and the leases of sessions by how they "
        "ended. The metric requests counts each such lease, too.",
        {"outcome": tuple([outcome.value for outcome in HintOutcome])},
    ),
    Metric("preemptions", "counter", "Requests that were preempted: the engine took their device blocks."),
    Metric("deferrals", "counter", "Waits of a request for a transfer."),
    Metric(
        "deferrals_ended",
        "counter",
        "How these waits ended: with the transfer, at the time limit, with the request, or with the process.",
        {"how": (BY_TRANSFER, BY_TIMEOUT, BY_FINISH, BY_PREEMPTION, CUT_OFF)},
    ),
    Metric("loads_voided", "counter", "Loads given up before they began: a matched block was voided."),
    Metric("transfers_planned", "counter", "Transfers planned.", _COPIED),
    Metric(
        "transfers_ended",
        "counter",
        "Transfers that have ended. All other planned transfers are live. Cut off: the process ended before "
        "the transfer.",
        {**_COPIED, "outcome": ENDS},
    ),
    Metric(
        "imports_ended",
        "counter",
        "Stores from another engine or the disk that have ended. transfers_ended counts them, too.",
        {"outcome": ENDS},
    ),
    Metric("transfers_abandoned", "counter", "Transfers in flight at a reset: drained or lost.", _COPIED),
    Metric("transfers_flushed", "counter", "Transfers that the engine had to wait for."),
    Metric(
        "reports_rejected",
        "counter",
        "Workers' reports that changed nothing, by reason.",
        {"reason": tuple([reason.value for reason in RejectReason])},
    ),
    Metric("resets", "counter", "Resets of the cache."),
    Metric("restarts", "counter", "Restarts: another process resumed the log and the stored blocks."),
    Metric(
        "events",
        "counter",
        "Events after the first one of the log, by kind.",
        {"kind": tuple([kind.__name__ for kind in COUNTED_KINDS])},
    ),
    Metric(
        "log_events_dropped", "counter", "Events that could not be written, and are missing from the log."
    ),
    Metric("transfer_blocks", "histogram", "Blocks of a completed transfer.", _COPIED, _BLOCKS),
    Metric(
        "transfer_bytes",
        "histogram",
        "Bytes that a completed transfer copied, on all workers together.",
        _COPIED,
        _BYTES,
    ),
    Metric(
        "transfer_seconds",
        "histogram",
        "Seconds of wall time from submission to the last report of a completed transfer.",
        _COPIED,
        SECONDS_BOUNDS,
    ),
    Metric(
        "transfer_steps",
        "histogram",
        "Engine steps from submission to the last report of a completed transfer.",
        _COPIED,
        _STEPS,
    ),
    Metric(
        "allocation_blocks",
        "histogram",
        "Blocks of each planned store from the device, without blocks that found no room.",
        {},
        _ALLOCATION_BLOCKS,
    ),
    Metric("deferral_ticks", "histogram", "Ticks that a request waited for a transfer.", {}, _STEPS),
    Metric(
        "deferral_seconds",
        "histogram",
        "Seconds of wall time that a request waited for a transfer. A wait that ended with its process is "
        "not counted.",
        {},
        _DEFERRAL_SECONDS,
    ),
    Metric("capacity_blocks", "gauge", "Slots of the host pool."),
    Metric(
        "blocks",
        "gauge",
        "Slots by state. STORED and LOADING can be matched, FREE and EVICTED can be used.",
        {"state": tuple([state.name for state in BlockState])},
    ),
    Metric("resident_blocks", "gauge", "Blocks that can be matched."),
    Metric("pinned_blocks", "gauge", "Blocks that a match holds."),
    Metric("in_flight_blocks", "gauge", "Blocks that a copy in flight touches."),
    Metric("quarantined_blocks", "gauge", "Slots that wait for copies abandoned by a reset."),
    Metric("retired_blocks", "gauge", "Slots lost for good to transfers that were never reported."),
    Metric("free_blocks", "gauge", "Slots that a store can use without evicting."),
    Metric(
        "retired_device_blocks", "gauge", "Device blocks lost for good to loads that were never reported."
    ),
    Metric("live_transfers", "gauge", "Transfers planned or in flight; copies out are loads.", _DIRECTIONS),
    Metric("draining_transfers", "gauge", "Live transfers that a reset abandoned."),
    Metric("known_requests", "gauge", "Requests that have not ended."),
    Metric("deferred_requests", "gauge", "Requests that wait for a transfer."),
    Metric("life", "gauge", "Number of processes that have written the log, including this one."),
    Metric("log_broken", "gauge", "1 while the log cannot be written, else 0."),
)
"""The metrics of events and ledger, in the order of `values` and of the exporter. A name with bytes, seconds,
steps or ticks states its unit."""

COPIES = (
    Metric("copied_bytes", "counter", "Bytes that copies moved, on all workers.", _DIRECTIONS),
    Metric("copy_seconds", "counter", "Time spent in copies, on all workers.", _DIRECTIONS),
    Metric(
        "copy_bytes",
        "histogram",
        "Bytes of one good copy: a transfer's share on one worker.",
        _DIRECTIONS,
        _COPY_BYTES,
    ),
)
"""Metrics of the connector's workers."""

LOOKUPS = (
    Metric(
        "lookup_seconds",
        "histogram",
        "Seconds that vLLM's scheduler waited for one lookup of a prompt on the host.",
        {},
        _LOOKUP_SECONDS,
    ),
)
"""Metrics of the scheduler's side that are measured, and not logged."""

HAND_OVERS = (
    Metric(
        "hand_overs_missed",
        "counter",
        "Requests that computed a prompt whose blocks another engine was to hand over. vLLM's log says why.",
    ),
)
"""Counters of the scheduler's side that no event shows: a refused hand-over leaves no event."""

LEASES = (Metric("leased_blocks", "gauge", "Host slots held by the leases of agents' sessions."),)
"""Metrics of the leases of agents' sessions."""

DISK = (
    Metric("disk_blocks", "gauge", "Blocks that the disk tier holds, or is storing."),
    Metric("disk_blocks_stored", "counter", "Blocks whose copy to the disk completed on every worker."),
    Metric("disk_blocks_loaded", "counter", "Blocks whose copy from the disk completed on every worker."),
    Metric(
        "disk_blocks_not_stored",
        "counter",
        "Blocks whose copy to the disk failed, found no room, or was overtaken by a reset. They stay on the "
        "host.",
    ),
)
"""Metrics of the disk tier, if the engine has one."""

SERVES_WITHOUT = Metric(
    "serves_without",
    "gauge",
    "1 if a part is configured and its files cannot be used: the engine serves without this part until it "
    "restarts, and vLLM's log says why. Otherwise 0.",
    {"part": ("disk", "hand_over")},
)

VLLM_FACTS = (
    "cpu_num_chunks",
    "cpu_blocks_per_chunk",
    "cpu_kv_cache_size_bytes",
    "cpu_kv_cache_size_tokens",
)
"""The labels that vLLM's own offload exports."""

FACTS = (*VLLM_FACTS, "policy", "store", "last_step")
"""The labels of `config_info`."""

CONFIG_INFO = Metric(
    "config_info",
    "gauge",
    "Always 1. Its labels say how the connector is configured: host slots, device blocks in each, bytes of "
    "host memory on all ranks, tokens that fit if each request is as long as the model allows, and the "
    "options with the same names.",
    dict.fromkeys(FACTS, ()),
)

_OF_CONNECTOR = (*COPIES, *LOOKUPS, *HAND_OVERS, *LEASES, *DISK, SERVES_WITHOUT, CONFIG_INFO)

EXPORTED: Mapping[str, Metric] = {metric.name: metric for metric in (*METRICS, *_OF_CONNECTOR)}
"""All metrics of the connector by name."""
