"""The connector in the scheduler's process: it translates vLLM's calls for `OffloadScheduler`.

vLLM's scheduler learns from the workers' output which loads have ended and which of them failed. In kvsm the
core decides this when all ranks have reported: a load that a reset abandoned has failed, even if every copy
was good. So the workers send reports to the core, and its verdicts reach vLLM in two ways:

- A good load is added to the workers' output, in `update_connector_output`, before vLLM reads it there.
- vLLM reads failures before it calls the connector. So a failed load is sent to the workers with the next
  step, and all of them report it in that step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import compress
from time import monotonic_ns, perf_counter
from typing import Any
from weakref import WeakSet

import msgspec
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import RequestStatus

from kvsm.core.kv_events import Publisher
from kvsm.core.offloader import LogFlush
from kvsm.core.plan import ImportJob, TransferPlan, WorkerReport
from kvsm.core.scheduler import (
    GroupKind,
    KVCacheGroup,
    LastStep,
    LoadTimer,
    OffloadScheduler,
    SchedulerConfig,
    StepOutput,
    StoreMode,
)
from kvsm.core.scheduler.session_leases import SessionLeases
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.events import Direction, OffloadConfig
from kvsm.ids import listed
from kvsm.tiers import DEFER_TICKS, host_config
from kvsm.vllm.connector_stats import KvsmStats, StatsSource
from kvsm.vllm.deadlines import TransferDeadlines, silent_ranks
from kvsm.vllm.disk_files import disk_place
from kvsm.vllm.engine_disk import EngineDisk, find_disk
from kvsm.vllm.engine_offloader import open_engine_offloader
from kvsm.vllm.extra_config import ConnectorOptions
from kvsm.vllm.hand_overs import hand_overs
from kvsm.vllm.host_sharing import kv_replicas
from kvsm.vllm.kept_pools import warm_pools
from kvsm.vllm.kv_cache_config import block_bytes_of, groups_of, hash_tokens_of, host_slots
from kvsm.vllm.new_weights import notify_of_new_weights
from kvsm.vllm.own_process import only_worker
from kvsm.vllm.step_messages import StepPlan, StepReports
from kvsm.vllm.vllm_block_pool import VllmBlockPool
from kvsm.vllm.vllm_kv_events import to_vllm_kv_events

log = init_logger("vllm.kvsm")

BoundaryState = tuple[int, int, int]
"""A state of a mamba group: (group, device block, tokens before the boundary)."""

_WHOLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
"""The final statuses of a request that was served completely."""

_ABORTED, _REPORTS_TAKEN = RequestStatus.FINISHED_ABORTED, LogFlush.REPORTS_TAKEN

_TOLD_OF_HINT: WeakSet[Any] = WeakSet()
"""Requests of which some connector in this process has told the client what became of its hint."""

UNNAMED_WEIGHTS = "not named since a reset"
"""The version of the weights after a reset by vLLM. No engine starts with this version."""

NULL_BLOCK = 0
"""The entry of a block table where there is no block."""


class SchedulerSide:
    """The scheduler's side of the connector of one engine.

    deadlines: finds the copies that have waited too long for their reports.
    """

    def __init__(self, options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> None:
        scheduler_config = _scheduler_config(options, vllm_config, kv_cache_config)
        place = disk_place(options, vllm_config, kv_cache_config)
        found = find_disk(place, options, vllm_config)
        config = _core_config(options, vllm_config, kv_cache_config, scheduler_config.alignment)
        if found is not None:
            config = _with_disk(config)
        publisher, index = _publisher(vllm_config), vllm_config.parallel_config.data_parallel_index
        warm = warm_pools(options, vllm_config, kv_cache_config)
        self._core = open_engine_offloader(config, options, index, publisher, warm)
        self._core.mark_stops()
        self._weights_after_reset = None if warm is None and place is None else UNNAMED_WEIGHTS
        notify_of_new_weights()
        self._host_blocks = config.host_blocks * config.blocks_per_chunk
        self._empty_plans = {flag: StepPlan(self._host_blocks, computes=flag) for flag in (False, True)}
        """Whether a step computes -> its plan without copies, made once because most steps have none."""
        self._disk: EngineDisk | None = None
        if found is not None:
            self._disk = EngineDisk(found, options, vllm_config, self._core, announces=publisher is not None)
        self._unused_place = place if found is None else None
        """The place of a configured disk tier that this engine could not open; else None."""
        lower_tier = None if self._disk is None else self._disk.tier
        self._scheduler = OffloadScheduler(self._core.offloader, scheduler_config, lower_tier)
        self._timer = LoadTimer(self._core.offloader) if options.load_only_if_faster else None
        parts = hand_overs(options, vllm_config, kv_cache_config, self._core.offloader, scheduler_config)
        self._outgoing, self._incoming, self._service = parts.outgoing, parts.incoming, parts.service
        self._lacks_hand_overs = parts.serves_without
        self._leases = SessionLeases(self._core.offloader, scheduler_config, options.agent_hint_share)
        self._imports: list[ImportJob] = []
        """Copies from other engines' host pools that leave with the next step."""
        self._stats = StatsSource(
            self._core.metrics,
            _facts(options, config, scheduler_config, vllm_config.model_config.max_model_len),
            beside=self._counts_beside_events,
            busy=lambda: bool(self._scheduler.state.tracked),
        )
        self._frees_early = any(group.kind is not GroupKind.FULL for group in scheduler_config.groups)
        """Whether some KV cache groups free blocks while their request still runs."""
        self.deadlines = TransferDeadlines(options.transfer_timeout_s, vllm_config.max_concurrent_batches)
        self._failed_loads: set[str] = set()
        """Requests whose failed load the workers must report in the next step."""
        self._ended_loads: set[str] = set()
        """Requests with a good load that ended outside a step. The workers must report it in the next one."""
        self._taken_early: set[int] = set()
        """Transfers whose reports were taken already; vLLM will bring these reports once more."""
        self._taken_early_of_disk: set[int] = set()
        self._config_if_flushing = vllm_config if options.last_step == "flush" else None
        self._waiting: set[str] = set()
        """Requests that got blocks without a load by kvsm and were not scheduled since. Their tokens count as
        computed, but another connector of a MultiConnector may still be filling the blocks."""
        self._recomputing: dict[str, bool] = {}
        """Request whose load has failed and that has not been scheduled since -> whether vLLM has asked for
        its match since the failure."""
        self._admitted: set[str] = set()
        """Requests that got blocks since the last step."""
        self._states: dict[str, Sequence[BoundaryState]] = {}
        """Request -> boundary states that the last step computes; their blocks are held. vLLM offers a state
        in the step that computes it. A store that leaves with this step would read the state too early."""
        self._pool: VllmBlockPool | None = None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Keep vLLM's block pool."""
        self._pool = VllmBlockPool(gpu_block_pool)
        self._scheduler.bind_gpu_block_pool(self._pool)

    def on_new_request(self, request: Any) -> None:
        """Start to track the request."""
        self._scheduler.add_request(request)
        if self._incoming is not None:
            self._incoming.arrived(self._scheduler.state.tracked[request.request_id], request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return (tokens that the host serves beyond the computed ones, whether the load is asynchronous).

        None instead of the tokens makes vLLM ask again later.
        """
        name = request.request_id
        if self._recomputing and not self._recomputing.get(name):
            if name in self._recomputing:
                # vLLM has freed the request's blocks, but left it in the queue of requests that hold blocks.
                # That queue is served in order, so a request with blocks could wait until this one gets new
                # blocks. After one answer of None, vLLM moves it to the other queue.
                self._recomputing[name] = True
            # All other requests wait, too. vLLM reserves device blocks for a failed load until its request is
            # scheduled. Their loads would find no room meanwhile, and requests behind them would never run.
            return None, False
        if self._incoming is not None and self._incoming.awaits(request.request_id):
            self._take_hand_overs()
            if self._incoming.awaits(request.request_id):
                return None, False
        began = perf_counter()
        answer = self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        self._stats.lookups.observe(perf_counter() - began)
        return (0, False) if answer[0] and name in self._recomputing else answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note that the request got these blocks, and plan the load into them.

        num_external_tokens: the number of tokens to load.
        """
        self._admitted.add(request.request_id)
        if not num_external_tokens:
            self._waiting.add(request.request_id)
        self._scheduler.update_state_after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """Return the plan of this step for the workers."""
        if self._timer is not None:
            output, drafts = scheduler_output, scheduler_output.scheduled_spec_decode_tokens
            tokens = output.total_num_scheduled_tokens
            decoded = len(output.num_scheduled_tokens) + sum(map(len, drafts.values()))
            self._timer.step_scheduled(monotonic_ns(), tokens, tokens - decoded)
        return self._plan_step(scheduler_output)

    def _plan_step(self, scheduler_output: Any) -> StepPlan:
        """Return the plan of a step, which is vLLM's or one of `_flush_in_own_process`."""
        # The conditions keep steps without any decision short: each call takes a microsecond.
        output = scheduler_output
        if self._core.offloader.ledger.transfers:
            self._give_up_overdue()
        if self._incoming is not None:
            self._take_hand_overs()
        disk = () if self._disk is None else self._disk.plan()
        if self._leases.leases:
            # Expired leases end before the step's stores choose victims.
            self._leases.look()
        if self._waiting:
            self._waiting.difference_update(output.num_scheduled_tokens)
        if self._recomputing:
            for name in output.num_scheduled_tokens:
                self._recomputing.pop(name, None)
        if self._frees_early:
            plan = self._plan_with_states(output)
        else:
            plan = self._scheduler.build_connector_meta(_step_output(output, self._admitted, {}))
        self._admitted.clear()
        if self._timer is not None:
            self._timer.submitted(plan.loads)
        if self._scheduler.state.ended_loads:
            # An abandoned load has failed, and no report may come that makes vLLM call us.
            good = self._take(())
            assert not good, "a good load needs a report"
        if self._outgoing is not None:
            # Slots that this plan may overwrite must not be promised to another engine any more.
            self._outgoing.look()
        computes = output.total_num_scheduled_tokens > 0
        copies = plan.loads or plan.stores or plan.flush or disk or self._imports
        if not (copies or self._failed_loads or self._ended_loads):
            return self._empty_plans[computes]
        imports, self._imports = tuple(self._imports), []
        leaving = {job.transfer: job.direction for job in (*plan.loads, *plan.stores)}
        leaving.update({job.transfer: Direction.STORE for job in imports})
        for transfer in sorted(leaving):
            self.deadlines.began(transfer, leaving[transfer])
        failed, self._failed_loads = frozenset(self._failed_loads), set()
        ended, self._ended_loads = frozenset(self._ended_loads), set()
        flush = () if self._disk is None or not plan.flush else self._disk.copies_of(plan.flush)
        return StepPlan(self._host_blocks, plan, failed, ended, imports, disk, flush, computes)

    def _plan_with_states(self, output: Any) -> TransferPlan:
        """Return the step's plan if some KV cache groups free blocks early or have mamba states."""
        if self._pool is not None:
            # The scheduler looks in the pool for blocks that the request has freed.
            self._pool.computing = _computed_blocks(output, self._scheduler.config.groups)
        computed, self._states = self._states, self._hold_states(output)
        plan = self._scheduler.build_connector_meta(_step_output(output, self._admitted, computed))
        self._free_states(computed)
        if self._pool is not None:
            self._pool.computing = ()
        return plan

    def _counts_beside_events(self) -> Mapping[str, Any]:
        """Return the values of metrics that no event shows: `metric_table.SERVES_WITHOUT` and `LEASES`, and
        `HAND_OVERS` and `DISK` if this engine has hand-overs and a disk tier."""
        without = {"disk": int(self._unused_place is not None), "hand_over": int(self._lacks_hand_overs)}
        counts: dict[str, Any] = {"serves_without": without}
        if self._disk is not None:
            counts.update(self._disk.counts())
        if self._incoming is not None:
            counts["hand_overs_missed"] = self._incoming.missed
        counts["leased_blocks"] = self._leases.held
        return counts

    def _take_hand_overs(self) -> None:
        """Take the answers of prefill engines: copies to start, and reports."""
        if self._incoming is not None:
            jobs, reports = self._incoming.look()
            self._imports += jobs
            if reports:
                good = self._take(reports)
                assert not good, "a good load needs a report of its own"

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' reports, and add the loads that ended well to the workers' output."""
        meta = connector_output.kv_connector_worker_meta
        if meta is None and self._incoming is None and not self._scheduler.state.ended_loads:
            self._core.offloader.flush_log(_REPORTS_TAKEN)
            self._flush_if_only_leases_are_left()
            return
        reports = meta.reports if isinstance(meta, StepReports) else ()
        if self._disk is not None and isinstance(meta, StepReports):
            early = self._taken_early_of_disk
            fresh = [report for report in meta.disk if report.transfer not in early] if early else meta.disk
            self._disk.take(fresh)
            early.difference_update([report.transfer for report in meta.disk])
            if self._outgoing is not None:
                # A hand-over may wait for a block from the disk, and no further step may follow.
                self._outgoing.look()
        if self._taken_early:
            early = self._taken_early.intersection(report.transfer for report in reports)
            reports = tuple([report for report in reports if report.transfer not in early])
            self._taken_early -= early
        good = self._take(reports)
        if good:
            connector_output.finished_recving = (connector_output.finished_recving or set()) | good
        self._flush_if_only_leases_are_left()

    def _flush_if_only_leases_are_left(self) -> None:
        """Flush the log if only session leases are left: the engine takes no further step for them."""
        if self._leases.leases and not self._scheduler.state.tracked:
            self._core.offloader.flush_log(LogFlush.ONLY_LEASES)

    def _hold_states(self, output: Any) -> dict[str, Sequence[BoundaryState]]:
        """Hold the blocks of the mamba states that this step computes.

        Do not filter by `preempted_req_ids`: it also names requests that a reset has preempted before this
        step, and that this step computes again. vLLM offers no state of a request that has lost its blocks.
        """
        offered = output.kv_connector_block_state
        if offered is None or not offered.boundary_state_offloads or self._pool is None:
            return {}
        states: dict[str, Sequence[BoundaryState]] = {
            name: tuple(state for state in found if state[1] != NULL_BLOCK)
            for name, found in offered.boundary_state_offloads.items()
            if name in output.num_scheduled_tokens
        }
        self._pool.touch([block for found in states.values() for _, block, _ in found])
        return states

    def _free_states(self, states: Mapping[str, Sequence[BoundaryState]]) -> None:
        if states and self._pool is not None:
            self._pool.free_blocks([block for found in states.values() for _, block, _ in found])

    def _take(self, reports: Sequence[WorkerReport]) -> set[str]:
        """Give reports to the core, and note the failed loads. Returns the requests whose load ended well."""
        if self._incoming is not None:
            reports = self._incoming.keep_back(reports)
        ended = self._scheduler.update_connector_output(reports).loads
        if not reports and not ended:
            return set()
        if self._timer is not None:
            self._timer.reported(reports)
        in_flight = self._core.offloader.ledger.transfers
        for report in reports:
            if report.transfer not in in_flight:
                self.deadlines.ended(report.transfer)
        failed = {load.request for load in ended if not load.good}
        self._failed_loads |= failed
        self._recomputing.update(dict.fromkeys(failed & self._scheduler.state.tracked.keys(), False))
        self._leases.look()
        if self._outgoing is not None:
            self._outgoing.look()
        return {load.request for load in ended if load.good}

    def _give_up_overdue(self) -> None:
        """Give up the copies that some rank has not reported in time. A load that is given up has failed."""
        ledger = self._core.offloader.ledger
        for transfer in self.deadlines.overdue():
            lost = ledger.transfers[transfer]
            ended = self._scheduler.lose(transfer)
            assert ended is not None, "what is in flight can be lost"
            retired = f"{len(lost.slots)} host slots"
            if ended.direction is Direction.LOAD:
                blocks = listed(ended.device_blocks)
                retired += f" and {len(blocks)} device blocks"
                if self._pool is not None:
                    self._pool.retire(blocks)
            log.warning(
                "kvsm: transfer %d (a %s) is given up: ranks %s have not reported it for %g s. %s are "
                "retired: they are not used again until the engine restarts%s",
                transfer,
                ended.direction.name.lower(),
                silent_ranks(lost, self._core.offloader.config.workers),
                self.deadlines.timeout_s,
                retired,
                f". The load of request {ended.request} has failed" if ended.request else "",
            )

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note that the request is finished or aborted, and plan its last stores.

        Returns (whether vLLM must keep its blocks, the kv_transfer_params for the client or None). These say
        where a decode engine finds the blocks, and how the client's hint was answered.
        """
        self._recomputing.pop(request.request_id, None)
        aborted = request.status == _ABORTED
        if request.request_id in self._waiting:
            self._waiting.discard(request.request_id)
            block_ids = ()
        tracked = self._scheduler.state.tracked.get(request.request_id)
        keep, _nothing = self._scheduler.request_finished(request, block_ids, aborted=aborted)
        if self._incoming is not None:
            self._incoming.finished(request.request_id)
        answer = None
        if self._outgoing is not None and tracked is not None and tracked.remote_decode:
            answer = self._outgoing.offer(tracked, request) if request.status in _WHOLE else None
        if tracked is not None and tracked.agent_hint is not None and request.status in _WHOLE:
            told = self._leases.take(tracked, request)
            if told is not None and self._may_tell(tracked):
                answer = told if answer is None else {**answer, **told}
        if self._config_if_flushing is not None and not self._scheduler.state.tracked:
            self._flush_in_own_process(self._config_if_flushing)
        return keep, answer

    def _may_tell(self, tracked: TrackedRequest) -> bool:
        """Whether the client may be told of its hint. Call it once for each request.

        A MultiConnector joins the answers of its connectors, and stops the engine if two of them have the
        same key. vLLM 0.32 stops it if two of them answer at all.
        """
        if tracked.request in _TOLD_OF_HINT or (tracked.remote_decode and self._outgoing is None):
            return False
        _TOLD_OF_HINT.add(tracked.request)
        return True

    def _flush_in_own_process(self, vllm_config: Any) -> None:
        """Run the last step at once if vLLM may run no further step: `own_process` says when.

        A disk tier needs several steps: blocks can go to the disk only when they are on the host.
        """
        worker = only_worker(vllm_config)
        if worker is None:
            return
        has_reports = True
        while has_reports and (self._scheduler.has_pending_work() or self._disk_has_work()):
            step = self._plan_step(SchedulerOutput.make_empty())
            # vLLM's scheduler reads ended loads only in a step of its own, so they wait for the next one.
            self._failed_loads |= step.failed_loads
            self._ended_loads |= step.ended_loads
            worker.start(step)
            # A step without any report has waited in vain, and so would the next one.
            has_reports = self._take_outside_a_step(worker.handed_reports(), worker.take_all_reports())

    def _take_outside_a_step(self, handed: StepReports, taken: StepReports) -> bool:
        """Give reports to the core outside of a step of vLLM. Returns whether there were any.

        handed: reports that vLLM already has, and will bring, too.
        taken: reports that vLLM does not have.
        """
        in_flight = self._core.offloader.ledger.transfers
        early = [report for report in handed.reports if report.transfer in in_flight]
        self._taken_early.update(report.transfer for report in early)
        self._ended_loads |= self._take([*early, *taken.reports])
        if self._disk is None:
            return bool(early or taken.reports)
        copies = self._disk.tier.copies
        early_of_disk = [report for report in handed.disk if report.transfer in copies]
        self._taken_early_of_disk.update(report.transfer for report in early_of_disk)
        self._disk.take([*early_of_disk, *taken.disk])
        return bool(early or taken.reports or early_of_disk or taken.disk)

    def _disk_has_work(self) -> bool:
        return self._disk is not None and self._disk.tier.has_work()

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must keep stepping, even without requests."""
        for_next_step = self._failed_loads or self._ended_loads or self._states or self._imports
        if self._outgoing is not None and self._outgoing.has_ended():
            return True
        return bool(for_next_step) or self._disk_has_work() or self._scheduler.has_pending_work()

    def has_pending_block_frees(self) -> bool:
        """Whether a store holds the last reference to a block: then waiting is cheaper than a preemption."""
        pool = self._pool
        return pool is not None and any(
            pool.references(block) == 1
            for transfer in self._core.offloader.ledger.transfers.values()
            if transfer.direction is Direction.STORE
            for block in listed(transfer.device_blocks)
        )

    def take_events(self) -> Sequence[Any]:
        """Return the KV events since the last call. vLLM calls it at the end of each step."""
        if self._timer is not None:
            self._timer.step_ended(monotonic_ns())
        if self._core.offloader.publisher is None:
            return ()
        events = self._scheduler.take_events()
        if self._disk is not None:
            events += self._disk.tier.disk.take_kv_events()
        return to_vllm_kv_events(events)

    def get_kv_connector_stats(self) -> KvsmStats | None:
        """Return the metrics that have changed since the last call; None if there are none."""
        return self._stats.take()

    def reset_cache(self) -> bool:
        """Make every key unmatchable. Returns whether no copy from before the reset is in flight.

        vLLM gives no reason for a reset. The weights may have changed, so their version is unknown from here
        on.
        """
        return self._forget(self._weights_after_reset)

    def set_weights_version(self, version: str) -> None:
        """Note new weights. Blocks that other weights computed can no longer be matched."""
        if version != self._core.offloader.ledger.weights:
            self._forget(version)

    def _forget(self, weights: str | None) -> bool:
        self._free_states(self._states)
        self._states = {}
        if self._outgoing is not None:
            self._outgoing.reset()
        if self._incoming is not None:
            self._incoming.reset()
        self._leases.reset()
        is_done = self._scheduler.reset_cache(weights)
        if self._disk is not None:
            self._disk.tier.reset(weights)
        if self._unused_place is not None:
            self._unused_place.void()
        return is_done

    def shutdown(self) -> None:
        """Stop all hand-overs, end all session leases, and close the event logs."""
        for part in (self._service, self._outgoing, self._incoming, self._leases):
            if part is not None:
                part.close()
        if self._disk is not None:
            self._disk.close()
        self._core.close()


def _facts(
    options: ConnectorOptions, config: OffloadConfig, scheduler: SchedulerConfig, longest: int
) -> Mapping[str, object]:
    """Return the label values of the metric `config_info`. longest: most tokens of a request."""
    slot_bytes = config.block_bytes * config.blocks_per_chunk * config.workers
    return {
        "cpu_num_chunks": config.host_blocks,
        "cpu_blocks_per_chunk": config.blocks_per_chunk,
        "cpu_kv_cache_size_bytes": config.host_blocks * slot_bytes,
        "cpu_kv_cache_size_tokens": tokens_on_host(config, scheduler.groups, longest),
        "policy": options.policy,
        "store": options.store,
        "last_step": options.last_step,
    }


def tokens_on_host(config: OffloadConfig, groups: Sequence[KVCacheGroup], longest: int) -> int:
    """Return the tokens that the host holds for requests of `longest` tokens, as vLLM's offload counts them:
    a window needs only its own slots, and a mamba group one state."""
    slots = 0
    for group in groups:
        reach = {GroupKind.FULL: longest, GroupKind.MAMBA: 1}.get(group.kind, group.window)
        slots += -(-min(longest, reach) // (group.block_tokens * config.blocks_per_chunk))
    return config.host_blocks * longest // slots


def _publisher(vllm_config: Any) -> Publisher | None:
    """Return the publisher of the host's KV events; None if vLLM publishes none."""
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return None
    return Publisher()


def _core_config(
    options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any, block_tokens: int
) -> OffloadConfig:
    ranks = vllm_config.parallel_config.world_size
    copies = ranks // kv_replicas(options, vllm_config, kv_cache_config)
    chunk, block_bytes = options.blocks_per_chunk, block_bytes_of(kv_cache_config)
    return OffloadConfig(
        host_blocks=host_slots(options.host_bytes(ranks), copies, block_bytes * chunk),
        device_blocks=kv_cache_config.num_blocks,
        block_bytes=block_bytes,
        workers=ranks,
        blocks_per_chunk=chunk,
        policy=options.policy,
        store_threshold=options.store_threshold,
        # Steps are no measure of time: an idle engine makes a thousand a second, a busy one twenty. So the
        # limit for waiting on a block in flight is high, and `TransferDeadlines` bounds each transfer.
        defer_ticks=256,
        transfer_ticks=0,
        block_tokens=block_tokens,
        load_only_if_faster=options.load_only_if_faster,
    )


def _with_disk(config: OffloadConfig) -> OffloadConfig:
    """Let requests wait for more steps: copies from a disk are slower, and requests take turns."""
    return msgspec.structs.replace(host_config(config), defer_ticks=DEFER_TICKS)


def _scheduler_config(options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> SchedulerConfig:
    groups = groups_of(vllm_config, kv_cache_config)
    step = 2 * sum(_step_blocks(group, vllm_config) for group in groups)
    return SchedulerConfig(
        groups=groups,
        hash_tokens=hash_tokens_of(vllm_config, kv_cache_config),
        store=StoreMode(options.store),
        # vLLM keeps stepping while `has_pending_push_work`.
        last_step=LastStep(options.last_step.replace("_", " ")),
        prompt_only=options.prompt_only,
        lazy_target_blocks=options.lazy_target_blocks or min(step, kv_cache_config.num_blocks),
        null_block=NULL_BLOCK,
    )


def _step_blocks(group: KVCacheGroup, vllm_config: Any) -> int:
    """Return the most blocks of a group that a step takes from the free queue to compute its tokens.

    Each request may begin a block of its own with a single token. Blocks for loads are not counted: no number
    of tokens limits how many requests are admitted with a hit.
    """
    tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
    requests: int = min(vllm_config.scheduler_config.max_num_seqs, tokens)
    speculative = vllm_config.speculative_config
    drafted: int = speculative.num_speculative_tokens if speculative is not None else 0
    if group.kind is GroupKind.MAMBA:
        return requests * (2 + drafted)
    return (tokens + requests * (drafted + group.block_tokens - 1)) // group.block_tokens


def _computed_blocks(output: Any, groups: Sequence[KVCacheGroup]) -> set[int]:
    """Return the device blocks that the step writes."""
    cached, states = output.scheduled_cached_reqs, output.kv_connector_block_state
    begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    begins.update(zip(cached.req_ids, cached.num_computed_tokens))
    blocks: set[int] = set()
    for name, count in output.num_scheduled_tokens.items():
        begin, end = begins[name], begins[name] + count
        for group, table in zip(groups, states.get_block_ids(name)):
            blocks.update(table[begin // group.block_tokens : -(-end // group.block_tokens)])
    return blocks


def _step_output(
    output: Any, admitted: Set[str], states: Mapping[str, Sequence[BoundaryState]]
) -> StepOutput:
    cached = output.scheduled_cached_reqs
    scheduled, fresh = output.num_scheduled_tokens, cached.new_block_ids
    grown = dict(compress(zip(cached.req_ids, fresh), fresh)) if any(fresh) else {}
    for name in cached.resumed_req_ids:
        # New and resumed requests have reported all their blocks when they got them.
        grown.pop(name, None)
    if admitted:
        # The prefix that an admitted request found on the device may still be computed by another request in
        # this very step, so it is stored one step later.
        scheduled = [name for name in scheduled if name not in admitted]
    return StepOutput(
        scheduled=scheduled,
        new_block_ids=grown,
        preempted=output.preempted_req_ids or (),
        boundary_states=states,
    )
