"""`LogWatch`: says in vLLM's log that an event log cannot be written. Nobody else would: the engine goes on.

It stands where the log would. It says so at the first flush that fails, once a minute while that lasts, and
once more when the log goes on. Each line says which events are missing. `kvsm.explain.metrics` tells the same
with `log_broken` and `log_events_dropped`, and a reader of the log finds the gap (`LogReader.gaps`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from vllm.logger import init_logger

from kvsm.core.ledger import Ledger
from kvsm.core.log import LateLog, LogWriter, StopMark
from kvsm.core.offloader import EventSink
from kvsm.errors import LogError

log = init_logger("vllm.kvsm")

AGAIN_S = 60.0
"""Between two warnings of the same failure (s)."""


class LogWatch:
    """Passes events on to `sink`, and watches the writer behind it.

    sink: the writer itself, or what counts events on their way to it.
    ledger: of the offloader that emits the events.
    clock: monotonic time (s); public, so that a test can choose it.
    """

    def __init__(self, sink: EventSink, writer: LogWriter | LateLog, ledger: Ledger) -> None:
        self.append = sink.append
        self._stop_mark: StopMark | None = None
        self._mark_wanted_of: LogWatch | None = None
        """The log that has the mark of stops, until the mark is beside this one."""
        self.clock: Callable[[], float] = time.monotonic
        self._writer, self._ledger = writer, ledger
        self._said_at: float | None = None
        """When a warning was given last. None while the log is whole."""
        self._dropped_before = 0
        """How many events were missing before this failure."""
        self._first = 0
        """The first event that is missing because of this failure."""

    @property
    def directory(self) -> Path:
        """Of the log."""
        return self._writer.directory

    @property
    def failure(self) -> str | None:
        """Why the log cannot be written now; None while it is written."""
        return self._writer.failure

    def flush(self) -> None:
        """Flush the log."""
        writer = self._writer
        writer.flush()  # The sink passes events on at once, so it has nothing to flush.
        if self._mark_wanted_of is not None and writer.failure is None:
            self.mark_stops(self._mark_wanted_of)
        # A flush that loses events may also open the next segment: then nothing fails any more.
        if writer.failure is not None or self._said_at is not None or writer.dropped != self._dropped_before:
            self._look()

    def mark_stops(self, of: LogWatch) -> None:
        """Record, beside this log, the signals that ask the process to end: now, or once the log is written.

        of: the log of this process that has the mark, itself or another one.
        """
        self._mark_wanted_of = of
        if self.failure is not None:
            return
        if of is self:
            self._stop_mark = StopMark(self.directory)
        elif of._stop_mark is None:
            return
        else:
            of._stop_mark.share(self.directory)
        self._mark_wanted_of = None

    def close(self) -> None:
        """Close the log. Nothing that a broken log raises reaches vLLM, which is shutting down."""
        if self._stop_mark is not None:
            self._stop_mark.close()
        try:
            self._writer.close()
        except LogError as error:
            log.error("kvsm: the event log could not be completed: %s", error)
            return
        if self._writer.failure is not None:
            log.warning("kvsm: the event log ends broken. %s", self._missing())

    def _look(self) -> None:
        failure, now = self._writer.failure, self.clock()
        if self._said_at is None:
            self._first = self._ledger.seq - self._dropped() + 1
        if failure is None:
            log.warning("kvsm: the event log could not be written, and goes on. %s", self._missing())
            self._said_at, self._dropped_before = None, self._writer.dropped
        elif self._said_at is None or now - self._said_at >= AGAIN_S:
            self._said_at = now
            log.warning(
                "kvsm: the event log cannot be written: %s. The engine goes on, and tries again. %s",
                failure,
                self._missing(),
            )

    def _dropped(self) -> int:
        return self._writer.dropped - self._dropped_before

    def _missing(self) -> str:
        count = self._dropped()
        if not count:
            return "No event is missing"
        return f"Events {self._first} to {self._first + count - 1} are missing in it"
