"""The scheduler: which requests run, on which device blocks, and what is offloaded of them.

Continuous batching as in vLLM. Each step every decoding request computes one token; what is left of the
token budget goes to prefills, in chunks, in the order of admission; then waiting requests are admitted.

The life of a request, from top to bottom:

1. `_place`    its prefix is looked up on the device, then on the host (`match`); blocks for the whole
               prompt are allocated; a load of the host's part is planned (LOADING), or it can start;
2. `end_copy`  the load has ended: good, its blocks are computed; bad, they are left to compute;
3. `_prefill`  a chunk of the prompt; the last chunk samples the first output token;
4. `update`    what the step before computed: full blocks are cached and offered for a store, a request
               that decodes gets its next block, one that is done leaves;
5. `_preempt`  no device block is left: the youngest request goes back to waiting.

A block is offered in the step after the one that computed its last token (S12), and the token that was
sampled last never counts as computed. Whoever holds device blocks has references in the pool: a request
for its table, a copy for what it touches; so that neither abort nor preemption frees what a copy uses
(S3). Nothing here looks at a request that decodes until a block is full or the output ends: `_calendar`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from kvsm.engine.block_pool import BlockPool
from kvsm.engine.request import Request, RequestStatus
from kvsm.errors import LimitReached
from kvsm.events import Direction
from kvsm.offloader import Ended, Offloader
from kvsm.plan import TransferPlan
from kvsm.traces import BLOCK_TOKENS, started_blocks


class SchedulerCounts(msgspec.Struct):
    """What has happened so far. Prompt tokens are hit on the device, hit on the host, or computed; after a
    preemption they count again."""

    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    deferrals: int = 0
    failed_loads: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    computed_tokens: int = 0
    decoded_tokens: int = 0


class Copy(NamedTuple):
    """What the engine remembers of a plan: for whom it is, and what its device blocks hold after it."""

    plan: TransferPlan
    request: Request
    keys: Sequence[bytes]
    blocks: Sequence[int]


class Batch(NamedTuple):
    """One step's work: how many tokens, and the blocks that are full at its end."""

    tokens: int
    keys: list[bytes]
    blocks: list[int]


class _Placement(Enum):
    PLACED = 0
    NO_ROOM = 1
    WAITS = 2


class Scheduler:
    """Drives an offload core over one pool of device blocks. token_budget: tokens of a step, at most;
    max_running: requests at once, at most that many."""

    def __init__(self, offloader: Offloader, *, token_budget: int = 8192, max_running: int = 256) -> None:
        self.offloader = offloader
        self.pool = BlockPool(offloader.ledger.leases)
        self.counts = SchedulerCounts()
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        """In order of admission; the last is the youngest."""
        self.plans: list[TransferPlan] = []
        """Planned in this step; whoever drives the scheduler takes them."""
        self._token_budget, self._max_running = token_budget, max_running
        self._prefilling: dict[str, Request] = {}
        self._decoding = 0
        self._copies: dict[int, Copy] = {}
        self._stores_ended = 0
        self._batch: list[Request] = []
        """Those that the step before brought to a full block, or to the end of a chunk or of the output."""
        self._calendar: dict[int, list[tuple[Request, int]]] = {}
        """Step -> (decoding request, its preemptions when that was noted): what happens to it then."""

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    # What the step before did.

    def update(self, step: int) -> None:
        """Take in what the step before `step` computed: cache, offer, finish, and allocate for `step`."""
        batch, self._batch = self._batch, []
        for request in batch:
            if request.status in (RequestStatus.PREFILL, RequestStatus.DECODE):
                self._publish(request)
                if request.is_done:
                    self._finish(request)
        for request in batch:
            if request.status is RequestStatus.DECODE and self._grow(request, step):
                self._calendar.setdefault(request.next_event(), []).append((request, request.preemptions))

    def _publish(self, request: Request) -> None:
        """Cache and offer the blocks that have become full; offer again what had to wait for a store."""
        if request.deferred and request.deferred_at != self._stores_ended:
            self._offer(request, *request.take_deferred())
        first, last = request.full_blocks, request.num_computed // BLOCK_TOKENS
        if first < last:
            keys, blocks = request.keys(first, last), request.block_table[first:last]
            request.full_blocks = last
            self.pool.cache_full_blocks(blocks, keys)
            self._offer(request, keys, blocks)

    def _offer(self, request: Request, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        prepared = self.offloader.prepare_store(request.name, keys, blocks)
        block_of = dict(zip(keys, blocks, strict=True))
        if prepared.plan is not None:
            self._carry(prepared.plan, request, prepared.keys, [block_of[key] for key in prepared.keys])
        for key in prepared.deferred:
            request.deferred[key] = block_of[key]
        request.deferred_at = self._stores_ended

    def _carry(
        self, plan: TransferPlan, request: Request, keys: Sequence[bytes], blocks: Sequence[int]
    ) -> None:
        """A plan holds its device blocks until it has ended, whatever becomes of its request."""
        self.pool.touch(blocks)
        self._copies[plan.transfer] = Copy(plan, request, keys, blocks)
        self.plans.append(plan)

    def _finish(self, request: Request) -> None:
        self.offloader.finish(request.name)
        self.counts.finished += 1
        self._leave(request)
        request.status = RequestStatus.FINISHED

    def _grow(self, request: Request, step: int) -> bool:
        """The block for its next token, by preemption if need be. False if it had to go itself."""
        if request.num_computed < len(request.block_table) * BLOCK_TOKENS:
            return True
        while not self.pool.num_free_blocks:
            victim = self._youngest()
            self._preempt(victim, step)
            if victim is request:
                return False
        request.block_table += self.pool.get_new_blocks(1)
        return True

    def _youngest(self) -> Request:
        """The last admitted that can go: blocks under a load would not become free."""
        running = reversed(self.running.values())
        return next(one for one in running if one.status is not RequestStatus.LOADING)

    def _preempt(self, request: Request, step: int) -> None:
        """Its blocks are taken before it runs in `step`; it is the next to be admitted."""
        if request.status is RequestStatus.DECODE:
            request.count_to(step - 1)
        self.offloader.preempt(request.name)
        self.counts.preemptions += 1
        self._leave(request)
        request.restart()
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        """It runs no more: its references go. Copies keep theirs."""
        del self.running[request.name]
        self._prefilling.pop(request.name, None)
        if request.status is RequestStatus.DECODE:
            self._decoding -= 1
        self.pool.free_blocks(request.block_table[::-1])

    def abort(self, name: str) -> None:
        """The client of this request has left, at any time. Nothing happens if the request is over."""
        request = self.running.get(name) or next((one for one in self.waiting if one.name == name), None)
        if request is None:
            return
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        else:
            self._leave(request)
        request.status = RequestStatus.FINISHED
        self.offloader.finish(name, aborted=True)
        self.counts.aborted += 1

    # Copies.

    def end_copy(self, ended: Ended) -> Copy:
        """A transfer is over: its blocks lose a holder, and the request that waited for a load goes on."""
        copy = self._copies.pop(ended.transfer)
        request = copy.request
        if ended.direction is Direction.STORE:
            self._stores_ended += 1
        elif ended.good:
            self.pool.cache_full_blocks(copy.blocks, copy.keys)
        if ended.direction is Direction.LOAD and request.status is RequestStatus.LOADING:
            if ended.good:
                request.full_blocks += len(copy.blocks)
                request.num_computed = request.full_blocks * BLOCK_TOKENS
                self.counts.host_hit_tokens += len(copy.blocks) * BLOCK_TOKENS
            else:
                self.counts.failed_loads += 1
            self._start(request)
        self.pool.free_blocks(copy.blocks[::-1])
        return copy

    def _start(self, request: Request) -> None:
        request.status = RequestStatus.PREFILL
        self._prefilling[request.name] = request

    # What this step does.

    def schedule(self, step: int) -> Batch:
        """Choose the tokens of `step` and count them as computed: the caller carries them out."""
        for request, preemptions in self._calendar.pop(step, ()):
            if request.status is RequestStatus.DECODE and request.preemptions == preemptions:
                request.count_to(step)
                self._batch.append(request)
        decoding = self._decoding
        budget = self._token_budget - decoding
        for request in list(self._prefilling.values()):
            if budget <= 0:
                break
            budget -= self._prefill(request, budget, step)
        budget = self._admit(budget, step)
        self.counts.decoded_tokens += decoding
        keys: list[bytes] = []
        blocks: list[int] = []
        for request in self._batch:
            first, last = request.full_blocks, request.num_computed // BLOCK_TOKENS
            keys += request.keys(first, last)
            blocks += request.block_table[first:last]
        return Batch(self._token_budget - budget, keys, blocks)

    def _prefill(self, request: Request, budget: int, step: int) -> int:
        """Compute a chunk of what is missing, at most `budget` tokens. Returns its length."""
        chunk = min(budget, request.num_tokens - request.num_computed)
        request.num_computed += chunk
        self.counts.computed_tokens += chunk
        if request.num_computed == request.num_tokens:
            request.num_output += 1
            request.status, request.counted_at = RequestStatus.DECODE, step
            del self._prefilling[request.name]
            self._decoding += 1
        self._batch.append(request)
        return chunk

    def _admit(self, budget: int, step: int) -> int:
        """Admit from the head of the queue while there is room. Those that wait for a transfer are passed;
        one that needs more blocks than are free is not, or it would wait for ever. Returns what is left of
        the budget."""
        passed = []
        while self.waiting and budget > 0 and len(self.running) < self._max_running:
            request = self.waiting[0]
            placement = self._place(request)
            if placement is _Placement.NO_ROOM:
                break
            self.waiting.popleft()
            if placement is _Placement.WAITS:
                passed.append(request)
            elif request.status is RequestStatus.PREFILL:
                budget -= self._prefill(request, budget, step)
        self.waiting.extendleft(reversed(passed))
        return budget

    def _place(self, request: Request) -> _Placement:
        """Give the request blocks for all its tokens, or say why not. Room is looked at first: a match
        pins blocks of the host, and should not do so for a request that cannot be placed."""
        if request.name in self.offloader.ledger.deferred:
            return _Placement.WAITS
        keys = request.matchable_keys()
        hits = self.pool.get_computed_blocks(keys)
        missing = started_blocks(request.num_tokens) - len(hits)
        if missing > self.pool.num_free_blocks - sum(map(self.pool.is_free, hits)):
            return _Placement.NO_ROOM
        match = self.offloader.match(request.name, keys[len(hits) :])
        if match.waits_for is not None:
            self.counts.deferrals += 1
            return _Placement.WAITS
        self.pool.touch(hits)
        request.block_table = hits + self.pool.get_new_blocks(missing)
        request.full_blocks = len(hits)
        request.num_computed = len(hits) * BLOCK_TOKENS
        self.running[request.name] = request
        self.counts.device_hit_tokens += request.num_computed
        if not self._load(request, keys[len(hits) :][: match.hits]):
            self._start(request)
        if hits:
            self.offloader.touch(keys[: len(hits)])
            self._offer(request, keys[: len(hits)], hits)
        return _Placement.PLACED

    def _load(self, request: Request, keys: list[bytes]) -> bool:
        """Begin to load these blocks behind those that it has. False: they are left to compute."""
        if not keys:
            return False
        blocks = request.block_table[request.full_blocks :][: len(keys)]
        try:
            plan = self.offloader.prepare_load(request.name, blocks)
        except LimitReached:
            self.offloader.release(request.name)
            return False
        if plan is None:
            return False
        request.status = RequestStatus.LOADING
        self._carry(plan, request, keys, blocks)
        return True
