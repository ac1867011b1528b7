"""The simplest copy engine: one thread, in order of submission. Tests can watch it and interfere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvsm.copies.copy_engine import CopyResult
from kvsm.copies.pairs import checked_pairs
from kvsm.copies.rank_memory import NumpyPools
from kvsm.core.plan import TransferJob
from kvsm.errors import TransferFailed, described


class PlainCopyEngine:
    """A `CopyEngine` that copies one transfer per poll, and all transfers that are waited for.

    calls: some of the calls made to it. meddle: called with each job right after its copy.
    """

    def __init__(self, device: Any, host: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.meddle: Callable[[TransferJob], None] = lambda _: None
        self._pools = NumpyPools(device, host)
        self._queued: dict[int, TransferJob] = {}
        self._finished: dict[int, CopyResult] = {}
        self._closed = False

    @property
    def num_device_blocks(self) -> int:
        return self._pools.layout.num_device_blocks

    @property
    def num_host_blocks(self) -> int:
        return self._pools.layout.num_host_blocks

    def mark(self) -> str:
        return f"mark {len(self.calls)}"

    def submit(self, job: TransferJob, after: Any = None) -> None:
        if self._closed:
            raise TransferFailed(f"transfer {job.transfer}: the engine is closed")
        if job.transfer in self._queued or job.transfer in self._finished:
            raise TransferFailed(f"transfer {job.transfer} is live; an id is never used again")
        self.calls.append(("submit", job.transfer, after))
        self._queued[job.transfer] = job

    def hold_compute(self, transfers: Iterable[int]) -> None:
        self.calls.append(("hold_compute", list(transfers)))

    def poll(self) -> list[CopyResult]:
        self.wait(list(self._queued)[:1])
        finished, self._finished = self._finished, {}
        return list(finished.values())

    def wait(self, transfers: Iterable[int]) -> None:
        for transfer in transfers:
            if transfer in self._queued:
                self._copy(self._queued.pop(transfer))

    def drain(self) -> None:
        self.calls.append(("drain",))
        self.wait(list(self._queued))

    def close(self) -> None:
        self._closed = True
        self.drain()

    def _copy(self, job: TransferJob) -> None:
        layout, error, copied = self._pools.layout, "", 0
        try:
            pairs = checked_pairs(job, layout.num_device_blocks, layout.num_host_blocks)
            self._pools.copy(job.direction, *pairs)
            copied = len(pairs[0]) * layout.block_bytes
            self.meddle(job)
        except TransferFailed as raised:
            error = described(raised)
        self._finished[job.transfer] = CopyResult(job.transfer, job.direction, not error, error, copied)
