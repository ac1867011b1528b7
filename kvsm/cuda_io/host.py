"""The host engine: threads that copy real bytes between two pools in host memory.

A transfer is cut into pieces. A thread that takes a transfer claims its next piece and puts the transfer
back at the end of the queue before it copies: the threads share one large transfer, and a small one
behind it waits for one piece, not for all. Transfers thus end out of order, as on real hardware.
"""

from __future__ import annotations

from collections.abc import Iterable
from queue import SimpleQueue
from threading import Condition, Thread
from time import perf_counter
from typing import Any

from kvsm.cuda_io.engine import CopyResult
from kvsm.cuda_io.pools import Pools
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.ids import IdArray
from kvsm.plan import TransferPlan

PIECE_BYTES = 4 << 20
"""Bytes of a piece: some hundred microseconds of copying, beside which the queue costs nothing."""


class _Job:
    """A transfer in work. `claimed` belongs to the thread that took the job from the queue; the condition
    of the engine guards the rest."""

    __slots__ = ("claimed", "device_blocks", "error", "pieces_left", "plan", "seconds", "slots")

    def __init__(self, plan: TransferPlan, device_blocks: IdArray, slots: IdArray, pieces: int) -> None:
        self.plan = plan
        self.device_blocks = device_blocks
        self.slots = slots
        self.claimed = 0
        self.pieces_left = pieces
        self.seconds = 0.0
        self.error = ""

    def result(self, block_bytes: int) -> CopyResult:
        good = not self.error
        copied = len(self.slots) * block_bytes if good else 0
        return CopyResult(self.plan.transfer, self.plan.direction, good, self.error, copied, self.seconds)


class HostCopyEngine:
    """A `CopyEngine` of `threads` threads over two pools; see `Pools` for what a pool may be.

    All methods may be called from any thread. Raises `ConfigError`.
    """

    def __init__(self, device: Any, host: Any, threads: int = 2) -> None:
        if threads < 1:
            raise ConfigError(f"threads is {threads}; a host engine needs at least 1")
        self._pools = Pools(device, host)
        self._piece_blocks = max(1, PIECE_BYTES // self._pools.block_bytes)
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._changed = Condition()
        self._live: dict[int, _Job] = {}
        self._finished: list[CopyResult] = []
        self._closed = False
        # Daemons: an embedder that dies without closing must not hang at exit behind an idle thread.
        self._threads = [Thread(target=self._serve, name="kvsm-copy", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, plan: TransferPlan) -> None:
        device_blocks, slots = self._pools.check(plan)
        pieces = max(1, -(-len(slots) // self._piece_blocks))
        job = _Job(plan, device_blocks, slots, pieces)
        with self._changed:
            if self._closed:
                raise TransferFailed(f"transfer {plan.transfer}: the engine is closed")
            if plan.transfer in self._live:
                raise TransferFailed(f"transfer {plan.transfer} is live; an id is never used again")
            self._live[plan.transfer] = job
            self._queue.put(job)

    def poll(self) -> list[CopyResult]:
        with self._changed:
            finished, self._finished = self._finished, []
            for result in finished:
                del self._live[result.transfer]
        return finished

    def wait(self, transfers: Iterable[int]) -> None:
        with self._changed:
            named = [self._live[transfer] for transfer in transfers if transfer in self._live]
            self._changed.wait_for(lambda: not any(job.pieces_left for job in named))

    def close(self) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                # A thread stops at the first None that it meets, so none goes in before the last piece.
                self._changed.wait_for(lambda: not any(job.pieces_left for job in self._live.values()))
                for _ in self._threads:
                    self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            first = job.claimed
            job.claimed = last = first + self._piece_blocks
            if last < len(job.slots):
                self._queue.put(job)
            started = perf_counter()
            error = self._copy_piece(job, first, last)
            self._end_piece(job, perf_counter() - started, error)

    def _copy_piece(self, job: _Job, first: int, last: int) -> str:
        """Copy the pairs from `first` up to `last`; what went wrong, or nothing. A piece of a job that has
        failed is only counted."""
        if job.error:
            return job.error
        try:
            self._copy(job.plan.direction, job.device_blocks[first:last], job.slots[first:last])
        except BaseException as error:  # whatever it is, the transfer must end and the thread must live
            return f"{type(error).__name__}: {error}"
        return ""

    def _copy(self, direction: Direction, device_blocks: IdArray, slots: IdArray) -> None:
        self._pools.copy(direction, device_blocks, slots)

    def _end_piece(self, job: _Job, seconds: float, error: str) -> None:
        with self._changed:
            job.seconds += seconds
            job.error = job.error or error
            job.pieces_left -= 1
            if not job.pieces_left:
                self._finished.append(job.result(self._pools.block_bytes))
                self._changed.notify_all()
