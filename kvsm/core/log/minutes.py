"""Count what happens in each minute of a segment.

The writer counts while it writes, and saves the counts of each segment in the head of the next one. So a
first look at the log of a day reads heads, and the events of the last segment only. If a segment has no saved
counts, a reader counts its events (`counts_of`). Writer and reader get the same counts, because these depend
only on the events of the segment. So the duration of a copy that was submitted in an earlier segment is
unknown.

A segment of a quiet engine may last for days. So each part of its time is one minute long or, if there would
be more than `MOST_PARTS` parts, two, four, eight, ... minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvsm import events as ev
from kvsm.core.log.frames import SegmentHead
from kvsm.core.log.reader import Segment
from kvsm.events import Direction, OffloadingEvent
from kvsm.ids import count

MINUTE_NS = 60_000_000_000

MOST_PARTS = 120
"""The most parts into which the time of a segment is divided."""

STEPS_PER_OCTAVE = 4
"""Number of buckets of durations from one power of two to the next: their bounds differ by at most 25 %."""


class CopyCounts(msgspec.Struct, array_like=True):
    """Copies of one rank in one direction.

    failed: reports of failed copies.
    durations: bucket (`bucket_of`) of the time from submission to report -> number of reports. Reports whose
        submission is in an earlier segment are not counted here.
    """

    reports: int = 0
    failed: int = 0
    durations: dict[int, int] = {}


class Minute(msgspec.Struct, array_like=True, kw_only=True):
    """Counts of the events in one part of a log's time.

    lookups: lookups with which requests were first admitted. asked, on_device, on_host: their full blocks,
        and how many of these each tier had, as far as the log says so.
    stored, loaded, copied_out: blocks of planned stores, of planned loads to the device, and of planned
        copies to other places.
    skipped: reason (`SkipReason`) -> blocks that were offered and not stored.
    rejected: rejected reports. lost: lost transfers.
    set_back_ns: the largest step back of the clock (ns).
    copies: (direction as in `Direction`, rank) -> copies.
    """

    events: int = 0
    arrived: int = 0
    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    deferred: int = 0
    lookups: int = 0
    asked: int = 0
    on_device: int = 0
    on_host: int = 0
    stored: int = 0
    loaded: int = 0
    copied_out: int = 0
    evicted: int = 0
    skipped: dict[str, int] = {}
    rejected: int = 0
    lost: int = 0
    resets: int = 0
    restarts: int = 0
    set_back_ns: int = 0
    copies: dict[tuple[int, int], CopyCounts] = {}

    def add(self, other: Minute) -> None:
        """Add the counts of another part of the time."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.set_back_ns = max(self.set_back_ns, other.set_back_ns)
        for reason, blocks in other.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + blocks
        for key, theirs in other.copies.items():
            mine = self.copies.setdefault(key, CopyCounts())
            mine.reports += theirs.reports
            mine.failed += theirs.failed
            for bucket, times in theirs.durations.items():
                mine.durations[bucket] = mine.durations.get(bucket, 0) + times


_SUMS = [name for name in Minute.__struct_fields__ if name not in ("skipped", "set_back_ns", "copies")]


def bucket_of(duration_ns: int) -> int:
    """Return the bucket of a duration: about `STEPS_PER_OCTAVE` times its binary logarithm."""
    if duration_ns < STEPS_PER_OCTAVE:
        return 0
    octave = duration_ns.bit_length() - 3
    return STEPS_PER_OCTAVE * octave + (duration_ns >> octave) - STEPS_PER_OCTAVE


def bucket_start_ns(bucket: int) -> int:
    """Return the shortest duration in a bucket (ns)."""
    octave, step = divmod(bucket, STEPS_PER_OCTAVE)
    return (STEPS_PER_OCTAVE + step) << octave if bucket else 0


class SegmentMinutes(msgspec.Struct, array_like=True):
    """Counts of a segment.

    first, last: its first event, and the last one that was counted.
    began_ns, ended_ns: wall times of these two events (Unix time in ns).
    minutes: length of each part (minutes): a power of two.
    parts: number of a part -> its counts. Part n begins n * `minutes` minutes after 1970 began.
    """

    first: int
    last: int
    began_ns: int = 0
    ended_ns: int = 0
    minutes: int = 1
    parts: dict[int, Minute] = {}

    def widen(self) -> None:
        """Double the length of the parts."""
        parts, self.parts = self.parts, {}
        for number, part in parts.items():
            if number // 2 in self.parts:
                self.parts[number // 2].add(part)
            else:
                self.parts[number // 2] = part
        self.minutes *= 2


class MinuteCounter:
    """Counts the events of one segment, in order.

    minutes: the counts so far.
    is_whole: whether all events up to `minutes.last` are counted, once each. An interrupt may prevent that.
    """

    def __init__(self, first: int) -> None:
        """first: the number of the segment's first event."""
        self.is_whole = True
        self.minutes = SegmentMinutes(first, first - 1)
        self._part = Minute()
        self._from_ns = self._until_ns = self._last_ns = 0
        self._flights: dict[int, tuple[int, int]] = {}
        """Live transfer -> its direction, and the wall time of its submission (ns); 0: not submitted."""
        self._copies_out: set[str] = set()
        """Live requests that represent copies to or from another tier."""

    def count(self, events: Sequence[OffloadingEvent]) -> None:
        """Count these events, which follow the ones before."""
        was_whole = self.is_whole and events[0].seq == self.minutes.last + 1
        self.is_whole, last_ns = False, self._last_ns
        part, until_ns, method_of = self._part, self._until_ns, _COUNTED.get
        begin = 0  # The events of `part` before this place are counted.
        for place, event in enumerate(events):
            now_ns = event.wall_ns
            if not last_ns <= now_ns < until_ns:
                part.events += place - begin
                self._turn(last_ns, now_ns)
                part, until_ns, begin = self._part, self._until_ns, place
            last_ns = now_ns
            if (method := method_of(type(event))) is not None:
                method(self, event)
        part.events += len(events) - begin
        self._last_ns, self.minutes.ended_ns, self.minutes.last = last_ns, last_ns, events[-1].seq
        self.is_whole = was_whole

    def _turn(self, last_ns: int, now_ns: int) -> None:
        """Continue in the part of the time that has `now_ns`. The time of the last event is `last_ns`."""
        found = self.minutes
        if not found.parts:
            found.began_ns = last_ns = now_ns
        width_ns = found.minutes * MINUTE_NS
        number = now_ns // width_ns
        while number not in found.parts and len(found.parts) >= MOST_PARTS:
            found.widen()  # Parts that are far from each other become no fewer at first.
            width_ns, number = 2 * width_ns, number // 2
        self._part = found.parts.setdefault(number, Minute())
        self._from_ns, self._until_ns = number * width_ns, (number + 1) * width_ns
        self._part.set_back_ns = max(self._part.set_back_ns, last_ns - now_ns)

    def _arrived(self, event: ev.RequestArrived) -> None:
        if event.target:
            self._copies_out.add(event.request)
        else:
            self._part.arrived += 1

    def _finished(self, event: ev.RequestFinished) -> None:
        if event.request in self._copies_out:
            self._copies_out.remove(event.request)
            return
        self._part.finished += 1
        self._part.aborted += event.aborted

    def _preempted(self, _event: ev.RequestPreempted) -> None:
        self._part.preempted += 1

    def _deferred(self, _event: ev.RequestDeferred) -> None:
        self._part.deferred += 1

    def _admitted(self, event: ev.RequestAdmitted) -> None:
        if event.resumed:
            return
        part = self._part
        part.lookups += 1
        if event.asked is not None:
            part.asked += event.asked
            part.on_device += event.on_device or 0
            part.on_host += event.on_host or 0

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        self._part.evicted += count(event.slots)

    def _store_planned(self, event: ev.StorePlanned) -> None:
        self._part.stored += len(event.keys)
        self._flights[event.seq] = _STORE, 0

    def _load_planned(self, event: ev.LoadPlanned) -> None:
        if event.target:
            self._part.copied_out += count(event.slots)
        else:
            self._part.loaded += count(event.slots)
        if not event.voided:
            self._flights[event.seq] = _LOAD, 0

    def _skipped(self, event: ev.StoreSkipped) -> None:
        skipped = self._part.skipped
        skipped[event.reason] = skipped.get(event.reason, 0) + len(event.keys)

    def _submitted(self, event: ev.TransfersSubmitted) -> None:
        flights = self._flights
        for transfer in event.transfers:
            if transfer in flights:
                flights[transfer] = flights[transfer][0], event.wall_ns

    def _reported(self, event: ev.WorkerReported) -> None:
        direction, submitted_ns = self._flights.get(event.transfer, (_UNKNOWN, 0))
        key = direction, event.worker
        copies = self._part.copies.get(key)
        if copies is None:
            copies = self._part.copies[key] = CopyCounts()
        copies.reports += 1
        copies.failed += not event.good
        if submitted_ns and event.wall_ns >= submitted_ns:
            bucket = bucket_of(event.wall_ns - submitted_ns)
            copies.durations[bucket] = copies.durations.get(bucket, 0) + 1

    def _rejected(self, _event: ev.ReportRejected) -> None:
        self._part.rejected += 1

    def _lost(self, _event: ev.TransferLost) -> None:
        self._part.lost += 1

    def _reset(self, _event: ev.CacheReset) -> None:
        self._part.resets += 1

    def _restarted(self, _event: ev.Restarted) -> None:
        self._part.restarts += 1
        self._flights.clear()
        self._copies_out.clear()


_STORE, _LOAD, _UNKNOWN = int(Direction.STORE), int(Direction.LOAD), -1

_COUNTED: dict[type[OffloadingEvent], Callable[[MinuteCounter, Any], None]] = {
    ev.RequestArrived: MinuteCounter._arrived,
    ev.RequestPreempted: MinuteCounter._preempted,
    ev.RequestFinished: MinuteCounter._finished,
    ev.RequestDeferred: MinuteCounter._deferred,
    ev.RequestAdmitted: MinuteCounter._admitted,
    ev.BlocksEvicted: MinuteCounter._evicted,
    ev.StorePlanned: MinuteCounter._store_planned,
    ev.StoreSkipped: MinuteCounter._skipped,
    ev.LoadPlanned: MinuteCounter._load_planned,
    ev.TransfersSubmitted: MinuteCounter._submitted,
    ev.WorkerReported: MinuteCounter._reported,
    ev.ReportRejected: MinuteCounter._rejected,
    ev.TransferLost: MinuteCounter._lost,
    ev.CacheReset: MinuteCounter._reset,
    ev.Restarted: MinuteCounter._restarted,
}
"""The method that counts what is specific to a kind of event. All other kinds are only counted as events."""


def counts_of(segment: Segment) -> SegmentMinutes:
    """Count the events of a segment. Raises as `Segment.batches` does."""
    counter = MinuteCounter(segment.head.seq + 1)
    for batch in segment.batches():
        counter.count(batch)
    return counter.minutes


class WrittenMinutes:
    """Counts the events of the segment that a writer fills, and of the next one while it is being opened."""

    def __init__(self, first: int) -> None:
        """first: the number of the segment's first event."""
        self._filled = MinuteCounter(first)
        self._opened: MinuteCounter | None = None

    def count(self, events: Sequence[OffloadingEvent]) -> None:
        """Count events that were written."""
        self._filled.count(events)
        if self._opened is not None:
            self._opened.count(events)

    def open(self, first: int) -> bytes:
        """Begin to count for a new segment too, whose first event is `first`. Returns the field `before` of
        its head: the counts of the segment that is filled now. Empty if an interrupted call has left events
        uncounted; then readers count the events of that segment.
        """
        self._opened = MinuteCounter(first)
        return encode_counts(self._filled.minutes) if self._filled.is_whole else b""

    def fill_new(self) -> None:
        """Note that the writer fills the new segment from now on."""
        if self._opened is not None:
            self._filled, self._opened = self._opened, None

    def give_up_new(self) -> None:
        """Note that no segment is being opened any more."""
        self._opened = None


_DECODER = msgspec.msgpack.Decoder(SegmentMinutes)


def encode_counts(counts: SegmentMinutes) -> bytes:
    """Encode counts for the field `before` of a head."""
    return msgspec.msgpack.encode(counts)


def counts_before(head: SegmentHead, first: int) -> SegmentMinutes | None:
    """Return the counts that a head has of the segment before it; None if it has none of this segment, or
    none that a writer can have left.

    first: the first event of the segment before it.
    """
    try:
        found = _DECODER.decode(head.before)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return found if (found.first, found.last) == (first, head.seq) and _is_possible(found) else None


def _is_possible(found: SegmentMinutes) -> bool:
    """Whether a writer can have counted this. Sums of such counts and times of such parts fit in 64 bits."""
    parts, width = found.parts, found.minutes
    if width < 1 or width & (width - 1) or len(parts) > MOST_PARTS:
        return False
    if any(not -_MOST_NS < part * width * MINUTE_NS < _MOST_NS for part in parts):
        return False
    if sum(part.events for part in parts.values()) != found.last - found.first + 1:
        return False
    return all(map(_is_possible_part, parts.values()))


def _is_possible_part(part: Minute) -> bool:
    counts = [getattr(part, name) for name in _SUMS]
    counts += part.skipped.values()
    for copies in part.copies.values():
        counts += (copies.reports, copies.failed, *copies.durations.values())
        if not all(0 <= bucket <= _LAST_BUCKET for bucket in copies.durations):
            return False
    return part.events > 0 and part.set_back_ns >= 0 and all(0 <= one <= _MOST_COUNTED for one in counts)


_MOST_NS = 1 << 63
_MOST_COUNTED = 1 << 40
_LAST_BUCKET = bucket_of(1 << 64)
