"""`KvsmSpec`: kvsm's core and copies behind vLLM's own OffloadingConnector.

vLLM's scheduler side decides which blocks of which request are offered and loaded; kvsm decides where they
are kept, for how long, and copies them. `SpecOptions` says what can be configured; `manager` and
`spec_worker` what vLLM's interface cannot say, and what comes of it. Checksums of what is loaded, and the
failure or the loss of one rank, are `KvsmConnector`'s.

What vLLM's connector does wrong by itself no spec can mend. In 0.32, with any spec: two resets without a step
between them, or a reset that preempts running requests and leaves the host alone, end in an assertion; and
after a reset of the host while requests with a sliding window run, it stores blocks that the window has left
and that others compute into by then, under the keys of what was in them.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker

from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig
from kvsm.kv_events import Publisher
from kvsm.vllm.engine_offloader import open_engine_offloader
from kvsm.vllm.extra_config import SpecOptions, parse
from kvsm.vllm.kv_cache_config import host_slots
from kvsm.vllm.spec_manager import PLACEHOLDERS_PER_HOST_BLOCK, KvsmManager
from kvsm.vllm.spec_stats import metric_definitions
from kvsm.vllm.spec_worker import KvsmOffloadingWorker
from kvsm.vllm.versions import must_have, warn_if_untested

VLLMS_OWN = (
    "spec_name",
    "spec_module_path",
    "block_size",
    "blocks_per_chunk",
    "offload_prompt_only",
    "self_describing_kv_events",
    "canonical_layout",
)
"""Options that vLLM reads itself."""

_CALLED_BY_VLLM = ("lookup", "prepare_load", "prepare_store", "complete_load", "complete_store")


class KvsmSpec(OffloadingSpec):
    """KV-cache offload to host memory. Raises `ConfigError` at start-up for options that cannot work."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        return dict(metric_definitions())

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        warn_if_untested()
        must_have(OffloadingManager, _CALLED_BY_VLLM)
        self._options = parse(SpecOptions, config.extra_config, VLLMS_OWN)
        if config.canonical_layout:
            raise ConfigError(
                "canonical_layout is for host memory that ranks share, and each rank of kvsm has its own; "
                "leave it out"
            )
        self._num_slots = host_slots(
            self._options.cpu_bytes_to_use,
            config.parallel.world_size,
            config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk,
        )
        self._manager: KvsmManager | None = None
        self._worker: KvsmOffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            publisher = Publisher() if self.kv_events_config.enable_kv_cache_events else None
            config, engine = self._core_config(), self.config.parallel.data_parallel_index
            self._manager = KvsmManager(open_engine_offloader(config, self._options, engine, publisher))
        return self._manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            rank = self.config.parallel.rank
            self._worker = KvsmOffloadingWorker(
                rank, kv_caches.tensors, self._num_slots, self.blocks_per_chunk
            )
        return self._worker

    def _core_config(self) -> OffloadConfig:
        chunk, ranks = self.blocks_per_chunk, self.config.parallel.world_size
        return OffloadConfig(
            host_blocks=self._num_slots,
            device_blocks=PLACEHOLDERS_PER_HOST_BLOCK * self._num_slots * chunk,
            # The one worker of the core stands for all ranks.
            block_bytes=self.config.worker_kv_bytes_per_block * ranks,
            workers=1,
            blocks_per_chunk=chunk,
            policy=self._options.policy,
            # Who waits for what is vLLM's connector's business, and so is a worker that never reports.
            defer_ticks=0,
            transfer_ticks=0,
            store_threshold=self._options.store_threshold,
        )
