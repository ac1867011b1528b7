"""Metrics: counters and histograms from the events, gauges from the ledger.

`Metrics` sits between a core and its log, as the sink of the core's events:

    metrics = Metrics.attached_to(offloader)

It stores counts only. The size and the outcome of a transfer are read from the ledger's record. A log gives
the same values as the process that wrote it:

    Metrics.of(LogReader(directory)).values()

Every event is counted under its kind. `_DETAILS` maps a kind to the method that counts its details. A block
is the content of one host slot. `metric_table.METRICS` defines each name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from kvsm import events as ev
from kvsm.core.ledger import Ledger, TransferRecord
from kvsm.core.log import LateLog, LogReader, LogWriter
from kvsm.core.log.fold import walk
from kvsm.core.log.trust import Trust
from kvsm.core.offloader import EventSink, Offloader
from kvsm.events import Direction, OffloadingEvent, SkipReason
from kvsm.explain.metric_places import NAMES, PLACES, SUM, Buckets, HistogramValue, values_of
from kvsm.explain.metric_table import (
    BY_FINISH,
    BY_PREEMPTION,
    BY_TIMEOUT,
    BY_TRANSFER,
    COUNTED_KINDS,
    CUT_OFF,
    ENDS,
    EXPORTED,
    OF_COPIES_OUT,
    OF_LOADS,
    OF_STORES,
    OUTCOMES,
    SECONDS_BOUNDS,
)
from kvsm.ids import count
from kvsm.states.block import BlockState
from kvsm.states.lease import LeaseState
from kvsm.states.transfer import ABANDONED, COMPLETED
from kvsm.states.words import STATE_MASK


def histogram(name: str, seen: Mapping[int, int], unit: float = 1) -> HistogramValue:
    """Sort numbers into buckets. This happens only when metrics are read: counting a number is far cheaper.

    name: a histogram in `metric_table.EXPORTED`.
    seen: number -> how often it was counted.
    unit: factor from a number to the histogram's unit.
    """
    bounds = EXPORTED[name].bounds
    counts = [0] * (len(bounds) + 1)
    # Copied in one call, so that no other thread changes it during the copy.
    noted = dict(seen)
    for number, times in noted.items():
        counts[bisect_left(bounds, number * unit)] += times
    return HistogramValue(bounds, tuple(counts), sum([number * unit * n for number, n in noted.items()]))


class SecondsHistogram:
    """The growth of a histogram of durations in seconds.

    name: a histogram without labels, in `metric_table.EXPORTED`.
    """

    def __init__(self, name: str) -> None:
        self._bounds = EXPORTED[name].bounds
        self._grown: dict[str, float] = {}

    def observe(self, seconds: float) -> None:
        """Count a duration. A negative one, from a clock that went back, counts as 0."""
        seconds, grown = max(0.0, seconds), self._grown
        bucket = str(bisect_left(self._bounds, seconds))
        grown[bucket] = grown.get(bucket, 0) + 1
        grown[SUM] = grown.get(SUM, 0) + seconds

    def take_growth(self) -> dict[str, float]:
        """Return the growth since the last call: index of a bucket, or `SUM` -> growth."""
        grown, self._grown = self._grown, {}
        return grown


_INSIDE = 1e-9
"""The least distance of a value from the lower bound of its bucket, as a share of the bucket's width."""


def spread(bounds: Sequence[float], counts: Sequence[int], total: float) -> list[tuple[float, int]]:
    """Return values that fill these buckets and have this sum: (value, how often).

    bounds: the upper bound of each bucket; the last bucket has none.
    counts: the number of values in each bucket.
    total: the sum of the real values, which were all at least 0.
    """
    lowest = [min(0.0, bounds[0]), *bounds]
    widths = [high - low for low, high in zip(lowest, bounds)]
    least = sum(low * times for low, times in zip(lowest, counts))
    room = sum(width * times for width, times in zip(widths, counts))
    more, beyond = total - least, counts[len(bounds)]
    # A value above all bounds has no upper limit, so the rest of the sum goes to these values.
    share = _INSIDE if beyond or not room else min(1.0, max(_INSIDE, more / room))
    values = [
        (min(low + share * width, high), times)
        for low, width, high, times in zip(lowest, widths, bounds, counts)
        if times
    ]
    if beyond:
        rest = total - sum(value * times for value, times in values)
        values.append((max(rest / beyond, bounds[-1] * (1 + _INSIDE)), beyond))
    return values


_ALLOCATED, _TICKS_WAITED, _SECONDS_WAITED = map(
    Buckets.of, ("allocation_blocks", "deferral_ticks", "deferral_seconds")
)


def _places_by(name: str) -> dict[str, int]:
    """Value of the only label of a counter -> its place."""
    (values,) = EXPORTED[name].labels.values()
    return {value: PLACES[name, value] for value in values}


_EVENTS: dict[type[OffloadingEvent], int] = {kind: PLACES["events", kind.__name__] for kind in COUNTED_KINDS}
_SKIPPED, _REJECTED, _HINTS, _HAND_OVERS, _WAITS_ENDED, _IMPORTS_ENDED = map(
    _places_by,
    ("blocks_skipped", "reports_rejected", "hints", "hand_overs", "deferrals_ended", "imports_ended"),
)
_HIT, _MISS = _places_by("matches").values()
_FINISHED, _ABORTED = _places_by("requests").values()
_DECLINED, _LOADED = _places_by("slow_hits").values()
_FOUND_ON_DEVICE, _FOUND_ON_HOST, _FOUND_NOWHERE = _places_by("blocks_asked").values()
_MATCHED, _EVICTED, _RECALLED, _KEY_BYTES, _IMPORTED = [
    PLACES[name,]
    for name in ("blocks_matched", "blocks_evicted", "keys_recalled", "key_bytes", "blocks_imported")
]
_PREEMPTED, _DEFERRED, _RESETS, _RESTARTS, _VOIDED, _FLUSHED, _NO_ROOM, _DROPPED = [
    PLACES[name,]
    for name in (
        *("preemptions", "deferrals", "resets", "restarts", "loads_voided", "transfers_flushed"),
        *("allocation_failures", "log_events_dropped"),
    )
]


class _Way(msgspec.Struct, frozen=True, gc=False):
    """The places of the transfers in one direction.

    planned: transfers planned. abandoned: transfers in flight at a reset. ended: outcome -> transfers.
    copied: blocks of completed transfers.
    """

    planned: int
    abandoned: int
    ended: dict[str, int]
    copied: int
    blocks: Buckets
    bytes: Buckets
    seconds: Buckets
    steps: Buckets

    @classmethod
    def of(cls, way: str, copied: str) -> _Way:
        """way: the value of the label `direction`. copied: the metric that counts its blocks."""
        histograms = ("transfer_blocks", "transfer_bytes", "transfer_seconds", "transfer_steps")
        return cls(
            PLACES["transfers_planned", way],
            PLACES["transfers_abandoned", way],
            {end: PLACES["transfers_ended", way, end] for end in ENDS},
            PLACES[copied,],
            *[Buckets.of(name, way) for name in histograms],
        )


_STORES = _Way.of(OF_STORES, "blocks_stored")
_LOADS = _Way.of(OF_LOADS, "blocks_loaded")
_COPIES_OUT = _Way.of(OF_COPIES_OUT, "blocks_copied_out")
_WAYS = (_STORES, _LOADS, _COPIES_OUT)


class _Flight(msgspec.Struct, gc=False):
    """A live transfer: the ledger's record of it, and the step and wall time of its submission."""

    way: _Way
    record: TransferRecord
    device_blocks: int
    """Blocks of device size that it copies, on the device or at another engine or tier."""
    imported: bool = False
    """Whether the transfer is a store from another engine or from the disk."""
    step: int = 0
    wall_ns: int = 0


_BLOCK_STATES = [state.name for state in BlockState]

_COPIES, _PINS = 1 + STATE_MASK, 2 + STATE_MASK
"""Indices of the sums of the blocks' counters in `StateWords.totals`."""


def gauges(ledger: Ledger) -> dict[str, Any]:
    """Return the gauges by name, as in `Metrics.values`. `Metrics.gauges` adds the gauges of the log.

    Any thread may call it. It iterates over the live transfers, but not over slots: the fold counts slots and
    device blocks by state. After a restart the gauges continue from the resumed ledger.
    """
    blocks = ledger.blocks.totals.tolist()  # Copied in one call: another thread may fold an event meanwhile.
    transfers = list(ledger.transfers.values())
    loads = sum([transfer.direction is Direction.LOAD for transfer in transfers])
    return {
        "capacity_blocks": ledger.config.host_blocks,
        "blocks": dict(zip(_BLOCK_STATES, blocks)),
        "resident_blocks": blocks[BlockState.STORED] + blocks[BlockState.LOADING],
        "pinned_blocks": blocks[_PINS],
        "in_flight_blocks": blocks[_COPIES],
        "quarantined_blocks": blocks[BlockState.QUARANTINED],
        "retired_blocks": blocks[BlockState.RETIRED],
        "free_blocks": blocks[BlockState.FREE] + blocks[BlockState.EVICTED],
        "retired_device_blocks": ledger.leases.totals[LeaseState.RETIRED],
        "live_transfers": {"store": len(transfers) - loads, "load": loads},
        "draining_transfers": sum([transfer.state is ABANDONED for transfer in transfers]),
        "known_requests": len(ledger.requests),
        "deferred_requests": len(ledger.deferred),
        "life": ledger.life,
    }


class _Counts(msgspec.Struct, gc=False):
    """Counts by place (`metric_places`). Sums of the seconds of transfers are in nanoseconds.

    before: the counts when their growth was last taken.
    grown: how much each place has grown since.
    """

    before: list[float]
    grown: dict[int, float]


class Metrics:
    """Counts events that were applied to a ledger.

    A transfer that was planned before the counting began is not counted. Another thread may call `values`;
    its result is then at most a few events behind, and no counter ever decreases.
    """

    def __init__(self, ledger: Ledger, log: EventSink | None = None) -> None:
        """log: gets each event first. An event that the log refuses is not counted."""
        self.ledger, self._log = ledger, log
        self._pass_on = log.append if log is not None else None
        self._events_in_gaps = 0
        """Events missing from the log, if the counts come from a log (`of`)."""
        self._counts = _Counts([0] * len(NAMES), defaultdict(int))
        """Replaced in one assignment, so that other threads see no counter decrease."""
        self._flights: dict[int, _Flight] = {}
        self._waiting: dict[str, tuple[int, int]] = {}
        """Deferred request -> the tick and the wall time at which its wait began."""
        self._copies: set[str] = set()  # to another tier; the ledger has them as requests

    @classmethod
    def attached_to(cls, offloader: Offloader) -> Metrics:
        """Insert new metrics between this core and its log. They count from now on."""
        offloader.log = metrics = cls(offloader.ledger, offloader.log)
        return metrics

    @classmethod
    def of(
        cls, log: LogReader, *, allow_policies: Collection[str] = (), max_slots: int | None = None
    ) -> Metrics:
        """Count all events of a log. Raises as `kvsm.explain.story.rebuild` does.

        allow_policies, max_slots: as in `kvsm.explain.story.Trust`.
        """
        trust = Trust(allow_policies, max_slots)
        metrics: Metrics | None = None
        with trust.guarded(log.directory):
            for ledger, event, _ in walk(log, trust):
                metrics = metrics or cls(ledger)
                if metrics.ledger is not ledger:
                    metrics._go_on_from(ledger)
                ledger.apply(event)
                metrics.append(event)
            if metrics is None:
                trust.check(log.head.config, log.directory)
                metrics = cls(Ledger(log.head.config))
        metrics._events_in_gaps = sum([last - first + 1 for first, last in log.gaps])
        return metrics

    def _go_on_from(self, ledger: Ledger) -> None:
        """Continue after a gap in a log. Transfers and waits that ended in the gap are dropped uncounted."""
        self.ledger = ledger
        self._waiting = {name: since for name, since in self._waiting.items() if name in ledger.deferred}
        self._flights = {id: one for id, one in self._flights.items() if id in ledger.transfers}
        for id, flight in self._flights.items():
            flight.record = ledger.transfers[id]
        self._copies.intersection_update(ledger.requests)

    def append(self, event: OffloadingEvent) -> None:
        """Count an event that the ledger has applied."""
        if self._pass_on is not None:
            self._pass_on(event)
        kind = type(event)
        if (place := _EVENTS.get(kind)) is not None:
            self._counts.grown[place] += 1
        details = _DETAILS.get(kind)
        if details is not None:
            details(self, event)

    def flush(self) -> None:
        """Flush the log."""
        if self._log is not None:
            self._log.flush()

    def take_growth(self) -> dict[int, float]:
        """Return how much each counted place (`metric_places`) has grown since the last call.

        Growth of 0 may be among it. For one reader, on the thread that counts events: the next call does not
        tell this growth again.
        """
        before, grown = self._counts.before, self._counts.grown
        grown[_DROPPED] = self.log_health()[0] - before[_DROPPED]
        sums = before[:]
        for place, more in grown.items():
            sums[place] += more
        self._counts = _Counts(sums, defaultdict(int))
        for way in _WAYS:
            place = way.seconds.sum
            if place in grown:
                grown[place] = sums[place] / 1e9 - before[place] / 1e9
        return grown

    def values(self) -> dict[str, Any]:
        """Return name -> value so far, as `metric_places.values_of` does."""
        counts = self._counts
        # Copied in one call, so that no other thread changes it during the copy.
        sums, grown = counts.before[:], dict(counts.grown)
        for place, more in grown.items():
            sums[place] += more
        for way in _WAYS:
            sums[way.seconds.sum] /= 1e9
        sums[_DROPPED] = self.log_health()[0]
        return values_of(sums)

    def gauges(self) -> dict[str, Any]:
        """Return name -> current value: `gauges` of the ledger, and the state of the log."""
        return gauges(self.ledger) | {"log_broken": self.log_health()[1]}

    def log_health(self) -> tuple[int, int]:
        """Return (events missing from the log, 1 if the log cannot be written now, else 0)."""
        if isinstance(self._log, (LogWriter, LateLog)):
            return self._log.dropped, int(self._log.failure is not None)
        return self._events_in_gaps, 0

    # Requests.

    def _arrived(self, event: ev.RequestArrived) -> None:
        if event.target:
            self._copies.add(event.request)

    def _preempted(self, event: ev.RequestPreempted) -> None:
        self._counts.grown[_PREEMPTED] += 1
        if self._waiting:
            self._end_waits(BY_PREEMPTION, event)

    def _finished(self, event: ev.RequestFinished) -> None:
        if event.request in self._copies:
            self._copies.remove(event.request)
            return
        self._counts.grown[_ABORTED if event.aborted else _FINISHED] += 1
        if event.hand_over in _HAND_OVERS:
            self._counts.grown[_HAND_OVERS[event.hand_over]] += 1
        if self._waiting:
            self._end_waits(BY_FINISH, event)

    def _matched(self, event: ev.HitMatched) -> None:
        if event.missed is not None:
            self._counts.grown[_KEY_BYTES] += len(event.missed)

    def _hint_answered(self, event: ev.HintAnswered) -> None:
        self._counts.grown[_HINTS[event.outcome.value]] += 1

    def _admitted(self, event: ev.RequestAdmitted) -> None:
        grown = self._counts.grown
        if event.missed is not None:
            grown[_KEY_BYTES] += len(event.missed)
        if event.resumed:
            return
        on_device, on_host = event.on_device or 0, event.on_host or 0
        slots = len(self.ledger.requests[event.request].pins) if event.on_host != 0 else 0
        grown[_MATCHED] += slots
        grown[_HIT if slots else _MISS] += 1
        if event.asked is not None:
            grown[_FOUND_ON_DEVICE] += on_device
            grown[_FOUND_ON_HOST] += on_host
            grown[_FOUND_NOWHERE] += max(0, event.asked - on_device - on_host)

    def _deferred(self, event: ev.RequestDeferred) -> None:
        self._counts.grown[_DEFERRED] += 1
        self._waiting[event.request] = self.ledger.tick, event.wall_ns

    def _ticked(self, event: ev.Ticked) -> None:
        if self._waiting:
            self._end_waits(BY_TIMEOUT, event)

    def _end_waits(self, how: str, event: OffloadingEvent) -> None:
        """Count waits that the event ended: those of requests that are not deferred any more."""
        deferred = self.ledger.deferred
        for request in [name for name in self._waiting if name not in deferred]:
            tick, wall_ns = self._waiting.pop(request)
            ticks = self.ledger.tick - tick
            self._counts.grown[_WAITS_ENDED[how]] += 1
            _TICKS_WAITED.observe(self._counts.grown, ticks)
            # The wall clock may have been set back meanwhile.
            _SECONDS_WAITED.observe(self._counts.grown, max(0, event.wall_ns - wall_ns) / 1e9)

    def _slow_hit(self, event: ev.SlowHitFound) -> None:
        self._counts.grown[_DECLINED if event.declined else _LOADED] += 1

    # Keys and blocks.

    def _recalled(self, event: ev.KeysRecalled) -> None:
        self._counts.grown[_RECALLED] += len(event.keys)
        self._counts.grown[_KEY_BYTES] += len(b"".join(event.keys))

    def _offers_counted(self, event: ev.OffersCounted) -> None:
        self._counts.grown[_KEY_BYTES] += len(b"".join(event.keys))

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        slots = event.slots
        self._counts.grown[_EVICTED] += len(slots) if type(slots) is tuple else count(slots)

    def _skipped(self, event: ev.StoreSkipped) -> None:
        self._counts.grown[_SKIPPED[event.reason]] += len(event.keys)
        if event.reason is SkipReason.POOL_FULL:
            self._counts.grown[_NO_ROOM] += max(1, len(event.owners))
        self._counts.grown[_KEY_BYTES] += len(b"".join(event.keys))

    # Transfers.

    def _store_planned(self, event: ev.StorePlanned) -> None:
        grown = self._counts.grown
        grown[_KEY_BYTES] += len(b"".join(event.keys))
        grown[_STORES.planned] += 1
        record = self.ledger.transfers[event.seq]
        blocks = len(record.slots) * self.ledger.config.blocks_per_chunk
        self._flights[event.seq] = _Flight(_STORES, record, blocks, bool(event.source))
        if not event.source:
            _ALLOCATED.observe(grown, len(record.slots))

    def _load_planned(self, event: ev.LoadPlanned) -> None:
        if event.voided:
            self._counts.grown[_VOIDED] += 1
        else:
            way = _COPIES_OUT if event.target else _LOADS
            self._counts.grown[way.planned] += 1
            record = self.ledger.transfers[event.seq]
            self._flights[event.seq] = _Flight(way, record, len(record.device_blocks))

    def _submitted(self, event: ev.TransfersSubmitted) -> None:
        for id in event.transfers:
            flight = self._flights.get(id)
            if flight is not None:
                flight.step, flight.wall_ns = event.step, event.wall_ns

    def _reported(self, event: ev.WorkerReported) -> None:
        if event.transfer not in self.ledger.transfers:
            self._ended(event)

    def _ended(self, event: ev.WorkerReported | ev.TransferCancelled | ev.TransferLost) -> None:
        flight = self._flights.pop(event.transfer, None)
        if flight is not None:
            state = flight.record.word & STATE_MASK
            if state == COMPLETED:
                self._complete(flight, event)
            self._count_end(flight, _outcome(flight))
        if self._waiting:
            self._end_waits(BY_TRANSFER, event)

    def _reset(self, event: ev.CacheReset) -> None:
        self._counts.grown[_RESETS] += 1
        for id, flight in list(self._flights.items()):
            if id not in self.ledger.transfers:
                del self._flights[id]
                self._count_end(flight, _outcome(flight))
            elif flight.record.epoch == event.epoch - 1:
                self._counts.grown[flight.way.abandoned] += 1
        if self._waiting:
            self._end_waits(BY_TRANSFER, event)

    def _restarted(self, _event: ev.Restarted) -> None:
        """Count all transfers and waits of the last process as cut off."""
        self._counts.grown[_RESTARTS] += 1
        for flight in self._flights.values():
            self._count_end(flight, CUT_OFF)
        self._flights.clear()
        self._copies.clear()
        self._counts.grown[_WAITS_ENDED[CUT_OFF]] += len(self._waiting)
        self._waiting.clear()

    def _count_end(self, flight: _Flight, outcome: str) -> None:
        self._counts.grown[flight.way.ended[outcome]] += 1
        if flight.imported:
            self._counts.grown[_IMPORTS_ENDED[outcome]] += 1
            if outcome == OUTCOMES[COMPLETED]:
                self._counts.grown[_IMPORTED] += len(flight.record.slots)

    def _complete(self, flight: _Flight, event: OffloadingEvent) -> None:
        grown, way, config = self._counts.grown, flight.way, self.ledger.config
        blocks = len(flight.record.slots)
        grown[way.copied] += blocks
        way.blocks.observe(grown, blocks)
        way.bytes.observe(grown, flight.device_blocks * config.block_bytes * config.workers)
        way.steps.observe(grown, event.step - flight.step)
        # The wall clock may have been set back between submission and end.
        nanoseconds = max(0, event.wall_ns - flight.wall_ns)
        grown[way.seconds.first + bisect_left(SECONDS_BOUNDS, nanoseconds / 1e9)] += 1
        grown[way.seconds.sum] += nanoseconds

    def _flushed(self, event: ev.FlushRequested) -> None:
        self._counts.grown[_FLUSHED] += len(event.transfers)

    def _rejected(self, event: ev.ReportRejected) -> None:
        self._counts.grown[_REJECTED[event.reason]] += 1


def _outcome(flight: _Flight) -> str:
    return OUTCOMES[flight.record.word & STATE_MASK]


_DETAILS: dict[type[OffloadingEvent], Callable[[Metrics, Any], None]] = {
    ev.RequestArrived: Metrics._arrived,
    ev.RequestPreempted: Metrics._preempted,
    ev.RequestFinished: Metrics._finished,
    ev.HitMatched: Metrics._matched,
    ev.RequestAdmitted: Metrics._admitted,
    ev.HintAnswered: Metrics._hint_answered,
    ev.RequestDeferred: Metrics._deferred,
    ev.SlowHitFound: Metrics._slow_hit,
    ev.KeysRecalled: Metrics._recalled,
    ev.BlocksEvicted: Metrics._evicted,
    ev.StorePlanned: Metrics._store_planned,
    ev.StoreSkipped: Metrics._skipped,
    ev.LoadPlanned: Metrics._load_planned,
    ev.TransfersSubmitted: Metrics._submitted,
    ev.TransferCancelled: Metrics._ended,
    ev.WorkerReported: Metrics._reported,
    ev.ReportRejected: Metrics._rejected,
    ev.TransferLost: Metrics._ended,
    ev.FlushRequested: Metrics._flushed,
    ev.CacheReset: Metrics._reset,
    ev.Restarted: Metrics._restarted,
    ev.Ticked: Metrics._ticked,
    ev.OffersCounted: Metrics._offers_counted,
}
"""The method that counts what is specific to a kind of event."""
