"""The base of copy engines whose copy is a blocking call: threads make the call.

A subclass implements `copy_blocks`, or `copy_part` if it needs more of the job than its pairs. Compute on a
host is over when its call returns. So marks are None, a transfer may start at once, and `hold_compute` waits
until the transfers have ended.

A transfer is cut into pieces. The first thread that takes it from the queue checks its pairs. Each thread
that takes it claims the next piece, and puts the transfer back at the end of the queue before it copies. So
the threads share one large transfer, and a small transfer behind it waits for one piece only. Transfers end
out of order, as on real hardware.

An exception from `copy_blocks` makes its transfer bad, and the thread continues. A thread can also die
outside of `copy_blocks`, for example from lack of memory. That breaks the engine, because it is unknown
whether the dead thread's piece is copied. The other threads then stop after their current pieces, and the
last one ends every live transfer as bad: not earlier, because no thread may touch the memory of a transfer
that has a result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread
from time import perf_counter
from typing import Any

from kvsm.copies.copy_engine import CopyResult, check_accepted
from kvsm.copies.layout import MemoryLayout
from kvsm.copies.pairs import checked_pairs
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, described
from kvsm.events import Direction
from kvsm.ids import NO_IDS, IdArray

PIECE_BYTES = 16 << 20
"""Most bytes of a piece: one or two milliseconds of copying in memory. This is long enough to be worth two
waits for the interpreter's lock (GIL), and a small transfer behind a large one waits no longer."""

SHARED_BYTES = 1 << 20
"""A transfer of more bytes is cut so that every thread gets a piece."""


@dataclass(slots=True, eq=False)
class ThreadedTransfer:
    """A live transfer. The thread that took it from the queue may change the pairs and `claimed`; the
    engine's condition guards the other fields."""

    job: TransferJob
    device_blocks: IdArray = NO_IDS
    host_blocks: IdArray = NO_IDS
    piece_blocks: int = 0
    """Most pairs of a piece; 0 until the pairs were checked."""
    claimed: int = 0
    """Index of the pair where the next piece begins."""
    pieces_left: int = 1
    """Number of pieces that have not ended."""
    began: float | None = None
    """When the first thread took it (s, `perf_counter`)."""
    seconds: float = 0.0
    """Time spent copying, summed over the pieces (s)."""
    error: str = ""

    def result(self, block_bytes: int) -> CopyResult:
        """Return the result of the transfer, which ends now."""
        good = not self.error
        copied = len(self.host_blocks) * block_bytes if good else 0
        lasted = None if self.began is None else perf_counter() - self.began
        ended = self.job.transfer, self.job.direction, good, self.error
        return CopyResult(*ended, copied, self.seconds, self.began, lasted)


class ThreadedCopyEngine:
    """A `CopyEngine` whose threads call `copy_blocks`. All methods may be called from any thread.

    layout: where the blocks of both pools are. An engine without a host pool in memory chooses the addresses
        of the host side itself.
    threads: number of copying threads.

    Raises `ConfigError`.
    """

    def __init__(self, layout: MemoryLayout, threads: int) -> None:
        if threads < 1:
            raise ConfigError(f"threads is {threads}; a copy engine needs at least 1")
        self.layout = layout
        self._queue: SimpleQueue[ThreadedTransfer | None] = SimpleQueue()
        self._changed = Condition()
        self._live: dict[int, ThreadedTransfer] = {}
        self._finished: list[CopyResult] = []
        self._closed = False
        self._broken = ""
        """Why a copying thread died."""
        self._serving = threads
        """Threads that may still touch memory."""
        # Daemons: a process that ends without closing the engine must not hang behind an idle thread.
        self._threads = [
            Thread(target=self._run, args=(self._serve,), name="kvsm-copy", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def copy_blocks(self, direction: Direction, device_blocks: IdArray, host_blocks: IdArray) -> None:
        """Copy these checked pairs, and return when they are copied.

        Several threads may call this at the same time, with distinct targets. An exception makes the transfer
        bad; its text becomes the error of the result.
        """
        raise NotImplementedError

    def copy_part(
        self,
        job: TransferJob,
        first: int,  # noqa: ARG002 (for engines that need more of the job)
        device_blocks: IdArray,
        host_blocks: IdArray,
    ) -> None:
        """Copy these pairs of a job, which begin with its pair number `first`. As `copy_blocks` otherwise."""
        self.copy_blocks(job.direction, device_blocks, host_blocks)

    def checked(self, job: TransferJob) -> tuple[IdArray, IdArray]:
        """Return the pairs of a job. Raises `TransferFailed` if the job is invalid; then nothing of it
        runs."""
        return checked_pairs(job, self.num_device_blocks, self.num_host_blocks)

    def run_on(self, cores: Collection[int]) -> None:
        """Let the copying threads run on these cores only. Raises `OSError` if none of them may be used."""
        for thread in self._threads:
            os.sched_setaffinity(thread.native_id or 0, cores)

    @property
    def num_device_blocks(self) -> int:
        return self.layout.num_device_blocks

    @property
    def num_host_blocks(self) -> int:
        return self.layout.num_host_blocks

    def mark(self) -> None:
        return None

    def submit(self, job: TransferJob, after: Any = None) -> None:  # noqa: ARG002 (compute is over already)
        with self._changed:
            check_accepted(job.transfer, self._live, self._broken, self._closed)
            self._live[job.transfer] = transfer = ThreadedTransfer(job)
            self._queue.put(transfer)

    def hold_compute(self, transfers: Iterable[int]) -> None:
        self.wait(transfers)

    def poll(self) -> list[CopyResult]:
        if not self._finished:
            return []  # Polled in every engine step: do not wait for the lock if there is no result.
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
        # Each call runs all steps, so that a second call can finish an interrupted one (Ctrl-C).
        with self._changed:
            self._closed = True
            # A thread stops at the first None in the queue, so queue them only after the last piece.
            self._await(list(self._live.values()))
            self._stop_threads()
        for thread in self._threads:
            thread.join()

    def _await(self, transfers: Sequence[ThreadedTransfer]) -> None:
        self._changed.wait_for(lambda: not any(transfer.pieces_left for transfer in transfers))

    def _stop_threads(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def _run(self, serve: Callable[[], None]) -> None:
        """Run a thread of this engine. If a thread dies, the engine is broken: stop all threads; the last one
        ends the live transfers."""
        died_of = ""
        try:
            serve()
        except BaseException as error:  # otherwise no caller would learn why the engine is broken
            died_of = described(error)
        with self._changed:
            self._serving -= 1
            if died_of and not self._broken:
                self._broken = f"a copying thread died of {died_of}"
                self._stop_threads()
            if self._broken and not self._serving:
                self._end_all()

    def _serve(self) -> None:
        while (transfer := self._queue.get()) is not None and not self._broken:
            if not transfer.piece_blocks:
                self._check(transfer)
            started = perf_counter()
            if transfer.began is None:
                transfer.began = started
            first = transfer.claimed
            transfer.claimed = last = first + transfer.piece_blocks
            if last < len(transfer.host_blocks):
                self._queue.put(transfer)
            error = self._copy_piece(transfer, first, last)
            self._end_piece(transfer, perf_counter() - started, error)

    def _check(self, transfer: ThreadedTransfer) -> None:
        """Cut the transfer into pieces. An invalid job stays one piece without pairs."""
        transfer.piece_blocks = 1
        try:
            pairs = self.checked(transfer.job)
        except BaseException as error:  # the caller's mistake; the thread must live
            transfer.error = described(error)
            return
        transfer.device_blocks, transfer.host_blocks = pairs
        blocks, block_bytes = len(transfer.host_blocks), self.layout.block_bytes
        shared_bytes = max(SHARED_BYTES, blocks * block_bytes // len(self._threads))
        transfer.piece_blocks = max(1, min(PIECE_BYTES, shared_bytes) // block_bytes)
        transfer.pieces_left = max(1, -(-blocks // transfer.piece_blocks))

    def _copy_piece(self, transfer: ThreadedTransfer, first: int, last: int) -> str:
        """Copy the pairs from `first` up to `last`. Returns the error, or an empty text. If another piece of
        the transfer has failed, nothing is copied."""
        if transfer.error:
            return transfer.error
        pairs = transfer.device_blocks[first:last], transfer.host_blocks[first:last]
        try:
            self.copy_part(transfer.job, first, *pairs)
        except BaseException as error:  # whatever it is, the transfer must end and the thread must live
            return described(error)
        return ""

    def _end_piece(self, transfer: ThreadedTransfer, seconds: float, error: str) -> None:
        with self._changed:
            transfer.seconds += seconds
            transfer.error = transfer.error or error
            if transfer.pieces_left == 1:
                self._finished.append(transfer.result(self.layout.block_bytes))
            transfer.pieces_left -= 1
            if not transfer.pieces_left:
                self._changed.notify_all()

    def _end_all(self) -> None:
        """End all live transfers as bad, because no thread is left to copy them."""
        for transfer in self._live.values():
            if transfer.pieces_left:
                transfer.pieces_left, transfer.error = 0, transfer.error or self._broken
                self._finished.append(transfer.result(self.layout.block_bytes))
        self._changed.notify_all()
