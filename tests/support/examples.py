"""How many examples a property test takes, and how many cases of many."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

SHARE = 1 if "CI" in os.environ else 5
"""One of this many cases is tried."""
_T = TypeVar("_T")


def examples(number: int, least: int = 8) -> int:
    """All of them in CI, which draws new ones each day. Elsewhere a fifth, but `least`: it runs many times a
    day."""
    return max(number // SHARE, min(number, least))


def some(cases: Sequence[_T]) -> Sequence[_T]:
    """All of them in CI. Elsewhere every fifth."""
    return cases[::SHARE]
