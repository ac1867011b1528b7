"""Tiny models of many kinds that vLLM serves on a CPU, each with the settings that it needs.

Every model has random weights (`random_weights`). Sizes are the smallest that vLLM's CPU kernels accept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvsm.vllm.tiny_model import BLOCK_TOKENS, LLAMA, VOCABULARY

WINDOW = 2 * BLOCK_TOKENS

_TEXT: Mapping[str, Any] = {
    name: value for name, value in LLAMA.items() if name not in ("architectures", "model_type", "torch_dtype")
}

_WINDOW_THEN_FULL: Mapping[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}

_MAMBA2: Mapping[str, Any] = {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_d_head": 32,
    "mamba_chunk_size": 32,
}

_EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}

ALIGN: Mapping[str, Any] = {"mamba_cache_mode": "align"}

ONE_BLOCK_A_STEP: Mapping[str, Any] = {**ALIGN, "max_num_batched_tokens": BLOCK_TOKENS}
"""vLLM's CPU kernel of Mamba 2 gives no state from the middle of a step: it raises IndexError. With one block
a step, every state is at the end of a step."""


class TinyModel(NamedTuple):
    """A model and the settings of its engine.

    config: its configuration, without the dtype.
    engine: further arguments of vLLM's `LLM`.
    dtype: the dtype of its weights and its KV cache.
    hits_change_answers: why vLLM's own prefix cache, without kvsm, may change the answers. Empty: it does
        not.
    lifts_ban: whether the test enables the prefix cache with MLA, which vLLM's CPU platform turns off.
    is_slow: whether its tests are marked slow, because another model covers the same kind of KV cache.
    """

    config: Mapping[str, Any]
    engine: Mapping[str, Any] = {}
    dtype: str = "float32"
    hits_change_answers: str = ""
    lifts_ban: bool = False
    is_slow: bool = False


def _text(architecture: str, model_type: str, **config: Any) -> dict[str, Any]:
    return {**_TEXT, "architectures": [architecture], "model_type": model_type, **config}


LLAMA_MODEL = TinyModel(_text("LlamaForCausalLM", "llama"))

LLAMA_4 = TinyModel(
    _text(
        "Llama4ForCausalLM",
        "llama4_text",
        intermediate_size_mlp=128,
        num_local_experts=2,
        num_experts_per_tok=1,
        attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        moe_layers=[],
    ),
    is_slow=True,
)
"""A model in which one layer attends only to its chunk of tokens."""

MLA = TinyModel(
    _text(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        **_EXPERTS,
    ),
    # Where a CPU has AMX, vLLM would take a backend that knows no float32.
    engine={"attention_backend": "CPU_MLA"},
    hits_change_answers="vLLM turns the prefix cache of MLA off on a CPU",
    lifts_ban=True,
)

MODELS: Mapping[str, TinyModel] = {
    "llama fp8": LLAMA_MODEL._replace(engine={"kv_cache_dtype": "fp8"}),
    "gemma 2": TinyModel(
        _text(
            "Gemma2ForCausalLM",
            "gemma2",
            query_pre_attn_scalar=32,
            hidden_activation="gelu_pytorch_tanh",
            **_WINDOW_THEN_FULL,
        )
    ),
    "gpt-oss": TinyModel(
        _text("GptOssForCausalLM", "gpt_oss", num_local_experts=4, **_EXPERTS, **_WINDOW_THEN_FULL),
        is_slow=True,
    ),
    "cohere 2": TinyModel(
        _text("Cohere2ForCausalLM", "cohere2", layer_norm_eps=1e-5, logit_scale=0.25, **_WINDOW_THEN_FULL),
        is_slow=True,
    ),
    "llama 4": LLAMA_4,
    "deepseek v3": MLA,
    "qwen3-next": TinyModel(
        _text(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            num_hidden_layers=4,
            layer_types=["linear_attention", "full_attention"] * 2,
            # With these sizes a state fits into a block of attention.
            num_key_value_heads=4,
            head_dim=128,
            linear_conv_kernel_dim=4,
            linear_num_key_heads=1,
            linear_key_head_dim=64,
            linear_num_value_heads=2,
            linear_value_head_dim=64,
            num_experts=4,
            shared_expert_intermediate_size=64,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            **_EXPERTS,
        ),
        ALIGN,
        # Its kernels know no other type on a CPU.
        "bfloat16",
    ),
    "zamba 2": TinyModel(
        _text(
            "Zamba2ForCausalLM",
            "zamba2",
            num_hidden_layers=3,
            hybrid_layer_ids=[1],
            layers_block_type=["mamba", "hybrid", "mamba"],
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_ngroups=1,
            n_mamba_heads=4,
            chunk_size=32,
            num_mem_blocks=1,
            attention_head_dim=32,
            adapter_rank=8,
        ),
        ONE_BLOCK_A_STEP,
    ),
    "falcon h1": TinyModel(
        _text("FalconH1ForCausalLM", "falcon_h1", mamba_d_ssm=128, mamba_n_heads=4, **_MAMBA2),
        ONE_BLOCK_A_STEP,
        is_slow=True,
    ),
    "nemotron h": TinyModel(
        _text(
            "NemotronHForCausalLM",
            "nemotron_h",
            num_hidden_layers=4,
            hybrid_override_pattern="M-*-",
            layers_block_type=["mamba", "mlp", "attention", "mlp"],
            mamba_num_heads=4,
            mamba_head_dim=32,
            n_groups=1,
            ssm_state_size=16,
            conv_kernel=4,
            chunk_size=32,
            mlp_hidden_act="relu2",
        ),
        ONE_BLOCK_A_STEP,
        is_slow=True,
    ),
    "granite 4": TinyModel(
        _text(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            hidden_size=128,
            layer_types=["mamba", "attention"],
            layers_block_type=["mamba", "attention"],
            mamba_n_heads=8,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=128,
            position_embedding_type="nope",
            **_MAMBA2,
        ),
        ONE_BLOCK_A_STEP,
        is_slow=True,
    ),
    "lfm 2": TinyModel(
        _text(
            "Lfm2ForCausalLM",
            "lfm2",
            hidden_size=128,
            layer_types=["conv", "full_attention"],
            conv_L_cache=3,
            conv_bias=False,
            conv_dim=128,
            conv_dim_out=128,
            block_dim=128,
            block_ff_dim=128,
            block_multiple_of=32,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            norm_eps=1e-5,
        ),
        ALIGN,
        hits_change_answers="of requests that are served together on a CPU, some get other tokens from hits",
        is_slow=True,
    ),
}
"""Name -> a model with another kind of KV cache than the models of `workloads`."""

PICTURES: Mapping[str, Any] = {
    "architectures": ["Blip2ForConditionalGeneration"],
    "model_type": "blip-2",
    "num_query_tokens": WINDOW,
    "image_token_index": 4,
    "hidden_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vision_config": {
        "model_type": "blip_2_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "qformer_config": {
        "model_type": "blip_2_qformer",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "encoder_hidden_size": 64,
        "cross_attention_frequency": 1,
    },
    "text_config": {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "ffn_dim": 128,
        "num_attention_heads": 2,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 64,
        "do_layer_norm_before": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    },
}
"""The configuration of a model with image input: each image becomes two blocks of tokens before the text."""
