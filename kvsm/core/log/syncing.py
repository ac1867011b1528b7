"""When a log is synced, and in which thread, for each value of `durability`."""

from __future__ import annotations

import time
from typing import Literal

from kvsm.core.log.log_thread import LogThread, SyncJob
from kvsm.core.log.opening import Opening
from kvsm.core.log.segment_file import SegmentFile, Synced, WritePlace

Durability = Literal["none", "interval", "every"]


class Syncing:
    """Syncs the current segment, by the options of `LogWriter`.

    syncs: whether the log is synced at all.
    interval_ns: how long a sync may be delayed (ns).
    waits: whether the writer syncs itself and waits. Otherwise `thread` syncs.
    """

    def __init__(self, durability: Durability, sync_interval_ms: int, sync_thread: bool) -> None:
        self.syncs = durability != "none"
        self.interval_ns = 0 if durability == "every" else sync_interval_ms * 1_000_000
        self.waits = durability != "interval" or not sync_thread
        self.thread = LogThread("kvsm-log-sync")

    def due_ns(self, segment: SegmentFile, now: int) -> int:
        """Return the time (monotonic ns) from which on the segment is to be synced, as seen at `now`."""
        # A clock that has gone back says nothing about the time since the last sync.
        return segment.synced.at_ns + self.interval_ns if segment.synced.at_ns <= now else now

    def sync_in_time(self, place: WritePlace, now: int, opening: Opening | None) -> None:
        """If a sync is due at `now` (monotonic ns), sync or begin to. Raises `OSError` if a sync has failed.

        opening: the next segment that is being made, which may need a sync; or None.
        """
        segment = place.segment
        self.thread.take_end()
        if segment.sync_failure is not None:
            raise segment.sync_failure
        is_wanted = opening is not None and opening.needs_sync()
        if now < self.due_ns(segment, now) and not is_wanted:
            return
        if self.waits:
            self.sync(place)
        elif not segment.is_durable_to(place.offset) and (opening is None or not opening.forbids_sync()):
            self.thread.begin(SyncJob(segment, Synced(place.offset, place.first - 1, now)))

    def sync(self, place: WritePlace) -> None:
        """Wait until all bytes up to `place` are durable. Raises `OSError` if a sync fails or has failed."""
        segment = place.segment
        self.thread.wait()
        if not self.syncs or segment.is_durable_to(place.offset):
            return
        if segment.sync_failure is not None:
            raise segment.sync_failure
        segment.sync()
        segment.synced = Synced(place.offset, place.first - 1, time.monotonic_ns())
