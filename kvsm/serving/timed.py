"""An offload scheduler that measures how long its decisions take, including the log."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any

from kvsm.scheduler import OffloadScheduler


class TimedOffloadScheduler(OffloadScheduler):
    """Attribute `seconds`: the time spent in its calls so far. No decision depends on it."""

    seconds = 0.0
    _timing = False


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def timed(self: TimedOffloadScheduler, *arguments: Any, **named: Any) -> Any:
        if self._timing:
            # A call inside another one is on the clock already.
            return method(self, *arguments, **named)
        self._timing, started = True, perf_counter()
        try:
            return method(self, *arguments, **named)
        finally:
            self.seconds += perf_counter() - started
            self._timing = False

    return timed


# All calls that an engine makes.
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
