"""The museum's disk world: finds nothing in the unchanged code, is repeatable, and loses data like a disk."""

from __future__ import annotations

from random import Random

import pytest
from museum.disk_history import MOST_VERSIONS, SECTOR, DiskHistory
from museum.disk_world import DiskWorld, drawn

OLD, NEW = b"o" * SECTOR, b"n" * SECTOR


def after_power_losses(history: DiskHistory) -> set[bytes]:
    return {history.moments[-1].after_power_loss(Random(seed)) for seed in range(200)}


def test_a_power_loss_keeps_any_sectors_that_were_not_flushed() -> None:
    history = DiskHistory(1, OLD * 2)
    history.write(NEW * 2, 0)
    assert after_power_losses(history) == {one + other for one in (OLD, NEW) for other in (OLD, NEW)}
    assert history.moments[-1].after_kill() == NEW * 2


def test_what_was_flushed_is_kept() -> None:
    history = DiskHistory(1, OLD)
    history.write(NEW, 0)
    history.flush()
    assert after_power_losses(history) == {NEW}


def test_a_file_that_grew_reads_as_zeros_where_nothing_was_written() -> None:
    """Also after its end: a lost sector does not move the sectors after it."""
    history = DiskHistory(1, b"")
    history.grow(SECTOR)
    history.write(NEW, 2 * SECTOR)
    zeros = bytes(SECTOR)
    assert history.moments[-1].after_kill() == zeros * 2 + NEW
    assert after_power_losses(history) == {zeros * 3, zeros * 2 + NEW}


def test_a_sector_keeps_its_flushed_version_and_a_few_of_the_last() -> None:
    """So a long run without a flush costs no more than a short one."""
    history = DiskHistory(1, OLD)
    contents = [bytes([number]) * SECTOR for number in range(2 * MOST_VERSIONS)]
    for content in contents:
        history.write(content, 0)
    assert after_power_losses(history) == {OLD, *contents[-MOST_VERSIONS:]}


@pytest.mark.parametrize("seed", range(3))
def test_the_same_actions_lead_to_the_same_world(seed: int) -> None:
    """And the unchanged code breaks no property in it."""
    random = Random(seed)
    world, other = drawn(Random(seed)), drawn(Random(seed))
    for _ in range(40):
        action = world.draw(random)
        assert world.do(action) == other.do(action)
        assert world.fingerprint() == other.fingerprint()
    while (action := world.wind_down()) is not None:
        assert world.do(action)
    world.check()


def test_every_kind_of_action_can_happen() -> None:
    world = DiskWorld()
    for action in (("store", 0, 0), ("load", 0), ("rot", 0, 0), ("fail", 1, 1, 0, 0), ("reset", 0)):
        assert world.do(action), action
    for end in (("stop",), ("crash", 1, 0, 2)):
        assert world.do(end)
        assert not world.do(("load", 0)), "nobody lives"
        assert world.do(("start", 0, 0))
