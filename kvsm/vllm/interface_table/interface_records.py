"""The records of vLLM that cross the interface between it and kvsm."""

from __future__ import annotations

from kvsm.vllm.interface_table.rows import Record

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_OFFLOAD = "vllm.v1.kv_offload.base"
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_CONFIG = "vllm.v1.kv_offload.config"

RECORDS = (
    Record(
        f"{_OFFLOAD}.OffloadingEvent",
        ("keys", "medium", "removed", "locality", "ownership", "removal_expected", "metadata_only"),
        {"metadata_only": "0.33.0"},
    ),
    Record(f"{_OFFLOAD}.ReqContext", ("req_id", "kv_transfer_params", "kv_hints", "load_tier_filter")),
    Record(f"{_OFFLOAD}.RequestOffloadingContext", ("policy",)),
    Record(f"{_OFFLOAD}.ScheduleEndContext", ("new_req_ids", "preempted_req_ids")),
    Record(f"{_OFFLOAD}.PrepareStoreOutput", ("keys_to_store", "store_spec", "evicted_keys")),
    Record(f"{_OFFLOAD}.TransferResult", ("job_id", "success", "transfer_size", "transfer_time")),
    Record(f"{_OFFLOAD}.CanonicalKVCaches", ("tensors", "group_data_refs")),
    Record(f"{_OFFLOAD}.CanonicalKVCacheTensor", ("tensor", "page_size_bytes")),
    Record(f"{_OFFLOAD}.CanonicalKVCacheRef", ("tensor_idx", "page_size_bytes", "mapping")),
    Record(f"{_OFFLOAD}.OffloadingKVEventsConfig", ("enable_kv_cache_events", "self_describing_kv_events")),
    Record(
        f"{_CONFIG}.OffloadingConfig",
        (
            *("groups", "worker_kv_bytes_per_block", "enable_kv_cache_events", "extra_config", "engine_id"),
            *("model", "cache", "parallel", "replicated_layout", "canonical_layout", "kv_cache_layout"),
        ),
    ),
    Record(
        f"{_CONFIG}.OffloadingGroupConfig",
        ("tokens_per_block", "layer_names", "group_id", "sliding_window_size_in_chunks"),
        {"sliding_window_size_in_chunks": "0.33.0"},
    ),
    Record(
        f"{_CONFIG}.OffloadingModelConfig",
        ("name", "dtype", "max_model_len"),
        {"max_model_len": "0.33.0"},
    ),
    Record(f"{_CONFIG}.OffloadingCacheConfig", ("tokens_per_hash", "blocks_per_chunk")),
    Record(
        f"{_CONFIG}.OffloadingParallelConfig",
        (
            *("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_index"),
            *("data_parallel_size", "data_parallel_rank_local", "is_parallelism_agnostic"),
        ),
    ),
    Record(f"{_BASE}.KVConnectorTransferResults", ("finished_sending", "finished_recving", "failed_recving")),
    Record(
        "vllm.v1.outputs.KVConnectorOutput",
        (
            *("finished_sending", "finished_recving", "kv_connector_stats", "kv_cache_events"),
            *("kv_connector_worker_meta", "invalid_block_ids", "failed_recving", "expected_finished_count"),
        ),
    ),
    # What `KvsmOffloadingConnector` shares with the connector below it.
    Record(
        f"{_OFFLOADING}.common.TransferJob", ("req_id", "src_spec", "dst_spec", "sync"), {"sync": "0.33.0"}
    ),
    Record(f"{_OFFLOADING}.common.OffloadingConnectorMetadata", ("load_jobs", "store_jobs", "jobs_to_flush")),
    Record(f"{_OFFLOADING}.common.OffloadingWorkerMetadata", ("completed_jobs", "transfer_stats")),
    Record(
        f"{_OFFLOADING}.scheduler.RequestGroupState",
        (
            *("offload_keys", "block_ids", "next_stored_chunk_idx", "num_hit_chunks"),
            "lookup_hit_end_chunk_idx",
        ),
        {"lookup_hit_end_chunk_idx": "0.33.0"},
    ),
    Record(
        "vllm.v1.core.sched.output.KVConnectorBlockState",
        ("req_ids", "resolve_block_ids", "boundary_state_offloads"),
    ),
)
"""Their public fields. A new field may carry something that kvsm should say or read."""
