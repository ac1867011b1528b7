"""Following a log while an engine writes it.

    follower = LogFollower("log")
    while not follower.closed:
        for news in follower.poll():  # Events written since the last poll. It does not wait for more.
            ...
        time.sleep(0.2)

A live log changes under its reader: the last frame is unfinished, a segment is completed and the next one
begins, retention (`max_bytes`) deletes the oldest segment, perhaps before it was read, and the writer dies. A
follower treats an unfinished end as not written yet. It cannot tell a dead writer from an idle one. If
another writer continues the log, the follower yields its events, even after a closed end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvsm.core.log.frames import Torn, first_event
from kvsm.core.log.reader import LogEnd, LogReader, Segment, SegmentGone
from kvsm.errors import LogError
from kvsm.events import OffloadingEvent


class News(NamedTuple):
    """Events of one segment, in order, written since the last poll.

    The first `News` of a segment has no events: it announces the segment and its head. If `segment.gap` is
    not None, the events of the gap cannot be read; only the snapshot in the head has the state behind it.
    """

    segment: Segment
    events: list[OffloadingEvent]


class LogFollower(LogReader):
    """Reads a log while it grows. The attributes of `LogReader` describe its current end.

    overtaken: (first, last) events of each range that retention deleted before it was read.
    """

    def __init__(self, directory: str | os.PathLike[str], holding: int | None = None) -> None:
        """holding: begin with the segment that has this event; None: with the oldest.

        Raises `LogError` if there is no log, or no such event.
        """
        super().__init__(directory)
        self.overtaken: list[tuple[int, int]] = []
        self._last_read = 0
        self._move_to(self._begin(holding)[0], None)

    @property
    def closed(self) -> bool:
        """Whether no events follow: the engine has closed the log, or its last segments are missing. Another
        engine may continue a log that was closed."""
        return self.end in (LogEnd.CLOSED, LogEnd.STOPPED, LogEnd.MISSING)

    def poll(self) -> Iterator[News]:
        """Yield what was written since the last call, without waiting for more. Call it again later.

        Raises `LogDamaged` for wrong bytes, and `LogError` if the log was deleted or replaced. Raises
        `EventsTakenBack` if the writer has lost events that were read: a sync failed after they were written.
        """
        while True:
            # Look for it before reading: a segment that has a successor is complete.
            successor = self._following()
            try:
                yield from self._news(successor)
                if successor is None and self._segment is not None and self._segment.successor is not None:
                    successor = self._following()  # It has got its name since, unless it is missing.
                if successor is None or self._segment is None:
                    self._note_end_so_far()
                    return
                gap = self._leave(self._segment, successor)
            except SegmentGone:
                successor, gap = self._overtake()
            self._move_to(successor, gap)

    def _following(self) -> Path | None:
        return next((later for later in self._paths() if later > self._path), None)

    def _move_to(self, path: Path, gap: tuple[int, int] | None) -> None:
        self._path, self._gap = path, gap
        self._segment: Segment | None = None
        self._last_read = max(self._last_read, first_event(path) - 1)

    def _news(self, successor: Path | None) -> Iterator[News]:
        if self._segment is None:
            opened = self._open(self._path, self._gap, successor)
            if isinstance(opened, Torn):
                return  # Its writer has not finished the head.
            self._segment = opened
            yield News(opened, [])
        self._segment.successor = None if successor is None else first_event(successor)
        for batch in self._segment.batches():
            self._last_read = batch[-1].seq
            yield News(self._segment, batch)

    def _overtake(self) -> tuple[Path, tuple[int, int] | None]:
        """Return where to continue if the current segment was deleted or replaced, and the gap before.

        This is the oldest segment that is left; or the same path, if the segment had no events when another
        writer replaced it.
        """
        oldest, *_ = paths = self._paths()
        if self._path in paths and self._last_read == first_event(self._path) - 1:
            return self._path, self._gap
        self._left = None
        if oldest <= self._path:
            raise LogError(f"{self.directory}: the log was deleted while it was read, and another began here")
        if first_event(oldest) == self._last_read + 1:
            return oldest, None
        self.overtaken.append((self._last_read + 1, first_event(oldest) - 1))
        return oldest, self.overtaken[-1]

    def _note_end_so_far(self) -> None:
        """Set the attributes for the current end. A torn end may be a record that is being written."""
        if self._segment is None:
            self.end, self.error = LogEnd.OPEN, None
            return
        self._note_life(self._segment, self._segment.last)
        self.missing_from = None
        self._note_end(self._segment)
        lost = self._segment.mark.lost
        if lost is not None:
            self.end, self.broken_from = LogEnd.BROKEN, lost
            self.lives[-1] = self.lives[-1]._replace(end=LogEnd.BROKEN)
