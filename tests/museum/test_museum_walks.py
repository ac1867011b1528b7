"""The museum's walks with large batches, crowded cores, loads beside hand-overs, and a failing disk."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
from museum.core_walks import crowded_core, large_core, loading_hand_over
from museum.log_disk import PAGE, LogDisk
from museum.log_world import FailingLogWorld, LogOptions, drawn_log
from museum.policy_world import PolicyWorld, drawn_policy

from kvsm.check.walks.walk import MakeWorld, walk
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.core.policies import POLICIES
from kvsm.errors import PropertyBroken
from kvsm.events import BlocksEvicted
from kvsm.ids import SMALL

WALKS = (large_core, drawn_policy, crowded_core, loading_hand_over, drawn_log)


@pytest.mark.parametrize("make", WALKS, ids=lambda one: one.__name__)
def test_nothing_is_found_in_the_right_code(make: MakeWorld) -> None:
    assert walk(make, 11, runs=1).failure is None


@pytest.mark.slow
@pytest.mark.parametrize("make", WALKS, ids=lambda one: one.__name__)
def test_nothing_is_found_in_the_right_code_at_length(make: MakeWorld) -> None:
    assert walk(make, 12, runs=15).failure is None


def test_a_large_pool_evicts_many_blocks_at_once() -> None:
    """Otherwise the walk would have no batches that are arrays."""
    worlds: list[CoreWorld] = []

    def made(random: Random) -> CoreWorld:
        worlds.append(large_core(random))
        return worlds[-1]

    walk(made, 2, runs=2)
    evictions = [event for world in worlds for event in world.events if isinstance(event, BlocksEvicted)]
    assert sum(len(event.slots) > SMALL for event in evictions) > 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_evicts_what_is_protected_is_seen(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A match holds what it counts (S7)."""
    world = PolicyWorld(policy, 40)
    choose = world._policy.choose
    monkeypatch.setattr(world._policy, "choose", lambda count, _protected: choose(count, ()))
    assert world.do(("admit", 40, 0))
    with pytest.raises(PropertyBroken, match="are protected"):
        world.do(("evict", 30, 0, 3))


# The log.


def test_what_a_failed_sync_has_dropped_stays_lost(tmp_path: Path) -> None:
    """A second sync succeeds, but proves nothing: the system has marked the pages clean."""
    disk, path = LogDisk(), tmp_path / "file"
    with disk.attached(), path.open("w+b") as file:
        for fill in (b"a", b"b"):
            os.pwrite(file.fileno(), fill * PAGE, 0 if fill == b"a" else PAGE)
            os.fdatasync(file.fileno())
        os.pwrite(file.fileno(), b"c" * PAGE, PAGE)
        disk.arm("sync", _dropping())
        with pytest.raises(OSError, match="Input/output error"):
            os.fdatasync(file.fileno())
        os.fdatasync(file.fileno())
        assert path.read_bytes() == b"a" * PAGE + b"c" * PAGE
    disk.lose_power(tmp_path, Random(0))
    assert path.read_bytes() == b"a" * PAGE + b"b" * PAGE


def _dropping() -> int:
    """Return a seed with which the first of two versions stays."""
    return next(seed for seed in range(99) if Random(seed).choice((0, 1)) == 0)


SYNCED = LogOptions("interval", sync_thread=True, on_failure="stop", segment_bytes=1 << 20)


def test_the_next_process_writes_again_what_a_failed_sync_may_have_dropped() -> None:
    """Events are state (S10).

    A sync fails, the process is killed before it marks the log, the next process continues the log, and then
    the power is lost.
    """
    for which in range(8):
        world = FailingLogWorld(SYNCED)
        for action in (("append", 900), ("fail_sync", which), ("flush",), ("sync",), ("kill",), ("start",)):
            assert world.do(action), action
        assert world.do(("lose_power", 0))
        assert world.describe()["events"] == "1"
