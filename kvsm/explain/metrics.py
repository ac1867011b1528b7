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
from kvsm.events import KINDS, Direction, OffloadingEvent, RejectReason, SkipReason
from kvsm.explain.metric_table import (
    BY_FINISH,
    BY_PREEMPTION,
    BY_TIMEOUT,
    BY_TRANSFER,
    COUNTED_KINDS,
    CUT_OFF,
    ENDS,
    EXPORTED,
    NOWHERE,
    OF_COPIES_OUT,
    OF_LOADS,
    OF_STORES,
    ON_DEVICE,
    ON_HOST,
    OUTCOMES,
    SECONDS_BOUNDS,
)
from kvsm.ids import count
from kvsm.states.block import BlockState
from kvsm.states.lease import LeaseState
from kvsm.states.transfer import ABANDONED, COMPLETED
from kvsm.states.words import STATE_MASK
from kvsm.tiers.hand_over.leases import LeaseEnd


class HistogramValue(msgspec.Struct, frozen=True):
    """A histogram so far.

    bounds: the largest value in each bucket but the last, which has no bound.
    counts: the number of values in each bucket; one more than bounds.
    sum: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)


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
    """A histogram of durations in seconds. Durations are sorted into buckets at once: no two are equal.

    name: a histogram in `metric_table.EXPORTED`.
    """

    def __init__(self, name: str) -> None:
        self._bounds = EXPORTED[name].bounds
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration. A negative one, from a clock that went back, counts as 0."""
        seconds = max(0.0, seconds)
        self._sum += seconds
        self._counts[bisect_left(self._bounds, seconds)] += 1

    def value(self) -> HistogramValue:
        """Return the histogram so far."""
        return HistogramValue(self._bounds, tuple(self._counts), self._sum)


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


def _numbers() -> dict[int, int]:
    return defaultdict(int)


class _Tally(msgspec.Struct, gc=False):
    """Counts of the transfers in one direction.

    planned: transfers planned. abandoned: transfers in flight at a reset. ended: outcome -> transfers.
    blocks, device_blocks, steps: a transfer's number of these -> completed transfers with that number.
    seconds: completed transfers in each bucket. nanoseconds: their total time from submission to end.
    made: (completed transfers, bytes per block) when the last histograms were made, and these histograms.
    """

    planned: int = 0
    abandoned: int = 0
    nanoseconds: int = 0
    ended: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    blocks: dict[int, int] = msgspec.field(default_factory=_numbers)
    device_blocks: dict[int, int] = msgspec.field(default_factory=_numbers)
    steps: dict[int, int] = msgspec.field(default_factory=_numbers)
    seconds: list[int] = msgspec.field(default_factory=lambda: [0] * (len(SECONDS_BOUNDS) + 1))
    made: tuple[tuple[int, int], dict[str, HistogramValue]] = ((-1, 0), {})

    def histograms(self, bytes_per_block: int) -> dict[str, HistogramValue]:
        """Return name -> histogram of the completed transfers."""
        # Read the count first: if another thread counts a transfer meanwhile, the next call makes new ones.
        seen, (of, made) = (sum(self.seconds), bytes_per_block), self.made
        if of != seen:
            made = {
                "transfer_blocks": histogram("transfer_blocks", self.blocks),
                "transfer_bytes": histogram("transfer_bytes", self.device_blocks, bytes_per_block),
                "transfer_seconds": HistogramValue(
                    SECONDS_BOUNDS, tuple(self.seconds), self.nanoseconds / 1e9
                ),
                "transfer_steps": histogram("transfer_steps", self.steps),
            }
            self.made = seen, made
        return made


class _Flight(msgspec.Struct, gc=False):
    """A live transfer: the ledger's record of it, and the step and wall time of its submission."""

    tally: _Tally
    record: TransferRecord
    device_blocks: int
    """Blocks of device size that it copies, on the device or at another engine or tier."""
    imported: bool = False
    """Whether the transfer is a store from another engine or from the disk."""
    step: int = 0
    wall_ns: int = 0


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
        "blocks": {state.name: blocks[state] for state in BlockState},
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
        self._events = dict.fromkeys(KINDS, 0)
        self._flights: dict[int, _Flight] = {}
        self._waiting: dict[str, tuple[int, int]] = {}
        """Deferred request -> the tick and the wall time at which its wait began."""
        # Each counter is a plain attribute: a counter in a dict would cost three times as much.
        self._blocks_matched = self._blocks_evicted = self._keys_recalled = self._key_bytes = 0
        self._hits = self._misses = self._finished_requests = self._aborted_requests = 0
        self._on_device = self._on_host = self._nowhere = 0
        self._slow_hits = {"declined": 0, "loaded": 0}
        self._loads_voided = self._transfers_flushed = self._blocks_imported = 0
        self._imports_ended = dict.fromkeys(ENDS, 0)
        self._copies: set[str] = set()  # to another tier; the ledger has them as requests
        self._hand_overs_ended = {end.value: 0 for end in LeaseEnd}
        self._hints = {outcome.value: 0 for outcome in ev.HintOutcome}
        self._skipped_blocks = dict.fromkeys([reason.value for reason in SkipReason], 0)
        self._rejected_reports = dict.fromkeys([reason.value for reason in RejectReason], 0)
        self._deferrals_ended = dict.fromkeys((BY_TRANSFER, BY_TIMEOUT, BY_FINISH, BY_PREEMPTION, CUT_OFF), 0)
        self._deferral_ticks = _numbers()
        self._deferral_seconds = SecondsHistogram("deferral_seconds")
        self._allocation_failures, self._allocations = 0, _numbers()
        self._stores, self._loads, self._copies_out = _Tally(), _Tally(), _Tally()

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
        self._events[kind] += 1
        details = _DETAILS.get(kind)
        if details is not None:
            details(self, event)

    def flush(self) -> None:
        """Flush the log."""
        if self._log is not None:
            self._log.flush()

    def values(self) -> dict[str, Any]:
        """Return name -> value so far, an int or a `HistogramValue`. A metric with labels has a dict instead:
        value of the first label -> (value of the second ->) number or `HistogramValue`."""
        seen, config = dict(self._events), self.ledger.config
        tallies = {OF_STORES: self._stores, OF_LOADS: self._loads, OF_COPIES_OUT: self._copies_out}
        bytes_per_block = config.block_bytes * config.workers
        copied = {name: tally.histograms(bytes_per_block) for name, tally in tallies.items()}
        return {
            "blocks_stored": copied[OF_STORES]["transfer_blocks"].sum,
            "blocks_imported": self._blocks_imported,
            "blocks_loaded": copied[OF_LOADS]["transfer_blocks"].sum,
            "blocks_copied_out": copied[OF_COPIES_OUT]["transfer_blocks"].sum,
            "blocks_matched": self._blocks_matched,
            "blocks_asked": {
                ON_DEVICE: self._on_device,
                ON_HOST: self._on_host,
                NOWHERE: self._nowhere,
            },
            "blocks_evicted": self._blocks_evicted,
            "blocks_skipped": dict(self._skipped_blocks),
            "allocation_failures": self._allocation_failures,
            "keys_recalled": self._keys_recalled,
            "slow_hits": dict(self._slow_hits),
            "key_bytes": self._key_bytes,
            "matches": {"hit": self._hits, "miss": self._misses},
            "requests": {BY_FINISH: self._finished_requests, "aborted": self._aborted_requests},
            "hand_overs": dict(self._hand_overs_ended),
            "hints": dict(self._hints),
            "preemptions": seen[ev.RequestPreempted],
            "deferrals": seen[ev.RequestDeferred],
            "deferrals_ended": dict(self._deferrals_ended),
            "loads_voided": self._loads_voided,
            "transfers_planned": {name: tally.planned for name, tally in tallies.items()},
            "transfers_ended": {name: dict(tally.ended) for name, tally in tallies.items()},
            "imports_ended": dict(self._imports_ended),
            "transfers_abandoned": {name: tally.abandoned for name, tally in tallies.items()},
            "transfers_flushed": self._transfers_flushed,
            "reports_rejected": dict(self._rejected_reports),
            "resets": seen[ev.CacheReset],
            "restarts": seen[ev.Restarted],
            "events": {kind.__name__: seen[kind] for kind in COUNTED_KINDS},
            "log_events_dropped": self.log_health()[0],
            "allocation_blocks": histogram("allocation_blocks", self._allocations),
            "deferral_ticks": histogram("deferral_ticks", self._deferral_ticks),
            "deferral_seconds": self._deferral_seconds.value(),
            **{name: {way: copied[way][name] for way in copied} for name in copied[OF_STORES]},
        }

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
        if self._waiting:
            self._end_waits(BY_PREEMPTION, event)

    def _finished(self, event: ev.RequestFinished) -> None:
        if event.request in self._copies:
            self._copies.remove(event.request)
            return
        if event.aborted:
            self._aborted_requests += 1
        else:
            self._finished_requests += 1
        if event.hand_over in self._hand_overs_ended:
            self._hand_overs_ended[event.hand_over] += 1
        if self._waiting:
            self._end_waits(BY_FINISH, event)

    def _matched(self, event: ev.HitMatched) -> None:
        if event.missed is not None:
            self._key_bytes += len(event.missed)

    def _hint_answered(self, event: ev.HintAnswered) -> None:
        self._hints[event.outcome.value] += 1

    def _admitted(self, event: ev.RequestAdmitted) -> None:
        if event.missed is not None:
            self._key_bytes += len(event.missed)
        if event.resumed:
            return
        on_device, on_host = event.on_device or 0, event.on_host or 0
        slots = len(self.ledger.requests[event.request].pins) if event.on_host != 0 else 0
        self._blocks_matched += slots
        self._hits += slots > 0
        self._misses += slots == 0
        if event.asked is not None:
            self._on_device += on_device
            self._on_host += on_host
            self._nowhere += max(0, event.asked - on_device - on_host)

    def _deferred(self, event: ev.RequestDeferred) -> None:
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
            self._deferrals_ended[how] += 1
            self._deferral_ticks[ticks] += 1
            # The wall clock may have been set back meanwhile.
            self._deferral_seconds.observe(max(0, event.wall_ns - wall_ns) / 1e9)

    def _slow_hit(self, event: ev.SlowHitFound) -> None:
        self._slow_hits["declined" if event.declined else "loaded"] += 1

    # Keys and blocks.

    def _recalled(self, event: ev.KeysRecalled) -> None:
        self._keys_recalled += len(event.keys)
        self._key_bytes += len(b"".join(event.keys))

    def _offers_counted(self, event: ev.OffersCounted) -> None:
        self._key_bytes += len(b"".join(event.keys))

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        slots = event.slots
        self._blocks_evicted += len(slots) if type(slots) is tuple else count(slots)

    def _skipped(self, event: ev.StoreSkipped) -> None:
        self._skipped_blocks[event.reason] += len(event.keys)
        if event.reason is SkipReason.POOL_FULL:
            self._allocation_failures += max(1, len(event.owners))
        self._key_bytes += len(b"".join(event.keys))

    # Transfers.

    def _store_planned(self, event: ev.StorePlanned) -> None:
        self._key_bytes += len(b"".join(event.keys))
        self._stores.planned += 1
        record = self.ledger.transfers[event.seq]
        blocks = len(record.slots) * self.ledger.config.blocks_per_chunk
        self._flights[event.seq] = _Flight(self._stores, record, blocks, bool(event.source))
        if not event.source:
            self._allocations[len(record.slots)] += 1

    def _load_planned(self, event: ev.LoadPlanned) -> None:
        if event.voided:
            self._loads_voided += 1
        else:
            tally = self._copies_out if event.target else self._loads
            tally.planned += 1
            record = self.ledger.transfers[event.seq]
            self._flights[event.seq] = _Flight(tally, record, len(record.device_blocks))

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
                _complete(flight, event)
            self._count_end(flight, _outcome(flight))
        if self._waiting:
            self._end_waits(BY_TRANSFER, event)

    def _reset(self, event: ev.CacheReset) -> None:
        for id, flight in list(self._flights.items()):
            if id not in self.ledger.transfers:
                del self._flights[id]
                self._count_end(flight, _outcome(flight))
            elif flight.record.epoch == event.epoch - 1:
                flight.tally.abandoned += 1
        if self._waiting:
            self._end_waits(BY_TRANSFER, event)

    def _restarted(self, _event: ev.Restarted) -> None:
        """Count all transfers and waits of the last process as cut off."""
        for flight in self._flights.values():
            self._count_end(flight, CUT_OFF)
        self._flights.clear()
        self._copies.clear()
        self._deferrals_ended[CUT_OFF] += len(self._waiting)
        self._waiting.clear()

    def _count_end(self, flight: _Flight, outcome: str) -> None:
        flight.tally.ended[outcome] += 1
        if flight.imported:
            self._imports_ended[outcome] += 1
            if outcome == OUTCOMES[COMPLETED]:
                self._blocks_imported += len(flight.record.slots)

    def _flushed(self, event: ev.FlushRequested) -> None:
        self._transfers_flushed += len(event.transfers)

    def _rejected(self, event: ev.ReportRejected) -> None:
        self._rejected_reports[event.reason] += 1


def _outcome(flight: _Flight) -> str:
    return OUTCOMES[flight.record.word & STATE_MASK]


def _complete(flight: _Flight, event: OffloadingEvent) -> None:
    tally = flight.tally
    tally.blocks[len(flight.record.slots)] += 1
    tally.device_blocks[flight.device_blocks] += 1
    tally.steps[event.step - flight.step] += 1
    nanoseconds = event.wall_ns - flight.wall_ns
    # The wall clock may have been set back between submission and end.
    if nanoseconds > 0:
        tally.nanoseconds += nanoseconds
    tally.seconds[bisect_left(SECONDS_BOUNDS, nanoseconds / 1e9)] += 1


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
