"""A clock that never goes back, for deadlines.

A monotonic clock should not go back. It may do so after a move of the process to another machine, or if it is
a caller's own clock. Without this class, every deadline would then be late by that much.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock


class SteadyClock:
    """Reads another clock. If that clock goes back, this one continues from its last value.

    Any thread may call it. source: returns seconds.
    """

    __slots__ = ("_last", "_lock", "_shift", "_source")

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source, self._shift, self._last = source, 0.0, float("-inf")
        self._lock = Lock()

    def __call__(self) -> float:
        with self._lock:
            now = self._source() + self._shift
            if now < self._last:
                self._shift += self._last - now
                now = self._last
            self._last = now
            return now
