"""Retention: delete the oldest segments to keep a log within its limit of bytes."""

from __future__ import annotations

import errno
import os
from collections import deque

from kvsm.core.log.segment_file import SegmentFile
from kvsm.errors import ConfigError

FRAME_BYTES = 1 << 20
"""About the most bytes of a frame. From the last frame's size follows how many events that is."""


class Retention:
    """The segments of a log on disk, oldest first, and the limit on their bytes.

    The head of a segment says which older segments are kept beside it. So the space it needs is planned when
    it opens: the full segment, a last frame that exceeds it, the head of the next segment, which may be twice
    as large as its own, and the events that both segments hold because they were logged while the next one
    was made. `make_room` keeps the limit even if that estimate was too small.

    max_bytes: limit of all files together; None: no limit.
    segment_bytes: size of the events at which a segment is full.

    opening_bytes: size of a segment that is being made and is not in `segments` yet. Its maker sets it.
    both_bytes: how many bytes of events may be in two segments before the writer waits for the new segment.
    """

    def __init__(self, max_bytes: int | None, segment_bytes: int) -> None:
        self.segments: deque[SegmentFile] = deque()
        self._deleted_bytes = self.opening_bytes = 0
        self._max_bytes, self.segment_bytes = max_bytes, segment_bytes
        self._frame_bytes = min(FRAME_BYTES, segment_bytes // 4)
        self.both_bytes = self._frame_bytes // 2
        self._complete_bytes: int | None = None
        self._inherited_bytes = 0

    def total(self) -> int:
        """Bytes of all files."""
        return self._segments_bytes() + self.opening_bytes

    def written_bytes(self) -> int:
        """Bytes of the segments that this writer has made, deleted ones included."""
        return self._deleted_bytes + self._segments_bytes() - self._inherited_bytes

    def oldest(self) -> int:
        """Return the first event of the oldest segment that is still there."""
        for segment in self.segments:
            if not segment.deleted:
                return segment.first
        return self.segments[-1].first

    def add(self, segment: SegmentFile) -> None:
        """Add the newest segment; all segments before it are complete. Idempotent."""
        if not self.segments or self.segments[-1] is not segment:
            self._complete_bytes = None
            self.segments.append(segment)

    def announce_newest(self, syncs: bool) -> None:
        """Write which segment is the newest into the mark of the one before it, so that readers notice if
        it is missing. Idempotent.

        Does nothing before the name of the newest segment is durable: a power loss may remove it until then.

        syncs: whether to wait until the mark is on the disk.

        Raises `OSError` if a mark is left partly written.
        """
        newest = self.segments[-1]
        if newest.announced or not newest.name_is_durable:
            return
        if len(self.segments) > 1:
            self.segments[-2].name_successor(newest.first, syncs)
        newest.announced = True

    def inherit(self, segment: SegmentFile) -> None:
        """Add a segment of an earlier life. It counts towards the limit and may be deleted like any other."""
        self.add(segment)
        self._inherited_bytes += segment.size

    def replace_newest(self, segment: SegmentFile) -> None:
        """Replace the newest segment by this one."""
        self._complete_bytes = None
        self._deleted_bytes += self.segments.pop().size
        self.segments.append(segment)

    def check(self, head_bytes: int) -> None:
        """Raise `ConfigError` if the limit has no room for segments whose heads have this size (bytes)."""
        problem = self._too_small(head_bytes)
        if problem is not None:
            raise ConfigError(problem)

    def plan(self, segment: SegmentFile, head_bytes: int) -> int:
        """Set `oldest` of a new segment whose head has this size. Returns how many bytes of events fill it.

        Raises `OSError` if the limit has no room for it.
        """
        problem = self._too_small(head_bytes)
        if problem is not None:
            raise OSError(errno.ENOSPC, problem)
        self.make_room(head_bytes)  # First, because the head says which segments are kept.
        kept = [older for older in self.segments if not older.deleted]
        segment.oldest = kept[0].first if kept else segment.first
        if self._max_bytes is None:
            return self.segment_bytes
        full_at = min(head_bytes + self.segment_bytes, self._full_at_most(head_bytes))
        left = self._max_bytes - full_at - 2 * head_bytes - 3 * self._frame_bytes
        segment.oldest = segment.first
        for older in reversed(kept):
            left -= older.size
            if left < 0:
                break
            segment.oldest = older.first
        return full_at - head_bytes

    def make_room(self, more_bytes: int) -> None:
        """Delete the oldest segments until the log may grow by this many bytes.

        Raises `OSError` if only the newest segment is left and there is still no room.
        """
        if self._max_bytes is None:
            return
        while self.total() + more_bytes > self._max_bytes:
            if len(self.segments) < 2:
                problem = f"max_bytes is {self._max_bytes}, and {more_bytes} bytes more do not fit"
                raise OSError(errno.ENOSPC, problem)
            self._delete_oldest()

    def delete_before(self, first: int) -> None:
        """Delete the segments before the one that begins with event `first`."""
        while self.segments[0].first < first:
            self._delete_oldest()

    def note_deleted(self) -> None:
        """Find segments that someone else has deleted, so that no new head lists them as kept."""
        for segment in self.segments:
            segment.deleted = not os.path.exists(segment.path)

    def _delete_oldest(self) -> None:
        oldest = self.segments[0]
        self.segments[-1].sync_name()  # Otherwise a power loss could lose the new name and the deleted file.
        oldest.delete()
        self._complete_bytes = None
        self.segments.popleft()
        self._deleted_bytes += oldest.size

    def _segments_bytes(self) -> int:
        if self._complete_bytes is None:
            self._complete_bytes = sum(segment.size for segment in self.segments) - self._newest_bytes()
        return self._complete_bytes + self._newest_bytes()

    def _newest_bytes(self) -> int:
        return self.segments[-1].size if self.segments else 0

    def _full_at_most(self, head_bytes: int) -> int:
        """Return the largest size of a full segment such that two fit.

        Two more heads are reserved for growing snapshots, and five frames for last frames and shared events.
        """
        assert self._max_bytes is not None
        return (self._max_bytes - 2 * head_bytes - 5 * self._frame_bytes) // 2

    def _too_small(self, head_bytes: int) -> str | None:
        if self._max_bytes is None or self._full_at_most(head_bytes) > head_bytes:
            return None
        least = 4 * head_bytes + 5 * self._frame_bytes + 2
        return (
            f"max_bytes is {self._max_bytes}; it must be {least} or more, because a segment opens with "
            f"{head_bytes} bytes (its head and a snapshot)"
        )
