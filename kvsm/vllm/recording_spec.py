"""`RecordingSpec`: vLLM's own offload, with an event log of the decisions of its manager.

vLLM's `CPUOffloadingManager` makes all decisions. A `RecordingManager` forwards each call to it and returns
its answer unchanged. A `ManagerRecorder` emits kvsm's events for these calls, and folds them into its own
ledger. So `kvsm replay`, `kvsm verify` and `kvsm show` can read a log of vLLM's own offload.
docs/vllm-recording.md says which properties such a log shows, and what it cannot show.
"""

from __future__ import annotations

from math import lcm
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvsm.core.ledger.frozen import freeze
from kvsm.core.log import LogWriter
from kvsm.events import OffloadConfig
from kvsm.vllm.engine_offloader import open_event_log
from kvsm.vllm.extra_config import RecordingOptions, parse
from kvsm.vllm.host_copy_worker import HostCopyWorker
from kvsm.vllm.log_stats import LogStats, metric_definitions
from kvsm.vllm.log_watch import LogWatch
from kvsm.vllm.manager_recorder import LOADED_AT_ONCE, STORES_PER_SLOT, ManagerRecorder
from kvsm.vllm.recording_manager import RecordingManager
from kvsm.vllm.versions import warn_if_untested


class RecordingSpec(CPUOffloadingSpec):  # type: ignore[misc,unused-ignore]
    """vLLM's `CPUOffloadingSpec`, recorded. `RecordingOptions` are its options.

    On a CPU platform, vLLM has no worker for this spec, so kvsm's `HostCopyWorker` makes the copies.
    Raises `ConfigError` or `LogError` at start-up if no log can be created.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return vLLM's metrics and those of the event log."""
        return {**super().build_metric_definitions(extra_config), **metric_definitions()}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        warn_if_untested()
        vllms_own = self.extra_config.keys() - set(RecordingOptions.__struct_fields__)
        self._options = parse(RecordingOptions, self.extra_config, vllms_own)
        self._recording: RecordingManager | None = None
        self._cpu_worker: HostCopyWorker | None = None

    def get_manager(self) -> Any:
        """Return vLLM's manager, recorded."""
        if self._recording is None:
            event_log, recorder = self._open_recorder()
            self._recording = RecordingManager(super().get_manager(), recorder, LogStats(event_log))
        return self._recording

    def get_worker(self, kv_caches: Any) -> Any:
        """Return vLLM's worker; on a CPU platform, kvsm's."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._cpu_worker is None:
            self._cpu_worker = HostCopyWorker(kv_caches, self.num_chunks, self.blocks_per_chunk)
        return self._cpu_worker

    def _open_recorder(self) -> tuple[LogWriter, ManagerRecorder]:
        config = OffloadConfig(
            host_blocks=self.num_chunks,
            device_blocks=STORES_PER_SLOT * self.num_chunks + LOADED_AT_ONCE,
            block_bytes=self.kv_bytes_per_chunk,
            defer_ticks=0,
            transfer_ticks=0,
            # vLLM's chunks are the blocks of this log.
            block_tokens=lcm(*self.tokens_per_block) * self.blocks_per_chunk,
        )
        options, engine = self._options, self.config.parallel.data_parallel_index
        event_log = open_event_log(
            options.event_log, engine, options, config, lambda: freeze(recorder.ledger)
        )
        recorder = ManagerRecorder(config, event_log, announces=self.kv_events_config.enable_kv_cache_events)
        recorder.log = LogWatch(event_log, event_log, recorder.ledger)
        return event_log, recorder
