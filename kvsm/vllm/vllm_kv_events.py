"""kvsm's KV events as vLLM's own objects, which are the only ones that its publisher encodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from vllm.distributed import kv_events as vllm_events
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvsm.kv_events import BlockStored, KVCacheEvent


def to_vllm_kv_events(events: Iterable[KVCacheEvent]) -> list[Any]:
    """The same events. vLLM's settings decide whether block hashes become integers."""
    return [_to_vllm_kv_event(event) for event in events]


def _to_vllm_kv_event(event: KVCacheEvent) -> Any:
    fields = msgspec.structs.asdict(event)
    fields["block_hashes"] = [maybe_convert_block_hash(one) for one in fields["block_hashes"]]
    if not isinstance(event, BlockStored):
        return vllm_events.BlockRemoved(**fields)
    parent = fields["parent_block_hash"]
    fields["parent_block_hash"] = None if parent is None else maybe_convert_block_hash(parent)
    return vllm_events.BlockStored(**fields)
