"""`LogThread` runs slow jobs of a writer, such as syncs, while the writer continues.

A sync may take 10 ms or more, and longer while other processes write to the disk. A writer that waits for it
delays the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread
from typing import Protocol

from kvsm.core.log.segment_file import SegmentFile, Synced
from kvsm.errors import described


class Job(Protocol):
    """A job that a `LogThread` runs for a writer."""

    def run(self) -> None:
        """Run the job, in the thread. Errors are recorded, and not raised."""

    def end(self) -> None:
        """Hand the result to the writer. Called in the writer's thread, after `run`."""


@dataclass
class SyncJob:
    """Syncs a segment. synced: how far it is durable after success.

    `SegmentFile.sync_failure` has the error after a failure, even if no call waits for this job.
    """

    segment: SegmentFile
    synced: Synced

    def run(self) -> None:
        try:
            self.segment.sync()
        except OSError:
            pass  # It is in `sync_failure`.
        except Exception as error:
            self.segment.sync_failure = OSError(described(error))

    def end(self) -> None:
        if self.segment.sync_failure is None:
            self.segment.synced = self.synced


@dataclass
class _Task:
    job: Job
    ended: Event


class LogThread:
    """A thread that does one job at a time. It starts with the first job.

    The system reports a failed write to only one sync. So while this thread syncs a file, no other code may
    sync it: call `wait` first.

    Each call may be interrupted at any line. Then the next call completes it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._running: _Task | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job was begun, and its end was not taken yet."""
        return self._running is not None

    def begin(self, job: Job) -> None:
        """Begin a job, unless one is running."""
        if self._running is not None:
            return
        if self._thread is None:
            # A daemon: a process that ends without closing its log must not wait for this thread.
            thread = Thread(target=_serve, args=[self._queue], name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        self._running = _Task(job, Event())
        self._queue.put(self._running)

    def take_end(self) -> None:
        """Hand the result of the job to the writer, if the job has ended."""
        if self._running is not None and self._running.ended.is_set():
            self._end(self._running)

    def wait(self) -> None:
        """Wait for the job, if one is running, and hand its result to the writer."""
        if self._running is not None:
            self._queue.put(self._running)  # An interrupt may have kept it out of the queue.
            self._running.ended.wait()
            self._end(self._running)

    def end(self) -> None:
        """Wait for the job, and end the thread. Idempotent."""
        self.wait()
        self._queue.put(None)

    def _end(self, task: _Task) -> None:
        task.job.end()
        self._running = None


def _serve(queue: SimpleQueue[_Task | None]) -> None:
    """Run jobs in the thread. It has no reference to the writer, so an unused writer can be garbage
    collected."""
    while (task := queue.get()) is not None:
        if not task.ended.is_set():
            task.job.run()
            task.ended.set()
