"""The books of the core world object to each answer of a core that contradicts them.

The walks only show that right answers are accepted. Here each wrong answer is booked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvsm.check.worlds.core_books import BookedCopy, ReferenceBooks
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

A, B, C = b"a", b"b", b"c"


def new_books() -> ReferenceBooks:
    """Two slots, four device blocks and two workers. Device block n holds the n-th of three keys."""
    books = ReferenceBooks(2, 4, 2, 1, 1)
    books.compute([(block, (key, 0)) for block, key in enumerate((A, B, C))])
    return books


def plan_store(
    books: ReferenceBooks, keys: Sequence[bytes], hosts: Sequence[int], first: int = 0
) -> BookedCopy:
    """Plan a store from the device blocks from `first` on."""
    pairs = [(first + place, host) for place, host in enumerate(hosts)]
    copy = BookedCopy(len(books.copies) + 1, None, pairs, [(key, 0) for key in keys], books.epoch)
    books.plan_store(copy, keys)
    copy.since = 0
    return copy


def stored(*keys: bytes) -> ReferenceBooks:
    """The host has these."""
    books = new_books()
    copy = plan_store(books, keys, range(len(keys)))
    land(books, copy)
    books.end(copy, good=True)
    return books


def land(books: ReferenceBooks, copy: BookedCopy) -> None:
    for worker in books.workers:
        books.land(copy, worker)


def plan_load(books: ReferenceBooks, key: bytes, host: int, block: int = 3, name: str = "r") -> BookedCopy:
    assert books.match(name, [key]) == (1, None)
    copy = BookedCopy(90 + block, name, [(block, host)], [(key, 0)], books.epoch)
    books.plan_load(copy, 1)
    return copy


def broken(step: Callable[[], object]) -> Property:
    with pytest.raises(PropertyBroken) as caught:
        step()
    return caught.value.property


# Evictions.


def test_a_block_that_is_not_stored_is_not_evicted() -> None:
    books = new_books()
    assert broken(lambda: books.evict([A], set())) is Property.NO_REUSE_IN_FLIGHT
    plan_store(books, [A], [0])
    assert broken(lambda: books.evict([A], set())) is Property.NO_REUSE_IN_FLIGHT


def test_a_block_that_a_load_reads_is_not_evicted() -> None:
    books = stored(A)
    plan_load(books, A, 0)
    assert broken(lambda: books.evict([A], set())) is Property.NO_REUSE_IN_FLIGHT


def test_a_block_that_a_match_holds_or_that_is_offered_is_not_evicted() -> None:
    books = stored(A, B)
    books.match("r", [A])
    assert broken(lambda: books.evict([B, A], set())) is Property.MATCH_HOLDS
    books = stored(A, B)
    assert broken(lambda: books.evict([A], {A})) is Property.MATCH_HOLDS
    books.evict([A], {B})
    assert books.free == {0}


# Plans.


def test_a_slot_in_use_is_not_handed_out() -> None:
    books = stored(A)
    assert broken(lambda: plan_store(books, [B], [0], 1)) is Property.NO_REUSE_IN_FLIGHT


def test_a_key_is_not_stored_twice() -> None:
    books = stored(A)
    assert broken(lambda: plan_store(books, [A], [1])) is Property.STORED_ONCE


def test_a_device_block_under_a_copy_is_not_copied_again() -> None:
    books = stored(A)
    plan_load(books, A, 0)
    assert broken(lambda: plan_store(books, [B], [1], 3)) is Property.STORED_ONCE
    books = stored(A)
    plan_load(books, A, 0)
    assert broken(lambda: plan_load(books, A, 0, name="q")) is Property.NO_REUSE_IN_FLIGHT


@pytest.mark.parametrize("worker", [0, 1])
def test_a_load_reads_the_bytes_of_its_key_on_every_worker(worker: int) -> None:
    books = stored(A)
    books.host[worker][0] = (B, 0)
    assert broken(lambda: plan_load(books, A, 0)) is Property.MATCH_HOLDS


# Ends.


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_store_is_not_published_before_all_of_it_is_there(worker: int, place: int) -> None:
    books = new_books()
    copy = plan_store(books, [A, B], [0, 1])
    land(books, copy)
    books.host[worker][place] = None
    assert broken(lambda: books.end(copy, good=True)) is Property.PUBLISH_AFTER_COMMIT


@pytest.mark.parametrize("worker", [0, 1])
def test_a_load_has_brought_its_bytes_to_every_worker(worker: int) -> None:
    books = stored(A)
    copy = plan_load(books, A, 0)
    land(books, copy)
    books.device[worker][3] = (B, 0)
    assert broken(lambda: books.end(copy, good=True)) is Property.CORRECT_BYTES


def test_a_failed_load_leaves_nothing_to_offer() -> None:
    books = stored(A)
    copy = plan_load(books, A, 0)
    land(books, copy)
    books.end(copy, good=False, failed=True)
    assert [cells[3] for cells in books.device] == [None, None]
    assert A not in books.where


# Device blocks.


def test_device_blocks_are_idle_until_a_copy_touches_them() -> None:
    """After a lost load for ever: it may still write them."""
    books = stored(A)
    assert books.idle_device_blocks() == [0, 1, 2, 3]
    copy = plan_load(books, A, 0)
    assert books.idle_device_blocks() == [0, 1, 2]
    assert books.under_copy([2, 3])
    assert not books.under_copy([0, 1])
    books.end(copy, good=False, lost=True)
    assert books.idle_device_blocks() == [0, 1, 2]
    assert books.under_copy([3])


def test_what_a_store_reads_may_be_offered_again_and_what_a_load_writes_may_not() -> None:
    books = new_books()
    books.compute([(3, (A, 0))])
    assert [books.holder((A, 0), choice) for choice in (0, 1, 2)] == [0, 3, 0]
    store = plan_store(books, [A], [0])
    assert [books.holder((A, 0), choice) for choice in (0, 1)] == [0, 3]
    land(books, store)
    books.end(store, good=True)
    copy = plan_load(books, A, 0)
    assert [books.holder((A, 0), choice) for choice in (0, 1)] == [0, 0]
    books.end(copy, good=False, lost=True)
    books.device[0][3] = (A, 0)
    assert [books.holder((A, 0), choice) for choice in (0, 1)] == [0, 0]
    assert books.holder((b"d", 0), 0) is None
