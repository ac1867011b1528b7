"""How many examples a property test takes."""

from __future__ import annotations

import os

_SHARE = 1 if "CI" in os.environ else 3


def examples(number: int) -> int:
    """All of them in CI, which draws new ones each day. Elsewhere a third: it runs many times a day."""
    return max(number // _SHARE, min(number, 8))
