"""The disk world: finds nothing in the unchanged code, is repeatable, and can do every kind of action."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from kvsm.check.walks.targets import draw_case
from kvsm.check.worlds import world_files
from kvsm.check.worlds.disk_world import DiskWorld, DiskWorldOptions
from kvsm.errors import ConfigError
from kvsm.tiers.disk import FlushPolicy


@pytest.mark.parametrize("seed", range(3))
def test_the_same_actions_lead_to_the_same_world(seed: int) -> None:
    """And the unchanged code breaks no property in it."""
    random = Random(seed)
    world, other = (draw_case("disk", Random(seed)).make() for _ in range(2))
    for _ in range(40):
        action = world.draw(random)
        assert world.do(action) == other.do(action)
        assert world.fingerprint() == other.fingerprint()
    while (action := world.wind_down()) is not None:
        assert world.do(action)
    world.check()


def test_every_kind_of_action_can_happen() -> None:
    world = DiskWorld(DiskWorldOptions())
    for action in (("store", 0, 0), ("load", 0), ("rot", 0, 0), ("fail", 1, 1, 0, 0), ("reset", 0)):
        assert world.do(action), action
    for end in (("stop",), ("crash", 1, 0, 2)):
        assert world.do(end)
        assert not world.do(("load", 0)), "no process runs"
        assert world.do(("start", 0, 0))


def test_a_flush_that_depends_on_a_clock_is_refused() -> None:
    """A world with it would not be repeatable."""
    with pytest.raises(ConfigError, match="depends on a clock"):
        DiskWorldOptions(flush=FlushPolicy.INTERVAL)


@pytest.mark.parametrize("target", ["disk", "eras", "restarts", "restored", "log"])
def test_a_world_of_files_needs_no_call_that_only_linux_has(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS, where a walk of all targets must not fail."""
    for name in ("O_DIRECT", "fdatasync", "posix_fallocate"):
        monkeypatch.delattr(os, name)
    world, random = draw_case(target, Random(1)).make(), Random(1)
    with suppress(IndexError):  # no action is left
        for _ in range(30):
            world.do(world.draw(random))
    world.check()


@pytest.mark.parametrize("target", ["disk", "eras", "restarts", "restored", "log"])
def test_a_world_of_files_leaves_none(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No directory and no open file is left, even if it ends while a process runs."""
    monkeypatch.setattr(world_files, "IN_MEMORY", str(tmp_path))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    world, random = draw_case(target, Random(2)).make(), Random(2)
    for _ in range(3):
        world.do(world.draw(random))
    assert [*tmp_path.iterdir()]
    del world
    gc.collect()
    assert not [*tmp_path.iterdir()]
    assert len(os.listdir("/proc/self/fd")) <= before
