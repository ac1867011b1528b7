"""The workers of the small engine: the bytes in device and host memory, and the copies between them.

A copy is carried out by each worker at an instant that somebody chooses, for better or for worse, and its
report lies there until somebody hands it on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.ids import to_list
from kvsm.plan import TransferJob, TransferPlan, WorkerReport
from kvsm.properties import Property
from kvsm.scheduler import GroupKind, KVCacheGroup
from kvsm.worlds.small_request import NULL, Cell, SmallRequest

TORN = b"torn"
"""What is in memory that a copy writes, until it has written it; and what a copy that failed leaves."""


@dataclass
class SmallCopy:
    """A job at the workers. left: those that have still to carry it out."""

    job: TransferJob
    left: set[int] = field(default_factory=set)


@dataclass
class ComputedRange:
    """Tokens of a request that a step computes, into the blocks that it had when the step was decided. owned:
    its tables then; it has others if it was preempted since."""

    request: SmallRequest
    first: int
    last: int
    owned: list[list[int]]
    tables: list[list[int]]


class SmallWorkers:
    """Memory by block, worker and token: `device[block][worker]` and `host[place][worker]` are cells."""

    def __init__(
        self, groups: Sequence[KVCacheGroup], device_blocks: int, host_places: int, workers: int
    ) -> None:
        self.groups, self.workers = tuple(groups), workers
        self.device: list[list[list[Cell]]] = [[[] for _ in range(workers)] for _ in range(device_blocks)]
        self.host: list[list[list[Cell]]] = [[[] for _ in range(workers)] for _ in range(host_places)]
        self.copies: dict[int, SmallCopy] = {}
        self.reports: list[WorkerReport] = []
        """Not handed on yet."""
        self.brought: dict[int, int] = {}
        """Device block -> epoch of the load that brought its content, until it is computed anew."""

    def start(self, plan: TransferPlan, epoch: int, fresh: Iterable[int] = ()) -> None:
        """Take a step's jobs; those that are to be waited for end here, before the step computes.

        fresh: device blocks that have a new owner: what was in them is not to be relied on. Nor is, from now
        on, what is in the blocks that a job writes.
        """
        for transfer in plan.flush:
            self.carry_out(transfer)
        for job in plan.stores:
            older = [block for block in to_list(job.device_blocks) if self.brought.get(block, epoch) < epoch]
            if older:
                message = f"device blocks {older} are stored, which a load of an older epoch brought"
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
        """Let this worker, or all that have not, do their part now, and report it."""
        copy = self.copies.get(transfer)
        if copy is None:
            return
        for rank in sorted(copy.left) if worker is None else sorted(copy.left & {worker}):
            copy.left.discard(rank)
            self._copy(copy.job, rank, good)
            self.reports.append(WorkerReport(transfer, rank, good))
        if not copy.left:
            del self.copies[transfer]

    def _copy(self, job: TransferJob, worker: int, good: bool) -> None:
        """A worker that fails has copied half of it, and left the next block torn."""
        pairs = list(zip(to_list(job.device_blocks), to_list(job.host_blocks), strict=True))
        whole = len(pairs) if good else len(pairs) // 2
        for number, (block, place) in enumerate(pairs[: whole + 1]):
            if job.direction is Direction.STORE:
                source, target = self.device[block], self.host[place]
            else:
                source, target = self.host[place], self.device[block]
            target[worker] = list(source[worker]) if number < whole else [TORN]

    def carry_out_all(self) -> None:
        for transfer in list(self.copies):
            self.carry_out(transfer)

    def read(self, one: ComputedRange) -> None:
        """Everything that its first token looks at must be there."""
        request, end = one.request, one.first
        for index, (group, table) in enumerate(zip(self.groups, one.tables)):
            if group.kind is GroupKind.MAMBA:
                continue
            for token in range(group.first_needed_token(end), end):
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
        """Every group's block of this token gets it, and what was behind it there is no more."""
        for group, table in zip(self.groups, one.tables):
            place, offset = divmod(token, group.block_tokens)
            if group.kind is GroupKind.MAMBA or place >= len(table) or table[place] == NULL:
                continue
            if not offset:
                self.brought.pop(table[place], None)
            for worker in range(self.workers):
                cells = self.device[table[place]][worker]
                cells[offset:] = [*([None] * (offset - len(cells))), cell]
