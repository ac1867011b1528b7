"""The calls of an engine's scheduler, under vLLM's names, and what each does to the offload core.

One step of the engine, from top to bottom:

1. `update_connector_output`     the workers' reports: which loads have ended, and how;
2. `request_finished`            its last confirmed blocks are stored, under lease;
3. `get_num_new_matched_tokens`  the longest hit that all groups serve, pinned; or wait;
4. `update_state_after_alloc`    the engine's blocks for it: the load is planned;
5. `build_connector_meta`        what this step stores; all that was planned leaves, as one `TransferPlan`.

An engine that calls `update_connector_output` last, as vLLM does, walks the same circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kvsm.errors import ConfigError, LimitReached
from kvsm.events import Direction, SkipReason
from kvsm.ids import listed
from kvsm.kv_events import KVCacheEvent
from kvsm.offloader import Ended, Offloader, PreparedStore
from kvsm.plan import TransferJob, TransferPlan, WorkerReport
from kvsm.scheduler.free_queue import FreeQueueWalk
from kvsm.scheduler.groups import LastStep, SchedulerConfig, StoreMode
from kvsm.scheduler.hits import HitSearch, hit_limit
from kvsm.scheduler.offer_batch import OfferBatch, room
from kvsm.scheduler.payloads import describe
from kvsm.scheduler.protocols import DevicePool, EngineRequest, StepOutput
from kvsm.scheduler.tracked import TrackedRequest
from kvsm.states.transfer import TransferState


class LoadEnded(msgspec.Struct, frozen=True):
    """The load of a request is over, once. num_computed_tokens: how many tokens it has now, from its first;
    after a failure the engine computes all others. It gives the request other blocks for them if `lost`, for
    a copy may still write these; and where `SchedulerConfig.resumable` is false, for some are missing."""

    request: str
    good: bool
    num_computed_tokens: int
    lost: bool = False


class StepResults(msgspec.Struct, frozen=True):
    """What the workers' reports came to. finished_sending: requests that were over before, and whose
    blocks may go now. drained: no copy that a reset abandoned is left."""

    loads: tuple[LoadEnded, ...] = ()
    finished_sending: tuple[str, ...] = ()
    drained: bool = True


class OffloadScheduler:
    """Drives an offload core for one engine. Without a bound pool, the engine counts no references: it is
    told when the blocks of a finished request may go, and to wait for copies of blocks that it gives away."""

    def __init__(self, offloader: Offloader, config: SchedulerConfig) -> None:
        """Raises `ConfigError` if the two configurations cannot go together."""
        config.check(offloader.config)
        self.offloader, self.config = offloader, config
        self._chunk = offloader.config.blocks_per_chunk
        self._pool: DevicePool | None = None
        self._walk: FreeQueueWalk | None = None
        self._tracked: dict[str, TrackedRequest] = {}
        """Requests that are not finished."""
        self._held: dict[str, TrackedRequest] = {}
        """Those of them that must offer something again."""
        self._tried_at = -1, -1
        """When they did last: `room` of the ledger."""
        self._planned: list[TransferJob] = []
        """What leaves with the next plan."""
        self._promises: dict[str, tuple[int, int]] = {}
        """Request -> (tokens before its load, tokens after it), until that has ended."""
        self._ended_loads: list[LoadEnded] = []
        self._sending: dict[str, list[int]] = {}
        """Finished request -> its device blocks, as long as a copy touches one; if it is lost, for ever."""
        self._given: list[int] = []
        """Blocks that changed hands since the last step, if the engine counts no references."""
        self._taken_back: set[str] = set()
        """Requests that lost their blocks since the last step."""

    # The engine's side.

    def bind_gpu_block_pool(self, pool: DevicePool) -> None:
        """The engine counts references to its blocks: what a copy touches is held there."""
        self._pool = pool
        if self.config.store is StoreMode.LAZY:
            self._walk = FreeQueueWalk(self.offloader, pool, self.config.lazy_target_blocks)

    def add_request(self, request: EngineRequest) -> None:
        """A request has come. As long as it is not finished, the engine has steps to come."""
        if request.request_id not in self._tracked:
            self._tracked[request.request_id] = TrackedRequest(request, self.config, self._chunk)
            self.offloader.arrive(request.request_id)

    def _track(self, request: EngineRequest) -> TrackedRequest:
        self.add_request(request)
        return self._tracked[request.request_id]

    # Matching and loading.

    def get_num_new_matched_tokens(
        self, request: EngineRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens behind those that the device has can be loaded, and whether that takes steps.

        None: ask again in a later step, what it needs is in flight. At least one token is left to compute
        (S18). The hits are pinned; asked again, the new answer replaces the old one.
        """
        tracked, core = self._track(request), self.offloader
        name = tracked.name
        if any(tracked.tables):
            # Whoever asks again has given its blocks back; the step's output may say so, later.
            self._take_back(tracked)
        if core.waits_for(name) is not None:
            return None, False
        tracked.local = num_computed_tokens
        limit = hit_limit(request.num_tokens, num_computed_tokens, tracked.max_load_tokens)
        if not self._may_load(tracked, limit):
            core.release(name)
            return 0, False
        tracked.update_keys()
        lookup = HitSearch(self.config, self._chunk, tracked.keys, num_computed_tokens)
        index, readable = core.ledger.index, core.ledger.readable
        end = lookup.longest_hit(limit, index.__contains__)
        slots = self._slots(lookup, tracked, end)
        awaited = core.in_flight(slots)
        if awaited is not None:
            if core.defer(name, awaited):
                return None, False

            def known(key: bytes) -> bool:
                return key in index and readable(index[key])

            end = lookup.longest_hit(limit, known)
            slots = self._slots(lookup, tracked, end)
        missed = lookup.missed(end, index.__contains__) if end < limit else None
        return self._pin(tracked, slots, end, missed)

    def _may_load(self, tracked: TrackedRequest, limit: int) -> bool:
        local, core = tracked.local, self.offloader
        return (
            limit > local
            and not tracked.request.skip_reading_prefix_cache
            and local % self.config.alignment == 0
            and core.may_match(tracked.name)
            and not core.ledger.draining()
            and len(core.ledger.transfers) < core.config.max_live_transfers
        )

    def _slots(self, lookup: HitSearch, tracked: TrackedRequest, end: int) -> list[int]:
        if end <= tracked.local:
            return []
        index = self.offloader.ledger.index
        return [
            index[key]
            for keys, (first, last) in zip(tracked.keys, lookup.needed(end))
            for key in keys[first:last]
        ]

    def _pin(
        self, tracked: TrackedRequest, slots: Sequence[int], end: int, missed: bytes | None
    ) -> tuple[int, bool]:
        try:
            self.offloader.pin(tracked.name, slots, missed)
        except LimitReached:
            # What cannot be held is not promised (S7).
            return 0, False
        return end - tracked.local, end > tracked.local

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """The request has blocks: all of them, by group. Of its match, num_external_tokens are loaded into
        them; the engine may accept less than it was told. A promise that cannot be kept is reported as a
        failed load (S6)."""
        tracked, core = self._track(request), self.offloader
        end = tracked.local + num_external_tokens
        self._give(tracked, block_ids, end)
        if not num_external_tokens:
            core.release(tracked.name)
            return
        tracked.trusted = tracked.local
        self._promises[tracked.name] = tracked.local, end
        job = self._plan_load(tracked, end)
        if job is None:
            core.release(tracked.name)
            # A store may still read them: that can be why there is no load.
            groups = zip(self.config.groups, tracked.tables)
            self._computes(
                [
                    block
                    for group, table in groups
                    for block in table[tracked.local // group.block_tokens : end // group.block_tokens]
                ]
            )
            self._load_ended(tracked.name, good=False)
            return
        self._hold(job)
        self._planned.append(job)

    def _give(self, tracked: TrackedRequest, block_ids: Sequence[Sequence[int]], end: int) -> None:
        """Note the request's blocks, of which the first `end` tokens are hits. It may be given more when its
        load has ended, and keeps those that it had."""
        continues = any(tracked.tables)
        if not continues:
            tracked.forget_blocks()
            tracked.admitted_at = self.offloader.ledger.seq
        given: list[int] = []
        for table, blocks, group in zip(tracked.tables, block_ids, self.config.groups, strict=True):
            given += blocks[len(table) if continues else end // group.block_tokens :]
            table[:] = blocks
        self._computes(given)
        if self._walk is not None:
            self._walk.taken(sum(map(len, block_ids)))

    def _computes(self, blocks: Sequence[int]) -> None:
        """The engine will write these, and waits for what touches them if it counts no references."""
        self.offloader.rewrite(blocks)
        if self._pool is None:
            self._given += blocks

    def _plan_load(self, tracked: TrackedRequest, end: int) -> TransferJob | None:
        """Load what the match holds up to `end`, or None if that cannot be done (any more)."""
        core = self.offloader
        slots: list[int | None] = []
        targets: list[int] = []
        parts: list[int] = []
        index, size = core.ledger.index, self._chunk
        spans = HitSearch(self.config, size, tracked.keys, tracked.local).needed(end)
        for group, keys, table, span in zip(self.config.groups, tracked.keys, tracked.tables, spans):
            first = max(tracked.local, group.first_needed_token(end)) // group.block_tokens
            last, null = end // group.block_tokens, self.config.null_block
            places = [place for place in range(first, last) if table[place] != null]
            before = (len(slots) - span.first) * size
            targets += [table[place] for place in places]
            parts += [before + place for place in places]
            slots += [index.get(key) for key in keys[span.first : span.last]]
        entry = core.ledger.requests.get(tracked.name)
        if entry is None or (self._pool is None and core.leased(targets)):
            return None
        if slots != listed(entry.pins)[: len(slots)] and len(core.ledger.live_pins(entry)) == len(entry.pins):
            # Less than was matched, and of several groups: other blocks serve it.
            if any(slot is None or not core.ledger.readable(slot) for slot in slots):
                return None
            core.pin(tracked.name, [slot for slot in slots if slot is not None], None)
        try:
            whole = len(parts) == len(slots) * size
            return core.prepare_load(tracked.name, targets, () if whole else parts)
        except LimitReached:
            return None

    def _load_ended(self, name: str, *, good: bool, lost: bool = False) -> None:
        """Note the end of a load for the engine: told once, also of a request that is over by now."""
        before, after = self._promises.pop(name)
        kept = before if self.config.resumable and not lost else 0
        tracked = self._tracked.get(name)
        # A request that was preempted since trusts what it computes itself.
        if tracked is not None and tracked.trusted is not None:
            tracked.trusted = None if good else kept
            tracked.next_offer = 0
        self._ended_loads.append(LoadEnded(name, good, after if good else kept, lost))

    # Storing.

    def build_connector_meta(self, output: StepOutput) -> TransferPlan:
        """What the workers do in this step: everything planned since the last one, and what is stored now of
        the tokens that are confirmed."""
        core = self.offloader
        if self.config.store is StoreMode.LAZY and self._walk is None:
            raise ConfigError("a lazy store walks the engine's free queue; call bind_gpu_block_pool first")
        flush = self._take_blocks(output)
        core.tick()
        for ended in core.lose_overdue():
            self._end(ended)
        if not core.ledger.draining():
            # While a reset drains nothing new is begun: so it can be awaited.
            self._store(output)
        else:
            self._note_fallen_back(output.scheduled)
        planned, self._planned = self._planned, []
        core.submit([job.transfer for job in planned])
        if not self._tracked and self.config.last_step is LastStep.FLUSH:
            flush = list(core.ledger.transfers)
        flushed = core.flush(flush) if flush else ()
        core.end_step()
        return TransferPlan(
            tuple([job for job in planned if job.direction is Direction.LOAD]),
            tuple([job for job in planned if job.direction is Direction.STORE]),
            flushed,
        )

    def _note_fallen_back(self, scheduled: Iterable[str]) -> None:
        """See which requests compute anew what their failed loads did not bring: later it does not show."""
        for name in scheduled:
            tracked = self._tracked.get(name)
            if tracked is not None and tracked.trusted is not None:
                tracked.confirmed_tokens()

    def _take_blocks(self, output: StepOutput) -> list[int]:
        """Note which blocks requests lost and got. Returns the transfers that the engine must wait for,
        because it gives away what they touch and counts no references."""
        for name in output.preempted:
            tracked = self._tracked.get(name)
            if tracked is not None and name not in self._taken_back:
                self._take_back(tracked)
        self._taken_back.clear()
        reused, self._given = self._given, []
        for name, tables in output.new_block_ids.items():
            tracked = self._tracked.get(name)
            for group, blocks in enumerate(tables):
                reused += blocks
                self.offloader.rewrite(blocks)
                if self._walk is not None:
                    self._walk.taken(len(blocks))
                if tracked is not None:
                    tracked.tables[group] += blocks
        return self._touching(reused) if self._pool is None and reused else []

    def _take_back(self, tracked: TrackedRequest) -> None:
        """The request has lost its blocks, and may get others in this very step."""
        if self._pool is None:
            self._given += [block for table in tracked.tables for block in table]
        tracked.forget_blocks()
        self._held.pop(tracked.name, None)
        self._taken_back.add(tracked.name)
        self.offloader.preempt(tracked.name)

    def _touching(self, blocks: Sequence[int]) -> list[int]:
        """The transfers that touch one of these. Of those that leave with this step's plan only loads: a
        request may be preempted in the step that admitted it; what a store reads is kept by who finished."""
        wanted = {block for block in blocks if block != self.config.null_block}
        return [
            transfer.id
            for transfer in self.offloader.ledger.transfers.values()
            if (transfer.state is not TransferState.PLANNED or transfer.direction is Direction.LOAD)
            and not wanted.isdisjoint(listed(transfer.device_blocks))
        ]

    def _store(self, output: StepOutput) -> None:
        """Offer what has become confirmed, and again what had to wait."""
        batch = OfferBatch(self.offloader, self.config, self._pool)
        due = self._due(output.scheduled)
        if self._held and self._tried_at != room(self.offloader.ledger):
            due.update(self._held)
        for tracked in due.values():
            batch.collect(tracked)
        for name, states in output.boundary_states.items():
            owner = self._tracked.get(name)
            if owner is not None and self._stores_eagerly(owner):
                for group, block, tokens in states:
                    batch.hand_over(owner, group, block, tokens)
        self._offer(batch)
        self._tried_at = room(self.offloader.ledger)
        for name, tracked in due.items():
            entry = self.offloader.ledger.requests.get(name)
            if entry is not None and entry.settled != entry.offered:
                self._held[name] = tracked
            else:
                self._held.pop(name, None)
        if self._walk is not None:
            job = self._walk.store()
            if job is not None:
                self._hold(job)
                self._planned.append(job)

    def _due(self, scheduled: Iterable[str]) -> dict[str, TrackedRequest]:
        """The scheduled requests that may have a chunk to offer. This is all that an idle step costs."""
        due, tracked_requests = {}, self._tracked
        for name in scheduled:
            tracked = tracked_requests.get(name)
            if tracked is None:
                continue
            request = tracked.request
            confirmed = request.num_computed_tokens - request.num_output_placeholders
            if confirmed >= tracked.next_offer and self._stores_eagerly(tracked):
                due[name] = tracked
        return due

    def _stores_eagerly(self, tracked: TrackedRequest) -> bool:
        return self.config.store is StoreMode.EAGER or tracked.remote_decode

    def _offer(self, batch: OfferBatch) -> None:
        job, prepared = batch.store()
        if job is not None and prepared is not None:
            self._hold(job)
            self._planned.append(job)
            self._describe(batch, job, prepared)

    def _describe(self, batch: OfferBatch, job: TransferJob, prepared: PreparedStore) -> None:
        publisher = self.offloader.publisher
        if publisher is not None and publisher.self_describing:
            publisher.describe(job.transfer, describe(self.config, self._chunk, batch.stored(prepared)))

    # The end of requests, and of transfers.

    def request_finished(
        self, request: EngineRequest, block_ids: Sequence[Sequence[int]], *, aborted: bool = False
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """The request is over, at any time, twice as once. block_ids: all its blocks, by group; none, if it
        never had any. Stores what is confirmed now and not stored. Returns whether the engine must keep its
        blocks until it is named in `finished_sending`, and nothing for the client."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        name = tracked.name
        self._held.pop(name, None)
        for table, blocks in zip(tracked.tables, block_ids):
            table[:] = blocks
        if self._stores_eagerly(tracked) and block_ids:
            ledger = self.offloader.ledger
            batch = OfferBatch(self.offloader, self.config, self._pool)
            # The host may have lost since what was stored of it before.
            everything = tracked.remote_decode or ledger.forgotten_at > tracked.admitted_at
            batch.collect(tracked, finished=True, everything=everything)
            if ledger.draining():
                batch.skip(SkipReason.DRAINING)
            else:
                self._offer(batch)
        self.offloader.finish(name, aborted=aborted)
        if self._pool is None:
            held = [block for table in tracked.tables for block in table if block != self.config.null_block]
            if held and self.offloader.leased(held):
                # An engine may use a name again before it was told of its last bearer.
                self._sending.setdefault(name, []).extend(held)
                return True, None
        return False, None

    def update_connector_output(self, reports: Iterable[WorkerReport]) -> StepResults:
        """Take the workers' reports: of any step, in any order, doubled or late."""
        core = self.offloader
        for report in reports:
            ended = core.report(report.transfer, report.worker, report.good)
            if ended is not None:
                self._end(ended)
        loads, self._ended_loads = tuple(self._ended_loads), []
        sent = tuple([name for name, blocks in self._sending.items() if not core.leased(blocks)])
        for name in sent:
            del self._sending[name]
        if not core.ledger.transfers:
            # The engine may not step again for a long time.
            core.sync()
        return StepResults(loads, sent, not core.ledger.draining())

    def _end(self, ended: Ended) -> None:
        """A transfer is over: its references go, and the engine hears of its load."""
        load = ended.direction is Direction.LOAD
        if self._pool is not None and not (load and ended.lost):
            # From the last to the first: of a prefix, the end is to be taken before the beginning.
            self._pool.free_blocks(listed(ended.device_blocks)[::-1])
        if load:
            self._load_ended(ended.request, good=ended.good, lost=ended.lost)

    def _hold(self, job: TransferJob) -> None:
        if self._pool is not None:
            self._pool.touch(listed(self.offloader.ledger.transfers[job.transfer].device_blocks))

    # The cache as a whole.

    def reset_cache(self) -> bool:
        """Make everything stored unmatchable, at once, at any time. False while copies of before are under
        way; call it again, or see `StepResults.drained`. What was planned and has not left is taken back."""
        planned, self._planned = self._planned, []
        for job in planned:
            ended = self.offloader.cancel(job.transfer)
            if ended is not None:
                self._end(ended)
        done = self.offloader.reset()
        self._held.clear()
        for tracked in self._tracked.values():
            tracked.next_offer = 0
        if self._walk is not None:
            self._walk.restart()
        # An idle engine may not step again for a long time.
        self.offloader.sync()
        return done

    def has_pending_work(self) -> bool:
        """Whether a transfer is planned, in flight, or draining, or the engine has yet to hear of one's end.
        An engine that keeps stepping does so as long as this is true (S17)."""
        core = self.offloader
        # Blocks that a lost copy may still write are never named: nobody waits for that.
        untold = any(not core.leased(blocks) for blocks in self._sending.values())
        return bool(core.ledger.transfers or self._ended_loads or untold)

    def take_events(self) -> list[KVCacheEvent]:
        """KV events of the wire since the last take."""
        return self.offloader.take_kv_events()
