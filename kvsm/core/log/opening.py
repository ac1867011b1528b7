"""`Opening`: the next segment of a log, made while events still go to the one before it.

It takes several flushes, and the writer waits in none of them:

1. Each flush copies a part of the state after the last event (`StateCopy`).
2. A thread writes the head with this snapshot, then the events that were logged meanwhile. It syncs the file.
3. The thread copies the events that were logged since, until few are left.
4. The writer copies these few and gives the file its name. From then on events go to the new segment.

The compression stream restarts at the new segment's first event, so no copied frame needs an older one
(`event_stream.py`).

Before step 4 no reader sees the file, and if the process dies, no event is lost with it. After step 4 the new
segment has all events of the old segment from its own first event on. Events that were durable in the old
segment are durable in the new one, because after a power loss readers may find the new name and read there.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

from kvsm.core.ledger.state_copy import StateCopy
from kvsm.core.log.frames import copied
from kvsm.core.log.log_thread import LogThread
from kvsm.core.log.segment_file import SegmentFile, WritePlace
from kvsm.core.log.segment_maker import SegmentMaker

AT_ONCE_BYTES = 64 << 10
"""A snapshot of this size is written in less time than it takes to wake a thread."""

_COPY_NS = 200_000
"""How long a flush copies the state (ns). It may exceed this by one piece."""

_FEW_BYTES = 16 << 10
"""Events of this size are copied in a fraction of a millisecond."""

_PIECE_BYTES = 1 << 20
"""How many bytes of events are copied at a time, unless a frame is larger."""


class Opening:
    """A new segment that is made behind `place`. The writer's thread makes all calls but `run`.

    segment: the new segment.
    thread: runs `run`: writing the head, copying events, and syncing.
    waits: whether the writer waits for the disk. Then a small snapshot is written at once.
    before: for the head: the counts of the segment before.

    Each call may raise the error that prevents the segment, mostly an `OSError`.
    """

    def __init__(
        self,
        segment: SegmentFile,
        place: WritePlace,
        maker: SegmentMaker,
        thread: LogThread,
        waits: bool,
        before: bytes,
    ) -> None:
        self.segment, self._old = segment, place.segment
        self._maker, self._thread, self._waits = maker, thread, waits
        self._state: StateCopy | None = None
        self._begin = self._reached = place.offset
        """Offsets in the old segment (bytes): where the new one begins, and the end of what is copied."""
        self._goal = place
        self._head, self._event_bytes = maker.new_head(segment.first, before=before), 0
        self._snapshot: list[bytes] | None = None
        self._has_head = False
        self._failure: Exception | None = None

    def begin(self, snapshot: Callable[[], StateCopy]) -> None:
        """Make the file. snapshot: called for a copy of the state before the segment's first event."""
        self._maker.create(self.segment)
        self._state = snapshot()

    def overlap(self, place: WritePlace) -> int:
        """The number of bytes of events that both segments will have."""
        return place.offset - self._begin

    def needs_sync(self) -> bool:
        """Whether it waits until the old segment is durable up to the beginning of the new one."""
        return self._maker.syncs and self._has_head and self._old.synced.offset < self._begin

    def forbids_sync(self) -> bool:
        """Whether the old segment must not be synced: the new one, about to replace it, would be behind."""
        return self._has_head and not self.needs_sync()

    def go_on(self, place: WritePlace) -> bool:
        """Take the next step. Returns whether only `finish` is left."""
        self._thread.take_end()
        if self._failure is not None:
            raise self._failure
        if self._thread.is_busy or (self._snapshot is None and not self._take_snapshot()):
            return False
        assert self._snapshot is not None
        if self._has_head and self._keeps_up() and place.offset - self._reached <= _FEW_BYTES:
            return self._waits or not self.needs_sync()
        self._goal = place
        if self._waits and not self._has_head and sum(map(len, self._snapshot)) <= AT_ONCE_BYTES:
            self.run()
            self.end()
            return self.go_on(place)
        self._thread.begin(self)
        return False

    def complete(self, place: WritePlace) -> None:
        """Do everything but `finish`, and wait for the thread."""
        while not self.go_on(place):
            self._thread.wait()

    def finish(self, place: WritePlace) -> None:
        """Copy the last events, and give the segment its name."""
        self._goal = place
        self._copy_events()
        if self._maker.syncs and not self._waits:
            self.segment.publish()  # The next sync makes the name durable.
        else:
            if self._maker.syncs and self.segment.synced.seq < place.first - 1:
                self.segment.sync_to(place.first - 1)
            self._maker.publish(self.segment)

    def give_up(self) -> None:
        """Abandon the segment and delete its file."""
        self._thread.wait()
        if self._state is not None:
            self._state.drop()
        self.segment.discard()

    def run(self) -> None:
        """In the thread: write the head, then the events up to the goal."""
        try:
            if not self._has_head:
                assert self._snapshot is not None
                self._maker.write_head(self.segment, self._head, self._snapshot, self._event_bytes)
            self._copy_events()
            if self._maker.syncs and not (self._has_head and self._keeps_up()):
                self.segment.sync_to(self._goal.first - 1)
        except Exception as error:
            self._failure = error

    def end(self) -> None:
        """Note, in the writer's thread, that `run` has returned."""
        self._has_head = True

    def _take_snapshot(self) -> bool:
        """Copy more of the state. Once it is complete, make room for the head. Returns whether it is."""
        assert self._state is not None
        began = time.monotonic_ns()
        while not self._state.go_on():
            if time.monotonic_ns() - began >= _COPY_NS:
                return False
        snapshot = [*self._state.pieces()]
        self._state.drop()
        self._event_bytes = self._maker.plan(self.segment, self._head, snapshot)
        self._snapshot = snapshot
        return True

    def _keeps_up(self) -> bool:
        """Whether events durable in the old segment are durable in the new one, or will be by `finish`."""
        return self._waits or not self._maker.syncs or self._old.synced.seq <= self.segment.synced.seq

    def _copy_events(self) -> None:
        """Copy the frames up to `_goal` from the old segment."""
        size = _PIECE_BYTES
        while (left := self._goal.offset - self._reached) > 0:
            frames = copied(self._old.read(min(size, left), self._reached))
            if not frames and size >= left:
                raise OSError(errno.EIO, "it does not hold what was written to it", str(self._old.path))
            self.segment.write(frames, self.segment.size)
            self._reached += len(frames)
            size = _PIECE_BYTES if frames else 2 * size
