"""A worker carries out the plans of one rank on its copy engine, and reports the end of each transfer.

One process may have several workers, each with its own engine and pools.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from time import perf_counter

import msgspec

from kvsm.copies.copy_engine import CopyEngine
from kvsm.core.plan import TransferJob, TransferPlan, WorkerReport
from kvsm.errors import ConfigError, TransferFailed, WrongArgument, described
from kvsm.events import Direction


class CopyStatistics(msgspec.Struct, frozen=True):
    """Counts over the reported transfers of one direction.

    transfers: number of transfers.
    failed: number of bad transfers.
    bytes: bytes copied by good transfers.
    seconds: time spent copying (s), summed over threads.
    """

    transfers: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def gigabytes_per_second(self) -> float:
        """Bandwidth of one copying thread; 0 if the engine measures no time."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


class WorkerStatistics(msgspec.Struct, frozen=True):
    """Counts over all transfers that a worker has reported."""

    rank: int
    store: CopyStatistics
    load: CopyStatistics
    store_sizes: dict[int, int] = {}
    load_sizes: dict[int, int] = {}
    """Bytes of a good copy -> number of copies of this size."""


class Worker:
    """Carries out the plans of rank `rank`. Every accepted transfer is reported exactly once.

    ended: number of transfers in the statistics.
    """

    def __init__(self, rank: int, engine: CopyEngine) -> None:
        try:
            self.rank = operator.index(rank)
        except TypeError:
            raise WrongArgument("Worker", "rank", f"is {rank!r}; it must be an int") from None
        self._engine = engine
        self._live: dict[int, float] = {}
        """Transfer -> when it was submitted (`perf_counter`)."""
        self._refused: list[WorkerReport] = []
        self._totals = {direction: CopyStatistics() for direction in Direction}
        self._sizes: dict[Direction, dict[int, int]] = {direction: {} for direction in Direction}
        self.ended = 0

    @property
    def num_host_blocks(self) -> int:
        """Size of this rank's host pool, in device blocks."""
        return self._engine.num_host_blocks

    def start(self, plan: TransferPlan) -> None:
        """Carry out the plan of one engine step before the step computes.

        Returns when every transfer in `plan.flush` has ended; `poll` returns the reports. A copy that hangs
        blocks this call. `plan.flush` is empty for an engine that counts references to its blocks and
        continues to step. Raises as `submit` does.
        """
        given = {job.transfer for job in (*plan.loads, *plan.stores)}
        self._engine.wait([transfer for transfer in plan.flush if transfer not in given])
        self.submit((*plan.loads, *plan.stores))
        self._engine.wait([transfer for transfer in plan.flush if transfer in given])

    def submit(self, jobs: Sequence[TransferJob]) -> None:
        """Start these jobs behind all compute that is queued so far: the order of copies (S12). A job that
        the engine refuses is reported as bad; nothing of it ran.

        Raises `TransferFailed`, with nothing started, if one of the transfers was submitted before and has
        no report yet. A bad report would free memory that the first copy may still touch.
        """
        named: set[int] = set()
        for place, job in enumerate(jobs):
            if not isinstance(job, TransferJob):
                problem = f"is of type {type(job).__name__}; it must be a TransferJob"
                raise WrongArgument("submit", f"jobs[{place}]", problem)
            if job.transfer in self._live or job.transfer in named:
                raise TransferFailed(f"transfer {job.transfer} was submitted twice to worker {self.rank}")
            named.add(job.transfer)
        self._live.update(dict.fromkeys(named, perf_counter()))
        for job in jobs:
            self._start(job)

    def poll(self) -> list[WorkerReport]:
        """Return the reports of transfers that ended since the last call: first refused jobs, then the
        others in the order in which they ended."""
        if not self._live:
            return []
        results = self._engine.poll()  # first: if it raises, nothing is lost
        if not results and not self._refused:
            return []
        reports, self._refused = self._refused, []
        for result in results:
            self._count(result.direction, result.good, result.bytes, result.seconds)
            reports.append(result.report(self.rank, self._live[result.transfer]))
        for report in reports:
            del self._live[report.transfer]
        return reports

    def unreported(self, transfers: Iterable[int] | None = None) -> set[int]:
        """Return the submitted transfers that this worker has not reported yet.

        transfers: only look at these; None: at all.
        """
        return set(self._live) if transfers is None else self._live.keys() & set(transfers)

    def wait(self, transfers: Iterable[int]) -> None:
        """Block until these transfers have ended; `poll` still returns the reports."""
        self._engine.wait(transfers)

    def use(self, engine: CopyEngine) -> None:
        """Replace the copy engine. Raises `TransferFailed` if a transfer was not reported yet."""
        if self._live:
            raise TransferFailed(
                f"worker {self.rank} cannot change its copy engine: transfers {sorted(self._live)} were not "
                "reported yet; wait for them and poll"
            )
        self._engine = engine

    def close(self) -> None:
        """Close the engine: wait for every transfer, and accept no more. `poll` still returns the reports."""
        self._engine.close()

    def statistics(self) -> WorkerStatistics:
        """Return the counts over all reported transfers."""
        return WorkerStatistics(
            self.rank,
            self._totals[Direction.STORE],
            self._totals[Direction.LOAD],
            dict(self._sizes[Direction.STORE]),
            dict(self._sizes[Direction.LOAD]),
        )

    def _start(self, job: TransferJob) -> None:
        try:
            self._engine.submit(job)
        except Exception as error:  # the other jobs of the plan must still be reported
            self._refused.append(WorkerReport(job.transfer, self.rank, False, described(error)))
            self._count(job.direction, False, 0, 0.0)

    def _count(self, direction: Direction, good: bool, copied_bytes: int, seconds: float) -> None:
        self.ended += 1
        total = self._totals[direction]
        self._totals[direction] = CopyStatistics(
            total.transfers + 1,
            total.failed + (not good),
            total.bytes + copied_bytes,
            total.seconds + max(0.0, seconds),  # below 0: a clock went back
        )
        if good:
            sizes = self._sizes[direction]
            sizes[copied_bytes] = sizes.get(copied_bytes, 0) + 1


def smallest_host_pool(workers: Iterable[Worker]) -> int:
    """Return the size of the smallest host pool, in device blocks. All ranks copy a block to the same slot,
    so no larger pool can be used in full.

    Divided by blocks_per_chunk it is the `host_blocks` of `OffloadConfig`. Raises `ConfigError` if there are
    no workers.
    """
    sizes = [worker.num_host_blocks for worker in workers]
    if not sizes:
        raise ConfigError("there are no workers, so no host pool to agree on; give one worker for each rank")
    return min(sizes)
