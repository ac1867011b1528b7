"""The connector in a worker process: carries out the plans of one rank, and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger

from kvsm.events import Direction
from kvsm.vllm.connector_stats import KvsmStats
from kvsm.vllm.extra_config import ConnectorOptions
from kvsm.vllm.kv_cache_config import block_bytes_of, block_tensors, host_slots
from kvsm.vllm.messages import StepPlan, StepReports
from kvsm.vllm.rank_copies import RankCopies, make_copies
from kvsm.worker import Worker, WorkerStatistics

log = init_logger("vllm.kvsm")


class WorkerSide:
    """One rank. Everything is submitted before the step computes, behind all compute that was queued before:
    so that a load overwrites nothing that is still read, a store reads what is computed (S12), and both run
    beside the step."""

    def __init__(self, options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> None:
        parallel = vllm_config.parallel_config
        self._options, self._kv_cache_config = options, kv_cache_config
        self._rank, self._ranks = parallel.rank, parallel.world_size
        self._tensors: list[Any] = []
        self._copies: RankCopies | None = None
        self._worker: Worker | None = None
        self._failed_loads: frozenset[str] = frozenset()
        self._told: WorkerStatistics | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the device pool, and make the host pool of this rank's share."""
        self._tensors = block_tensors(self._kv_cache_config, kv_caches)
        chunk = self._options.blocks_per_chunk
        slot_bytes = block_bytes_of(self._kv_cache_config) * chunk
        slots = host_slots(self._options.cpu_bytes_to_use, self._ranks, slot_bytes)
        self._make(slots * chunk)

    def start(self, step: StepPlan) -> None:
        """What the step's plan says. Returns when what vLLM must wait for has ended."""
        self._failed_loads = step.failed_loads
        if not step.plan:
            return
        worker = self._worker
        if worker is None or worker.num_host_blocks < step.host_blocks:
            # The stages of a pipeline may have more layers, or fewer, than that of the scheduler's numbers.
            worker = self._make(step.host_blocks)
        worker.start(step.plan)

    def take_failed_loads(self) -> set[str]:
        failed, self._failed_loads = self._failed_loads, frozenset()
        return set(failed)

    def reports(self) -> StepReports | None:
        """What has ended. None, where that is nothing: vLLM drops what is false."""
        reports = self._worker.poll() if self._worker is not None else []
        for report in reports:
            if not report.good:
                log.error(
                    "kvsm: transfer %d failed on rank %d: %s", report.transfer, self._rank, report.error
                )
        return StepReports(tuple(reports)) if reports else None

    def stats(self) -> KvsmStats | None:
        """What was copied since the last call."""
        if self._worker is None:
            return None
        now, before = self._worker.statistics(), self._told
        self._told = now
        stats = KvsmStats()
        for direction, ours, theirs in (
            (Direction.STORE, now.store, before and before.store),
            (Direction.LOAD, now.load, before and before.load),
        ):
            labels = (direction.name.lower(),)
            stats.count("copied_bytes", labels, ours.bytes - (theirs.bytes if theirs else 0))
            stats.count("copy_seconds", labels, ours.seconds - (theirs.seconds if theirs else 0.0))
        return None if stats.is_empty() else stats

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
            self._copies = self._worker = None

    def _make(self, host_blocks: int) -> Worker:
        if self._copies is not None:
            self._copies.close()
        self._copies = make_copies(self._tensors, host_blocks, self._options.verify_copies)
        self._worker = Worker(self._rank, self._copies.engine)
        log.info("kvsm: rank %d has %d host blocks", self._rank, host_blocks)
        return self._worker
