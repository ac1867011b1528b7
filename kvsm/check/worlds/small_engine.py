"""The small engine: a token-by-token model of an engine around the real `OffloadScheduler` and `Offloader`.

It models everything that the correctness of offload depends on, and no performance: block tables by group, a
pool with or without references, chunked prefill, decoding with placeholders and drafts, asynchronous
scheduling, and copies that end when the caller says so. It shares no code with the ledger. It raises
`PropertyBroken` as soon as it observes one of these:

- no reuse in flight (S3): a device block is allocated while a copy touches it;
- one release per hold (S4): a device block is freed that has no reference;
- no stale data (S14): a device block is stored whose content was loaded before a reset;
- correct bytes (S15): a step reads wrong bytes, because a copy was wrong or was not awaited;
- full offload (S16): a request with `do_remote_decode` finishes while one of its full chunks is neither on
  the host nor being stored;
- one token left (S18): a match covers a whole prompt;
- stored, so served (S19) and a match holds what it counts (S7): a match is shorter, or longer, than the
  longest hit (`kvsm.check.worlds.longest_hit`);
- progress (S9): `run` does not come to rest.

A wrong copy of the right content is not detected: the bytes of a key are equal, whichever copy wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from kvsm.check.worlds.check_counts import count_case
from kvsm.check.worlds.crash import FlushedLog
from kvsm.check.worlds.longest_hit import check_answer, check_device_hit, expected_answer
from kvsm.check.worlds.lost_stores import check_kept, check_next_to_go, refused_keys
from kvsm.check.worlds.run_figures import RunNotes
from kvsm.check.worlds.small_pool import SmallPool
from kvsm.check.worlds.small_request import HASH_TOKENS, NULL, Cell, SmallRequest, first_read
from kvsm.check.worlds.small_workers import ComputedRange, SmallWorkers, of_each
from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.canonical import (
    FIXED,
    PART,
    Dropped,
    Names,
    Remade,
    Seen,
    compared,
    declared,
    each_compared,
    filled,
)
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferPlan, WorkerReport
from kvsm.core.scheduler import (
    CheckedScheduler,
    GroupKind,
    KVCacheGroup,
    OffloadScheduler,
    SchedulerConfig,
    StepOutput,
    StepResults,
    StoreMode,
)
from kvsm.core.scheduler.groups import WINDOWED, group_suffix
from kvsm.core.scheduler.hits import HitSearch
from kvsm.core.scheduler.protocols import TierBelow
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadConfig
from kvsm.properties import Property
from kvsm.states.lease import LeaseState
from kvsm.states.request import RequestState
from kvsm.states.words import STATE_MASK
from kvsm.tiers.warm_restart import KILLED


def no_clock() -> int:
    """A clock that always reads 0."""
    return 0


def _device(engine: SmallEngine, names: Names) -> list[Any]:
    """The bytes of each device block; None for a block with no references, no cached content and no lease.

    `SmallWorkers.start` clears such a block before it is used again.
    """
    device, references, caches = engine.device, engine.pool.references, engine.pool.caches
    leases = names.ledger.leases.words
    return [
        of_each(device[block], names) if references[block] or block in caches or leases[block] else None
        for block in names.blocks
    ]


def _sending(engine: SmallEngine, names: Names) -> list[Any]:
    return [(names.requests[name], names.tables([held])) for name, held in engine.sending.items()]


@declared
class SmallEngine(SmallWorkers):
    """One engine, its workers and its offload core.

    This engine is a value that an explorer saves, renames and compares. The engine of `kvsm.serving` copies
    real bytes fast in virtual time instead. Both find hits with `kvsm.core.scheduler.hits.HitSearch`; here
    each hit is compared with `kvsm.check.worlds.longest_hit`.

    references: whether the offload core may hold references on device blocks.
    prefix_cache: whether the device has a prefix cache.
    asynchronous: whether a step is scheduled before the previous one is computed.
    drafts: how many tokens each decode step drafts; all are rejected.
    chunk_tokens: the most tokens that one step computes for a request.
    checks_stores: whether to check that no store is lost (`kvsm.check.worlds.lost_stores`).
    log: the log of its events; None for a new one in memory.
    ledger: the ledger of an earlier process, to restart from; None for an empty start.
    core: more fields of `OffloadConfig`.
    scheduler: more fields of `SchedulerConfig`.
    """

    core: Annotated[Offloader, PART]
    scheduler: Annotated[OffloadScheduler, PART]
    pool: Annotated[SmallPool, PART]
    log: Annotated[MemoryLog, PART]
    config: Annotated[SchedulerConfig, FIXED]
    references: Annotated[bool, FIXED]
    prefix_cache: Annotated[bool, FIXED]
    asynchronous: Annotated[bool, FIXED]
    drafts: Annotated[int, FIXED]
    chunk_tokens: Annotated[int, FIXED]
    checks_stores: Annotated[bool, FIXED]
    device: Annotated[list[list[list[Cell]]], Seen(_device)]
    waiting: Annotated[
        list[SmallRequest],
        filled(lambda engine, names: [names.requests[request.request_id] for request in engine.waiting]),
    ]
    running: Annotated[
        dict[str, SmallRequest],
        filled(lambda engine, names: [names.requests[name] for name in engine.running]),
    ]
    requests: Annotated[
        dict[str, SmallRequest],
        # Of a finished request nothing is read any more.
        filled(lambda engine, names: [r.finished or compared(r, names) for r in engine.requests.values()]),
    ]
    """All requests that have ever arrived. In comparisons they are named by their position."""
    sending: Annotated[dict[str, list[int]], filled(_sending)]
    """Finished request -> its device blocks, which must not be freed yet."""
    preempted: Annotated[
        set[str],
        filled(lambda engine, names: sorted([names.requests[name] for name in engine.preempted])),
    ]
    """Requests that were preempted since the last step."""
    states: Annotated[
        dict[str, list[tuple[int, int, int]]],
        Dropped("empty between two actions"),
    ]
    """`StepOutput.boundary_states` of the next step (mamba)."""
    computing: Annotated[
        list[ComputedRange],
        filled(lambda engine, names: each_compared(engine.computing, names)),
    ]
    """The step that is scheduled and not computed yet."""
    results: Annotated[list[StepResults], Remade(lambda _: [], "an outcome of the last action")]
    """The scheduler's answers to the workers' reports so far."""
    plan: Annotated[TransferPlan, Remade(lambda _: TransferPlan(), "an outcome of the last action")]
    """The plan of the last step."""
    fresh: Annotated[list[int], Dropped("empty between two actions")]
    """Device blocks that were allocated since the last step."""
    notes: Annotated[RunNotes, Remade(lambda _: RunNotes(), "a world is loaded without events")]
    """The engine's own record of the run, to compare with the figures of its log."""

    def __init__(
        self,
        groups: Sequence[KVCacheGroup] = (KVCacheGroup(HASH_TOKENS),),
        device_blocks: int = 32,
        host_blocks: int = 32,
        workers: int = 1,
        *,
        references: bool = True,
        prefix_cache: bool = True,
        asynchronous: bool = False,
        drafts: int = 0,
        chunk_tokens: int = 64,
        checks_stores: bool = False,
        publisher: Publisher | None = None,
        log: MemoryLog | None = None,
        ledger: Ledger | None = None,
        core: Mapping[str, Any] | None = None,
        **scheduler: Any,
    ) -> None:
        self.config = SchedulerConfig(groups=tuple(groups), hash_tokens=HASH_TOKENS, **scheduler)
        config = self._core_config(
            OffloadConfig(
                host_blocks=host_blocks,
                device_blocks=device_blocks,
                workers=workers,
                block_tokens=self.config.alignment,
                **(core or {}),
            )
        )
        super().__init__(groups, device_blocks, host_blocks * config.blocks_per_chunk, workers)
        self.log = MemoryLog() if log is None else log
        self.core = self._make_core(config, publisher, ledger)
        self.scheduler = CheckedScheduler(self.core, self.config, self._lower_tier())
        self.pool = SmallPool(device_blocks)
        if references:
            self.scheduler.bind_gpu_block_pool(self.pool)
        self.references, self.prefix_cache = references, prefix_cache
        self.asynchronous, self.drafts, self.chunk_tokens = asynchronous, drafts, chunk_tokens
        self.checks_stores = checks_stores
        self.waiting, self.running, self.requests = [], {}, {}
        self.results, self.plan = [], TransferPlan()
        self.sending, self.preempted, self.states = {}, set(), {}
        self.computing, self.fresh = [], []
        self.notes = RunNotes()

    def _core_config(self, config: OffloadConfig) -> OffloadConfig:
        """The configuration of the core. An engine with a disk changes it."""
        return config

    def _make_core(
        self, config: OffloadConfig, publisher: Publisher | None, ledger: Ledger | None
    ) -> Offloader:
        """Make the core, which appends its events to `log`."""
        if ledger is None:
            return Offloader(config, self.log, publisher=publisher, clock_ns=no_clock)
        return Offloader.restarted(
            ledger, config, self.log, ended=KILLED, publisher=publisher, clock_ns=no_clock
        )

    def _lower_tier(self) -> TierBelow | None:
        """The tier below the host of the core that was just made; None: there is none."""
        return None

    # Requests.

    def arrive(self, request: SmallRequest) -> SmallRequest:
        """Let a request arrive, and return it."""
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id} has arrived before")
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.scheduler.add_request(request)
        return request

    def finish(self, request: SmallRequest, *, aborted: bool = False) -> None:
        """Finish a request. Idempotent; legal at any time."""
        blocks, decided = request.tables, len(self.log)
        had = frozenset(self.core.ledger.index) if self.checks_stores else frozenset()
        keep, _ = self.scheduler.request_finished(request, blocks, aborted=aborted)
        if request.finished:
            if keep:
                raise PropertyBroken(
                    Property.LEGAL_CALLS, f"request {request.request_id} finishes again, and keeps blocks"
                )
            return
        request.finished, request.aborted = True, aborted
        if request.kv_transfer_params and request.kv_transfer_params.get("do_remote_decode"):
            count_case(Property.FULL_OFFLOAD, "finished requests with do_remote_decode")
            check_kept(self, request, frozenset(), self.log[decided:], Property.FULL_OFFLOAD)
        elif (
            self.checks_stores
            and self.config.store is StoreMode.EAGER
            and not refused_keys(request.request_id, self.log)
        ):
            check_kept(self, request, had, self.log[decided:], Property.STORED_ONCE)
        if request in self.waiting:
            self.waiting.remove(request)
        self.running.pop(request.request_id, None)
        held = [block for table in blocks for block in table if block != NULL]
        if keep:
            self.sending[request.request_id] = held
        else:
            self.pool.free_blocks(held[::-1])
        request.tables = []

    def preempt(self, request: SmallRequest) -> None:
        """Preempt a running request: free its blocks at once. Without references, the next step waits for
        copies that touch them."""
        if request.request_id not in self.running:
            return
        del self.running[request.request_id]
        self.preempted.add(request.request_id)
        self.pool.free_blocks([block for table in request.tables for block in table[::-1] if block != NULL])
        request.tables, request.loading, request.resumed = [], False, False
        request.num_computed_tokens = request.num_output_placeholders = 0
        self.waiting.insert(0, request)

    def unfinished(self) -> bool:
        """Whether a request is waiting or running. If so, the engine steps."""
        return bool(self.waiting or self.running)

    # One step.

    def step(self, *, accept: int | None = None, admit: bool = True, hand_on: bool = True) -> TransferPlan:
        """Schedule a step, start its copies, compute, and pass on reports.

        accept: the most matched tokens that are accepted; None for no limit.
        admit: whether waiting requests may be admitted.
        hand_on: whether the present reports are passed on to the scheduler.
        """
        new_blocks: dict[str, list[list[int]]] = {}
        scheduled: dict[str, int] = {}
        for request in list(self.running.values()):
            if request.request_id in self.running and not request.loading:
                self._schedule(request, scheduled, new_blocks)
        if admit:
            self._admit(scheduled, accept)
        preempted, self.preempted = self.preempted, set()
        states, self.states = self.states, {}
        self.plan = self._plan(
            StepOutput(
                scheduled=list(scheduled),
                new_block_ids=new_blocks,
                preempted=preempted,
                boundary_states=states,
                num_scheduled_tokens=scheduled,
            )
        )
        if self.checks_stores:
            check_next_to_go(self)
        self._advance(scheduled)
        if self.asynchronous:
            self.compute()
            self._start()
            self.computing = self._ranges(scheduled)
        else:
            self._start()
            self.computing = self._ranges(scheduled)
            self.compute()
        if hand_on:
            self.hand_on()
        return self.plan

    def _plan(self, output: StepOutput) -> TransferPlan:
        """Let the scheduler plan the copies of a step."""
        return self.scheduler.build_connector_meta(output)

    def _start(self) -> None:
        fresh, self.fresh = self.fresh, []
        if isinstance(self.log, FlushedLog):
            self.log.check_leaving(self.plan)
        self.start(self.plan, self.core.ledger.epoch, fresh)
        for job in (*self.plan.loads, *self.plan.stores):
            self.notes.leave(job, self.workers)

    def _schedule(
        self, request: SmallRequest, scheduled: dict[str, int], new_blocks: dict[str, list[list[int]]]
    ) -> None:
        remaining = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        if remaining <= 0:
            if request.done:
                return
            remaining = 1
        tokens = min(self.chunk_tokens, remaining)
        decodes = request.num_computed_tokens + tokens >= request.num_tokens
        self._drop_left_window(request)
        end = request.num_computed_tokens + tokens + (self.drafts if decodes else 0)
        added = self._grow(request, end)
        if added is None:
            return
        if request.resumed:
            # As in vLLM, which allocates for the next part of a session as for a waiting request.
            request.resumed = False
            self.scheduler.update_state_after_alloc(request, [list(table) for table in request.tables], 0)
        elif any(added):
            new_blocks[request.request_id] = added
        scheduled[request.request_id] = tokens

    def _grow(self, request: SmallRequest, end: int) -> list[list[int]] | None:
        lacking = [
            max(0, -(-end // group.block_tokens) - len(table))
            for group, table in zip(self.groups, request.tables)
        ]
        while sum(lacking) > len(self.pool.queue):
            victims = [running for running in self.running.values() if not running.loading]
            if not victims or victims[-1] is request:
                return None
            self.preempt(victims[-1])
        added = [self.take(count) for count in lacking]
        for table, blocks in zip(request.tables, added):
            table += blocks
        return added

    def take(self, count: int) -> list[int]:
        """Allocate free device blocks."""
        blocks = self.pool.take(count)
        leases = self.core.ledger.leases.words
        under_copy = [block for block in blocks if self.references and leases[block]]
        if under_copy:
            raise PropertyBroken(
                Property.NO_REUSE_IN_FLIGHT,
                f"device blocks {under_copy} are allocated while a copy touches them",
            )
        self.fresh += blocks
        return blocks

    def _drop_left_window(self, request: SmallRequest) -> None:
        for group, table in zip(self.groups, request.tables):
            if group.kind in WINDOWED:
                first = first_read(group, request.num_computed_tokens) // group.block_tokens
                for place in range(min(first, len(table))):
                    if table[place] != NULL:
                        self.pool.free_blocks([table[place]])
                        table[place] = NULL

    def _admit(self, scheduled: dict[str, int], accept: int | None) -> None:
        for request in list(self.waiting):
            local, blocks = self._local(request)
            check_device_hit(self, request, local)
            found = self._ask(request, local)
            if found is None:
                continue
            alignment = self.config.alignment
            external = found if accept is None else min(found, accept - accept % alignment)
            end = local + external
            tokens = 0 if external else min(self.chunk_tokens, request.num_tokens - local)
            tables = self._allocate(blocks, end, end + tokens)
            if tables is None:
                break
            self.waiting.remove(request)
            self.running[request.request_id] = request
            request.tables, request.num_computed_tokens = tables, end
            request.loading = external > 0
            self.scheduler.update_state_after_alloc(request, [list(table) for table in tables], external)
            self._note_admission(request, local // alignment, external // alignment)
            self._check_match_is_over(request)
            if tokens:
                scheduled[request.request_id] = tokens

    def _ask(self, request: SmallRequest, local: int) -> int | None:
        """The tokens to load after `local`; None: wait. Only kvsm's scheduler must offer the longest hit."""
        is_own = type(self.scheduler) in (OffloadScheduler, CheckedScheduler)
        expected = expected_answer(self.scheduler, request, request.cells, local) if is_own else None
        found, loads = self.scheduler.get_num_new_matched_tokens(request, local)
        if found is not None:
            self._check_match(request, local, found, loads)
        if is_own:
            check_answer(request, local, found, expected)
        return found

    def _note_admission(self, request: SmallRequest, on_device: int, on_host: int) -> None:
        """Record the admission of a request, with its hits, if it reads the cache."""
        if not request.skip_reading_prefix_cache:
            asked = request.num_tokens // self.config.alignment
            had = request.request_id, asked, on_device, on_host, request.admitted
            self.notes.admit(self.core.ledger.seq, *had)
        request.admitted = True

    def _check_match(self, request: SmallRequest, local: int, found: int, loads: bool) -> None:
        if loads != (found > 0):
            message = f"request {request.request_id}: {found} tokens match, and loads is {loads}"
            raise PropertyBroken(Property.MATCH_HOLDS, message)
        if found and local + found >= request.num_tokens:
            message = f"request {request.request_id}: all of its {request.num_tokens} tokens match"
            raise PropertyBroken(Property.ONE_TOKEN_LEFT, message)

    def _check_match_is_over(self, request: SmallRequest) -> None:
        """Check that a request with device blocks pins no slots: its match is now a load, or released."""
        if self.core.ledger.requests[request.request_id].state is RequestState.MATCHED:
            message = f"request {request.request_id} has its blocks, and its match still holds slots"
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)

    def _local(self, request: SmallRequest) -> tuple[int, list[list[int]]]:
        """The request's device hit: its length in tokens, and the block table of each group."""
        if not self.prefix_cache or request.skip_reading_prefix_cache:
            return 0, [[] for _ in self.groups]
        keys = [
            [hashed + group_suffix(index) for hashed in self._group_hashes(request, index)]
            for index in range(len(self.groups))
        ]
        lookup = HitSearch(self.config, 1, keys, 0)
        end = lookup.longest_hit(request.num_tokens - 1, self.pool.cached.__contains__)
        blocks = []
        for index, (first, last) in enumerate(lookup.needed(end)):
            blocks.append([NULL] * first + [self.pool.cached[key] for key in keys[index][first:last]])
        return (end, blocks) if end else (0, [[] for _ in self.groups])

    def _group_hashes(self, request: SmallRequest, index: int) -> list[bytes]:
        stride = self.groups[index].block_tokens // HASH_TOKENS
        return request.block_hashes[stride - 1 :: stride]

    def _allocate(self, hits: list[list[int]], end: int, total: int) -> list[list[int]] | None:
        """Block tables for tokens up to `total`; None without room, with nothing changed, as in vLLM.

        hits: the tables of the device hit.
        end: the end of the tokens that the device has or the load brings.
        """
        tables = []
        for group, table in zip(self.groups, hits):
            first = first_read(group, end) // group.block_tokens
            wanted = -(-max(total, end) // group.block_tokens)
            kept = [block if place >= first else NULL for place, block in enumerate(table)]
            skipped = [NULL] * max(0, min(first, wanted) - len(kept))
            tables.append((kept + skipped, wanted - len(kept) - len(skipped)))
        held = [block for table, _ in tables for block in table if block != NULL]
        idle = sum(self.pool.references[block] == 0 for block in held)
        if sum(count for _, count in tables) > len(self.pool.queue) - idle:
            return None
        self.pool.touch(held)
        return [table + self.take(count) for table, count in tables]

    # Computing.

    def _ranges(self, scheduled: Mapping[str, int]) -> list[ComputedRange]:
        ranges = []
        for name, tokens in scheduled.items():
            request = self.requests[name]
            end = request.num_computed_tokens
            ranges.append(
                ComputedRange(request, end - tokens, end, request.tables, [*map(list, request.tables)])
            )
        return ranges

    def _advance(self, scheduled: Mapping[str, int]) -> None:
        """Count the scheduled tokens as computed, as vLLM does. A step that will sample adds a placeholder
        for the sampled token."""
        for name, tokens in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += tokens
            if request.num_computed_tokens >= request.num_tokens + request.num_output_placeholders:
                request.num_output_placeholders += 1

    def compute(self) -> None:
        """Compute the scheduled step: check the KV that it reads, write KV, sample. As on a device, it also
        computes for requests that were finished or preempted after it was scheduled."""
        computing, self.computing = self.computing, []
        for step in computing:
            request, known = step.request, min(step.last, step.request.num_tokens)
            self.read(step)
            for token in range(step.first, known):
                self.write(step, token, request.cells[token])
            over = request.finished or request.tables is not step.owned
            samples = step.last >= request.num_tokens and (over or request.num_output_placeholders > 0)
            for draft in range(self.drafts if samples else 0):
                self.write(step, step.last + draft, b"rejected")
            if over:
                continue
            if samples:
                request.num_output_placeholders -= 1
                request.sample()
            self._cache(request, known)
            if samples and request.done:
                self.end_part(request)

    def end_part(self, request: SmallRequest) -> None:
        """All requested tokens are decoded: continue with the next part of a session, or finish."""
        if not request.begin_next_part():
            self.finish(request)

    def _cache(self, request: SmallRequest, computed: int) -> None:
        """Enter the request's full blocks, up to token `computed`, in the device's prefix cache."""
        for index, (group, table) in enumerate(zip(self.groups, request.tables)):
            for place, hashed in enumerate(self._group_hashes(request, index)):
                end = (place + 1) * group.block_tokens
                if end > computed or place >= len(table) or group.kind is GroupKind.MAMBA:
                    break
                if table[place] != NULL and self.prefix_cache:
                    self.pool.cache(table[place], hashed + group_suffix(index))

    # Reports, resets, rest.

    def hand_on(self, count: int | None = None) -> StepResults:
        """Pass reports to the scheduler, and apply its answer. count: the first ones only; None for all."""
        count = len(self.reports) if count is None else count
        reports, self.reports = self.reports[:count], self.reports[count:]
        return self.take_reports(reports)

    def take_reports(self, reports: list[WorkerReport]) -> StepResults:
        """Give these reports to the scheduler, and apply its answer."""
        self.notes.report(self.core.ledger, reports)
        before = len(self.log)
        results = self.scheduler.update_connector_output(reports)
        self.notes.reported(self.core.ledger, self.log[before:])
        self.take_results(results)
        return results

    def take_results(self, results: StepResults) -> None:
        """Apply the scheduler's answer. It contains each result only once, so none may be dropped."""
        self.results.append(results)
        for load in results.loads:
            request = self.requests[load.request]
            if load.lost and load.num_computed_tokens:
                message = f"{load} counts tokens, and the request must give up the blocks that hold them"
                raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, message)
            if request.loading and not request.finished:
                request.loading = False
                request.num_computed_tokens = load.num_computed_tokens
                if load.good:
                    self._cache(request, load.num_computed_tokens)
                    # vLLM calls this again for a request that continues after its load.
                    tables = [list(table) for table in request.tables]
                    self.scheduler.update_state_after_alloc(request, tables, 0)
                elif load.lost or not self.config.resumable:
                    self._keep_lost(request)
                    self.preempt(request)
        for name in results.finished_sending:
            self.pool.free_blocks(self.sending.pop(name)[::-1])

    def _keep_lost(self, request: SmallRequest) -> None:
        """Never free blocks that a lost load may still write. With references the offload core holds them."""
        leases = self.core.ledger.leases.words
        held = [block for table in request.tables for block in table if block != NULL]
        lost = [block for block in held if leases[block] & STATE_MASK == LeaseState.RETIRED]
        if not self.references:
            self.pool.touch(lost)

    def check_nothing_is_held(self) -> None:
        """Check at rest that device blocks are held only for lost copies, which may still write them."""
        retired = sum(word & STATE_MASK == LeaseState.RETIRED for word in self.core.ledger.leases.words)
        if sum(self.pool.references) > retired or len(self.sending) > retired:
            held = [block for block, count in enumerate(self.pool.references) if count]
            message = f"device blocks {held} are held at rest, but no request has them"
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)

    def reset(self) -> bool:
        """Reset the cache, and forget the device's prefix cache."""
        self.pool.forget()
        self.notes.reset()
        return self.scheduler.reset_cache()

    def run(self, steps: int = 200) -> None:
        """Step until rest. Every copy ends in the step after it began. steps: the most steps."""
        for _ in range(steps):
            self.carry_out_all()
            self.hand_on()
            if not (self.unfinished() or self.scheduler.has_pending_work()):
                return
            self.step()
        waiting, running = [request.request_id for request in self.waiting], list(self.running)
        raise PropertyBroken(
            Property.PROGRESS, f"after {steps} steps requests {waiting} wait, and {running} run"
        )
