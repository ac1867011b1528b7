"""What two engines compare before blocks go from one to the other: what a block means, and the prompt."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

from kvsm.vllm.kv_cache_config import block_bytes_of
from kvsm.vllm.versions import installed


def block_layout(vllm_config: Any, kv_cache_config: Any, blocks_per_chunk: int) -> dict[str, str]:
    """What decides which bytes a host block of each rank has, by names for people.

    Two engines with equal layouts compute equal blocks of equal prompts. The weights are compared by the
    model's name alone.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    attention = getattr(vllm_config, "attention_config", None)
    layout = {
        "vLLM": installed(),
        "model": f"{model.model}, revision {model.revision}",
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "KV cache dtype": str(cache.cache_dtype),
        "attention backend": str(getattr(attention, "backend", None)),
        "tensor-parallel ranks": str(parallel.tensor_parallel_size),
        "pipeline stages": str(parallel.pipeline_parallel_size),
        "context-parallel ranks": str(parallel.decode_context_parallel_size),
        "bytes of a block": str(block_bytes_of(kv_cache_config)),
        "blocks_per_chunk": str(blocks_per_chunk),
    }
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        layout[f"KV cache group {index}"] = f"{group.kv_cache_spec} of {', '.join(group.layer_names)}"
    return layout


def prompt_digest(request: Any, num_tokens: int) -> bytes:
    """A digest of the first tokens of a request, and of what else decides their KV: the adapter, the images
    and the salt. Equal for two engines, whatever their block hashes are."""
    tokens = np.asarray(request.all_token_ids[:num_tokens], np.int64)
    lora = request.lora_request
    images = [
        (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features
        if feature.mm_position.offset < num_tokens
    ]
    beside = [lora.name if lora else None, request.cache_salt, images]
    return sha256(tokens.tobytes() + msgspec.json.encode(beside)).digest()
