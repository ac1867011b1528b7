"""Processes with real copies, killed at any system call: each next one serves what was stored, and only
that."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from killed_lives import live

from examples import TODAY
from kvsm.explain.story import verify_log

LIVES = 8


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A directory on tmpfs, which is removed."""
    directory = Path("/dev/shm") / f"kvsm-{tmp_path.parent.name}-{tmp_path.name}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def chain(directory: Path, seed: int) -> int:
    """Lives on one pool and one log, half of them killed as they start. Returns how many were killed."""
    random, killed = Random(seed), 0
    for _ in range(LIVES):
        kill_at = random.randrange(1, 25 if random.random() < 0.5 else 250)
        status = live(directory, random.randrange(1 << 30), kill_at, random.randrange(3))
        assert status in (0, 9), f"seed {seed}: a life found what it should not"
        killed += status == 9
    if (directory / "log").exists() and list((directory / "log").glob("*.kvsm")):
        verified = verify_log(directory / "log")
        assert verified.good, (seed, verified)
    return killed


@pytest.mark.parametrize("seed", range(2))
def test_what_was_stored_outlives_a_kill_at_any_system_call(seed: int, memory: Path) -> None:
    """No stale data (S14), correct bytes (S15): nothing is lost whose store had ended in the log, and nothing
    is served whose store had not."""
    chain(memory, seed)


@pytest.mark.slow
def test_other_kills_each_day(memory: Path) -> None:
    killed, seed = 0, TODAY * 1000
    while killed < 150:
        (memory / str(seed)).mkdir()
        killed += chain(memory / str(seed), seed)
        shutil.rmtree(memory / str(seed))
        seed += 1
