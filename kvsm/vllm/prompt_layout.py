"""Facts that two engines compare before a hand-over: what a block means, and the prompt."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np

from kvsm.vllm.config_exceptions import BETWEEN_ENGINES
from kvsm.vllm.kv_cache_config import block_bytes_of
from kvsm.vllm.pool_identity import model_facts


def block_layout(vllm_config: Any, kv_cache_config: Any, blocks_per_chunk: int) -> dict[str, str]:
    """Return the facts that decide the bytes of a rank's host block, by readable names.

    Two engines with equal layouts and equal weights compute equal blocks of equal prompts. Each field of
    vLLM's configuration counts, unless `config_exceptions` names it.
    """
    return {
        **model_facts(vllm_config, kv_cache_config, BETWEEN_ENGINES),
        "bytes of a block": str(block_bytes_of(kv_cache_config)),
        "blocks_per_chunk": str(blocks_per_chunk),
    }


def prompt_digest(request: Any, num_tokens: int, weights: str) -> bytes:
    """Return a digest of a request's first tokens and of all else that decides their KV.

    That is the version of the weights, and the extra keys of vLLM's block hashes: the adapter, images, the
    salt, embeddings of the prompt. The digest does not depend on the engine's hash function.
    """
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    tokens = np.asarray(request.all_token_ids[:num_tokens], np.int64)
    extra_keys, _next_image = generate_block_hash_extra_keys(request, 0, num_tokens, 0)
    beside = repr((weights, extra_keys)).encode(errors="surrogatepass")
    return sha256(tokens.tobytes() + beside).digest()
