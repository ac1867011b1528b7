"""The shapes of the engines of `real_scheduler`, and the configuration from which vLLM's schedulers are
built."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from hanging_copies import TIMEOUT_S
from vllm import config as vllm
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from kvsm.disk import DiskGeometry

BLOCK_TOKENS = 4
WORD_BYTES = 8
"""Bytes of one token in each rank's part of the KV cache: one word."""
MOST_TOKENS = 48
"""Most tokens of a request, output included."""
WINDOW = 6
"""Tokens of the sliding window: it spans two or three blocks."""
VOCABULARY = 1024


class Shape(NamedTuple):
    """The shape of an engine.

    runner: the version of vLLM's model runner that it serves, 1 or 2.
    stages: pipeline stages.
    shards: tensor-parallel ranks of each stage.
    drafts: speculative tokens of each step.
    failing: share of the copies that fail on each rank.
    hanging: share of the copies that hang on each rank (`hanging_copies`).
    disk_blocks: slots of each rank's file; 0: there is no disk tier.
    extra: options of the connector.
    """

    is_async: bool = False
    runner: int = 1
    stages: int = 1
    shards: int = 1
    groups: int = 1
    drafts: int = 0
    device_blocks: int = 32
    host_blocks: int = 16
    step_tokens: int = 16
    most_running: int = 4
    failing: float = 0.0
    hanging: float = 0.0
    on_failed_load: str = "recompute"
    disk_blocks: int = 0
    extra: Mapping[str, Any] = {}

    @property
    def ranks(self) -> int:
        return self.stages * self.shards

    @property
    def flushes(self) -> bool:
        """Whether the last step waits for all copies."""
        return bool(self.extra.get("last_step") == "flush")

    @property
    def most_steps(self) -> int:
        """How many steps may be in flight at once."""
        return self.stages + self.is_async


CHOICES: Mapping[str, Sequence[Any]] = {
    "is_async": (False, True, True),
    "runner": (1, 2),
    "stages": (1, 1, 2),
    "shards": (1, 1, 2),
    "groups": (1, 2),
    "drafts": (0, 0, 2),
    "device_blocks": (26, 34, 48),
    "host_blocks": (6, 40, 160, 160),
    "step_tokens": (8, 16, 64),
    "most_running": (2, 4),
    "failing": (0.0, 0.0, 0.2),
    "hanging": (0.0, 0.0, 0.0, 0.1),
    "on_failed_load": ("recompute", "recompute", "fail"),
    "disk_blocks": (0,),  # Copies of a disk are real, and the clock of a drawn engine is not.
    "extra": (
        {},
        {"policy": "arc"},
        {"policy": "s3fifo", "store_threshold": 2},
        {"prompt_only": True, "last_step": "flush"},
        {"last_step": "flush"},
        {"blocks_per_chunk": 2},
        {"store": "lazy", "lazy_target_blocks": 6},
        {"store": "lazy", "lazy_target_blocks": 16, "policy": "slru"},
    ),
}
"""The values from which a `Shape` is drawn."""


def valid(shape: Shape) -> Shape:
    """This shape, or the nearest one that vLLM accepts."""
    if shape.stages > 1:
        shape = shape._replace(drafts=0, runner=2 if shape.is_async else shape.runner)
    return shape


def changed(config: Any, **changes: Any) -> Any:
    """A changed copy. (vLLM's configurations recompute their fields when they are constructed.)"""
    changed = copy.copy(config)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


@cache
def hasher() -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK_TOKENS, sha256)


@cache
def _base_config(stages: int, shards: int) -> Any:
    """vLLM's configuration of a small model; there is no model."""
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


def make_scheduler(shape: Shape, config: Any, kv_cache: Any) -> Any:
    with patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER=str(shape.runner - 1)):
        if config.max_concurrent_batches != shape.most_steps:
            raise AssertionError(f"vLLM has {config.max_concurrent_batches} steps in flight with {shape}")
        return (AsyncScheduler if shape.is_async else Scheduler)(
            config,
            kv_cache,
            StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=True,
        )


def make_configs(shape: Shape, directory: str) -> tuple[Any, Any]:
    """(configuration of vLLM, configuration of its KV cache)."""
    base = _base_config(shape.stages, shape.shards)
    block_bytes = BLOCK_TOKENS * WORD_BYTES
    extra = {
        "cpu_bytes_to_use": shape.host_blocks * block_bytes * shape.ranks,
        "event_log": f"{directory}/events",
        "log_durability": "none",
        "transfer_timeout_s": TIMEOUT_S,
        **shape.extra,
    }
    if shape.disk_blocks:
        size = DiskGeometry(block_bytes, shape.disk_blocks).file_bytes * shape.ranks
        extra.update(disk_dir=f"{directory}/disk", disk_bytes=size)
    config = changed(
        base,
        cache_config=changed(base.cache_config, num_gpu_blocks=shape.device_blocks),
        scheduler_config=changed(
            base.scheduler_config,
            max_num_seqs=shape.most_running,
            max_num_batched_tokens=shape.step_tokens,
            max_num_scheduled_tokens=shape.step_tokens,
            async_scheduling=shape.is_async,
            enable_chunked_prefill=True,
        ),
        kv_transfer_config=vllm.KVTransferConfig(
            kv_connector="KvsmConnector",
            kv_connector_module_path="kvsm.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=shape.on_failed_load,
            kv_connector_extra_config=extra,
        ),
        speculative_config=_speculative(base, shape.drafts) if shape.drafts else None,
    )
    size = shape.device_blocks * block_bytes
    common = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    specs = [FullAttentionSpec(**common), SlidingWindowSpec(**common, sliding_window=WINDOW)][: shape.groups]
    assert all(spec.page_size_bytes == block_bytes for spec in specs)
    # Groups overlap, as in vLLM: a block belongs to one group at a time.
    names = [f"layer.{group}" for group in range(shape.groups)]
    tensors = [KVCacheTensor(size, [name], layer_stride=size, block_stride=block_bytes) for name in names]
    groups = [KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs)]
    return config, KVCacheConfig(shape.device_blocks, tensors, groups)


def _speculative(base: Any, drafts: int) -> Any:
    return vllm.SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=drafts,
        prompt_lookup_max=2,
        target_model_config=base.model_config,
        target_parallel_config=base.parallel_config,
    )
