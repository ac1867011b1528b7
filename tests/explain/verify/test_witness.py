"""The witness: the second book beside a ledger whose fold is wrong, or was changed between two events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_twins import walked, walked_in_arrays
from replay_life import Life, random_life

from examples import examples
from kvsm.check.worlds.core_options import draw_options
from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import Ledger, Provenance
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.core.policies.slot_queue import SlotQueue
from kvsm.explain.story import Auditor
from kvsm.properties import Property

# Good events.


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_walks_of_any_core_are_followed(seed: int, arrays: bool) -> None:
    """Each policy, chunk and number of workers; batches of ids that are tuples, and arrays of numpy.

    Cursors of these requests may go back, because nobody keeps them. No other property is broken.
    """
    options = draw_options(Random(seed))
    config, events = walked_in_arrays(seed) if arrays else (options.config(), walked(options, seed, 40))
    auditor = Auditor(Ledger(config))
    for event in events:
        assert {one.property for one in auditor.apply(event)} <= {Property.STORED_ONCE}, event
    assert auditor.check() == []


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
    auditor = Auditor(Ledger(life.config))
    assert auditor.apply_all(life.events) == (len(life.events), [])
    assert auditor.check() == []


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
    """The comparison looks at all that the event changes, and at counts."""
    seen = 0
    life = random_life(3, 150, host_blocks=12, device_blocks=8, policy="lru")
    for number in range(1, len(life.events), 3):
        ledger = Ledger(life.config)
        ledger.apply_all(life.events[:number])
        auditor = Auditor(restore(snapshot(ledger)))
        with suppress(StopIteration, IndexError, KeyError, AttributeError):  # It has nothing of that kind.
            CHANGES[what](auditor.ledger)
            seen += bool(auditor.apply_all(life.events[number : number + 20])[1])
    assert seen


def test_an_index_with_another_key_is_seen_at_the_event() -> None:
    """Conservation (S1): an evicted key is in the index again, instead of another. No count tells it."""
    life = Life(host_blocks=4, workers=1)
    life.stored("r1", [b"key-%d" % number for number in range(3)], range(3))
    life.stored("r2", [b"more-%d" % number for number in range(3)], range(3))
    auditor = Auditor(Ledger(life.config))

    class Meddler(Publisher):
        def __init__(self, publisher: Publisher, ledger: Ledger) -> None:
            self.state, self.medium, self._ledger = publisher.state, publisher.medium, ledger

        def removed(self, keys: Sequence[bytes]) -> None:
            super().removed(keys)
            kept = next(key for key in self._ledger.index if key not in keys)
            del self._ledger.index[kept]
            self._ledger.index[keys[0]] = 3

    auditor.ledger.listener = Meddler(auditor._publisher, auditor.ledger)
    done, found = auditor.apply_all(life.events)
    assert life.events[done - 1].kind == "BlocksEvicted"
    assert found[0].message.startswith("key ")


def test_a_load_that_is_forgotten_is_seen_at_the_event() -> None:
    """No stale data (S14): what a load brings is noted when it is planned."""
    life = Life(host_blocks=4, workers=1)
    life.stored("r1", [b"key"], [0])
    life.core.match("r1", [b"key"])
    life.core.prepare_load("r1", [1])
    auditor = Auditor(Ledger(life.config))
    auditor.ledger.provenance = Forgetful()
    done, found = auditor.apply_all(life.events)
    assert (done, life.events[-1].kind) == (len(life.events), "LoadPlanned")
    assert [one.property for one in found] == [Property.NO_STALE_DATA]
