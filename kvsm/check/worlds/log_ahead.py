"""The world of a core whose log is watched: what was written of it at each effect that leaves the core.

A process may be killed at any moment, and then only what was flushed is left. So at these moments the flushed
part must cover what decided them (events are state, S10):

- when jobs leave for the workers, the log says so, and why;
- when a reset has returned, the log has it: no stale data (S14);
- when a step has ended, the log has all that was decided, whatever was flushed before in that step. Only its
  `StepEnded` may be missing, while copies are in flight.

Whoever lets flushes wait (`flush_within_ms`) lets only the end of a step wait.
"""

from __future__ import annotations

from typing import Any

from kvsm.check.worlds.core_options import CoreOptions
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.world import Action
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.errors import PropertyBroken
from kvsm.events import StepEnded
from kvsm.properties import Property

_AN_HOUR_MS = 3_600_000


class WrittenLog(MemoryLog):
    """A log that counts what was flushed. written: events."""

    written = 0

    def flush(self) -> None:
        """Everything until now is written."""
        self.written = len(self)


class LogAheadWorld(CoreWorld):
    """A `World`. waits: whether the ends of steps may wait for a flush."""

    def __init__(self, options: CoreOptions, *, waits: bool) -> None:
        super().__init__(options)
        self._waits = waits
        bench = self._bench
        self._written = WrittenLog(bench.log)
        bench.log = bench.core.log = self._written
        for move in self._moves.values():
            group: Any = getattr(move, "__self__")  # noqa: B009
            group.log = self._written
        if waits:
            bench.core = Offloader(
                bench.core.config,
                self._fresh(),
                publisher=bench.core.publisher,
                clock_ns=lambda: 0,
                flush_within_ms=_AN_HOUR_MS,
            )
        self._written.flush()

    def _fresh(self) -> WrittenLog:
        self._written.clear()
        return self._written

    def do(self, action: Action) -> bool:
        log, name = self._written, action[0]
        done = super().do(action)
        lacks = len(log) - log.written
        if done and name in ("submit", "submit_all") and lacks:
            message = f"jobs have left for the workers, and {lacks} events before that are not written"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        if done and name == "reset" and lacks:
            message = f"a reset has returned, and {lacks} events are not written"
            raise PropertyBroken(Property.NO_STALE_DATA, message)
        may_lack = int(bool(self.core.ledger.transfers) and type(log[-1]) is StepEnded)
        if done and name == "end_step" and not self._waits and lacks > may_lack:
            message = f"a step has ended, and {lacks - may_lack} events that it decided are not written"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        return done
