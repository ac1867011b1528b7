"""Tiny models that vLLM serves on a CPU in seconds: random weights, no tokenizer, no download.

    with tiny_model(LLAMA) as model:
        engine = LLM(model, **SETTINGS)

Unlike vLLM's dummy weights, these are large, so the next token depends on the attended tokens, and a wrong
byte in the KV cache shows in the tokens. They follow from a seed, so two engines give the same answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

BLOCK_TOKENS = 32

VOCABULARY = 1024

_SHAPE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}

LLAMA: Mapping[str, Any] = {**_SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
"""Full attention in every layer: one KV cache group."""

GEMMA: Mapping[str, Any] = {
    **_SHAPE,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""One layer with a sliding window of two blocks, one with full attention: two KV cache groups."""

SETTINGS: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "block_size": BLOCK_TOKENS,
    "max_model_len": 512,
    "dtype": "float32",
    "seed": 0,
    "gpu_memory_utilization": 0.2,
}
"""Arguments of vLLM's `LLM`. On a GPU they leave room for other engines."""

ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables that vLLM reads when it is imported."""


@contextmanager
def tiny_model(config: Mapping[str, Any] = LLAMA, seed: int = 0) -> Iterator[str]:
    """Yield the directory of a model with this configuration; it is deleted at the end of the `with` block.

    Needs safetensors, torch and transformers, on which vLLM depends.
    """
    from safetensors.torch import save_file

    with TemporaryDirectory(prefix="kvsm-tiny-model-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        save_file(_weights(config, seed), str(Path(directory) / "model.safetensors"))
        yield directory


def _weights(config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    drawn = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    is_gemma = config["model_type"] == "gemma3_text"
    weights = {}
    for name, shape in ((name, parameter.shape) for name, parameter in model.named_parameters()):
        # Gemma multiplies its embeddings by the root of the width, and adds 1 to the weights of its norms.
        if len(shape) < 2:
            weights[name] = torch.full(shape, 0.0 if is_gemma else 1.0)
        elif "embed_tokens" in name:
            weights[name] = torch.randn(shape, generator=drawn) * (shape[1] ** -0.5 / 4 if is_gemma else 1.0)
        else:
            weights[name] = torch.randn(shape, generator=drawn) * _GAIN / shape[1] ** 0.5
    return weights


_GAIN = 2.0
"""The scale of weights. With this value, a layer's output is about as large as its input."""
