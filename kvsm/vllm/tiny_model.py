"""Models so small that vLLM serves them on a CPU in seconds: random weights, no tokenizer, no download.

    with tiny_model(LLAMA) as model:
        engine = LLM(model, **SETTINGS)

The weights are drawn large, unlike vLLM's dummy ones: what is attended to decides which token comes next, so
that a wrong byte in the KV cache is seen in the tokens. They follow from a seed: two engines say the same.
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
"""Every layer looks at everything before: one KV cache group."""

GEMMA: Mapping[str, Any] = {
    **_SHAPE,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""A layer with a sliding window of two blocks, and one that looks at everything: two groups."""

SETTINGS: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "block_size": BLOCK_TOKENS,
    "max_model_len": 512,
    "dtype": "float32",
    "seed": 0,
    "gpu_memory_utilization": 0.2,
}
"""Of vLLM's `LLM`; on a GPU there is room for others."""

ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What vLLM reads when it is imported."""


@contextmanager
def tiny_model(config: Mapping[str, Any] = LLAMA, seed: int = 0) -> Iterator[str]:
    """A directory with this configuration and its weights, for as long as it is needed. Needs safetensors and
    torch, which vLLM brings."""
    from safetensors.torch import save_file

    with TemporaryDirectory(prefix="kvsm-tiny-model-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        save_file(_weights(config, seed), str(Path(directory) / "model.safetensors"))
        yield directory


def _weights(config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    import torch

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    of_layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    is_gemma = config["model_type"] == "gemma3_text"
    if is_gemma:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
        norms |= {"self_attn.q_norm": config["head_dim"], "self_attn.k_norm": config["head_dim"]}
    drawn = torch.Generator().manual_seed(seed)
    # Gemma multiplies its embeddings by the root of the width, and adds one to the weights of its norms.
    scale, one = (hidden**-0.5 / 4, 0.0) if is_gemma else (1.0, 1.0)
    embeddings = torch.randn(config["vocab_size"], hidden, generator=drawn) * scale
    weights = {"model.embed_tokens.weight": embeddings}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in of_layer.items():
            matrix = torch.randn(rows, columns, generator=drawn) * _GAIN / columns**0.5
            weights[f"model.layers.{layer}.{name}.weight"] = matrix
        for name, width in norms.items():
            weights[f"model.layers.{layer}.{name}.weight"] = torch.full((width,), one)
    return weights | {"model.norm.weight": torch.full((hidden,), one)}


_GAIN = 2.0
"""So that each layer changes what it is given about as much as it leaves it."""
