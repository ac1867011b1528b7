"""`KvsmSpec`: kvsm's core and copies behind vLLM's own OffloadingConnector.

vLLM's scheduler side decides which blocks of which request are offered and loaded. kvsm decides where they
are kept and for how long, and copies them. `SpecOptions` are its options. `spec_manager` and `spec_worker`
say what vLLM's interface leaves out, and `offloading_connector` adds it: there a failed copy is a recompute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import lcm
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker

from kvsm.core.kv_events import Publisher
from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig
from kvsm.system.private_files import share_with_group
from kvsm.vllm.canonical_layout import CanonicalRows, canonical_rows, layers_of_spec
from kvsm.vllm.engine_offloader import open_engine_offloader
from kvsm.vllm.extra_config import SpecOptions, parse
from kvsm.vllm.host_sharing import spec_replicas, spec_sharing
from kvsm.vllm.kv_cache_config import host_slots
from kvsm.vllm.reported_manager import ReportedManager
from kvsm.vllm.spec_manager import GIVEN_UP_AFTER, PLACEHOLDERS_PER_HOST_BLOCK, KvsmManager
from kvsm.vllm.spec_stats import CONFIG_LABELS, config_info, metric_definitions
from kvsm.vllm.spec_worker import KvsmOffloadingWorker, ReportingWorker, block_rows
from kvsm.vllm.startup_checks import refuse_schedulers_of_their_own, refuse_without_prefix_cache
from kvsm.vllm.versions import features, must_have, warn_if_untested

VLLMS_OWN = (
    "spec_name",
    "spec_module_path",
    "block_size",
    "blocks_per_chunk",
    "offload_prompt_only",
    "self_describing_kv_events",
    "canonical_layout",
)
"""Options that every tested vLLM reads itself."""

SYNC_LOAD_BUDGET = "sync_load_budget_bytes"
"""An option that only a vLLM reads that can load within a step."""

log = init_logger("vllm.kvsm")

_TOLD: ContextVar[int] = ContextVar("told_of_failures", default=0)
"""0: not told. Otherwise the connector's `replicas`."""

_CALLED_BY_VLLM = ("lookup", "prepare_load", "prepare_store", "complete_load", "complete_store")


@contextmanager
def told_of_failures(replicas: int = 1) -> Iterator[None]:
    """A `KvsmSpec` that is made inside a `with` block belongs to a connector that can be told of failures.

    replicas: how many consecutive ranks hold the same KV cache, as far as the connector knows.
    """
    token = _TOLD.set(replicas)
    try:
        yield
    finally:
        _TOLD.reset(token)


class KvsmSpec(OffloadingSpec):
    """KV cache offload to host memory.

    Raises `ConfigError` at start-up for options that cannot work, and without a prefix cache.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        """The metrics that the manager may report."""
        return dict(metric_definitions())

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG003 (vLLM's signature)
        """The labels of `vllm:kv_offload_config_info`, which the manager fills."""
        return CONFIG_LABELS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        warn_if_untested()
        must_have(OffloadingManager, _CALLED_BY_VLLM)
        self._options = parse(SpecOptions, config.extra_config, vllms_own())
        share_with_group(self._options.file_group)
        self._is_told = bool(_TOLD.get())
        if not self._is_told:
            self._check_for_vllms_connector()
        self._replicas = spec_replicas(config, _TOLD.get() or 1)
        self._num_slots = host_slots(
            self._options.host_bytes(config.parallel.world_size),
            config.parallel.world_size // self._replicas,
            config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk,
        )
        self._manager: KvsmManager | None = None
        self._worker: KvsmOffloadingWorker | None = None

    def _check_for_vllms_connector(self) -> None:
        """Raises `ConfigError` for what `KvsmOffloadingConnector` would refuse, or what only it can do.

        vLLM tells a spec neither of the prefix cache nor of the executor. But it makes the workers' specs
        first, and there its configuration is known.
        """
        if (vllm_config := get_current_vllm_config_or_none()) is not None:
            refuse_without_prefix_cache(vllm_config)
            refuse_schedulers_of_their_own(vllm_config.parallel_config)
        options = self._options
        for name, given in {
            "verify_copies": options.verify_copies,
            "last_step": options.last_step == "flush",
        }.items():
            if given:
                raise ConfigError(
                    f"{name}: vLLM's OffloadingConnector cannot do it; use KvsmOffloadingConnector "
                    "(kv_connector_module_path kvsm.vllm), or omit the option"
                )

    def get_manager(self) -> OffloadingManager:
        """The manager, in the scheduler's process."""
        if self._manager is None:
            publisher = Publisher() if self.kv_events_config.enable_kv_cache_events else None
            config, engine = self._core_config(), self.config.parallel.data_parallel_index
            core = open_engine_offloader(config, self._options, engine, publisher)
            core.mark_stops()
            # Each pipeline stage has a step, and asynchronous scheduling has one more.
            most_steps = self.config.parallel.pp_size + 1
            info = config_info(self.config, self._num_slots)
            timeout_s = self._options.transfer_timeout_s
            if self._is_told:
                flushes = self._options.last_step == "flush"
                self._manager = ReportedManager(core, timeout_s, most_steps, info, flushes_last_step=flushes)
            else:
                log.warning(
                    "kvsm: under vLLM's OffloadingConnector a failed copy stops the engine, and so can two "
                    "resets of the cache in a row. KvsmOffloadingConnector (kv_connector_module_path "
                    "kvsm.vllm) takes the same options, and recomputes instead"
                )
                self._manager = KvsmManager(core, timeout_s, most_steps, info)
        return self._manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker of one rank. kv_caches: vLLM's `CanonicalKVCaches`."""
        if self._worker is None:
            rank = self.config.parallel.rank
            slots, chunk = self._num_slots, self.blocks_per_chunk
            patience_s = GIVEN_UP_AFTER * self._options.transfer_timeout_s
            kind = ReportingWorker if self._is_told else KvsmOffloadingWorker
            verify = self._options.verify_copies
            memory = spec_sharing(self.config, self._replicas), self._canonical_rows(kv_caches)
            self._worker = kind(rank, kv_caches.tensors, slots, chunk, patience_s, verify, *memory)
        return self._worker

    def _canonical_rows(self, kv_caches: Any) -> CanonicalRows | None:
        if not self.config.canonical_layout:
            return None
        rows = [block_rows(cache) for cache in kv_caches.tensors]
        return canonical_rows(layers_of_spec(rows, kv_caches), self._replicas)

    def _core_config(self) -> OffloadConfig:
        chunk, ranks = self.blocks_per_chunk, self.config.parallel.world_size
        return OffloadConfig(
            host_blocks=self._num_slots,
            device_blocks=PLACEHOLDERS_PER_HOST_BLOCK * self._num_slots * chunk,
            # Without the reports of ranks, the core has one worker for all of them.
            block_bytes=self.config.worker_kv_bytes_per_block
            * (1 if self._is_told else ranks // self._replicas),
            workers=ranks if self._is_told else 1,
            blocks_per_chunk=chunk,
            policy=self._options.policy,
            # vLLM's connector decides who waits, and `TransferDeadlines` bounds a transfer.
            defer_ticks=0,
            transfer_ticks=0,
            store_threshold=self._options.store_threshold,
            block_tokens=lcm(*self.tokens_per_block),
        )


def vllms_own() -> tuple[str, ...]:
    """The options that the installed vLLM reads itself."""
    return (*VLLMS_OWN, SYNC_LOAD_BUDGET) if features().loads_within_steps else VLLMS_OWN
