"""A hit is as long as vLLM's own rules make it, and each answer of the connector is the longest hit.

vLLM's coordinators find the hits of a device. Here they look into the keys of a host, so the rules of each
kind of layers are vLLM's: `HitSearch` and `kvsm.check.worlds.longest_hit` must find the same end.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Set
from sys import maxsize
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from real_scheduler import Engine, walk
from scheduler_shapes import Shape
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

from kvsm.check.worlds.longest_hit import Prompt
from kvsm.core.scheduler import GroupKind, KVCacheGroup, SchedulerConfig, hits, scheduler
from kvsm.core.scheduler.groups import group_suffix
from kvsm.core.scheduler.hits import HitSearch
from kvsm.errors import PropertyBroken

HASH_TOKENS, MOST_TOKENS = 4, 48

BLOCK_TOKENS = st.sampled_from([HASH_TOKENS, 2 * HASH_TOKENS])
GROUP = st.one_of(
    st.builds(KVCacheGroup, BLOCK_TOKENS),
    st.builds(KVCacheGroup, BLOCK_TOKENS, st.just(GroupKind.SLIDING_WINDOW), st.integers(2, 20)),
    st.builds(KVCacheGroup, BLOCK_TOKENS, st.just(GroupKind.MAMBA)),
)
CHUNKED = st.builds(
    KVCacheGroup, st.just(HASH_TOKENS), st.just(GroupKind.CHUNKED_LOCAL), st.sampled_from([4, 8, 12, 20])
)
"""vLLM has chunked local attention only where all groups have blocks of one size. There its chunks are whole
blocks."""
ONE_SIZE = st.lists(GROUP.filter(lambda group: group.block_tokens == HASH_TOKENS), max_size=2)


def spec_of(group: KVCacheGroup) -> Any:
    """vLLM's word for a group."""
    attention = {"block_size": group.block_tokens, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if group.kind is GroupKind.FULL:
        return FullAttentionSpec(**attention)
    if group.kind is GroupKind.SLIDING_WINDOW:
        return SlidingWindowSpec(**attention, sliding_window=group.window)
    if group.kind is GroupKind.CHUNKED_LOCAL:
        return ChunkedLocalAttentionSpec(**attention, attention_chunk_size=group.window)
    shape = {"shapes": ((4,),), "dtypes": (torch.float32,)}
    return MambaSpec(block_size=group.block_tokens, **shape, mamba_cache_mode="align")


def vllm_hit(config: SchedulerConfig, cells: list[bytes], held: Set[bytes]) -> int:
    """Where the longest hit of these keys ends, says vLLM."""
    groups = [KVCacheGroupSpec([f"{index}"], spec_of(group)) for index, group in enumerate(config.groups)]
    given = {
        "kv_cache_config": KVCacheConfig(4, [], groups),
        "max_model_len": MOST_TOKENS,
        "max_in_flight_tokens": MOST_TOKENS,
        "use_eagle": False,
        "enable_caching": True,
        "enable_kv_cache_events": False,
        "dcp_world_size": 1,
        "pcp_world_size": 1,
        "scheduler_block_size": config.alignment,
        "hash_block_size": config.tokens_per_hash,
        "allow_partial_hash_hits": False,
    }
    known = inspect.signature(get_kv_cache_coordinator).parameters
    coordinator = get_kv_cache_coordinator(**{name: one for name, one in given.items() if name in known})

    def cached(block_hash: bytes, group_ids: list[int]) -> list[KVCacheBlock] | None:
        keys = {block_hash + group_suffix(group) for group in group_ids}
        return [KVCacheBlock(1) for _ in group_ids] if keys <= held else None

    hashes: Any = cells[config.tokens_per_hash - 1 :: config.tokens_per_hash]
    with patch.object(coordinator.block_pool, "get_cached_block", cached):
        return int(coordinator.find_longest_cache_hit(hashes, len(cells) - 1)[1])


@given(
    st.one_of(
        st.lists(GROUP, min_size=1, max_size=3),
        st.tuples(CHUNKED, ONE_SIZE).map(lambda drawn: [drawn[0], *drawn[1]]),
    ),
    st.integers(1, MOST_TOKENS),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=300)
def test_a_hit_is_as_long_as_in_vllm(
    groups: list[KVCacheGroup], tokens: int, local: int, random: Any
) -> None:
    """What the device has counts as held: a hit behind it needs no more of the host."""
    hash_tokens = groups[0].block_tokens if len(groups) == 1 else HASH_TOKENS
    config = SchedulerConfig(groups=tuple(groups), hash_tokens=hash_tokens)
    cells = [b"%032d" % token for token in range(tokens)]
    prompt, rate = Prompt(config.groups, cells), random.random() ** 0.3
    ends = [
        (end, cells[end - 1] + group_suffix(index))
        for index, group in enumerate(groups)
        for end in range(group.block_tokens, tokens + 1, group.block_tokens)
    ]
    held = {key for _, key in ends if random.random() < rate}
    start = min(local * config.alignment, (tokens - 1) // config.alignment * config.alignment)
    on_device = {key for end, key in ends if end <= start}
    longest = vllm_hit(config, cells, held | on_device)
    assert longest == prompt.longest_hit(start, maxsize, held.__contains__)
    keys = [
        [key for key in (prompt.key(index, token) for token in range(0, tokens, group.block_tokens)) if key]
        for index, group in enumerate(groups)
    ]
    assert longest == HitSearch(config, 1, keys, start).longest_hit(tokens - 1, held.__contains__)


def test_a_shorter_hit_is_seen_under_vllms_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walks of `test_real_scheduler.py` compare each answer."""
    limit = hits.hit_limit
    monkeypatch.setattr(scheduler, "hit_limit", lambda tokens, *more: limit(tokens - 1, *more))
    with pytest.raises(PropertyBroken, match="the longest hit has"):
        Counter(what for seed in range(20) for what in walk(seed, acts=400))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_preempted_request_gets_back_all_its_full_blocks(groups: int, is_async: bool) -> None:
    """Those of its prompt, and those that it has decoded."""
    engine = Engine(Shape(groups=groups, is_async=is_async, host_blocks=160, device_blocks=48), seed=0)
    request = engine.scheduler.requests[engine.ask([*range(16)], 20)]
    side = engine.scheduler.connector._side
    block = side._scheduler.config.alignment

    def is_stored(end: int) -> bool:
        key = request.block_hashes[end // block - 1]
        return all(key + group_suffix(group) in engine.ledger.index for group in range(groups))

    while True:
        engine.step()
        end = (request.num_tokens - 1) // block * block
        if end > 16 and is_stored(end) and not engine.ledger.transfers:
            break
    engine.reset(running=True, connector=False)
    assert request.status is RequestStatus.PREEMPTED
    allocate, had = side._scheduler.update_state_after_alloc, list[tuple[int, int]]()

    def watched(one: Any, blocks: Any, tokens: int) -> None:
        had.append((side._scheduler.state.tracked[one.request_id].local, tokens))
        allocate(one, blocks, tokens)

    side._scheduler.update_state_after_alloc = watched
    engine.drain()
    # With a step in flight vLLM keeps the device's cache.
    assert sum(had[0]) == end
    assert is_async or had[0] == (0, end)
    engine.close()
