"""Random walks of the core world, for tests of event readers."""

from __future__ import annotations

from random import Random

from kvsm.check.worlds.core_options import CoreOptions
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.world import Action


def walked(options: CoreOptions, seed: int, actions: int) -> tuple[CoreWorld, list[Action]]:
    """Walk through a core world. Returns the world and the actions that were tried."""
    world, random, drawn = CoreWorld(options), Random(seed), []
    for _ in range(actions):
        drawn.append(world.draw(random))
        world.do(drawn[-1])
    return world, drawn
