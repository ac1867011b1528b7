"""`LogThread` does for a writer what takes long, while the writer goes on.

A disk may take 10 ms or more for a sync, and longer while others write to it. A writer that waits for it
holds up the engine that made the events.
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread
from typing import Protocol

from kvsm.core.log.segment_file import SegmentFile, Synced
from kvsm.errors import described


class Job(Protocol):
    """What a thread can do for a writer."""

    def run(self) -> None:
        """Do it, in the thread. What goes wrong is noted, and not raised."""

    def end(self) -> None:
        """Tell the writer, in its thread."""


@dataclass
class SyncJob:
    """Makes a segment durable. synced: what is durable if that succeeds.

    `SegmentFile.sync_failure` tells of a failure, also if nobody waits for this job.
    """

    segment: SegmentFile
    synced: Synced

    def run(self) -> None:
        try:
            self.segment.sync()
        except OSError:
            pass  # The segment has noted it.
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

    The system reports a failed write to one sync only. So while a file is synced here, it must not be synced
    elsewhere: call `wait` first.

    Each call may be interrupted at any line. The next call then goes on.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._running: _Task | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job has begun whose end nobody has taken."""
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
        """If the job has ended, tell the writer."""
        if self._running is not None and self._running.ended.is_set():
            self._end(self._running)

    def wait(self) -> None:
        """Wait for the job, if one is running, and tell the writer."""
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
    """The thread. It knows nothing of the writer, so that a writer nobody uses can be collected."""
    while (task := queue.get()) is not None:
        if not task.ended.is_set():
            task.job.run()
            task.ended.set()
