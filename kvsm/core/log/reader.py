"""Reads a log one frame at a time, from the start or from a segment. `follower.py` reads a live log.

A reader changes nothing on disk and holds one frame in memory. It yields the events that were written, in
order and without gaps, and reports exceptions:

- Damage (bytes differ from what was written): `LogDamaged`, with file, offset and event number.
- The end is torn, by a crash before a write was synced: it is cut, and `LogReader.torn` says where.
- The log was not closed, or its first or last segments are missing: `LogReader.end`, `LogReader.missing` and
  `LogReader.missing_from`.
- The log has several lives, because another process continued it: it reads as one log, and
  `LogReader.lives` says where each life began and how it ended.
- A failed write lost events: `LogReader.broken_from` and `LogReader.gaps`. After a gap, only the next
  segment's snapshot has the state. So `segments()` yields that segment with its `gap`; `batches` and `events`
  raise `LogGap` there.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kvsm.core.log.frames import (
    HEADER,
    MARK,
    MARK_OFFSET,
    PREAMBLE_BYTES,
    TAIL,
    EventDecoder,
    Frame,
    FrameReader,
    Mark,
    SegmentHead,
    SegmentTail,
    Torn,
    decode_head,
    decode_mark,
    decode_tail,
    first_event,
    has_mark,
    read_mark,
    read_preamble,
    required_mark,
    run_mark,
    segment_paths,
)
from kvsm.errors import LogDamaged, LogError
from kvsm.events import OffloadConfig, OffloadingEvent, Restarted


class LogEnd(str, Enum):
    """How the part of a log that was read ends."""

    NOT_REACHED = "not reached"
    """The reader has not reached the end."""

    OPEN = "open"
    """Not closed: the engine was killed or still runs, or the end of the log is missing."""

    MISSING = "missing"
    """The last segments are missing: the mark of the last one that is there names another one."""

    BROKEN = "broken"
    """A write failed, and the log ends there."""

    CLOSED = "closed"
    """The engine closed it. Another engine may continue it later."""

    STOPPED = "stopped"
    """The engine closed it with an error. Another engine may continue it later."""


class LogLife(NamedTuple):
    """A life of a log: the events of one process, and how it ended.

    life: its number, from 1 on. A life that wrote no event leaves a gap in the numbers.
    first, last: the range of its events that are kept and were read.
    end: how the life ended. `OPEN` for any life but the last means that its process was killed. `NOT_REACHED`
        if the end of this life was not read.
    error: the error with which it was closed, or None.
    """

    life: int
    first: int
    last: int
    end: LogEnd = LogEnd.NOT_REACHED
    error: str | None = None


class LogGap(LogError):
    """A failed write lost the events `first` to `last`; the log continues after them."""

    def __init__(self, directory: Path, first: int, last: int) -> None:
        self.first, self.last = first, last
        super().__init__(
            f"{directory}: events {first} to {last} are not in the log (a write failed); "
            f"the segment of event {last + 1} opens with a snapshot from which to go on"
        )


_NO_TAIL = "the segment ends its life, but its last record is missing"


class SegmentGone(LogError):
    """A segment was deleted or replaced while the log was read."""


class EventsTakenBack(LogError):
    """The writer lost events that had already been read: a sync failed after they were written."""


class Segment:
    """One segment of a log, and a cursor in it.

    path: its file.
    head: its first record.
    gap: the (first, last) events lost before it, or None.
    torn: its unfinished end, or None; valid once `batches` has ended.
    tail: its tail record, or None; valid once `batches` has ended.
    ended: whether `batches` has ended.
    check_claim: called with the configuration of each `Restarted` event, before the event is returned. It may
        raise. None: no check, for readers that do not fold the events. `Trust.admit` sets it.
    successor: the first event of the next segment, which may be missing; None if there is none. This segment
        ends before it, and must have all events up to there. `batches` looks for it until it has ended.
    """

    def __init__(
        self,
        path: Path,
        head: SegmentHead,
        offset: int,
        header: bytes,
        gap: tuple[int, int] | None,
        successor: int | None,
        seen: int = 0,
    ) -> None:
        """offset: of the first event frame (bytes). header: header of the head frame (bytes). seen: the last
        event that was read from the previous segment."""
        self.path, self.head, self.gap, self.successor, self._seen = path, head, gap, successor, seen
        self.torn: Torn | None = None
        self.tail: SegmentTail | None = None
        self.ended = False
        self.check_claim: Callable[[OffloadConfig], None] | None = None
        self._run_mark, self._next = run_mark(head.run, head.life), head.seq + 1
        self._offset, self._mark_data = offset, b""
        self._last_frame = PREAMBLE_BYTES, header
        """The offset of the last frame that was read, and its header. The writer may cut this frame again."""
        self._lost: int | None = None
        self._decoder = EventDecoder(head.schema)

    @property
    def last(self) -> int:
        """The last event that was read; at first, the last event before the segment."""
        return self._next - 1

    @property
    def mark(self) -> Mark:
        """The mark: before the last read in `batches` once it has ended, else now. Raises `LogDamaged`."""
        if not self.ended:
            with _opened(self.path) as file:
                return read_mark(file, str(self.path), self._next)
        return required_mark(self._mark_data, str(self.path), self._next)

    @property
    def offset(self) -> int:
        """The number of bytes of the file that were read, up to the end of the last event frame."""
        return self._offset

    def batches(self) -> Iterator[list[OffloadingEvent]]:
        """Yield the events, one list per frame. A second call continues where the first ended.

        Raises `EventsTakenBack` if events that were read are no longer in the log.
        """
        with _opened(self.path) as file:
            self._look_around(file)
            yield from self._read_on(file)
            while self._look_around(file):
                # The writer has ended the segment since. What it wrote before that has to be read, too.
                yield from self._read_on(file)
            if not self._goes_on():
                # A tail, events that the next segment has too, or bytes that were never synced may follow.
                file.seek(self._offset)
                self._next_frame(FrameReader(file, str(self.path), self._run_mark, complete=False))
            self.ended = True
            if self.last < self._seen:
                raise self._taken_back(self._seen)

    def _read_on(self, file: BinaryIO) -> Iterator[list[OffloadingEvent]]:
        """Yield the events from the cursor to the end. Moves the file's position."""
        self._check_kept(file)
        path, is_complete = str(self.path), self.successor is not None or any(self._mark_data)
        frames = FrameReader(file, path, self._run_mark, is_complete)
        file.seek(self._offset)
        while self._goes_on() and (frame := self._next_frame(frames)) is not None:
            events = self._decoder.decode(frame, path, self._last_frame[0])
            if events[0].seq > self._seen:
                if self.check_claim is not None:
                    for event in events:
                        if type(event) is Restarted:
                            self.check_claim(event.config)
                yield events

    def _look_around(self, file: BinaryIO) -> bool:
        """Read the mark, and look for the next segment. Returns whether either has changed since.

        What a writer wrote before them can be read after this call. Moves the file's position.
        """
        before = self._mark_data, self.successor
        file.seek(MARK_OFFSET)
        self._mark_data = file.read(MARK.size)
        if self.successor is None:
            mark = decode_mark(self._mark_data)
            self.successor = self._following() if mark is None or mark.successor is None else mark.successor
        return (self._mark_data, self.successor) != before

    def _following(self) -> int | None:
        return next((first_event(path) for path in segment_paths(self.path.parent) if path > self.path), None)

    def _goes_on(self) -> bool:
        """Whether to read the next event here. Events from `successor` on are read from the next segment."""
        return self.successor is None or self._next < self.successor

    def _next_frame(self, frames: FrameReader) -> Frame | None:
        """Return the next event frame and move past it. None if there is none; see `tail` and `torn` then."""
        frame, self.tail, self.torn = frames.read(self._offset, self._next), None, None
        if isinstance(frame, Torn):
            self.torn = frame
        elif frame is not None and frame.flags & TAIL:
            # The cursor stays before the tail: a writer that fails to mark the end cuts the tail again.
            self.tail = decode_tail(frame, str(self.path), self._offset, self.head.schema)
            self.torn = frames.end(frame.end, self._next)
        elif frame is not None and self._goes_on():
            self._last_frame = self._offset, frame.header
            self._offset, self._next = frame.end, self._next + frame.event_count
            if self.successor is not None and self._next > self.successor:
                reason = f"a frame goes on behind event {self.successor - 1}, where the next segment begins"
                raise LogDamaged(str(self.path), self._last_frame[0], self.successor, reason)
            return frame
        return None

    def events(self) -> Iterator[OffloadingEvent]:
        """The events one by one."""
        for batch in self.batches():
            yield from batch

    def lost_after(self, successor: int | None) -> int | None:
        """Return the first event lost after this segment, or None.

        successor: the first event of the next segment; None if there is none.

        Raises `LogDamaged` if this segment was read to its end and ends with the wrong event, or if it is
        marked as closed and has no tail.
        """
        mark = self.mark
        self._lost = lost = mark.lost
        if not self.ended:
            return lost
        end = (successor or self.successor) if lost is None else lost
        if end is not None and self._next < end:
            with _opened(self.path) as file:
                self._check_kept(file)
            reason = f"its last event is {self._next - 1}, and it should be {end - 1}"
            raise LogDamaged(str(self.path), self._offset, min(self._next, end), reason)
        if self.tail is None and mark.closed:
            raise LogDamaged(str(self.path), self._offset, self._next, _NO_TAIL)
        return lost

    def check_successor(self, life: int) -> None:
        """Raise `LogDamaged` unless a segment of this life may follow. Call `lost_after` first."""
        if life > self.head.life and self.torn is not None:
            raise _ends_early(self.torn)  # The writer of the new life cuts a torn end before it begins.
        if life > self.head.life:
            return  # The head of the next segment ends this life.
        if life < self.head.life:
            reason = f"this is life {self.head.life} of the log, and life {life} follows"
        elif not self.ended or self.tail is None:
            return
        else:
            reason = "the log was closed here, and another segment of this life follows"
        raise LogDamaged(str(self.path), self._offset, self._next, reason)

    def told_end(self) -> tuple[LogEnd, str | None]:
        """Return how the log ends after this segment, and the error, if any."""
        if self._lost is not None:
            return LogEnd.BROKEN, None
        if not self.ended:
            return LogEnd.NOT_REACHED, None
        return (LogEnd.OPEN, None) if self.tail is None else _end_in(self.tail)

    def _check_kept(self, file: BinaryIO) -> None:
        """Raise unless the last frame that was read is still in the file. Moves the file's position."""
        offset, header = self._last_frame
        file.seek(offset)
        if file.read(HEADER.size) == header:
            return
        if self.last == self.head.seq:
            raise SegmentGone(
                f"{self.path}: another writer went on with the log while it was read; read it again"
            )
        raise self._taken_back(self.last)

    def _taken_back(self, event: int) -> EventsTakenBack:
        return EventsTakenBack(
            f"{self.path}: event {event} was read, and its writer has lost it since (a sync failed); "
            f"read the log again"
        )


class LogReader:
    """Reads a log. Raises `LogError` if there is none in `directory`.

    The attributes describe the part of the log that the last pass has read.

    torn: the unfinished end that was cut, or None.
    broken_from: the first event that a failed write lost, or None.
    gaps: the (first, last) lost events of each gap after which the log continues.
    lives: the lives of the log, the oldest that is kept first.
    end: how the last life of the log ends.
    error: the error with which the log was closed, or None.
    missing: the (first, last) events of the oldest segments, if they were deleted but not by retention.
    missing_from: the first event of the newest segments, if these are missing; or None.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.torn: Torn | None = None
        self.broken_from: int | None = None
        self.gaps: list[tuple[int, int]] = []
        self.end = LogEnd.NOT_REACHED
        self.error: str | None = None
        self.missing: tuple[int, int] | None = None
        self.missing_from: int | None = None
        self.lives: list[LogLife] = []
        self._run: bytes | None = None
        self._left: Segment | None = None
        self._paths()

    @property
    def head(self) -> SegmentHead:
        """The head of the oldest segment. Raises `LogError` if that record is torn."""
        opened = _open_segment(self._paths()[0])
        if isinstance(opened, Torn):
            raise LogError(f"{opened.path}: cut in its first record; there is nothing to read in this log")
        return opened.head

    def segments(self, holding: int | None = None) -> Iterator[Segment]:
        """Yield the segments in order. Read each segment before you take the next one.

        holding: begin with the segment that has this event; None: with the oldest.

        Restore `segment.head.snapshot` of the first segment, and of each with a `gap`. Then apply
        `segment.batches()`.
        """
        left = deque(self._begin(holding))
        gap = None
        while left:
            path = left.popleft()
            opened = self._open(path, gap, left[0] if left else None)
            if isinstance(opened, Torn):
                self._note_end(opened)
                return
            yield opened
            if not left and (opened.successor is not None or not opened.ended):
                # A live writer has opened the next segment since the directory was listed.
                left.extend(later for later in self._paths() if later > path)
            gap = self._leave(opened, left[0] if left else None)

    def batches(self) -> Iterator[list[OffloadingEvent]]:
        """Yield all events, one list per frame. Faster than `events`. Raises `LogGap` at a gap."""
        for segment in self.segments():
            if segment.gap is not None:
                raise LogGap(self.directory, *segment.gap)
            yield from segment.batches()

    def events(self) -> Iterator[OffloadingEvent]:
        """Yield all events one by one. Raises `LogGap` at a gap."""
        for batch in self.batches():
            yield from batch

    def _paths(self, holding: int | None = None) -> list[Path]:
        paths = segment_paths(self.directory)
        if not paths:
            raise LogError(f"{self.directory}: no log here; a log is a directory of .kvsm segments")
        if holding is None:
            return paths
        start = sum(first_event(path) <= holding for path in paths) - 1
        if start < 0:
            oldest = first_event(paths[0])
            raise LogError(f"{self.directory}: event {holding} is not kept; the oldest one is {oldest}")
        return paths[start:]

    def _begin(self, holding: int | None) -> list[Path]:
        """Reset the attributes for a new pass. Returns the segments from the one with event `holding` on."""
        self.torn, self.broken_from, self.gaps = None, None, []
        self.end, self.error, self.missing = LogEnd.NOT_REACHED, None, None
        self.missing_from = None
        self._run, self._left, self.lives = None, None, []
        self._first = first_event(self._paths()[0])
        return self._paths(holding)

    def _open(self, path: Path, gap: tuple[int, int] | None, successor: Path | None) -> Segment | Torn:
        """Open the next segment. Its run must be that of the previous segment, its life the same or later."""
        seen = 0 if self._left is None else self._left.last
        opened = _open_segment(path, gap, successor, seen)
        if isinstance(opened, Segment):
            run = opened.head.run
            if self._run not in (None, run):
                reason = "this segment and the one before it belong to different runs"
                raise LogDamaged(str(path), PREAMBLE_BYTES, first_event(path), reason)
            self._run = run
            if self._left is not None:
                self._left.check_successor(opened.head.life)
            self._note_life(opened, opened.last)
        return opened

    def _note_life(self, segment: Segment, last: int) -> None:
        """Update `lives` with the life of this segment, read up to event `last`."""
        head = segment.head
        if not self.lives or self.lives[-1].life != head.life:
            if self.lives and self.lives[-1].last < self.lives[-1].first:
                self.lives.pop()  # That life wrote no event, and its segment was replaced.
            if self.lives and head.ended is not None:
                end, error = _end_in(head.ended)
                self.lives[-1] = self.lives[-1]._replace(end=end, error=error)
            self.lives.append(LogLife(head.life, head.seq + 1, head.seq))
        end, error = segment.told_end()
        self.lives[-1] = self.lives[-1]._replace(last=last, end=end, error=error)

    def _leave(self, segment: Segment, successor: Path | None) -> tuple[int, int] | None:
        """Note how a segment ended. Returns the gap between it and the next one, or None."""
        following = None if successor is None else first_event(successor)
        lost = segment.lost_after(following)
        self._left = segment
        unread = lost or following
        self._note_life(segment, segment.last if segment.ended or unread is None else unread - 1)
        if successor is None:
            self._note_end(segment)
        if lost is None:
            return None
        self.broken_from = lost if self.broken_from is None else self.broken_from
        if following is None:
            self.end = LogEnd.BROKEN
            return None
        self.gaps.append((lost, following - 1))
        return self.gaps[-1]

    def _note_end(self, last: Segment | Torn) -> None:
        """Note how the log ends, if its last segment was read to the end."""
        self.torn = last if isinstance(last, Torn) else last.torn
        if isinstance(last, Torn):
            self.end = LogEnd.OPEN
        elif last.ended:
            self.end, self.error = last.told_end()
            # For a large frame, retention may delete more than the head says. The tail is final.
            oldest = max(last.head.oldest, 1 if last.tail is None else last.tail.oldest)
            if oldest < self._first:
                self.missing = oldest, self._first - 1
            if last.successor is not None:
                self.end, self.error, self.missing_from = LogEnd.MISSING, None, last.successor
                if last.tail is None:
                    self.lives[-1] = self.lives[-1]._replace(end=LogEnd.MISSING)


def _end_in(tail: SegmentTail) -> tuple[LogEnd, str | None]:
    """Return how a life with this tail ended, and the error."""
    return (LogEnd.CLOSED if tail.error is None else LogEnd.STOPPED), tail.error


def _open_segment(
    path: Path, gap: tuple[int, int] | None = None, successor: Path | None = None, seen: int = 0
) -> Segment | Torn:
    """Open a segment and read its head; `Torn` if the file ends before the head does.

    successor: the next segment, or None. If there is one, this segment must be complete.
    seen: the last event that was read from the previous segment.
    """
    name, first = str(path), first_event(path)
    with _opened(path) as file:
        opening = _read_head(file, name, first, complete=successor is not None)
    if isinstance(opening, Torn):
        if successor is not None:
            raise _ends_early(opening)
        return opening
    head, frame = opening
    following = None if successor is None else first_event(successor)
    return Segment(path, head, frame.end, frame.header, gap, following, seen)


def _read_head(file: BinaryIO, path: str, first: int, complete: bool) -> tuple[SegmentHead, Frame] | Torn:
    """Read the preamble and the head of a segment; `Torn` if the file ends before the head does.

    complete: whether every byte of the segment must be there. It must be, too, if the segment has a mark.
    """
    version = read_preamble(file, path, first)
    if isinstance(version, Torn):
        return version
    frames = FrameReader(file, path, None, complete or has_mark(file))
    file.seek(PREAMBLE_BYTES)
    frame = frames.read(PREAMBLE_BYTES, first)
    assert frame is not None  # `read` never returns None for the head.
    return frame if isinstance(frame, Torn) else (decode_head(frame, path, PREAMBLE_BYTES, version), frame)


def _ends_early(torn: Torn) -> LogDamaged:
    reason = "the segment ends in an unfinished record, and it is not the last one"
    return LogDamaged(torn.path, torn.offset, torn.seq, reason)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise LogError(f"{path}: not a regular file; move it away")
        # O_NONBLOCK: the file may have been replaced by a pipe since the check.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise LogError(f"{path}: not a regular file; move it away")
            yield file
    except FileNotFoundError:
        raise SegmentGone(
            f"{path}: gone while the log was read; retention (max_bytes) may have dropped it"
        ) from None
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error}") from error
