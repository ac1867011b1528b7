"""The workers of the small engine: the bytes in device and host memory, and the copies between them.

Each worker carries out its part of a copy when it is told to, well or badly. Its report waits until it is
handed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec

from kvsm.check.worlds.small_request import NULL, Cell, SmallRequest, first_read
from kvsm.core.ledger.canonical import FIXED, KEPT, NOBODY, Names, Seen, declared, filled
from kvsm.core.plan import TransferJob, TransferPlan, WorkerReport
from kvsm.core.scheduler import GroupKind, KVCacheGroup
from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.ids import listed, to_list
from kvsm.properties import Property
from kvsm.states.block import BlockState
from kvsm.states.words import STATE_MASK

TORN = b"torn"
"""What memory holds while a copy is to write it, and after a copy that failed."""

COPY_ERROR = "it was told to fail"
"""What a worker says of a copy that failed."""


class SmallCopy(msgspec.Struct):
    """A job at the workers. left: the workers that have not carried it out yet."""

    job: TransferJob
    left: set[int]


@declared
class ComputedRange(msgspec.Struct):
    """Tokens of a request that a step computes, into the blocks that it had when the step was decided."""

    request: Annotated[
        SmallRequest,
        # A finished request is compared no further elsewhere; here its tokens are still looked at.
        Seen(lambda one, names: (names.requests[one.request.request_id], one.request.num_tokens)),
    ]
    first: Annotated[int, KEPT]
    last: Annotated[int, KEPT]
    owned: Annotated[list[list[int]], Seen(lambda one, _: one.request.tables is one.owned)]
    """The request's tables then. It has others now if it was preempted since: no more is asked."""
    tables: Annotated[list[list[int]], Seen(lambda one, names: names.tables(one.tables))]
    """What they held then."""


_UNREAD = frozenset(map(int, (BlockState.FREE, BlockState.EVICTED, BlockState.ALLOCATED, BlockState.RETIRED)))


def of_each(cells: Sequence[list[Cell]], names: Names) -> Sequence[list[Cell]]:
    """What the workers hold of one block, in the order of their names."""
    return cells if names.keep_workers else [cells[worker] for worker in names.workers]


def _host(workers: SmallWorkers, names: Names) -> list[Any]:
    """Left out: free slots, planned ones and retired ones. They are written before they are read, or never
    read."""
    words, chunk = names.ledger.blocks.words, names.ledger.config.blocks_per_chunk
    return [
        None
        if words[slot] & STATE_MASK in _UNREAD
        else [of_each(cells, names) for cells in workers.host[slot * chunk : (slot + 1) * chunk]]
        for slot in names.slots
    ]


def _copies(workers: SmallWorkers, names: Names) -> list[Any]:
    """The ledger says what a live transfer copies. It does not know a copy that was given up."""
    live = names.ledger.transfers
    return [
        (
            names.transfers[id],
            [worker in copy.left for worker in names.workers],
            None if id in live else _given_up(copy.job, names),
        )
        for id, copy in workers.copies.items()
    ]


def _given_up(job: TransferJob, names: Names) -> Any:
    device_blocks, places = job.pairs()
    chunk = names.ledger.config.blocks_per_chunk
    return (
        job.direction is Direction.LOAD,
        [names.blocks[block] for block in listed(device_blocks)],
        [(names.slots[place // chunk], place % chunk) for place in listed(places)],
    )


def _reports(workers: SmallWorkers, names: Names) -> list[Any]:
    """They may be handed on in any order. Reports of transfers that are over are refused, all alike."""
    live, transfers = names.ledger.transfers, names.transfers
    place = {worker: place for place, worker in enumerate(names.workers)}
    return sorted(
        (transfers[one.transfer], place[one.worker], one.good) if one.transfer in live else (NOBODY, 0, False)
        for one in workers.reports
    )


def _brought(workers: SmallWorkers, names: Names) -> list[int]:
    """Only whether the epoch is an older one is asked."""
    epoch, brought = names.ledger.epoch, workers.brought
    return [place for block, place in names.blocks.items() if brought.get(block, epoch) < epoch]


def copy_times(transfer: int, worker: int) -> tuple[int | None, int | None]:
    """How long the copy of a worker was queued, and took (us). Some workers do not know."""
    return (None, None) if transfer % 5 == 0 else (transfer % 7, 1 + worker)


class SmallWorkers:
    """Memory by block, worker and token: `device[block][worker]` and `host[place][worker]` are cells."""

    groups: Annotated[tuple[KVCacheGroup, ...], FIXED]
    workers: Annotated[int, FIXED]
    device: list[list[list[Cell]]]
    host: Annotated[list[list[list[Cell]]], Seen(_host)]
    copies: Annotated[dict[int, SmallCopy], filled(_copies)]
    reports: Annotated[list[WorkerReport], filled(_reports)]
    """Not handed on yet."""
    brought: Annotated[dict[int, int], filled(_brought)]
    """Device block -> epoch of the load that brought its content, until it is recomputed."""

    def __init__(
        self, groups: Sequence[KVCacheGroup], device_blocks: int, host_places: int, workers: int
    ) -> None:
        self.groups, self.workers = tuple(groups), workers
        self.device = [[[] for _ in range(workers)] for _ in range(device_blocks)]
        self.host = [[[] for _ in range(workers)] for _ in range(host_places)]
        self.copies, self.reports, self.brought = {}, [], {}

    def start(self, plan: TransferPlan, epoch: int, fresh: Iterable[int] = ()) -> None:
        """Take a step's jobs. The transfers of `plan.flush` end here, before the step computes.

        fresh: device blocks that have a new owner. Their bytes go, and so do the bytes that a job will write.
        """
        for transfer in plan.flush:
            self.carry_out(transfer)
        for job in plan.stores:
            older = [block for block in to_list(job.device_blocks) if self.brought.get(block, epoch) < epoch]
            if older:
                message = f"device blocks {older} are stored with content of an older epoch"
                raise PropertyBroken(Property.NO_STALE_DATA, message)
        for block in fresh:
            self.device[block] = [[] for _ in range(self.workers)]
        for job in plan.loads:
            blocks = to_list(job.device_blocks)
            self.brought.update(dict.fromkeys(blocks, epoch))
            for block in blocks:
                self.device[block] = [[TORN] for _ in range(self.workers)]
        for job in plan.stores:
            for place in to_list(job.host_blocks):
                self.host[place] = [[TORN] for _ in range(self.workers)]
        for job in (*plan.loads, *plan.stores):
            self.copies[job.transfer] = SmallCopy(job, set(range(self.workers)))
        for transfer in plan.flush:
            self.carry_out(transfer)

    def carry_out(self, transfer: int, worker: int | None = None, *, good: bool = True) -> None:
        """Let this worker do its part of a copy now, and report it. None: all workers that have not."""
        copy = self.copies.get(transfer)
        if copy is None:
            return
        for rank in sorted(copy.left) if worker is None else sorted(copy.left & {worker}):
            copy.left.discard(rank)
            self._copy(copy.job, rank, good)
            error, times = "" if good else COPY_ERROR, copy_times(transfer, rank)
            self.reports.append(WorkerReport(transfer, rank, good, error, *times))
        if not copy.left:
            del self.copies[transfer]

    def _copy(self, job: TransferJob, worker: int, good: bool) -> None:
        """Copy one worker's part. If it fails, half is copied and the next block is torn."""
        pairs = list(zip(to_list(job.device_blocks), to_list(job.host_blocks), strict=True))
        whole = len(pairs) if good else len(pairs) // 2
        for number, (block, place) in enumerate(pairs[: whole + 1]):
            if job.direction is Direction.STORE:
                source, target = self.device[block], self.host[place]
            else:
                source, target = self.host[place], self.device[block]
            target[worker] = list(source[worker]) if number < whole else [TORN]

    def carry_out_all(self) -> None:
        """Let all workers do their parts of all copies."""
        for transfer in list(self.copies):
            self.carry_out(transfer)

    def read(self, one: ComputedRange) -> None:
        """Check that everything is there that its first token looks at."""
        request, end = one.request, one.first
        for index, (group, table) in enumerate(zip(self.groups, one.tables)):
            if group.kind is GroupKind.MAMBA:
                continue
            for token in range(first_read(group, end), end):
                block, offset = table[token // group.block_tokens], token % group.block_tokens
                for worker in range(self.workers):
                    cells = self.device[block][worker]
                    if offset >= len(cells) or cells[offset] != request.cells[token]:
                        message = (
                            f"request {request.request_id} reads token {token} of group {index} in device "
                            f"block {block} of worker {worker}, which holds other content"
                        )
                        raise PropertyBroken(Property.CORRECT_BYTES, message)

    def write(self, one: ComputedRange, token: int, cell: bytes) -> None:
        """Write this token's cell in the blocks of every group. Cells behind it in a block go."""
        for group, table in zip(self.groups, one.tables):
            place, offset = divmod(token, group.block_tokens)
            if group.kind is GroupKind.MAMBA or place >= len(table) or table[place] == NULL:
                continue
            if not offset:
                self.brought.pop(table[place], None)
            for worker in range(self.workers):
                cells = self.device[table[place]][worker]
                cells[offset:] = [*([None] * (offset - len(cells))), cell]
