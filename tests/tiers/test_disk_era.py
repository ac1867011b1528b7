"""The era of a disk tier: a reset that was answered holds after any crash, and other weights end it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from disk_rig import Tier, job, name

from kvsm.events import Direction
from kvsm.tiers.disk import DiskEra, OpenEra, SlotGeneration, era_at_start, read_era, recover

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
    caplog.set_level(logging.WARNING, "kvsm.tiers.disk")
    path = tmp_path / "era"
    OLD.write(path)
    if change is not None:
        change(path)
    era = era_at_start(path, weights, life)
    assert era == (DiskEra(weights, SlotGeneration(life, 0), era.id) if told else OLD)
    assert (era.id != OLD.id) == bool(told)
    assert read_era(path) == era
    assert [told in one for one in caplog.messages] == [True] * bool(told)


def test_files_that_are_made_again_serve_what_they_store(tmp_path: Path) -> None:
    """The era of the old files, of a later life, must not hide what the new ones hold."""
    path, era = tmp_path / "tier", tmp_path / "era"
    DiskEra("v1", SlotGeneration(9, 7)).write(era)
    for is_stored in (False, True):
        with closing(Tier(path)) as tier:
            tier.era = era_at_start(era, "v1", tier.file.life).id
            assert list(recover([tier.file], tier.era).slots) == [name(5)] * is_stored
            assert tier.store([1], [5]).good


def test_an_older_era_that_was_put_back_brings_back_what_it_stored_alone(tmp_path: Path) -> None:
    """Correct bytes (S15): new weights have stored in the same life and in a later one."""
    path, eras = tmp_path / "tier", tmp_path / "era"
    with closing(Tier(path)) as tier:
        open_era = OpenEra(eras, era_at_start(eras, "v1", tier.file.life), tier.file.life)
        older, tier.era = eras.read_bytes(), stamped(open_era)
        assert tier.store([0, 1], [5, 6]).good
        open_era.begin("v2", 1)
        tier.era = stamped(open_era)
        assert tier.store([1, 2], [5, 7]).good
    with closing(Tier(path)) as tier:
        found = recover([tier.file], era_at_start(eras, "v2", tier.file.life).id)
        assert found.slots == {name(5): 1, name(7): 2}
        assert found.told[0]["other era"] == 1
        open_era = OpenEra(eras, era_at_start(eras, "v2", tier.file.life), tier.file.life)
        tier.era = stamped(open_era)
        assert tier.store([3], [8]).good
    eras.write_bytes(older)
    with closing(Tier(path)) as tier:
        found = recover([tier.file], era_at_start(eras, "v1", tier.file.life).id)
        assert found.slots == {name(5): 0}
        assert found.told[0]["other era"] == 3


def stamped(era: OpenEra) -> bytes:
    """The id that a job gets which is planned now."""
    (one,) = era.named([job(1, Direction.STORE, [0], [0], [1])])
    return one.era


def test_a_reset_whose_era_cannot_be_written_leaves_the_era_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failure is not success (S6): jobs must not name an era that no file has."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    era = OpenEra(tmp_path / "era", OLD, 3)
    with monkeypatch.context() as patch:
        patch.setattr("kvsm.tiers.disk.era.write_sealed", full)
        with pytest.raises(OSError, match="No space"):
            era.begin("v2", 4)
    assert stamped(era) == OLD.id
    era.begin(None, 4)
    begun = read_era(tmp_path / "era")
    assert begun == DiskEra("v1", SlotGeneration(3, 4), stamped(era))
    assert stamped(era) != OLD.id


def test_a_load_takes_no_slot_of_another_era(tmp_path: Path) -> None:
    with closing(Tier(tmp_path / "tier")) as tier:
        tier.era = bytes(range(16))
        assert tier.store([1], [5]).good
        tier.era = bytes(reversed(range(16)))
        assert "is of another era" in tier.load([1], [5]).error
        tier.era = bytes(range(16))
        assert tier.holds(1, 5)
        tier.era = b"v1"
        assert "the id of its era has 2 bytes, not 16" in tier.store([2], [6]).error


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
