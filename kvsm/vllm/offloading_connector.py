"""`KvsmOffloadingConnector`: vLLM's OffloadingConnector with `KvsmSpec`, told of failures.

vLLM's connector asks and decides as ever; this class changes what becomes of copies. vLLM's connector counts
the ranks that have done a job, and takes every job for good. Here the ranks send reports instead, and
the core decides (`ReportedManager`). Its verdict takes these ways:

- vLLM's connector hears that all ranks have done a job, when the transfer has ended or was given up.
- A good load is added to the workers' output, before vLLM's scheduler reads it there.
- A failed load is sent to the workers with the next step. All of them report it in that step, because vLLM's
  scheduler hears of failures from workers alone.
- The keys of a failed store are offered again, once.

Four faults of vLLM's connector would end an engine that is reset under load, or store wrong blocks. They are
kept from it:

- A second reset without a step in between fails an assertion. Here it is a reset like any other, because
  requests that have ended since the first one may have blocks to store.
- In vLLM 0.32, so does a step that preempts a request and loads for it, as after a reset of running requests.
  Here such a request waits one step.
- A reset makes running requests offer all their blocks again, even blocks that have left a sliding window
  and that other requests compute into. Here groups with a window go on where they were.
- When the next part of a session's prompt comes (streamed input), vLLM 0.32 notes the session's blocks once
  more, behind themselves, and stores wrong blocks from then on. It also keeps the hash of the token that the
  part has replaced, as 0.33 does. Here both are noted as they are.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.outputs import KVConnectorOutput

from kvsm.core.offloader import Ended
from kvsm.core.plan import WorkerReport
from kvsm.errors import ConfigError
from kvsm.events import Direction
from kvsm.vllm.host_sharing import replicas_on_this_machine
from kvsm.vllm.reported_manager import ReportedManager
from kvsm.vllm.spec import told_of_failures
from kvsm.vllm.spec_worker import ReportingWorker
from kvsm.vllm.startup_checks import (
    refuse_schedulers_of_their_own,
    refuse_without_prefix_cache,
    warn_of_failing_requests,
    warn_of_immediate_kill,
)
from kvsm.vllm.versions import must_have
from kvsm.vllm.vllm_block_pool import VllmBlockPool

_DEFAULT_SPEC = {"spec_name": "KvsmSpec", "spec_module_path": "kvsm.vllm"}

_EMPTY = 0
"""In place of a transfer, for a job that copies nothing."""

_NULL_BLOCK = 0
"""Stands in a block table where there is no block."""


@dataclass
class OffloadingStep(OffloadingConnectorMetadata):
    """From the scheduler to every worker.

    failed_loads: requests whose load has failed, for the workers to report.
    """

    failed_loads: frozenset[str] = frozenset()


@dataclass
class RankReports(OffloadingWorkerMetadata):
    """From the workers. Each report names its rank. `completed_jobs` stays empty."""

    reports: tuple[WorkerReport, ...] = field(default=())

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReports:
        """The reports of two ranks together."""
        assert isinstance(other, RankReports)
        stats = self.transfer_stats.aggregate(other.transfer_stats)
        return RankReports(transfer_stats=stats, reports=self.reports + other.reports)


class _Job(NamedTuple):
    """What vLLM's connector calls a transfer.

    number: its job id.
    device_blocks: the real ones; the core has placeholders.
    in_step: whether the step itself waits for this load, so that no worker reports it to vLLM's scheduler.
    """

    number: int
    device_blocks: list[int]
    in_step: bool


class KvsmOffloadingConnector(OffloadingConnector):
    """vLLM's OffloadingConnector with `KvsmSpec`, where a failed copy is a recompute.

    Raises `ConfigError` at start-up for a spec of somebody else, for options that cannot work, and without a
    prefix cache.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        refuse_without_prefix_cache(vllm_config)
        refuse_schedulers_of_their_own(vllm_config.parallel_config)
        with told_of_failures(replicas_on_this_machine(vllm_config, kv_cache_config)):
            super().__init__(_with_default_spec(vllm_config), role, kv_cache_config)
        self._failed_loads: set[str] = set()
        """Requests whose failed load the workers must report: in the next step, or a worker in this one."""
        if role is KVConnectorRole.SCHEDULER:
            warn_of_failing_requests(vllm_config.kv_transfer_config)
            warn_of_immediate_kill(vllm_config)
            self._start_scheduler_side(vllm_config.parallel_config.world_size)
        else:
            self._rank = vllm_config.parallel_config.rank
            self._transfers: dict[int, int] = {}
            """Job -> transfer."""

    def _start_scheduler_side(self, ranks: int) -> None:
        scheduler = self.scheduler
        if not isinstance(scheduler.manager, ReportedManager):
            raise ConfigError(
                "KvsmOffloadingConnector is for KvsmSpec; use vLLM's OffloadingConnector with another spec"
            )
        must_have(scheduler, ("_req_status", "config"))
        self._manager, self._ranks = scheduler.manager, ranks
        self._pool: VllmBlockPool | None = None
        self._empty_jobs: list[int] = []
        """Jobs that copy nothing, and vLLM's connector has not been told that they are over."""
        self._jobs: dict[int, _Job] = {}
        """Transfer -> its job, for transfers in flight."""
        self._loaded: set[str] = set()
        """Requests whose load has ended well, and vLLM's scheduler has not been told."""
        self._misplaced: set[str] = set()
        """Requests whose load has failed, and that have not asked for a match since."""
        self._recomputing: set[str] = set()
        """Requests whose load has failed, and that were not scheduled since."""
        self._unfinished: dict[str, Any] = {}
        """Requests that are not over, by name."""
        self._preemptions: dict[str, int] = {}
        """Request -> how many of its preemptions vLLM's connector has heard of, if any."""
        self._retried: dict[str, set[bytes]] = {}
        """Request -> keys that it offers again since their store has failed. It does so once for each."""

    # In a worker process, in the order of a step.

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Note the step's jobs, and wait for the copies for which the step must wait."""
        step = kv_connector_metadata
        assert isinstance(step, OffloadingStep)
        self._failed_loads = set(step.failed_loads)
        for job, load in step.load_jobs.items():
            self._transfers[job] = load.src_spec.transfer
        for job, store in step.store_jobs.items():
            self._transfers[job] = store.dst_spec.transfer
        super().handle_preemptions(step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The requests whose load has failed, once each. The core decides it."""
        super().get_finished(finished_req_ids)  # vLLM's worker notes which jobs have ended.
        failed, self._failed_loads = self._failed_loads, set()
        return KVConnectorTransferResults(finished_recving=set(failed), failed_recving=failed)

    def build_connector_worker_meta(self) -> RankReports | None:
        """The copies that have ended, and how. None if nothing ended: vLLM discards falsy metadata."""
        meta = super().build_connector_worker_meta()
        if meta is None or self.connector_worker is None:
            return None
        worker = self.connector_worker.worker
        assert isinstance(worker, ReportingWorker)
        errors = worker.take_errors()
        reports = [
            WorkerReport(transfer, self._rank, job not in errors, errors.get(job, ""))
            for job in meta.completed_jobs
            if (transfer := self._transfers.pop(job)) != _EMPTY
        ]
        return RankReports(transfer_stats=meta.transfer_stats, reports=tuple(reports))

    # In the scheduler's process, in the order of a step.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take vLLM's block pool."""
        self._pool = VllmBlockPool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """Make the request known."""
        self._unfinished[request.request_id] = request
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that the host serves beyond the computed ones, whether they are loaded asynchronously).

        None instead of the tokens: ask again later.
        """
        if self._must_wait(request):
            return None, False
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (0, False) if answer[0] and request.request_id in self._recomputing else answer

    def _must_wait(self, request: Any) -> bool:
        """Whether the request must ask once more, in the next step."""
        name = request.request_id
        if name in self._misplaced:
            # vLLM has taken the request's blocks, but left it in the queue of requests that hold blocks. Told
            # to wait once, it moves to the other queue. It computes everything, and offers it again.
            self._misplaced.remove(name)
            for group in self.scheduler._req_status[name].group_states:
                group.next_stored_chunk_idx = 0
            return True
        if request.num_preemptions != self._preemptions.get(name, 0):
            # A reset has preempted it, and this step's output will say so. vLLM 0.32 asserts then that the
            # request loads nothing in the same step.
            self._preemptions[name] = request.num_preemptions
            return True
        # vLLM keeps room on the device for a load that has failed until its request is scheduled. Loads find
        # no room meanwhile, and what computes behind them would wait for ever. So these requests come first.
        return bool(self._recomputing) and name not in self._recomputing

    def build_connector_meta(self, scheduler_output: Any) -> OffloadingStep:
        """What the workers do in this step."""
        for name in scheduler_output.preempted_req_ids or ():
            if name in self._unfinished:
                self._preemptions[name] = self._unfinished[name].num_preemptions
        self._recomputing.difference_update(scheduler_output.num_scheduled_tokens)
        for new in scheduler_output.scheduled_new_reqs:
            self._note_next_part(new.req_id)
        step = super().build_connector_meta(scheduler_output)
        for job, load in step.load_jobs.items():
            self._note_job(job, load.req_id, load.src_spec, load.dst_spec, getattr(load, "sync", False))
        for job, store in step.store_jobs.items():
            self._note_job(job, store.req_id, store.dst_spec, store.src_spec)
        self._tell(self._settle(), TransferStats())
        flushed = set(step.jobs_to_flush or ())
        if self._manager.flushes_last_step and not self._unfinished:
            flushed.update(job.number for job in self._jobs.values())
        failed, self._failed_loads = frozenset(self._failed_loads), set()
        return OffloadingStep(step.load_jobs, step.store_jobs, flushed, failed)

    def _note_next_part(self, name: str) -> None:
        """A session whose next part has come is scheduled like a new request, with all its blocks.

        The part takes the place of the last token that was sampled, so a hash of that token is replaced.
        """
        status = self.scheduler._req_status[name]
        hashes = status.req.block_hashes
        for group, config in zip(status.group_states, self.scheduler.config.kv_group_configs):
            group.block_ids.clear()
            keys, stride = group.offload_keys, config.hashes_per_chunk
            # A hash covers all tokens before its end: if the last one is unchanged, all before it are.
            while keys:
                last = len(keys) * stride - 1
                if last < len(hashes) and keys[-1] == make_offload_key(hashes[last], config.group_idx):
                    break
                keys.pop()

    def _note_job(self, job: int, request: str, host: Any, device: Any, in_step: bool = False) -> None:
        if host.transfer != _EMPTY:
            self._jobs[host.transfer] = _Job(job, device.block_ids.tolist(), in_step)
            return
        # Nothing is copied, so no rank can fail.
        self._empty_jobs.append(job)
        if not in_step:
            self._loaded.add(request)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the ranks' reports, and add the loads that ended well to their output."""
        meta, stats = connector_output.kv_connector_worker_meta, TransferStats()
        if isinstance(meta, RankReports):
            self._manager.take_reports(meta.reports)
            stats = meta.transfer_stats
        completed = self._settle()
        if self._loaded:
            connector_output.finished_recving = (connector_output.finished_recving or set()) | self._loaded
            self._loaded = set()
        self._tell(completed, stats)

    def _settle(self) -> dict[int, int]:
        """Take the verdicts of the core. Returns the jobs that are over, each with the number of ranks."""
        over, self._empty_jobs = self._empty_jobs, []
        for ended in self._manager.take_ended():
            job = self._jobs.pop(ended.transfer)
            over.append(job.number)
            if ended.direction is Direction.STORE:
                if not ended.good:
                    self._offer_again(frozenset(ended.keys))
            elif not job.in_step:
                self._note_load_end(ended, job)
        return dict.fromkeys(over, self._ranks)

    def _note_load_end(self, ended: Ended, job: _Job) -> None:
        if ended.good:
            self._loaded.add(ended.request)
            return
        self._failed_loads.add(ended.request)
        if ended.request in self._unfinished:
            self._misplaced.add(ended.request)
            self._recomputing.add(ended.request)
        if ended.lost and self._pool is not None:
            blocks = [block for block in job.device_blocks if block != _NULL_BLOCK]
            self._pool.touch(blocks)
            self._pool.retire(blocks)

    def _tell(self, completed: dict[int, int], stats: TransferStats) -> None:
        """Tell vLLM's connector that all ranks have done these jobs."""
        if completed or not stats.is_empty():
            meta = OffloadingWorkerMetadata(completed, stats)
            super().update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))

    def _offer_again(self, keys: frozenset[bytes]) -> None:
        """The store of these keys has failed. Requests that still run offer them again, each key once.

        Not in a group with a window: vLLM no longer knows which older blocks still have their content.
        """
        configs = self.scheduler.config.kv_group_configs
        for name, status in self.scheduler._req_status.items():
            retried = self._retried.get(name, set())
            for group, config in zip(status.group_states, configs):
                chunks = group.offload_keys[: group.next_stored_chunk_idx]
                again = [chunk for chunk, key in enumerate(chunks) if key in keys and key not in retried]
                if again and config.sliding_window_size_in_chunks is None and name in self._unfinished:
                    group.next_stored_chunk_idx = again[0]
                    self._retried.setdefault(name, set()).update(chunks[chunk] for chunk in again)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over."""
        self._forget(request.request_id)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return answer

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for a model with several KV cache groups."""
        self._forget(request.request_id)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return answer

    def _forget(self, request: str) -> None:
        for known in (self._unfinished, self._preemptions, self._retried):
            known.pop(request, None)
        self._misplaced.discard(request)
        self._recomputing.discard(request)

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must keep stepping, even without requests."""
        return bool(self._failed_loads or self._loaded) or super().has_pending_push_work()

    def reset_cache(self) -> bool | None:
        """Make every key unmatchable. The next step waits for the copies in flight."""
        kept = [
            (group, group.next_stored_chunk_idx)
            for status in self.scheduler._req_status.values()
            for group, config in zip(status.group_states, self.scheduler.config.kv_group_configs)
            if config.sliding_window_size_in_chunks is not None
        ]
        # vLLM's connector asserts that no step has to wait for a copy yet. After another reset it has.
        awaited, self.scheduler._current_batch_jobs_to_flush = (
            self.scheduler._current_batch_jobs_to_flush,
            set(),
        )
        answer: bool | None = super().reset_cache()
        self.scheduler._current_batch_jobs_to_flush |= awaited
        for group, cursor in kept:
            group.next_stored_chunk_idx = cursor
        self._retried.clear()
        return answer

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        """The exporter of the statistics."""
        config = _with_default_spec(vllm_config)
        return super().build_prom_metrics(config, metric_types, labelnames, per_engine_labelvalues)


def _with_default_spec(vllm_config: Any) -> Any:
    """A copy of vLLM's configuration, with `KvsmSpec` if it names no spec."""
    config, transfer = copy.copy(vllm_config), copy.copy(vllm_config.kv_transfer_config)
    given = transfer.kv_connector_extra_config
    if "spec_name" not in given:
        transfer.kv_connector_extra_config = {**_DEFAULT_SPEC, **given}
    config.kv_transfer_config = transfer
    return config


def _register() -> None:
    """A MultiConnector finds its children's statistics by name, also in processes without a module path."""
    name = KvsmOffloadingConnector.__name__
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, "kvsm.vllm", name)


_register()
