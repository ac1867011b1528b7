"""Rebuilding a ledger from a log: all of it, or up to an event or a step.

A whole replay folds every event that is kept. To get the state at one point, the fold starts from the nearest
snapshot before that point. Both stream: one frame of events is in memory at a time. An "entry" is one slot
named in one event.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, get_type_hints

import msgspec

from kvsm.core.ledger import Ledger
from kvsm.core.ledger.invariants import check_ledger
from kvsm.core.ledger.snapshot import is_saved_as, restore_foreign, saved_step
from kvsm.core.log import LogEnd, LogGap, LogReader, Segment, Torn, stopped_by, told_stop
from kvsm.core.log.trust import Trust
from kvsm.errors import ConfigError, InvalidEvent, LogDamaged, LogError
from kvsm.events import KINDS, OffloadingEvent
from kvsm.ids import Ids, MalformedIds, count, unpack
from kvsm.states import machines_digest


class Rebuilt(NamedTuple):
    """A rebuilt ledger, and how many events and entries were folded, from event `first` on."""

    ledger: Ledger
    first: int
    events: int
    entries: int
    seconds: float
    condition: LogCondition


class LogCondition(msgspec.Struct, frozen=True):
    """The state of a log besides its events, as a reader found it.

    torn: the unfinished end that was cut, or None. A crash leaves one, so it is legal.
    broken_from: the first event that a failed write lost, or None.
    gaps: (first, last) lost events of each gap after which the log continues.
    other_machines: a kvsm with other state machine tables wrote the log, so a fold may give another state
        than the live one.
    end: how the log ends.
    error: the error with which the log was closed, or None.
    missing: (first, last) events of the oldest segments, if these were deleted but not by retention; or None.
    stopped_by: the signal that asked the process to end before it closed the log; empty if none is recorded.
    missing_from: the first event of the newest segments, if these are missing; or None.
    """

    torn: Torn | None
    broken_from: int | None
    gaps: tuple[tuple[int, int], ...]
    other_machines: bool
    end: LogEnd = LogEnd.NOT_REACHED
    error: str | None = None
    missing: tuple[int, int] | None = None
    stopped_by: str = ""
    missing_from: int | None = None

    @property
    def complete(self) -> bool:
        """Whether no event before the end of the log is missing."""
        lost = self.broken_from, self.missing, self.missing_from
        return not self.gaps and all(part is None for part in lost)

    def notes(self) -> list[str]:
        """Return messages for the user, one line each."""
        notes = []
        if self.torn is not None:
            torn = self.torn
            notes.append(
                f"{torn.path}: unfinished end, cut at byte {torn.offset} ({torn.bytes_cut} bytes); "
                f"the last whole event is {torn.seq - 1}"
            )
        notes += [f"events {first} to {last} are not in the log: a write failed" for first, last in self.gaps]
        if self.missing is not None:
            first, last = self.missing
            notes.append(f"events {first} to {last} are not in the log: the first segments are missing")
        notes += self._end_notes()
        if self.other_machines:
            notes.append(
                "written by a kvsm with other machine tables: the replayed state may differ from the live one"
            )
        return notes

    def _end_notes(self) -> list[str]:
        """Return the messages about the end of the log that `notes` has not given yet."""
        if self.end is LogEnd.MISSING:
            return [f"events from {self.missing_from} on are not in the log: the last segments are missing"]
        if self.end is LogEnd.STOPPED:
            return [f"the log was closed after an error: {self.error}"]
        if self.end is LogEnd.BROKEN and self.gaps:
            return ["the last events are not in the log either: a write failed"]
        if self.end is LogEnd.BROKEN:
            return [f"the log is broken from event {self.broken_from} on: a write failed"]
        if self.end is LogEnd.OPEN and self.stopped_by:
            return [f"the log was not closed: {told_stop(self.stopped_by)}"]
        if self.end is LogEnd.OPEN and self.torn is None:
            why = "the engine was killed or still runs, or the end of the log is missing"
            return [f"the log was not closed: {why}"]
        return []


def condition_of(reader: LogReader) -> LogCondition:
    """Return the condition of the part of a log that was read."""
    condition = LogCondition(
        reader.torn,
        reader.broken_from,
        tuple(reader.gaps),
        reader.head.machines != machines_digest(),
        reader.end,
        reader.error,
        reader.missing,
        missing_from=reader.missing_from,
    )
    return with_stop(condition, reader.directory)


def with_stop(condition: LogCondition, directory: Path) -> LogCondition:
    """Read `stopped_by` again: the signal may come after the last event was read."""
    name = stopped_by(directory) if condition.end is LogEnd.OPEN else ""
    return msgspec.structs.replace(condition, stopped_by=name)


def entries(events: Iterable[OffloadingEvent]) -> int:
    """The number of entries in these events: one for each slot that an event names."""
    named = 0
    for event in events:
        if type(event) in _SLOT_FIELDS:
            for field in _SLOT_FIELDS[type(event)]:
                slots = getattr(event, field)
                named += len(slots) if type(slots) is tuple else count(slots)
    return named


_SLOT_FIELDS = {
    kind: [field for field in kind.__struct_fields__ if field in ("slots", "moved")]
    for kind in KINDS
    if "slots" in kind.__struct_fields__
}


def opening(segment: Segment) -> Ledger:
    """Return the ledger at the beginning of a segment.

    Admit the segment first (`Trust.admit`). Raises `LogDamaged` if its snapshot is not the state before its
    first event. The state may still violate a property: `go_on` refuses that.
    """
    head = segment.head
    if not head.snapshot and not head.seq:
        return Ledger(head.config)
    try:
        ledger = restore_foreign(head.snapshot, head.config)
    except ValueError as error:
        raise _wrong_head(segment, f"cannot be restored: {error}") from error
    if ledger.seq != head.seq:
        raise _wrong_head(segment, f"is of event {ledger.seq}, not {head.seq}")
    return ledger


def go_on(ledger: Ledger | None, segment: Segment, trust: Trust) -> Ledger:
    """Return the ledger to which a segment's events are applied.

    ledger: the state after the previous segment; None for the first segment. When following a live log, it
        may already include the first events of this segment.

    Raises `LogDamaged` if the snapshot in the head differs from the folded state or, at the start and after a
    gap, if it violates a property.
    """
    trust.admit(segment)
    if ledger is not None and segment.gap is None:
        if ledger.seq == segment.head.seq and not is_saved_as(ledger, segment.head.snapshot):
            raise _wrong_head(segment, "is not what the fold gives")
        return ledger
    ledger = opening(segment)
    for violation in check_ledger(ledger) if ledger.seq else ():
        raise _wrong_head(segment, f"breaks a property: {violation.property}: {violation.message}")
    return ledger


def gathered(segment: Segment) -> Iterator[list[OffloadingEvent]]:
    """Yield the events of a segment in batches of 256 or more: `Segment.batches` with small frames joined.

    If reading fails, the events before the error are yielded first.
    """
    events: list[OffloadingEvent] = []
    try:
        for batch in segment.batches():
            events += batch
            if len(events) >= _EVENTS_TOGETHER:
                yield events
                events = []
    except LogError:
        if events:
            yield events
        raise
    if events:
        yield events


_EVENTS_TOGETHER = 256


def _wrong_head(segment: Segment, what: str) -> LogDamaged:
    return LogDamaged(str(segment.path), 0, segment.head.seq + 1, f"the snapshot in its head {what}")


def rebuild(
    log: str | os.PathLike[str],
    *,
    seq: int | None = None,
    step: int | None = None,
    since: int | None = None,
    allow_policies: Collection[str] = (),
    max_slots: int | None = None,
) -> Rebuilt:
    """Rebuild the ledger after the last event, after event `seq`, or at the end of engine step `step`.

    since: start the fold at the segment that has this event, and fold to the last event. If the event is no
        longer kept, start at the oldest segment.
    allow_policies, max_slots: as in `Trust`.

    Raises `LogError` if there is no such point in the log, or if the log claims more than is allowed;
    `LogDamaged` for damage before that point; and `IllegalTransition` or `InvalidEvent` for an event that
    cannot follow (`verify_log` gives details).
    """
    if seq is not None and step is not None:
        raise ConfigError("give an event number or a step, not both")
    if since is not None and (seq is not None or step is not None):
        raise ConfigError("a fold since an event goes to the end of the log; leave out seq and step")
    trust = Trust(allow_policies, max_slots)
    with trust.guarded(log):
        return _rebuild(log, seq, step, since, trust)


def _rebuild(
    log: str | os.PathLike[str], seq: int | None, step: int | None, since: int | None, trust: Trust
) -> Rebuilt:
    began = time.perf_counter()
    reader = LogReader(log)
    holding = seq if step is None else _segment_of_step(reader, step)
    if since is not None:
        holding = max(since, reader.head.seq + 1)
    ledger: Ledger | None = None
    first = folded = named = 0
    stopped = False
    for segment in reader.segments(holding):
        ledger = go_on(ledger, segment, trust)
        first = first or ledger.seq + 1
        # Frames behind the requested point are not read.
        for batch in gathered(segment) if seq is None and step is None else segment.batches():
            wanted = batch if seq is None and step is None else _up_to(batch, seq, step)
            ledger.apply_all(wanted)
            folded += len(wanted)
            named += entries(wanted)
            stopped = len(wanted) < len(batch) or ledger.seq == seq
            if stopped:
                break
        if stopped:
            break
    if ledger is None:
        raise LogError(f"{log}: there is no whole event" + ("" if holding is None else f" from {holding} on"))
    _reached(reader, ledger, stopped, seq, step)
    return Rebuilt(ledger, first, folded, named, time.perf_counter() - began, condition_of(reader))


def _up_to(batch: list[OffloadingEvent], seq: int | None, step: int | None) -> list[OffloadingEvent]:
    if seq is not None:
        return batch[: seq - batch[0].seq + 1]
    return [event for event in batch if step is not None and event.step <= step]


def _segment_of_step(reader: LogReader, step: int) -> int | None:
    """Return the first event of the last segment that begins in step `step` or earlier, or None."""
    holding = None
    for segment in reader.segments():
        if _first_step(segment) > step:
            break
        holding = segment.head.seq + 1
    return holding


def _first_step(segment: Segment) -> int:
    """Return the engine step in which a segment begins."""
    try:
        return saved_step(segment.head.snapshot) if segment.head.snapshot else 0
    except msgspec.MsgspecError as error:
        raise _wrong_head(segment, f"cannot be restored: {error}") from error


def _reached(reader: LogReader, ledger: Ledger, stopped: bool, seq: int | None, step: int | None) -> None:
    """Raise `LogError` unless the requested event or step is in the log."""
    if seq is not None and ledger.seq != seq:
        for first, last in reader.gaps:
            if first <= seq <= last:
                raise LogGap(reader.directory, first, last)
        raise LogError(f"{reader.directory}: there is no event {seq}; the last one is {ledger.seq}")
    if step is not None and ledger.step > step:
        raise LogError(f"{reader.directory}: step {step} is not kept; the oldest step is {ledger.step}")
    if step is not None and ledger.step < step and not stopped:
        raise LogError(f"{reader.directory}: there is no step {step}; the last one is {ledger.step}")


class Moment(NamedTuple):
    """An event, the ledger right before it, and the event that follows (None at the end)."""

    ledger: Ledger
    event: OffloadingEvent
    following: OffloadingEvent | None


def walk(reader: LogReader, trust: Trust, holding: int | None = None) -> Iterator[Moment]:
    """Yield all events of a log in order. Apply each event to its ledger before you take the next one.

    holding: begin with the segment that has this event; None: with the oldest.

    After a gap the ledger is a new one, restored from the next segment's snapshot. Raises as `rebuild` does.
    """
    ledger: Ledger | None = None
    current: Segment | None = None
    opened: deque[Segment] = deque()

    def stream() -> Iterator[tuple[Segment, OffloadingEvent]]:
        for segment in reader.segments(holding):
            trust.admit(segment)  # Before its first event is read.
            opened.append(segment)
            for event in segment.events():
                yield segment, event

    for (segment, event), following in _with_next(stream()):
        while current is not segment:  # Segments without events are passed here.
            current = opened.popleft()
            ledger = go_on(ledger, current, trust)
        assert ledger is not None
        refuse_malformed(event)
        yield Moment(ledger, event, None if following is None else following[1])
    for current in opened:
        ledger = go_on(ledger, current, trust)


def refuse_malformed(event: OffloadingEvent) -> None:
    """Raise `InvalidEvent` if a batch of ids in the event is not in the form that `kvsm.ids.pack` writes."""
    for field in _ID_FIELDS[type(event)]:
        ids = getattr(event, field)
        if type(ids) is not tuple:
            try:
                unpack(ids)
            except MalformedIds as error:
                raise InvalidEvent(event.seq, f"{field}: {error}") from None


_ID_FIELDS = {
    kind: [name for name, hint in get_type_hints(kind, include_extras=True).items() if hint == Ids]
    for kind in KINDS
}
"""The fields of each kind that are batches of ids."""


def _with_next(
    stream: Iterator[tuple[Segment, OffloadingEvent]],
) -> Iterator[tuple[tuple[Segment, OffloadingEvent], tuple[Segment, OffloadingEvent] | None]]:
    """Yield each item with its successor or None. If the stream raises, the last item is yielded first."""
    previous = None
    while True:
        try:
            item = next(stream, None)
        except LogError:
            if previous is not None:
                yield previous, None
            raise
        if previous is not None:
            yield previous, item
        if item is None:
            return
        previous = item
