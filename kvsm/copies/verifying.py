"""A copy engine that checks bytes: a wrong byte becomes a failed transfer, never a wrong answer (S15).

After each good store, the checksums of its host blocks are recorded. After each good load, the checksums of
its host blocks are computed again and compared. If the host can read the device pool, stores and loads also
compare each device block with its host block. `poll` returns the result after these checks.

=====================================  =========================  =====================================
fault                                  found                      when
=====================================  =========================  =====================================
a host block changed between its       yes                        at each load of the block, until its
store and the end of a load                                       next store
a copy wrote wrong bytes, or bytes of  if `device` can be read    at that copy
another block
=====================================  =========================  =====================================

Not found: bytes that were wrong in the device block before they were stored; a wrong copy if `device` cannot
be read, because the checksum of a store is computed from the bytes that arrived on the host, and the check of
a load reads only the host; in a pool that is not kept, a block in another key's slot, which only the ledger
can find; changes after a check; one change in 2**64.

Blocks that this engine did not store are loaded unverified, and counted, unless the pools are kept.

**Kept pools.** The host pool and the checksums may outlive their process (`kept`). A block that this engine
has not stored or checked yet comes from an earlier life, or from another rank. It is proved before its load
begins: a checking thread compares its checksum, and the seal, which covers the block's key and generation.
Only then the wrapped engine gets the load. So neither wrong bytes nor the bytes of another block reach the
device. A block without a checksum is refused. Jobs must name keys and generations for kept pools; others are
refused. `submit` does not wait for the proof. The next call of `poll`, `wait`, `hold_compute` or `close`
submits the proved load to the wrapped engine, so that only the caller's threads call that engine. The mark of
the load is made at `submit`, and is still right later: a mark only says after what the copy must begin, and
the planner keeps compute and other transfers off a live transfer's blocks. A store clears the checksums of
its blocks before its first byte. With `every_load=False` a block is checked once, and a later change is not
found.

Ranks that share a host pool may share the checksums, too: then each rank checks blocks that another rank has
stored.

The checksum is XXH3 with 64 bits. On one core it was 2 to 3 times as fast as CRC-32C (11 against 5 GB/s in
blocks of 4 KiB, 33 against 14 in blocks of 1 MiB), and it releases the GIL for long blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.copies.checksums import NOTHING_CHECKED, BlockChecksums, VerifyingStatistics
from kvsm.copies.copy_engine import CopyEngine, CopyResult, WrappedCopyEngine, check_accepted
from kvsm.copies.pairs import checked_pairs
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError, TransferFailed, described
from kvsm.events import Direction


class VerifyingCopyEngine(WrappedCopyEngine):
    """A `CopyEngine` that wraps another one and checks its copies. Closing it closes both.

    engine: the wrapped engine.
    host: the host pool of `engine`.
    device: the device pool of `engine`, or its tensors, if the host can read them.
    threads: number of checking threads; 0: `poll`, `wait` and `close` check before they return.
    reads: called with the host blocks that are about to be read.
    table: the memory of the checksums, a uint8 array `[num_blocks, CHECKSUM_BYTES]`, zeros at first; None:
        memory of this engine.
    parts: the (offset, bytes) of each of this rank's parts in a row of the host pool; None: the whole row.
        With `device` these are the parts of its tensors, in their order.
    kept: whether the host pool and `table` outlive their processes. Blocks of an earlier life are then proved
        before their loads begin.
    every_load: whether each load is also checked after its copy. False is allowed only for kept pools.

    Raises `ConfigError`. `checksums` is the table of the host pool; the disk tier uses it, too.
    """

    def __init__(
        self,
        engine: CopyEngine,
        host: Any,
        device: Any | Sequence[Any] | None = None,
        threads: int = 1,
        reads: Callable[[Sequence[int]], None] | None = None,
        table: NDArray[np.uint8] | None = None,
        parts: Sequence[tuple[int, int]] | None = None,
        kept: bool = False,
        every_load: bool = True,
    ) -> None:
        if threads < 0:
            raise ConfigError(f"threads is {threads}; it must be 0 (check in the caller's thread) or more")
        if not (kept or every_load):
            raise ConfigError("every_load is False; only loads from kept pools are checked before they begin")
        self.checksums = BlockChecksums(host, device, reads, table, parts, kept)
        if self.checksums.num_blocks != engine.num_host_blocks:
            raise ConfigError(
                f"the host pool to verify has {self.checksums.num_blocks} blocks, the engine's has "
                f"{engine.num_host_blocks}; give both the same"
            )
        super().__init__(engine)
        self._kept, self._every_load = kept, every_load
        self._reads_device = device is not None
        self._changed = Condition()
        self._live: dict[int, TransferJob] = {}
        self._unchecked: dict[int, tuple[TransferJob, CopyResult]] = {}
        """Transfers that the wrapped engine has ended and that are not checked yet, in the order of ends."""
        self._unproved: dict[int, tuple[TransferJob, Any]] = {}
        """Loads that wait for the proof of their blocks, and their marks."""
        self._proved: list[tuple[TransferJob, Any]] = []
        """Loads whose blocks are proved and that the wrapped engine does not have yet, and their marks."""
        self._finished: list[CopyResult] = []
        self._statistics = NOTHING_CHECKED
        self._closed = False
        self._broken = ""
        """Why a checking thread died."""
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Daemons: a process that ends without closing the engine must not hang behind an idle thread.
        self._threads = [Thread(target=self._run, name="kvsm-verify", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: TransferJob, after: Any = None) -> None:
        with self._changed:
            check_accepted(job.transfer, self._live, self._broken, self._closed)
            if self._kept:
                self._check_named(job)
            if self._kept and job.direction is Direction.LOAD and self._must_be_proved(job):
                self._unproved[job.transfer] = job, self._own_mark(job) if after is None else after
                if self._threads:
                    self._queue.put(partial(self._prove, *self._unproved[job.transfer]))
            elif self._kept and job.direction is Direction.STORE:
                self._submit_store(job, after)
            else:
                self._engine.submit(job, after)
            self._live[job.transfer] = job

    def hold_compute(self, transfers: Iterable[int]) -> None:
        named = list(transfers)
        if self._every_load or self._reads_device:
            # Compute may change device blocks that a check has still to read, so wait for the checks.
            self.wait(named)
            return
        # The wrapped engine must have a load before it can hold compute for it.
        self._await_proofs(named)
        self._engine.hold_compute(named)

    def poll(self) -> list[CopyResult]:
        self._collect()
        with self._changed:
            finished, self._finished = self._finished, []
            for result in finished:
                del self._live[result.transfer]
        return finished

    def wait(self, transfers: Iterable[int]) -> None:
        named = list(transfers)
        self._await_proofs(named)
        self._engine.wait(named)
        self._collect()
        with self._changed:
            self._changed.wait_for(lambda: self._unchecked.keys().isdisjoint(named))

    def drain(self) -> None:
        with self._changed:
            live = list(self._live)
        self.wait(live)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            unproved = list(self._unproved)
        self._await_proofs(unproved)
        self._engine.close()
        self.drain()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def took_over(self, host_blocks: Sequence[int]) -> None:
        """Record the checksums of host blocks that were not written by a store. Only for a pool that is not
        kept."""
        self.checksums.keep(host_blocks)

    def statistics(self) -> VerifyingStatistics:
        """Return the counts over all checks so far."""
        return self._statistics

    def _collect(self) -> None:
        """Submit proved loads to the wrapped engine, and check or queue the transfers that it has ended."""
        self._await_proofs(())
        with self._changed:
            for result in self._engine.poll():
                job = self._live[result.transfer]
                if result.good and job.direction is Direction.LOAD and not self._every_load:
                    self._finished.append(result)
                    continue
                self._unchecked[result.transfer] = job, result
                if self._threads:
                    self._queue.put(partial(self._check, job, result))
            if self._broken:
                self._give_up()
            waiting = [] if self._threads else list(self._unchecked.values())
        for ended in waiting:
            self._check(*ended)

    def _check_named(self, job: TransferJob) -> None:
        """Raise `TransferFailed` unless the job has a key and a generation for each host block."""
        try:
            wanted = len(checked_pairs(job, self.num_device_blocks, self.num_host_blocks)[1])
        except TransferFailed:
            return  # the wrapped engine refuses it
        if not len(job.keys) == len(job.generations) == wanted:
            raise TransferFailed(
                f"{job.direction.name.lower()} {job.transfer}: {len(job.keys)} keys and "
                f"{len(job.generations)} generations for {wanted} host blocks, and a kept pool needs one of "
                "each for each block; give the jobs of the core that `kvsm.tiers.warm_restart.start` has made"
            )

    def _must_be_proved(self, job: TransferJob) -> bool:
        try:
            checked_pairs(job, self.num_device_blocks, self.num_host_blocks)
        except TransferFailed:
            return False  # the wrapped engine refuses it, and nothing of it runs
        return bool(self.checksums.unproved(job).any())

    def _own_mark(self, job: TransferJob) -> Any:
        try:
            return self._engine.mark()
        except Exception as error:
            raise TransferFailed(f"transfer {job.transfer}: {described(error)}; make a new engine") from error

    def _submit_store(self, job: TransferJob, after: Any) -> None:
        """Clear the checksums first: an interrupted store leaves bytes that match neither version. If the
        engine refuses the store, restore them."""
        forgotten = self.checksums.forget(job, self.num_device_blocks)
        try:
            self._engine.submit(job, after)
        except BaseException:
            self.checksums.put_back(forgotten)
            raise

    def _await_proofs(self, transfers: Sequence[int]) -> None:
        """Wait until none of these loads is unproved. Submit all proved loads to the wrapped engine."""
        if not self._threads:
            for waiting in list(self._unproved.values()):
                self._prove(*waiting)
        with self._changed:
            self._changed.wait_for(lambda: self._unproved.keys().isdisjoint(transfers))
            proved, self._proved = self._proved, []
            for job, after in proved:
                self._pass_on(job, after)

    def _pass_on(self, job: TransferJob, after: Any) -> None:
        """Submit a proved load to the wrapped engine. If the engine refuses it, the load ends as bad."""
        try:
            self._engine.submit(job, after)
        except TransferFailed as error:
            self._finished.append(_bad_load(job, described(error)))

    def _prove(self, job: TransferJob, after: Any) -> None:
        """Check the blocks of a load before its copy."""
        found, error = NOTHING_CHECKED, ""
        try:
            error, found = self.checksums.prove(job)
        except Exception as raised:
            error = f"its bytes could not be checked: {described(raised)}"
        with self._changed:
            if self._unproved.pop(job.transfer, None) is None:
                return  # given up meanwhile
            self._statistics += found
            if error:
                self._finished.append(_bad_load(job, f"load {job.transfer}: {error}"))
            else:
                self._proved.append((job, after))
            self._changed.notify_all()

    def _run(self) -> None:
        """Run a checking thread. If it dies, the engine is broken and all unchecked transfers end as bad."""
        try:
            while (call := self._queue.get()) is not None:
                call()
        except BaseException as error:  # otherwise no caller would learn why the engine is broken
            with self._changed:
                self._broken = self._broken or f"a checking thread died of {described(error)}"
                self._give_up()

    def _give_up(self) -> None:
        """End all unchecked and unproved transfers as bad, because no thread can check them."""
        for _, result in list(self._unchecked.values()):
            self._end(_bad(result, self._broken), NOTHING_CHECKED)
        for job, _ in self._unproved.values():
            self._finished.append(_bad_load(job, self._broken))
        self._unproved.clear()
        self._changed.notify_all()

    def _check(self, job: TransferJob, result: CopyResult) -> None:
        found = NOTHING_CHECKED
        try:
            if result.good:
                error, found = self.checksums.check(job)
                if error:
                    result = _bad(result, f"{job.direction.name.lower()} {job.transfer}: {error}")
        except Exception as error:
            result = _bad(result, f"its bytes could not be checked: {described(error)}")
        if job.direction is Direction.STORE and not result.good:
            self.checksums.forget(job, self.num_device_blocks)
        self._end(result, found)

    def _end(self, result: CopyResult, found: VerifyingStatistics) -> None:
        with self._changed:
            if self._unchecked.pop(result.transfer, None) is None:
                return  # given up meanwhile
            self._statistics += found
            self._finished.append(result)
            self._changed.notify_all()


def _bad(result: CopyResult, error: str) -> CopyResult:
    return msgspec.structs.replace(result, good=False, error=result.error or error, bytes=0)


def _bad_load(job: TransferJob, error: str) -> CopyResult:
    """Return the bad result of a load that has not begun."""
    return CopyResult(job.transfer, job.direction, good=False, error=error)
