"""vLLM's configurations for a small engine without a model, and vLLM's scheduler for them."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from vllm import config as vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from kvsm.check.vllm_fuzz.shape import BLOCK_BYTES, BLOCK_TOKENS, MOST_TOKENS, STATES, VOCABULARY


def changed(config: Any, **changes: Any) -> Any:
    """A copy with changed fields. (Constructing a new one would let vLLM recompute the fields.)"""
    changed = copy.copy(config)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


@cache
def hasher() -> Any:
    """vLLM's block hasher. PYTHONHASHSEED is fixed: otherwise hashes may differ from process to process."""
    with patch.dict(os.environ, PYTHONHASHSEED="0"):
        init_none_hash(sha256)
    return get_request_block_hasher(BLOCK_TOKENS, sha256)


def make_config(
    transfer: Any,
    *,
    stages: int = 1,
    shards: int = 1,
    is_async: bool = False,
    drafts: int = 0,
    drafter: str = "",
    device_blocks: int,
    step_tokens: int,
    most_running: int,
    priorities: bool = False,
    adapters: int = 0,
    kv_events: bool = False,
    mamba: bool = False,
) -> Any:
    """vLLM's configuration of an engine.

    transfer: a `KVTransferConfig`. The other parameters are fields of `EngineShape`.
    """
    base = _base_config(stages, shards)
    return changed(
        base,
        cache_config=changed(
            base.cache_config, num_gpu_blocks=device_blocks, mamba_cache_mode="align" if mamba else "none"
        ),
        scheduler_config=changed(
            base.scheduler_config,
            max_num_seqs=most_running,
            max_num_batched_tokens=step_tokens,
            max_num_scheduled_tokens=step_tokens,
            async_scheduling=is_async,
            enable_chunked_prefill=True,
            policy="priority" if priorities else "fcfs",
            disable_hybrid_kv_cache_manager=not has_groups(transfer),
        ),
        lora_config=vllm.LoRAConfig(max_loras=adapters, max_lora_rank=8) if adapters else None,
        kv_transfer_config=transfer,
        speculative_config=_speculative(base, drafts, "eagle" if drafter else "ngram") if drafts else None,
        kv_events_config=vllm.KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if kv_events
        else None,
    )


def has_groups(transfer: Any) -> bool:
    """Whether vLLM allows several KV cache groups with this connector; else all layers use full attention."""
    return bool(KVConnectorFactory.supports_hma_config(transfer))


def make_kv_cache_config(
    device_blocks: int, windows: Sequence[int], drafter: int | None = None, eagle: int | None = None
) -> Any:
    """The configuration of the KV cache.

    windows: the sliding window of each group (tokens); 0 for full attention, `STATES` for mamba states.
    drafter: the group that has only layers of the drafter.
    eagle: the group that vLLM marks as the drafter's.
    """
    size = device_blocks * BLOCK_BYTES
    specs = [_spec(window, is_drafter=group == drafter) for group, window in enumerate(windows)]
    assert all(spec.page_size_bytes == BLOCK_BYTES for spec in specs)
    # The groups share the memory, as in vLLM: a block belongs to one group at a time.
    names = [f"layer.{group}" for group in range(len(specs))]
    tensors = [KVCacheTensor(size, [name], layer_stride=size, block_stride=BLOCK_BYTES) for name in names]
    specs_of_groups = [
        KVCacheGroupSpec([name], spec, is_eagle_group=group == eagle)
        for group, (name, spec) in enumerate(zip(names, specs))
    ]
    return KVCacheConfig(device_blocks, tensors, specs_of_groups)


def _spec(window: int, *, is_drafter: bool) -> Any:
    """The KV cache spec of a group's layers."""
    if window == STATES:
        state = {"shapes": ((BLOCK_BYTES // 4,),), "dtypes": (torch.float32,)}
        return MambaSpec(block_size=BLOCK_TOKENS, **state, mamba_cache_mode="align")
    # vLLM puts layers with equal specs into one group, so a drafter with its own group has other head sizes.
    heads = (
        {"head_size": 2, "dtype": torch.float16} if is_drafter else {"head_size": 1, "dtype": torch.float32}
    )
    common = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, **heads}
    return SlidingWindowSpec(**common, sliding_window=window) if window else FullAttentionSpec(**common)


def make_scheduler(config: Any, kv_cache: Any, most_steps: int, runner: int = 1) -> Any:
    """Create vLLM's scheduler.

    most_steps: how many steps may be in flight at once; checked against vLLM's own number.
    runner: the version of vLLM's model runner, 1 or 2.
    """
    with patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER=str(runner - 1)):
        if config.max_concurrent_batches != most_steps:
            raise AssertionError(
                f"vLLM has {config.max_concurrent_batches} steps in flight and not {most_steps}"
            )
        return (AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler)(
            config,
            kv_cache,
            StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )


@cache
def _base_config(stages: int, shards: int) -> Any:
    """vLLM's configuration of a small model that does not exist."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": MOST_TOKENS}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
    with TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps({**kind, **size, **heads}))
        return vllm.VllmConfig(
            model_config=vllm.ModelConfig(model=model, skip_tokenizer_init=True, max_model_len=MOST_TOKENS),
            cache_config=vllm.CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
            scheduler_config=vllm.SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=MOST_TOKENS,
                max_model_len=MOST_TOKENS,
                is_encoder_decoder=False,
            ),
            parallel_config=vllm.ParallelConfig(
                pipeline_parallel_size=stages, tensor_parallel_size=shards, distributed_executor_backend="mp"
            ),
            device_config=vllm.DeviceConfig(device="cpu"),
        )


def _speculative(base: Any, drafts: int, method: str) -> Any:
    speculative = vllm.SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=drafts,
        prompt_lookup_max=2,
        target_model_config=base.model_config,
        target_parallel_config=base.parallel_config,
    )
    # The constructor would load the drafter's model.
    return changed(speculative, method=method)
