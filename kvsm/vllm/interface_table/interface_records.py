"""The records of vLLM that cross the interface between it and kvsm."""

from __future__ import annotations

from kvsm.vllm.interface_table.rows import Record

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_OFFLOAD = "vllm.v1.kv_offload.base"
_CONFIG = "vllm.v1.kv_offload.config"

RECORDS = (
    Record(
        f"{_OFFLOAD}.OffloadingEvent",
        ("keys", "medium", "removed", "locality", "ownership", "removal_expected", "metadata_only"),
        {"metadata_only": "0.33.0"},
    ),
    Record(f"{_OFFLOAD}.ReqContext", ("req_id", "kv_transfer_params", "kv_hints", "load_tier_filter")),
    Record(f"{_OFFLOAD}.ScheduleEndContext", ("new_req_ids", "preempted_req_ids")),
    Record(f"{_OFFLOAD}.PrepareStoreOutput", ("keys_to_store", "store_spec", "evicted_keys")),
    Record(f"{_OFFLOAD}.TransferResult", ("job_id", "success", "transfer_size", "transfer_time")),
    Record(f"{_OFFLOAD}.CanonicalKVCaches", ("tensors", "group_data_refs")),
    Record(f"{_OFFLOAD}.CanonicalKVCacheTensor", ("tensor", "page_size_bytes")),
    Record(f"{_OFFLOAD}.OffloadingKVEventsConfig", ("enable_kv_cache_events", "self_describing_kv_events")),
    Record(
        f"{_CONFIG}.OffloadingConfig",
        (
            *("groups", "worker_kv_bytes_per_block", "enable_kv_cache_events", "extra_config", "engine_id"),
            *("model", "cache", "parallel", "replicated_layout", "canonical_layout", "kv_cache_layout"),
        ),
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
    Record(
        "vllm.v1.core.sched.output.KVConnectorBlockState",
        ("req_ids", "resolve_block_ids", "boundary_state_offloads"),
    ),
)
"""The records with their public fields. A new field may be one that kvsm should set or read."""
