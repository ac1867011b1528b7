"""The native part of a witness follows and compares as the Python one does. It leaves to it what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_twins import reset_often, spoiled, walked, walked_in_arrays
from places import ROOT
from replay_life import OPERATIONS, Life, Operations, random_life

from examples import examples
from kvsm.check.worlds.core_options import draw_options
from kvsm.core import native
from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import Ledger, Provenance
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.core.policies import POLICIES
from kvsm.core.policies.slot_queue import SlotQueue
from kvsm.events import KINDS, OffloadConfig, OffloadingEvent
from kvsm.explain.story import Auditor
from kvsm.explain.verify.book_entries import USUAL_LEASES, USUAL_SLOTS, BookedTransfer
from kvsm.explain.verify.witness import NativeWitness, Witness
from kvsm.properties import Property

DECODER: msgspec.msgpack.Decoder[OffloadingEvent] = msgspec.msgpack.Decoder(reduce(or_, KINDS))

if native.WHY_NOT:
    pytest.skip(f"Python folds: {native.WHY_NOT}", allow_module_level=True)


def plain(value: Any) -> Any:
    """A value of a book. A batch may be a tuple, a list or an array."""
    if isinstance(value, BookedTransfer):
        return {name: plain(getattr(value, name)) for name in BookedTransfer.__slots__}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, set):
        return value
    return (
        [plain(one) for one in value]
        if hasattr(value, "__iter__") and not isinstance(value, str | bytes)
        else value
    )


class Books:
    """Two auditors, one with each body, that follow the same events and are compared after each of them."""

    def __init__(self, config: OffloadConfig, saved: bytes | None = None) -> None:
        self.native = Auditor(Ledger(config) if saved is None else restore(saved))
        assert isinstance(self.native.witness, NativeWitness)
        with native.without():
            self.python = Auditor(Ledger(config) if saved is None else restore(saved))
        assert type(self.python.witness) is Witness

    def follow(self, event: OffloadingEvent) -> list[Any]:
        """What the event breaks, as both say. Both books are equal then, unless it breaks something."""
        done, found = self.native.apply_all([event])
        expected = self.python.apply(event)
        assert done == 1
        assert [plain_violation(one) for one in found] == [plain_violation(one) for one in expected], event
        if self.native.ledger.seq == self.python.ledger.seq == event.seq:
            assert book(self.native.witness) == book(self.python.witness), event
        return found

    def follow_all(self, events: Sequence[OffloadingEvent]) -> None:
        """The log of a walk. Its requests' cursors may go back, because nobody keeps them. No other property
        is broken."""
        for event in events:
            assert {one.property for one in self.follow(event)} <= {Property.STORED_ONCE}
        assert self.native.check() == self.python.check() == []


def plain_violation(one: Any) -> Any:
    return {name: plain(getattr(one, name)) for name in one.__struct_fields__}


def book(witness: Witness) -> dict[str, Any]:
    names = [
        name
        for name in vars(Witness(OffloadConfig(host_blocks=1, device_blocks=1)))
        if not name.startswith("_now_") and name not in ("told", "_broken")
    ]
    return {name: plain(getattr(witness, name)) for name in names}


def walked_in_tuples(seed: int) -> tuple[OffloadConfig, Sequence[OffloadingEvent]]:
    options = draw_options(Random(seed))
    return options.config(), walked(options, seed, 40)


# Good events.


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32))
def test_each_event_of_a_walk_is_followed_alike(seed: int) -> None:
    """Resets, losses, failures and restarts, too, under each policy: the same book after each event."""
    options = draw_options(Random(seed))
    Books(options.config()).follow_all(walked(options, seed, 60))


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 2**32))
def test_long_batches_are_followed_alike(seed: int) -> None:
    """Batches of more than 16 ids are arrays."""
    config, events = walked_in_arrays(seed)
    Books(config).follow_all(events)


def check_resets(seed: int, policy: str) -> None:
    random = Random(seed)
    config = OffloadConfig(host_blocks=70, device_blocks=4096, workers=2, policy=policy, max_live_transfers=8)
    Books(config).follow_all(reset_often(config, random))


@settings(max_examples=1, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(tuple(POLICIES)))
def test_resets_are_followed_alike(seed: int, policy: str) -> None:
    """After a reset the book knows which copies are older, and why each slot cannot be read."""
    check_resets(seed, policy)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(tuple(POLICIES)))
def test_resets_are_followed_alike_at_length(seed: int, policy: str) -> None:
    check_resets(seed, policy)


@settings(max_examples=examples(40), deadline=None)
@given(OPERATIONS)
def test_chunks_and_groups_are_followed_alike(operations: Operations) -> None:
    """Chunks of two device blocks, and cursors of several KV cache groups."""
    life = Life(blocks_per_chunk=2).drive(operations)
    Books(life.config).follow_all(life.events)


# Wrong events.


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32))
def test_a_wrong_event_breaks_the_same(seed: int) -> None:
    """The same properties with the same words: wrong slots, doubled ids, other requests, other transfers."""
    random = Random(seed)
    config, events = walked_in_arrays(seed) if random.random() < 0.3 else walked_in_tuples(seed)
    books = Books(config)
    for event in events[:40]:
        for wrong in decoded(spoiled(event, random)):
            saved = snapshot(books.native.ledger)
            Books(books.native.ledger.config, saved).follow(wrong)
        books.follow(event)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32))
def test_a_wrong_event_is_left_as_it_was_found(seed: int) -> None:
    """What the native part leaves untouched has changed nothing in the book."""
    random = Random(seed)
    options = draw_options(random)
    ledger = Ledger(options.config())
    for event in walked(options, seed, 40):
        trial = Auditor(restore(snapshot(ledger)))
        before = book(trial.witness)
        for wrong in (spoiled(event, random), spoiled(event, random), spoiled(event, random)):
            if trial.witness.watch(trial.ledger, [wrong], 0, [], []) != (0, False, None):
                break
            assert book(trial.witness) == before
        ledger.apply(event)


def decoded(event: OffloadingEvent) -> Iterator[OffloadingEvent]:
    """The event, if a log could hold it."""
    with suppress(msgspec.MsgspecError, OverflowError):
        yield DECODER.decode(msgspec.msgpack.encode(event))


# A wrong fold.


class Forgetful(Provenance):
    """Keeps nothing that a load brings."""

    brought = property(lambda _: {})  # type: ignore[assignment]

    def __init__(self) -> None:
        self.stale: dict[int, bytes] = {}


def first(things: Any) -> Any:
    return next(iter(things.values()))


CHANGES: dict[str, Callable[[Ledger], Any]] = {
    "a slot": lambda ledger: ledger.blocks.words.__setitem__(0, ledger.blocks.words[0] ^ 1 << 20),
    "a device block": lambda ledger: ledger.leases.words.__setitem__(0, ledger.leases.words[0] ^ 1 << 6),
    "the free queue": lambda ledger: ledger.free.remove(tuple(ledger.free)[:1]),
    "which slots are free": lambda ledger: swap(ledger.free),
    "which slots may be evicted": lambda ledger: swap(ledger.policy._queue),
    "the index": lambda ledger: ledger.index.pop(first(ledger.transfers).keys[0]),
    "the offers": lambda ledger: ledger.offers.times.update({b"x": 1}),
    "the last end": lambda ledger: setattr(ledger, "ended_at", ledger.ended_at + 1),
    "the last loss": lambda ledger: setattr(ledger, "forgotten_at", -1),
    "what was published": lambda ledger: ledger.listener.removed((b"x",)),
    "a match": lambda ledger: setattr(first(ledger.requests), "pins", (0,)),
    "a load": lambda ledger: setattr(first(ledger.requests), "load", 999),
    "a wait": lambda ledger: ledger.deferred.update(nobody=first(ledger.requests)),
    "cursors": lambda ledger: setattr(first(ledger.requests), "offered", (999,)),
    "an epoch": lambda ledger: setattr(first(ledger.transfers), "epoch", 999),
    "a report": lambda ledger: setattr(first(ledger.transfers), "reported", 1 << 20),
    "a submission": lambda ledger: setattr(first(ledger.transfers), "since", 999),
}


def swap(queue: SlotQueue) -> None:
    """One slot stands in the queue for another one. No count tells it."""
    inside = list(queue)[-1:]
    outside = [slot for slot in range(queue.capacity) if slot not in queue][:1]
    queue.remove(tuple(inside))
    queue.append(tuple(outside))


@pytest.mark.parametrize("what", CHANGES)
def test_a_ledger_that_differs_is_seen_at_the_event(what: str) -> None:
    """The native comparison looks at all that the Python one looks at: what the event changes, and counts."""
    seen = 0
    life = random_life(3, 150, host_blocks=12, device_blocks=8, policy="lru")
    for number in range(1, len(life.events), 3):
        ledger = Ledger(life.config)
        ledger.apply_all(life.events[:number])
        books = Books(life.config, snapshot(ledger))
        with suppress(StopIteration, IndexError, KeyError, AttributeError):  # It has nothing of that kind.
            for auditor in (books.native, books.python):
                CHANGES[what](auditor.ledger)
            seen += any(books.follow(event) for event in life.events[number : number + 20])
    assert seen


def test_an_index_with_another_key_is_seen_at_the_event() -> None:
    """Conservation (S1): an evicted key is in the index again, instead of another. No count tells it."""
    life = Life(host_blocks=4, workers=1)
    life.stored("r1", [b"key-%d" % number for number in range(3)], range(3))
    life.stored("r2", [b"more-%d" % number for number in range(3)], range(3))
    books = Books(life.config)

    class Meddler(Publisher):
        def __init__(self, publisher: Publisher, ledger: Ledger) -> None:
            self.state, self.medium, self._ledger = publisher.state, publisher.medium, ledger

        def removed(self, keys: Sequence[bytes]) -> None:
            super().removed(keys)
            kept = next(key for key in self._ledger.index if key not in keys)
            del self._ledger.index[kept]
            self._ledger.index[keys[0]] = 3

    for auditor in (books.native, books.python):
        auditor.ledger.listener = Meddler(auditor._publisher, auditor.ledger)
    for event in life.events:
        found = books.follow(event)
        if found:
            break
    assert event.kind == "BlocksEvicted"
    assert found[0].message.startswith("key ")


def test_a_load_that_is_forgotten_is_seen_at_the_event() -> None:
    """No stale data (S14): what a load brings is noted when it is planned."""
    life = Life(host_blocks=4, workers=1)
    life.stored("r1", [b"key"], [0])
    life.core.match("r1", [b"key"])
    life.core.prepare_load("r1", [1])
    books = Books(life.config)
    for auditor in (books.native, books.python):
        auditor.ledger.provenance = Forgetful()
    *before, plan = life.events
    assert plan.kind == "LoadPlanned"
    assert not any(map(books.follow, before))
    assert [one.property for one in books.follow(plan)] == [Property.NO_STALE_DATA]


def test_a_pin_that_a_reset_has_ended_is_not_ended_again() -> None:
    """One release per hold (S4): the slot holds another block by then, which another match pins."""
    life = Life(host_blocks=4, workers=1)
    life.stored("r0", [b"key"], [0])
    life.core.match("r1", [b"key"])
    life.core.reset()
    life.stored("r0", [b"key"], [1])
    life.core.match("r2", [b"key"])
    life.core.finish("r1")
    life.core.finish("r2")
    Books(life.config).follow_all(life.events)


# What is left.


def test_what_a_serving_engine_does_is_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the native part would be of no use: Python would follow every event."""
    life = Life(host_blocks=40, device_blocks=64, workers=1)
    for number in range(20):
        name, keys = f"r{number}", [b"%016d" % (number * 20 + place) for place in range(20)]
        life.stored(name, keys, range(20))
        life.core.match(name, keys)
        life.ended(life.core.prepare_load(name, range(20, 40)))
        life.core.finish(name)
        life.core.end_step()
    assert {"BlocksEvicted", "LoadPlanned"} <= {event.kind for event in life.events}
    left: list[OffloadingEvent] = []
    monkeypatch.setattr(Auditor, "_go_on", lambda _auditor, event, _left: left.append(event))
    assert Auditor(Ledger(life.config)).apply_all(list(life.events)) == (len(life.events), [])
    assert left == []


def test_the_usual_entries_have_the_order_of_the_header() -> None:
    """They are handed over by their places."""
    header = (ROOT / "kvsm" / "core" / "native" / "witness.h").read_text(encoding="utf-8")
    counts = [len(re.findall(r"\w+", names)) - 1 for names in re.findall(r"typedef enum \{ (.*?) \}", header)]
    assert counts == [len(USUAL_SLOTS), len(USUAL_LEASES)]


def test_the_kinds_that_the_book_keeps_for_itself_are_those_of_the_docs() -> None:
    """The native part has an entry for each kind that it follows. docs/architecture.md names all others."""
    source = (ROOT / "kvsm" / "core" / "native" / "book.c").read_text(encoding="utf-8")
    table = source.split("followers[NUM_KINDS] = {")[1].split("};")[0]
    followed = set(re.findall(r"\[KIND_(\w+)\]", table))
    docs = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    kept = set(re.findall(r"`(\w+)`", docs.split("| left to the book |")[1].split("\n")[0]))
    assert followed | kept == {kind.__name__ for kind in KINDS}
    assert not followed & kept
