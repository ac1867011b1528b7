"""When a log is synced, and by whom: what `durability` means."""

from __future__ import annotations

import time
from typing import Literal

from kvsm.core.log.log_thread import LogThread, SyncJob
from kvsm.core.log.opening import Opening
from kvsm.core.log.segment_file import Synced, WritePlace

Durability = Literal["none", "interval", "every"]


class Syncing:
    """Syncs the segment that is written, as `LogWriter` says.

    syncs: whether it syncs at all.
    interval_ns: how long a sync may be put off.
    waits: whether the writer waits for a sync. Otherwise `thread` does it.
    """

    def __init__(self, durability: Durability, sync_interval_ms: int, sync_thread: bool) -> None:
        self.syncs = durability != "none"
        self.interval_ns = 0 if durability == "every" else sync_interval_ms * 1_000_000
        self.waits = durability != "interval" or not sync_thread
        self.thread = LogThread("kvsm-log-sync")

    def sync_in_time(self, place: WritePlace, now: int, opening: Opening | None) -> None:
        """Sync if that is due at `now` (monotonic ns), or begin to. Raises `OSError` if a sync has failed.

        opening: of the next segment, which may want a sync, or none.
        """
        segment = place.segment
        self.thread.take_end()
        if segment.sync_failure is not None:
            raise segment.sync_failure
        is_wanted = opening is not None and opening.needs_sync()
        if now - segment.synced.at_ns < self.interval_ns and not is_wanted:
            return
        if self.waits:
            self.sync(place)
        elif segment.synced.offset != place.offset and (opening is None or not opening.forbids_sync()):
            self.thread.begin(SyncJob(segment, Synced(place.offset, place.first - 1, now)))

    def sync(self, place: WritePlace) -> None:
        """Wait until all up to `place` is durable. Raises `OSError` if a sync fails, or has failed."""
        segment = place.segment
        self.thread.wait()
        if not self.syncs or segment.synced.offset == place.offset:
            return
        if segment.sync_failure is not None:
            raise segment.sync_failure
        segment.sync()
        segment.synced = Synced(place.offset, place.first - 1, time.monotonic_ns())
