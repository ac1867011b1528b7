"""A world of the offload core that checks that the log is flushed before each effect becomes visible.

A process may be killed at any moment, and then only the flushed part of its log is left. So the flushed part
must contain the events behind each visible effect (events are state, S10):

- when jobs are sent to the workers, their plans and their submission are flushed;
- when a reset has returned, its event is flushed: no stale data (S14);
- when a step has ended, all events of the step are flushed. Only its `StepEnded` may be missing, while copies
  are in flight.

With `flush_within_ms` only the flush at the end of a step may be delayed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvsm.check.worlds.core_options import CoreOptions
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.world import Action
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader, expect_misuse
from kvsm.errors import PropertyBroken
from kvsm.events import StepEnded
from kvsm.properties import Property

_AN_HOUR_MS = 3_600_000


class WrittenLog(MemoryLog):
    """A log in memory. written: the number of flushed events."""

    written = 0

    def flush(self) -> None:
        """Count all events so far as written."""
        self.written = len(self)


class LogAheadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a core whose log is watched.

    waits: whether the flush at the end of a step may be delayed (`flush_within_ms`).
    """

    core: CoreOptions
    waits: bool = False


class LogAheadWorld(CoreWorld):
    """A `World`; worlds with the same options and actions are equal."""

    def __init__(self, options: LogAheadOptions) -> None:
        super().__init__(options.core)
        self._waits = waits = options.waits
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
            expect_misuse(bench.core)
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
