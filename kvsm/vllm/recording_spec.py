"""`RecordingSpec`: vLLM's own offload, with kvsm's event log of what its manager does.

vLLM's `CPUOffloadingManager` decides, as ever: each call goes to it as it came, and its answer goes back as
it is. Beside it a `ManagerRecorder` writes down what the calls and the answers mean, as kvsm's events, in a
ledger of its own. So `kvsm replay`, `kvsm verify` and `kvsm show` read a log of vLLM's own offload.

What a manager's calls show, and the recorder checks:

====  ==================================================================================================
S1    a slot that is handed out was free: no eviction is forgotten, no slot is given twice
S2    a lookup hits, and a load reads, only what a completed store brought
S3    no slot is evicted or handed out while a copy that was not completed touches it
S4    what the manager's gauges count as in use is what copies in flight hold: nothing leaks, by step
S5    a completion names a transfer in flight, all of its keys, and comes once
S6    a store that failed is readable nowhere
S10   lookups, and KV events if there are any, say what the calls add up to
S13   a key that is stored, or is being stored, is not stored again
S14   nothing of before a reset is found after it
S15   a load reads each key from the slot that it was stored in (which slot, not which bytes)
====  ==================================================================================================

Which device blocks are copied, which ranks reported, what bytes arrived and what a request was promised by a
lookup, a manager never hears. A device block in such a log is a number that stands for one. A manager does
not hear how copies in flight at a reset end, either: vLLM's connector flushes them with the next step, so
they count as over at the next `on_schedule_end`, and their slots as in use until then (S3).

What breaks a property is told in vLLM's log and in `findings.txt` beside the event log, counted, and never
raised. If no legal event says what happened, the event log ends with the illegal one, at which `kvsm verify`
stops too; the calls after it go through unrecorded. So does everything if the recorder itself fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvsm.errors import ConfigError
from kvsm.events import OffloadConfig
from kvsm.log import Durability, LogWriter
from kvsm.snapshot import snapshot
from kvsm.vllm.engine_offloader import new_directory
from kvsm.vllm.manager_recorder import LOADED_AT_ONCE, STORES_PER_SLOT, ManagerRecorder
from kvsm.vllm.recording_manager import RecordingManager
from kvsm.vllm.spec_worker import KvsmOffloadingWorker
from kvsm.vllm.versions import warn_if_untested

log = init_logger("vllm.kvsm")


class RecordingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `RecordingSpec` reads of `kv_connector_extra_config`, beside what vLLM's own spec does.

    event_log: a directory for event logs, made if absent; every start of an engine makes one in it.
    log_durability: when the log is synced to the disk. log_max_bytes: how large it may grow; then its oldest
    segments go.
    """

    event_log: str
    log_durability: Durability = "interval"
    log_max_bytes: int | None = None


class _HostSlots(NamedTuple):
    """What `KvsmOffloadingWorker` reads of a host side; that a pool must not be made larger, as 0 says."""

    block_ids: Any
    num_slots: int = 0


class _CpuWorker(KvsmOffloadingWorker):
    """kvsm's copies for slots that vLLM's manager chose."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return super().submit_store(job_id, src_spec, _HostSlots(dst_spec.block_ids))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return super().submit_load(job_id, _HostSlots(src_spec.block_ids), dst_spec)


class RecordingSpec(CPUOffloadingSpec):  # type: ignore[misc,unused-ignore]
    """vLLM's `CPUOffloadingSpec`, recorded; `RecordingOptions` says what can be configured.

    On a CPU platform, where vLLM has no worker for its own spec, kvsm's copies carry out what its manager
    decides. Raises `ConfigError` or `LogError` at start-up if no log can be begun.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        warn_if_untested()
        self._options = _options(self.extra_config)
        self._recording: RecordingManager | None = None
        self._cpu_worker: _CpuWorker | None = None

    def get_manager(self) -> Any:
        if self._recording is None:
            self._recording = RecordingManager(super().get_manager(), self._open_recorder())
        return self._recording

    def get_worker(self, kv_caches: Any) -> Any:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._cpu_worker is None:
            rank, chunk = self.config.parallel.rank, self.blocks_per_chunk
            self._cpu_worker = _CpuWorker(rank, kv_caches.tensors, self.num_chunks, chunk)
        return self._cpu_worker

    def _open_recorder(self) -> ManagerRecorder:
        engine = self.config.parallel.data_parallel_index
        config = OffloadConfig(
            host_blocks=self.num_chunks,
            device_blocks=STORES_PER_SLOT * self.num_chunks + LOADED_AT_ONCE,
            block_bytes=self.kv_bytes_per_chunk,
            defer_ticks=0,
            transfer_ticks=0,
        )
        writer = LogWriter(
            new_directory(Path(self._options.event_log), engine),
            config=config,
            snapshot=lambda: snapshot(recorder.ledger),
            durability=self._options.log_durability,
            max_bytes=self._options.log_max_bytes,
            on_failure="continue",
        )
        announces = self.kv_events_config.enable_kv_cache_events
        recorder = ManagerRecorder(config, writer, announces=announces)
        log.info("kvsm: vLLM's offload of engine %d is recorded in %s", engine, writer.directory)
        return recorder


def _options(given: Mapping[str, Any]) -> RecordingOptions:
    ours = {name: given[name] for name in RecordingOptions.__struct_fields__ if name in given}
    try:
        return msgspec.convert(ours, RecordingOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config: {error}; RecordingSpec takes event_log, the directory for its logs, "
            "log_durability and log_max_bytes, beside what vLLM's CPUOffloadingSpec takes"
        ) from error
