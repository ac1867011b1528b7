"""Layouts: where the bytes of a block are, and which pools are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsm.copies.layout import MemoryRows, block_bytes_of, make_layout, rows_of
from kvsm.errors import ConfigError


def zeros(*shape: int, dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


@given(widths=st.lists(st.integers(1, 9), min_size=1, max_size=5), gap=st.integers(0, 3))
def test_the_parts_of_a_block_stand_one_after_another_on_the_host(widths: list[int], gap: int) -> None:
    """Block-major: what is loaded together is stored together."""
    tensors = [zeros(4, width + gap)[:, :width] for width in widths]
    host = zeros(6, sum(widths))
    layout, places = make_layout(tensors, host)
    assert places == tuple(range(len(widths)))
    assert layout.offsets == tuple(sum(widths[:place]) for place in places)
    assert (layout.num_device_blocks, layout.num_host_blocks) == (4, 6)
    assert layout.block_bytes == sum(widths)
    assert layout.host == MemoryRows(host.ctypes.data, sum(widths), 6, sum(widths))
    for tensor, rows in zip(tensors, layout.tensors):
        assert rows == MemoryRows(tensor.ctypes.data, tensor.strides[0], 4, tensor.shape[1])
        assert rows.end == tensor[3].ctypes.data + tensor.shape[1]


@given(
    spans=st.lists(
        st.tuples(st.integers(0, 11), st.integers(1, 12)).filter(lambda span: sum(span) <= 12),
        min_size=1,
        max_size=4,
    ),
    num_blocks=st.integers(1, 3),
)
def test_tensors_of_one_storage_are_parts_or_apart_or_refused(
    spans: list[tuple[int, int]], num_blocks: int
) -> None:
    """Groups that share a storage: a layout has each byte once, or is refused."""
    whole = zeros(num_blocks, 12)
    bytes_of = [set(range(start, start + width)) for start, width in spans]
    largest = [
        place
        for place, mine in enumerate(bytes_of)
        if not any(mine < other or (mine == other and at < place) for at, other in enumerate(bytes_of))
    ]
    copied = [one for place in largest for one in bytes_of[place]]
    tensors = [whole[:, start : start + width] for start, width in spans]
    if len(set(copied)) == len(copied):
        layout, places = make_layout(tensors, zeros(5, len(copied)))
        assert places == tuple(largest)
        assert block_bytes_of(tensors) == layout.block_bytes
        assert [rows.row_bytes for rows in layout.tensors] == [spans[place][1] for place in largest]
    else:
        with pytest.raises(ConfigError, match=r"device tensors \d and \d share bytes"):
            make_layout(tensors, zeros(5, len(copied)))


def test_tensors_of_different_strides_over_one_storage_are_refused() -> None:
    """Whether their rows overlap depends on the block, so they count as overlapping."""
    flat = zeros(64)
    with pytest.raises(ConfigError, match="device tensors 0 and 1 share bytes"):
        make_layout([flat.reshape(8, 8)[:, :2], flat.reshape(16, 4)[:8, 2:]], zeros(4, 4))


def test_items_of_any_size_are_counted_in_bytes() -> None:
    layout, _ = make_layout([zeros(4, 6, dtype=np.float32)[:, :3]], zeros(2, 3, dtype=np.int32))
    assert layout.tensors[0].row_bytes == layout.host.row_bytes == 12
    assert layout.tensors[0].stride == 24


def test_a_torch_tensor_lies_where_its_view_in_numpy_lies() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((5, 8), dtype=torch.bfloat16)[:, 2:5]
    as_bytes = tensor.view(torch.uint8).numpy()
    assert rows_of("host pool", tensor) == rows_of("host pool", as_bytes)


def test_a_single_row_may_be_cut_from_anything() -> None:
    """The stride of a single row does not matter, so its length is used."""
    row = zeros(3, 9)[1:2, 2:6]
    assert rows_of("host pool", row) == MemoryRows(row.ctypes.data, 4, 1, 4)


def test_a_tensor_without_blocks_has_rows_of_its_shape() -> None:
    """An empty array of numpy has the stride of an item in every dimension."""
    empty = zeros(0, 3, 2)
    assert rows_of("host pool", empty.reshape(0, 6)) == MemoryRows(empty.ctypes.data, 6, 0, 6)
    assert block_bytes_of([empty]) == 6


REFUSED = {
    "no tensor": ([], zeros(4, 2), "the device pool has no tensors"),
    "rows of different bytes": (
        [zeros(4, 2)],
        zeros(4, 3),
        "a block has 2 bytes in the device pool and 3 in the host pool; they must be equal",
    ),
    "a part too few on the host": (
        [zeros(4, 2), zeros(4, 3)],
        zeros(4, 2),
        "a block has 5 bytes in the device pool and 2",
    ),
    "tensors of different lengths": (
        [zeros(4, 2), zeros(5, 2)],
        zeros(4, 4),
        "device tensor 1 has 5 blocks, tensor 0 has 4",
    ),
    "a device tensor without dimensions": ([zeros()], zeros(4, 3), "device tensor 0 is a single number"),
    "a flat device tensor": (
        [zeros(15)],
        zeros(4, 3),
        r"If there are 5 blocks, .*: pass device tensor 0 as tensor.reshape\(5, -1, \*tensor.shape\[1:\]\)$",
    ),
    "blocks in another dimension of one of two tensors": (
        [zeros(5, 2), zeros(2, 5)],
        zeros(4, 4),
        r"1 has 2 blocks, tensor 0 has 5; .*: pass device tensor 1 as np.moveaxis\(tensor, 1, 0\)$",
    ),
    "a tensor that runs backwards in a block": ([zeros(4, 3)[:, ::-1]], zeros(4, 3), "without the reversal"),
    "a tensor that shares bytes with itself": (
        [np.lib.stride_tricks.as_strided(zeros(40), (4, 2, 3), (10, 2, 1))],
        zeros(4, 6),
        "device tensors 0 and 0 share bytes",
    ),
    "too many pieces": ([zeros(1025, 4).T], zeros(4, 1025), "device tensor 0 lies in 1025 contiguous pieces"),
    "too many pieces together": ([zeros(600, 4).T] * 2, zeros(4, 600), "the device pool lies in 1200"),
    "a flat host pool": ([zeros(4, 3)], zeros(12), "host pool is 1-D"),
    "no bytes in a row": ([zeros(4, 0)], zeros(4, 3), "device tensor 0 has rows of 0 bytes"),
    "gaps inside a row of the host": (
        [zeros(4, 3)],
        zeros(4, 6)[:, ::2],
        "host pool has gaps inside its rows",
    ),
    "rows that overlap": (
        [np.lib.stride_tricks.as_strided(zeros(12), (4, 3), (2, 1))],
        zeros(4, 3),
        "rows of 3 bytes, 2 apart: they overlap",
    ),
    "rows that go backwards": ([zeros(4, 3)[::-1]], zeros(4, 3), "without the reversal"),
    "a list": ([[[1, 2]]], zeros(4, 2), "device tensor 0 is a list; give a numpy array or a torch tensor"),
    "nothing": ([zeros(4, 2)], None, "host pool is a NoneType"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_pools_that_do_not_fit_are_refused(case: str) -> None:
    """Before anything is copied; the message has the pool, the number and the bound."""
    device, host, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        make_layout(device, host)
