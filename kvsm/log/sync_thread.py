"""`SyncThread` makes a segment durable while its writer goes on.

A disk may take 10 ms or more for a sync, and longer while others write to it. A writer that waits for it
holds up the engine that made the events.
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread

from kvsm.errors import described
from kvsm.log.segment_file import SegmentFile, Synced


@dataclass
class _Sync:
    """synced: what is durable after a sync that succeeds."""

    segment: SegmentFile
    synced: Synced
    ended: Event


class SyncThread:
    """Syncs in a thread of its own, one sync at a time. The thread starts with the first sync.

    The system reports a failed write to one sync only. So while a sync runs here, its file must not be synced
    elsewhere: call `wait` first. `SegmentFile.sync_failure` tells of a failure, also if nobody waited.

    Each call may be interrupted at any line. The next call then goes on.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Sync | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._running: _Sync | None = None

    def begin(self, segment: SegmentFile, synced: Synced) -> None:
        """Begin a sync, unless one is running. synced: what is durable if it succeeds."""
        if self._running is not None:
            return
        if self._thread is None:
            # A daemon: a process that ends without closing its log must not wait for this thread.
            thread = Thread(target=_serve, args=[self._queue], name="kvsm-log-sync", daemon=True)
            thread.start()
            self._thread = thread
        self._running = _Sync(segment, synced, Event())
        self._queue.put(self._running)

    def take_end(self) -> None:
        """If the sync has ended, note what it made durable."""
        if self._running is not None and self._running.ended.is_set():
            self._note(self._running)

    def wait(self) -> None:
        """Wait for the sync, if one is running, and note what it made durable."""
        if self._running is not None:
            self._queue.put(self._running)  # An interrupt may have kept it out of the queue.
            self._running.ended.wait()
            self._note(self._running)

    def end(self) -> None:
        """Wait for the sync, and end the thread. Idempotent."""
        self.wait()
        self._queue.put(None)

    def _note(self, sync: _Sync) -> None:
        if sync.segment.sync_failure is None:
            sync.segment.synced = sync.synced
        self._running = None


def _serve(queue: SimpleQueue[_Sync | None]) -> None:
    """The thread. It knows nothing of the writer, so that a writer nobody uses can be collected."""
    while (sync := queue.get()) is not None:
        if not sync.ended.is_set():
            try:
                sync.segment.sync()
            except OSError:
                pass  # The segment has noted it.
            except Exception as error:
                sync.segment.sync_failure = OSError(described(error))
            sync.ended.set()
