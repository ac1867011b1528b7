"""Read vLLM's `KVCacheConfig`: the KV cache groups, and where the bytes of their layers are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsm.core.scheduler import GroupKind, KVCacheGroup
from kvsm.errors import ConfigError

_LOST_BYTES = "the model would read KV cache that was never loaded"


def groups_of(vllm_config: Any, kv_cache_config: Any) -> tuple[KVCacheGroup, ...]:
    """Return the KV cache groups, in the order of the block tables.

    Raises `ConfigError` for layers that kvsm cannot serve: a hit must cover every group.
    """
    from vllm.v1 import kv_cache_interface as kv
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size

    shards = vllm_config.parallel_config.decode_context_parallel_size
    served = set(kv_cache_config.prefix_cacheable_group_ids)
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = _single_spec(index, group.kv_cache_spec)
        if index not in served:
            raise ConfigError(
                f"KV cache group {index} ({type(spec).__name__}) has no prefix cache, so no hit can cover "
                f"it: {_LOST_BYTES}"
            )
        kind, window = _kind_of(index, spec)
        tokens = resolve_dcp_kv_block_size(spec, shards)
        event_kind = kv.get_kv_cache_spec_kind(group.kv_cache_spec).value
        event_window = kv.get_kv_cache_spec_sliding_window(group.kv_cache_spec) or 0
        groups.append(KVCacheGroup(tokens, kind, window, group.is_eagle_group, event_kind, event_window))
    return tuple(groups)


def _single_spec(index: int, spec: Any) -> Any:
    """Return the spec of a group. Its layers may differ in bytes per token, but not in kind and window."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    specs = list(spec.kv_cache_specs.values())
    if len({_kind_of(index, layer_spec) for layer_spec in specs}) > 1:
        raise ConfigError(f"KV cache group {index} has layers with different windows")
    return specs[0]


def _kind_of(index: int, spec: Any) -> tuple[GroupKind, int]:
    """Return (kind, window in tokens). Subclasses are refused: they may need other blocks."""
    from vllm.v1 import kv_cache_interface as kv

    if type(spec) in (kv.FullAttentionSpec, kv.MLAAttentionSpec):
        return GroupKind.FULL, 0
    if type(spec) in (kv.SlidingWindowSpec, kv.SlidingWindowMLASpec):
        return GroupKind.SLIDING_WINDOW, spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    if type(spec) is kv.ChunkedLocalAttentionSpec:
        return GroupKind.CHUNKED_LOCAL, spec.attention_chunk_size
    if type(spec) is kv.MambaSpec:
        if spec.mamba_cache_mode != "align":
            raise ConfigError(
                f"KV cache group {index} has mamba layers in cache mode {spec.mamba_cache_mode!r}, but kvsm "
                "needs states at block boundaries: --mamba-cache-mode align"
            )
        return GroupKind.MAMBA, 0
    raise ConfigError(
        f"KV cache group {index} is a {type(spec).__name__}, and kvsm does not know which blocks a hit on it "
        f"needs: {_LOST_BYTES}"
    )


def hash_tokens_of(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the number of tokens that one block hash of a request covers."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def block_bytes_of(kv_cache_config: Any) -> int:
    """Return the bytes of one block on one rank, in all layers together."""
    if not kv_cache_config.kv_cache_tensors:
        return 0
    # All tensors share one allocation, and `size` of each is the size of the whole allocation.
    return int(kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks)


def host_slots(cpu_bytes: int, ranks: int, slot_bytes: int) -> int:
    """Return the number of slots that fit into each rank's share of the host memory.

    cpu_bytes: host memory of all ranks together.
    slot_bytes: bytes of one slot on one rank.
    Raises `ConfigError` if no slot fits.
    """
    if slot_bytes < 1:
        raise ConfigError("the model has no KV cache, and so nothing to offload")
    slots = cpu_bytes // (ranks * slot_bytes)
    if slots < 1:
        raise ConfigError(
            f"cpu_bytes_to_use is {cpu_bytes:,} for all ranks: on each of {ranks} this is less than the "
            f"{slot_bytes:,} bytes of one slot; give at least {slot_bytes * ranks:,}"
        )
    return slots


def block_tensors(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> list[Any]:
    """Return the blocks of each layer as `byte_rows`. Layers that share bytes have overlapping views."""
    return list(layer_rows(kv_cache_config, kv_caches).values())


def layer_rows(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    """Return the blocks of each layer as `byte_rows`, by the layer's name."""
    from vllm.v1.kv_cache_interface import group_kernel_blocks

    rows = {}
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            if name in kv_caches:
                spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
                cache = group_kernel_blocks(kv_caches[name], kv_cache_config.num_blocks)
                rows[name] = byte_rows(cache, spec.page_size_bytes)
    if not rows:
        raise ConfigError("vLLM registered no KV cache that belongs to a group of the model")
    return rows


def byte_rows(cache: Any, page_bytes: int) -> Any:
    """View a KV cache tensor as int8 rows `[num_blocks, page_bytes]`, without copying.

    If blocks are less than `page_bytes` apart, a row ends where the next block begins.
    """
    import torch

    stride = cache.stride(0) * cache.element_size()
    return torch.empty(0, dtype=torch.int8, device=cache.device).set_(
        cache.untyped_storage(),
        cache.storage_offset() * cache.element_size(),
        (cache.shape[0], min(page_bytes, stride)),
        (stride, 1),
    )
