"""An offload scheduler that knows how long its decisions take, writing the log included."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any

from kvsm.scheduler import OffloadScheduler


class TimedOffloadScheduler(OffloadScheduler):
    """`seconds`: time spent in its calls so far. The time decides nothing."""

    seconds = 0.0
    _timing = False


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def timed(self: TimedOffloadScheduler, *arguments: Any, **named: Any) -> Any:
        if self._timing:
            # One call inside another: no time counts twice.
            return method(self, *arguments, **named)
        self._timing, started = True, perf_counter()
        try:
            return method(self, *arguments, **named)
        finally:
            self.seconds += perf_counter() - started
            self._timing = False

    return timed


# The calls that an engine makes.
for _name in (
    "add_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "reset_cache",
):
    setattr(TimedOffloadScheduler, _name, _timed(getattr(OffloadScheduler, _name)))
