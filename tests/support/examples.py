"""The number of examples of a property test, and which of many cases it tries."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timezone
from random import Random
from typing import TypeVar

SHARE = 1 if "CI" in os.environ else 5
"""One of this many cases is tried."""
EVERY = os.environ.get("KVSM_EVERY") == "1"
"""Whether slow tests try all their cases, and not only those of the day, as in `.ci/nightly search`."""
_T = TypeVar("_T")


def examples(number: int, least: int = 8) -> int:
    """Return `number` in CI, which draws new examples each day; elsewhere a fifth, but at least `least`."""
    return max(number // SHARE, min(number, least))


def some(cases: Sequence[_T]) -> Sequence[_T]:
    """Return all cases in CI; elsewhere every fifth."""
    return cases[::SHARE]


def _today() -> int:
    day = os.environ.get("KVSM_SEED")
    return (datetime.strptime(day, "%Y%m%d") if day else datetime.now(timezone.utc)).toordinal()


TODAY = _today()
"""The day whose cases slow tests try. KVSM_SEED=20261129 chooses it, as in `.ci/run`."""


def runs_today(slow_test: str) -> bool:
    """Return whether a slow test runs today: with KVSM_SLOW_SHARE=10, as in `.ci/run`, one in ten does, and
    each day draws others. Without it, all run. slow_test: the id that pytest gives it."""
    return Random(f"{TODAY} {slow_test}").randrange(int(os.environ.get("KVSM_SLOW_SHARE", "1"))) == 0


def seeds_of_today(number: int) -> range:
    """Return `number` seeds that no other day has."""
    return range(TODAY * number, (TODAY + 1) * number)


def of_today(cases: Sequence[_T], days: int) -> Sequence[_T]:
    """Return the cases that a slow test tries today: in this many days it tries each case once."""
    return cases if EVERY else cases[TODAY % days :: days]


def drawn_today(cases: Sequence[_T], number: int) -> Sequence[_T]:
    """Return `number` cases that a slow test tries today, drawn anew each day."""
    return cases if EVERY else Random(TODAY).sample(cases, number)
