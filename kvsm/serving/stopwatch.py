"""How long some methods of an object take."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any


class Stopwatch:
    """Adds up in `seconds` how long these methods of `watched` take. A call inside another counts once."""

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
