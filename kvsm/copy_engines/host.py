"""The host engine: threads that copy real bytes between two pools in host memory.

Compute on a host is over when its call returns. So there is nothing to mark, each transfer may start at
once, and compute that must not start before a transfer has ended waits for it.

A transfer is cut into pieces. The thread that takes it first checks its pairs, and each thread that takes it
claims its next piece and puts the transfer back at the end of the queue before it copies: the threads share
one large transfer, and a small one behind it waits for one piece, not for all. Transfers thus end out of
order, as on real hardware.

What a copy raises makes its transfer bad, and the thread goes on. A thread that dies all the same (of the
bookkeeping around a copy, for want of memory, say) breaks the engine: what it had in hand is in a state
that nobody knows. The other threads then stop too, each after its piece, and the last one ends every live
transfer as bad. Not before: a transfer that is over must not be touched any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from threading import Condition, Thread
from time import perf_counter
from typing import Any

from kvsm.copy_engines.interface import CopyResult, check_accepted
from kvsm.copy_engines.pairs import checked_pairs
from kvsm.copy_engines.pools import NumpyPools
from kvsm.errors import ConfigError, described
from kvsm.events import Direction
from kvsm.ids import NO_IDS, IdArray
from kvsm.plan import TransferJob

PIECE_BYTES = 16 << 20
"""Most bytes of a piece: one or two milliseconds of copying, beside which two waits for the interpreter's
lock are bearable; and the longest that a small transfer waits behind a large one."""

SHARED_BYTES = 1 << 20
"""A transfer of more is cut so that every thread gets a piece."""


class _HostTransfer:
    """A transfer in work. The pairs and `claimed` belong to the thread that took it from the queue; the
    condition of the engine guards the rest."""

    __slots__ = (
        "claimed",
        "device_blocks",
        "error",
        "host_blocks",
        "job",
        "piece_blocks",
        "pieces_left",
        "seconds",
    )

    def __init__(self, job: TransferJob) -> None:
        self.job = job
        self.device_blocks: IdArray = NO_IDS
        self.host_blocks: IdArray = NO_IDS
        self.piece_blocks = 0
        """0 until the pairs were checked."""
        self.claimed = 0
        self.pieces_left = 1
        self.seconds = 0.0
        self.error = ""

    def result(self, block_bytes: int) -> CopyResult:
        good = not self.error
        copied = len(self.host_blocks) * block_bytes if good else 0
        return CopyResult(self.job.transfer, self.job.direction, good, self.error, copied, self.seconds)


class HostCopyEngine:
    """A `CopyEngine` of `threads` threads over two pools; see `NumpyPools` for what a pool may be.

    All methods may be called from any thread. Raises `ConfigError`.
    """

    def __init__(self, device: Any | Sequence[Any], host: Any, threads: int = 2) -> None:
        if threads < 1:
            raise ConfigError(f"threads is {threads}; a host engine needs at least 1")
        self._pools = NumpyPools(device, host)
        self._layout = self._pools.layout
        self._queue: SimpleQueue[_HostTransfer | None] = SimpleQueue()
        self._changed = Condition()
        self._live: dict[int, _HostTransfer] = {}
        self._finished: list[CopyResult] = []
        self._closed = False
        self._broken = ""
        """What a copying thread died of."""
        self._serving = threads
        """Threads that may still touch memory."""
        # Daemons: an embedder that dies without closing must not hang at exit behind an idle thread.
        self._threads = [Thread(target=self._run, name="kvsm-copy", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def num_device_blocks(self) -> int:
        return self._layout.num_device_blocks

    @property
    def num_host_blocks(self) -> int:
        return self._layout.num_host_blocks

    def mark(self) -> None:
        return None

    def submit(self, job: TransferJob, after: Any = None) -> None:  # noqa: ARG002  compute is over already
        with self._changed:
            check_accepted(job.transfer, self._live, self._broken, self._closed)
            self._live[job.transfer] = copying = _HostTransfer(job)
            self._queue.put(copying)

    def hold_compute(self, transfers: Iterable[int]) -> None:
        self.wait(transfers)

    def poll(self) -> list[CopyResult]:
        with self._changed:
            finished, self._finished = self._finished, []
            for result in finished:
                del self._live[result.transfer]
        return finished

    def wait(self, transfers: Iterable[int]) -> None:
        with self._changed:
            self._await([self._live[transfer] for transfer in transfers if transfer in self._live])

    def drain(self) -> None:
        with self._changed:
            self._await(list(self._live.values()))

    def close(self) -> None:
        # All of it each time: a close that was interrupted (Ctrl-C) is gone through again by the next one.
        with self._changed:
            self._closed = True
            # A thread stops at the first None that it meets, so none goes in before the last piece.
            self._await(list(self._live.values()))
            self._stop_threads()
        for thread in self._threads:
            thread.join()

    def _await(self, named: Sequence[_HostTransfer]) -> None:
        self._changed.wait_for(lambda: not any(copying.pieces_left for copying in named))

    def _stop_threads(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        """A copying thread, and what is left to do when it ends."""
        died_of = ""
        try:
            self._serve()
        except BaseException as error:  # nobody else would hear of it
            died_of = described(error)
        with self._changed:
            self._serving -= 1
            if died_of and not self._broken:
                self._broken = f"a copying thread died of {died_of}"
                self._stop_threads()
            if self._broken and not self._serving:
                self._end_all()

    def _serve(self) -> None:
        while (copying := self._queue.get()) is not None and not self._broken:
            if not copying.piece_blocks:
                self._check(copying)
            first = copying.claimed
            copying.claimed = last = first + copying.piece_blocks
            if last < len(copying.host_blocks):
                self._queue.put(copying)
            started = perf_counter()
            error = self._copy_piece(copying, first, last)
            self._end_piece(copying, perf_counter() - started, error)

    def _check(self, copying: _HostTransfer) -> None:
        """Cut the transfer into pieces; one that cannot be carried out stays a single one, without pairs."""
        copying.piece_blocks = 1
        try:
            pairs = checked_pairs(copying.job, self._layout.num_device_blocks, self._layout.num_host_blocks)
        except BaseException as error:  # of the job, which is the caller's; the thread must live
            copying.error = described(error)
            return
        copying.device_blocks, copying.host_blocks = pairs
        blocks = len(copying.host_blocks)
        shared_bytes = max(SHARED_BYTES, blocks * self._layout.block_bytes // len(self._threads))
        copying.piece_blocks = max(1, min(PIECE_BYTES, shared_bytes) // self._layout.block_bytes)
        copying.pieces_left = max(1, -(-blocks // copying.piece_blocks))

    def _copy_piece(self, copying: _HostTransfer, first: int, last: int) -> str:
        """Copy the pairs from `first` up to `last`; what went wrong, or nothing. A piece of a transfer that
        has failed is only counted."""
        if copying.error:
            return copying.error
        try:
            self._copy(
                copying.job.direction, copying.device_blocks[first:last], copying.host_blocks[first:last]
            )
        except BaseException as error:  # whatever it is, the transfer must end and the thread must live
            return described(error)
        return ""

    def _copy(self, direction: Direction, device_blocks: IdArray, host_blocks: IdArray) -> None:
        self._pools.copy(direction, device_blocks, host_blocks)

    def _end_piece(self, copying: _HostTransfer, seconds: float, error: str) -> None:
        with self._changed:
            copying.seconds += seconds
            copying.error = copying.error or error
            if copying.pieces_left == 1:
                self._finished.append(copying.result(self._layout.block_bytes))
            copying.pieces_left -= 1
            if not copying.pieces_left:
                self._changed.notify_all()

    def _end_all(self) -> None:
        """No thread is left: what has not ended will not."""
        for copying in self._live.values():
            if copying.pieces_left:
                copying.pieces_left, copying.error = 0, copying.error or self._broken
                self._finished.append(copying.result(self._layout.block_bytes))
        self._changed.notify_all()
