"""The connector in the scheduler's process: vLLM's calls, in vLLM's types, handed to `OffloadScheduler`.

Who says what of a load. vLLM's scheduler hears of loads from the workers: which have ended, which of them
failed. Here the core decides that, when all ranks have reported: a load that was given up by a reset has
failed, though every copy was good. So workers send reports, and what the core makes of them comes back:

- a good end is added to the workers' output, in `update_connector_output`, before vLLM reads it there;
- vLLM reads failures before it calls us. They go to the workers with the next step, and every one of them
  tells it in that step.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvsm.events import Direction, OffloadConfig
from kvsm.ids import listed
from kvsm.kv_events import Publisher
from kvsm.plan import WorkerReport
from kvsm.scheduler import (
    GroupKind,
    KVCacheGroup,
    LastStep,
    OffloadScheduler,
    SchedulerConfig,
    StepOutput,
    StoreMode,
)
from kvsm.vllm.connector_stats import KvsmStats, StatsSource
from kvsm.vllm.engine_offloader import open_engine_offloader
from kvsm.vllm.extra_config import ConnectorOptions
from kvsm.vllm.kv_cache_config import block_bytes_of, groups_of, hash_tokens_of, host_slots
from kvsm.vllm.messages import StepPlan, StepReports
from kvsm.vllm.vllm_block_pool import VllmBlockPool
from kvsm.vllm.vllm_kv_events import to_vllm_kv_events

log = init_logger("vllm.kvsm")

BoundaryState = tuple[int, int, int]
"""Of a mamba group: (group, device block, tokens before the boundary)."""

NULL_BLOCK = 0
"""What vLLM puts into a block table where there is no block."""


class SchedulerSide:
    """Decides for one engine."""

    def __init__(self, options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> None:
        config = _core_config(options, vllm_config, kv_cache_config)
        parallel, events = vllm_config.parallel_config, vllm_config.kv_events_config
        publisher = None
        if events is not None and events.enable_kv_cache_events:
            publisher = Publisher(self_describing=options.self_describing_kv_events)
        self._core = open_engine_offloader(config, options, parallel.data_parallel_index, publisher)
        self._host_blocks = config.host_blocks * config.blocks_per_chunk
        self._scheduler = OffloadScheduler(
            self._core.offloader, _scheduler_config(options, vllm_config, kv_cache_config)
        )
        self._stats = StatsSource(self._core.metrics, self._core.offloader.ledger)
        self._failed_loads: set[str] = set()
        """To be told by the workers, in the next step."""
        self._waiting: set[str] = set()
        """Requests that have blocks and nothing to load from us, and were not scheduled since: maybe another
        connector (of a MultiConnector) is still filling them, while vLLM counts their tokens as computed."""
        self._misplaced: set[str] = set()
        """Requests whose load has failed, and that have not asked for another one."""
        self._admitted: set[str] = set()
        """Requests that got their first blocks since the last step."""
        self._states: dict[str, Sequence[BoundaryState]] = {}
        """Boundary states of mamba groups that the last step computes, held: vLLM offers them in the very
        step that does so, and a store that leaves with it would read them too early (S12)."""
        self._pool: VllmBlockPool | None = None

    def bind_gpu_block_pool(self, pool: Any) -> None:
        self._pool = VllmBlockPool(pool)
        self._scheduler.bind_gpu_block_pool(self._pool)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.add_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id in self._misplaced:
            # vLLM has taken its blocks, and left it in the queue of those that hold some, which are served in
            # turn. Told to wait, it joins the others. Else who has blocks could wait for it to get new ones.
            self._misplaced.remove(request.request_id)
            return None, False
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._admitted.add(request.request_id)
        if not num_external_tokens:
            self._waiting.add(request.request_id)
        self._scheduler.update_state_after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, output: Any) -> StepPlan:
        """What the workers do in this step."""
        self._waiting.difference_update(output.num_scheduled_tokens)
        pool, groups = self._pool, self._scheduler.config.groups
        if pool is not None and any(group.kind is not GroupKind.FULL for group in groups):
            # What a group of these has given back is looked for in the pool; a full one gives nothing back.
            pool.computing = _computed_blocks(output, groups)
        computed, self._states = self._states, self._hold_states(output)
        plan = self._scheduler.build_connector_meta(_step_output(output, self._admitted, computed))
        self._free_states(computed)
        self._admitted.clear()
        if pool is not None:
            pool.computing = ()
        if self._scheduler.has_pending_work():
            # A load that was given up has failed, and there may be no report upon which vLLM would ask.
            good = self._take(())
            assert not good, "a load ends well with a report"
        failed, self._failed_loads = frozenset(self._failed_loads), set()
        return StepPlan(self._host_blocks, plan, failed)

    def update_connector_output(self, output: Any) -> None:
        """Take the workers' reports, and add to their output which loads have ended well."""
        meta = output.kv_connector_worker_meta
        reports = meta.reports if isinstance(meta, StepReports) else ()
        good = self._take(reports)
        if good:
            output.finished_recving = (output.finished_recving or set()) | good

    def _hold_states(self, output: Any) -> dict[str, Sequence[BoundaryState]]:
        """The states that this step computes. Who is preempted in it has lost his blocks, maybe to others."""
        offered, gone = output.kv_connector_block_state, output.preempted_req_ids or ()
        if offered is None or self._pool is None:
            return {}
        states: dict[str, Sequence[BoundaryState]] = {
            name: tuple(state for state in found if state[1] != NULL_BLOCK)
            for name, found in offered.boundary_state_offloads.items()
            if name in output.num_scheduled_tokens and name not in gone
        }
        self._pool.touch([block for found in states.values() for _, block, _ in found])
        return states

    def _free_states(self, states: Mapping[str, Sequence[BoundaryState]]) -> None:
        if self._pool is not None:
            self._pool.free_blocks([block for found in states.values() for _, block, _ in found])

    def _take(self, reports: Sequence[WorkerReport]) -> set[str]:
        """Take these, and note which loads have failed. Returns those that have ended well."""
        ended = self._scheduler.update_connector_output(reports).loads
        failed = {load.request for load in ended if not load.good}
        self._failed_loads |= failed
        self._misplaced |= failed
        return {load.request for load in ended if load.good}

    def request_finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> bool:
        """Whether vLLM must keep its blocks until they are named as sent."""
        self._misplaced.discard(request.request_id)
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        if request.request_id in self._waiting:
            self._waiting.discard(request.request_id)
            block_ids = ()
        keep, _nothing = self._scheduler.request_finished(request, block_ids, aborted=aborted)
        return keep

    def has_pending_push_work(self) -> bool:
        return bool(self._failed_loads or self._states) or self._scheduler.has_pending_work()

    def has_pending_block_frees(self) -> bool:
        """Whether a store will give a block back that nobody else holds: sooner than a preemption pays."""
        pool = self._pool
        return pool is not None and any(
            pool.references(block) == 1
            for transfer in self._core.offloader.ledger.transfers.values()
            if transfer.direction is Direction.STORE
            for block in listed(transfer.device_blocks)
        )

    def take_events(self) -> list[Any]:
        return to_vllm_kv_events(self._scheduler.take_events())

    def take_stats(self) -> KvsmStats | None:
        return self._stats.take()

    def reset_cache(self) -> bool:
        self._free_states(self._states)
        self._states = {}
        return self._scheduler.reset_cache()

    def close(self) -> None:
        self._core.close()


def _core_config(options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> OffloadConfig:
    ranks = vllm_config.parallel_config.world_size
    chunk, block_bytes = options.blocks_per_chunk, block_bytes_of(kv_cache_config)
    return OffloadConfig(
        host_blocks=host_slots(options.cpu_bytes_to_use, ranks, block_bytes * chunk),
        device_blocks=kv_cache_config.num_blocks,
        block_bytes=block_bytes,
        workers=ranks,
        blocks_per_chunk=chunk,
        policy=options.policy,
        store_threshold=options.store_threshold,
        # Steps are no measure of time: an idle engine makes a thousand in a second, a busy one twenty. So a
        # match waits long for a block in flight, and a transfer is waited for as long as it takes: a rank
        # that does not report has died, and the engine with it.
        defer_ticks=256,
        transfer_ticks=0,
    )


def _scheduler_config(options: ConnectorOptions, vllm_config: Any, kv_cache_config: Any) -> SchedulerConfig:
    groups = groups_of(vllm_config, kv_cache_config)
    batched = vllm_config.scheduler_config.max_num_batched_tokens
    return SchedulerConfig(
        groups=groups,
        hash_tokens=hash_tokens_of(vllm_config, kv_cache_config),
        store=StoreMode(options.store),
        # vLLM goes on stepping as long as `has_pending_push_work`.
        last_step=LastStep.KEEP_STEPPING,
        prompt_only=options.prompt_only,
        lazy_target_blocks=options.lazy_target_blocks
        or 2 * sum(_step_blocks(group, batched) for group in groups),
        null_block=NULL_BLOCK,
    )


def _step_blocks(group: KVCacheGroup, tokens: int) -> int:
    """Most blocks of a group that a step with so many tokens takes out of the free queue."""
    if group.kind is GroupKind.MAMBA:
        return 2
    return -(-tokens // group.block_tokens) + 1


def _computed_blocks(output: Any, groups: Sequence[KVCacheGroup]) -> set[int]:
    """What the step writes."""
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
    output: Any, admitted: Container[str], states: Mapping[str, Sequence[BoundaryState]]
) -> StepOutput:
    cached = output.scheduled_cached_reqs
    # Those that are new, or come back from a preemption, have told all their blocks when they got them.
    grown = {
        name: blocks
        for name, blocks in zip(cached.req_ids, cached.new_block_ids)
        if blocks is not None and name not in cached.resumed_req_ids
    }
    return StepOutput(
        # What an admitted request has found on the device may be what another computes in this very step: it
        # is stored one step later.
        scheduled=[name for name in output.num_scheduled_tokens if name not in admitted],
        new_block_ids=grown,
        preempted=output.preempted_req_ids or (),
        boundary_states=states,
    )
