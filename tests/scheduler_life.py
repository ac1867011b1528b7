"""A model engine, token by token, for tests that drive `OffloadScheduler` by hand or by Hypothesis.

It has what decides whether offload is right and nothing that makes it fast: block tables by group, a pool
with or without references, prefill in chunks, decoding with placeholders and drafts, copies that end when
the test says so. The KV of a token is modelled as one cell, which names the token and all before it; so a
wrong copy is seen by what a request reads later (S12, S15). It shares no code with the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from kvsm import events as ev
from kvsm.events import Direction, OffloadConfig, OffloadingEvent
from kvsm.ids import to_list
from kvsm.kv_events import Publisher
from kvsm.offloader import Offloader
from kvsm.plan import TransferJob, TransferPlan, WorkerReport
from kvsm.scheduler import GroupKind, KVCacheGroup, OffloadScheduler, SchedulerConfig, StepOutput, StepResults
from kvsm.scheduler.matching import Lookup

Cell = bytes | None
NULL = -1
HASH_TOKENS = 4


class Recorder(list[OffloadingEvent]):
    """A log in memory."""

    def flush(self) -> None:
        """Nothing to write."""


def chain(previous: bytes, *parts: bytes) -> bytes:
    return blake2b(previous + b"".join(parts), digest_size=32).digest()


class ModelRequest:
    """Satisfies `EngineRequest`. outputs: how many tokens it decodes. extras: what else decides its content
    (a LoRA adapter, a salt, an image), in its hashes as in vLLM's."""

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        outputs: int = 1,
        parameters: Mapping[str, Any] | None = None,
        skip_reading: bool = False,
        extras: bytes = b"",
    ) -> None:
        self.request_id = name
        self.all_token_ids = list(prompt)
        self.num_prompt_tokens, self.outputs = len(prompt), outputs
        self.num_computed_tokens = self.num_output_placeholders = 0
        self.kv_transfer_params = parameters
        self.skip_reading_prefix_cache = skip_reading
        self.lora_request = None
        self._extras = extras
        self.block_hashes: list[bytes] = []
        self.cells: list[bytes] = []
        """What the KV of each token must be."""
        self.tables: list[list[int]] = []
        self.loading = self.finished = self.aborted = False
        self.hash_tokens()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def done(self) -> bool:
        return self.num_tokens - self.num_prompt_tokens >= self.outputs

    def append(self, token: int) -> None:
        self.all_token_ids.append(token)
        self.hash_tokens()

    def hash_tokens(self) -> None:
        for token in self.all_token_ids[len(self.cells) :]:
            previous = self.cells[-1] if self.cells else chain(b"", self._extras)
            self.cells.append(chain(previous, token.to_bytes(4, "big")))
            if len(self.cells) % HASH_TOKENS == 0:
                self.block_hashes.append(self.cells[-1])

    def cells_of(self, block: int, block_tokens: int) -> list[bytes]:
        return self.cells[block * block_tokens : (block + 1) * block_tokens]


class ModelPool:
    """Satisfies `DevicePool`."""

    def __init__(self, size: int) -> None:
        self.references = [0] * size
        self.queue = list(range(size))
        self.caches: dict[int, bytes] = {}
        self.cached: dict[bytes, int] = {}

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not self.references[block]:
                self.queue.remove(block)
            self.references[block] += 1

    def free_blocks(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert self.references[block] > 0, f"S4: device block {block} was released twice"
            self.references[block] -= 1
            if not self.references[block]:
                self.queue.append(block)

    def key_of(self, block: int) -> bytes | None:
        return self.caches.get(block)

    def cached_block(self, key: bytes) -> int | None:
        return self.cached.get(key)

    def free_queue(self) -> Iterator[int]:
        return iter(self.queue)

    def take(self, count: int) -> list[int]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block in taken:
            self.references[block] = 1
            key = self.caches.pop(block, None)
            if key is not None and self.cached.get(key) == block:
                del self.cached[key]
        return taken

    def cache(self, block: int, key: bytes) -> None:
        if block not in self.caches and key not in self.cached:
            self.caches[block], self.cached[key] = key, block

    def forget(self) -> None:
        self.caches.clear()
        self.cached.clear()


@dataclass
class ModelCopy:
    """A job at the workers: who has still to carry it out."""

    job: TransferJob
    left: set[int] = field(default_factory=set)


@dataclass
class Computing:
    """Tokens of a request that a step computes, into the blocks that it had when the step was decided. owned:
    its tables then; it has others if it was preempted since."""

    request: ModelRequest
    first: int
    last: int
    owned: list[list[int]]
    tables: list[list[int]]


class ModelEngine:
    """One engine, its workers and its offload core. references: whether the offload core may hold device
    blocks. prefix_cache: whether blocks are found again on the device. asynchronous: a step is decided before
    the one before it was computed. drafts: tokens that are drafted at each decode step, and rejected."""

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
        publisher: Publisher | None = None,
        core: Mapping[str, Any] | None = None,
        **scheduler: Any,
    ) -> None:
        config = OffloadConfig(
            host_blocks=host_blocks, device_blocks=device_blocks, workers=workers, **(core or {})
        )
        self.log = Recorder()
        self.core = Offloader(config, self.log, publisher=publisher, clock_ns=lambda: 0)
        self.config = SchedulerConfig(groups=tuple(groups), hash_tokens=HASH_TOKENS, **scheduler)
        self.scheduler = OffloadScheduler(self.core, self.config)
        self.pool = ModelPool(device_blocks)
        if references:
            self.scheduler.bind_gpu_block_pool(self.pool)
        self.references, self.prefix_cache = references, prefix_cache
        self.asynchronous, self.drafts, self.chunk_tokens = asynchronous, drafts, chunk_tokens
        self.groups, self.workers = tuple(groups), workers
        places = host_blocks * config.blocks_per_chunk
        self.device: list[list[list[Cell]]] = [[[] for _ in range(workers)] for _ in range(device_blocks)]
        self.host: list[list[list[Cell]]] = [[[] for _ in range(workers)] for _ in range(places)]
        self.waiting: list[ModelRequest] = []
        self.running: dict[str, ModelRequest] = {}
        self.requests: dict[str, ModelRequest] = {}
        self.copies: dict[int, ModelCopy] = {}
        self.reports: list[WorkerReport] = []
        """Of the workers, not handed on yet."""
        self.results: list[StepResults] = []
        self.expected: dict[bytes, list[bytes]] = {}
        """Key -> the cells of its chunk."""
        self.sending: dict[str, list[int]] = {}
        """Finished requests whose blocks must not go yet."""
        self.preempted: set[str] = set()
        self.states: dict[str, list[tuple[int, int, int]]] = {}
        self.computing: list[Computing] = []
        """The step that the device computes now."""
        self.brought: dict[int, int] = {}
        """Device block -> epoch of the load that brought its content, until it is computed anew."""
        self.tokens = 1_000_000
        """The next token that is sampled; no two are equal, so that what is decoded differs."""
        self.plan = TransferPlan()

    # Requests.

    def arrive(self, request: ModelRequest) -> ModelRequest:
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.scheduler.add_request(request)
        return request

    def finish(self, request: ModelRequest, *, aborted: bool = False) -> None:
        """Twice as once, at any time."""
        blocks = request.tables
        keep, _ = self.scheduler.request_finished(request, blocks, aborted=aborted)
        if request.finished:
            assert not keep
            return
        request.finished, request.aborted = True, aborted
        if request.kv_transfer_params and request.kv_transfer_params.get("do_remote_decode"):
            self._check_full_offload(request)
        if request in self.waiting:
            self.waiting.remove(request)
        self.running.pop(request.request_id, None)
        held = [block for table in blocks for block in table if block != NULL]
        if keep:
            self.sending[request.request_id] = held
        else:
            self.pool.free_blocks(held[::-1])
        request.tables = []

    def _check_full_offload(self, request: ModelRequest) -> None:
        """S16: every full chunk of full attention is on the host, in flight, or was skipped with a reason."""
        if request.loading or not request.tables:
            return
        computed = request.num_computed_tokens - request.num_output_placeholders
        confirmed = min(computed, max(request.num_prompt_tokens, request.num_tokens - 1))
        skipped = {key for event in self.log if isinstance(event, ev.StoreSkipped) for key in event.keys}
        for index, group in enumerate(self.groups):
            if group.kind is GroupKind.FULL:
                tokens = group.block_tokens * self.core.config.blocks_per_chunk
                for end in range(tokens, confirmed + 1, tokens):
                    key = request.cells[end - 1] + index.to_bytes(4, "big")
                    assert key in self.core.ledger.index or key in skipped, (
                        f"S16: {request.request_id} up to {end}"
                    )

    def preempt(self, request: ModelRequest) -> None:
        """Its blocks go at once: whoever counts no references waits for the copies in the same step."""
        if request.request_id not in self.running:
            return
        del self.running[request.request_id]
        self.preempted.add(request.request_id)
        self.pool.free_blocks([block for table in request.tables for block in table[::-1] if block != NULL])
        request.tables, request.loading = [], False
        request.num_computed_tokens = request.num_output_placeholders = 0
        self.waiting.insert(0, request)

    # One step.

    def step(self, *, accept: int | None = None, admit: bool = True) -> TransferPlan:
        """Decide a step, start its copies, compute, and take the reports that are there. accept: of the
        tokens matched, so many at most."""
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
            )
        )
        self._advance(scheduled)
        if self.asynchronous:
            self._compute()
            self._start(self.plan)
            self.computing = self._ranges(scheduled)
        else:
            self._start(self.plan)
            self.computing = self._ranges(scheduled)
            self._compute()
        self.hand_on()
        return self.plan

    def _schedule(
        self, request: ModelRequest, scheduled: dict[str, int], new_blocks: dict[str, list[list[int]]]
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
        if any(added):
            new_blocks[request.request_id] = added
        scheduled[request.request_id] = tokens

    def _grow(self, request: ModelRequest, end: int) -> list[list[int]] | None:
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
        blocks = self.pool.take(count)
        for block in blocks:
            if self.references:
                assert self.core.ledger.leases.words[block] == 0, f"S3: block {block} is free under a copy"
        return blocks

    def _drop_left_window(self, request: ModelRequest) -> None:
        for group, table in zip(self.groups, request.tables):
            if group.kind is GroupKind.SLIDING_WINDOW:
                first = group.first_needed_token(request.num_computed_tokens) // group.block_tokens
                for place in range(min(first, len(table))):
                    if table[place] != NULL:
                        self.pool.free_blocks([table[place]])
                        table[place] = NULL

    def _admit(self, scheduled: dict[str, int], accept: int | None) -> None:
        for request in list(self.waiting):
            local, blocks = self._local(request)
            found, loads = self.scheduler.get_num_new_matched_tokens(request, local)
            if found is None:
                continue
            assert loads == (found > 0)
            assert local + found < max(request.num_tokens, local + 1), "S18: nothing is left to compute"
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
            if tokens:
                scheduled[request.request_id] = tokens

    def _local(self, request: ModelRequest) -> tuple[int, list[list[int]]]:
        """What the device has of it, in all groups."""
        keys = [
            [one + index.to_bytes(4, "big") for one in self._group_hashes(request, index)]
            for index in range(len(self.groups))
        ]
        if not self.prefix_cache or request.skip_reading_prefix_cache:
            return 0, [[] for _ in self.groups]
        lookup = Lookup(self.config, 1, keys, 0)
        end = lookup.longest_hit(request.num_tokens - 1, lambda key: key in self.pool.cached)
        blocks = []
        for index, (first, last) in enumerate(lookup.needed(end)):
            blocks.append([NULL] * first + [self.pool.cached[key] for key in keys[index][first:last]])
        return (end, blocks) if end else (0, [[] for _ in self.groups])

    def _group_hashes(self, request: ModelRequest, index: int) -> list[bytes]:
        stride = self.groups[index].block_tokens // HASH_TOKENS
        return request.block_hashes[stride - 1 :: stride]

    def _allocate(self, hits: list[list[int]], end: int, total: int) -> list[list[int]] | None:
        """As vLLM: nothing is touched before it is sure that there are enough."""
        tables = []
        for group, table in zip(self.groups, hits):
            first = group.first_needed_token(end) // group.block_tokens
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

    def _ranges(self, scheduled: Mapping[str, int]) -> list[Computing]:
        ranges = []
        for name, tokens in scheduled.items():
            request = self.requests[name]
            end = request.num_computed_tokens
            ranges.append(Computing(request, end - tokens, end, request.tables, [*map(list, request.tables)]))
        return ranges

    def _advance(self, scheduled: Mapping[str, int]) -> None:
        """As vLLM: the tokens of a step count as computed when it has been decided. A step that will sample
        has a placeholder for what it samples."""
        for name, tokens in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += tokens
            if request.num_computed_tokens >= request.num_tokens + request.num_output_placeholders:
                request.num_output_placeholders += 1

    def _compute(self) -> None:
        """The device computes the step that was decided: reads what is before, writes, samples."""
        computing, self.computing = self.computing, []
        for one in computing:
            request, known = one.request, min(one.last, one.request.num_tokens)
            # The device computes what was decided, even if the request is over or preempted by now.
            self._read(one)
            for token in range(one.first, known):
                self._write(one, token, request.cells[token])
            over = request.finished or request.tables is not one.owned
            samples = one.last >= request.num_tokens and (over or request.num_output_placeholders > 0)
            for draft in range(self.drafts if samples else 0):
                self._write(one, one.last + draft, b"rejected")
            if over:
                continue
            if samples:
                request.num_output_placeholders -= 1
                self.tokens += 1
                request.append(self.tokens)
            self._cache(request, known)
            if samples and request.done:
                self.finish(request)

    def _read(self, one: Computing) -> None:
        """Everything that its first token looks at must be there."""
        request, end = one.request, one.first
        for index, (group, table) in enumerate(zip(self.groups, one.tables)):
            if group.kind is GroupKind.MAMBA:
                continue
            for token in range(group.first_needed_token(end), end):
                block = table[token // group.block_tokens]
                for worker in range(self.workers):
                    cells = self.device[block][worker]
                    found = (
                        cells[token % group.block_tokens] if len(cells) > token % group.block_tokens else None
                    )
                    assert found == request.cells[token], (
                        f"S12/S15: {request.request_id} reads token {token} of group {index} in {block} "
                        f"of worker {worker}, which holds other content"
                    )

    def _write(self, one: Computing, token: int, cell: bytes) -> None:
        for group, table in zip(self.groups, one.tables):
            place = token // group.block_tokens
            if group.kind is GroupKind.MAMBA or place >= len(table) or table[place] == NULL:
                continue
            offset = token % group.block_tokens
            if not offset:
                self.brought.pop(table[place], None)
            for worker in range(self.workers):
                cells = self.device[table[place]][worker]
                cells[offset:] = [*([None] * (offset - len(cells))), cell]

    def _cache(self, request: ModelRequest, computed: int) -> None:
        for index, (group, table) in enumerate(zip(self.groups, request.tables)):
            suffix = index.to_bytes(4, "big")
            size = group.block_tokens
            for place, hashed in enumerate(self._group_hashes(request, index)):
                end = (place + 1) * size
                if end > computed or place >= len(table) or group.kind is GroupKind.MAMBA:
                    break
                if table[place] != NULL and self.prefix_cache:
                    self.pool.cache(table[place], hashed + suffix)

    # Copies.

    def _start(self, plan: TransferPlan) -> None:
        epoch = self.core.ledger.epoch
        for transfer in plan.flush:
            self.carry_out(transfer)
        for job in plan.stores:
            older = [block for block in to_list(job.device_blocks) if self.brought.get(block, epoch) < epoch]
            assert not older, f"S14: blocks {older} are stored, which a load of an older epoch brought"
        for job in plan.loads:
            self.brought.update(dict.fromkeys(to_list(job.device_blocks), epoch))
        for job in (*plan.loads, *plan.stores):
            self.copies[job.transfer] = ModelCopy(job, set(range(self.workers)))
        for transfer in plan.flush:
            self.carry_out(transfer)

    def carry_out(self, transfer: int, worker: int | None = None, *, good: bool = True) -> None:
        """Let this worker, or all that have not, do their part now, and report it."""
        copy = self.copies.get(transfer)
        if copy is None:
            return
        for rank in sorted(copy.left) if worker is None else sorted(copy.left & {worker}):
            copy.left.discard(rank)
            pairs = list(zip(to_list(copy.job.device_blocks), to_list(copy.job.host_blocks), strict=True))
            for block, place in pairs[: None if good else len(pairs) // 2]:
                if copy.job.direction is Direction.STORE:
                    self.host[place][rank] = list(self.device[block][rank])
                else:
                    self.device[block][rank] = list(self.host[place][rank])
            self.reports.append(WorkerReport(transfer, rank, good))
        if not copy.left:
            del self.copies[transfer]

    def carry_out_all(self) -> None:
        for transfer in list(self.copies):
            self.carry_out(transfer)

    def hand_on(self) -> StepResults:
        """Give the workers' reports to the scheduler, and do what it says."""
        reports, self.reports = self.reports, []
        results = self.scheduler.update_connector_output(reports)
        self.results.append(results)
        for load in results.loads:
            request = self.requests[load.request]
            if request.loading and not request.finished:
                request.loading = False
                request.num_computed_tokens = load.num_computed_tokens
                if load.good:
                    self._cache(request, load.num_computed_tokens)
                    # vLLM allocates anew for a request that goes on after its load.
                    tables = [list(table) for table in request.tables]
                    self.scheduler.update_state_after_alloc(request, tables, 0)
                elif load.lost or len(self.groups) > 1:
                    self.preempt(request)
        for name in results.finished_sending:
            self.pool.free_blocks(self.sending.pop(name)[::-1])
        return results

    def reset(self) -> bool:
        """The cache is emptied, the device's too, as far as it is not in use."""
        self.pool.forget()
        return self.scheduler.reset_cache()

    def run(self, steps: int = 200) -> None:
        """Step until nothing is left to do, ending every copy in the step after it began."""
        for _ in range(steps):
            self.carry_out_all()
            self.hand_on()
            if not (self.waiting or self.running or self.scheduler.has_pending_work()):
                return
            self.step()
        raise AssertionError(f"S9: after {steps} steps: waiting {self.waiting}, running {list(self.running)}")
