"""When a disk tier takes no stores for a while: after failures in a row it steps back, and probes again.

A full or dying disk fails each store, slowly. So after `FAILURES` stores that failed one after another the
tier refuses stores for a pause, and then lets one through as a probe. If that fails too, the pause doubles up
to a limit. A store that succeeds ends all of it.

Loads neither count nor are refused. What is on the disk may still be readable, and a bad place on it is no
reason not to store elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock

import msgspec

_LOGGER = logging.getLogger("kvsm.tiers.disk")

FAILURES = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class TierHealth(msgspec.Struct, frozen=True):
    """How a disk tier is. The scheduler side asks for it, to plan no stores that would be refused.

    takes_stores: whether a store would be tried now.
    failures: stores that failed since the last one that succeeded.
    error: of the last failure; empty if there is none.
    probes_in_s: until a store is tried again (s).
    """

    takes_stores: bool = True
    failures: int = 0
    error: str = ""
    probes_in_s: float = 0.0


class HealthWatch:
    """Counts how stores end. All methods may be called from any thread.

    name: of the file, for what is told.
    clock: seconds that never go back.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._lock = Lock()
        self._failures, self._error = 0, ""
        self._pause_s, self._probe_at, self._probes = FIRST_PAUSE_S, 0.0, False

    def read(self) -> TierHealth:
        """How it is now."""
        with self._lock:
            left_s = max(0.0, self._probe_at - self._clock()) if self._failures >= FAILURES else 0.0
            return TierHealth(not left_s, self._failures, self._error, left_s)

    def refusal(self) -> str:
        """Why a store is not tried; empty if it is. The first one after a pause is the probe: until it has
        ended, or another pause is over, the others are refused."""
        with self._lock:
            if self._failures < FAILURES:
                return ""
            now = self._clock()
            if now < self._probe_at:
                return (
                    f"{self._name}: takes no stores for {self._probe_at - now:.0f} s more, after "
                    f"{self._failures} failures in a row; the last was: {self._error}"
                )
            self._probe_at, self._probes = now + self._pause_s, True
            return ""

    def failed(self, error: str) -> None:
        """A store has failed by a fault of the disk."""
        with self._lock:
            self._failures, self._error = self._failures + 1, error
            if self._probes:
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            if self._probes or self._failures == FAILURES:
                self._probe_at = self._clock() + self._pause_s
            self._probes = False  # Stores that were under way before are no probes.
            steps_back = self._failures == FAILURES
        if steps_back:
            _LOGGER.warning(
                "%s: takes no stores for a while, after %d failures in a row: %s", self._name, FAILURES, error
            )

    def succeeded(self) -> None:
        """A store has ended as good."""
        if not self._failures:
            return  # In every store, and almost always.
        with self._lock:
            was_back = self._failures >= FAILURES
            self._failures, self._error = 0, ""
            self._pause_s, self._probes = FIRST_PAUSE_S, False
        if was_back:
            _LOGGER.warning("%s: takes stores again", self._name)
