"""Build `BlockStored` events, with tokens, extra keys and parents from the stored request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from kvsm.core.kv_events import MEDIUM_CPU, BlockStored
from kvsm.core.scheduler.groups import GroupKind, KVCacheGroup, SchedulerConfig
from kvsm.core.scheduler.protocols import DescribedRequest
from kvsm.core.scheduler.tracked import TrackedRequest

ExtraKeys = tuple[Any, ...] | None

_SPEC_KINDS = {
    GroupKind.FULL: "full_attention",
    GroupKind.SLIDING_WINDOW: "sliding_window",
    GroupKind.CHUNKED_LOCAL: "chunked_local_attention",
    GroupKind.MAMBA: "mamba",
}
"""The spec kind in KV events, unless the group gives one (`event_kind`)."""


def describe(
    config: SchedulerConfig, blocks_per_chunk: int, stored: Sequence[tuple[TrackedRequest, int, int]]
) -> list[BlockStored | None]:
    """Return the event of each stored key; None if the request has prompt embeddings instead of token ids.

    stored: for each key its request, its group, and the length of its prefix (tokens).
    """
    return [
        _describe(config, blocks_per_chunk, cast(DescribedRequest, tracked.request), group, end)
        for tracked, group, end in stored
    ]


def _describe(
    config: SchedulerConfig, blocks_per_chunk: int, request: DescribedRequest, index: int, end: int
) -> BlockStored | None:
    """Return the event of the chunk that ends at token `end`.

    A mamba state may end within a block. Its event covers the tokens from the block's first one on.
    """
    if request.prompt_embeds is not None:
        return None
    group, hashes, hash_tokens = config.groups[index], request.block_hashes, config.tokens_per_hash
    chunk_tokens = group.block_tokens * blocks_per_chunk
    start = (end - 1) // chunk_tokens * chunk_tokens
    size = min(group.block_tokens, end - start)
    extra_keys = [_extra_keys(request, first, first + size) for first in range(start, end, size)]
    lora = request.lora_request
    return BlockStored(
        block_hashes=[hashes[last // hash_tokens - 1] for last in range(start + size, end + 1, size)],
        parent_block_hash=hashes[start // hash_tokens - 1] if start else None,
        token_ids=list(request.all_token_ids[start:end]),
        block_size=size,
        lora_id=lora.adapter_id if lora else None,
        medium=MEDIUM_CPU,
        lora_name=lora.name if lora else None,
        extra_keys=extra_keys if any(extra_keys) else None,
        group_idx=index,
        kv_cache_spec_kind=group.event_kind or _SPEC_KINDS[group.kind],
        kv_cache_spec_sliding_window=_event_window(group),
    )


def _event_window(group: KVCacheGroup) -> int | None:
    return group.event_window or group.window if group.kind is GroupKind.SLIDING_WINDOW else None


def _extra_keys(request: DescribedRequest, first: int, last: int) -> ExtraKeys:
    """Return what determines a block's content beside its tokens, in the format of KV events: the adapter,
    each multimodal item with its offset from the block's start, and in the first block the cache salt."""
    keys: list[Any] = [request.lora_request.name] if request.lora_request else []
    for feature in request.mm_features:
        position = feature.mm_position
        if position.offset < last and position.offset + position.length > first:
            keys.append((feature.identifier, position.offset - first))
    if request.cache_salt and not first:
        keys.append(request.cache_salt)
    return tuple(keys) or None
