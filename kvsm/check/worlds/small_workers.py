"""The workers of the small engine: the bytes in device and host memory, and the copies between them.

A worker carries out its part of a copy when the world says so, well or badly. Its report is kept until the
engine passes it on.
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
"""The content of memory that a copy in flight will write, or that a failed copy may have written."""

COPY_ERROR = "the world made it fail"
"""The error that a worker reports of a failed copy."""


class SmallCopy(msgspec.Struct):
    """A job at the workers. left: the workers that have not carried it out yet."""

    job: TransferJob
    left: set[int]


@declared
class ComputedRange(msgspec.Struct):
    """The tokens `first` to `last` (exclusive) of a request, which a scheduled step computes."""

    request: Annotated[
        SmallRequest,
        # Of a finished request only this is compared: `compute` still reads its tokens.
        Seen(lambda step, names: (names.requests[step.request.request_id], step.request.num_tokens)),
    ]
    first: Annotated[int, KEPT]
    last: Annotated[int, KEPT]
    owned: Annotated[list[list[int]], Seen(lambda step, _: step.request.tables is step.owned)]
    """The request's `tables` when the step was scheduled. The request has another object if it was preempted
    or finished since; only that is ever checked."""
    tables: Annotated[list[list[int]], Seen(lambda step, names: names.tables(step.tables))]
    """A copy of these tables from when the step was scheduled."""


_UNREAD = frozenset(map(int, (BlockState.FREE, BlockState.EVICTED, BlockState.ALLOCATED, BlockState.RETIRED)))


def of_each(cells: Sequence[list[Cell]], names: Names) -> Sequence[list[Cell]]:
    """The cells of one block, for each worker in the order of their names."""
    return cells if names.keep_workers else [cells[worker] for worker in names.workers]


def _host(workers: SmallWorkers, names: Names) -> list[Any]:
    """The cells of each slot; None for a free, planned or retired slot.

    Free and planned slots are written before they are read. Retired ones are never read.
    """
    words, chunk = names.ledger.blocks.words, names.ledger.config.blocks_per_chunk
    return [
        None
        if words[slot] & STATE_MASK in _UNREAD
        else [of_each(cells, names) for cells in workers.host[slot * chunk : (slot + 1) * chunk]]
        for slot in names.slots
    ]


def _copies(workers: SmallWorkers, names: Names) -> list[Any]:
    """Each copy, and the workers that have not carried it out.

    The ledger has the blocks of a live transfer. For a copy that was given up they are added here.
    """
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
    """The reports, sorted, because they may be passed on in any order.

    Reports on ended transfers are equal to each other: each is rejected.
    """
    live, transfers = names.ledger.transfers, names.transfers
    place = {worker: place for place, worker in enumerate(names.workers)}
    return sorted(
        (transfers[report.transfer], place[report.worker], report.good)
        if report.transfer in live
        else (NOBODY, 0, False)
        for report in workers.reports
    )


def _brought(workers: SmallWorkers, names: Names) -> list[int]:
    """The blocks that were loaded in an older epoch. No code reads more of `brought`."""
    epoch, brought = names.ledger.epoch, workers.brought
    return [place for block, place in names.blocks.items() if brought.get(block, epoch) < epoch]


def copy_times(transfer: int, worker: int) -> tuple[int | None, int | None]:
    """(queued, copying) times of a worker's copy (us). Some reports have no times: (None, None)."""
    return (None, None) if transfer % 5 == 0 else (transfer % 7, 1 + worker)


class SmallWorkers:
    """Memory by block, worker and token: `device[block][worker]` and `host[place][worker]` are cells."""

    groups: Annotated[tuple[KVCacheGroup, ...], FIXED]
    workers: Annotated[int, FIXED]
    device: list[list[list[Cell]]]
    host: Annotated[list[list[list[Cell]]], Seen(_host)]
    copies: Annotated[dict[int, SmallCopy], filled(_copies)]
    reports: Annotated[list[WorkerReport], filled(_reports)]
    """Reports that the engine has not passed on yet."""
    brought: Annotated[dict[int, int], filled(_brought)]
    """Device block -> epoch of the load into it, until it is recomputed."""
    weights_tag = b""
    """Ends each computed cell: other weights compute other KV for the same tokens."""

    def __init__(
        self, groups: Sequence[KVCacheGroup], device_blocks: int, host_places: int, workers: int
    ) -> None:
        self.groups, self.workers = tuple(groups), workers
        self.device = [[[] for _ in range(workers)] for _ in range(device_blocks)]
        self.host = [[[] for _ in range(workers)] for _ in range(host_places)]
        self.copies, self.reports, self.brought = {}, [], {}

    def start(self, plan: TransferPlan, epoch: int, fresh: Iterable[int] = ()) -> None:
        """Start the jobs of a step. The transfers of `plan.flush` are carried out before the step computes.

        The targets of the jobs are marked as torn.

        fresh: device blocks that have a new owner; their bytes are cleared.
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
        """Let this worker carry out its part of a copy, and report it. None: all workers that have yet to."""
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
        """Copy one worker's part. A failed copy copies half of the blocks, and tears the next one."""
        blocks = self._copied_blocks(job)
        whole = len(blocks) if good else len(blocks) // 2
        for number, (source, target) in enumerate(blocks[: whole + 1]):
            target[worker] = list(source[worker]) if number < whole else [TORN]

    def _copied_blocks(self, job: TransferJob) -> list[tuple[list[list[Cell]], list[list[Cell]]]]:
        """(source, target) for each block of a copy, each with the cells of every worker."""
        pairs = zip(to_list(job.device_blocks), to_list(job.host_blocks), strict=True)
        ends = [(self.device[block], self.host[place]) for block, place in pairs]
        return ends if job.direction is Direction.STORE else [(host, device) for device, host in ends]

    def carry_out_all(self) -> None:
        """Let all workers carry out their parts of all copies."""
        for transfer in list(self.copies):
            self.carry_out(transfer)

    def read(self, step: ComputedRange) -> None:
        """Check all KV that the computation of the range's first token reads."""
        request, end = step.request, step.first
        for index, (group, table) in enumerate(zip(self.groups, step.tables)):
            if group.kind is GroupKind.MAMBA:
                continue
            for token in range(first_read(group, end), end):
                block, offset = table[token // group.block_tokens], token % group.block_tokens
                for worker in range(self.workers):
                    cells = self.device[block][worker]
                    if offset >= len(cells) or cells[offset] != request.cells[token] + self.weights_tag:
                        message = (
                            f"request {request.request_id} reads token {token} of group {index} in device "
                            f"block {block} of worker {worker}, which holds other content"
                            f"{self.history_of(block)}"
                        )
                        raise PropertyBroken(Property.CORRECT_BYTES, message)

    def history_of(self, block: int) -> str:  # noqa: ARG002
        """Return the history of this device block, for a failure. A world has none: its list of actions shows
        the same."""
        return ""

    def write(self, step: ComputedRange, token: int, cell: bytes) -> None:
        """Write a token's cell to its block in every group. Later cells of the block are dropped."""
        for group, table in zip(self.groups, step.tables):
            place, offset = divmod(token, group.block_tokens)
            if group.kind is GroupKind.MAMBA or place >= len(table) or table[place] == NULL:
                continue
            if not offset:
                self.brought.pop(table[place], None)
            for worker in range(self.workers):
                cells = self.device[table[place]][worker]
                cells[offset:] = [*([None] * (offset - len(cells))), cell + self.weights_tag]
