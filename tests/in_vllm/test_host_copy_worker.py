"""`HostCopyWorker`, on real bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvsm.errors import ConfigError, TransferFailed
from kvsm.vllm.host_copy_worker import HostCopyWorker, block_rows, host_blocks


class Group(NamedTuple):
    """Blocks `first` to `first + size` of a request, in the device blocks after those of the previous
    group."""

    first: int
    size: int


GROUPS = st.lists(st.builds(Group, st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3).filter(
    lambda groups: any(group.size for group in groups)
)


def slot_of_each_block(groups: list[Group], chunk: int) -> list[tuple[int, int]]:
    """(ordinal of the slot, place in it) of each block. Counted one by one: each chunk that is met has a
    slot."""
    found, slots = [], -1
    for group in groups:
        chunks_met: dict[int, int] = {}
        for block in range(group.first, group.first + group.size):
            if block // chunk not in chunks_met:
                slots += 1
                chunks_met[block // chunk] = slots
            found.append((chunks_met[block // chunk], block % chunk))
    return found


def device_spec(groups: list[Group], blocks: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, [group.size for group in groups], [group.first for group in groups])


@given(GROUPS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_block_has_its_place_in_its_chunk(groups: list[Group], chunk: int, random: Any) -> None:
    """Correct bytes (S15): chunks that begin late and end early, group after group."""
    expected = slot_of_each_block(groups, chunk)
    slots = random.sample(range(100), max(slot for slot, _ in expected) + 1)
    device = device_spec(groups, list(range(len(expected))))
    assert host_blocks(device, slots, chunk) == [slots[slot] * chunk + place for slot, place in expected]


@pytest.mark.parametrize("slots", [[4], [4, 5, 6]])
def test_slots_that_do_not_fit_the_blocks_are_refused(slots: list[int]) -> None:
    with pytest.raises(TransferFailed, match=f"vLLM names {len(slots)} slots.*which are 2 slots"):
        host_blocks(device_spec([Group(1, 4)], [0, 1, 2, 3]), slots, 3)


def bytes_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def finish(worker: HostCopyWorker, *jobs: int) -> None:
    worker.wait(set(jobs))
    assert sorted(one.job_id for one in worker.get_finished()) == sorted(jobs)


@given(GROUPS, st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_a_load_brings_what_was_stored(groups: list[Group], chunk: int) -> None:
    """Correct bytes (S15): whole chunks are stored, and any part of them is loaded into other device
    blocks."""
    expected = slot_of_each_block(groups, chunk)
    num_slots = max(slot for slot, _ in expected) + 1
    caches = [bytes_of(layer, 2 * num_slots * chunk, 8 + layer) for layer in range(2)]
    tensors = [CanonicalKVCacheTensor(cache, cache.shape[1]) for cache in caches]
    worker = HostCopyWorker(CanonicalKVCaches(tensors, []), num_slots + 2, chunk)
    slots = [num_slots + 1 - slot for slot in range(num_slots)]
    host = CPULoadStoreSpec(slots)
    whole = device_spec([Group(0, num_slots * chunk)], list(range(num_slots * chunk)))
    assert worker.submit_store(0, whole, host)
    finish(worker, 0)
    stored = [cache.clone() for cache in caches]
    for cache in caches:
        cache.zero_()
    target = num_slots * chunk
    loaded = device_spec(groups, list(range(target, target + len(expected))))
    assert worker.submit_load(1, host, loaded)
    finish(worker, 1)
    sources = [slot * chunk + place for slot, place in expected]
    for before, cache in zip(stored, caches):
        assert torch.equal(cache[target : target + len(sources)], before[sources])
        assert not cache[:target].any()
        assert not cache[target + len(sources) :].any()
    worker.shutdown()


@pytest.mark.parametrize(
    ("tensor", "page_bytes"),
    [
        (torch.arange(48, dtype=torch.float32).view(4, 3, 4), 48),
        (torch.arange(4 * 20, dtype=torch.int8).view(4, 20)[:, 4:], 10),
    ],
    ids=["more dimensions", "padded"],
)
def test_a_page_is_a_row(tensor: torch.Tensor, page_bytes: int) -> None:
    rows = block_rows(CanonicalKVCacheTensor(tensor, page_bytes))
    expected = torch.stack([block.contiguous().view(torch.int8).flatten()[:page_bytes] for block in tensor])
    assert torch.equal(rows, expected)
    rows.zero_()
    assert not torch.stack([block.contiguous().view(torch.int8).flatten() for block in tensor])[
        :, :page_bytes
    ].any()


def test_a_page_in_pieces_is_refused() -> None:
    with pytest.raises(ConfigError, match="contiguous"):
        block_rows(CanonicalKVCacheTensor(torch.zeros(4, 6, 2, dtype=torch.int8).transpose(1, 2), 12))
