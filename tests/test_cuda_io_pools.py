"""Runs and pools: which pairs a copy is made of, and that both of its forms copy the same bytes (S15)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsm.cuda_io.pools import LONG_RUN_BYTES, Pools, merge_runs
from kvsm.errors import ConfigError
from kvsm.events import Direction


@given(
    pairs=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), unique_by=lambda pair: pair[1]),
)
def test_runs_hold_exactly_the_pairs_of_the_job(pairs: list[tuple[int, int]]) -> None:
    """S15: no pair is lost, doubled or bent; and no two runs are left that are one."""
    device_blocks, host_blocks = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    runs = merge_runs(device_blocks, host_blocks)
    spread = [
        (device_block + step, host_block + step)
        for device_block, host_block, count in zip(*(column.tolist() for column in runs))
        for step in range(count)
    ]
    assert sorted(spread) == sorted(pairs)
    heads = set(zip(runs.device_blocks.tolist(), runs.host_blocks.tolist()))
    ends = set(zip((runs.device_blocks + runs.counts).tolist(), (runs.host_blocks + runs.counts).tolist()))
    assert not heads & ends


def test_blocks_that_are_listed_backwards_are_one_run() -> None:
    runs = merge_runs(np.array([9, 8, 7]), np.array([3, 2, 1]))
    assert [column.tolist() for column in runs] == [[7], [1], [3]]


@pytest.mark.parametrize("block_bytes", [LONG_RUN_BYTES, 1])
@pytest.mark.parametrize("direction", Direction)
def test_long_runs_and_short_runs_copy_the_same(direction: Direction, block_bytes: int) -> None:
    """S15: scattered blocks as long as a long run take one form of the copy, blocks of one byte the other."""
    device_blocks, host_blocks = (7, 2, 5, 0), (1, 6, 3, 4)
    random = np.random.default_rng(0)
    device = random.integers(0, 256, (8, block_bytes), dtype=np.uint8)
    host = random.integers(0, 256, (8, block_bytes), dtype=np.uint8)
    expected_device, expected_host = device.copy(), host.copy()
    for device_block, host_block in zip(device_blocks, host_blocks):
        if direction is Direction.STORE:
            expected_host[host_block] = device[device_block]
        else:
            expected_device[device_block] = host[host_block]
    Pools(device, host).copy(direction, device_blocks, host_blocks)
    assert np.array_equal(device, expected_device)
    assert np.array_equal(host, expected_host)


def test_pools_with_strides_between_blocks_are_copied() -> None:
    """A pool may be a part of a larger array, as one group of a hybrid model is."""
    device = np.arange(48, dtype=np.uint8).reshape(8, 6)
    wide = 100 + device
    before = wide.copy()
    Pools(device[:, :3], wide[:, 2:5]).copy(Direction.STORE, (1, 4, 6), (0, 3, 7))
    assert np.array_equal(wide[[0, 3, 7], 2:5], device[[1, 4, 6], :3])
    wide[[0, 3, 7], 2:5] = before[[0, 3, 7], 2:5]
    assert np.array_equal(wide, before)


@pytest.mark.parametrize(
    ("device", "host", "message"),
    [
        (np.zeros((4, 2), np.uint8), np.zeros((4, 3), np.uint8), "2 bytes, .* 3; they must be equal"),
        (np.zeros(4, np.uint8), np.zeros((4, 3), np.uint8), "device pool is 1-D uint8"),
        (np.zeros((4, 3), np.uint8), np.zeros((4, 3), np.int8), "host pool is 2-D int8"),
        (np.zeros((4, 0), np.uint8), np.zeros((4, 0), np.uint8), "0 bytes"),
        ([[1, 2]], np.zeros((4, 2), np.uint8), "device pool is a list that numpy cannot view"),
    ],
)
def test_pools_that_do_not_fit_are_refused(device: Any, host: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pools(device, host)
