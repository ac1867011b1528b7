"""Restored copies of a log, a pool and its checksums: nothing wrong is served, and each guard is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from museum.restored_tiers import RestoredTiers
from places import ROOT
from planted_bugs import plant
from restored_files import counts, table

from examples import examples
from kvsm.check.worlds.restored_world import LIVES, MOST_MOMENTS, OUTCOMES, RestoredOptions, RestoredWorld
from kvsm.copies import checksums
from kvsm.copies.host_pools import pool_mark
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.tiers.disk import recovery


def tried(life: str) -> Counter[tuple[str, str]]:
    """How often each outcome came in this life."""
    world = RestoredWorld(RestoredOptions(moments=MOST_MOMENTS))
    world.live(LIVES[life])
    return world.counts


@pytest.mark.parametrize(
    "life", [next(iter(LIVES)), *(pytest.param(life, marks=pytest.mark.slow) for life in [*LIVES][1:])]
)
def test_no_combination_of_restored_files_serves_a_wrong_byte(life: str) -> None:
    """Correct bytes (S15), events are state (S10): every outcome comes, and files of one moment serve all."""
    counts = tried(life)
    assert {outcome for _, outcome in counts} >= {"cold", "warm", "all refused"}
    assert life != "three keys in two slots" or {outcome for _, outcome in counts} == set(OUTCOMES)
    assert {older for older, _ in counts} >= {
        "the log's last segment is missing",
        "the log's last segment is cut",
        "the log ends with zeros",
    }


@pytest.mark.slow
def test_the_table_of_the_docs_is_what_random_lives_and_branches_come_to() -> None:
    """Correct bytes (S15): no start of any life serves a wrong byte."""
    page = (ROOT / "docs/warm-restart.md").read_text(encoding="utf-8")
    assert f"<!-- restored files -->\n{table(counts())}\n<!-- end -->" in page


def ignore_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log is believed however old it is."""
    plant(
        monkeypatch,
        pool_mark.why_unbound,
        "if not places:",
        "if places:\n        return places[0], ''\n    if not places:",
    )


def ignore_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log of the pool's life is believed although its end is missing."""
    plant(monkeypatch, pool_mark.why_unbound, " and place.seq <= end.seq", "")


def ignore_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any life of the run is believed."""
    plant(monkeypatch, pool_mark.why_unbound, "place.life_id == end.life_id and ", "")


def ignore_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checksum is of bytes alone."""
    monkeypatch.setattr(checksums.BlockChecksums, "_seals", lambda _self, _hosts, found, _names: ~found)
    monkeypatch.setattr(
        checksums.BlockChecksums, "unproved", lambda _self, job: np.ones(len(job.generations), np.bool_)
    )


Bug = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("bugs", "life"),
    [
        ([ignore_names], "three keys in two slots"),
        pytest.param([ignore_names, ignore_ends], "three keys in two slots", marks=pytest.mark.slow),
        ([ignore_marks], "other weights in another branch"),
        pytest.param([ignore_lives], "other weights in another branch", marks=pytest.mark.slow),
    ],
)
def test_without_one_of_the_guards_a_wrong_byte_is_served(
    bugs: list[Bug], life: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bug in bugs:
        bug(monkeypatch)
    with pytest.raises(PropertyBroken) as caught:
        tried(life)
    assert caught.value.property is Property.CORRECT_BYTES


def test_no_set_of_restored_files_of_two_tiers_serves_or_seals_a_wrong_byte() -> None:
    """Correct bytes (S15), events are state (S10)."""
    tiers = RestoredTiers(2)
    tiers.live(examples(6, least=3))
    outcomes = {outcome for _, outcome in +tiers.counts}
    assert outcomes == {"host cold", "host warm", "refused", "disk cold", "disk serves"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 9))
def test_random_lives_of_two_tiers_serve_no_wrong_byte(seed: int) -> None:
    """Correct bytes (S15)."""
    RestoredTiers(seed).live(12)


def ignore_eras(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot of any era counts."""
    plant(
        monkeypatch,
        recovery.decide,
        "counts = first.eras == np.void(era)",
        "counts = np.ones(len(first.eras), np.bool_)",
    )


def keep_old_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that begins leaves the checksums of the one before."""
    plant(monkeypatch, pool_mark.PoolMark.begin, "self._rows[:] = 0", "pass")


@pytest.mark.parametrize(
    ("bug", "seed"),
    [
        pytest.param(ignore_names, 22, marks=pytest.mark.slow),
        (ignore_eras, 11),
        pytest.param(keep_old_seals, 5, marks=pytest.mark.slow),
    ],
)
def test_two_tiers_need_slots_that_say_what_they_hold_and_since_when(
    bug: Bug, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Correct bytes (S15): a wrong block would be served, or sealed on the disk."""
    bug(monkeypatch)
    with pytest.raises(PropertyBroken) as caught:
        RestoredTiers(seed).live(6)
    assert caught.value.property is Property.CORRECT_BYTES
