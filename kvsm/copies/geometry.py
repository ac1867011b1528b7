"""Turns the block pairs of a transfer into contiguous or 2-D copies, without a Python loop over blocks.

Pairs that are consecutive on both sides are merged into runs. The strides decide how a run is copied:

=====================================  ======================================  ===========================
a run of `count` blocks                rectangles                              because
=====================================  ======================================  ===========================
contiguous on both sides               one, flat                               one tensor, no gaps
strided on a side                      one for each tensor, a row is a block   the host is block-major
the same, fewer blocks than layers     one for each block, a row is a layer    layers at even distances are
                                                                               a rectangle, too
stride above `MAX_PITCH`               one, flat, for each row                 no 2-D copy takes the pitch
=====================================  ======================================  ===========================

Tensors that are adjacent in every block, on the device and on the host, are planned as one tensor (`joined`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.copies.layout import MemoryLayout
from kvsm.copies.pairs import BlockRuns, merge_runs
from kvsm.core import native
from kvsm.events import Direction
from kvsm.ids import IdArray

MAX_PITCH = 2**31 - 1
"""Largest distance between the rows of a 2-D copy that CUDA accepts (bytes)."""


class Rectangles(NamedTuple):
    """2-D copies. Copy i moves heights[i] rows of widths[i] bytes; on each side the rows start a pitch apart.

    The columns are addresses and bytes, uint64 and C-contiguous. A rectangle of one row is flat: its
    pitches are its width, which may be more than `MAX_PITCH`, so a device copies it as plain bytes.
    """

    sources: NDArray[np.uint64]
    targets: NDArray[np.uint64]
    widths: NDArray[np.uint64]
    heights: NDArray[np.uint64]
    source_pitches: NDArray[np.uint64]
    target_pitches: NDArray[np.uint64]


class Fragments(NamedTuple):
    """Contiguous copies. Copy i moves sizes[i] bytes. The columns are addresses and bytes, uint64 and
    C-contiguous."""

    sources: NDArray[np.uint64]
    targets: NDArray[np.uint64]
    sizes: NDArray[np.uint64]


class CopyShape(NamedTuple):
    """The arguments of `PathTable.choose` that describe a copy."""

    fragment_bytes: int
    """Mean size of a fragment (bytes)."""
    fragments: int
    rectangles: int


class CopyPlan(NamedTuple):
    """The plan of a copy. Its pairs are merged; its descriptors are made when its path asks for them."""

    shape: CopyShape
    rectangles: Callable[[], Rectangles]
    """Returns the 2-D copies that make up the copy."""
    fragments: Callable[[], Fragments]
    """Returns the contiguous copies that make up the copy: the rows of the rectangles."""


class CopyPlanner:
    """Plans the copies of one layout: merges the pairs of each copy once.

    The native body plans a block in 4 us and 256 pieces in 6 us (`kvsm/core/native/copy_plans.c`). Plans by
    numpy take some 200 us.
    """

    def __init__(self, layout: MemoryLayout) -> None:
        self._layout = joined(layout)
        self._table = _table_of(self._layout) if native.runs() else b""
        """The layout in the form that the native body reads; empty if numpy plans."""

    @property
    def num_tensors(self) -> int:
        """Number of tensors after adjacent ones were joined: the most fragments of one block."""
        return len(self._layout.tensors)

    def plan(self, direction: Direction, device_blocks: IdArray, host_blocks: IdArray) -> CopyPlan:
        """Plan the copy of checked pairs."""
        merged = native.plan_runs(self._table, device_blocks, host_blocks) if self._table else None
        if merged is None:
            return self._in_numpy(direction, device_blocks, host_blocks)
        packed, rectangles = merged
        shape = self._shape(len(device_blocks), rectangles)
        copy = self._table, direction is Direction.STORE, packed
        return CopyPlan(
            shape,
            lambda: Rectangles(*_columns_of(native.plan_rectangles(*copy, shape.rectangles), 6)),
            lambda: Fragments(*_columns_of(native.plan_fragments(*copy, shape.fragments), 3)),
        )

    def _in_numpy(self, direction: Direction, device_blocks: IdArray, host_blocks: IdArray) -> CopyPlan:
        layout = self._layout
        runs = _runs(layout, device_blocks, host_blocks)
        rectangles = int(np.minimum.outer(_bands(layout).heights, runs.counts).sum())
        make = partial(run_rectangles, layout, direction, runs)
        return CopyPlan(self._shape(len(device_blocks), rectangles), make, lambda: fragments(make()))

    def _shape(self, pairs: int, rectangles: int) -> CopyShape:
        fragments = rectangles if self._layout.is_dense else pairs * self.num_tensors
        return CopyShape(pairs * self._layout.block_bytes // max(fragments, 1), fragments, rectangles)


def _columns_of(packed: bytes, columns: int) -> NDArray[np.uint64]:
    return np.frombuffer(packed, np.uint64).reshape(columns, -1)


def _table_of(layout: MemoryLayout) -> bytes:
    """Return a joined layout as int64 numbers, as `copy_plans.c` reads it."""
    tensors, bands = _columns(layout), _bands(layout)
    merges = layout.is_dense or _widest(layout) <= MAX_PITCH
    head = len(layout.tensors), len(bands.firsts), layout.is_dense, merges, layout.host.stride
    rows = np.column_stack((*tensors, bands.of_tensors)), np.column_stack(bands[:4])
    return np.concatenate([np.array(head, np.int64), *(one.ravel() for one in rows)]).tobytes()


def run_rectangles(layout: MemoryLayout, direction: Direction, runs: BlockRuns) -> Rectangles:
    """Plan the copy of pairs that are merged into runs. A pitch may be larger than `MAX_PITCH`; then the
    result can be passed to `fragments`, but not copied in 2-D."""
    if layout.is_dense:
        return _flat_rectangles(layout, direction, runs)
    tensors = _columns(layout)
    corners = _corners(layout, runs)
    device = tensors.addresses[corners.tensors] + corners.device_blocks * tensors.strides[corners.tensors]
    host = tensors.host_addresses[corners.tensors] + corners.host_blocks * layout.host.stride
    widths = tensors.row_bytes[corners.tensors]
    is_flat = (corners.device_pitches == widths) & (corners.host_pitches == widths) | (corners.heights == 1)
    widths = np.where(is_flat, widths * corners.heights, widths)
    heights = np.where(is_flat, 1, corners.heights)
    device_pitches = np.where(is_flat, widths, corners.device_pitches)
    host_pitches = np.where(is_flat, widths, corners.host_pitches)
    if direction is Direction.STORE:
        columns = device, host, widths, heights, device_pitches, host_pitches
    else:
        columns = host, device, widths, heights, host_pitches, device_pitches
    return Rectangles(*(column.view(np.uint64) for column in columns))


def _flat_rectangles(layout: MemoryLayout, direction: Direction, runs: BlockRuns) -> Rectangles:
    """Return one flat rectangle for each run, which must be contiguous on both sides."""
    rows, host_rows = layout.tensors[0], layout.host
    device = (rows.address + runs.device_blocks * rows.stride).view(np.uint64)
    host = (host_rows.address + runs.host_blocks * host_rows.stride).view(np.uint64)
    widths = (runs.counts * rows.row_bytes).view(np.uint64)
    sources, targets = (device, host) if direction is Direction.STORE else (host, device)
    return Rectangles(sources, targets, widths, np.ones_like(widths), widths, widths)


def fragments(rectangles: Rectangles) -> Fragments:
    """Return each row of the rectangles as a fragment."""
    if bool((rectangles.heights == 1).all()):
        return Fragments(rectangles.sources, rectangles.targets, rectangles.widths)
    heights = rectangles.heights.view(np.int64)
    of, rows = spread(heights)
    steps = rows.view(np.uint64)
    return Fragments(
        rectangles.sources[of] + steps * rectangles.source_pitches[of],
        rectangles.targets[of] + steps * rectangles.target_pitches[of],
        rectangles.widths[of],
    )


@lru_cache(maxsize=16)
def joined(layout: MemoryLayout) -> MemoryLayout:
    """Return the same bytes in fewer tensors: tensors that are adjacent in every block, on both sides, are
    merged."""
    tensors, offsets = [layout.tensors[0]], [layout.offsets[0]]
    for rows, offset in zip(layout.tensors[1:], layout.offsets[1:]):
        last = tensors[-1]
        is_next = (rows.address, offset) == (last.address + last.row_bytes, offsets[-1] + last.row_bytes)
        if is_next and rows.stride == last.stride:
            tensors[-1] = last._replace(row_bytes=last.row_bytes + rows.row_bytes)
        else:
            tensors.append(rows)
            offsets.append(offset)
    return MemoryLayout(tuple(tensors), layout.host, tuple(offsets))


class _TensorColumns(NamedTuple):
    """The tensors of a layout as columns. host_addresses: address of each tensor's part of host block 0."""

    addresses: NDArray[np.int64]
    strides: NDArray[np.int64]
    row_bytes: NDArray[np.int64]
    host_addresses: NDArray[np.int64]


@lru_cache(maxsize=16)
def _columns(layout: MemoryLayout) -> _TensorColumns:
    addresses, strides, _, row_bytes = np.array(layout.tensors, np.int64).T
    return _TensorColumns(
        addresses, strides, row_bytes, np.array(layout.offsets, np.int64) + layout.host.address
    )


class _TensorBands(NamedTuple):
    """Groups of consecutive tensors at even distances, so that one block of a band is one rectangle.

    Band i is heights[i] tensors from tensor firsts[i] on. They are equal except that their addresses are
    pitches[i] bytes apart, and their parts in a row of the host host_pitches[i] bytes.
    """

    firsts: NDArray[np.int64]
    heights: NDArray[np.int64]
    pitches: NDArray[np.int64]
    host_pitches: NDArray[np.int64]
    of_tensors: NDArray[np.int64]
    """The band of each tensor."""


@lru_cache(maxsize=16)
def _bands(layout: MemoryLayout) -> _TensorBands:
    """Group the tensors into as few bands as possible. Extending each band as far as it fits is optimal,
    because any part of a band is a band, too."""
    first = layout.tensors[0].row_bytes
    firsts, heights, pitches, of_tensors = [0], [1], [(first, first)], [0]
    tensors = list(zip(layout.tensors, layout.offsets))
    for place, ((last, last_offset), (rows, offset)) in enumerate(pairwise(tensors), start=1):
        pitch = rows.address - last.address, offset - last_offset
        is_alike = rows._replace(address=last.address) == last
        is_alike = is_alike and rows.row_bytes <= min(pitch) <= max(pitch) <= MAX_PITCH
        if is_alike and (heights[-1] == 1 or pitch == pitches[-1]):
            heights[-1] += 1
            pitches[-1] = pitch
        else:
            firsts.append(place)
            heights.append(1)
            pitches.append((rows.row_bytes, rows.row_bytes))
        of_tensors.append(len(firsts) - 1)
    columns = firsts, heights, *zip(*pitches), of_tensors
    return _TensorBands(*(np.array(column, np.int64) for column in columns))


class _RectangleCorners(NamedTuple):
    """Rectangles before their addresses are computed. Rectangle i starts at a block of a tensor, and has
    heights[i] rows."""

    tensors: NDArray[np.int64]
    device_blocks: NDArray[np.int64]
    host_blocks: NDArray[np.int64]
    heights: NDArray[np.int64]
    device_pitches: NDArray[np.int64]
    host_pitches: NDArray[np.int64]


def _corners(layout: MemoryLayout, runs: BlockRuns) -> _RectangleCorners:
    """Cut each run, band by band, into one rectangle for each tensor or one for each block: whichever are
    fewer."""
    tensors, bands = _columns(layout), _bands(layout)
    by_block = np.greater.outer(bands.heights, runs.counts)
    tensor, run = np.nonzero(~by_block[bands.of_tensors])
    of_tensors = _RectangleCorners(
        tensor,
        runs.device_blocks[run],
        runs.host_blocks[run],
        runs.counts[run],
        tensors.strides[tensor],
        np.full(len(run), layout.host.stride),
    )
    if not by_block.any():
        return of_tensors
    band, run = np.nonzero(by_block)
    of, step = spread(runs.counts[run])
    band, run = band[of], run[of]
    of_blocks = _RectangleCorners(
        bands.firsts[band],
        runs.device_blocks[run] + step,
        runs.host_blocks[run] + step,
        bands.heights[band],
        bands.pitches[band],
        bands.host_pitches[band],
    )
    return _RectangleCorners(*(np.concatenate(pair) for pair in zip(of_tensors, of_blocks)))


def _runs(layout: MemoryLayout, device_blocks: IdArray, host_blocks: IdArray) -> BlockRuns:
    """Merge pairs into runs. If rows are further apart than `MAX_PITCH`, each pair is a run of its own."""
    device, host = np.asarray(device_blocks, np.int64), np.asarray(host_blocks, np.int64)
    if _widest(layout) > MAX_PITCH and not layout.is_dense:
        return BlockRuns(device, host, np.ones(len(host), np.int64))
    return merge_runs(device, host)


@lru_cache(maxsize=16)
def _widest(layout: MemoryLayout) -> int:
    return max(layout.host.stride, *(rows.stride for rows in layout.tensors))


def spread(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Repeat each index i counts[i] times. Returns the indices, and the number of each repetition from 0 on:
    counts [2, 3] give [0, 0, 1, 1, 1] and [0, 1, 0, 1, 2]."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
