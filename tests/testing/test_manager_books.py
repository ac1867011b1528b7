"""The books of `ManagerMachine` object to each answer and KV event that contradicts them, without vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvsm.check.worlds.check_counts import taken_counts
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.testing.block_history import BlockHistory
from kvsm.testing.manager_books import ManagerBooks, Told
from kvsm.testing.under_test import UnderTest

A, B, C, D = b"a", b"b", b"c", b"d"
Step = Callable[[ManagerBooks], Any]


def books(*, below: bool = False, blocks: int = 3) -> ManagerBooks:
    """A is stored in block 0, B is being stored to block 1. C is evicted, and D's store has failed."""
    one = ManagerBooks(blocks, below, BlockHistory(UnderTest()))
    store(one, C, 0)
    one.store_begins([D], [D], [], [2])
    one.store_ends([D], good=False)
    one.store_begins([A], [A], [C], [0])
    one.store_ends([A], good=True)
    one.store_begins([B], [B], [], [1])
    one.take([Told([A], False, False)])
    return one


def store(one: ManagerBooks, key: bytes, block: int) -> None:
    one.store_begins([key], [key], [], [block])
    one.store_ends([key], good=True)


def told(one: ManagerBooks, key: bytes, *, removed: bool = False, metadata_only: bool = False) -> None:
    one.take([Told([key], removed, metadata_only)])


def after_a_reset(step: Step) -> Step:
    def steps(one: ManagerBooks) -> Any:
        one.reset()
        return step(one)

    return steps


def while_loading(step: Step) -> Step:
    def steps(one: ManagerBooks) -> Any:
        one.load_begins([A], [0])
        return step(one)

    return steps


WRONG: dict[str, tuple[Step, Property, str]] = {
    "a hit of a key that was never stored": (
        lambda one: one.hit(b"x"),
        Property.PUBLISH_AFTER_COMMIT,
        "never stored",
    ),
    "a hit of a key that is being stored": (
        lambda one: one.hit(B),
        Property.PUBLISH_AFTER_COMMIT,
        "still being stored",
    ),
    "a hit of an evicted key": (lambda one: one.hit(C), Property.CORRECT_BYTES, "it was evicted"),
    "a hit of a failed key": (lambda one: one.hit(D), Property.FAILURE_IS_NOT_SUCCESS, "its store failed"),
    "a hit of a key from before a reset": (
        after_a_reset(lambda one: one.hit(A)),
        Property.NO_STALE_DATA,
        "before a reset",
    ),
    "a hit of a key that was being stored before a reset": (
        after_a_reset(lambda one: one.hit(B)),
        Property.NO_STALE_DATA,
        "before a reset",
    ),
    "a wait for an evicted key": (lambda one: one.waits(C), Property.PROGRESS, "it was evicted, and it is"),
    "a wait for an unknown key": (lambda one: one.waits(b"x"), Property.PROGRESS, "it was never stored"),
    "a miss of a key that is being stored": (
        lambda one: one.missed(B),
        Property.STORED_ONCE,
        "would be stored twice",
    ),
    "a miss of a stored key": (lambda one: one.missed(A), Property.STORED_SO_SERVED, "it is stored"),
    "a load of another block": (
        lambda one: one.load_begins([A], [2]),
        Property.CORRECT_BYTES,
        "was stored to block 0; its load reads 2",
    ),
    "a load of too few blocks": (
        lambda one: one.load_begins([A, C], [0]),
        Property.CORRECT_BYTES,
        "names 1 blocks",
    ),
    "a load of a block outside": (
        lambda one: one.load_begins([A], [3]),
        Property.CONSERVATION,
        "but there are 3, each once",
    ),
    "a load of a block below": (
        lambda one: one.load_begins([A], [-1]),
        Property.CONSERVATION,
        "but there are 3, each once",
    ),
    "a load of one block twice": (
        lambda one: one.load_begins([A, C], [0, 0]),
        Property.CONSERVATION,
        "but there are 3, each once",
    ),
    "a store of what was not offered": (
        lambda one: one.store_begins([C], [D], [], None),
        Property.STORED_ONCE,
        "not each once, and of these",
    ),
    "a store of a key twice": (
        lambda one: one.store_begins([C], [C, C], [], None),
        Property.STORED_ONCE,
        "not each once, and of these",
    ),
    "a store of a stored key": (
        lambda one: one.store_begins([A], [A], [], None),
        Property.STORED_ONCE,
        "but it is already stored",
    ),
    "a store of a key that is being stored": (
        lambda one: one.store_begins([B], [B], [], None),
        Property.STORED_ONCE,
        "but it is already being stored",
    ),
    "more keys than blocks": (
        lambda one: one.store_begins([C, D], [C, D], [], None),
        Property.CONSERVATION,
        "3 blocks hold 4 keys",
    ),
    "a store to a block outside": (
        lambda one: one.store_begins([C], [C], [], [3]),
        Property.CONSERVATION,
        "but there are 3, each once",
    ),
    "a store to a block in use": (
        lambda one: one.store_begins([C], [C], [], [0]),
        Property.CONSERVATION,
        "and was not evicted",
    ),
    "a store to a block that is written": (
        lambda one: one.store_begins([C], [C], [], [1]),
        Property.NO_REUSE_IN_FLIGHT,
        "and is being stored",
    ),
    "a store to a block that is read": (
        while_loading(lambda one: one.store_begins([C], [C], [], [0])),
        Property.NO_REUSE_IN_FLIGHT,
        "and is being loaded",
    ),
    "an eviction under a load": (
        while_loading(lambda one: one.store_begins([C], [C], [A], [0])),
        Property.NO_REUSE_IN_FLIGHT,
        "a load is reading it",
    ),
    "an eviction under a store": (
        lambda one: one.store_begins([C], [C], [B], [1]),
        Property.NO_REUSE_IN_FLIGHT,
        "it is being stored",
    ),
    "an eviction of an offered key": (
        lambda one: one.store_begins([A, C], [C], [A], [0]),
        Property.STORED_ONCE,
        "for the offer that names it",
    ),
    "an eviction of what is not stored": (
        lambda one: one.store_begins([D], [D], [C], [2]),
        Property.EVENTS_ARE_STATE,
        "it is not stored",
    ),
    "an eviction of an offered key that is not stored": (
        lambda one: one.store_begins([C, D], [D], [C], [2]),
        Property.EVENTS_ARE_STATE,
        "it is not stored",
    ),
    "an event that removes what no event has stored": (
        lambda one: told(one, C, removed=True),
        Property.EVENTS_ARE_STATE,
        "which no event has stored",
    ),
    "two events that store a key": (
        lambda one: told(one, A),
        Property.EVENTS_ARE_STATE,
        "two events store",
    ),
    "an event that forgets a stored key": (
        lambda one: told(one, A, metadata_only=True),
        Property.EVENTS_ARE_STATE,
        "which is stored",
    ),
    "an event that forgets a key that is being stored": (
        lambda one: told(one, B, metadata_only=True),
        Property.EVENTS_ARE_STATE,
        "which is being stored",
    ),
    "a stored key without an event": (
        lambda one: (one.store_ends([B], good=True), one.compare_events()),
        Property.EVENTS_ARE_STATE,
        "and no event says so",
    ),
    "an event for a key that is not stored": (
        lambda one: (told(one, C), one.compare_events()),
        Property.EVENTS_ARE_STATE,
        "but they are not",
    ),
    "an event right after a reset": (
        after_a_reset(lambda one: (told(one, A), one.nothing_is_announced())),
        Property.EVENTS_ARE_STATE,
        "right after a reset",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_each_contradiction_breaks_its_property(what: str) -> None:
    step, broken, message = WRONG[what]
    with pytest.raises(PropertyBroken, match=message) as caught:
        step(books())
    assert caught.value.property is broken


def test_what_the_books_know_is_accepted() -> None:
    one = books()
    one.hit(A)
    for key in (A, B):
        one.waits(key)
    for key in (C, D, b"x"):
        one.missed(key)
    one.load_begins([A], [0])
    one.load_ends([A])
    one.load_begins([A], None)
    one.load_ends([A])
    one.store_begins([C, A], [C], [], [2])
    one.compare_events()
    told(one, D, metadata_only=True)
    one.store_ends([C], good=True)
    told(one, C)
    told(one, C, removed=True)
    told(one, C)
    one.compare_events()
    one.reset()
    one.nothing_is_announced()
    told(one, A, removed=True)  # some managers tell it late
    with pytest.raises(PropertyBroken, match="which no event has stored"):
        told(one, A, removed=True)


def test_each_stored_key_needs_an_event() -> None:
    one = ManagerBooks(3, False, BlockHistory(UnderTest()))
    store(one, A, 0)
    with pytest.raises(PropertyBroken, match="and no event says so"):
        one.compare_events()


def test_wrong_bytes_are_told_with_the_stories_of_both_blocks() -> None:
    one = books()
    one.store_ends([B], good=True)
    with pytest.raises(PropertyBroken) as caught:
        one.load_begins([A], [1])
    for said in (
        "block 0 was last written by the store of b'a'",
        "block 1 was last written by the store of b'b'",
    ):
        assert said in caught.value.message


def counted(one: ManagerBooks, step: Step) -> dict[str, int]:
    taken_counts()
    step(one)
    return {case: times for (_, case), times in taken_counts().items() if times}


def test_a_case_counts_only_when_a_wrong_manager_could_show() -> None:
    one = books()
    assert counted(one, lambda one: one.hit(A)) == {"hits": 1, "lookups of stored keys": 1}
    assert counted(books(below=True), lambda one: one.hit(C)) == {"hits": 1}
    assert counted(one, lambda one: one.missed(b"x")) == {}
    assert counted(one, lambda one: one.missed(C)) == {"lookups of evicted keys": 1}
    assert counted(one, lambda one: one.missed(D)) == {"lookups of keys whose store failed": 1}
    # Again stored: the fate of C is over.
    one.store_begins([C], [C], [], [2])
    one.store_ends([C], good=True)
    taken_counts()
    with pytest.raises(PropertyBroken):
        one.missed(C)
    assert taken_counts() == {}
    one.reset()
    assert counted(one, lambda one: one.missed(A)) == {"lookups of keys from before a reset": 1}


@pytest.mark.parametrize(("loads", "stores"), [(True, False), (False, True), (False, False)])
def test_an_eviction_counts_during_a_copy(loads: bool, stores: bool) -> None:
    one = ManagerBooks(3, False, BlockHistory(UnderTest()))
    store(one, A, 0)
    store(one, C, 1)
    if loads:
        one.load_begins([A], [0])
    if stores:
        one.store_begins([B], [B], [], [2])
    cases = counted(one, lambda one: one.store_begins([D], [D], [C], [1]))
    assert cases.get("evictions during a copy", 0) == int(loads or stores)


def test_two_loads_of_a_key_end_one_after_the_other() -> None:
    one = books()
    one.load_begins([A], [0])
    one.load_begins([A], [0])
    one.load_ends([A])
    with pytest.raises(PropertyBroken, match="a load is reading it"):
        one.store_begins([C], [C], [A], [0])


def test_a_key_may_come_back_from_a_lower_tier_if_it_was_stored_before() -> None:
    one = books(below=True)
    for key in (A, C):
        one.hit(key)
        one.waits(key)
    told(one, D)
    told(one, D, removed=True)
    with pytest.raises(PropertyBroken, match="its store failed"):
        one.hit(D)
    told(one, C)
    assert one.stored[C] is None
    told(one, A, removed=True)
    assert A not in one.stored
    one.hit(A)
    one.load_begins([C], [2])
    with pytest.raises(PropertyBroken, match="a load is reading it") as caught:
        told(one, C, removed=True)
    assert caught.value.property is Property.NO_REUSE_IN_FLIGHT
