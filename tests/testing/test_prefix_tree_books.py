"""The books of `PrefixTreeMachine` object to each answer of a tree that contradicts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvsm.check.worlds.check_counts import taken_counts
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.testing.block_history import BlockHistory
from kvsm.testing.prefix_tree_books import PrefixMatch, TreeBooks
from kvsm.testing.under_test import UnderTest

P, Q = (1, 2), (1, 2, 3)
Step = Callable[[TreeBooks], Any]


def books() -> TreeBooks:
    """A tree with two slots on each tier, and the blocks of `P`."""
    one = TreeBooks(2, 2)
    one.insert(P)
    return one


def compare(one: TreeBooks, *, free: Any = (), tree: Any = (), private: Any = None, held: Any = None) -> None:
    one.compare_slots("device", free, tree, private or {}, held or {})


WRONG: dict[str, tuple[Step, Property, str]] = {
    "a match of blocks that were never inserted": (
        lambda one: one.matched((7, 8), PrefixMatch([0])),
        Property.PUBLISH_AFTER_COMMIT,
        "never inserted",
    ),
    "a match that is longer than its prompt": (
        lambda one: one.matched(P, PrefixMatch([0, 1], 1)),
        Property.LEGAL_CALLS,
        "a prompt of 2 blocks has a match of 3",
    ),
    "a match of less than nothing": (
        lambda one: one.matched(P, PrefixMatch([0, 1], -1)),
        Property.LEGAL_CALLS,
        "has a match of 1",
    ),
    "a match that is shorter than that of its prefix": (
        lambda one: (
            one.compare_matches({(1,): PrefixMatch([0]), P: PrefixMatch([0])}, [0])
            or one.compare_matches(
                {Q: PrefixMatch([]), (1,): PrefixMatch([0]), P: PrefixMatch([0, 1])}, [0, 1]
            )
        ),
        Property.STORED_SO_SERVED,
        "has a match of 0 blocks, and its prefix",
    ),
    "a load back that moves a block": (
        lambda one: one.loaded(PrefixMatch([0], 1), PrefixMatch([1, 0])),
        Property.LEGAL_CALLS,
        "a load back of",
    ),
    "a load back of more than the match": (
        lambda one: one.loaded(PrefixMatch([0], 1), PrefixMatch([0, 1, 2])),
        Property.LEGAL_CALLS,
        "a load back of",
    ),
    "a lost slot": (lambda one: compare(one, free=[1]), Property.CONSERVATION, "device slot 0 is lost"),
    "a slot in two places": (
        lambda one: compare(one, free=[0, 1], tree=[1]),
        Property.CONSERVATION,
        "device slot 1 is free and in the tree",
    ),
    "a slot that is free twice": (
        lambda one: compare(one, free=[0, 0, 1]),
        Property.ONE_RELEASE_PER_HOLD,
        "device slot 0 is free and free",
    ),
    "a slot outside": (
        lambda one: compare(one, free=[0, 1, 2]),
        Property.CONSERVATION,
        "device slot 2 is free: ",
    ),
    "a slot of a request in the tree": (
        lambda one: compare(one, free=[0], tree=[1], private={1: "r"}),
        Property.CONSERVATION,
        "in the tree and r's own",
    ),
    "a locked slot that is free": (
        lambda one: compare(one, free=[0, 1], held={1: "r"}),
        Property.MATCH_HOLDS,
        "which is evicted: it is free",
    ),
    "a locked slot that another request has": (
        lambda one: compare(one, free=[0], private={1: "q"}, held={1: "r"}),
        Property.MATCH_HOLDS,
        "which is evicted: it is q's",
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
    one.matched(Q, PrefixMatch([0, 1]))
    one.matched(Q, PrefixMatch([0], 1))
    one.matched((7,), PrefixMatch([]))
    one.loaded(PrefixMatch([0], 1), PrefixMatch([0]))
    one.loaded(PrefixMatch([0], 1), PrefixMatch([0, 1]))
    compare(one, free=[0], tree=[1], held={1: "r"})
    compare(one, tree=[0], private={1: "r"})


@pytest.mark.parametrize(("other", "said"), [(P, "computed for"), ((5,), "computed for")])
def test_wrong_words_are_named_by_their_prefix(other: tuple[int, ...], said: str) -> None:
    """The first prefix that has a word is as likely as any other."""
    one = books()
    words = {prefix: one.word(prefix) for prefix in (P, Q, (5,))}
    history = BlockHistory(UnderTest())
    one.read("r", Q, 0, words[Q], history)
    with pytest.raises(PropertyBroken) as caught:
        one.read("r", Q, 0, words[other], history)
    assert caught.value.property is Property.CORRECT_BYTES
    assert f"{said} {other}" in caught.value.message


def test_reads_of_blocks_that_a_reset_removed_are_counted() -> None:
    """Reads of other blocks do not show whether stale data is found."""
    one, history = books(), BlockHistory(UnderTest())
    taken_counts()
    one.read("r", P, 0, one.word(P), history)
    assert {property for property, _ in taken_counts()} == {Property.CORRECT_BYTES}
    one.reset()
    one.read("r", P, 0, one.word(P), history)
    assert {property for property, _ in taken_counts()} == {Property.CORRECT_BYTES, Property.NO_STALE_DATA}
