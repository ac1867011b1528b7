"""Random layouts of the two pools in one flat memory, and a plain copy loop as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvsm.copies.layout import MemoryLayout, MemoryRows
from kvsm.events import Direction

Bytes = NDArray[np.uint8]
Pairs = list[tuple[int, int]]


@st.composite
def layouts(draw: Any, unit: int = 1, num_blocks: int = 9) -> MemoryLayout:
    """Draw pools from address 0 on; all sizes are multiples of `unit`.

    The device pool has a few allocations with some layers each, one after the other or interleaved per block,
    with or without gaps. A row of the host pool may have gaps, too, for the parts of other ranks.
    """
    gaps = st.integers(0, 2).map(lambda gap: gap * unit) if draw(st.booleans()) else st.just(0)
    count = draw(st.integers(1, num_blocks))
    address, tensors = draw(gaps), []
    for _ in range(draw(st.integers(1, 3))):
        layers, row_bytes = draw(st.integers(1, 4)), draw(st.integers(1, 3)) * unit
        distance = row_bytes + draw(gaps)
        if draw(st.booleans()):
            stride, spacing = distance, distance * count + draw(gaps)
            size = spacing * layers
        else:
            stride, spacing = distance * layers, distance
            size = stride * count
        tensors += [
            MemoryRows(address + layer * spacing, stride, count, row_bytes) for layer in range(layers)
        ]
        address += size + draw(gaps)
    tensors = draw(st.permutations(tensors)) if draw(st.booleans()) else tensors
    before = st.just([draw(gaps)] * len(tensors)) | st.lists(
        gaps, min_size=len(tensors), max_size=len(tensors)
    )
    spaces = draw(before) if draw(st.booleans()) else ()
    return block_major(tensors, address + draw(gaps), draw(st.integers(1, num_blocks)), draw(gaps), spaces)


def block_major(
    tensors: list[MemoryRows],
    address: int,
    num_host_blocks: int,
    gap: int = 0,
    spaces: Sequence[int] = (),
) -> MemoryLayout:
    """Return the layout of these tensors with a host pool at this address.

    gap: bytes between host blocks. spaces: bytes before each tensor's part in a row.
    """
    offsets, end = [], 0
    for place, rows in enumerate(tensors):
        offsets.append(end + (spaces[place] if spaces else 0))
        end = offsets[-1] + rows.row_bytes
    return MemoryLayout(tuple(tensors), MemoryRows(address, end + gap, num_host_blocks, end), tuple(offsets))


@st.composite
def pairs_of(draw: Any, layout: MemoryLayout, direction: Direction) -> Pairs:
    """Draw block pairs of a transfer, with distinct targets. Many pairs form runs."""
    limits = layout.num_device_blocks, layout.num_host_blocks
    target_limit, source_limit = limits[::-1] if direction is Direction.STORE else limits
    targets = draw(st.lists(st.integers(0, target_limit - 1), unique=True))
    ahead = draw(st.integers(0, source_limit - 1))
    strays = st.one_of(st.just(None), st.integers(0, source_limit - 1))
    sources = [
        (target + ahead) % source_limit if stray is None else stray
        for target, stray in ((target, draw(strays)) for target in targets)
    ]
    pairs = zip(sources, targets) if direction is Direction.STORE else zip(targets, sources)
    return list(pairs)


@st.composite
def copies(draw: Any, unit: int = 1) -> tuple[MemoryLayout, Direction, Pairs]:
    """Draw a layout and a transfer in it."""
    layout, direction = draw(layouts(unit)), draw(st.sampled_from(Direction))
    return layout, direction, draw(pairs_of(layout, direction))


def moved(layout: MemoryLayout, distance: int) -> MemoryLayout:
    """Return the same layout at addresses shifted by `distance`."""
    return MemoryLayout(
        tuple(rows._replace(address=rows.address + distance) for rows in layout.tensors),
        layout.host._replace(address=layout.host.address + distance),
        layout.offsets,
    )


def memory_of(layout: MemoryLayout) -> Bytes:
    """Return memory of random bytes for a layout that starts at address 0."""
    return np.random.default_rng(0).integers(0, 256, layout.host.end, dtype=np.uint8)


def copied_one_by_one(memory: Bytes, layout: MemoryLayout, direction: Direction, pairs: Pairs) -> Bytes:
    """Return the memory after a plain copy loop over tensors and pairs."""
    after = memory.copy()
    for rows, offset in zip(layout.tensors, layout.offsets):
        for device_block, host_block in pairs:
            device = rows.address + device_block * rows.stride
            host = layout.host.address + host_block * layout.host.stride + offset
            source, target = (device, host) if direction is Direction.STORE else (host, device)
            after[target : target + rows.row_bytes] = memory[source : source + rows.row_bytes]
    return after
