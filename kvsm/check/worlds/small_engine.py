"""The small engine: token by token, around the real `OffloadScheduler` and `Offloader`.

It has what decides whether offload is right, and nothing that makes it fast: block tables by group, a pool
with or without references, prefill in chunks, decoding with placeholders and drafts, steps that are decided
before the last one was computed, copies that end when they are told to. It shares no code with the ledger. It
raises `PropertyBroken` as soon as it sees one of these:

- no reuse in flight (S3): a device block is taken while a copy touches it;
- one release per hold (S4): a device block is released that nobody holds;
- no stale data (S14): a device block is stored whose content a load of an older epoch brought;
- correct bytes (S15): a step reads wrong bytes, because a copy was wrong or was not awaited;
- full offload (S16): a request with `do_remote_decode` is over, and a full chunk is neither on the host nor
  on its way there;
- one token left (S18): a match covers a whole prompt;
- a match that is shorter or longer than the longest hit, reported as S7 (`kvsm.check.worlds.longest_hit`);
- progress (S9): `run` never comes to rest.

It sees nothing if the bytes are right by accident: bytes of one key are equal, whichever copy wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from kvsm.check.worlds.crash import FlushedLog
from kvsm.check.worlds.longest_hit import check_answer, check_device_hit, expected_answer
from kvsm.check.worlds.lost_stores import check_kept, check_next_to_go
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
from kvsm.core.plan import TransferPlan
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
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadConfig
from kvsm.properties import Property
from kvsm.states.lease import LeaseState
from kvsm.states.request import RequestState
from kvsm.states.words import STATE_MASK
from kvsm.tiers.warm_restart import KILLED


def no_clock() -> int:
    """A clock that stands still."""
    return 0


def _device(engine: SmallEngine, names: Names) -> list[Any]:
    """Left out: the bytes of a block that nobody holds, caches or copies. `SmallWorkers.start` clears them
    before the block is used again."""
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

    This engine is a value that an explorer saves, renames and compares. The other one, in `kvsm.serving`,
    carries real bytes fast under virtual time. What both find in a cache is found by
    `kvsm.core.scheduler.hits.HitSearch`; here each hit is compared with `kvsm.check.worlds.longest_hit`.

    references: whether the offload core may hold device blocks.
    prefix_cache: whether blocks are found again on the device.
    asynchronous: whether a step is decided before the one before it was computed.
    drafts: how many tokens each decode step drafts; all are rejected.
    chunk_tokens: how many tokens one step prefills at most.
    checks_stores: whether it is checked that no store is lost (`kvsm.check.worlds.lost_stores`).
    log: where its events go; None: to a list.
    ledger: what the process before this one has left, taken over; None: nothing.
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
        filled(lambda engine, names: [names.requests[one.request_id] for one in engine.waiting]),
    ]
    running: Annotated[
        dict[str, SmallRequest],
        filled(lambda engine, names: [names.requests[name] for name in engine.running]),
    ]
    requests: Annotated[
        dict[str, SmallRequest],
        # Nothing of a request that is over is looked at.
        filled(lambda engine, names: [r.finished or compared(r, names) for r in engine.requests.values()]),
    ]
    """All requests that ever arrived. Their places are their names in a comparison."""
    sending: Annotated[dict[str, list[int]], filled(_sending)]
    """Finished requests whose blocks must not go yet."""
    preempted: Annotated[
        set[str],
        filled(lambda engine, names: sorted([names.requests[name] for name in engine.preempted])),
    ]
    """Preempted since the last step."""
    states: Annotated[
        dict[str, list[tuple[int, int, int]]],
        Dropped("only tests hand states over"),
    ]
    """The mamba states that the next step hands over, as in `StepOutput`."""
    computing: Annotated[
        list[ComputedRange],
        filled(lambda engine, names: each_compared(engine.computing, names)),
    ]
    """The step that the device computes now."""
    results: Annotated[list[StepResults], Remade(lambda _: [], "what the last action led to")]
    """What the scheduler answered to the workers' reports, so far."""
    plan: Annotated[TransferPlan, Remade(lambda _: TransferPlan(), "what the last action led to")]
    """The plan of the last step."""
    fresh: Annotated[list[int], Dropped("empty between two actions")]
    """Device blocks that were taken since the last step."""
    notes: Annotated[RunNotes, Remade(lambda _: RunNotes(), "a world is loaded without events")]
    """What the figures of its log must say."""

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
        config = OffloadConfig(
            host_blocks=host_blocks,
            device_blocks=device_blocks,
            workers=workers,
            block_tokens=self.config.alignment,
            **(core or {}),
        )
        super().__init__(groups, device_blocks, host_blocks * config.blocks_per_chunk, workers)
        self.log = MemoryLog() if log is None else log
        if ledger is None:
            self.core = Offloader(config, self.log, publisher=publisher, clock_ns=no_clock)
        else:
            self.core = Offloader.restarted(
                ledger, config, self.log, ended=KILLED, publisher=publisher, clock_ns=no_clock
            )
        self.scheduler = CheckedScheduler(self.core, self.config)
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

    # Requests.

    def arrive(self, request: SmallRequest) -> SmallRequest:
        """Let a request arrive. Returns it."""
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id} has arrived before")
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.scheduler.add_request(request)
        return request

    def finish(self, request: SmallRequest, *, aborted: bool = False) -> None:
        """End a request. Idempotent; legal at any time."""
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
            check_kept(self, request, frozenset(), self.log[decided:], Property.FULL_OFFLOAD)
        elif self.checks_stores and self.config.store is StoreMode.EAGER:
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
        """Take the request's blocks at once. Without references, this step waits for the copies."""
        if request.request_id not in self.running:
            return
        del self.running[request.request_id]
        self.preempted.add(request.request_id)
        self.pool.free_blocks([block for table in request.tables for block in table[::-1] if block != NULL])
        request.tables, request.loading, request.resumed = [], False, False
        request.num_computed_tokens = request.num_output_placeholders = 0
        self.waiting.insert(0, request)

    def unfinished(self) -> bool:
        """Whether a request is waiting or running: then the engine steps."""
        return bool(self.waiting or self.running)

    # One step.

    def step(self, *, accept: int | None = None, admit: bool = True, hand_on: bool = True) -> TransferPlan:
        """Decide a step, start its copies, compute, and hand on the reports.

        accept: how many of the matched tokens are accepted at most.
        admit: whether waiting requests may be admitted.
        hand_on: whether the reports that are there are handed on.
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
        self.plan = self.scheduler.build_connector_meta(
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
            # As in vLLM, which allocates for the next part of a session as for a request that waits.
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
            victims = [one for one in self.running.values() if not one.loading]
            if not victims or victims[-1] is request:
                return None
            self.preempt(victims[-1])
        added = [self.take(count) for count in lacking]
        for table, blocks in zip(request.tables, added):
            table += blocks
        return added

    def take(self, count: int) -> list[int]:
        """Take free blocks, to compute or load into."""
        blocks = self.pool.take(count)
        leases = self.core.ledger.leases.words
        under_copy = [block for block in blocks if self.references and leases[block]]
        if under_copy:
            raise PropertyBroken(
                Property.NO_REUSE_IN_FLIGHT, f"device blocks {under_copy} are taken, and a copy touches them"
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
        """How many tokens the host has behind `local`. A scheduler that is not kvsm's may offer less."""
        is_own = type(self.scheduler) in (OffloadScheduler, CheckedScheduler)
        expected = expected_answer(self.scheduler, request, request.cells, local) if is_own else None
        found, loads = self.scheduler.get_num_new_matched_tokens(request, local)
        if found is not None:
            self._check_match(request, local, found, loads)
        if is_own:
            check_answer(request, local, found, expected)
        return found

    def _note_admission(self, request: SmallRequest, on_device: int, on_host: int) -> None:
        """A request has got its blocks: what it had of them, if it reads the cache."""
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
        """A match that got blocks holds no slots any more: its load does, or nobody."""
        if self.core.ledger.requests[request.request_id].state is RequestState.MATCHED:
            message = f"request {request.request_id} has its blocks, and its match still holds slots"
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)

    def _local(self, request: SmallRequest) -> tuple[int, list[list[int]]]:
        """How many tokens of it the device has in all groups, and their blocks."""
        if not self.prefix_cache or request.skip_reading_prefix_cache:
            return 0, [[] for _ in self.groups]
        keys = [
            [one + group_suffix(index) for one in self._group_hashes(request, index)]
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
        """As in vLLM: nothing is touched before there is enough room. None without room."""
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

    # ComputedRange.

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
        """As in vLLM: tokens count as computed once their step is decided. A step that will sample has a
        placeholder for the sampled token."""
        for name, tokens in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += tokens
            if request.num_computed_tokens >= request.num_tokens + request.num_output_placeholders:
                request.num_output_placeholders += 1

    def compute(self) -> None:
        """Compute the step that was decided: read what is before, write, sample. Requests that are over or
        preempted by now are computed too."""
        computing, self.computing = self.computing, []
        for one in computing:
            request, known = one.request, min(one.last, one.request.num_tokens)
            self.read(one)
            for token in range(one.first, known):
                self.write(one, token, request.cells[token])
            over = request.finished or request.tables is not one.owned
            samples = one.last >= request.num_tokens and (over or request.num_output_placeholders > 0)
            for draft in range(self.drafts if samples else 0):
                self.write(one, one.last + draft, b"rejected")
            if over:
                continue
            if samples:
                request.num_output_placeholders -= 1
                request.sample()
            self._cache(request, known)
            if samples and request.done:
                self.end_part(request)

    def end_part(self, request: SmallRequest) -> None:
        """It has decoded all that was asked for. A session goes on with the next part of its prompt."""
        if not request.go_on():
            self.finish(request)

    def _cache(self, request: SmallRequest, computed: int) -> None:
        """Let its full blocks be found by their content."""
        for index, (group, table) in enumerate(zip(self.groups, request.tables)):
            for place, hashed in enumerate(self._group_hashes(request, index)):
                end = (place + 1) * group.block_tokens
                if end > computed or place >= len(table) or group.kind is GroupKind.MAMBA:
                    break
                if table[place] != NULL and self.prefix_cache:
                    self.pool.cache(table[place], hashed + group_suffix(index))

    # Reports, resets, rest.

    def hand_on(self, count: int | None = None) -> StepResults:
        """Give the workers' reports to the scheduler, and do what it says. count: only the first ones."""
        count = len(self.reports) if count is None else count
        reports, self.reports = self.reports[:count], self.reports[count:]
        self.notes.report(self.core.ledger, reports)
        before = len(self.log)
        results = self.scheduler.update_connector_output(reports)
        self.notes.reported(self.core.ledger, self.log[before:])
        self.take_results(results)
        return results

    def take_results(self, results: StepResults) -> None:
        """Do what the scheduler answered to reports. It says each thing once, so no answer may be dropped."""
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
                    # vLLM allocates again for a request that goes on after its load.
                    tables = [list(table) for table in request.tables]
                    self.scheduler.update_state_after_alloc(request, tables, 0)
                elif load.lost or not self.config.resumable:
                    self._keep_lost(request)
                    self.preempt(request)
        for name in results.finished_sending:
            self.pool.free_blocks(self.sending.pop(name)[::-1])

    def _keep_lost(self, request: SmallRequest) -> None:
        """Give nobody the blocks that a lost load may still write. With references the offload core does."""
        leases = self.core.ledger.leases.words
        held = [block for table in request.tables for block in table if block != NULL]
        lost = [block for block in held if leases[block] & STATE_MASK == LeaseState.RETIRED]
        if not self.references:
            self.pool.touch(lost)

    def check_nothing_is_held(self) -> None:
        """At rest device blocks are held only for lost copies, which may still write them."""
        retired = sum(word & STATE_MASK == LeaseState.RETIRED for word in self.core.ledger.leases.words)
        if sum(self.pool.references) > retired or len(self.sending) > retired:
            held = [block for block, count in enumerate(self.pool.references) if count]
            message = f"device blocks {held} are held, and nobody has them"
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)

    def reset(self) -> bool:
        """Empty the cache, on the device too as far as it is not in use."""
        self.pool.forget()
        self.notes.reset()
        return self.scheduler.reset_cache()

    def run(self, steps: int = 200) -> None:
        """Step until nothing is left to do. Every copy ends in the step after it began."""
        for _ in range(steps):
            self.carry_out_all()
            self.hand_on()
            if not (self.unfinished() or self.scheduler.has_pending_work()):
                return
            self.step()
        waiting, running = [one.request_id for one in self.waiting], list(self.running)
        raise PropertyBroken(
            Property.PROGRESS, f"after {steps} steps requests {waiting} wait, and {running} run"
        )
