"""Reading the log: streaming one frame at a time, from the start, from a segment, or live.

A reader changes nothing on disk and holds one frame in memory. It yields what was written, in order and
without holes. Where it cannot, it says so:

- Bytes are not the bytes that were written: `LogDamaged`, with file, offset and event number.
- The end is torn, by a crash in the middle of a write: it is cut, and `LogReader.torn` says where.
- A failed write lost events: `LogReader.broken_from` and `LogReader.gaps`. Behind a gap, only the next
  segment's snapshot has the state. So `segments()` yields that segment with its `gap`; `batches`, `events`
  and `follow` raise `LogGap` there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kvsm.errors import LogDamaged, LogError
from kvsm.events import OffloadingEvent
from kvsm.log.frames import (
    PREAMBLE_BYTES,
    Frame,
    SegmentHead,
    Torn,
    decode_events,
    decode_head,
    first_event,
    read_frame,
    read_mark,
    read_preamble,
    segment_paths,
)


class LogGap(LogError):
    """A failed write lost the events `first` to `last`; the log goes on after them."""

    def __init__(self, directory: Path, first: int, last: int) -> None:
        self.first, self.last = first, last
        super().__init__(
            f"{directory}: events {first} to {last} are not in the log (a write failed); "
            f"the segment of event {last + 1} opens with a snapshot from which to go on"
        )


class Segment:
    """One segment of a log, and a cursor in it.

    path: its file.
    head: its first record.
    gap: the (first, last) events lost before it, or None.
    torn: its unfinished end, or None; known when `batches` has ended.
    """

    def __init__(self, path: Path, head: SegmentHead, offset: int, gap: tuple[int, int] | None) -> None:
        self.path, self.head, self.gap = path, head, gap
        self.torn: Torn | None = None
        self._offset, self._next, self._ended = offset, head.seq + 1, False

    def batches(self) -> Iterator[list[OffloadingEvent]]:
        """The events, one list a frame. A second call continues where the first ended."""
        path = str(self.path)
        with _opened(self.path) as file:
            file.seek(self._offset)
            while isinstance(frame := read_frame(file, path, self._offset, self._next), Frame):
                events = decode_events(frame, path, self._offset)
                self._offset, self._next = frame.end, self._next + frame.event_count
                yield events
            self.torn, self._ended = frame, True

    def events(self) -> Iterator[OffloadingEvent]:
        """The events one by one."""
        for batch in self.batches():
            yield from batch

    def lost_after(self, successor: int | None) -> int | None:
        """The first event lost after this segment, or None.

        successor: the first event of the next segment; None if there is none.

        Raises `LogDamaged` if this segment was read to its end, and ends with the wrong event.
        """
        with _opened(self.path) as file:
            mark = read_mark(file, str(self.path), self._next)
        if self._ended and self.torn is not None and successor is not None:
            raise _ends_early(self.torn)
        end = successor if mark is None else mark
        if self._ended and end is not None and self._next != end:
            reason = f"its last event is {self._next - 1}, and it should be {end - 1}"
            raise LogDamaged(str(self.path), self._offset, min(self._next, end), reason)
        return mark


class LogReader:
    """A log, to be read. Raises `LogError` if there is none in `directory`.

    The attributes tell of what the last pass has read.

    torn: the unfinished end that was cut, or None.
    broken_from: the first event that a failed write lost, or None.
    gaps: the (first, last) events lost, for each time that the log went on.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.torn: Torn | None = None
        self.broken_from: int | None = None
        self.gaps: list[tuple[int, int]] = []
        self._paths()

    @property
    def head(self) -> SegmentHead:
        """Head of the oldest segment. Raises `LogError` if its first record is torn."""
        opened = _open_segment(self._paths()[0], None)
        if isinstance(opened, Torn):
            raise LogError(f"{opened.path}: cut in its first record; there is nothing to read in this log")
        return opened.head

    def segments(self, holding: int | None = None) -> Iterator[Segment]:
        """The segments in order. Read a segment before you ask for the next.

        holding: begin with the segment that has this event; None: with the oldest.

        Restore `segment.head.snapshot` of the first segment, and of each with a `gap`. Then apply
        `segment.batches()`.
        """
        self._reset()
        paths = self._paths(holding)
        gap = None
        for path, successor in zip(paths, [*paths[1:], None], strict=True):
            opened = _open_segment(path, gap)
            if isinstance(opened, Torn):
                if successor is not None:
                    raise _ends_early(opened)
                self.torn = opened
                return
            yield opened
            gap = self._leave(opened, successor)

    def batches(self) -> Iterator[list[OffloadingEvent]]:
        """All events, one list a frame: the fast path. Raises `LogGap` at a gap."""
        for segment in self.segments():
            if segment.gap is not None:
                raise LogGap(self.directory, *segment.gap)
            yield from segment.batches()

    def events(self) -> Iterator[OffloadingEvent]:
        """All events one by one. Raises `LogGap` at a gap."""
        for batch in self.batches():
            yield from batch

    def follow(
        self, poll_seconds: float, stop: Callable[[], bool], holding: int | None = None
    ) -> Iterator[OffloadingEvent]:
        """All events, and then what a live writer appends, across segments. Waits for what is unfinished.

        poll_seconds: how often to look again.
        stop: when it returns true, this ends after what was written by then.
        holding: as in `segments`.

        Raises `LogGap` at a gap; continue with `holding=gap.last + 1`.
        """
        self._reset()
        path = self._paths(holding)[0]
        opened: Segment | Torn | None = None
        while True:
            # Ask before reading the segment: then everything written by now is read, and a segment that has a
            # successor is complete.
            stopping = stop()
            successor = next((later for later in self._paths() if later > path), None)
            if not isinstance(opened, Segment):
                opened = _open_segment(path, None)
            if isinstance(opened, Segment):
                yield from opened.events()
            if successor is not None:
                if isinstance(opened, Torn):
                    raise _ends_early(opened)
                gap = self._leave(opened, successor)
                if gap is not None:
                    raise LogGap(self.directory, *gap)
                path, opened = successor, None
            elif stopping:
                self.torn = opened if isinstance(opened, Torn) else opened.torn
                return
            else:
                time.sleep(poll_seconds)

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

    def _reset(self) -> None:
        self.torn, self.broken_from, self.gaps = None, None, []

    def _leave(self, segment: Segment, successor: Path | None) -> tuple[int, int] | None:
        """Note how a segment ended. Returns the gap between it and the next one, or None."""
        following = None if successor is None else first_event(successor)
        lost = segment.lost_after(following)
        self.torn = segment.torn
        if lost is None:
            return None
        self.broken_from = lost if self.broken_from is None else self.broken_from
        if following is None:
            return None
        self.gaps.append((lost, following - 1))
        return self.gaps[-1]


def _open_segment(path: Path, gap: tuple[int, int] | None) -> Segment | Torn:
    """Open a segment and read its head; `Torn` if the file ends before the head does."""
    name, first = str(path), first_event(path)
    with _opened(path) as file:
        torn = read_preamble(file, name, first)
        if torn is not None:
            return torn
        frame = read_frame(file, name, PREAMBLE_BYTES, first)
        if frame is None:
            return Torn(name, PREAMBLE_BYTES, first, 0)
        if isinstance(frame, Torn):
            return frame
        return Segment(path, decode_head(frame, name, PREAMBLE_BYTES), frame.end, gap)


def _ends_early(torn: Torn) -> LogDamaged:
    reason = "the segment ends in an unfinished record, and it is not the last one"
    return LogDamaged(torn.path, torn.offset, torn.seq, reason)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise LogError(
            f"{path}: gone while the log was read; retention (max_bytes) may have dropped it"
        ) from None
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error}") from error
