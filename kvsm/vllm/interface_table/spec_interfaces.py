"""What vLLM's OffloadingConnector calls on a spec, its manager and its workers."""

from __future__ import annotations

from collections.abc import Mapping

from kvsm.vllm.interface_table.rows import PROPERTY, Interface, Method, inherited

_OFFLOAD = "vllm.v1.kv_offload.base"

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

_MANAGER = (
    inherited(
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

SPEC_INTERFACES: Mapping[str, Interface] = {
    "OffloadingSpec": Interface(_OFFLOAD, ("kvsm.vllm.spec", "KvsmSpec"), _SPEC),
    "OffloadingManager": Interface(_OFFLOAD, ("kvsm.vllm.spec_manager", "KvsmManager"), _MANAGER),
    "OffloadingWorker": Interface(_OFFLOAD, ("kvsm.vllm.spec_worker", "KvsmOffloadingWorker"), _WORKER),
}
"""A class of vLLM -> what `KvsmSpec`, its manager and its worker do with its methods."""
