"""Choose the requests of each step, and their device blocks. The connector decides what is offloaded.

Continuous batching as in vLLM: in each step, every decoding request computes one token. The rest of the token
budget goes to prefills, in chunks, in the order of admission. Then waiting requests are admitted. The
connector (`OffloadScheduler`) is called at the same points as in vLLM.

The life of a request:

1. `_place`      its prefix is looked up on the device, then on the host (`get_num_new_matched_tokens`). It
   gets blocks (`update_state_after_alloc`), and waits for its load (LOADING) or starts;
2. `take`        its load has ended. After a good load it computes the rest; after a failed one more, or all;
3. `_prefill`    it gets blocks for a chunk of the prompt; the last chunk samples the first output token;
4. `update`      the last step has been computed: full blocks are cached, and the request ends or continues;
5. `preempt`     no device block is free: the youngest request goes back to waiting.

Each holder of device blocks has references in the pool: a request for its tables, a copy for the blocks that
it touches. So neither abort nor preemption frees a block under a copy (S3). A decoding request costs no work
until one of its blocks is full or its output ends (`_calendar`).
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import NamedTuple

import msgspec

from kvsm.core.scheduler import OffloadScheduler, StepOutput, StepResults
from kvsm.serving.block_tables import BlockTables
from kvsm.serving.offload_checks import OffloadChecks, SkipNotes
from kvsm.serving.serving_block_pool import ServingBlockPool
from kvsm.serving.serving_request import ServingRequest, ServingStatus


class SchedulerCounts(msgspec.Struct):
    """Counts of a scheduler so far.

    preemptions: preemptions because no block was free, or on purpose.
    deferrals: lookups after which a request had to wait for a transfer.
    failed_loads: loads that failed; lost_loads: failed loads that some worker never reported.
    restarts: failed loads after which the request lost all blocks and waits again.
    device_hit_tokens, host_hit_tokens, computed_tokens: the prompt tokens, counted again after a preemption.
    """

    finished: int = 0
    aborted: int = 0
    preemptions: int = 0
    restarts: int = 0
    deferrals: int = 0
    failed_loads: int = 0
    lost_loads: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    computed_tokens: int = 0
    decoded_tokens: int = 0


class ComputedBatch(NamedTuple):
    """The compute of one step: the number of tokens, and the blocks that are full at its end, with keys."""

    tokens: int
    blocks: list[int]
    keys: list[bytes]


class _Placement(Enum):
    PLACED = 0
    NO_ROOM = 1
    WAITS = 2


class ServingScheduler:
    """Serves requests over one pool of device blocks.

    connector: the offload scheduler.
    notes: notes the skipped blocks in the connector's log.
    token_budget: the most tokens that a step computes.
    max_running: the most requests that run at once.
    device_blocks: blocks of the pool; None: all device blocks of the connector's core.

    Attribute `begun`: the requests that start to compute in this step.
    """

    def __init__(
        self,
        connector: OffloadScheduler,
        notes: SkipNotes,
        *,
        token_budget: int = 8192,
        max_running: int = 256,
        device_blocks: int | None = None,
    ) -> None:
        self.connector = connector
        self.pool = ServingBlockPool(connector.offloader.ledger.leases, device_blocks)
        connector.bind_gpu_block_pool(self.pool)
        self.block_tables = BlockTables(self.pool, connector.config, token_budget)
        self.counts = SchedulerCounts()
        self.waiting: deque[ServingRequest] = deque()
        self.running: dict[str, ServingRequest] = {}
        """In order of admission; the last is the youngest."""
        self.begun: list[ServingRequest] = []
        self.checks = OffloadChecks(connector, self.pool, notes)
        self._token_budget, self._max_running = token_budget, max_running
        self._prefilling: dict[str, ServingRequest] = {}
        self._decoding = 0
        self._calendar: dict[int, list[tuple[ServingRequest, int]]] = {}
        """Step -> the decoding requests that fill a block or end their output in it.

        Each has its number of preemptions so far: an entry is void after a later preemption.
        """
        self._batch: list[tuple[ServingRequest, int]] = []
        """The requests for which the last step filled a block, or ended a chunk or the output.

        Each has its number of computed tokens before that step.
        """
        # State of the step that is scheduled now:
        self._growing: list[ServingRequest] = []
        self._chunks: dict[str, int] = {}
        self._confirmed: dict[str, None] = {}
        self._new_blocks: dict[str, list[list[int]]] = {}
        self._preempted: list[str] = []
        self._states: dict[str, list[tuple[int, int, int]]] = {}

    @property
    def unfinished(self) -> int:
        """The number of requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def add_request(self, request: ServingRequest) -> None:
        """Add a request that has arrived."""
        self.connector.add_request(request)
        self.waiting.append(request)

    # The results of the last step.

    def take(self, results: StepResults, step: int) -> None:
        """Continue the requests whose loads have ended, unless they were aborted or preempted meanwhile."""
        for ended in results.loads:
            request = self.running.get(ended.request)
            if request is None or request.status is not ServingStatus.LOADING:
                continue
            if ended.good:
                self.counts.host_hit_tokens += ended.num_computed_tokens - request.num_computed_tokens
                request.num_computed_tokens = ended.num_computed_tokens
                self.block_tables.cache_blocks(request)
                self._start(request)
                continue
            self.counts.failed_loads += 1
            self.counts.lost_loads += ended.lost
            if ended.lost or not self.connector.config.resumable:
                self.counts.restarts += 1
                self._put_back(request, step)
            else:
                request.num_computed_tokens = ended.num_computed_tokens
                self._start(request)

    def update(self) -> None:
        """Process the computed last step: cache full blocks, finish requests, note which ones continue."""
        batch, self._batch = self._batch, []
        for request, before in batch:
            if request.status not in (ServingStatus.PREFILL, ServingStatus.DECODE):
                continue
            self.block_tables.cache_blocks(request)
            if request.is_done:
                self._finish(request)
                continue
            self._confirmed[request.request_id] = None
            states = self.block_tables.completed_states(request, before, request.num_computed_tokens)
            if states:
                # The connector gets the states in this step; until then, each block keeps a reference.
                self.pool.touch([block for _, block, _ in states])
                self._states[request.request_id] = list(states)
            if request.status is ServingStatus.DECODE:
                self._growing.append(request)

    def _finish(self, request: ServingRequest) -> None:
        self.connector.request_finished(request, request.tables)
        self.checks.request_finished(request)
        self.counts.finished += 1
        self._leave(request)
        request.status = ServingStatus.FINISHED

    def abort(self, name: str, step: int) -> None:
        """Abort a request, because its client has left. Does nothing if the request is over."""
        waiting = (request for request in self.waiting if request.request_id == name)
        request = self.running.get(name) or next(waiting, None)
        if request is None:
            return
        if request.status is ServingStatus.WAITING:
            self.waiting.remove(request)
            self.connector.request_finished(request, (), aborted=True)
        else:
            if request.status is ServingStatus.DECODE:
                request.count_to(step - 1)
            self.connector.request_finished(request, request.tables, aborted=True)
            self.checks.request_finished(request)
            self._leave(request)
        request.status = ServingStatus.FINISHED
        self.counts.aborted += 1

    # The decisions of this step.

    def schedule(self, step: int) -> StepOutput:
        """Choose the tokens of `step`, and give their requests blocks. `compute` counts the tokens later."""
        growing, self._growing = self._growing, []
        for request in growing:
            if request.status is ServingStatus.DECODE and self._grow(request, 1, step):
                happens = step - 1 + self._steps_to_event(request)
                self._calendar.setdefault(happens, []).append((request, request.preemptions))
        budget = self._token_budget - self._decoding
        for request in list(self._prefilling.values()):
            if budget <= 0:
                break
            if request.status is ServingStatus.PREFILL:
                budget -= self._prefill(request, budget, step)
        if not self._preempted:
            # As in vLLM, a step that preempts admits no request.
            self._admit(budget)
        output = StepOutput(
            scheduled=tuple(dict.fromkeys((*self._confirmed, *self._chunks))),
            new_block_ids=self._new_blocks,
            preempted=tuple(self._preempted),
            boundary_states=self._states,
            # A decoding request has no work until one of its blocks is full, so its tokens are left out.
            num_scheduled_tokens=self._chunks,
        )
        self._confirmed, self._new_blocks, self._preempted = {}, {}, []
        return output

    def _steps_to_event(self, request: ServingRequest) -> int:
        """Return the number of steps until a block of a decoding request is full, or its output ends."""
        computed = request.num_computed_tokens
        to_full_block = min([size - computed % size for size in self.block_tables.block_sizes])
        return min(to_full_block, request.output_length - request.num_output_tokens)

    def _grow(self, request: ServingRequest, tokens: int, step: int) -> bool:
        """Get blocks for a request's next tokens, by preemption if necessary.

        Returns False if the request itself was preempted.
        """
        self.block_tables.remove_skipped_blocks(request)
        while True:
            new = self.block_tables.grow(request, request.num_computed_tokens + tokens)
            if new is not None:
                break
            victim = self._youngest()
            self.preempt(victim, step)
            if victim is request:
                return False
        if any(new):
            self._new_blocks[request.request_id] = new
        return True

    def _youngest(self) -> ServingRequest:
        """Return the request that was admitted last. Loading ones are left out: a load keeps their blocks."""
        running = reversed(self.running.values())
        return next(request for request in running if request.status is not ServingStatus.LOADING)

    def preempt(self, request: ServingRequest, step: int) -> None:
        """Free the blocks of a running request before it runs in `step`. It will be admitted first again."""
        self.counts.preemptions += 1
        self._put_back(request, step)

    def _put_back(self, request: ServingRequest, step: int) -> None:
        if request.status is ServingStatus.DECODE:
            request.count_to(step - 1)
        name = request.request_id
        self._leave(request)
        self._new_blocks.pop(name, None)
        self._preempted.append(name)
        request.restart()
        self.waiting.appendleft(request)

    def _leave(self, request: ServingRequest) -> None:
        """Remove a request from the running ones, and free its references. Copies keep their references."""
        name = request.request_id
        del self.running[name]
        self._prefilling.pop(name, None)
        self._chunks.pop(name, None)
        self._confirmed.pop(name, None)
        if request.status is ServingStatus.DECODE:
            self._decoding -= 1
        self.block_tables.free(request)

    def _start(self, request: ServingRequest) -> None:
        request.status = ServingStatus.PREFILL
        self._prefilling[request.request_id] = request
        self.begun.append(request)

    def _prefill(self, request: ServingRequest, budget: int, step: int) -> int:
        """Get blocks for a chunk of the missing tokens, at most `budget`. Returns the length of the chunk."""
        chunk = min(budget, request.num_tokens - request.num_computed_tokens)
        if not self._grow(request, chunk, step):
            return 0
        self._chunks[request.request_id] = chunk
        return chunk

    def _admit(self, budget: int) -> None:
        """Admit requests from the head of the queue while there is room.

        A request that waits for a transfer is skipped. A request that needs more blocks than are free stops
        the admission: if it were skipped, it might never be admitted.
        """
        passed = []
        while self.waiting and budget > 0 and len(self.running) < self._max_running:
            request = self.waiting[0]
            placement = self._place(request, budget)
            if placement is _Placement.NO_ROOM:
                break
            self.waiting.popleft()
            if placement is _Placement.WAITS:
                passed.append(request)
            else:
                budget -= self._chunks.get(request.request_id, 0)
        self.waiting.extendleft(reversed(passed))

    def _place(self, request: ServingRequest, budget: int) -> _Placement:
        """Admit the request, or return why not.

        Room for the whole request is checked first: a match pins host blocks, and a request that cannot be
        placed must pin none.
        """
        hit = self.block_tables.longest_hit(request)
        if not self.block_tables.has_room(request, hit):
            return _Placement.NO_ROOM
        loaded, takes_steps = self.connector.get_num_new_matched_tokens(request, hit)
        if loaded is None:
            self.counts.deferrals += 1
            return _Placement.WAITS
        end = hit + loaded
        self.checks.matched(request, end)
        chunk = 0 if takes_steps else min(budget, request.num_tokens - end)
        if not self.block_tables.place(request, hit, end, chunk):
            return _Placement.NO_ROOM
        self.connector.update_state_after_alloc(request, request.tables, loaded)
        self.running[request.request_id] = request
        self.counts.device_hit_tokens += hit
        if takes_steps:
            request.status = ServingStatus.LOADING
        else:
            self._start(request)
            self._chunks[request.request_id] = chunk
        return _Placement.PLACED

    def compute(self, step: int) -> ComputedBatch:
        """Count the tokens of `step` as computed, after its plan has left. The caller writes the blocks."""
        for states in self._states.values():
            self.pool.free_blocks([block for _, block, _ in states])
        self._states, self.begun = {}, []
        self.counts.decoded_tokens += self._decoding
        tokens = self._decoding + sum(self._chunks.values())
        for request, preemptions in self._calendar.pop(step, ()):
            if request.status is ServingStatus.DECODE and request.preemptions == preemptions:
                self._batch.append((request, request.num_computed_tokens))
                request.count_to(step)
        chunks, self._chunks = self._chunks, {}
        for name, chunk in chunks.items():
            request = self._prefilling[name]
            self._batch.append((request, request.num_computed_tokens))
            self._compute_chunk(request, chunk, step)
        blocks: list[int] = []
        keys: list[bytes] = []
        for request, before in self._batch:
            full = self.block_tables.full_blocks(request, before, request.num_computed_tokens)
            blocks += full[0]
            keys += full[1]
        return ComputedBatch(tokens, blocks, keys)

    def _compute_chunk(self, request: ServingRequest, chunk: int, step: int) -> None:
        self.counts.computed_tokens += chunk
        if request.compute(chunk):
            request.status, request.counted_at = ServingStatus.DECODE, step
            del self._prefilling[request.request_id]
            self._decoding += 1
