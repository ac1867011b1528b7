"""Stored, so served (S19) in the world of two tiers: bugs that serve less are found, and cases arise."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from planted_bugs import plant

from kvsm.check.walks.targets import draw_case
from kvsm.check.walks.walk import walk
from kvsm.check.worlds.check_counts import taken_counts
from kvsm.check.worlds.world import World
from kvsm.properties import Property
from kvsm.tiers import DiskTier
from kvsm.tiers.fetches import Fetches

Planted = Callable[[pytest.MonkeyPatch], None]


def drawn(random: Random) -> World:
    return draw_case("tiers", random).make()


def no_copy_begins(patch: pytest.MonkeyPatch) -> None:
    """The disk stores everything and serves nothing."""
    patch.setattr(Fetches, "may_begin", lambda *_: False)


def half_a_prompt_is_not_fetched(patch: pytest.MonkeyPatch) -> None:
    """If the host has a part of a prompt, the disk is not asked for the rest."""
    plant(patch, DiskTier.fetch, "if not lacking:", "if not lacking or resident:")


def what_an_earlier_process_stored_is_not_read(patch: pytest.MonkeyPatch) -> None:
    """The next process adopts the blocks, and reads none of them before it has stored one itself."""
    has = DiskTier.has
    patch.setattr(DiskTier, "has", lambda tier, key: tier.counts.to_disk > 0 and has(tier, key))


def a_second_wait_is_refused(patch: pytest.MonkeyPatch) -> None:
    """A request that has waited before is not let to wait for the disk, although it still may."""
    plant(
        patch,
        DiskTier.fetch,
        "if draining or not may_defer(self.host, hit.request):",
        "if draining or hit.request in self.host.ledger.requests:",
    )


def what_the_host_has_waits(patch: pytest.MonkeyPatch) -> None:
    """A request whose keys are all on the host waits for any copy in flight."""
    fetch = DiskTier.fetch
    patch.setattr(DiskTier, "fetch", lambda tier, hit: fetch(tier, hit) or tier._fetches.turn())


@pytest.mark.parametrize(
    "bug",
    [
        no_copy_begins,
        half_a_prompt_is_not_fetched,
        what_an_earlier_process_stored_is_not_read,
        a_second_wait_is_refused,
        what_the_host_has_waits,
    ],
    ids=lambda one: one.__name__,
)
def test_what_serves_less_is_found(bug: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    failure = walk(drawn, 1, runs=60).failure
    assert failure is not None
    assert failure.finding.property is Property.STORED_SO_SERVED, failure.finding


def test_the_cases_of_the_checks_arise() -> None:
    taken_counts()
    assert walk(drawn, 1, runs=5).failure is None
    counted = {case for tried, case in taken_counts() if tried is Property.STORED_SO_SERVED}
    assert counted == {"prompts that the disk has after a kill", "requests that wait for the disk"}


def test_a_process_that_does_not_come_to_rest_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress (S9): the world bounds the steps that a prompt may take in the next process."""
    monkeypatch.setattr("kvsm.check.worlds.tier_served._MOST_STEPS", 1)
    failure = walk(drawn, seed=1, runs=8).failure
    assert failure is not None
    assert failure.finding.property is Property.PROGRESS
