"""Convert kvsm's KV events to vLLM's own objects: vLLM's publisher encodes no others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from vllm.distributed import kv_events as vllm_events
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvsm.core.kv_events import BlockRemoved, BlockStored, KVCacheEvent

VLLM_EVENTS = {BlockStored: vllm_events.BlockStored, BlockRemoved: vllm_events.BlockRemoved}


def to_vllm_kv_events(events: Iterable[KVCacheEvent]) -> list[Any]:
    """Convert events. vLLM's settings decide whether block hashes become integers."""
    return [_to_vllm_kv_event(event) for event in events]


def _to_vllm_kv_event(event: KVCacheEvent) -> Any:
    fields = msgspec.structs.asdict(event)
    fields["block_hashes"] = [maybe_convert_block_hash(block_hash) for block_hash in fields["block_hashes"]]
    if fields.get("parent_block_hash") is not None:
        fields["parent_block_hash"] = maybe_convert_block_hash(fields["parent_block_hash"])
    return VLLM_EVENTS[type(event)](**fields)
