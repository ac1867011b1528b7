"""A worker: runs the plans of one rank on its copy engine, and reports the end of each.

Several workers may live in one process, each with its own engine and pools.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvsm.cuda_io.engine import CopyEngine
from kvsm.errors import TransferFailed
from kvsm.events import Direction
from kvsm.plan import TransferPlan, WorkerReport


class CopyStatistics(msgspec.Struct, frozen=True):
    """Copies of one direction that have been reported: how many, how many of them bad, bytes of the good
    ones, and seconds spent copying."""

    transfers: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def gigabytes_per_second(self) -> float:
        """Rate of one copying thread; 0 where the engine measures no time."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


class WorkerStatistics(msgspec.Struct, frozen=True):
    """What a worker has reported so far."""

    rank: int
    store: CopyStatistics
    load: CopyStatistics


class Worker:
    """Rank `rank`: takes plans, gives reports. A transfer that was taken is reported exactly once."""

    def __init__(self, rank: int, engine: CopyEngine) -> None:
        self.rank = rank
        self._engine = engine
        self._live: set[int] = set()
        self._refused: list[WorkerReport] = []
        self._totals = {direction: CopyStatistics() for direction in Direction}

    def submit(self, plans: Sequence[TransferPlan]) -> None:
        """Start these. A plan that the engine refuses is reported as bad: nothing of it ran.

        Raises `TransferFailed`, with nothing started, for a transfer that this worker has not reported
        yet. A bad report in its place would free memory that the first copy may still touch.
        """
        named: set[int] = set()
        for plan in plans:
            if plan.transfer in self._live or plan.transfer in named:
                raise TransferFailed(f"transfer {plan.transfer} was submitted twice to worker {self.rank}")
            named.add(plan.transfer)
        self._live |= named
        for plan in plans:
            self._start(plan)

    def poll(self) -> list[WorkerReport]:
        """The transfers that ended since the last call: those refused, then the others as they ended."""
        reports, self._refused = self._refused, []
        for result in self._engine.poll():
            self._count(result.direction, result.good, result.bytes, result.seconds)
            reports.append(WorkerReport(result.transfer, self.rank, result.good, result.error))
        self._live.difference_update(report.transfer for report in reports)
        return reports

    def wait(self, transfers: Iterable[int]) -> None:
        """Block until these have ended; `poll` still gives the reports."""
        self._engine.wait(transfers)

    def close(self) -> None:
        """Let every transfer end, and take no more; `poll` still gives the reports."""
        self._engine.close()

    def statistics(self) -> WorkerStatistics:
        return WorkerStatistics(self.rank, self._totals[Direction.STORE], self._totals[Direction.LOAD])

    def _start(self, plan: TransferPlan) -> None:
        try:
            self._engine.submit(plan)
        except TransferFailed as refusal:
            self._refused.append(WorkerReport(plan.transfer, self.rank, False, str(refusal)))
            self._count(plan.direction, False, 0, 0.0)

    def _count(self, direction: Direction, good: bool, copied_bytes: int, seconds: float) -> None:
        total = self._totals[direction]
        self._totals[direction] = CopyStatistics(
            total.transfers + 1,
            total.failed + (not good),
            total.bytes + copied_bytes,
            total.seconds + seconds,
        )
