"""An offload core that knows how long its decisions take, writing the log included."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any

from kvsm.offloader import Offloader


class TimedOffloader(Offloader):
    """`seconds`: time spent in its calls so far. The time decides nothing."""

    seconds = 0.0


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def timed(self: TimedOffloader, *arguments: Any, **named: Any) -> Any:
        started = perf_counter()
        try:
            return method(self, *arguments, **named)
        finally:
            self.seconds += perf_counter() - started

    return timed


# The calls that an engine makes. None of them calls another of them, so that no time counts twice.
for _name in (
    "arrive",
    "match",
    "release",
    "prepare_load",
    "prepare_store",
    "submit",
    "report",
    "flush",
    "preempt",
    "finish",
    "touch",
    "tick",
    "end_step",
):
    setattr(TimedOffloader, _name, _timed(getattr(Offloader, _name)))
