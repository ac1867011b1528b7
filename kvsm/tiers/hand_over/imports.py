"""`PoolImports`: one rank copies its share of handed-over blocks into its own host pool.

`HostCopyEngine` copies rows of the other engine's pool to rows of this engine's pool. A pool is mapped only
while copies from it are in flight, because a mapping keeps the memory of an ended engine allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvsm.copies import BorrowedPool, HostCopyEngine
from kvsm.core.plan import ImportJob, TransferJob, WorkerReport
from kvsm.errors import described
from kvsm.events import Direction
from kvsm.ids import listed, unpack
from kvsm.tiers.hand_over.peer_messages import pool_path


class _Source:
    """The pool of another engine, the engine that copies from it, and the jobs in flight."""

    def __init__(self, path: Path, host: NDArray[np.uint8]) -> None:
        self.pool = BorrowedPool(path, host.shape[1])
        self.engine = HostCopyEngine(self.pool.blocks, host)
        self.jobs: dict[int, tuple[ImportJob, float]] = {}
        """Transfer -> its job, and when it was submitted (s, `perf_counter`)."""

    def close(self) -> None:
        self.engine.close()
        del self.engine
        self.pool.close()


class PoolImports:
    """The imports of one rank.

    rank: this rank, which copies from the pool of the same rank of the other engine.
    directory: the common directory of the engines.
    host: this rank's host pool.
    arrived: called with the copied host blocks, before the copy is reported.
    """

    def __init__(
        self,
        rank: int,
        directory: Path,
        host: NDArray[np.uint8],
        arrived: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self._rank, self._directory, self._host, self._arrived = rank, directory, host, arrived
        self._sources: dict[str, _Source] = {}
        self._refused: list[WorkerReport] = []

    def start(self, jobs: Sequence[ImportJob]) -> None:
        """Start these copies. A copy that cannot start is reported as bad."""
        for job in jobs:
            self._start(job)

    def _start(self, job: ImportJob) -> None:
        submitted = perf_counter()
        try:
            source = self._sources.get(job.engine)
            if source is None:
                path = pool_path(self._directory, job.engine, self._rank)
                source = self._sources[job.engine] = _Source(path, self._host)
            source.engine.submit(
                TransferJob(job.transfer, Direction.STORE, job.source_blocks, job.host_blocks)
            )
            source.jobs[job.transfer] = job, submitted
        except Exception as error:  # the other jobs must still be reported
            self._refused.append(WorkerReport(job.transfer, self._rank, False, described(error)))

    def poll(self) -> list[WorkerReport]:
        """Return the reports of copies that have ended since the last call. Unmap pools without copies in
        flight."""
        reports, self._refused = self._refused, []
        for name, source in list(self._sources.items()):
            for result in source.engine.poll():
                job, submitted = source.jobs.pop(result.transfer)
                if result.good and self._arrived is not None:
                    self._arrived(listed(unpack(job.host_blocks)))
                reports.append(result.report(self._rank, submitted))
            if not source.jobs:
                source.close()
                del self._sources[name]
        return reports

    def close(self) -> None:
        """Wait until every copy has ended, and unmap all pools. Idempotent."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()
