"""Log segments that take a fixed number of flushes to open, for reproducible tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import pytest

from kvsm.core.log import opening
from kvsm.core.log.log_thread import Job, LogThread, _Task


class SteppedThread(LogThread):
    """Runs a job in the writer's thread, at the writer's second check whether the job has ended."""

    _looks = 0

    def begin(self, job: Job) -> None:
        if self._running is None:
            self._running, self._looks = _Task(job, Event()), 0

    def take_end(self) -> None:
        self._looks += 1
        if self._looks > 1:
            self.wait()

    def wait(self) -> None:
        if self._running is not None:
            self._running.job.run()
            self._end(self._running)


@contextmanager
def slow_openings(slow: bool = True) -> Iterator[None]:
    """Make segments open over several flushes, as with a large state, if `slow`. No threads are used."""
    with pytest.MonkeyPatch.context() as patch:
        if slow:
            patch.setattr(opening, "AT_ONCE_BYTES", -1)
        for user in ("writer", "syncing"):
            patch.setattr(f"kvsm.core.log.{user}.LogThread", SteppedThread)
        yield
