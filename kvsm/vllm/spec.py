"""`KvsmSpec`: kvsm's core and copies behind vLLM's own OffloadingConnector.

vLLM's scheduler side decides which blocks of which request are offered and loaded. kvsm decides where they
are kept and for how long, and copies them. `SpecOptions` are its options. `spec_manager` and `spec_worker`
say what vLLM's interface leaves out; docs/vllm.md, what vLLM's connector does wrong with any spec.
"""

from __future__ import annotations

from math import lcm
from typing import Any

from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker

from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig
from kvsm.kv_events import Publisher
from kvsm.vllm.engine_offloader import open_engine_offloader
from kvsm.vllm.extra_config import SpecOptions, parse
from kvsm.vllm.kv_cache_config import host_slots
from kvsm.vllm.spec_manager import GIVEN_UP_AFTER, PLACEHOLDERS_PER_HOST_BLOCK, KvsmManager
from kvsm.vllm.spec_stats import CONFIG_LABELS, config_info, metric_definitions
from kvsm.vllm.spec_worker import KvsmOffloadingWorker
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

_CALLED_BY_VLLM = ("lookup", "prepare_load", "prepare_store", "complete_load", "complete_store")


class KvsmSpec(OffloadingSpec):
    """KV cache offload to host memory. Raises `ConfigError` at start-up for options that cannot work."""

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
        if config.canonical_layout:
            raise ConfigError(
                "canonical_layout is for host memory that ranks share, and each rank of kvsm has its own; "
                "omit the option"
            )
        self._num_slots = host_slots(
            self._options.cpu_bytes_to_use,
            config.parallel.world_size,
            config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk,
        )
        self._manager: KvsmManager | None = None
        self._worker: KvsmOffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """The manager, in the scheduler's process."""
        if self._manager is None:
            publisher = Publisher() if self.kv_events_config.enable_kv_cache_events else None
            config, engine = self._core_config(), self.config.parallel.data_parallel_index
            core = open_engine_offloader(config, self._options, engine, publisher)
            # Each pipeline stage has a step, and asynchronous scheduling has one more.
            most_steps = self.config.parallel.pp_size + 1
            info = config_info(self.config, self._num_slots)
            self._manager = KvsmManager(core, self._options.transfer_timeout_s, most_steps, info)
        return self._manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker of one rank. kv_caches: vLLM's `CanonicalKVCaches`."""
        if self._worker is None:
            rank = self.config.parallel.rank
            slots, chunk = self._num_slots, self.blocks_per_chunk
            patience_s = GIVEN_UP_AFTER * self._options.transfer_timeout_s
            self._worker = KvsmOffloadingWorker(rank, kv_caches.tensors, slots, chunk, patience_s)
        return self._worker

    def _core_config(self) -> OffloadConfig:
        chunk, ranks = self.blocks_per_chunk, self.config.parallel.world_size
        return OffloadConfig(
            host_blocks=self._num_slots,
            device_blocks=PLACEHOLDERS_PER_HOST_BLOCK * self._num_slots * chunk,
            # The core has one worker for all ranks.
            block_bytes=self.config.worker_kv_bytes_per_block * ranks,
            workers=1,
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
