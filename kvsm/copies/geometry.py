"""Which pieces of memory a transfer consists of, planned without a device and without a loop over blocks.

The pairs of a transfer are merged into runs. What becomes of a run depends on its strides:

=====================================  ======================================  ===========================
a run of `count` blocks                rectangles                              because
=====================================  ======================================  ===========================
contiguous on both sides               one, flat                               one tensor, no gaps
strided on a side                      one for each tensor, a block a row      the host is block-major
the same, fewer blocks than layers     one for each block, a layer a row       layers at even distances are
                                                                               a rectangle, too
wider apart than a pitch may be        one, flat, for each row                 `MAX_PITCH`
=====================================  ======================================  ===========================

Tensors that are neighbours in every block, on the device and on the host, count as one (`joined`).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.copies.layout import MemoryLayout
from kvsm.copies.pairs import BlockRuns, merge_runs
from kvsm.events import Direction
from kvsm.ids import IdArray

MAX_PITCH = 2**31 - 1
"""Largest distance in bytes between the rows of a 2-D copy that CUDA takes."""


class Rectangles(NamedTuple):
    """Rectangle i is heights[i] rows of widths[i] bytes, whose starts are a pitch apart on either side.

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
    """Fragment i is sizes[i] contiguous bytes. The columns are addresses and bytes, uint64 and
    C-contiguous."""

    sources: NDArray[np.uint64]
    targets: NDArray[np.uint64]
    sizes: NDArray[np.uint64]


class CopyShape(NamedTuple):
    """What `PathTable.choose(direction, *shape)` needs to know about a copy."""

    fragment_bytes: int
    """Mean size of a fragment."""
    fragments: int
    rectangles: int


def shape(layout: MemoryLayout, device_blocks: IdArray, host_blocks: IdArray) -> CopyShape:
    """The shape of the copy that `rectangles` and `fragments` would plan, in a small part of their time."""
    layout = joined(layout)
    counts = _runs(layout, device_blocks, host_blocks).counts
    pairs, rectangles = int(counts.sum()), int(np.minimum.outer(_bands(layout).heights, counts).sum())
    fragments = rectangles if layout.is_dense else pairs * len(layout.tensors)
    return CopyShape(pairs * layout.block_bytes // max(fragments, 1), fragments, rectangles)


def rectangles(
    layout: MemoryLayout, direction: Direction, device_blocks: IdArray, host_blocks: IdArray
) -> Rectangles:
    """The copy of checked pairs as a few rectangles."""
    layout = joined(layout)
    return run_rectangles(layout, direction, _runs(layout, device_blocks, host_blocks))


def run_rectangles(layout: MemoryLayout, direction: Direction, runs: BlockRuns) -> Rectangles:
    """As `rectangles`, for pairs that are merged already. A pitch may be larger than `MAX_PITCH`; then the
    result serves `fragments`, but no 2-D copy."""
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
    """The rectangles of runs that are contiguous on both sides."""
    rows, host_rows = layout.tensors[0], layout.host
    device = (rows.address + runs.device_blocks * rows.stride).view(np.uint64)
    host = (host_rows.address + runs.host_blocks * host_rows.stride).view(np.uint64)
    widths = (runs.counts * rows.row_bytes).view(np.uint64)
    sources, targets = (device, host) if direction is Direction.STORE else (host, device)
    return Rectangles(sources, targets, widths, np.ones_like(widths), widths, widths)


def fragments(rectangles: Rectangles) -> Fragments:
    """Each row of the rectangles as a fragment."""
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
    """The same bytes in as few tensors as possible: neighbours in every block, on both sides, become one."""
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
    """The tensors of a layout as columns. host_addresses: of their parts of host block 0."""

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
    """Band i is heights[i] tensors from firsts[i] on, which differ only in their addresses, by pitches[i]
    each, and in their places in a row of the host, by host_pitches[i] each.

    So one block of a band is a rectangle, with these pitches.
    """

    firsts: NDArray[np.int64]
    heights: NDArray[np.int64]
    pitches: NDArray[np.int64]
    host_pitches: NDArray[np.int64]
    of_tensors: NDArray[np.int64]
    """The band of each tensor."""


@lru_cache(maxsize=16)
def _bands(layout: MemoryLayout) -> _TensorBands:
    """The tensors in as few bands as possible. Each band takes all it can: the rest of a cut band is a band
    too."""
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
    """Rectangle i before it has addresses: it starts at a block of a tensor, and has heights[i] rows."""

    tensors: NDArray[np.int64]
    device_blocks: NDArray[np.int64]
    host_blocks: NDArray[np.int64]
    heights: NDArray[np.int64]
    device_pitches: NDArray[np.int64]
    host_pitches: NDArray[np.int64]


def _corners(layout: MemoryLayout, runs: BlockRuns) -> _RectangleCorners:
    """For each band and run the smaller number of rectangles: one for each tensor, or one for each block."""
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
    """The runs of the pairs. Each pair is its own run if rows are further apart than a pitch may be."""
    device, host = np.asarray(device_blocks, np.int64), np.asarray(host_blocks, np.int64)
    if _widest(layout) > MAX_PITCH and not layout.is_dense:
        return BlockRuns(device, host, np.ones(len(host), np.int64))
    return merge_runs(device, host)


@lru_cache(maxsize=16)
def _widest(layout: MemoryLayout) -> int:
    return max(layout.host.stride, *(rows.stride for rows in layout.tensors))


def spread(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each thing i repeated counts[i] times: for each repetition which thing it is, and its number from 0
    on."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
