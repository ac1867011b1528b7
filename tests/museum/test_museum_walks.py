"""The museum's walks with large batches, crowded cores, and loads beside hand-overs."""

from __future__ import annotations

from random import Random

import pytest
from museum.drawn_worlds import crowded_core, large_core, loading_hand_over

from kvsm.check.walks.walk import MakeWorld, walk
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.events import BlocksEvicted
from kvsm.ids import SMALL

WALKS = (large_core, crowded_core, loading_hand_over)


@pytest.mark.parametrize("make", WALKS, ids=lambda one: one.__name__)
def test_nothing_is_found_in_the_right_code(make: MakeWorld) -> None:
    """`test_museum_worlds.py` walks each of them at length."""
    assert walk(make, 11, runs=1).failure is None


def test_a_large_pool_evicts_many_blocks_at_once() -> None:
    """Otherwise the walk would have no batches that are arrays."""
    worlds: list[CoreWorld] = []

    def made(random: Random) -> CoreWorld:
        worlds.append(large_core(random))
        return worlds[-1]

    walk(made, 2, runs=2)
    evictions = [event for world in worlds for event in world.events if isinstance(event, BlocksEvicted)]
    assert sum(len(event.slots) > SMALL for event in evictions) > 3
