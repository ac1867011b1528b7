"""The small engine of a machine: it records the calls that touched each block of its memory, and counts the
cases of its checks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.check.worlds.small_workers import ComputedRange
from kvsm.core.plan import TransferJob, TransferPlan
from kvsm.core.scheduler import StepResults
from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.testing.block_history import Block, BlockHistory
from kvsm.testing.offload_cases import count_allocation, count_match
from kvsm.testing.under_test import Call


class TracedEngine(SmallEngine):
    """A small engine with the history of its device blocks and host slots."""

    def __init__(self, history: BlockHistory, *arguments: Any, **options: Any) -> None:
        self.history = history
        self._planned_by: dict[int, Call | None] = {}
        self._finished_by: dict[str, Call | None] = {}
        """Request -> what the user's connector returned when it finished."""
        super().__init__(*arguments, **options)

    def finish(self, request: SmallRequest, *, aborted: bool = False) -> None:
        super().finish(request, aborted=aborted)
        self._finished_by.setdefault(request.request_id, self.history.latest_call("request_finished"))

    def take_results(self, results: StepResults) -> None:
        for name in results.finished_sending:
            if name not in self.sending:
                call = self._finished_by.get(name)
                self.history.suspect(call)
                answer = f"{call.named()} {call.outcome}" if call else "the connector kept none of them"
                raise PropertyBroken(
                    Property.ONE_RELEASE_PER_HOLD,
                    f"the blocks of request {name} may be freed only now, when no copy touches them; the "
                    f"engine freed them when it finished: {answer}",
                )
        super().take_results(results)

    def _ask(self, request: SmallRequest, local: int) -> int | None:
        count_match(self, request, local)
        return super()._ask(request, local)

    def _grow(self, request: SmallRequest, end: int) -> list[list[int]] | None:
        before, added = len(self.fresh), super()._grow(request, end)
        if len(self.fresh) > before:
            count_allocation(self, request.tables)
        return added

    def _allocate(self, hits: list[list[int]], end: int, total: int) -> list[list[int]] | None:
        before, tables = len(self.fresh), super()._allocate(hits, end, total)
        if tables is not None and len(self.fresh) > before:
            count_allocation(self, tables)
        return tables

    def slot_of(self, place: int) -> Block:
        """The slot of a block in host memory. A slot holds a chunk of blocks."""
        return Block("slot", place // self.core.config.blocks_per_chunk)

    def history_of(self, block: int) -> str:
        return self.history.blame(_device(block))

    def start(self, plan: TransferPlan, epoch: int, fresh: Iterable[int] = ()) -> None:
        call = self.history.latest_call()
        for job in (*plan.loads, *plan.stores):
            self._planned_by[job.transfer] = call
            self._copied(job, "planned")
        super().start(plan, epoch, fresh)

    def _copy(self, job: TransferJob, worker: int, good: bool) -> None:
        self._copied(job, f"{'carried out' if good else 'failed'} by worker {worker}")
        super()._copy(job, worker, good)

    def _copied(self, job: TransferJob, how: str) -> None:
        """Record what a copy reads and writes. If it is only planned, its target now has torn content."""
        is_store = job.direction is Direction.STORE
        for block, place in zip(to_list(job.device_blocks), to_list(job.host_blocks)):
            device, slot = _device(block), self.slot_of(place)
            source, target = (device, slot) if is_store else (slot, device)
            what = f"{'store' if is_store else 'load'} {job.transfer} from {source} to {target}, {how}"
            self.history.wrote(target, what, source, self._planned_by.get(job.transfer))

    def read(self, step: ComputedRange) -> None:
        for table in step.tables:
            for block in table:
                self.history.read(_device(block), _computes(step))
        super().read(step)

    def write(self, step: ComputedRange, token: int, cell: bytes) -> None:
        for group, table in zip(self.groups, step.tables):
            if token // group.block_tokens < len(table):
                self.history.wrote(_device(table[token // group.block_tokens]), _computes(step))
        super().write(step, token, cell)


def _computes(step: ComputedRange) -> str:
    return f"{step.request.request_id} computes from token {step.first} on"


def _device(block: int) -> Block:
    return Block("device block", block)
