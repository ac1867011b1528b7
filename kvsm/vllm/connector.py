"""`KvsmConnector`: what vLLM calls, each call handed to the side of the process that it is made in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvsm.errors import ConfigError
from kvsm.vllm.connector_stats import KvsmPromMetrics, KvsmStats
from kvsm.vllm.extra_config import ConnectorOptions, parse
from kvsm.vllm.messages import StepPlan, StepReports
from kvsm.vllm.scheduler_side import SchedulerSide
from kvsm.vllm.versions import warn_if_untested
from kvsm.vllm.worker_side import WorkerSide

log = init_logger("vllm.kvsm")


class KvsmConnector(KVConnectorBase_V1, SupportsHMA):
    """KV-cache offload to host memory: `ConnectorOptions` says what can be configured.

    Raises `ConfigError` at start-up for options that cannot work, and for a model that it cannot serve.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        warn_if_untested()
        transfer = vllm_config.kv_transfer_config
        options = parse(ConnectorOptions, transfer.kv_connector_extra_config)
        if not vllm_config.cache_config.enable_prefix_caching:
            raise ConfigError(
                "kvsm offloads what the prefix cache holds; enable it (--enable-prefix-caching)"
            )
        parallel = vllm_config.parallel_config
        if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
            raise ConfigError(
                "external_launcher makes a scheduler in each rank, and none hears of the other ranks' "
                "copies; use the executor mp or ray"
            )
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            if transfer.kv_load_failure_policy != "recompute":
                log.warning(
                    "kvsm: kv_load_failure_policy is %r, so a request whose load fails ends with an error; "
                    "with 'recompute' it is computed, and nobody notices (of a MultiConnector's, its own "
                    "policy counts)",
                    transfer.kv_load_failure_policy,
                )
            self._scheduler = SchedulerSide(options, vllm_config, kv_cache_config)
        else:
            self._worker = WorkerSide(options, vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not stored is computed again."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:  # noqa: ARG003 (vLLM's signature)
        """Layer by layer, and of a layer block by block: a block is contiguous in each layer."""
        return "LBHNC"

    # In a worker process, in the order of a step.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._on_worker.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before every step's compute: here its copies start."""
        assert isinstance(kv_connector_metadata, StepPlan)
        self._on_worker.start(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads are under way by now."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request is computed when its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored when they are confirmed, all layers together."""

    def wait_for_save(self) -> None:
        """A store holds its blocks; nobody waits for it."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        failed = self._on_worker.take_failed_loads()
        return KVConnectorTransferResults(finished_recving=set(failed), failed_recving=failed)

    def build_connector_worker_meta(self) -> StepReports | None:
        return self._on_worker.reports()

    # In the scheduler's process, in the order of a step.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._on_scheduler.bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._on_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._on_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._on_scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        return self._on_scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._on_scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler.request_finished(request, block_ids), None

    def has_pending_push_work(self) -> bool:
        return self._on_scheduler.has_pending_push_work()

    def has_pending_block_frees(self) -> bool:
        return self._on_scheduler.has_pending_block_frees()

    def take_events(self) -> Iterable[Any]:
        return self._on_scheduler.take_events()

    def reset_cache(self) -> bool:
        """False while copies of before are under way; nothing of before is found any more all the same."""
        return self._on_scheduler.reset_cache()

    # In both.

    def get_kv_connector_stats(self) -> KvsmStats | None:
        return self._worker.stats() if self._worker is not None else self._on_scheduler.take_stats()

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvsmStats:
        return KvsmStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvsmPromMetrics:
        return KvsmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _on_scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM called the scheduler's side of a connector in a worker"
        return self._scheduler

    @property
    def _on_worker(self) -> WorkerSide:
        assert self._worker is not None, "vLLM called the worker's side of a connector in the scheduler"
        return self._worker


def _register() -> None:
    """MultiConnector looks its children's statistics up by name, in processes that know no module path."""
    if KvsmConnector.__name__ not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(KvsmConnector.__name__, "kvsm.vllm", KvsmConnector.__name__)


_register()
