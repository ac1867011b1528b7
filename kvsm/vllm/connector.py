"""`KvsmConnector`: hands each call of vLLM to the connector's side in this process.

vLLM's `KVConnectorBase_V1` documents the methods.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvsm.system.private_files import share_with_group
from kvsm.vllm.connector_stats import KvsmPromMetrics, KvsmStats
from kvsm.vllm.extra_config import ConnectorOptions, parse
from kvsm.vllm.scheduler_side import SchedulerSide
from kvsm.vllm.startup_checks import (
    refuse_schedulers_of_their_own,
    refuse_without_prefix_cache,
    warn_of_failing_requests,
    warn_of_immediate_kill,
)
from kvsm.vllm.versions import warn_if_untested
from kvsm.vllm.worker_side import WorkerSide


def _forwarded(method: Callable[..., Any]) -> Any:
    """Make a method that calls the method of the same name on the connector's side in this process."""

    name = method.__name__

    @wraps(method)
    def forward(self: KvsmConnector, *arguments: Any, **named: Any) -> Any:
        return getattr(self._side, name)(*arguments, **named)

    return forward


class KvsmConnector(KVConnectorBase_V1, SupportsHMA):
    """Offloads KV cache to host memory. `ConnectorOptions` are its options.

    Raises `ConfigError` at start-up for options that cannot work, and for a model that kvsm cannot serve.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        warn_if_untested()
        transfer = vllm_config.kv_transfer_config
        options = parse(ConnectorOptions, transfer.kv_connector_extra_config)
        share_with_group(options.file_group)
        refuse_without_prefix_cache(vllm_config)
        refuse_schedulers_of_their_own(vllm_config.parallel_config)
        self._hands_over = options.hand_over_directory is not None and transfer.is_kv_producer
        self._side: SchedulerSide | WorkerSide
        if role is KVConnectorRole.SCHEDULER:
            warn_of_failing_requests(transfer)
            warn_of_immediate_kill(vllm_config)
            self._side = SchedulerSide(options, vllm_config, kv_cache_config)
        else:
            self._side = WorkerSide(options, vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether this engine hands the blocks of its requests over to other engines.

        It matters for a request that is preempted while its last step runs, because the request has lost its
        blocks. If this is true, vLLM drops the output of that step and computes the request again. Otherwise
        the request ends with that output, and has no blocks to hand over.
        """
        return self._hands_over

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:  # noqa: ARG003 (vLLM's signature)
        """Return the layout with layers outermost, then blocks: within a layer, each block is contiguous."""
        return "LBHNC"

    # In a worker process, in the order of a step. Copies start before the step computes (`WorkerSide`).

    register_kv_caches = _forwarded(WorkerSide.register_kv_caches)
    unregister_kv_caches = _forwarded(WorkerSide.unregister_kv_caches)
    restore_kv_caches = _forwarded(WorkerSide.restore_kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Start the step's copies.

        `handle_preemptions` would be too early: other children of a MultiConnector may still read blocks that
        these copies overwrite.
        """
        super().bind_connector_metadata(connector_metadata)
        self._side.begin_step(connector_metadata)  # type: ignore[union-attr]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: `bind_connector_metadata` has started the loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled only when its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: a block is stored when it is complete, with all its layers."""

    def wait_for_save(self) -> None:
        """Do nothing: a store holds references to its device blocks, so no step must wait for it."""

    get_transfer_results = _forwarded(WorkerSide.get_transfer_results)
    build_connector_worker_meta = _forwarded(WorkerSide.build_connector_worker_meta)

    # In the scheduler's process, in the order of a step.

    bind_gpu_block_pool = _forwarded(SchedulerSide.bind_gpu_block_pool)
    on_new_request = _forwarded(SchedulerSide.on_new_request)
    get_num_new_matched_tokens = _forwarded(SchedulerSide.get_num_new_matched_tokens)
    update_state_after_alloc = _forwarded(SchedulerSide.update_state_after_alloc)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return the plan of a step. Each step makes this call, so it is forwarded in the shortest way."""
        return self._side.build_connector_meta(scheduler_output)  # type: ignore[union-attr]

    update_connector_output = _forwarded(SchedulerSide.update_connector_output)
    request_finished_all_groups = _forwarded(SchedulerSide.request_finished_all_groups)
    has_pending_push_work = _forwarded(SchedulerSide.has_pending_push_work)
    has_pending_block_frees = _forwarded(SchedulerSide.has_pending_block_frees)
    take_events = _forwarded(SchedulerSide.take_events)
    reset_cache = _forwarded(SchedulerSide.reset_cache)
    set_weights_version = _forwarded(SchedulerSide.set_weights_version)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Call `request_finished_all_groups` for a model with one KV cache group."""
        answer: tuple[bool, dict[str, Any] | None] = self.request_finished_all_groups(request, (block_ids,))
        return answer

    # In both processes.

    get_kv_connector_stats = _forwarded(SchedulerSide.get_kv_connector_stats)
    shutdown = _forwarded(SchedulerSide.shutdown)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvsmStats:
        """Return the statistics that another process sent."""
        return KvsmStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvsmPromMetrics:
        """Return the exporter of the statistics."""
        return KvsmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _register() -> None:
    """Register the connector's name: a MultiConnector finds its children's statistics by name alone, also in
    processes that know no module path."""
    if KvsmConnector.__name__ not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(KvsmConnector.__name__, "kvsm.vllm", KvsmConnector.__name__)


_register()
