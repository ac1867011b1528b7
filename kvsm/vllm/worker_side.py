"""The connector in a worker process: it carries out the plans of one rank, and reports ended copies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger

from kvsm.copies import VerifyingCopyEngine
from kvsm.copies.checksums import BlockChecksums
from kvsm.copies.host_pools.pool_file import remove_dead_pools
from kvsm.copies.worker import Worker
from kvsm.core.plan import WorkerReport, failed_reports
from kvsm.errors import ConfigError, UnusableFiles
from kvsm.explain.metrics import histogram
from kvsm.system.steady_clock import SteadyClock
from kvsm.tiers.disk import FlushPolicy
from kvsm.tiers.hand_over.imports import PoolImports
from kvsm.tiers.hand_over.peer_messages import pool_path
from kvsm.vllm.canonical_layout import CanonicalRows, canonical_rows, layers_of_connector
from kvsm.vllm.connector_stats import Growth, KvsmStats
from kvsm.vllm.disk_files import disk_place
from kvsm.vllm.extra_config import ConnectorOptions
from kvsm.vllm.hand_overs import usable_directory
from kvsm.vllm.host_sharing import sharing_of
from kvsm.vllm.kept_pools import kept_place
from kvsm.vllm.kv_cache_config import block_bytes_of, block_tensors, host_slots
from kvsm.vllm.own_process import WORKERS
from kvsm.vllm.pool_identity import layout_facts, rank_identity
from kvsm.vllm.rank_copies import (
    A_MOMENT_S,
    KeptPlace,
    RankCopies,
    make_copies,
    moved_copies,
    pauses,
)
from kvsm.vllm.rank_disk import RankDisk
from kvsm.vllm.step_messages import StepPlan, StepReports

log = init_logger("vllm.kvsm")


class WorkerSide:
    """The worker's side of the connector of one rank.

    A step's copies are submitted before the step computes, and run after all compute that was queued before.
    So a load overwrites no block that is still read, a store reads a computed block, and both run in parallel
    with the step.

    engine_id: vLLM's name of the engine.
    clock: returns monotonic time (s). Public, like `pause`, so that a test can replace it.
    pause: sleeps for the given time (s).
    """

    def __init__(self, options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> None:
        parallel = vllm_config.parallel_config
        self._options, self._kv_cache_config = options, kv_cache_config
        self._rank, self._ranks = parallel.rank, parallel.world_size
        self.engine_id = vllm_config.kv_transfer_config.engine_id
        WORKERS.add(self)
        directory = usable_directory(options)
        self._directory = directory if isinstance(directory, Path) else None
        self._hands_over = vllm_config.kv_transfer_config.is_kv_producer
        self._imports: PoolImports | None = None
        self._kv_caches: Mapping[str, Any] = {}
        self._sharing = sharing_of(options, vllm_config, kv_cache_config)
        self._replicas = 1 if self._sharing is None else self._sharing.replicas
        self._vllm_config = vllm_config
        self._tensors: list[Any] = []
        self._canonical: CanonicalRows | None = None
        self._copies: RankCopies | None = None
        self._worker: Worker | None = None
        self._disk_place = disk_place(options, vllm_config, kv_cache_config)
        self._disk: RankDisk | None = None
        self._disk_reports: list[WorkerReport] = []
        """Reports of disk copies that failed because this rank has no disk; not handed to vLLM yet."""
        self._failed_loads: frozenset[str] = frozenset()
        self._ended_loads: frozenset[str] = frozenset()
        self._reports: list[WorkerReport] = []
        """Reports that are not handed to vLLM yet."""
        self._handed: deque[StepReports] = deque(maxlen=vllm_config.max_concurrent_batches)
        """The reports in each of the last outputs. vLLM's scheduler may not have processed all of them."""
        self._hanging: set[int] = set()
        """Copies for which a step has waited in vain. Later steps do not wait for them."""
        self._hanging_on_disk: set[int] = set()
        """The same for copies of the disk tier."""
        self.clock: Callable[[], float] = SteadyClock()
        self.pause: Callable[[float], None] = time.sleep
        self._growth = Growth()
        self._ended_when_sent = 0

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the device pool, and make the host pool of this rank."""
        self._kv_caches = kv_caches
        self._tensors = block_tensors(self._kv_cache_config, kv_caches)
        self._canonical = self._canonical_rows()
        chunk = self._options.blocks_per_chunk
        slot_bytes = block_bytes_of(self._kv_cache_config) * chunk
        slots = host_slots(self._options.host_bytes(self._ranks), self._ranks // self._replicas, slot_bytes)
        self._make(slots * chunk)

    def unregister_kv_caches(self) -> None:
        """Wait until no copy touches the KV cache, before the engine sleeps. The host pool stays.

        A copy that hangs makes this wait without limit: its memory must not be freed under it.
        """
        if self._copies is not None and self._worker is not None:
            self._copies.engine.drain()
            self._reports += self._worker.poll()

    def restore_kv_caches(self) -> None:
        """Take the KV cache again after sleep. vLLM's allocator restores the old addresses; another allocator
        may move the cache."""
        if self._copies is None or self._worker is None:
            return
        tensors = block_tensors(self._kv_cache_config, self._kv_caches)
        if _addresses(tensors) != _addresses(self._tensors):
            self.unregister_kv_caches()
            self._tensors, self._canonical = tensors, self._canonical_rows()
            verify = self._options.verify_copies
            self._copies = moved_copies(self._copies, tensors, verify, self._sharing, self._canonical)
            self._worker.use(self._copies.engine)
            if self._disk is not None:
                self._disk.prove_host(_checksums(self._copies))
            log.info("kvsm: the KV cache of rank %d has moved", self._rank)

    def begin_step(self, step: KVConnectorMetadata) -> None:
        """Start the step's copies, before the step computes, and wait for those that the step flushes."""
        assert isinstance(step, StepPlan)
        self._failed_loads, self._ended_loads = step.failed_loads, step.ended_loads
        self.start(step)
        if not step.computes:
            self._wait_a_moment()

    def start(self, step: StepPlan) -> None:
        """Start the copies of a plan, and wait for those that it flushes."""
        if not step.plan and not step.imports and not step.disk:
            return
        worker = self._worker
        if worker is None or worker.num_host_blocks < step.host_blocks:
            if self._disk is not None:
                raise ConfigError(
                    "disk_dir: the pipeline stages of this engine have other numbers of layers, and such an "
                    "engine has no disk tier yet; omit disk_dir"
                )
            # Pipeline stages may have different numbers of layers, so the scheduler may count more blocks.
            worker = self._make(step.host_blocks)
        worker.submit((*step.plan.loads, *step.plan.stores))
        if self._imports is not None:
            self._imports.start(step.imports)
        else:
            self._reports += failed_reports(
                step.imports, self._rank, "this rank cannot read other engines' pools"
            )
        if self._disk is not None:
            self._disk.start(step.disk)
        else:
            self._disk_reports += failed_reports(step.disk, self._rank, "this rank has no disk tier")
        self._wait(worker, step.plan.flush, step.disk_flush)

    def _wait(self, worker: Worker, transfers: Iterable[int], on_disk: Iterable[int]) -> None:
        """Wait until these copies have ended, at most `transfer_timeout_s`.

        After that the engine continues, and the scheduler's side gives up the copies that hang.

        on_disk: copies of the disk tier.
        """
        timeout_s, disk = self._options.transfer_timeout_s, self._disk
        if not timeout_s:
            worker.wait(transfers)
            if disk is not None:
                disk.wait(on_disk)
            return
        until = self.clock() + timeout_s
        for pause_s in pauses():
            awaited = worker.unreported(transfers) - self._hanging
            awaited_on_disk = set() if disk is None else disk.unreported(on_disk) - self._hanging_on_disk
            if not (awaited or awaited_on_disk) or self.clock() >= until:
                self._hanging = worker.unreported(self._hanging | awaited)
                if disk is not None:
                    self._hanging_on_disk = disk.unreported(self._hanging_on_disk | awaited_on_disk)
                return
            self._reports += worker.poll()
            self.pause(pause_s)

    def _wait_a_moment(self) -> None:
        """In a step that computes nothing, wait for copies in flight, at most for the pauses `A_MOMENT_S`.

        So requests whose loads end at about the same time begin to compute in one step. Without a pause, vLLM
        would also run empty steps in a row, which would keep copying threads of its process from running.
        """
        worker, disk = self._worker, self._disk
        if worker is None:
            return
        for pause_s in A_MOMENT_S:
            is_loading = disk is not None and disk.is_loading()
            if not is_loading and not worker.unreported() - self._hanging:
                return
            self.pause(pause_s)
            self._reports += worker.poll()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Return the requests whose load the scheduler's side has declared failed or ended, each once."""
        if not self._failed_loads and not self._ended_loads:
            return KVConnectorTransferResults()
        failed, self._failed_loads = set(self._failed_loads), frozenset()
        ended, self._ended_loads = self._ended_loads, frozenset()
        return KVConnectorTransferResults(finished_recving=failed | ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> StepReports | None:
        """Return the reports of ended copies; None if there are none, because vLLM drops falsy metadata."""
        taken = self.take_all_reports()
        self._handed.append(taken)
        return taken if taken.reports or taken.disk else None

    def handed_reports(self) -> StepReports:
        """Return the reports in the last outputs. vLLM may still bring them to the scheduler's side."""
        handed = StepReports(())
        for reports in self._handed:
            handed = handed.aggregate(reports)
        return handed

    def take_all_reports(self) -> StepReports:
        """Return all reports since the last call, with those of the disk tier."""
        disk, self._disk_reports = self._disk_reports, []
        if self._disk is not None:
            disk += self._disk.poll()
        return StepReports(tuple(self.take_reports()), tuple(disk))

    def take_reports(self) -> list[WorkerReport]:
        """Return the reports since the last call, without those of the disk tier. Logs failed copies."""
        reports, self._reports = self._reports, []
        if self._worker is not None:
            reports += self._worker.poll()
        if self._imports is not None:
            reports += self._imports.poll()
        for report in reports:
            if not report.good:
                log.error(
                    "kvsm: transfer %d failed on rank %d: %s", report.transfer, self._rank, report.error
                )
        return reports

    def get_kv_connector_stats(self) -> KvsmStats | None:
        """Return bytes and seconds of copies since the last call; None if no copy has ended."""
        if self._worker is None or self._worker.ended == self._ended_when_sent:
            return None
        self._ended_when_sent = self._worker.ended
        now, stats = self._worker.statistics(), KvsmStats()
        sizes = {"store": now.store_sizes, "load": now.load_sizes}
        values = {
            "copied_bytes": {"store": now.store.bytes, "load": now.load.bytes},
            "copy_seconds": {"store": now.store.seconds, "load": now.load.seconds},
            "copy_bytes": {way: histogram("copy_bytes", of_way) for way, of_way in sizes.items()},
        }
        self._growth.add(stats, values)
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """Wait for all copies, and free the host memory."""
        if self._disk is not None:
            self._disk.close()
        if self._imports is not None:
            self._imports.close()
        if self._copies is not None:
            self._copies.close()
        self._disk = self._imports = self._copies = self._worker = None

    def _make(self, host_blocks: int) -> Worker:
        self.shutdown()
        directory, path = self._directory, None
        if directory is not None and self._hands_over:
            # Pools of killed engines there hold memory that this engine needs.
            remove_dead_pools(directory)
            path = pool_path(directory, self.engine_id, self._rank)
        kept = self._kept_place()
        self._copies = self._make_copies(host_blocks, path, kept)
        if kept is not None:
            self._log_kept_pool(kept, self._copies)
        if directory is not None:
            pool = self._copies.pool
            self._imports = PoolImports(self._rank, directory, pool.blocks, self._took_over)
        self._worker, self._growth = Worker(self._rank, self._copies.engine), Growth()
        self._ended_when_sent = 0
        self._disk = self._make_disk(self._copies)
        shared = "" if self._sharing is None else f", in a pool that {self._ranks} ranks share"
        log.info("kvsm: rank %d has %d host blocks%s", self._rank, host_blocks, shared)
        return self._worker

    def _make_copies(self, host_blocks: int, path: Path | None, kept: KeptPlace | None) -> RankCopies:
        """Make the host pool and its copy engine.

        path: a file from which other engines copy; None: no file. If it cannot be used, the pool has no file.
        """
        verify = self._options.verify_copies
        try:
            return make_copies(self._tensors, host_blocks, verify, path, self._sharing, self._canonical, kept)
        except UnusableFiles as error:
            if path is None:
                raise
            log.warning(
                "kvsm: rank %d hands nothing over, because its pool has no file: %s", self._rank, error
            )
            return self._make_copies(host_blocks, None, kept)

    def _make_disk(self, copies: RankCopies) -> RankDisk | None:
        """Open the disk tier of this rank; None if it has none, or its files cannot be used."""
        if self._disk_place is None:
            return None
        layout = layout_facts(self._vllm_config, self._kv_cache_config, self._kv_caches)
        try:
            return RankDisk(
                self._disk_place,
                self._rank,
                rank_identity(self._options, self._vllm_config, self._kv_cache_config, layout),
                copies.pool.blocks,
                self._options.blocks_per_chunk,
                FlushPolicy(self._options.disk_flush),
                _checksums(copies),
            )
        except UnusableFiles as error:
            log.warning("kvsm: rank %d has no disk tier: %s", self._rank, error)
            return None

    def _kept_place(self) -> KeptPlace | None:
        layout = layout_facts(self._vllm_config, self._kv_cache_config, self._kv_caches)
        return kept_place(self._options, self._vllm_config, self._kv_cache_config, layout)

    def _log_kept_pool(self, kept: KeptPlace, copies: RankCopies) -> None:
        """Log which pool this rank keeps, and why it is cold."""
        state = "warm" if copies.pool.is_warm else "cold"
        log.info("kvsm: rank %d keeps its host pool in %s; it is %s", self._rank, kept.path, state)
        for reason in [] if copies.pool.is_warm else copies.pool.cold_reason:
            log.info("kvsm: the pool of rank %d is cold: %s", self._rank, reason)

    def _canonical_rows(self) -> CanonicalRows | None:
        if not self._options.canonical_layout:
            return None
        layers = layers_of_connector(self._vllm_config, self._kv_cache_config, self._kv_caches)
        return canonical_rows(layers, self._replicas)

    def _took_over(self, host_blocks: Sequence[int]) -> None:
        """Note that these host blocks were copied from another engine."""
        engine = self._copies.engine if self._copies is not None else None
        if isinstance(engine, VerifyingCopyEngine):
            engine.took_over(host_blocks)


def _checksums(copies: RankCopies) -> BlockChecksums | None:
    """Return the checksums of the host blocks; None if they are not verified."""
    engine = copies.engine
    return engine.checksums if isinstance(engine, VerifyingCopyEngine) else None


def _addresses(tensors: Sequence[Any]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
