"""Metrics: what has happened, counted from the events, and what is there now, read from a ledger.

`Metrics` is an `EventSink` that passes on what it counts, so it stands before the log writer:

    metrics = Metrics(config, log)
    offloader = Offloader(config, metrics)

It knows nothing but events; so a log gives the same values as the process that wrote it had:

    Metrics.of(config, LogReader(directory).events()).values()

A block is, here too, what a host slot holds. `METRICS` says what each name means; docs/metrics.md shows it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from kvsm import events as ev
from kvsm.events import Direction, OffloadConfig, OffloadingEvent, RejectReason, SkipReason
from kvsm.ids import count
from kvsm.ledger import Ledger
from kvsm.offloader import EventSink
from kvsm.states.block import BLOCK_WORDS, BlockState
from kvsm.states.lease import LeaseState
from kvsm.states.transfer import TransferState
from kvsm.states.words import STATE_MASK

_COPIES_SHIFT, _PINS_SHIFT = BLOCK_WORDS.shifts

# Labels, as they stand in series.
_STORE, _LOAD = "store", "load"
_COMPLETED, _FAILED, _CANCELLED, _DRAINED, _LOST = "completed", "failed", "cancelled", "drained", "lost"
_WOKEN, _TIMED_OUT, _FINISHED, _PREEMPTED = "woken", "timed out", "finished", "preempted"

_DIRECTIONS = {"direction": (_STORE, _LOAD)}
_BLOCKS = tuple([1 << power for power in range(13)])
_BYTES = tuple([4096 << 2 * power for power in range(12)])
_SECONDS = tuple([figure / 10**place for place in (4, 3, 2, 1, 0) for figure in (1, 2.5, 5)])
_STEPS = (0, *_BLOCKS)


def _reasons(reasons: type[SkipReason] | type[RejectReason]) -> tuple[str, ...]:
    return tuple([reason.value for reason in reasons])


class Metric(NamedTuple):
    """What one name means. labels: label -> its values. bounds: of a histogram, the largest value that each
    of its buckets takes; one more bucket takes the rest."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Mapping[str, tuple[str, ...]] = {}
    bounds: tuple[float, ...] = ()

    def series(self) -> Iterator[tuple[str, ...]]:
        """(name, *values of the labels) of everything that is counted apart."""
        for values in product(*self.labels.values()):
            yield (self.name, *values)


METRICS = (
    Metric("blocks_stored", "counter", "Blocks whose store completed on every worker."),
    Metric("blocks_loaded", "counter", "Blocks whose load completed on every worker."),
    Metric("blocks_matched", "counter", "Blocks that matches found and pinned."),
    Metric("blocks_evicted", "counter", "Blocks evicted to make room."),
    Metric(
        "blocks_skipped",
        "counter",
        "Blocks offered and not stored, by reason; one that is offered anew counts again.",
        {"reason": _reasons(SkipReason)},
    ),
    Metric("keys_recalled", "counter", "Keys offered again that the policy remembers evicting (ghost hits)."),
    Metric("key_bytes", "counter", "Bytes of the keys in events."),
    Metric("matches", "counter", "Questions for a prefix whose answer was new.", {"result": ("hit", "miss")}),
    Metric("requests", "counter", "Requests that are over.", {"end": (_FINISHED, "aborted")}),
    Metric("preemptions", "counter", "Requests whose device blocks were taken."),
    Metric("deferrals", "counter", "Times that a request had to wait for a transfer."),
    Metric(
        "deferrals_ended",
        "counter",
        "How those waits ended: by the transfer's end, by their bound, or with the request.",
        {"how": (_WOKEN, _TIMED_OUT, _FINISHED, _PREEMPTED)},
    ),
    Metric("loads_voided", "counter", "Promised loads that could not be kept."),
    Metric("transfers_planned", "counter", "Transfers planned.", _DIRECTIONS),
    Metric(
        "transfers_ended",
        "counter",
        "Transfers that are over; of those planned, the others are live.",
        {**_DIRECTIONS, "outcome": (_COMPLETED, _FAILED, _CANCELLED, _DRAINED, _LOST)},
    ),
    Metric(
        "transfers_abandoned",
        "counter",
        "Transfers in flight that a reset gave up; they end drained or lost.",
        _DIRECTIONS,
    ),
    Metric("transfers_flushed", "counter", "Transfers that the engine had to wait for."),
    Metric(
        "reports_rejected",
        "counter",
        "Workers' reports that changed nothing, by reason.",
        {"reason": _reasons(RejectReason)},
    ),
    Metric("resets", "counter", "Resets of the cache."),
    Metric("transfer_blocks", "histogram", "Blocks of a completed transfer.", _DIRECTIONS, _BLOCKS),
    Metric(
        "transfer_bytes",
        "histogram",
        "Bytes that a completed transfer copied, on all workers together.",
        _DIRECTIONS,
        _BYTES,
    ),
    Metric(
        "transfer_seconds",
        "histogram",
        "Seconds of wall time from submission to the last report, of a completed transfer.",
        _DIRECTIONS,
        _SECONDS,
    ),
    Metric(
        "transfer_steps",
        "histogram",
        "Engine steps from submission to the last report, of a completed transfer.",
        _DIRECTIONS,
        _STEPS,
    ),
    Metric("deferral_ticks", "histogram", "Ticks that a request waited for a transfer.", {}, _STEPS),
    Metric("capacity_blocks", "gauge", "Slots of the host pool."),
    Metric(
        "blocks",
        "gauge",
        "Slots by state: of these STORED and LOADING can be matched, FREE and EVICTED can be used.",
        {"state": tuple([state.name for state in BlockState])},
    ),
    Metric("resident_blocks", "gauge", "Blocks that can be matched."),
    Metric("pinned_blocks", "gauge", "Blocks that a match holds."),
    Metric("in_flight_blocks", "gauge", "Blocks that a copy under way touches."),
    Metric("quarantined_blocks", "gauge", "Slots that wait for the copies that a reset gave up."),
    Metric("retired_blocks", "gauge", "Slots lost for good to transfers never reported."),
    Metric("free_blocks", "gauge", "Slots that a store can use without evicting."),
    Metric("retired_device_blocks", "gauge", "Device blocks lost for good to loads never reported."),
    Metric("live_transfers", "gauge", "Transfers planned or in flight.", _DIRECTIONS),
    Metric("draining_transfers", "gauge", "Of these, transfers that a reset gave up."),
    Metric("known_requests", "gauge", "Requests that are not over."),
    Metric("deferred_requests", "gauge", "Of these, requests that wait for a transfer."),
)
"""Every metric, in the order in which `values` and the exporter give them. A block is what a host slot holds;
a name that speaks of bytes, seconds, steps or ticks has these as its unit."""

_BOUNDS = {metric.name: metric.bounds for metric in METRICS}


class HistogramValue(msgspec.Struct, frozen=True):
    """counts: of values up to each of `bounds` and above the bound before it; the last, above all. sum: of
    all values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


def _histogram(name: str, seen: Mapping[int, int], unit: int = 1) -> HistogramValue:
    """Sort into buckets what was seen, in units, and how often. That is done when somebody looks: to note a
    number costs a fraction of it, and few are different."""
    bounds = _BOUNDS[name]
    counts = [0] * (len(bounds) + 1)
    # Copied in one call, so that no other thread changes it meanwhile.
    noted = dict(seen)
    for number, times in noted.items():
        counts[bisect_left(bounds, number * unit)] += times
    return HistogramValue(bounds, tuple(counts), sum([number * unit * n for number, n in noted.items()]))


class _Tally:
    """What is counted of the transfers of one direction. blocks, device_blocks, steps: number -> how many
    completed transfers had it. seconds: how many there were in each bucket."""

    __slots__ = (
        "abandoned",
        "blocks",
        "device_blocks",
        "ended",
        "nanoseconds",
        "planned",
        "seconds",
        "steps",
    )

    def __init__(self) -> None:
        self.planned = self.abandoned = self.nanoseconds = 0
        self.ended = dict.fromkeys((_COMPLETED, _FAILED, _CANCELLED, _DRAINED, _LOST), 0)
        self.blocks: dict[int, int] = defaultdict(int)
        self.device_blocks: dict[int, int] = defaultdict(int)
        self.steps: dict[int, int] = defaultdict(int)
        self.seconds = [0] * (len(_SECONDS) + 1)

    def histograms(self, bytes_per_block: int) -> dict[str, HistogramValue]:
        return {
            "transfer_blocks": _histogram("transfer_blocks", self.blocks),
            "transfer_bytes": _histogram("transfer_bytes", self.device_blocks, bytes_per_block),
            "transfer_seconds": HistogramValue(_SECONDS, tuple(self.seconds), self.nanoseconds / 1e9),
            "transfer_steps": _histogram("transfer_steps", self.steps),
        }


class _Copy(msgspec.Struct, gc=False):
    """A live transfer, as far as its events have told."""

    tally: _Tally
    blocks: int
    device_blocks: int
    pending: int
    failed: bool = False
    submitted: bool = False
    abandoned: bool = False
    step: int = 0
    wall_ns: int = 0
    """When it was submitted."""


class _Deferral(NamedTuple):
    transfer: int
    until: int
    since: int


class Metrics:
    """Counts events, and passes them on to `log` before: what the log refused is not counted.

    A transfer whose plan is not among the events (the log begins later) is not counted. `values` may be
    called from another thread; it is at most a few events behind then, and no counter ever falls.
    """

    def __init__(self, config: OffloadConfig, log: EventSink | None = None) -> None:
        self._log, self._workers = log, config.workers
        self._pass_on = log.append if log is not None else None
        self._bytes_per_block = config.block_bytes * config.workers
        self._tick = 0
        self._copies: dict[int, _Copy] = {}
        self._deferrals: dict[str, _Deferral] = {}
        # Plain numbers, each an attribute of its own: a counter that is looked up costs three times as much.
        self._blocks_matched = self._blocks_evicted = self._keys_recalled = self._key_bytes = 0
        self._hits = self._misses = self._finished_requests = self._aborted_requests = 0
        self._preemptions = self._deferred_times = self._loads_voided = self._transfers_flushed = 0
        self._resets = 0
        self._skipped_blocks = dict.fromkeys(_reasons(SkipReason), 0)
        self._rejected_reports = dict.fromkeys(_reasons(RejectReason), 0)
        self._deferrals_ended = dict.fromkeys((_WOKEN, _TIMED_OUT, _FINISHED, _PREEMPTED), 0)
        self._deferral_ticks: dict[int, int] = defaultdict(int)
        self._stores, self._loads = _Tally(), _Tally()
        self._handlers: dict[type[OffloadingEvent], Callable[[Any], None]] = {
            ev.RequestPreempted: self._preempted,
            ev.RequestFinished: self._finished,
            ev.HitMatched: self._matched,
            ev.RequestDeferred: self._deferred,
            ev.KeysRecalled: self._recalled,
            ev.BlocksEvicted: self._evicted,
            ev.StorePlanned: self._store_planned,
            ev.StoreSkipped: self._skipped,
            ev.LoadPlanned: self._load_planned,
            ev.TransfersSubmitted: self._submitted,
            ev.TransferCancelled: self._cancelled,
            ev.WorkerReported: self._reported,
            ev.ReportRejected: self._rejected,
            ev.TransferLost: self._lost,
            ev.FlushRequested: self._flushed,
            ev.CacheReset: self._reset,
            ev.Ticked: self._ticked,
            ev.OffersCounted: self._offers_counted,
        }

    @classmethod
    def of(cls, config: OffloadConfig, events: Iterable[OffloadingEvent]) -> Metrics:
        """What these events come to."""
        metrics = cls(config)
        for event in events:
            metrics.append(event)
        return metrics

    def append(self, event: OffloadingEvent) -> None:
        if self._pass_on is not None:
            self._pass_on(event)
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def flush(self) -> None:
        if self._log is not None:
            self._log.flush()

    def values(self) -> dict[str, Any]:
        """Name -> its value so far: an int, or a `HistogramValue`. Of a metric with labels: value of the
        first label -> (value of the second ->) the same."""
        stores, loads = self._stores, self._loads
        of_stores = stores.histograms(self._bytes_per_block)
        of_loads = loads.histograms(self._bytes_per_block)
        return {
            "blocks_stored": of_stores["transfer_blocks"].sum,
            "blocks_loaded": of_loads["transfer_blocks"].sum,
            "blocks_matched": self._blocks_matched,
            "blocks_evicted": self._blocks_evicted,
            "blocks_skipped": dict(self._skipped_blocks),
            "keys_recalled": self._keys_recalled,
            "key_bytes": self._key_bytes,
            "matches": {"hit": self._hits, "miss": self._misses},
            "requests": {_FINISHED: self._finished_requests, "aborted": self._aborted_requests},
            "preemptions": self._preemptions,
            "deferrals": self._deferred_times,
            "deferrals_ended": dict(self._deferrals_ended),
            "loads_voided": self._loads_voided,
            "transfers_planned": {_STORE: stores.planned, _LOAD: loads.planned},
            "transfers_ended": {_STORE: dict(stores.ended), _LOAD: dict(loads.ended)},
            "transfers_abandoned": {_STORE: stores.abandoned, _LOAD: loads.abandoned},
            "transfers_flushed": self._transfers_flushed,
            "reports_rejected": dict(self._rejected_reports),
            "resets": self._resets,
            "deferral_ticks": _histogram("deferral_ticks", self._deferral_ticks),
            **{name: {_STORE: of_stores[name], _LOAD: of_loads[name]} for name in of_stores},
        }

    # Requests.

    def _preempted(self, event: ev.RequestPreempted) -> None:
        self._preemptions += 1
        if self._deferrals:
            self._end_deferral(event.request, _PREEMPTED)

    def _finished(self, event: ev.RequestFinished) -> None:
        if event.aborted:
            self._aborted_requests += 1
        else:
            self._finished_requests += 1
        if self._deferrals:
            self._end_deferral(event.request, _FINISHED)

    def _matched(self, event: ev.HitMatched) -> None:
        slots, missed = event.slots, event.missed
        if missed is not None:
            self._key_bytes += len(missed)
        if slots:
            self._hits += 1
            self._blocks_matched += len(slots) if type(slots) is tuple else count(slots)
        else:
            self._misses += 1

    def _deferred(self, event: ev.RequestDeferred) -> None:
        self._deferred_times += 1
        self._deferrals[event.request] = _Deferral(event.transfer, event.until, self._tick)

    def _ticked(self, event: ev.Ticked) -> None:
        self._tick = event.tick
        if self._deferrals:
            for request, deferral in list(self._deferrals.items()):
                if deferral.until <= event.tick:
                    self._end_deferral(request, _TIMED_OUT)

    def _end_deferral(self, request: str, how: str) -> None:
        deferral = self._deferrals.pop(request, None)
        if deferral is not None:
            self._deferrals_ended[how] += 1
            self._deferral_ticks[self._tick - deferral.since] += 1

    # Stores and loads.

    def _recalled(self, event: ev.KeysRecalled) -> None:
        self._keys_recalled += len(event.keys)
        self._key_bytes += len(b"".join(event.keys))

    def _offers_counted(self, event: ev.OffersCounted) -> None:
        self._key_bytes += len(b"".join(event.keys))

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        slots = event.slots
        self._blocks_evicted += len(slots) if type(slots) is tuple else count(slots)

    def _skipped(self, event: ev.StoreSkipped) -> None:
        reasons = self._skipped_blocks
        reasons[event.reason] += len(event.keys)
        self._key_bytes += len(b"".join(event.keys))

    def _store_planned(self, event: ev.StorePlanned) -> None:
        keys, sources, tally = event.keys, event.device_blocks, self._stores
        self._key_bytes += len(b"".join(keys))
        tally.planned += 1
        blocks = len(sources) if type(sources) is tuple else count(sources)
        self._copies[event.seq] = _Copy(tally, len(keys), blocks, self._workers)

    def _load_planned(self, event: ev.LoadPlanned) -> None:
        if event.voided:
            self._loads_voided += 1
            return
        tally = self._loads
        tally.planned += 1
        blocks = count(event.device_blocks)
        self._copies[event.seq] = _Copy(tally, count(event.slots), blocks, self._workers)

    # Transfers.

    def _submitted(self, event: ev.TransfersSubmitted) -> None:
        for transfer in event.transfers:
            copy = self._copies.get(transfer)
            if copy is not None:
                copy.submitted, copy.step, copy.wall_ns = True, event.step, event.wall_ns

    def _reported(self, event: ev.WorkerReported) -> None:
        copy = self._copies.get(event.transfer)
        if copy is None:
            return
        if not event.good:
            copy.failed = True
        if copy.pending > 1:
            copy.pending -= 1
        elif copy.abandoned:
            self._end(event.transfer, _DRAINED)
        elif copy.failed:
            self._end(event.transfer, _FAILED)
        else:
            self._complete(copy, event)
            self._end(event.transfer, _COMPLETED)

    def _complete(self, copy: _Copy, event: ev.WorkerReported) -> None:
        tally = copy.tally
        tally.blocks[copy.blocks] += 1
        tally.device_blocks[copy.device_blocks] += 1
        tally.steps[event.step - copy.step] += 1
        nanoseconds = event.wall_ns - copy.wall_ns
        # A wall clock may have been set back meanwhile.
        if nanoseconds > 0:
            tally.nanoseconds += nanoseconds
        tally.seconds[bisect_left(_SECONDS, nanoseconds / 1e9)] += 1

    def _cancelled(self, event: ev.TransferCancelled) -> None:
        self._end(event.transfer, _CANCELLED)

    def _lost(self, event: ev.TransferLost) -> None:
        self._end(event.transfer, _LOST)

    def _end(self, transfer: int, outcome: str) -> None:
        copy = self._copies.pop(transfer, None)
        if copy is not None:
            copy.tally.ended[outcome] += 1
        if self._deferrals:
            for request, deferral in list(self._deferrals.items()):
                if deferral.transfer == transfer:
                    self._end_deferral(request, _WOKEN)

    def _rejected(self, event: ev.ReportRejected) -> None:
        reasons = self._rejected_reports
        reasons[event.reason] += 1

    def _flushed(self, event: ev.FlushRequested) -> None:
        self._transfers_flushed += len(event.transfers)

    def _reset(self, event: ev.CacheReset) -> None:  # noqa: ARG002
        self._resets += 1
        for transfer, copy in list(self._copies.items()):
            if not copy.submitted:
                self._end(transfer, _CANCELLED)
            elif not copy.abandoned:
                copy.abandoned = True
                copy.tally.abandoned += 1


def gauges(ledger: Ledger) -> dict[str, Any]:
    """What is there now, by name: as `Metrics.values`."""
    words = ledger.blocks.view
    states = np.bincount(words & STATE_MASK, minlength=len(BlockState)).tolist()
    # Copied at once, so that no other thread changes it meanwhile.
    transfers = list(ledger.transfers.values())
    loads = sum([transfer.direction is Direction.LOAD for transfer in transfers])
    copies = words >> _COPIES_SHIFT & BLOCK_WORDS.limits[0]
    return {
        "capacity_blocks": ledger.config.host_blocks,
        "blocks": {state.name: states[state] for state in BlockState},
        "resident_blocks": states[BlockState.STORED] + states[BlockState.LOADING],
        "pinned_blocks": int(np.count_nonzero(words >> _PINS_SHIFT)),
        "in_flight_blocks": int(np.count_nonzero(copies)),
        "quarantined_blocks": states[BlockState.QUARANTINED],
        "retired_blocks": states[BlockState.RETIRED],
        "free_blocks": states[BlockState.FREE] + states[BlockState.EVICTED],
        "retired_device_blocks": int(np.count_nonzero(ledger.leases.view & STATE_MASK == LeaseState.RETIRED)),
        "live_transfers": {_STORE: len(transfers) - loads, _LOAD: loads},
        "draining_transfers": sum([one.state is TransferState.ABANDONED for one in transfers]),
        "known_requests": len(ledger.requests),
        "deferred_requests": len(ledger.deferred),
    }
