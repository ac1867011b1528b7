"""Draw the eviction policy of a world."""

from __future__ import annotations

from random import Random

from kvsm.core.policies import ADMITTING


def draw_policy(random: Random) -> str:
    """Draw a policy that admits every block. Policies that refuse blocks have the target `admission`."""
    return random.choice(ADMITTING)
