"""`LateLog`: replaces the log of a running engine while the system refuses to create it.

An engine that may continue without a log (`on_failure="continue"`) also starts without one: on a full disk, a
read-only file system, a directory that belongs to another user. Its events are dropped and counted. Every
10 s a flush tries to begin the log. It then begins with a snapshot, so readers have the state, and a later
process can continue it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvsm.core.log.writer import LogWriter
from kvsm.errors import LogError
from kvsm.events import OffloadingEvent
from kvsm.system.steady_clock import SteadyClock

AGAIN_S = 10.0
"""Time between two attempts to begin the log (s)."""


def is_refused_by_system(error: LogError) -> bool:
    """Whether a system call for the log failed. False if another process has the log, or if kvsm refuses the
    log or an option."""
    return isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, BlockingIOError)


class LateLog:
    """Drops events until the log can begin; from then on it passes them to its writer.

    directory: where the log belongs.
    failure: why the log cannot be written now; None while it is written.
    begin: begins the log with the event of this number. Raises `LogError` while that is impossible.
    clock: monotonic time (s); public, so that a test can choose it.
    """

    def __init__(self, directory: Path, failure: str, begin: Callable[[int], LogWriter]) -> None:
        self.directory = directory
        self.clock: Callable[[], float] = SteadyClock()
        self._failure, self._begin = failure, begin
        self._writer: LogWriter | None = None
        self._dropped, self._next, self._again_at = 0, 1, self.clock() + AGAIN_S

    @property
    def failure(self) -> str | None:
        """As in `LogWriter`."""
        return self._failure if self._writer is None else self._writer.failure

    @property
    def dropped(self) -> int:
        """The number of events that were lost."""
        return self._dropped + (0 if self._writer is None else self._writer.dropped)

    def append(self, event: OffloadingEvent) -> None:
        """Append the next event, or drop it if the log has not begun."""
        if self._writer is not None:
            self._writer.append(event)
            return
        self._dropped += 1
        self._next = event.seq + 1

    def flush(self) -> None:
        """Flush the log, or try to begin it if the last attempt was long ago."""
        if self._writer is not None:
            self._writer.flush()
        elif self.clock() >= self._again_at:
            self._again_at = self.clock() + AGAIN_S
            try:
                self._writer = self._begin(self._next)
            except LogError as error:
                self._failure = str(error)

    def close(self, error: BaseException | None = None) -> None:
        """Close the log, if it was begun."""
        if self._writer is not None:
            self._writer.close(error)
