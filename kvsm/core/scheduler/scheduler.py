"""The calls of an engine's scheduler, under vLLM's names, and how each drives the offload core.

One step of the engine, from top to bottom:

1. `update_connector_output`     takes the workers' reports: which loads have ended, and how;
2. `request_finished`            stores the last confirmed blocks of a request, under lease;
3. `get_num_new_matched_tokens`  pins the longest hit that all groups serve, or lets the request wait;
4. `update_state_after_alloc`    plans the load into the engine's blocks;
5. `build_connector_meta`        plans what this step stores; all plans leave as one `TransferPlan`.

vLLM calls `update_connector_output` last in a step: the same cycle with another start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kvsm.core.kv_events import KVCacheEvent
from kvsm.core.offloader import Ended, LogFlush, Offloader, PendingHit
from kvsm.core.offloader.arguments import flag
from kvsm.core.plan import TransferJob, TransferPlan, WorkerReport
from kvsm.core.scheduler.device_blocks import DeviceBlocks
from kvsm.core.scheduler.engine_arguments import (
    are_known,
    block_tables,
    device_pool,
    engine_name,
    new_blocks,
    token_count,
    worker_reports,
)
from kvsm.core.scheduler.free_queue import FreeQueueWalk
from kvsm.core.scheduler.groups import KeyLayout, LastStep, SchedulerConfig, StoreMode
from kvsm.core.scheduler.hits import HitSearch, hit_limit
from kvsm.core.scheduler.load_targets import load_targets
from kvsm.core.scheduler.offers import StoreOffers
from kvsm.core.scheduler.protocols import DevicePool, EngineRequest, StepOutput, TierBelow
from kvsm.core.scheduler.scheduler_state import LoadEnded, SchedulerState, StepResults
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.errors import ConfigError, LimitReached
from kvsm.events import LOAD, STORE
from kvsm.ids import IdArray, listed
from kvsm.states.request import RequestState

_LOGGER = logging.getLogger("kvsm")

_NOTHING, _NO_RESULTS = TransferPlan(), StepResults()  # of most steps of a decode
_REPORTS_TAKEN = LogFlush.REPORTS_TAKEN


class OffloadScheduler:
    """Drives an offload core for one engine.

    An engine that counts references to its blocks binds its pool. To any other engine the calls return which
    finished requests' blocks may be freed, and which copies to wait for before it reuses blocks.
    """

    def __init__(self, offloader: Offloader, config: SchedulerConfig, below: TierBelow | None = None) -> None:
        """below: the tier below the host, or None.

        Raises `ConfigError` if the two configurations do not fit together.
        """
        config.check(offloader.config)
        self.offloader, self.config, self.below = offloader, config, below
        self.device_blocks = DeviceBlocks(offloader, config.null_block)
        self.walk: FreeQueueWalk | None = None
        self.offers = StoreOffers(offloader, config, self.device_blocks)
        self.state = SchedulerState({}, [], {}, [], set())
        self._blocks_per_chunk = offloader.config.blocks_per_chunk
        self._layout = KeyLayout.of(config, self._blocks_per_chunk)
        self._block_tokens = config.alignment
        self._chunk_tokens = self._block_tokens * self._blocks_per_chunk
        self._is_lazy = config.store is StoreMode.LAZY
        self._needs_first_key = below is None and config.resumable
        """Whether every hit needs the first chunk that the device lacks, on the host."""

    # Setup, and the arrival of requests.

    def bind_gpu_block_pool(self, pool: DevicePool) -> None:
        """Bind the pool of an engine that counts references to its blocks. Copies hold references in it.

        Raises `WrongArgument` if the pool lacks a method of `DevicePool`, or if transfers are live already.
        """
        device_pool(pool, self.offloader.ledger.transfers)
        self.device_blocks.pool = pool
        if self._is_lazy:
            self.walk = FreeQueueWalk(self.offloader, pool, self.config.lazy_target_blocks)

    def add_request(self, request: EngineRequest) -> None:
        """Note that a request has arrived. The engine runs more steps until it is finished."""
        tracked = self._track("add_request", request)
        if tracked.request is not request:
            _LOGGER.warning(
                "request %r arrives, but an unfinished request has the same name: kvsm follows only the "
                "older one. Call request_finished for it first, or give each unfinished request its own name",
                tracked.name,
            )

    def _track(self, call: str, request: EngineRequest) -> TrackedRequest:
        name = request.request_id
        if type(name) is not str:
            name = engine_name(call, request)
        tracked = self.state.tracked.get(name)
        if tracked is None:
            tracked = TrackedRequest(request, self.config, self._layout)
            self.offloader.arrive(name)
            self.state.tracked[name] = tracked
        return tracked

    # Matching and loading.

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded behind the device's, and whether the load is asynchronous.

        None: keys that the request needs are in flight; call again in a later step. One token is left to
        compute (S18). The hits are pinned. A new call replaces the last result and its pins.
        """
        call = "get_num_new_matched_tokens"
        if type(num_computed_tokens) is not int or num_computed_tokens < 0:
            num_computed_tokens = token_count(call, "num_computed_tokens", num_computed_tokens)
        tracked, core = self._track(call, request), self.offloader
        name = tracked.name
        if any(tracked.tables):
            # A request with blocks that is matched again was preempted. The step's output may say so later.
            self._preempt(tracked)
        tracked.answered = False
        if core.waits_for(name) is not None:
            return None, False
        tracked.local = num_computed_tokens
        limit = hit_limit(request.num_tokens, num_computed_tokens, tracked.max_load_tokens)
        if not self._may_load(tracked, limit):
            if core.may_match(name):
                return self._pin(tracked, (), num_computed_tokens, None)
            tracked.note_answer(None)
            return 0, False
        missed = self._missed_at_once(tracked, limit)
        if missed is not None:
            return self._pin(tracked, (), num_computed_tokens, missed)
        lookup = HitSearch(self.config, self._blocks_per_chunk, tracked.chunk_keys(), num_computed_tokens)
        index, readable = core.ledger.index, core.ledger.readable
        if self.below is not None:
            brought = self._fetch(self.below, tracked, lookup, limit)
            if brought is not None and core.defer(name, brought):
                return None, False
        end = lookup.longest_hit(limit, index.__contains__, partial(tracked.find_prefix, index))
        if end == num_computed_tokens:
            return self._pin(tracked, (), end, lookup.lacking)
        slots = lookup.slots(end, index)
        if self._declines(tracked, len(slots), end):
            return self._pin(tracked, (), num_computed_tokens, None)
        awaited = core.in_flight(slots)
        if awaited is not None:
            if core.defer(name, awaited):
                return None, False

            def known(key: bytes) -> bool:
                return key in index and readable(index[key])

            end = lookup.longest_hit(limit, known)
            slots = lookup.slots(end, index)
            if self._declines(tracked, len(slots), end):
                return self._pin(tracked, (), num_computed_tokens, None)
        if not len(slots):
            # No layer reads a token before `end`, so there is nothing to load.
            end = num_computed_tokens
        return self._pin(tracked, slots, end, lookup.lacking)

    def _missed_at_once(self, tracked: TrackedRequest, limit: int) -> bytes | None:
        """Return the first key behind the device's if no hit can begin because it is missing, as in most
        misses. None if a search must tell."""
        local, first = tracked.local, tracked.local // self._chunk_tokens
        if not self._needs_first_key or limit - limit % self._block_tokens <= local:
            return None
        found = tracked.find_prefix(self.offloader.ledger.index, 0, first, first + 1)
        return None if found is None or len(found) else tracked.make_keys(0, first, first + 1)[0]

    def _declines(self, tracked: TrackedRequest, slots: int, end: int) -> bool:
        """Whether the request computes the tokens of its hit up to `end`, because loading its `slots` slots
        is expected to take at least as long. Blocks that another engine computed for it are always loaded.

        A waiting request asks in each step. Its first decision holds until it gets device blocks, or until
        its hit is no longer slow.
        """
        core, blocks, tokens = self.offloader, slots * self._blocks_per_chunk, end - tracked.local
        if tracked.remote_prefill is not None or not slots or not core.is_slow_hit(blocks, tokens):
            tracked.declined = None
        elif tracked.declined is None:
            tracked.declined = core.declines(tracked.name, blocks, tokens)
        return tracked.declined is True

    def _fetch(self, below: TierBelow, tracked: TrackedRequest, lookup: HitSearch, limit: int) -> int | None:
        """Let the tier below fetch keys for a longer hit. Returns the transfer to wait for, or None."""
        index = self.offloader.ledger.index
        end = lookup.longest_hit(limit, lambda key: key in index or below.has(key))
        if end <= tracked.local:
            return None
        counts = self._counts(tracked, end)
        keys, parents = lookup.needed_keys(end), tuple(lookup.parents(end).items())
        return below.fetch(PendingHit(tracked.name, keys, lookup.lacking, *counts, parents=parents))

    def _may_load(self, tracked: TrackedRequest, limit: int) -> bool:
        local, core = tracked.local, self.offloader
        return (
            limit > local
            and not tracked.request.skip_reading_prefix_cache
            and local % self._block_tokens == 0
            and core.may_match(tracked.name)
            and not core.ledger.draining()
            and len(core.ledger.transfers) < core.config.max_live_transfers
        )

    def _pin(
        self, tracked: TrackedRequest, slots: IdArray, end: int, missed: bytes | None
    ) -> tuple[int, bool]:
        tracked.note_answer(missed)
        try:
            self._record_match(tracked, slots, end, missed)
        except LimitReached:
            # Blocks that cannot be pinned are not counted (a match holds what it counts, S7).
            return 0, False
        return end - tracked.local, end > tracked.local

    def _record_match(
        self, tracked: TrackedRequest, slots: IdArray | Sequence[int], end: int, missed: bytes | None
    ) -> None:
        """Pin the slots of a hit up to token `end`. missed: the key that ended the hit, or None."""
        self.offloader.pin(tracked.name, slots, missed, *self._counts(tracked, end))

    def _counts(self, tracked: TrackedRequest, end: int) -> tuple[int, int, int]:
        """Return the block counts of a match up to token `end`: of the request, on device, on host."""
        size, local = self._block_tokens, tracked.local
        return tracked.request.num_tokens // size, local // size, (end - local) // size

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Note the blocks that a request was given, and plan its load.

        block_ids: all its blocks, by group.
        num_external_tokens: how many tokens of its match are loaded. The engine may accept fewer than were
            matched.

        A load that cannot be planned is reported as a failed load (failure is not success, S6).
        """
        call = "update_state_after_alloc"
        if type(num_external_tokens) is not int or num_external_tokens < 0:
            num_external_tokens = token_count(call, "num_external_tokens", num_external_tokens)
        block_ids = block_tables(call, "block_ids", block_ids, len(self.config.groups))
        tracked, core = self._track(call, request), self.offloader
        end = tracked.local + num_external_tokens
        self._take_over_blocks(tracked, block_ids, end)
        if tracked.answered:
            core.admit(tracked.name, *self._counts(tracked, end), tracked.missed, tracked.admitted)
            tracked.answered, tracked.admitted, tracked.declined = False, True, None
        if not num_external_tokens:
            tracked.forget_asked_keys()
            core.release(tracked.name)
            return
        tracked.trusted = tracked.local
        self.state.promises[tracked.name] = tracked.local, end
        decided = core.ledger.seq
        job = self._plan_load(tracked, end)
        tracked.forget_asked_keys()
        if job is None and core.ledger.seq == decided:
            self._warn_without_match(tracked.name, num_external_tokens)
        if job is None:
            core.release(tracked.name)
            # A store may still read these blocks, which can be the reason for the missing load.
            self.device_blocks.rewrite(self._blocks_between(tracked, tracked.local, end))
            self._note_load_end(tracked.name, good=False)
            return
        self._add_to_plan(job)

    def _warn_without_match(self, name: str, tokens: int) -> None:
        """Warn if this request is to load tokens but holds no match that promised them."""
        entry = self.offloader.ledger.requests.get(name)
        if entry is None or entry.state is not RequestState.MATCHED:
            _LOGGER.warning(
                "request %r is to load %d tokens, but holds no match: its load is reported as failed. Load "
                "only tokens that get_num_new_matched_tokens promised since the request last got blocks",
                name,
                tokens,
            )

    def _blocks_between(self, tracked: TrackedRequest, first: int, last: int) -> list[int]:
        """Return the device blocks from token `first` up to token `last`."""
        groups = zip(self.config.groups, tracked.tables)
        return [
            block
            for group, table in groups
            for block in table[first // group.block_tokens : last // group.block_tokens]
        ]

    def _add_to_plan(self, job: TransferJob) -> None:
        self.device_blocks.hold(job)
        self.state.planned.append(job)

    def _take_over_blocks(
        self, tracked: TrackedRequest, block_ids: Sequence[Sequence[int]], end: int
    ) -> None:
        """Note the request's blocks. Its first `end` tokens are hits: on the device, or to be loaded.

        After its load a request may be given more blocks and keeps the old ones. So does a session when the
        next part of its prompt has arrived.
        """
        continues = any(tracked.tables)
        if continues:
            known = self.offloader.ledger.requests.get(tracked.name)
            if known is None or not tracked.offered_all(known.offered, self._chunk_tokens):
                tracked.next_offer = 0
        else:
            tracked.forget_blocks()
            tracked.watched_from = self.offloader.ledger.seq
        given: list[int] = []
        for table, blocks, group in zip(tracked.tables, block_ids, self.config.groups):
            given += blocks[len(table) if continues else end // group.block_tokens :]
            table[:] = blocks
        self.device_blocks.rewrite(given)
        if self.walk is not None:
            for blocks in block_ids:
                self.walk.taken(blocks)

    def _plan_load(self, tracked: TrackedRequest, end: int) -> TransferJob | None:
        """Plan the load of the match up to token `end`. None if that is impossible, or no longer possible."""
        core, size = self.offloader, self._blocks_per_chunk
        search = HitSearch(self.config, size, tracked.chunk_keys(), tracked.local)
        targets = load_targets(self.config, size, tracked, search.needed(end), end)
        if self.device_blocks.pool is None and core.leased(targets.blocks):
            return None
        if not self._holds(tracked, search, targets.chunks, end):
            return None
        try:
            return core.prepare_load(tracked.name, targets.blocks, targets.parts)
        except LimitReached:
            return None

    def _holds(self, tracked: TrackedRequest, search: HitSearch, chunks: int, end: int) -> bool:
        """Whether the first pins of the match are the slots that a load up to token `end` reads.

        chunks: how many slots it reads. If the engine accepted fewer tokens than were matched, and there are
            several groups, the load may need other slots. These are pinned instead.
        """
        ledger = self.offloader.ledger
        entry = ledger.requests.get(tracked.name)
        if entry is None:
            return False
        pins = entry.pins
        if (self.config.resumable and chunks <= len(pins)) or len(ledger.live_pins(entry)) < len(pins):
            return True
        slots = [ledger.index.get(key) for key in search.needed_keys(end)]
        if slots == listed(pins)[:chunks]:
            return True
        if any(slot is None or not ledger.readable(slot) for slot in slots):
            return False
        self._record_match(tracked, [slot for slot in slots if slot is not None], end, None)
        return True

    def _note_load_end(self, name: str, *, good: bool, lost: bool = False) -> None:
        """Note the end of a load, to report it to the engine once. The request may be finished by now."""
        before, after = self.state.promises.pop(name)
        kept = before if self.config.resumable and not lost else 0
        tracked = self.state.tracked.get(name)
        # A request that was preempted since then counts all tokens that it computes itself.
        if tracked is not None and tracked.trusted is not None:
            tracked.trusted = None if good else kept
            tracked.next_offer = 0
            if good:
                tracked.loaded = before, after
        self.state.ended_loads.append(LoadEnded(name, good, after if good else kept, lost))

    # Storing.

    def build_connector_meta(self, output: StepOutput) -> TransferPlan:
        """Return the transfers of this step: those planned since the last step, and stores of newly confirmed
        tokens.

        Call it when the step is scheduled, but before `num_computed_tokens` counts its tokens.
        """
        core = self.offloader
        if self._is_lazy and self.walk is None:
            raise ConfigError("a lazy store walks the engine's free queue; call bind_gpu_block_pool first")
        if self._decides_nothing(output):
            core.end_step()
            return _NOTHING
        self._note_block_changes(output)
        core.tick()
        for ended in core.lose_overdue():
            self._note_transfer_end(ended)
        flush = self.device_blocks.take_awaited()
        if not core.ledger.draining():
            # While a reset drains, no store is begun, so that the reset can complete.
            self._store(output)
        else:
            self._note_fallen_back(output.scheduled)
        planned, self.state.planned = self.state.planned, []
        if planned:
            core.submit([job.transfer for job in planned])
        if not self.state.tracked and self.config.last_step is LastStep.FLUSH:
            flush = list(core.ledger.transfers)
        flushed = core.flush(flush) if flush else ()
        lost = [transfer for transfer in flush if transfer not in core.ledger.transfers]
        core.end_step()
        return TransferPlan(
            tuple([job for job in planned if job.direction is LOAD]),
            tuple([job for job in planned if job.direction is STORE]),
            (*flushed, *lost),
        )

    def _decides_nothing(self, output: StepOutput) -> bool:
        """Whether no transfer is live and the step has nothing to store. Most steps of a decode are so.

        Keep this path short: after a forward pass the instruction cache is cold.
        """
        state, ledger = self.state, self.offloader.ledger
        return not (
            ledger.transfers
            or self.offers.state.awaiting
            or state.preempted
            or self.device_blocks.state.changed_hands
            or output.new_block_ids
            or output.preempted
            or output.boundary_states
            or (self.walk is not None and self.walk.is_due())
            or self.offers.due(state.tracked, output.scheduled)
        )

    def _note_fallen_back(self, scheduled: Iterable[str]) -> None:
        """Note which requests now recompute the tokens of their failed loads. Later steps do not show it."""
        for name in scheduled:
            tracked = self.state.tracked.get(name)
            if tracked is not None and tracked.trusted is not None:
                tracked.confirmed_tokens()

    def _note_block_changes(self, output: StepOutput) -> None:
        """Note which blocks requests lost and which they were given."""
        state, grown = self.state, new_blocks(output, len(self.config.groups))
        # Sorted, because vLLM gives a set, whose order differs from process to process (S11).
        for name in sorted(output.preempted):
            tracked = state.tracked.get(name)
            if tracked is not None and name not in state.preempted:
                self._preempt(tracked)
        state.preempted.clear()
        given: list[int] = []
        for name, tables in grown.items():
            tracked = state.tracked.get(name)
            for group, blocks in enumerate(tables):
                given += blocks
                if tracked is not None:
                    tracked.tables[group] += blocks
        if given:
            self.device_blocks.rewrite(given)
            if self.walk is not None:
                self.walk.taken(given)

    def _preempt(self, tracked: TrackedRequest) -> None:
        """Note that a request lost its blocks. It may get others in the same step."""
        self.device_blocks.take_back(tracked.tables)
        tracked.forget_blocks()
        self.offers.state.awaiting.pop(tracked.name, None)
        self.state.preempted.add(tracked.name)
        self.offloader.preempt(tracked.name)

    def _store(self, output: StepOutput) -> None:
        """Offer this step's chunks, and store the blocks that the lazy walk finds."""
        self.offers.offer_in_step(
            self.state.tracked, output.scheduled, output.boundary_states, self._add_to_plan
        )
        if self.walk is not None:
            job = self.walk.store()
            if job is not None:
                self._add_to_plan(job)

    # The end of requests and of transfers.

    def request_finished(
        self, request: EngineRequest, block_ids: Sequence[Sequence[int]], *, aborted: bool = False
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """End a request. Stores its confirmed chunks that are not stored yet. Idempotent; legal at any time.

        block_ids: all its blocks, by group; empty if it never had any.

        Returns whether the engine must keep the blocks until `finished_sending` names the request; and None,
        because there are no parameters for the client.
        """
        call, name = "request_finished", request.request_id
        if type(name) is not str:
            name = engine_name(call, request)
        if type(aborted) is not bool:
            aborted = flag(call, "aborted", aborted)
        tracked = self.state.tracked.get(name)
        if tracked is None or not are_known(block_ids, tracked.tables):
            block_ids = block_tables(call, "block_ids", block_ids, len(self.config.groups), may_be_none=True)
            if tracked is None:
                return False, None
            for table, blocks in zip(tracked.tables, block_ids):
                table[:] = blocks
        del self.state.tracked[name]
        self.offers.state.awaiting.pop(name, None)
        if self.offers.is_eager(tracked) and block_ids:
            self.offers.offer_at_end(tracked, self._add_to_plan)
        self.offloader.finish(name, aborted=aborted)
        return self.device_blocks.keep(name, tracked.tables), None

    def update_connector_output(self, reports: Iterable[WorkerReport]) -> StepResults:
        """Apply the workers' reports. They may be from any step, in any order, doubled or late."""
        core, state = self.offloader, self.state
        if type(reports) is not list or reports:
            reports = worker_reports(reports)
        if not (reports or core.ledger.transfers or state.ended_loads or self.device_blocks.state.kept):
            return _NO_RESULTS
        failed: set[bytes] = set()
        if reports:
            core.report_all(reports, partial(self._note_reported_end, failed))
        if failed:
            self.offers.move_back(state.tracked, failed)
        if state.ended_loads and self.config.resumable and not self._is_lazy:
            loaded = [load.request for load in state.ended_loads if load.good]
            self.offers.move_behind(state.tracked, loaded, self._chunk_tokens)
        core.flush_log(_REPORTS_TAKEN)
        loads, state.ended_loads = tuple(state.ended_loads), []
        return StepResults(loads, self.device_blocks.take_sent(), not core.ledger.draining())

    def _note_reported_end(self, failed: set[bytes], ended: Ended) -> None:
        """Note a transfer that its reports have ended. failed: gets the keys of a store that failed."""
        self._note_transfer_end(ended)
        if not ended.good:
            failed.update(ended.keys)
        elif self.below is not None:
            self.below.stored(ended.keys)

    def lose(self, transfer: int) -> Ended | None:
        """Give up a transfer that some worker will never report. None if it is not in flight.

        Slots that it may still write are retired. The next `update_connector_output` reports a lost load.
        """
        ended = self.offloader.lose(transfer)
        if ended is not None:
            self._note_transfer_end(ended)
        return ended

    def _note_transfer_end(self, ended: Ended) -> None:
        self.device_blocks.release(ended)
        if ended.direction is LOAD:
            self._note_load_end(ended.request, good=ended.good, lost=ended.lost)

    # The cache as a whole.

    def reset_cache(self, weights: str | None = None) -> bool:
        """Make all stored blocks unmatchable at once. Legal at any time.

        weights: as in `Offloader.reset`.

        Reset the device's prefix cache first. With a lazy store, a block for which the pool still has a key
        is not stored until it is allocated to a request again; a warning says how many there are.

        Cancels planned transfers that were not submitted. Returns False while older copies are live: then
        call it again, or wait for `StepResults.drained`.
        """
        planned, self.state.planned = self.state.planned, []
        for job in planned:
            ended = self.offloader.cancel(job.transfer)
            if ended is not None:
                self._note_transfer_end(ended)
        if self.walk is not None:  # Before the reset, because the engine's pool may raise.
            tables = [table for tracked in self.state.tracked.values() for table in tracked.tables]
            self.walk.restart({block for table in tables for block in table} - {self.config.null_block})
        done = self.offloader.reset(weights)
        self.offers.state.awaiting.clear()
        for tracked in self.state.tracked.values():
            tracked.offer_again()
        return done

    def has_pending_work(self) -> bool:
        """Whether a transfer is planned, in flight or draining, or the end of one is still to be reported.

        An engine that keeps stepping does so as long as this is true (flush at last step, S17).
        """
        transfers = self.offloader.ledger.transfers
        return bool(transfers or self.state.ended_loads or self.device_blocks.has_sent())

    def take_events(self) -> list[KVCacheEvent]:
        """Return the KV events since the last call."""
        return self.offloader.take_kv_events()
