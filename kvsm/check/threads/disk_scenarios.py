"""Scenarios of the engine between a host pool and a disk: copying threads, and the thread that flushes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import numpy as np

from kvsm.check.threads.control import control
from kvsm.check.threads.faulty_disk import FaultyDisk
from kvsm.check.threads.log_scenarios import IN_MEMORY
from kvsm.check.threads.scenario import ThreadScenario
from kvsm.copies.copy_engine import CopyResult
from kvsm.copies.threaded import ThreadedTransfer
from kvsm.core.plan import TransferJob
from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.identity import PoolIdentity
from kvsm.ids import IdArray, pack
from kvsm.properties import Property
from kvsm.tiers.disk.disk_engine import DiskCopyEngine, FlushPolicy
from kvsm.tiers.disk.formats import DiskGeometry
from kvsm.tiers.disk.slot_file import SlotFile

_PAYLOAD = 512
_IDENTITY = PoolIdentity.of({"model": "a scenario"})


class WatchedDisk(DiskCopyEngine):
    """The real engine, which records when each store began, was written and was reported (disk ticks)."""

    disk: FaultyDisk
    began: dict[int, int]
    written: dict[int, int]
    reported: dict[int, int]
    known: list[int]
    """When the engine noticed each failed flush. A store that the flush may have lost, and that is reported
    later, must be bad."""

    def checked(self, job: TransferJob) -> tuple[IdArray, IdArray]:
        pairs = super().checked(job)
        self.began[job.transfer] = self.disk.tick()
        return pairs

    def copy_part(self, job: TransferJob, first: int, device_blocks: IdArray, host_blocks: IdArray) -> None:
        super().copy_part(job, first, device_blocks, host_blocks)
        self.written[job.transfer] = self.disk.tick()

    def _end_store(self, transfer: ThreadedTransfer, seconds: float, error: str) -> None:
        super()._end_store(transfer, seconds, error)
        self.reported[transfer.job.transfer] = self.disk.tick()

    def _flush(self) -> str:
        error = super()._flush()
        if error:
            self.known.append(self.disk.tick())
        return error

    def is_flushed(self, store: int) -> bool:
        """Whether a flush that began after the writes of this store has ended, well or badly."""
        return any(began > self.written[store] for began, _ in (*self.disk.good, *self.disk.bad))


class FlushedStores(ThreadScenario):
    """Stores to disk, of which each is good only if a flush has covered it, and loads of what they wrote."""

    says = "stores to a disk are flushed by a thread, and a flush may fail"
    sizes: Mapping[str, int] = {"stores": 2, "threads": 1, "now_and_then": 0}
    modules = (
        "kvsm.copies.threaded",
        "kvsm.copies.vectored",
        "kvsm.tiers.disk.disk_engine",
        "kvsm.tiers.disk.health",
        "kvsm.tiers.disk.slot_file",
    )
    line_modules = ("kvsm.tiers.disk.disk_engine", "kvsm.copies.threaded")
    notable = ("a flush fails", "all flushes are good", "a flush covers two stores")

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes)
        self._disk = FaultyDisk(-1)

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        return {"fdatasync": lambda descriptor: self._disk.fdatasync(descriptor)}

    def body(self) -> None:
        run, stores = control(), self.size["stores"]
        disk = self._disk = FaultyDisk(-1)
        with TemporaryDirectory(prefix="kvsm-threads-", dir=IN_MEMORY) as place:
            file = SlotFile(Path(place) / "slots", DiskGeometry(_PAYLOAD, stores), _IDENTITY, direct=False)
            host = np.zeros((2 * stores, _PAYLOAD), np.uint8)
            for block in range(stores):
                host[block] = 100 + block
            policy = FlushPolicy.INTERVAL if self.size["now_and_then"] else FlushPolicy.EVERY
            engine = WatchedDisk(host, file, policy, threads=self.size["threads"])
            engine.disk, engine.began, engine.written, engine.reported, engine.known = disk, {}, {}, {}, []
            disk.failing = disk.syncs + run.choose("the flush that fails, or none", stores + 1)
            before = len(disk.good)
            for number in range(stores):
                engine.submit(_job(1 + number, Direction.STORE, number, number))
            results = self._ended(engine, [])
            engine.drain()
            results = self._ended(engine, results)
            good = {one.transfer for one in results if one.good}
            if self.size["now_and_then"] and not run.choose("closes at once", 2):
                run.reach("waits for the flush of its stores", lambda: all(map(engine.is_flushed, good)))
            for store in range(1, stores + 1):
                engine.submit(_job(stores + store, Direction.LOAD, stores + store - 1, store - 1))
            engine.close()
            results = self._ended(engine, results)
            if len(results) != 2 * stores:
                raise PropertyBroken(Property.PROGRESS, f"only {len(results)} transfers have ended")
            for one in results:
                self._check(one, good, engine, host)
            run.note_reached("a flush fails" if disk.failed else "all flushes are good")
            if len(good) > len(disk.good) - before:
                run.note_reached("a flush covers two stores")

    def _ended(self, engine: WatchedDisk, results: list[CopyResult]) -> list[CopyResult]:
        return results + engine.poll()

    def _check(self, result: CopyResult, good: set[int], engine: WatchedDisk, host: Any) -> None:
        transfer, stores, disk = result.transfer, self.size["stores"], self._disk
        if transfer > stores:
            is_stored = transfer - stores in good
            if result.good and not is_stored:
                raise PropertyBroken(
                    Property.FAILURE_IS_NOT_SUCCESS,
                    f"load {transfer} is good, and the store of its slot failed",
                )
            if is_stored and not result.good:
                raise PropertyBroken(Property.PROGRESS, f"a good load is bad: {result.error}")
            if result.good and not (host[transfer - 1] == host[transfer - 1 - stores]).all():
                raise PropertyBroken(Property.CORRECT_BYTES, f"load {transfer} brought other bytes")
        elif result.good:
            self._check_covered(transfer, engine)
        elif not disk.failed:
            raise PropertyBroken(Property.PROGRESS, f"a good store is bad: {result.error}")

    def _check_covered(self, store: int, engine: WatchedDisk) -> None:
        """Check that a successful flush began after the writes of a good store, and that no flush that may
        have lost them had failed. If stores are flushed at intervals, a store may be reported before its
        flush: then the failure of the flush can only be logged."""
        disk, is_every = self._disk, not self.size["now_and_then"]
        began, written, reported = engine.began[store], engine.written[store], engine.reported[store]
        covered = [end for start, end in disk.good if start > written and not (is_every and end > reported)]
        first = min(covered, default=disk.ticks)
        failed = [(*flush, known) for flush, known in zip(disk.bad, engine.known, strict=True)]
        logged = any(start > written and known > reported for start, _, known in failed)
        if any(began < end and start < first and known < reported for start, end, known in failed):
            self._fail(store, "a flush that may have lost it failed")
        if not covered and (is_every or not logged):
            self._fail(store, "no flush has covered it")

    def _fail(self, store: int, why: str) -> NoReturn:
        raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, f"store {store} is good, and {why}")


def _job(transfer: int, direction: Direction, block: int, slot: int) -> TransferJob:
    return TransferJob(transfer, direction, pack([block]), pack([slot]), (f"key {slot}".encode(),))
