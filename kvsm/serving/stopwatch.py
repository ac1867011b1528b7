"""Measure the time that some methods of an object take."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any


class Stopwatch:
    """Adds up the time in these methods of `watched`, in `seconds`. A nested call does not count twice."""

    def __init__(self, watched: object, *methods: str) -> None:
        self.seconds, self._running = 0.0, False
        for name in methods:
            setattr(watched, name, self._timed(getattr(watched, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._running:
                return method(*arguments, **named)
            self._running, started = True, perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += perf_counter() - started
                self._running = False

        return timed
