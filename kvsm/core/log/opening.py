"""`Opening`: the next segment of a log, made while events still go to the one before it.

It takes several flushes, and the writer waits in none of them:

1. The state after the last event is copied, some of it in each flush (`StateCopy`).
2. A thread writes the head with this snapshot, and behind it the events that came meanwhile. It syncs them.
3. More events have come since. The thread copies them too, until few are left.
4. The writer copies these few, and gives the file its name. From then on events go to the new segment.

Compressed events refer to none before the first of these (`event_stream.py`).

Until the last step no reader knows of the file, and a process that dies loses nothing with it. Behind the
last step the new segment has each event that the old one has from its first one on. What was durable in the
old one is durable in the new one, too: a power loss may leave the new name, and then readers look there.
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
"""How long a flush copies the state, and a piece more."""

_FEW_BYTES = 16 << 10
"""Events of this size are copied in a fraction of a millisecond."""

_PIECE_BYTES = 1 << 20
"""How many bytes of events are copied at a time, unless a frame is larger."""


class Opening:
    """A segment that is made behind `place`. One thread makes all calls but `run`.

    segment: the new one.
    thread: what takes long is done there.
    waits: whether the writer waits for the disk. Then a small snapshot is written at once.

    Each call may raise what keeps the segment from being made, an `OSError` most often.
    """

    def __init__(
        self,
        segment: SegmentFile,
        place: WritePlace,
        maker: SegmentMaker,
        thread: LogThread,
        waits: bool,
    ) -> None:
        self.segment, self._old = segment, place.segment
        self._maker, self._thread, self._waits = maker, thread, waits
        self._state: StateCopy | None = None
        self._begin = self._reached = place.offset
        """Where it begins in the old segment, and up to where that has been copied (bytes)."""
        self._goal = place
        self._head, self._event_bytes = maker.new_head(segment.first), 0
        self._snapshot: list[bytes] | None = None
        self._has_head = False
        self._failure: Exception | None = None

    def begin(self, snapshot: Callable[[], StateCopy]) -> None:
        """Make the file. snapshot: returns a copy of the state before its first event."""
        self._maker.create(self.segment)
        self._state = snapshot()

    def overlap(self, place: WritePlace) -> int:
        """How many bytes of events both segments will have."""
        return place.offset - self._begin

    def needs_sync(self) -> bool:
        """Whether it waits until the old segment is durable up to where this one begins."""
        return self._maker.syncs and self._has_head and self._old.synced.offset < self._begin

    def forbids_sync(self) -> bool:
        """Whether the old segment must not become more durable: this one is about to take its place."""
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
        """Take all steps but the last, and wait for them."""
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
        """Make no segment. Its file is gone then, unless this raises."""
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
        """Behind `run`."""
        self._has_head = True

    def _take_snapshot(self) -> bool:
        """Copy more of the state. Returns whether all of it is there, and there is room for it."""
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
        """Whether all that is durable in the old segment is durable in this one, or will be by `finish`."""
        return self._waits or not self._maker.syncs or self._old.synced.seq <= self.segment.synced.seq

    def _copy_events(self) -> None:
        """Copy the frames up to the goal."""
        size = _PIECE_BYTES
        while (left := self._goal.offset - self._reached) > 0:
            frames = copied(self._old.read(min(size, left), self._reached))
            if not frames and size >= left:
                raise OSError(errno.EIO, "it does not hold what was written to it", str(self._old.path))
            self.segment.write(frames, self.segment.size)
            self._reached += len(frames)
            size = _PIECE_BYTES if frames else 2 * size
