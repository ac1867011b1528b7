"""Create the arguments that vLLM's scheduler passes to its connector, with vLLM's own types."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 16
STEP_TOKENS = 8192
"""The most tokens of a step. The target of vLLM's lazy store is the blocks of two such steps."""
LAZY_TARGET = 2 * STEP_TOKENS // BLOCK_TOKENS
DEVICE_BLOCKS = 1 << 14
HOST_BLOCKS = 1 << 16
BLOCK_BYTES = 4096
"""Bytes of a block in the model's only layer."""
STOP = 3
"""The token that ends a request."""


class VllmPool:
    """vLLM's `BlockPool`, with the interface that the engine of `scheduler.py` uses."""

    def __init__(self, pool: Any) -> None:
        self.pool, self._blocks = pool, pool.blocks

    def take(self, count: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(count)]

    def cache(self, request: Any, table: Sequence[int], first: int, last: int) -> None:
        blocks = [self._blocks[block] for block in table]
        self.pool.cache_full_blocks(request, blocks, first, last, BLOCK_TOKENS, 0)

    def free_blocks(self, blocks: Sequence[int]) -> None:
        self.pool.free_blocks([self._blocks[block] for block in blocks])


class VllmWorld:
    """Creates the arguments of a connector, and the configuration of engine and connector.

    model: a directory for the model's configuration. The model itself does not exist.
    """

    def __init__(self, model: Path) -> None:
        import vllm
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        self.version: str = vllm.__version__
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._sampling = SamplingParams(max_tokens=1 << 13, stop_token_ids=[STOP])
        self._sampling.update_from_generation_config({}, eos_token_id=None)
        self.config = self._vllm_config(model)
        self.kv_cache_config = self.kv_cache_of(DEVICE_BLOCKS)

    def _vllm_config(self, model: Path) -> Any:
        from vllm import config as vllm

        size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 1024}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 1 << 14}
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
        (model / "config.json").write_text(json.dumps({**kind, **size, **heads}))
        extra = {"cpu_bytes_to_use": HOST_BLOCKS * BLOCK_BYTES, "offload_prompt_only": False}
        return vllm.VllmConfig(
            model_config=vllm.ModelConfig(model=str(model), skip_tokenizer_init=True, max_model_len=1 << 14),
            cache_config=vllm.CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
            scheduler_config=vllm.SchedulerConfig(
                max_num_seqs=256,
                max_num_batched_tokens=STEP_TOKENS,
                max_model_len=1 << 14,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            device_config=vllm.DeviceConfig(device="cpu"),
            kv_transfer_config=vllm.KVTransferConfig(
                kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
            ),
        )

    def config_with(self, transfer: Any, device_blocks: int) -> Any:
        """The configuration with this `KVTransferConfig` (or None) and this number of device blocks."""
        # Copied, because vLLM's configurations recompute their fields when they are constructed.
        config, cache = copy.copy(self.config), copy.copy(self.config.cache_config)
        cache.num_gpu_blocks = device_blocks
        config.cache_config, config.kv_transfer_config = cache, transfer
        return config

    def memory(self, device_blocks: int) -> Any:
        """The memory of the device blocks, which is never accessed."""
        import torch

        return torch.empty((device_blocks, BLOCK_BYTES), dtype=torch.int8)

    def kv_cache_of(self, device_blocks: int) -> Any:
        """The configuration of a KV cache of `device_blocks` blocks."""
        import torch
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
        )

        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
        assert spec.page_size_bytes == BLOCK_BYTES
        size = device_blocks * BLOCK_BYTES
        tensor = KVCacheTensor(size=size, layers=["layer"], layer_stride=size, block_stride=BLOCK_BYTES)
        return KVCacheConfig(device_blocks, [tensor], [KVCacheGroupSpec(["layer"], spec)])

    def request(self, name: str, prompt: Sequence[int]) -> Any:
        from vllm.v1.request import Request

        return Request(name, list(prompt), self._sampling, None, block_hasher=self._hasher)

    def pool(self) -> VllmPool:
        from vllm.v1.core.block_pool import BlockPool

        return VllmPool(BlockPool(DEVICE_BLOCKS, enable_caching=True, hash_block_size=BLOCK_TOKENS))

    def output(
        self,
        new: Sequence[tuple[Any, list[int]]],
        cached: Sequence[tuple[Any, list[int]]],
        scheduled: dict[str, int],
        finished: set[str],
    ) -> Any:
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        return SchedulerOutput(
            scheduled_new_reqs=[NewRequestData.from_request(request, (table,)) for request, table in new],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[request.request_id for request, _ in cached],
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[(blocks,) if blocks else None for _, blocks in cached],
                num_computed_tokens=[request.num_computed_tokens for request, _ in cached],
                num_output_tokens=[request.num_output_tokens for request, _ in cached],
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
        )

    def end(self, request: Any) -> None:
        from vllm.v1.request import RequestStatus

        request.status = RequestStatus.FINISHED_STOPPED
