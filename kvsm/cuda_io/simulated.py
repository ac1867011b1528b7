"""The simulated engine: real bytes, no threads, no clock; a seed decides when and in which order.

A transfer draws at its submission how many calls of `poll` pass before it ends. It touches memory only
then, all at once and as late as its result allows: whoever hands out its blocks too early sees wrong
bytes. The same calls on the same seed give the same results, in every process.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

from kvsm.cuda_io.engine import CopyResult
from kvsm.cuda_io.pools import Pools
from kvsm.errors import ConfigError, TransferFailed
from kvsm.ids import IdArray
from kvsm.plan import TransferJob

LONGEST_POLLS = 4
"""A transfer ends in one of this many calls of `poll` after its submission, so that all end."""


class _Queued:
    """A transfer that has not ended. `due` is the number of the call of `poll` that ends it."""

    __slots__ = ("device_blocks", "due", "fails", "host_blocks", "job")

    def __init__(
        self, job: TransferJob, device_blocks: IdArray, host_blocks: IdArray, due: int, fails: bool
    ) -> None:
        self.job = job
        self.device_blocks = device_blocks
        self.host_blocks = host_blocks
        self.due = due
        self.fails = fails


class SimulatedCopyEngine:
    """A `CopyEngine` for one thread, driven by its calls. See `Pools` for what a pool may be.

    failure_rate: share of transfers, 0 to 1, that copy some of their blocks and end as bad. Raises
    `ConfigError`.
    """

    def __init__(self, device: Any, host: Any, seed: int, failure_rate: float = 0.0) -> None:
        if not 0.0 <= failure_rate <= 1.0:
            raise ConfigError(f"failure_rate is {failure_rate}; it must be from 0 to 1")
        self._pools = Pools(device, host)
        self._random = Random(seed)
        self._failure_rate = failure_rate
        self._polls = 0
        self._queued: dict[int, _Queued] = {}
        self._finished: dict[int, CopyResult] = {}
        self._closed = False

    @property
    def num_host_blocks(self) -> int:
        return len(self._pools.host)

    def submit(self, job: TransferJob) -> None:
        device_blocks, host_blocks = self._pools.check(job)
        if self._closed:
            raise TransferFailed(f"transfer {job.transfer}: the engine is closed")
        if job.transfer in self._queued or job.transfer in self._finished:
            raise TransferFailed(f"transfer {job.transfer} is live; an id is never used again")
        due = self._polls + 1 + int(self._random.random() * LONGEST_POLLS)
        fails = self._random.random() < self._failure_rate
        self._queued[job.transfer] = _Queued(job, device_blocks, host_blocks, due, fails)

    def fail(self, transfer: int) -> None:
        """Let a transfer that has not ended copy some of its blocks and end as bad."""
        if transfer not in self._queued:
            raise TransferFailed(f"transfer {transfer} cannot be made to fail: it is not in flight")
        self._queued[transfer].fails = True

    def poll(self) -> list[CopyResult]:
        self._polls += 1
        self._end([transfer for transfer, queued in self._queued.items() if queued.due <= self._polls])
        finished, self._finished = self._finished, {}
        return list(finished.values())

    def wait(self, transfers: Iterable[int]) -> None:
        # In ascending order, so that a caller's set does not bring its own order into the shuffle.
        self._end(sorted(self._queued.keys() & set(transfers)))

    def close(self) -> None:
        self._closed = True
        self._end(list(self._queued))

    def _end(self, transfers: list[int]) -> None:
        """End these, in an order that the seed decides."""
        if len(transfers) > 1:
            self._random.shuffle(transfers)
        for transfer in transfers:
            self._finished[transfer] = self._copy(self._queued.pop(transfer))

    def _copy(self, queued: _Queued) -> CopyResult:
        job, count = queued.job, len(queued.host_blocks)
        copied = int(self._random.random() * (count + 1)) if queued.fails else count
        error = f"simulated failure after {copied} of {count} blocks" if queued.fails else ""
        try:
            self._pools.copy(job.direction, queued.device_blocks[:copied], queued.host_blocks[:copied])
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        good = not error
        copied_bytes = count * self._pools.block_bytes if good else 0
        return CopyResult(job.transfer, job.direction, good, error, copied_bytes)
