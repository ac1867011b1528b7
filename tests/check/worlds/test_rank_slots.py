"""The model of one rank's disk: which slots a load believes, and what a power loss leaves."""

from __future__ import annotations

from typing import Any

import pytest

from kvsm.check.worlds.tier_rank import EMPTY, RankSlots, SlotGeneration
from kvsm.core.plan import TransferJob
from kvsm.events import Direction

ERA = b"era"


def job(direction: Direction, transfer: int = 7, key: bytes = b"key") -> TransferJob:
    """Between host slot 0 and disk slot 1."""
    return TransferJob(transfer, direction, (0,), (1,), (key,), (), ERA)


def stored() -> RankSlots:
    """The disk has the host slot, flushed."""
    rank = RankSlots([(0, b"key")], [EMPTY] * 2, meaning=3)
    rank.begin(job(Direction.STORE))
    assert rank.end(job(Direction.STORE), life=1, good=True)
    rank.flush()
    rank.host[0] = None
    return rank


WRONG: dict[str, dict[str, Any]] = {
    "not sealed": {"is_sealed": False},
    "damaged": {"value": None},
    "another key": {"key": b"other"},
    "another era": {"era": b"other"},
    "a later store": {"generation": SlotGeneration(1, 8)},
    "another life": {"generation": SlotGeneration(2, 7)},
}


def test_a_load_brings_what_was_stored() -> None:
    rank = stored()
    assert rank.end(job(Direction.LOAD, 9), life=1, good=True)
    assert rank.host[0] == (0, b"key")


@pytest.mark.parametrize("what", WRONG)
def test_a_load_of_anything_else_fails(what: str) -> None:
    rank = stored()
    rank.disk[1] = rank.disk[1]._replace(**WRONG[what])
    assert not rank.end(job(Direction.LOAD, 9), life=1, good=True)
    assert rank.host[0] is None


def test_a_slot_that_is_being_written_is_not_believed() -> None:
    rank = stored()
    rank.begin(job(Direction.STORE, 8))
    assert not rank.end(job(Direction.LOAD, 9), life=1, good=True)
    assert not rank.end(job(Direction.STORE, 8), life=1, good=False)
    assert not rank.disk[1].is_sealed


def test_a_power_loss_leaves_the_old_the_new_or_a_damaged_slot() -> None:
    rank = stored()
    assert rank.unflushed() == 0
    old = rank.disk[1]
    rank.host[0] = (0, b"other")
    rank.begin(job(Direction.STORE, 8, b"other"))
    rank.end(job(Direction.STORE, 8, b"other"), life=1, good=True)
    new = rank.disk[1]
    assert rank.unflushed() == 1
    left = [rank.after_power_loss(chosen)[1] for chosen in range(3)]
    assert left == [old, new, new._replace(value=None)]
