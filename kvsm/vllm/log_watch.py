"""`LogWatch`: warn in vLLM's log if an event log cannot be written, because the engine continues without it.

The offloader writes to the watch instead of the log. The watch warns at the first flush that fails, once a
minute while the failure lasts, and once when the log can be written again. Each warning names the missing
events. The metrics `log_broken` and `log_events_dropped` (`kvsm.explain.metrics`) show the same, and a reader
of the log finds the gap (`LogReader.gaps`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vllm.logger import init_logger

from kvsm.core.ledger import Ledger
from kvsm.core.log import LateLog, LogWriter, StopMark
from kvsm.core.offloader import EventSink
from kvsm.errors import LogError
from kvsm.system.steady_clock import SteadyClock

log = init_logger("vllm.kvsm")

AGAIN_S = 60.0
"""The time between two warnings of the same failure (s)."""


class LogWatch:
    """Forwards events to `sink`, and watches the writer behind it.

    sink: the writer itself, or the metrics that count events and forward them to the writer.
    ledger: the ledger of the offloader that emits the events.
    clock: returns monotonic time (s); public, so that a test can replace it.
    """

    def __init__(self, sink: EventSink, writer: LogWriter | LateLog, ledger: Ledger) -> None:
        self.append = sink.append
        self._stop_mark: StopMark | None = None
        self._mark_wanted_of: LogWatch | None = None
        """The log of this process with the record of signals, until this log has it, too; else None."""
        self.clock: Callable[[], float] = SteadyClock()
        self._writer, self._ledger = writer, ledger
        self._warned_at: float | None = None
        """When the last warning was logged. None while the log can be written."""
        self._dropped_before = 0
        """The number of events that were missing before this failure."""
        self._first = 0
        """The first event that is missing because of this failure."""

    @property
    def directory(self) -> Path:
        """The directory of the log."""
        return self._writer.directory

    @property
    def failure(self) -> str | None:
        """Why the log cannot be written now; None if it can."""
        return self._writer.failure

    def flush(self) -> None:
        """Flush the log, and warn if it cannot be written or can be written again."""
        writer = self._writer
        writer.flush()  # The sink forwards events at once, so it has nothing to flush.
        if self._mark_wanted_of is not None and writer.failure is None:
            self.mark_stops(self._mark_wanted_of)
        # A flush that loses events may also open the next segment: then there is no failure any more.
        has_dropped = writer.dropped != self._dropped_before
        if writer.failure is not None or self._warned_at is not None or has_dropped:
            self._warn()

    def mark_stops(self, of: LogWatch) -> None:
        """Record, beside this log, the signals that ask the process to end: now, or once it can be written.

        of: the log of this process that has the record: this one, or another one whose record it shares.
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
        """Close the log. Errors of a broken log are logged and not raised, because vLLM is shutting down."""
        if self._stop_mark is not None:
            self._stop_mark.close()
        try:
            self._writer.close()
        except LogError as error:
            log.error("kvsm: the event log could not be completed: %s", error)
            return
        if self._writer.failure is not None:
            log.warning("kvsm: the event log ends broken. %s", self._missing())

    def _warn(self) -> None:
        failure, now = self._writer.failure, self.clock()
        if self._warned_at is None:
            self._first = self._ledger.seq - self._dropped() + 1
        if failure is None:
            log.warning("kvsm: the event log could not be written for a while. %s", self._missing())
            self._warned_at, self._dropped_before = None, self._writer.dropped
        elif self._warned_at is None or now - self._warned_at >= AGAIN_S:
            self._warned_at = now
            log.warning(
                "kvsm: the event log cannot be written: %s. The engine continues, and tries again. %s",
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
