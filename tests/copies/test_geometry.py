"""Planning of a copy: the pieces are exactly the bytes of its pairs (correct bytes, S15), and they are
few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import Bytes, Pairs, block_major, copied_one_by_one, copies, memory_of, moved

from kvsm.copies.geometry import (
    MAX_PITCH,
    CopyPlan,
    CopyPlanner,
    Fragments,
    Rectangles,
    _table_of,
    fragments,
    joined,
)
from kvsm.copies.layout import MemoryLayout, MemoryRows
from kvsm.copies.pairs import merge_runs
from kvsm.core import native
from kvsm.events import Direction
from kvsm.ids import SMALL

FAR = 1 << 46
"""Where device memory may be: addresses beyond 32 bits."""

Copy = tuple[MemoryLayout, Direction, Pairs]


def plan_of(layout: MemoryLayout, direction: Direction, pairs: Pairs) -> CopyPlan:
    """The plan of the body that runs."""
    device_blocks, host_blocks = np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()
    return CopyPlanner(layout).plan(direction, device_blocks, host_blocks)


def planned(layout: MemoryLayout, direction: Direction, pairs: Pairs) -> Rectangles:
    return plan_of(layout, direction, pairs).rectangles()


def rows_of(plan: Rectangles) -> list[tuple[int, int, int]]:
    """(source, target, bytes) of each row of each rectangle, as a 2-D copy has them."""
    return [
        (source + row * source_pitch, target + row * target_pitch, width)
        for source, target, width, height, source_pitch, target_pitch in zip(*(one.tolist() for one in plan))
        for row in range(height)
    ]


def copied(memory: Bytes, pieces: list[tuple[int, int, int]]) -> Bytes:
    """The memory after these copies. Fails if one writes what another has written."""
    after, writes = memory.copy(), np.zeros(len(memory), np.int64)
    for source, target, size in pieces:
        assert FAR <= source <= FAR + len(memory) - size
        assert FAR <= target <= FAR + len(memory) - size
        after[target - FAR :][:size] = memory[source - FAR :][:size]
        writes[target - FAR :][:size] += 1
    assert writes.max(initial=0) <= 1
    return after


@given(copies())
def test_rectangles_copy_what_a_plain_loop_copies(copy: Copy) -> None:
    """Correct bytes (S15): all bytes of all pairs, each once, and no others."""
    layout, direction, pairs = copy
    memory = memory_of(layout)
    plan = planned(moved(layout, FAR), direction, pairs)
    after = copied(memory, rows_of(plan))
    assert np.array_equal(after, copied_one_by_one(memory, layout, direction, pairs))


@given(copies())
def test_fragments_are_the_rows_of_the_rectangles(copy: Copy) -> None:
    """Correct bytes (S15): both forms of a plan copy the same bytes."""
    layout, direction, pairs = copy
    plan = planned(moved(layout, FAR), direction, pairs)
    assert sorted(zip(*(column.tolist() for column in fragments(plan)))) == sorted(rows_of(plan))


@given(copies())
def test_arrays_are_what_a_driver_reads(copy: Copy) -> None:
    """64-bit, unsigned and without gaps, because a driver gets their addresses."""
    plan = planned(moved(copy[0], FAR), *copy[1:])
    for columns in (plan, fragments(plan)):
        for column in columns:
            assert column.dtype == np.uint64
            assert column.flags.c_contiguous
            assert len(column) == len(columns[0])


@given(copies())
def test_every_rectangle_is_one_that_the_driver_takes(copy: Copy) -> None:
    plan = planned(moved(copy[0], FAR), *copy[1:])
    assert (plan.heights >= 1).all()
    for pitches in (plan.source_pitches, plan.target_pitches):
        assert (pitches >= plan.widths).all()
        assert (pitches[plan.heights == 1] == plan.widths[plan.heights == 1]).all()


@given(copies())
def test_never_more_rectangles_than_runs_of_tensors_or_than_fragments(copy: Copy) -> None:
    layout, direction, pairs = copy
    device_blocks, host_blocks = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    plan = planned(layout, direction, pairs)
    runs = merge_runs(device_blocks, host_blocks)
    assert len(plan.sources) <= len(runs.counts) * len(layout.tensors)
    assert len(plan.sources) <= len(fragments(plan).sources) <= len(pairs) * len(layout.tensors)


@given(copies())
def test_shape_is_that_of_the_plan(copy: Copy) -> None:
    plan = plan_of(*copy)
    sizes = plan.fragments().sizes
    shape = int(sizes.sum()) // max(len(sizes), 1), len(sizes), len(plan.rectangles().sources)
    assert plan.shape == shape


@given(copies(), st.booleans())
def test_both_bodies_plan_the_same(copy: Copy, is_far: bool) -> None:
    """The native body makes the columns that numpy makes, also for rows beyond the largest pitch, from ids in
    a tuple or in an array."""
    layout, direction, pairs = copy
    if is_far:
        layout = with_far_rows(layout)
    ids = np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()
    forms = [(ids[0], ids[1])]
    if len(pairs) <= SMALL:
        forms.append((tuple(ids[0].tolist()), tuple(ids[1].tolist())))
    with native.without():
        expected = CopyPlanner(moved(layout, FAR)).plan(direction, *forms[0])
    for form in forms:
        found = CopyPlanner(moved(layout, FAR)).plan(direction, *form)
        assert found.shape == expected.shape
        assert_same_columns(found.rectangles(), expected.rectangles())
        assert_same_columns(found.fragments(), expected.fragments())


def with_far_rows(layout: MemoryLayout) -> MemoryLayout:
    """The same layout with host blocks further apart than a 2-D copy can have its rows."""
    return MemoryLayout(
        layout.tensors, layout.host._replace(stride=MAX_PITCH + layout.host.stride), layout.offsets
    )


def assert_same_columns(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.integers(1, 3))
def test_pairs_are_sorted_by_host_block_and_equal_ones_keep_their_order(hosts: list[int], times: int) -> None:
    """A load may read a host block several times; ids have up to 32 bits."""
    layout = block_major(
        [MemoryRows(FAR, 64, 1 << 32, 64), MemoryRows(2 * FAR, 64, 1 << 32, 64)], 8 * FAR, 1 << 32
    )
    host_blocks = np.array(hosts * times, np.int64)
    device_blocks = np.arange(0, 2 * len(host_blocks), 2)
    order = sorted(range(len(host_blocks)), key=host_blocks.tolist().__getitem__)
    found = CopyPlanner(layout).plan(Direction.LOAD, device_blocks, host_blocks).fragments()
    assert found.targets[: len(order)].tolist() == [FAR + 64 * 2 * place for place in order]


def test_ids_that_the_native_body_does_not_read_are_planned_all_the_same() -> None:
    layout = block_major(tensors_apart(2, 100_000), 0, 1000)
    expected = CopyPlanner(layout).plan(Direction.STORE, (1, 5), (2, 9)).fragments()
    for ids in (np.array([1, 5], np.int32), [1, 5]):
        found = CopyPlanner(layout).plan(Direction.STORE, ids, (2, 9)).fragments()  # type: ignore[arg-type]
        assert_same_columns(found, expected)


@pytest.mark.skipif(bool(native.WHY_NOT), reason="there is no native body")
@pytest.mark.parametrize("function", ["plan_rectangles", "plan_fragments"])
def test_the_native_body_refuses_runs_and_layouts_of_others(function: str) -> None:
    """They would be read beyond their end."""
    table = _table_of(block_major(tensors_apart(2, 100_000), 0, 1000))
    packed, _ = native.plan_runs(table, (1, 5), (2, 9)) or (b"", 0)
    make = getattr(native, function)
    for layout, runs, count in (
        (table[:-8], packed, 4),
        (b"", packed, 4),
        (table, packed, 3),
        (table, b"", 4),
    ):
        with pytest.raises(ValueError, match="come from plan_runs"):
            make(layout, True, runs, count)
    assert native.plan_runs(table[:-8], (1,), (2,)) is None
    assert native.plan_runs(table, (1,), (2, 3)) is None


def tensors_apart(num_tensors: int, distance: int, count: int = 1000, stride: int = 64) -> list[MemoryRows]:
    return [MemoryRows(FAR + place * distance, stride, count, 64) for place in range(num_tensors)]


def shape_of(plan: Rectangles) -> list[tuple[int, int]]:
    return list(zip(plan.widths.tolist(), plan.heights.tolist()))


EVEN = block_major(tensors_apart(32, 100_000), 0, 1000)
DENSE = block_major(tensors_apart(1, 0), 0, 1000)
PADDED = block_major(tensors_apart(1, 0, stride=80), 0, 1000)
BLOCK_MAJOR = block_major(tensors_apart(32, 64, stride=64 * 32), 0, 1000)
UNEVEN = block_major([MemoryRows(FAR + place**2 * 100_000, 64, 1000, 64) for place in range(4)], 0, 1000)
RUN = [(50 + step, 7 + step) for step in range(40)]
SCATTERED = [(3 * one, 997 - 2 * one) for one in range(50)]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("layout", "pairs", "expected"),
    [
        (DENSE, RUN, [(64 * 40, 1)]),
        (DENSE, RUN[::-1], [(64 * 40, 1)]),
        (BLOCK_MAJOR, RUN, [(64 * 32 * 40, 1)]),
        (PADDED, RUN, [(64, 40)]),
        (EVEN, RUN, [(64, 40)] * 32),
        (EVEN, RUN[:31], [(64, 32)] * 31),
        (EVEN, SCATTERED, [(64, 32)] * 50),
        (UNEVEN, RUN, [(64, 40)] * 4),
        (UNEVEN, SCATTERED, [(64, 2)] * 100),
        (DENSE, SCATTERED, [(64, 1)] * 50),
        (EVEN, [], []),
    ],
    ids=(
        "flat run is one piece",
        "flat run backwards is one piece",
        "layers interleaved on the device are one tensor",
        "strided run is one rectangle",
        "long run is a rectangle a tensor",
        "run shorter than the layers is a rectangle a block",
        "scattered block is a rectangle of its layers",
        "uneven layers are a rectangle a tensor",
        "two layers are always even",
        "nothing to merge",
        "no pairs",
    ),
)
def test_pieces_are_the_fewest(
    layout: MemoryLayout, direction: Direction, pairs: Pairs, expected: list[tuple[int, int]]
) -> None:
    assert sorted(shape_of(planned(layout, direction, pairs))) == sorted(expected)


@pytest.mark.parametrize(("distance", "pieces"), [(MAX_PITCH, 1), (MAX_PITCH + 1, 4)])
def test_layers_farther_apart_than_a_pitch_are_rows(distance: int, pieces: int) -> None:
    layout = block_major(tensors_apart(4, distance), 0, 1000)
    assert len(planned(layout, Direction.STORE, [(3, 4)]).sources) == pieces


@pytest.mark.parametrize(("stride", "pieces"), [(MAX_PITCH, 1), (MAX_PITCH + 1, 40)])
def test_blocks_farther_apart_than_a_pitch_are_rows(stride: int, pieces: int) -> None:
    layout = block_major(tensors_apart(1, 0, stride=stride), 0, 1000)
    plan = planned(layout, Direction.LOAD, RUN)
    assert len(plan.sources) == pieces
    assert sum(plan.heights.tolist()) == 40


def test_flat_run_may_be_longer_than_a_pitch() -> None:
    """It needs none: a flat piece is copied as plain bytes."""
    rows = MemoryRows(FAR, MAX_PITCH + 1, 100, MAX_PITCH + 1)
    plan = planned(block_major([rows], 0, 100), Direction.STORE, RUN[:20])
    assert shape_of(plan) == [(20 * (MAX_PITCH + 1), 1)]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=8), st.data())
def test_joined_tensors_are_the_same_bytes(sizes: list[int], data: Any) -> None:
    """Correct bytes (S15): each device byte of a block keeps its place on the host."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    order = data.draw(st.permutations(range(len(sizes))))
    layout = block_major([MemoryRows(FAR + starts[place], 100, 5, sizes[place]) for place in order], 0, 5)

    def bytes_of(one: MemoryLayout) -> list[tuple[int, int]]:
        return [
            (rows.address + byte, offset + byte)
            for rows, offset in zip(one.tensors, one.offsets)
            for byte in range(rows.row_bytes)
        ]

    whole = joined(layout)
    assert bytes_of(whole) == bytes_of(layout)
    assert not any(first.address + first.row_bytes == second.address for first, second in pairwise(whole))


def test_tensors_that_are_neighbours_in_one_block_only_are_not_joined() -> None:
    layout = block_major([MemoryRows(FAR, 100, 5, 8), MemoryRows(FAR + 8, 300, 5, 8)], 0, 5)
    assert joined(layout) == layout


def pairwise(layout: MemoryLayout) -> list[tuple[MemoryRows, MemoryRows]]:
    return list(zip(layout.tensors, layout.tensors[1:]))


def test_fragments_of_flat_rectangles_are_not_copied() -> None:
    plan = planned(DENSE, Direction.STORE, SCATTERED)
    assert isinstance(fragments(plan), Fragments)
    assert np.shares_memory(fragments(plan).sources, plan.sources)
