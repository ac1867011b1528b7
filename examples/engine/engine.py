"""The engine: it admits requests, gives them blocks, computes their tokens in steps, and calls kvsm."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.block_pool import BlockPool
from engine.model import BLOCK, GROUPS, MAX_TOKENS, Model

from kvsm import Worker
from kvsm.core.scheduler import OffloadScheduler, StepOutput, block_key

NO_BLOCK = -1  # in a block table, before the window


@dataclass(eq=False)
class Request:
    """A request, as kvsm reads it (an `EngineRequest`), with its block tables."""

    request_id: str
    tokens: list[int]
    max_tokens: int  # of prompt and output
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0  # no drafts, and no steps in flight
    kv_transfer_params: Mapping[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    block_hashes: list[bytes] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=lambda: [[] for _ in GROUPS])
    is_loading: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.hash_blocks()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def hash_blocks(self) -> None:
        """Hash each full block, including all tokens before it."""
        for end in range((len(self.block_hashes) + 1) * BLOCK, self.num_tokens + 1, BLOCK):
            before = self.block_hashes[-1] if self.block_hashes else b""
            content = before + repr(self.tokens[end - BLOCK : end]).encode()
            self.block_hashes.append(hashlib.blake2b(content, digest_size=16).digest())

    def key(self, index: int, group: int) -> bytes:
        """Return the key of a block, for the host pool and for the device's prefix cache."""
        return block_key(self.block_hashes[index], group)


class Engine:
    """Serves requests in steps. `requests` holds the requests that have not ended."""

    def __init__(self, model: Model, num_blocks: int, kvsm: OffloadScheduler, worker: Worker) -> None:
        self.model, self.kvsm, self.worker = model, kvsm, worker
        self.pool, self.max_step_tokens, self.max_running = BlockPool(num_blocks), 32, 6
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preempted: list[str] = []  # since the last step
        self.new_blocks: dict[str, list[list[int]]] = {}  # of running requests, in this step
        self.counts = dict.fromkeys(("computed", "on device", "on host", "failed loads", "preempted"), 0)
        kvsm.bind_gpu_block_pool(self.pool)

    # Arrival, end and new weights.

    def add(self, request: Request) -> None:
        """Take a new request. Raises `ValueError` if it could never be served."""
        num_blocks = len(GROUPS) * -(-request.max_tokens // BLOCK)
        if request.max_tokens > MAX_TOKENS or num_blocks > len(self.pool.references):
            raise ValueError(f"{request.request_id} is too long for the model or the device blocks")
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.kvsm.add_request(request)

    def end(self, request: Request, *, aborted: bool = False) -> None:
        """End a request: its client has all tokens, or has left."""
        self.kvsm.request_finished(request, request.tables, aborted=aborted)
        self._release(request)
        del self.requests[request.request_id]

    def update_weights(self, version: str) -> None:
        """Load new weights. No KV of the old weights is used again."""
        for request in [request for request in self.running if not request.is_loading]:
            self.preempt(request)
        self.pool.reset_prefix_cache()
        self.kvsm.reset_cache(weights=version)  # a load in flight ends as failed
        self.model.load_weights(version)

    def close(self) -> None:
        """Abort all requests, and step until no copy is in flight."""
        for request in list(self.requests.values()):
            self.end(request, aborted=True)
        while self.kvsm.has_pending_work():
            self.step()
        self.worker.close()

    # A step.

    def step(self) -> None:
        """Run one step of continuous batching."""
        self._take_reports()
        tokens = self._schedule()
        plan = self.kvsm.build_connector_meta(
            StepOutput(
                scheduled=tokens.keys(),
                num_scheduled_tokens=tokens,
                new_block_ids=self.new_blocks,
                preempted=self.preempted,
            )
        )
        self.new_blocks, self.preempted = {}, []
        self.worker.start(plan)  # the copies run beside the compute below
        for name, count in tokens.items():
            self._compute(self.requests[name], count)
        if not tokens:
            self.worker.wait(self.worker.unreported())  # nothing to compute: do not spin

    def _take_reports(self) -> None:
        """Process the copies that have ended. A request whose load has ended begins to compute."""
        for load in self.kvsm.update_connector_output(self.worker.poll()).loads:
            request = self.requests.get(load.request)
            if request is None or not request.is_loading:
                continue  # it was aborted
            request.is_loading = False
            if load.good:
                request.num_computed_tokens = load.num_computed_tokens
                self._cache_blocks(request)
            else:  # with several groups it needs other blocks, and computes from its first token
                self.counts["failed loads"] += 1
                self.preempt(request)

    def _schedule(self) -> dict[str, int]:
        """Choose how many tokens each request computes (chunked prefill), and allocate blocks for them."""
        tokens: dict[str, int] = {}
        budget = self.max_step_tokens
        for request in list(self.running):
            if request.is_loading or request not in self.running:  # an older request has preempted it
                continue
            count = min(budget, request.num_tokens - request.num_computed_tokens)
            if count and self._grow(request, count):
                tokens[request.request_id] = count
                budget -= count
        while self.waiting and budget and not self.preempted and len(self.running) < self.max_running:
            chunk = self._admit(self.waiting[0], budget)
            if chunk is None:
                break  # first come, first served
            request = self.waiting.popleft()
            self.running.append(request)
            if chunk:
                tokens[request.request_id] = chunk
                budget -= chunk
        return tokens

    def _admit(self, request: Request, budget: int) -> int | None:
        """Allocate blocks for the hits and the first chunk of a waiting request. Return the length of the
        chunk: 0 if the request loads first, None if it must wait."""
        on_device = self._device_hit(request)
        on_host, _ = self.kvsm.get_num_new_matched_tokens(request, on_device)
        if on_host is None:
            return None  # a copy that it can use is in flight
        end = on_device + on_host
        count = 0 if on_host else min(budget, request.num_tokens - end)
        tables: list[list[int]] = []
        for group, kind in enumerate(GROUPS):
            first = kind.first_needed_token(end) // BLOCK
            hits = [self.pool.cached_block(request.key(i, group)) for i in range(first, on_device // BLOCK)]
            tables.append([NO_BLOCK] * first + [block for block in hits if block is not None])
        self._hold(tables)
        new = self._allocate(tables, end + count)
        if new is None:
            self._free(tables)
            return None
        request.tables = [table + blocks for table, blocks in zip(tables, new, strict=True)]
        self.kvsm.update_state_after_alloc(request, request.tables, on_host)
        request.num_computed_tokens, request.is_loading = on_device, on_host > 0
        self.counts["on device"] += on_device
        self.counts["on host"] += on_host
        return count

    # Compute and blocks.

    def _compute(self, request: Request, count: int) -> None:
        """Compute the next `count` tokens of a request, and count them: `build_connector_meta` was called
        before."""
        start, end = request.num_computed_tokens, request.num_computed_tokens + count
        token = self.model.forward(request.tokens[start:end], start, request.tables)
        request.num_computed_tokens = end
        self.counts["computed"] += count
        self._cache_blocks(request)
        self._free_before_window(request)
        if end == request.num_tokens:
            request.tokens.append(token)
            request.hash_blocks()
            if request.num_tokens >= request.max_tokens:
                self.end(request)

    def _device_hit(self, request: Request) -> int:
        """Return how many tokens all groups have on the device, without the last token, which must be
        computed."""
        for end in range((request.num_tokens - 1) // BLOCK * BLOCK, 0, -BLOCK):
            needed = [
                request.key(index, group)
                for group, kind in enumerate(GROUPS)
                for index in range(kind.first_needed_token(end) // BLOCK, end // BLOCK)
            ]
            if None not in map(self.pool.cached_block, needed):
                return end
        return 0

    def _grow(self, request: Request, count: int) -> bool:
        """Allocate blocks for the next tokens; if too few are free, preempt the youngest requests. Return
        whether this request still runs."""
        while (new := self._allocate(request.tables, request.num_computed_tokens + count)) is None:
            victim = [other for other in self.running if not other.is_loading][-1]
            self.preempt(victim)
            if victim is request:
                return False
        if any(new):
            self.new_blocks[request.request_id] = new
            request.tables = [table + blocks for table, blocks in zip(request.tables, new, strict=True)]
        return True

    def _allocate(self, tables: list[list[int]], tokens: int) -> list[list[int]] | None:
        """Return the blocks, by group, that the tables need to cover `tokens`; None if too few are free."""
        counts = [max(0, -(-tokens // BLOCK) - len(table)) for table in tables]
        return [self.pool.get_new_blocks(n) for n in counts] if sum(counts) <= self.pool.num_free() else None

    def preempt(self, request: Request) -> None:
        """Take a request's blocks away. It waits, and later computes or loads its tokens again."""
        self._release(request)
        self.waiting.appendleft(request)
        self.preempted.append(request.request_id)
        self.counts["preempted"] += 1

    def _release(self, request: Request) -> None:
        """Free a request's blocks. Copies in flight hold their own references."""
        (self.running if request in self.running else self.waiting).remove(request)
        self._free(request.tables)
        request.tables, request.num_computed_tokens = [[] for _ in GROUPS], 0
        request.is_loading = False

    def _cache_blocks(self, request: Request) -> None:
        """Add the full blocks of a request to the prefix cache."""
        for index in range(request.num_computed_tokens // BLOCK):
            for group, table in enumerate(request.tables):
                if table[index] != NO_BLOCK:
                    self.pool.cache_full_blocks([table[index]], [request.key(index, group)])

    def _free_before_window(self, request: Request) -> None:
        for table, group in zip(request.tables, GROUPS, strict=True):
            for index in range(group.first_needed_token(request.num_computed_tokens) // BLOCK):
                if table[index] != NO_BLOCK:
                    self.pool.free_blocks([table[index]])
                    table[index] = NO_BLOCK

    def _hold(self, tables: list[list[int]]) -> None:
        self.pool.touch([block for table in tables for block in table if block != NO_BLOCK])

    def _free(self, tables: list[list[int]]) -> None:
        """Free the last blocks first, so that the end of a prefix is evicted before its beginning."""
        self.pool.free_blocks([block for table in tables for block in reversed(table) if block != NO_BLOCK])
