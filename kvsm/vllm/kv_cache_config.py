"""The KV cache of a model, as vLLM lays it out: which groups of layers, and where their bytes are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsm.errors import ConfigError
from kvsm.scheduler import GroupKind, KVCacheGroup

_LOST_BYTES = "KV cache that is not loaded would be read as if it were"


def groups_of(vllm_config: Any, kv_cache_config: Any) -> tuple[KVCacheGroup, ...]:
    """Its groups, in the order of the block tables. Raises `ConfigError` for layers that kvsm cannot serve:
    a hit that leaves out a group would be wrong."""
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size

    shards = vllm_config.parallel_config.decode_context_parallel_size
    served = set(kv_cache_config.prefix_cacheable_group_ids)
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = _single_spec(index, group.kv_cache_spec)
        if index not in served:
            raise ConfigError(
                f"KV cache group {index} ({type(spec).__name__}) has no prefix cache, so that no hit can "
                f"cover it: {_LOST_BYTES}"
            )
        kind, window = _kind_of(index, spec)
        tokens = resolve_dcp_kv_block_size(spec, shards)
        groups.append(KVCacheGroup(tokens, kind, window, drafter=group.is_eagle_group))
    return tuple(groups)


def _single_spec(index: int, spec: Any) -> Any:
    """Layers of one group may differ in what a token takes, not in how far back they look."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    specs = list(spec.kv_cache_specs.values())
    if len({_kind_of(index, one) for one in specs}) > 1:
        raise ConfigError(f"KV cache group {index} has layers that look back differently far")
    return specs[0]


def _kind_of(index: int, spec: Any) -> tuple[GroupKind, int]:
    """(kind, window in tokens). Types are compared as they are: a subclass may look back otherwise."""
    from vllm.v1 import kv_cache_interface as kv

    if type(spec) in (kv.FullAttentionSpec, kv.MLAAttentionSpec):
        return GroupKind.FULL, 0
    if type(spec) in (kv.SlidingWindowSpec, kv.SlidingWindowMLASpec):
        return GroupKind.SLIDING_WINDOW, spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    if type(spec) is kv.MambaSpec:
        if spec.mamba_cache_mode != "align":
            raise ConfigError(
                f"KV cache group {index} is of mamba layers in cache mode {spec.mamba_cache_mode!r}; kvsm "
                "needs states at block boundaries: --mamba-cache-mode align"
            )
        return GroupKind.MAMBA, 0
    raise ConfigError(
        f"KV cache group {index} is a {type(spec).__name__}, which kvsm cannot offload: it does not know "
        f"which blocks a hit needs, and {_LOST_BYTES}"
    )


def hash_tokens_of(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many tokens one of a request's block hashes covers."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def block_bytes_of(kv_cache_config: Any) -> int:
    """Bytes of one block on one rank, of all layers together. Each tensor's size is that of the allocation
    that all share."""
    if not kv_cache_config.kv_cache_tensors:
        raise ConfigError("the model has no KV cache, and so nothing to offload")
    return int(kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks)


def host_blocks_of(cpu_bytes: int, ranks: int, kv_cache_config: Any, blocks_per_slot: int = 1) -> int:
    """How many slots each rank's share of the host memory has. Raises `ConfigError` if it has none."""
    block_bytes = block_bytes_of(kv_cache_config) * blocks_per_slot
    slots = cpu_bytes // ranks // block_bytes
    if slots < 1:
        raise ConfigError(
            f"cpu_bytes_to_use is {cpu_bytes:,}: on each of {ranks} ranks that is less than the "
            f"{block_bytes:,} bytes of one block; give at least {block_bytes * ranks:,}"
        )
    return slots


def block_tensors(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> list[Any]:
    """Each layer's cache as `[num_blocks, bytes of its page]`, int8, viewed without copying. Layers that
    share bytes give views that lie in each other; who makes a layout of them counts these once."""
    import torch
    from vllm.v1.kv_cache_interface import group_kernel_blocks

    num_blocks, views = kv_cache_config.num_blocks, []
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            if name not in kv_caches:
                continue
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            cache = group_kernel_blocks(kv_caches[name], num_blocks)
            stride = cache.stride(0) * cache.element_size()
            views.append(
                torch.empty(0, dtype=torch.int8, device=cache.device).set_(
                    cache.untyped_storage(),
                    cache.storage_offset() * cache.element_size(),
                    (num_blocks, min(spec.page_size_bytes, stride)),
                    (stride, 1),
                )
            )
    if not views:
        raise ConfigError("vLLM registered no KV cache that belongs to a group of the model")
    return views
