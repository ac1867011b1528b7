"""The world of eras: finds nothing in the unchanged code, is repeatable, and detects faults."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from kvsm.check.walks.targets import draw_case
from kvsm.check.walks.walk import walk
from kvsm.check.worlds.era_world import ERA_FAILS, KILLED_IN_RESET, WELL, EraOptions, EraWorld
from kvsm.check.worlds.world import Action, World
from kvsm.core.log import LogWriter
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.tiers import DiskTier
from kvsm.tiers.disk import DiskEra

ON_DISK: tuple[Action, ...] = (("store", 0), ("plan",), ("disk", 0, 0, 0), ("disk", 0, 1, 0))
"""A block is on the host and on the disk of both ranks."""
AGAIN: tuple[Action, ...] = (("end", 0), ("start", 0, 0, 0))
"""The process is killed, and another one goes on."""


def drawn(random: Random) -> World:
    return draw_case("eras", random).make()


def acted(*actions: Action) -> EraWorld:
    world = EraWorld(EraOptions())
    for action in actions:
        assert world.do(action), action
    world.check()
    return world


@pytest.mark.parametrize("seed", range(2))
def test_the_same_actions_lead_to_the_same_world(seed: int) -> None:
    """And the unchanged code breaks no property in it."""
    random = Random(seed)
    world, other = drawn(Random(seed)), drawn(Random(seed))
    for _ in range(80):
        action = world.draw(random)
        assert world.do(action) == other.do(action)
        assert world.fingerprint() == other.fingerprint()
    while (action := world.wind_down()) is not None:
        assert world.do(action)
    world.check()


def test_the_next_process_is_warm_on_both_tiers() -> None:
    """Otherwise the world would check no data that survives a process."""
    world = acted(*ON_DISK, *AGAIN)
    assert b"a" in world.host.ledger.index
    assert world.tier.has(b"a")


@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize("how", [WELL, ERA_FAILS, KILLED_IN_RESET])
def test_a_reset_may_end_in_each_way(other: int, how: int) -> None:
    """If the era was not written, a process with the old weights finds the blocks on the disk."""
    world = acted(*ON_DISK, ("reset", other, how))
    assert world.lives == (how != KILLED_IN_RESET)
    if world.lives:
        assert world.do(("end", 0))
    assert world.do(("start", other, 0, 0))
    assert world.tier.has(b"a") == (how != WELL)


@pytest.mark.parametrize("step", range(1, 6))
def test_a_process_may_be_killed_while_it_opens_its_files(step: int) -> None:
    """The process after the killed one finds the blocks that are stored on the disk (S13)."""
    world = acted(*ON_DISK, ("end", 0), ("start", 0, 0, step))
    assert not world.lives
    assert world.do(("start", 0, 1, 0))
    assert world.tier.has(b"a")
    for action in (("store", 1), *ON_DISK[1:], *AGAIN):
        assert world.do(action), action
    assert world.tier.has(b"b")


def test_what_other_weights_have_computed_after_a_failed_reset_does_not_count_for_the_old_ones() -> None:
    """No stale data (S14). The era is written before the next store leaves for the disk."""
    world = acted(("reset", 1, ERA_FAILS), *ON_DISK, ("end", 0), ("start", 1, 0, 0))
    assert not world.tier.has(b"a")


Planted = Callable[[pytest.MonkeyPatch], None]


def eras_are_not_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskEra, "write", lambda *_: None)


def a_failed_reset_is_not_owed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskTier, "_is_durable_now", lambda _: True)


def nothing_is_written_through(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskTier, "stored", lambda *_: None)


def the_log_is_not_flushed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogWriter, "flush", lambda *_: None)


@pytest.mark.parametrize(
    ("bug", "broken"),
    [
        (eras_are_not_written, Property.FAILURE_IS_NOT_SUCCESS),
        (a_failed_reset_is_not_owed, Property.NO_STALE_DATA),
        (nothing_is_written_through, Property.STORED_ONCE),
        (the_log_is_not_flushed, Property.CORRECT_BYTES),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_planted_is_found(bug: Planted, broken: Property, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    failure = walk(drawn, 1, runs=8).failure
    assert failure is not None
    assert failure.finding.property == broken, failure.finding


def test_a_host_pool_that_holds_other_bytes_is_seen() -> None:
    """Correct bytes (S15)."""
    world = acted(*ON_DISK)
    world.ranks[1].host[:] = 0
    with pytest.raises(PropertyBroken, match="rank 1 serves b'a'"):
        world.check()
