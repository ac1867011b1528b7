"""The era of a disk tier: a reset that was answered holds after any crash, and other weights end it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from disk_rig import Tier, name

from kvsm.disk import DiskEra, SlotGeneration, era_at_start, read_era, recover

OLD = DiskEra("v1", SlotGeneration(2, 7))
CALLS = ("fsync", "replace")


class PowerLost(Exception):
    """The machine stops here."""


def no_file(path: Path) -> None:
    path.unlink()


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "weights", "life", "told"),
    [
        (no_file, "v1", 3, "there is no such file"),
        (damaged, "v1", 3, "is damaged"),
        (None, "v2", 3, "weights: v1, and now v2"),
        (None, "v1", 2, "newer than their era, which begins with transfer 7 of life 2"),
        (None, "v1", 3, ""),
    ],
)
def test_each_row_of_the_table_of_eras(
    tmp_path: Path,
    change: Callable[[Path], None] | None,
    weights: str,
    life: int,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No stale data (S14): whatever ends an era, it is told, and nothing of earlier lives counts."""
    caplog.set_level(logging.WARNING, "kvsm.disk")
    path = tmp_path / "era"
    OLD.write(path)
    if change is not None:
        change(path)
    era = era_at_start(path, weights, life)
    assert era == (DiskEra(weights, SlotGeneration(life, 0)) if told else OLD)
    assert read_era(path) == era
    assert [told in one for one in caplog.messages] == [True] * bool(told)


def test_files_that_are_made_again_serve_what_they_store(tmp_path: Path) -> None:
    """The era of the old files, of a later life, must not hide what the new ones hold."""
    path, era = tmp_path / "tier", tmp_path / "era"
    DiskEra("v1", SlotGeneration(9, 7)).write(era)
    for is_stored in (False, True):
        with closing(Tier(path)) as tier:
            after = era_at_start(era, "v1", tier.file.life).after
            assert list(recover([tier.file], after).slots) == [name(5)] * is_stored
            assert tier.store([1], [5]).good


@pytest.mark.parametrize("last", range(6))
def test_a_power_loss_leaves_the_old_era_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """At each call of the system, of those that make the reset durable. A name that was not flushed may point
    to either file."""
    path, new = tmp_path / "era", DiskEra("v1", SlotGeneration(2, 9))
    OLD.write(path)
    done: list[str] = []

    def stopping(call: str) -> Callable[..., Any]:
        really = getattr(os, call)

        def stop(*args: Any) -> Any:
            if len(done) == last:
                raise PowerLost
            done.append(call)
            return really(*args)

        return stop

    for call in CALLS:
        monkeypatch.setattr(os, call, stopping(call))
    with suppress(PowerLost):
        new.write(path)
        assert done == ["fsync", "replace", "fsync"], "content, name, and the flush of the name"
    assert read_era(path) == (new if "replace" in done else OLD)
