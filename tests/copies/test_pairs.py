"""The pairs of a job: what is refused before anything runs, and how runs are merged. Pure functions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsm.copies.pairs import checked_pairs, merge_runs
from kvsm.core.plan import TransferJob
from kvsm.errors import TransferFailed
from kvsm.events import Direction
from kvsm.ids import SMALL, pack, to_list

ids = st.lists(st.integers(-1, 30), max_size=2 * SMALL)


def job(direction: Direction, device_blocks: list[int], host_blocks: list[int]) -> TransferJob:
    """A job with tuples, because `pack` refuses negative ids and a tuple may hold them."""
    packed = (
        tuple(one) if len(one) <= SMALL or min(one) < 0 else pack(one) for one in (device_blocks, host_blocks)
    )
    return TransferJob(7, direction, *packed)


@given(direction=st.sampled_from(Direction), devices=ids, hosts=ids, cut=st.booleans())
def test_a_job_is_refused_exactly_if_it_cannot_be_right(
    direction: Direction, devices: list[int], hosts: list[int], cut: bool
) -> None:
    """No reuse in flight (S3): ids must be in their pools, equally many on both sides, with distinct
    targets; nothing else is required."""
    if cut:
        devices, hosts = devices[: len(hosts)], hosts[: len(devices)]
    targets = hosts if direction is Direction.STORE else devices
    right = (
        len(devices) == len(hosts)
        and all(0 <= one < 28 for one in devices)
        and all(0 <= one < 25 for one in hosts)
        and len(set(targets)) == len(targets)
    )
    one = job(direction, devices, hosts)
    if right:
        assert [to_list(pair) for pair in checked_pairs(one, 28, 25)] == [devices, hosts]
    else:
        with pytest.raises(TransferFailed, match=f"{direction.name.lower()} 7: "):
            checked_pairs(one, 28, 25)


@pytest.mark.parametrize("count", [3, 3 * SMALL])
def test_the_error_names_the_pool_the_id_and_the_size(count: int) -> None:
    """The message is the same for a few ids and for many."""
    blocks = list(range(count))
    wrong = [*blocks[:-1], 99]
    doubled = [*blocks[:-1], 1]
    for one, message in (
        (job(Direction.STORE, wrong, blocks), "store 7: device block 99 is not in its pool of 50"),
        (job(Direction.LOAD, blocks, wrong), "load 7: host block 99 is not in its pool of 60"),
        (job(Direction.STORE, blocks, doubled), "store 7: host block 1 is the target of two copies"),
        (job(Direction.LOAD, doubled, blocks), "load 7: device block 1 is the target of two copies"),
        (
            job(Direction.LOAD, blocks, blocks[1:]),
            f"load 7: {count} device blocks for {count - 1} host blocks",
        ),
    ):
        with pytest.raises(TransferFailed) as refused:
            checked_pairs(one, 50, 60)
        assert str(refused.value) == message


def test_ids_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(TransferFailed, match="store 7: packed ids start with their width"):
        checked_pairs(TransferJob(7, Direction.STORE, b"\x09\x00", (0,)), 50, 60)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), unique_by=lambda pair: pair[1]),
)
def test_runs_hold_exactly_the_pairs_of_the_job(pairs: list[tuple[int, int]]) -> None:
    """Correct bytes (S15): no pair is lost, doubled or changed, and no two runs could be merged further."""
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


@given(
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), unique_by=lambda pair: pair[0]),
)
def test_runs_of_a_load_may_read_a_host_block_twice(pairs: list[tuple[int, int]]) -> None:
    """Correct bytes (S15): the host blocks of a load are sources and may repeat; the pairs stay the same."""
    runs = merge_runs(*np.array(pairs, dtype=np.int64).reshape(-1, 2).T)
    spread = [
        (device_block + step, host_block + step)
        for device_block, host_block, count in zip(*(column.tolist() for column in runs))
        for step in range(count)
    ]
    assert sorted(spread) == sorted(pairs)


def test_blocks_that_are_listed_backwards_are_one_run() -> None:
    runs = merge_runs(np.array([9, 8, 7]), np.array([3, 2, 1]))
    assert [column.tolist() for column in runs] == [[7], [1], [3]]
