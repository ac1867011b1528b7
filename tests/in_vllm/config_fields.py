"""The fields of vLLM's configuration that count: starts that differ in one do not read each other's blocks.

They count without this table, too. The table says that each was reviewed, so a test fails by the name of a
field that a new vLLM brings.
"""

from __future__ import annotations

from collections.abc import Mapping

COUNTED: Mapping[str, str] = {
    "AttentionConfig": """
        backend backend_per_kind disable_flashinfer_q_quantization hisparse_config indexer_kv_dtype
        indexer_sparse_logits minimax_m3_indexer_cp minimax_m3_msa_decode_backend mla_prefill_backend
        sparse_mla_force_mqa use_non_causal use_prefill_query_quantization use_trtllm_attention
    """,
    "CacheConfig": """
        block_size cache_dtype enable_mamba_shared_prefix_checkpoint enable_prefix_caching hash_block_size
        is_attention_free kv_cache_dtype_skip_layers kv_cache_layout kv_sharing_fast_prefill mamba_block_size
        mamba_cache_dtype mamba_cache_mode mamba_page_size_padded mamba_ssm_cache_dtype
        prefix_caching_hash_algo prefix_match_unit replayssm_buffer_len skip_page_size_padded
        sliding_window swa_bounded_replay use_kda_recoverssm use_replayssm
    """,
    "DeviceConfig": "device_type",
    "DiffusionConfig": "canvas_length max_denoising_steps",
    "EncoderCacheManagerConfig": "encoder_cache_manager_cls manager_config",
    "HiSparseConfig": "device_buffer_size eager_host_mirror",
    "KernelConfig": "linear_backend linear_backend_per_quant moe_backend sparse_indexer_topk_backend",
    "LoRAConfig": """
        default_mm_loras enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora
        lora_dtype max_lora_cls_labels max_lora_rank target_modules
    """,
    "LoadConfig": "device ignore_patterns load_format model_loader_extra_config pt_load_map_location",
    "MambaConfig": "backend enable_stochastic_rounding ssu_algorithm stochastic_rounding_philox_rounds",
    "ModelConfig": """
        allow_deprecated_quantization code_revision config_format convert disable_sliding_window dtype
        hf_config hf_config_path hf_overrides hf_text_config is_submodel_config max_model_len model
        model_class_overrides model_impl model_weights multimodal_config quantization quantization_config
        revision runner spec_target_max_model_len trust_remote_code word_embeddings_untied_by_checkpoint
    """,
    "MultiModalConfig": """
        allow_missing_mm_embeddings language_model_only media_io_kwargs
        mm_device_do_normalize mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_only
        mm_hasher_algorithm mm_processor_kwargs video_pruning_method video_pruning_rate
    """,
    "ParallelConfig": """
        cp_kv_cache_interleave_size dcp_kv_cache_interleave_size decode_context_parallel_size
        pipeline_parallel_size prefill_context_parallel_size tensor_parallel_size worker_cls
        worker_extension_cls world_size
    """,
    "QuantSpec": "activation weight",
    "QuantizationConfigArgs": "ignore linear moe targets",
    "SchedulerConfig": "disable_hybrid_kv_cache_manager runner_type scheduler_cls",
    "SpeculativeConfig": """
        attention_backend code_revision disable_eagle_block_drop disable_lookahead_block_hashes
        draft_load_config draft_model_config draft_parallel_config draft_tensor_parallel_size
        index_share_for_mtp_iteration kv_cache_dtype max_model_len method model parallel_drafting
        quantization revision tensor_parallel_size
    """,
    "VllmConfig": """
        additional_config attention_config cache_config device_config diffusion_config ec_manager_config
        kernel_config load_config lora_config mamba_config model_config parallel_config quant_config
        scheduler_config speculative_config
    """,
}
"""Class -> its fields that count."""
