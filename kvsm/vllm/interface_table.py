"""What vLLM calls, and what kvsm does with each call: a table of docs/vllm.md.

`interface` compares it with the installed vLLM. A method that a new vLLM adds, removes or changes fails a
test until it has its row here. `vllm_options` has the options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PROPERTY = "property"
"""Stands for the parameters of a property."""

_TABLE = "test_interface.py::test_methods_are_implemented_or_inherited_as_the_table_says"


class Method(NamedTuple):
    """A method of a class of vLLM.

    parameters: as they are written, without self, types and results; or `PROPERTY`.
    does: what kvsm's class does, or why vLLM's own method is right for it.
    test: the test that shows it.
    since: the version that added it; empty if every tested version has it.
    before: the parameters in tested versions before the newest, if they differ.
    inherited: whether kvsm's class has vLLM's own method.
    """

    name: str
    parameters: str
    does: str
    test: str = _TABLE
    since: str = ""
    before: str | None = None
    inherited: bool = False


def _inherited(name: str, parameters: str, does: str, *, since: str = "", test: str = _TABLE) -> Method:
    return Method(name, parameters, does, test, since, inherited=True)


class Interface(NamedTuple):
    """A class of vLLM and the class of kvsm that is one. module: where vLLM has it."""

    module: str
    ours: tuple[str, str]
    """(module, class)."""
    methods: tuple[Method, ...]


_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_OFFLOAD = "vllm.v1.kv_offload.base"
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"

_CONNECTOR = (
    Method(
        "__init__",
        "vllm_config, role, kv_cache_config",
        "Reads the options, and makes the scheduler's or the worker's side.",
        "test_failures.py::test_the_engine_does_not_start",
    ),
    _inherited("role", PROPERTY, "The role that vLLM gave."),
    Method(
        "get_required_kvcache_layout",
        "vllm_config",
        "Layers, then blocks: within a layer each block is contiguous.",
        "test_tokens.py::test_tokens_are_those_without_offload",
    ),
    _inherited(
        "requires_piecewise_for_cudagraph",
        "extra_config",
        "No: no copy is made layer by layer within a step.",
    ),
    Method(
        "requires_kv_delivery",
        PROPERTY,
        "No: what is not stored can be recomputed.",
        "test_tokens.py::test_requests_were_preempted",
    ),
    _inherited(
        "supports_divergent_local_hybrid_hits",
        PROPERTY,
        "No: a hit is the longest prefix that all groups serve, and it is loaded as a whole.",
    ),
    _inherited(
        "get_mem_pool_context", "", "None: kvsm copies to and from the KV cache where vLLM allocates it."
    ),
    _inherited("bind_connector_metadata", "connector_metadata", "Keeps the metadata for the step."),
    _inherited("clear_connector_metadata", "", "Forgets it after the step."),
    _inherited("has_connector_metadata", "", "Whether there is metadata."),
    Method(
        "register_kv_caches",
        "kv_caches",
        "Takes the KV cache, and makes the host pool for this rank's share.",
        "test_tokens.py::test_blocks_go_out_and_come_back",
    ),
    _inherited("supports_sleep_mode", "kv_transfer_config", "Yes: see the next two.", since="0.33.0"),
    Method(
        "unregister_kv_caches",
        "",
        "Waits for all copies before the engine sleeps. The host pool stays.",
        "test_sleep.py::test_nothing_touches_the_kv_cache_of_an_engine_that_sleeps",
        since="0.33.0",
    ),
    Method(
        "restore_kv_caches",
        "",
        "Takes the KV cache again after sleep, also at other addresses.",
        "test_sleep.py::test_a_kv_cache_that_moved_is_copied_from_its_new_place",
        since="0.33.0",
    ),
    _inherited("set_host_xfer_buffer_ops", "copy_operation", "Nothing: kvsm copies itself."),
    _inherited("finish_forward", "", "Nothing: copies do not wait for the end of a step's compute."),
    _inherited("reset_capture_state", "", "Nothing: a capture of CUDA graphs begins no copy."),
    Method(
        "handle_preemptions",
        "kv_connector_metadata",
        "Begins the copies of the step: vLLM calls it before the step computes.",
        "test_real_scheduler.py::test_whatever_hangs_the_words_are_right",
    ),
    Method("start_load_kv", "forward_context, **kwargs", "Nothing: loads have begun already."),
    Method("wait_for_layer_load", "layer_name", "Nothing: a request is scheduled when its load has ended."),
    Method(
        "save_kv_layer",
        "layer_name, kv_layer, attn_metadata, **kwargs",
        "Nothing: a block is stored when it is complete, with all its layers.",
    ),
    Method("wait_for_save", "", "Nothing: a store holds its device blocks."),
    _inherited(
        "get_finished",
        "finished_req_ids",
        "Is not called: `get_transfer_results` says it, with the failures.",
    ),
    Method(
        "get_transfer_results",
        "finished_req_ids",
        "The requests whose load has failed.",
        "test_real_scheduler.py::test_failed_load_is_computed",
    ),
    _inherited(
        "get_block_ids_with_load_errors",
        "",
        "None: a failed load is told by its request, and all of it is computed.",
    ),
    Method(
        "shutdown",
        "",
        "Waits for all copies, frees the host memory and closes the event log.",
        "test_disturbances.py::test_an_engine_is_shut_down_with_copies_in_flight",
    ),
    Method(
        "get_kv_connector_stats",
        "",
        "The metrics that have changed.",
        "test_event_log.py::test_the_log_tells_what_vllm_exported",
    ),
    _inherited(
        "get_kv_connector_kv_cache_events", "", "None: the scheduler's side knows all events (`take_events`)."
    ),
    _inherited("get_handshake_metadata", "", "None: workers of different engines do not talk to each other."),
    Method(
        "build_connector_worker_meta",
        "",
        "The reports of the copies that have ended.",
        "test_failures.py::test_one_rank_of_two_fails",
    ),
    _inherited("bind_kv_cache_manager", "kv_cache_manager", "Gives the block pool to `bind_gpu_block_pool`."),
    Method(
        "bind_gpu_block_pool",
        "gpu_block_pool",
        "Takes the block pool: stores hold blocks in it, and a lazy store reads its free queue.",
        "test_real_scheduler.py::test_whatever_hangs_the_words_are_right",
    ),
    _inherited(
        "get_loaded_kv_cache_group_ids",
        "request",
        "All groups with a prefix cache: those are what kvsm loads.",
    ),
    Method(
        "get_num_new_matched_tokens",
        "request, num_computed_tokens",
        "The longest hit in host memory, pinned; or that the request waits for blocks on their way there.",
        "test_tokens.py::test_with_offload_nearly_all_is_found",
    ),
    _inherited(
        "get_external_cache_hit_sources", "request, num_external_tokens", "All hits are from host memory."
    ),
    Method(
        "update_state_after_alloc",
        "request, blocks, num_external_tokens",
        "Plans the load into these blocks.",
        "test_multi_connector.py::test_what_another_connector_still_loads_is_not_stored",
    ),
    Method(
        "build_connector_meta",
        "scheduler_output",
        "Plans the stores of the step, gives overdue copies up, and sends the plan.",
        "test_real_scheduler.py::test_prefix_of_the_same_step_is_stored_a_step_later",
    ),
    Method(
        "on_new_request",
        "request",
        "Makes the request known.",
        "test_event_log.py::test_the_log_tells_how_much_of_each_prompt_was_found",
    ),
    Method(
        "update_connector_output",
        "connector_output",
        "Takes the workers' reports, and adds the loads that ended well.",
        "test_real_scheduler.py::test_a_report_that_comes_too_late_is_rejected",
    ),
    Method(
        "request_finished",
        "request, block_ids",
        "As `request_finished_all_groups`, for a model with one group.",
        "test_real_scheduler.py::test_whatever_hangs_the_words_are_right",
    ),
    _inherited(
        "register_finished_partial_tail",
        "request, block_ids, partial_tail_offloads",
        "Not accepted: kvsm stores whole blocks.",
    ),
    Method(
        "take_events",
        "",
        "The KV events since the last call.",
        "test_event_log.py::test_kv_events_fold_to_what_is_resident",
    ),
    Method(
        "has_pending_block_frees",
        "",
        "Whether a store is the last holder of a block.",
        "test_real_scheduler.py::test_whatever_hangs_the_words_are_right",
    ),
    Method(
        "has_pending_push_work",
        "",
        "Whether vLLM must keep stepping without requests.",
        "test_disturbances.py::test_nothing_is_left_of_any_scene",
    ),
    _inherited("get_finished_count", "", "None: each rank reports its own copies."),
    Method(
        "build_kv_connector_stats",
        "data=None",
        "Statistics that came from another process.",
        "test_multi_connector.py::test_tokens_hits_and_statistics_beside_another",
    ),
    _inherited("set_xfer_handshake_metadata", "metadata", "Nothing: see `get_handshake_metadata`."),
    _inherited("set_xfer_handshake_metadata_pp_aware", "metadata", "Nothing: see `get_handshake_metadata`."),
    Method(
        "build_prom_metrics",
        "vllm_config, metric_types, labelnames, per_engine_labelvalues",
        "The exporter of the statistics.",
        "test_serve.py::test_a_server_from_start_to_end",
    ),
    Method(
        "reset_cache",
        "",
        "Makes every key unmatchable, and says whether no copy from before is left.",
        "test_disturbances.py::test_a_reset_under_load_is_refused_until_it_has_drained",
    ),
)

_MANAGER = (
    _inherited(
        "lock",
        PROPERTY,
        "None is needed: only the scheduler's thread calls the manager.",
        since="0.33.0",
    ),
    Method(
        "lookup",
        "key, req_context",
        "Whether a key is in host memory. A hit holds until the step is scheduled.",
        "test_manager.py::test_a_hit_holds_until_the_step_is_scheduled",
    ),
    Method(
        "get_load_source",
        "key, req_context",
        "Host memory.",
        "test_spec.py::test_tokens_are_those_of_an_engine_without_offload",
    ),
    Method(
        "prepare_load",
        "keys, req_context",
        "Plans the load of these keys.",
        "test_manager.py::test_what_is_not_on_the_host_is_not_loaded",
    ),
    Method(
        "touch",
        "keys, req_context",
        "Tells the eviction policy that these keys were used.",
        "test_manager.py::test_the_order_of_a_set_is_not_seen",
    ),
    Method(
        "complete_load",
        "keys, req_context",
        "The load has ended on all ranks.",
        "test_manager.py::test_an_end_that_names_no_transfer_changes_nothing",
    ),
    Method(
        "prepare_store",
        "keys, req_context",
        "Plans the store of all new keys of the offer, or answers None.",
        "test_manager.py::test_all_of_an_offer_or_nothing",
    ),
    Method(
        "complete_store",
        "keys, req_context, success=True",
        "The store has ended on all ranks. A failed one is not found.",
        "test_manager.py::test_a_store_that_failed_is_not_found",
    ),
    Method(
        "on_new_request",
        "req_context",
        "Makes the request known, and says whether its prefix hits are stored too.",
        "test_manager.py::test_a_request_that_is_decoded_elsewhere_is_stored_whole",
    ),
    Method(
        "on_request_finished",
        "req_context",
        "The request is over.",
        "test_manager.py::test_a_finished_request_leaves_nothing",
    ),
    Method(
        "take_events",
        "",
        "The KV events since the last call. In 0.33, also the keys that were not stored after all.",
        "test_manager.py::test_vllm_forgets_the_description_of_a_key_that_was_not_stored",
    ),
    Method(
        "on_schedule_end",
        "context",
        "Ends the step. 0.33 calls it last, 0.32 before the stores.",
        "test_spec_scheduling.py::test_whatever_happens_the_words_are_right",
    ),
    Method(
        "has_pending_work",
        "",
        "Whether a reset still waits for copies.",
        "test_manager.py::test_a_reset_keeps_slots_until_vllm_has_waited",
    ),
    Method(
        "reset_cache",
        "",
        "Makes every key unmatchable. Slots that copies touch are free when the copies have ended.",
        "test_manager.py::test_a_second_reset_waits_again",
    ),
    Method(
        "on_reset_flushed",
        "",
        "The copies from before the reset have ended. With 0.32 the manager counts steps instead.",
        "test_manager.py::test_a_vllm_that_tells_that_all_has_ended_is_believed",
        since="0.33.0",
    ),
    Method(
        "get_stats",
        "",
        "The metrics that have changed.",
        "test_manager.py::test_statistics_are_of_metrics_that_vllm_was_told",
    ),
    Method(
        "config_info",
        "",
        "The size of the host pool, with the labels of vLLM's own spec.",
        "test_spec.py::test_the_manager_tells_how_large_its_pool_is",
        since="0.33.0",
    ),
    Method(
        "shutdown",
        "",
        "Closes the event log.",
        "test_spec.py::test_tokens_are_those_of_an_engine_without_offload",
    ),
)

_WORKER = (
    Method(
        "submit_store",
        "job_id, src_spec, dst_spec",
        "Begins a store.",
        "test_spec.py::test_a_load_brings_what_was_stored",
    ),
    Method(
        "submit_load",
        "job_id, src_spec, dst_spec, expedited=False",
        "Begins a load. A step never computes without an expedited one, but this overtakes no other load.",
        "test_spec.py::test_a_step_does_not_compute_without_the_load_that_it_waits_for",
        before="job_id, src_spec, dst_spec",
    ),
    Method(
        "get_finished",
        "",
        "The jobs that have ended, and the stores that were given up.",
        "test_spec.py::test_a_store_that_hangs_is_given_up_and_reported_once",
    ),
    Method(
        "wait",
        "job_ids",
        "Returns when these jobs have ended, or are too old to wait for.",
        "test_spec.py::test_no_step_waits_for_a_hanging_copy_without_end",
    ),
    Method(
        "shutdown",
        "",
        "Waits for all copies, and frees the host memory.",
        "test_disturbances.py::test_an_engine_process_ends_though_its_stores_never_do",
    ),
)

_SPEC = (
    Method(
        "__init__",
        "config",
        "Reads the options.",
        "test_spec.py::test_what_cannot_work_is_said_at_start_up",
    ),
    Method(
        "build_metric_definitions",
        "extra_config",
        "The metrics that the manager may report.",
        "test_manager.py::test_statistics_are_of_metrics_that_vllm_was_told",
    ),
    Method(
        "config_info_keys",
        "extra_config",
        "The labels that `config_info` fills.",
        "test_spec.py::test_the_pool_is_described_as_vllm_describes_its_own",
        since="0.33.0",
    ),
    Method(
        "get_manager",
        "",
        "The manager, in the scheduler's process.",
        "test_spec.py::test_host_memory_is_divided_over_ranks_and_chunks",
    ),
    Method(
        "get_worker",
        "kv_caches",
        "The worker of one rank.",
        "test_spec.py::test_host_memory_is_divided_over_ranks_and_chunks",
    ),
)

_STATS = (
    _inherited("__init__", "data=<factory>", "Statistics begin empty."),
    _inherited("to_dict", "", "The numbers as plain data."),
    Method(
        "aggregate",
        "other",
        "Adds counters, and takes the last value of each gauge of a pool.",
        "test_shared_metrics.py::test_two_connectors_add_up",
    ),
    Method(
        "reduce",
        "",
        "The numbers of one line of vLLM's log.",
        "test_shared_metrics.py::test_two_connectors_add_up",
    ),
    Method("reset", "", "Forgets everything.", "test_serve.py::test_a_server_from_start_to_end"),
    Method(
        "is_empty",
        "",
        "Whether there is nothing to report.",
        "test_event_log.py::test_the_log_tells_what_vllm_exported",
    ),
)

_PROM_METRICS = (
    Method(
        "__init__",
        "vllm_config, metric_types, labelnames, per_engine_labelvalues",
        "Registers nothing yet: a `KvsmSpec` beside it comes first.",
        "test_shared_metrics.py::test_a_connector_and_a_spec_export_side_by_side",
    ),
    Method(
        "observe",
        "transfer_stats_data, engine_idx=0",
        "Exports what an engine has sent.",
        "test_shared_metrics.py::test_a_connector_alone_has_the_documented_names",
    ),
)

INTERFACES: Mapping[str, Interface] = {
    "KVConnectorBase_V1": Interface(_BASE, ("kvsm.vllm.connector", "KvsmConnector"), _CONNECTOR),
    "SupportsHMA": Interface(
        _BASE,
        ("kvsm.vllm.connector", "KvsmConnector"),
        (
            Method(
                "request_finished_all_groups",
                "request, block_ids",
                "The request is over. Its blocks are vLLM's at once. Says where another engine finds them.",
                "test_disaggregated.py::test_the_decode_engine_hits_every_full_block",
            ),
        ),
    ),
    "KVConnectorWorkerMetadata": Interface(
        _BASE,
        ("kvsm.vllm.messages", "StepReports"),
        (
            Method(
                "aggregate",
                "other",
                "The reports of all ranks.",
                "test_failures.py::test_one_rank_of_two_fails",
            ),
        ),
    ),
    "KVConnectorStats": Interface(_METRICS, ("kvsm.vllm.connector_stats", "KvsmStats"), _STATS),
    "KVConnectorPromMetrics": Interface(
        _METRICS, ("kvsm.vllm.connector_stats", "KvsmPromMetrics"), _PROM_METRICS
    ),
    "OffloadingSpec": Interface(_OFFLOAD, ("kvsm.vllm.spec", "KvsmSpec"), _SPEC),
    "OffloadingManager": Interface(_OFFLOAD, ("kvsm.vllm.spec_manager", "KvsmManager"), _MANAGER),
    "OffloadingWorker": Interface(_OFFLOAD, ("kvsm.vllm.spec_worker", "KvsmOffloadingWorker"), _WORKER),
}
"""A class of vLLM -> what kvsm does with its methods."""


class Record(NamedTuple):
    """A record that crosses the interface. later: a field -> the version that added it."""

    name: str
    fields: tuple[str, ...]
    later: Mapping[str, str] = {}


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
