"""Which eviction policies the worlds draw."""

from __future__ import annotations

from random import Random

from kvsm.core.policies import ADMITTING


def draw_policy(random: Random) -> str:
    """Draw a policy that admits every block. `auto`, which refuses some, has a target of its own."""
    return random.choice(ADMITTING)
