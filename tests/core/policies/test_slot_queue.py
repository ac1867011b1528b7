"""SlotQueue against a plain list: the same slots in the same order, however the batches come."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.core import native
from kvsm.core.policies.slot_queue import SlotQueue, join, split
from kvsm.ids import SMALL, IdArray

EXAMPLES = [pytest.param(examples(150), id="fast"), pytest.param(3_000, id="slow", marks=pytest.mark.slow)]

CAPACITY = 99
"""More than 64: the native body has one number for 64 slots."""
slots = st.integers(0, CAPACITY - 1)
batches = st.one_of(
    st.lists(slots, unique=True, max_size=4),
    st.lists(slots, unique=True, min_size=SMALL - 1, max_size=SMALL + 2),
    st.permutations(range(CAPACITY)),
)
forms: st.SearchStrategy[Callable[[list[int]], IdArray]] = st.sampled_from(
    [tuple, lambda one: np.array(one, dtype=np.int64)]
)
operations = st.lists(
    st.tuples(
        st.sampled_from(["append", "remove", "insert", "insert", "refill"]), batches, forms, slots | st.none()
    ),
    max_size=60,
)


def check_property(examples: int, strategy: st.SearchStrategy[Any], body: Callable[[Any], None]) -> None:
    """Run one property test with a given number of examples."""
    limits = settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    limits(given(strategy)(body))()


def apply(
    queue: SlotQueue, model: list[int], name: str, batch: list[int], form: Any, before: int | None
) -> None:
    if name == "refill":
        queue.refill(form(sorted(batch)))
        model[:] = sorted(batch)
        return
    if name == "insert":
        queue.insert(form(batch), before)
    else:
        getattr(queue, name)(form(batch))
    model[:] = [slot for slot in model if slot not in batch]
    if name != "remove":
        place = model.index(before) if name == "insert" and before in model else len(model)
        model[place:place] = batch


@pytest.mark.parametrize("examples", EXAMPLES)
def test_follows_a_plain_list(examples: int) -> None:
    """Order, size and membership equal those of a list, through moves, removals and sweeps."""

    def body(steps: list[Any]) -> None:
        queue, model = SlotQueue(CAPACITY), list[int]()
        for name, batch, form, before in steps:
            apply(queue, model, name, batch, form, before)
            assert len(queue) == len(model)
            assert queue.order().tolist() == model
            assert list(queue) == model
            assert [slot for slot in range(CAPACITY) if slot in queue] == sorted(model)
            assert queue.which(form(batch)) == [slot in model for slot in batch]

    check_property(examples, operations, body)


def test_one_slot_leaves_a_full_queue() -> None:
    """Whichever it is: those before it stay."""
    for slot in range(CAPACITY):
        queue, others = SlotQueue(CAPACITY), [one for one in range(CAPACITY) if one != slot]
        queue.refill(np.arange(CAPACITY))
        queue.remove((slot,))
        assert list(queue) == others


@pytest.mark.skipif(bool(native.WHY_NOT), reason="Python keeps the queue")
@pytest.mark.parametrize("listed", [(), (5, 70), range(1, CAPACITY)])
def test_nothing_follows_a_slot_that_is_not_there(listed: Sequence[int]) -> None:
    for put in ("append", "refill"):
        queue = native.QueueBody(CAPACITY)
        getattr(queue, put)(np.array(listed, dtype=np.int64))
        for slot in {*range(CAPACITY)} - {*listed}:
            assert queue.following(slot, 3) == b""


@pytest.mark.parametrize("examples", EXAMPLES)
def test_first_is_the_oldest_that_are_not_protected(examples: int) -> None:
    """`first` answers like a list, on both sides of the tuple limit, and changes nothing."""

    def body(case: Any) -> None:
        steps, count, protected = case
        queue, model = SlotQueue(CAPACITY), list[int]()
        for name, batch, form, before in steps:
            apply(queue, model, name, batch, form, before)
        expected = [slot for slot in model if slot not in protected][:count]
        for _ in range(2):
            found = queue.first(count, protected)
            assert list(found) == expected
            assert isinstance(found, tuple) == (count <= SMALL or not model)
        assert queue.order().tolist() == model

    counts = st.one_of(st.integers(0, 4), st.integers(SMALL - 1, SMALL + 2), st.integers(0, CAPACITY))
    check_property(examples, st.tuples(operations, counts, st.frozensets(slots)), body)


@pytest.mark.parametrize("batch", [1, SMALL, SMALL + 1, CAPACITY])
def test_survives_many_sweeps(batch: int) -> None:
    """The log of entries is swept many times over without losing a slot or its place."""
    queue, model = SlotQueue(CAPACITY), list(range(CAPACITY))
    queue.append(np.arange(CAPACITY))
    for turn in range(40 * CAPACITY // batch):
        moving = [(turn * 7 + 5 * offset) % CAPACITY for offset in range(batch)]
        queue.append(tuple(moving) if batch <= SMALL else np.array(moving))
        model = [slot for slot in model if slot not in moving] + moving
    assert queue.order().tolist() == model


@pytest.mark.parametrize("batch", [1, SMALL // 2])
def test_the_search_ends_where_the_log_is_full(batch: int) -> None:
    """After any number of entries a search may ask for more than there are, and meets no entry behind the
    tail."""
    queue, moving = SlotQueue(CAPACITY), tuple(range(batch))
    for _ in range(3 * (4 * CAPACITY + 64) // batch):
        queue.append(moving)
        assert queue.first(SMALL) == moving


@pytest.mark.parametrize("batch", [1, 40])
def test_the_search_starts_at_a_live_slot(batch: int) -> None:
    """Slots removed at the head are not met by any later search: pinned blocks cost nothing."""
    queue = SlotQueue(CAPACITY)
    queue.append(np.arange(CAPACITY))
    for start in range(0, 40, batch):
        queue.remove(tuple(range(start, start + batch)))
    assert next(queue.windows(1)).tolist() == [40]


def test_windows_show_every_slot_once() -> None:
    """Windows cut the order in pieces, dead entries left out."""
    queue = SlotQueue(CAPACITY)
    queue.append(np.arange(CAPACITY))
    queue.append((0, 9, 4))
    queue.remove((1, 30))
    windows = list(queue.windows(5))
    assert len(windows) > 2
    assert np.concatenate(windows).tolist() == queue.order().tolist()


def test_the_oldest_slots_are_read_without_the_rest_of_the_queue() -> None:
    """A policy that needs one victim asks a queue of a million slots."""
    queue = SlotQueue(100_000)
    queue.append(np.arange(100_000))
    tracemalloc.start()
    try:
        assert next(iter(queue)) == 0
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()


def test_snapshot_forgets_how_the_order_came_about() -> None:
    """Equal orders give equal bytes, and a restored queue goes on like the first (S11)."""
    queue, direct = SlotQueue(CAPACITY), SlotQueue(CAPACITY)
    queue.append(np.arange(20))
    queue.append((3, 0))
    queue.remove((7, 19))
    direct.append(tuple(queue))
    assert queue.snapshot() == direct.snapshot()
    restored = SlotQueue(CAPACITY)
    restored.restore(queue.snapshot())
    for one in (queue, restored):
        one.append((7, 2))
    assert restored.snapshot() == queue.snapshot()


@given(st.lists(slots, max_size=40), st.integers(0, 40), st.randoms(use_true_random=False))
def test_split_and_join_keep_order_and_form(members: list[int], cut: int, random: Any) -> None:
    """A batch cut in two keeps its order; joined again it has the form for its length."""
    inside = [random.random() < 0.5 for _ in members]
    for form in (tuple, lambda one: np.array(one, dtype=np.int64)):
        chosen, others = split(form(members), inside)
        assert list(chosen) == [slot for slot, one in zip(members, inside, strict=True) if one]
        assert list(others) == [slot for slot, one in zip(members, inside, strict=True) if not one]
        whole = join(form(members[:cut]), form(members[cut:]))
        assert list(whole) == members
        assert isinstance(whole, tuple) == (len(members) <= SMALL)


@pytest.mark.parametrize("size", [0, SMALL - 1, SMALL, SMALL + 1])
def test_join_gives_the_form_that_the_length_asks_for(size: int) -> None:
    """On both sides of the tuple limit, wherever the batch was cut. Slots stay integers when they are joined
    with an empty batch, which has no type of its own."""
    for cut in range(size + 1):
        for first in (tuple, lambda one: np.array(one, dtype=np.int64)):
            for last in (tuple, lambda one: np.array(one, dtype=np.int64)):
                whole = join(first(range(cut)), last(range(cut, size)))
                assert list(whole) == list(range(size))
                assert isinstance(whole, tuple) == (size <= SMALL)
                assert not any(isinstance(slot, float) for slot in whole)


@pytest.mark.parametrize(("slots", "fits"), [([3, 0], True), ([4], False), ([0, 1, 2, 3, 0], False)])
def test_a_snapshot_of_a_larger_queue_is_refused(slots: list[int], fits: bool) -> None:
    """Each slot must exist, and no more may come than there are."""
    queue = SlotQueue(4)
    state = np.array(slots, dtype="<u4").tobytes()
    if fits:
        queue.restore(state)
        assert list(queue) == slots
    else:
        with pytest.raises(ValueError, match="a queue of 4 does not have"):
            queue.restore(state)
