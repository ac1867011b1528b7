"""The limit on the bytes of a log, and the oldest segments that are deleted to keep it."""

from __future__ import annotations

import errno
import os
from collections import deque

from kvsm.core.log.segment_file import SegmentFile
from kvsm.errors import ConfigError

FRAME_BYTES = 1 << 20
"""About the largest frame. The size of the last frame tells how many events that is."""


class Retention:
    """The segments of a log that are on disk, the newest last, and how many bytes they may have.

    A segment states in its head which older ones are kept beside it. So what it needs is planned when it
    opens: room to become full, a last frame that goes beyond, the head of the next segment, which may be
    twice as large as its own, and events that both have, because they came while it was made. `make_room`
    holds the limit even if that was too little.

    max_bytes: of all files together; None has no limit.
    segment_bytes: of the events of a segment.

    opening_bytes: of a segment that is being made, and is not among the segments yet. Its writer sets it.
    both_bytes: how many bytes of events may stand in two segments, before their writer waits for the new one.
    """

    def __init__(self, max_bytes: int | None, segment_bytes: int) -> None:
        self.segments: deque[SegmentFile] = deque()
        self._deleted_bytes = self.opening_bytes = 0
        self._max_bytes, self._segment_bytes = max_bytes, segment_bytes
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
        """The first event of the oldest segment that nobody has deleted."""
        return next((one.first for one in self.segments if not one.deleted), self.segments[-1].first)

    def add(self, segment: SegmentFile) -> None:
        """Note a new segment; the ones before it are complete. Idempotent."""
        if not self.segments or self.segments[-1] is not segment:
            self._complete_bytes = None
            self.segments.append(segment)

    def inherit(self, segment: SegmentFile) -> None:
        """Note a segment that an earlier life has written. It counts, and is deleted in its turn."""
        self.add(segment)
        self._inherited_bytes += segment.size

    def replace_newest(self, segment: SegmentFile) -> None:
        """Note that this segment has taken the place of the newest one."""
        self._complete_bytes = None
        self._deleted_bytes += self.segments.pop().size
        self.segments.append(segment)

    def check(self, head_bytes: int) -> None:
        """Raises `ConfigError` if the limit has no room for segments whose heads have this size (bytes)."""
        problem = self._too_small(head_bytes)
        if problem is not None:
            raise ConfigError(problem)

    def plan(self, segment: SegmentFile, head_bytes: int) -> int:
        """Set `oldest` of a segment whose head has this size. Returns how many bytes of events it takes.

        Raises `OSError` if the limit has no room for it.
        """
        problem = self._too_small(head_bytes)
        if problem is not None:
            raise OSError(errno.ENOSPC, problem)
        self.make_room(head_bytes)  # Before the head says which segments are kept.
        kept = [older for older in self.segments if not older.deleted]
        segment.oldest = kept[0].first if kept else segment.first
        if self._max_bytes is None:
            return self._segment_bytes
        full_at = min(head_bytes + self._segment_bytes, self._full_at_most(head_bytes))
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

        Raises `OSError` if only the newest one is left, and there is still no room.
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
        """Note which segments somebody else has deleted: no new segment claims that they are kept."""
        for segment in self.segments:
            segment.deleted = not os.path.exists(segment.path)

    def _delete_oldest(self) -> None:
        oldest = self.segments[0]
        self.segments[-1].sync_name()  # Or a power loss could take both.
        oldest.delete()
        self._complete_bytes = None
        self.segments.popleft()
        self._deleted_bytes += oldest.size

    def _segments_bytes(self) -> int:
        if self._complete_bytes is None:
            self._complete_bytes = sum(one.size for one in self.segments) - self._newest_bytes()
        return self._complete_bytes + self._newest_bytes()

    def _newest_bytes(self) -> int:
        return self.segments[-1].size if self.segments else 0

    def _full_at_most(self, head_bytes: int) -> int:
        """Two full segments fit, with twice the head for what grows, their last frames and what both have."""
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
