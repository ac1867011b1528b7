"""The methods that vLLM calls on a connector, and on the classes that travel between its processes."""

from __future__ import annotations

from collections.abc import Mapping

from kvsm.vllm.interface_table.rows import PROPERTY, Interface, Method, inherited

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"

_CONNECTOR = (
    Method(
        "__init__",
        "vllm_config, role, kv_cache_config",
        "Reads the options, and makes the scheduler's or the worker's side.",
        "test_failures.py::test_the_engine_does_not_start",
    ),
    inherited("role", PROPERTY, "The role that vLLM gave."),
    Method(
        "get_required_kvcache_layout",
        "vllm_config",
        "Layers, then blocks: within a layer each block is contiguous.",
        "test_tokens.py::test_tokens_are_those_without_offload",
    ),
    inherited(
        "requires_piecewise_for_cudagraph",
        "extra_config",
        "No: no copy is made layer by layer within a step.",
    ),
    Method(
        "requires_kv_delivery",
        PROPERTY,
        "Whether this engine hands blocks over: then a request preempted in its last step is computed again.",
        "test_disaggregated.py::test_a_request_that_is_preempted_hands_all_of_its_prompt_over",
    ),
    inherited(
        "supports_divergent_local_hybrid_hits",
        PROPERTY,
        "No: a hit is the longest prefix that all groups serve, and all of it is loaded.",
    ),
    inherited(
        "get_mem_pool_context", "", "None: kvsm copies to and from the KV cache where vLLM allocates it."
    ),
    Method(
        "bind_connector_metadata",
        "connector_metadata",
        "Starts the copies of the step: vLLM calls it before the step computes.",
        "test_real_scheduler.py::test_whatever_hangs_the_words_are_right",
    ),
    inherited("clear_connector_metadata", "", "Drops the metadata after the step."),
    inherited("has_connector_metadata", "", "Whether there is metadata."),
    Method(
        "register_kv_caches",
        "kv_caches",
        "Takes the KV cache, and makes the host pool of this rank.",
        "test_tokens.py::test_blocks_go_out_and_come_back",
    ),
    inherited("supports_sleep_mode", "kv_transfer_config", "Yes: see the next two methods.", since="0.33.0"),
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
        "Takes the KV cache again after sleep, also if its addresses have changed.",
        "test_sleep.py::test_a_kv_cache_that_moved_is_copied_from_its_new_place",
        since="0.33.0",
    ),
    inherited("set_host_xfer_buffer_ops", "copy_operation", "Nothing: kvsm copies itself."),
    inherited("finish_forward", "", "Nothing: copies do not wait for the end of a step's compute."),
    inherited("reset_capture_state", "", "Nothing: a capture of CUDA graphs starts no copy."),
    inherited(
        "handle_preemptions",
        "kv_connector_metadata",
        "Nothing: a block that kvsm reads or writes is held until the copy has ended.",
    ),
    Method("start_load_kv", "forward_context, **kwargs", "Nothing: loads have started already."),
    Method("wait_for_layer_load", "layer_name", "Nothing: a request is scheduled when its load has ended."),
    Method(
        "save_kv_layer",
        "layer_name, kv_layer, attn_metadata, **kwargs",
        "Nothing: a block is stored when it is complete, with all its layers.",
    ),
    Method("wait_for_save", "", "Nothing: a store holds its device blocks."),
    inherited(
        "get_finished",
        "finished_req_ids",
        "Is not called: `get_transfer_results` returns ended loads together with failed ones.",
    ),
    Method(
        "get_transfer_results",
        "finished_req_ids",
        "Returns the requests whose load has failed, or has ended outside a step.",
        "test_real_scheduler.py::test_failed_load_is_computed",
    ),
    inherited(
        "get_block_ids_with_load_errors",
        "",
        "None: a failed load is reported by its request, and all of its tokens are computed.",
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
        "Returns the metrics that have changed.",
        "test_event_log.py::test_the_log_tells_what_vllm_exported",
    ),
    inherited(
        "get_kv_connector_kv_cache_events",
        "",
        "None: the scheduler's side returns all events (`take_events`).",
    ),
    inherited("get_handshake_metadata", "", "None: workers of different engines do not talk to each other."),
    Method(
        "build_connector_worker_meta",
        "",
        "Returns the reports of the copies that have ended.",
        "test_failures.py::test_one_rank_of_two_fails",
    ),
    inherited("bind_kv_cache_manager", "kv_cache_manager", "Gives the block pool to `bind_gpu_block_pool`."),
    Method(
        "bind_gpu_block_pool",
        "gpu_block_pool",
        "Takes the block pool: stores hold blocks in it, and a lazy store reads its free queue.",
        "test_real_scheduler.py::test_whatever_hangs_the_words_are_right",
    ),
    inherited(
        "get_loaded_kv_cache_group_ids",
        "request",
        "All groups with a prefix cache: kvsm loads all of them.",
    ),
    Method(
        "get_num_new_matched_tokens",
        "request, num_computed_tokens",
        "Pins and returns the longest hit in host memory, or makes the request wait for blocks in flight.",
        "test_tokens.py::test_with_offload_nearly_all_is_found",
    ),
    inherited(
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
        "Plans the stores of the step, gives up overdue copies, and sends the plan.",
        "test_real_scheduler.py::test_prefix_of_the_same_step_is_stored_a_step_later",
    ),
    Method(
        "on_new_request",
        "request",
        "Starts to track the request.",
        "test_event_log.py::test_one_run_has_one_truth",
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
    inherited(
        "register_finished_partial_tail",
        "request, block_ids, partial_tail_offloads",
        "Not accepted: kvsm stores whole blocks.",
    ),
    Method(
        "take_events",
        "",
        "Returns the KV events since the last call.",
        "test_event_log.py::test_kv_events_fold_to_what_is_resident",
    ),
    Method(
        "has_pending_block_frees",
        "",
        "Whether a store holds the last reference to a block.",
        "test_real_scheduler.py::test_whatever_hangs_the_words_are_right",
    ),
    Method(
        "has_pending_push_work",
        "",
        "Whether vLLM must keep stepping without requests.",
        "test_disturbances.py::test_nothing_is_left_of_any_scene",
    ),
    inherited("get_finished_count", "", "None: each rank reports its own copies."),
    Method(
        "build_kv_connector_stats",
        "data=None",
        "Returns the statistics that another process sent.",
        "test_multi_connector.py::test_tokens_hits_and_statistics_beside_another",
    ),
    inherited("set_xfer_handshake_metadata", "metadata", "Nothing: see `get_handshake_metadata`."),
    inherited("set_xfer_handshake_metadata_pp_aware", "metadata", "Nothing: see `get_handshake_metadata`."),
    Method(
        "build_prom_metrics",
        "vllm_config, metric_types, labelnames, per_engine_labelvalues",
        "Returns the exporter of the statistics.",
        "test_serve.py::test_a_server_from_start_to_end",
    ),
    Method(
        "reset_cache",
        "",
        "Makes every key unmatchable, and returns whether no earlier copy is in flight.",
        "test_disturbances.py::test_a_reset_under_load_is_refused_until_it_has_drained",
    ),
)

_STATS = (
    inherited("__init__", "data=<factory>", "Statistics begin empty."),
    inherited("to_dict", "", "The numbers as plain data."),
    Method(
        "aggregate",
        "other",
        "Adds counters, and keeps the last value of each gauge of a pool.",
        "test_shared_metrics.py::test_two_connectors_add_up",
    ),
    Method(
        "reduce",
        "",
        "Returns the numbers for one line of vLLM's log.",
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
        "Registers no metric yet: a `RecordingSpec` in the same process must register first.",
        "test_shared_metrics.py::test_a_connector_and_a_recording_export_side_by_side",
    ),
    Method(
        "observe",
        "transfer_stats_data, engine_idx=0",
        "Exports the statistics that an engine has sent.",
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
                "Ends the request; vLLM may free its blocks at once. The answer says where another engine "
                "finds them.",
                "test_disaggregated.py::test_the_decode_engine_hits_every_full_block",
            ),
        ),
    ),
    "KVConnectorWorkerMetadata": Interface(
        _BASE,
        ("kvsm.vllm.step_messages", "StepReports"),
        (
            Method(
                "aggregate",
                "other",
                "Joins the reports of all ranks.",
                "test_failures.py::test_one_rank_of_two_fails",
            ),
        ),
    ),
    "KVConnectorStats": Interface(_METRICS, ("kvsm.vllm.connector_stats", "KvsmStats"), _STATS),
    "KVConnectorPromMetrics": Interface(
        _METRICS, ("kvsm.vllm.connector_stats", "KvsmPromMetrics"), _PROM_METRICS
    ),
}
"""A class of vLLM -> what the class of kvsm does in each of its methods."""
