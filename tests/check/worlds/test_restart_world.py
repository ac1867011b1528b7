"""The world of restarts: the next process is warm exactly if it may be."""

from __future__ import annotations

import pytest

from kvsm.check.worlds.restart_world import RestartOptions, RestartWorld
from kvsm.check.worlds.world import Action
from kvsm.core.ledger import readable_keys

STORED: tuple[Action, ...] = (("store", 0), ("report",), ("step",))


@pytest.mark.parametrize("end", [("close",), ("kill", 0), ("kill", 1), ("kill", 2)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_with_the_same_weights_and_pools_is_warm(end: Action, ranks: int) -> None:
    """Otherwise the world would check no data that survives a process."""
    world = RestartWorld(RestartOptions(ranks=ranks))
    for action in (*STORED, end, ("start", 0, 0, 0, 0)):
        assert world.do(action), action
    assert world.core is not None
    assert len(readable_keys(world.core.ledger)) == 1


@pytest.mark.parametrize("which", range(4))
def test_a_process_with_other_weights_or_pools_is_cold(which: int) -> None:
    world = RestartWorld(RestartOptions())
    start = ("start", *(int(place == which) for place in range(4)))
    for action in (*STORED, ("close",), start):
        assert world.do(action), action
    assert world.core is not None
    assert not readable_keys(world.core.ledger)
