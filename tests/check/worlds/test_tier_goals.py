"""What an exploration of two tiers must meet: each case is met by what it names, and by nothing less."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvsm.check.worlds import tier_goals
from kvsm.check.worlds.two_tiers import TwoTierOptions, TwoTierWorld


def world(**parts: Any) -> TwoTierWorld:
    return cast("TwoTierWorld", SimpleNamespace(**parts))


def waiting(*, deferred: bool, index: set[bytes]) -> TwoTierWorld:
    """A request whose hit has two keys."""
    ledger = SimpleNamespace(deferred={"r": 1} if deferred else {}, index=dict.fromkeys(index, 0))
    hit = SimpleNamespace(request="r", keys=[b"a", b"b"])
    return world(host=SimpleNamespace(ledger=ledger), requests=SimpleNamespace(hits={"r": hit}))


@pytest.mark.parametrize(
    ("deferred", "index", "met"),
    [
        (True, {b"a"}, True),
        (True, set(), True),
        (True, {b"a", b"b"}, False),  # its copy is in flight
        (True, {b"a", b"b", b"c"}, False),
        (False, {b"a"}, False),
    ],
)
def test_a_request_waits_its_turn_before_its_blocks_are_copied(
    deferred: bool, index: set[bytes], met: bool
) -> None:
    assert tier_goals._waits_its_turn(waiting(deferred=deferred, index=index)) is met


def counts(**numbers: int) -> TwoTierWorld:
    return world(tier=SimpleNamespace(counts=SimpleNamespace(**numbers)))


def test_no_block_of_the_disk_and_no_failed_store_meet_nothing() -> None:
    assert not tier_goals._fetches(counts(from_disk=0))
    assert tier_goals._fetches(counts(from_disk=1))
    assert not tier_goals._store_fails(counts(not_stored=0))
    assert tier_goals._store_fails(counts(not_stored=1))
    assert not tier_goals._retires(world(_retired_places=0))
    assert tier_goals._retires(world(_retired_places=1))


@pytest.mark.parametrize(
    ("life", "found", "sealed", "warm", "cold"),
    [
        (1, 1, True, False, False),
        (1, 0, True, False, False),
        (2, 1, True, True, False),
        (2, 0, True, False, True),
        (2, 0, False, False, False),
    ],
)
def test_only_a_later_process_restarts(life: int, found: int, sealed: bool, warm: bool, cold: bool) -> None:
    """Cold: it trusts none of the slots that were sealed on the disk. There must be one."""
    ledger = SimpleNamespace(index=dict.fromkeys(range(found)))
    slots = [SimpleNamespace(is_sealed=sealed)]
    seen = world(life=life, disk=SimpleNamespace(ledger=ledger), ranks=[SimpleNamespace(disk=slots)])
    assert (tier_goals._restarts_warm(seen), tier_goals._restarts_cold(seen)) == (warm, cold)


def test_a_world_at_first_meets_no_case_and_needs_nothing() -> None:
    first = TwoTierWorld(TwoTierOptions())
    cases = [one for name, one in vars(tier_goals).items() if name.isupper() and name != "TIERS_ALWAYS"]
    assert len(cases) == 8
    assert not any(one.holds(first) for one in cases)
    assert all(one.holds(first) for one in tier_goals.TIERS_ALWAYS)
