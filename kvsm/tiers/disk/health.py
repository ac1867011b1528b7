"""Pauses the stores of a disk tier after several failures, and probes the disk after each pause.

On a full or dying disk every store fails, slowly. So after `FAILURES` failed stores in a row the tier refuses
stores for a pause, and then accepts one store as a probe. If the probe fails, too, the pause doubles, up to a
limit. A successful store ends the pauses.

Loads are never refused and do not count. Blocks on the disk may still be readable, and a bad sector does not
prevent stores to other places.
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
    """The health of a disk tier. The scheduler reads it, so that it plans no stores that would be refused.

    takes_stores: whether a store would be accepted now.
    failures: number of failed stores since the last successful store.
    error: the error of the last failure; empty if there is none.
    probes_in_s: time until a store is accepted again (s).
    """

    takes_stores: bool = True
    failures: int = 0
    error: str = ""
    probes_in_s: float = 0.0


class HealthWatch:
    """Counts failed stores, and decides whether a store is accepted. All methods may be called from any
    thread.

    name: name of the disk tier, for messages.
    clock: monotonic time (s). If it goes back, a pause ends at once.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._lock = Lock()
        self._failures, self._error = 0, ""
        self._pause_s, self._probe_at, self._probes = FIRST_PAUSE_S, 0.0, False

    def read(self) -> TierHealth:
        """Return the current health."""
        with self._lock:
            left_s = self._left_s(self._clock()) if self._failures >= FAILURES else 0.0
            return TierHealth(not left_s, self._failures, self._error, left_s)

    def refusal(self) -> str:
        """Return why a store must be refused; empty if it is accepted. The first store after a pause is the
        probe: until it has ended, or another pause is over, further stores are refused."""
        with self._lock:
            if self._failures < FAILURES:
                return ""
            now = self._clock()
            left_s = self._left_s(now)
            if left_s:
                return (
                    f"{self._name}: takes no stores for {left_s:.0f} s more, after "
                    f"{self._failures} failures in a row; the last was: {self._error}"
                )
            self._probe_at, self._probes = now + self._pause_s, True
            return ""

    def _left_s(self, now: float) -> float:
        """Time until a store is accepted again (s). 0 if the clock has gone back since the pause began."""
        left_s = self._probe_at - now
        return left_s if 0 < left_s <= self._pause_s else 0.0

    def failed(self, error: str) -> None:
        """Count a store that has failed because of the disk."""
        with self._lock:
            self._failures, self._error = self._failures + 1, error
            if self._probes:
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            if self._probes or self._failures == FAILURES:
                self._probe_at = self._clock() + self._pause_s
            self._probes = False  # later failures are of stores from before the pause, not of the probe
            begins_pause = self._failures == FAILURES
        if begins_pause:
            _LOGGER.warning(
                "%s: takes no stores for a while, after %d failures in a row: %s", self._name, FAILURES, error
            )

    def succeeded(self) -> None:
        """Note a good store, which ends the pauses."""
        if not self._failures:
            return  # the usual case; without the lock, as this runs in every store
        with self._lock:
            was_paused = self._failures >= FAILURES
            self._failures, self._error = 0, ""
            self._pause_s, self._probes = FIRST_PAUSE_S, False
        if was_paused:
            _LOGGER.warning("%s: takes stores again", self._name)
