"""`disagreements` sees each thing in which two ledgers can differ about a copy between host and disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_tiers import KEYS, Tiers

from kvsm.events import Direction
from kvsm.tiers import disagreements


def copying() -> Tiers:
    """Two blocks are on their way to the disk."""
    tiers = Tiers(host_blocks=4, disk=4)
    tiers.store(KEYS[:2])
    (job,) = tiers.tier.plan()
    assert job.direction is Direction.STORE
    assert disagreements(tiers.tier) == []
    return tiers


def host(tiers: Tiers) -> Any:
    """The host's record of the copy."""
    (copy,) = tiers.tier.copies.values()
    return tiers.host.ledger.transfers[copy.host]


def disk(tiers: Tiers) -> Any:
    (copy,) = tiers.tier.copies.values()
    return tiers.tier.disk.ledger.transfers[copy.disk]


CHANGES: dict[str, tuple[Callable[[Tiers], Any], str]] = {
    "the direction": (lambda tiers: setattr(host(tiers), "direction", Direction.STORE), "other directions"),
    "the state": (lambda tiers: setattr(host(tiers), "word", host(tiers).word ^ 1), "other states"),
    "a report": (lambda tiers: setattr(disk(tiers), "reported", 1), "other reports"),
    "a host slot": (lambda tiers: setattr(host(tiers), "slots", (0, 3)), "other host slots"),
    "a key": (lambda tiers: setattr(disk(tiers), "keys", (KEYS[0], b"another")), "other keys"),
    "the copy above": (
        lambda tiers: tiers.host.ledger.transfers.pop(host(tiers).id),
        "is in flight in one ledger only",
    ),
    "the copy below": (
        lambda tiers: tiers.tier.disk.ledger.transfers.pop(disk(tiers).id),
        "is in flight in one ledger only",
    ),
    "the copy itself": (lambda tiers: tiers.tier.copies.clear(), "of the disk belongs to no copy"),
    "a slot that is read": (
        lambda tiers: tiers.host.ledger.free.append((0,)),
        "host slot 0 is free, and a disk copy touches it",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_each_difference_between_the_ledgers_is_told(what: str) -> None:
    change, told = CHANGES[what]
    tiers = copying()
    change(tiers)
    assert any(told in line for line in disagreements(tiers.tier)), disagreements(tiers.tier)
