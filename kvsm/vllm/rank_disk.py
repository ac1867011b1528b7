"""The disk tier of one rank, in its worker: it copies between the host pool and a file, and reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.logger import init_logger

from kvsm.disk import DiskCopyEngine, FlushPolicy, SlotFile, scan, take
from kvsm.errors import ConfigError
from kvsm.events import Direction
from kvsm.identity import PoolIdentity
from kvsm.ids import listed
from kvsm.plan import TransferJob, WorkerReport
from kvsm.vllm.disk_files import DiskPlace
from kvsm.worker import Worker

log = init_logger("vllm.kvsm")


class RankDisk:
    """What a rank does for the disk tier.

    place: the files of the engine.
    identity: what the bytes of a block mean on this rank.
    blocks: the host pool, uint8 `[host blocks, block bytes]`.
    chunk: host blocks per slot.
    flush: when stores are flushed.
    brought: hears which host blocks have got bytes from the disk, before the copy is reported.

    Raises `ConfigError`.
    """

    def __init__(
        self,
        place: DiskPlace,
        rank: int,
        identity: PoolIdentity,
        blocks: Any,
        chunk: int,
        flush: FlushPolicy,
        brought: Callable[[Sequence[int]], None],
    ) -> None:
        self._place, self._chunk, self._brought = place, chunk, brought
        self._file = SlotFile(place.slots(rank), place.geometry(rank), identity)
        try:
            place.tell_found(rank, scan(self._file))
            rows = blocks.reshape(len(blocks) // chunk, -1)
            self._worker = Worker(rank, DiskCopyEngine(rows, self._file, flush))
        except OSError as error:
            self._file.close()
            raise ConfigError(f"{self._file.path}: {error.strerror or error}") from error
        except BaseException:
            self._file.close()
            raise
        self._has_begun = False
        self._loads: dict[int, list[int]] = {}
        """Copies from the disk in flight -> their host slots."""
        log.info("kvsm: rank %d has %d disk slots in %s", rank, place.num_slots, self._file.path)
        for reason in self._file.cold_reason:
            log.info("kvsm: the disk tier of rank %d is cold: %s", rank, reason)

    def start(self, jobs: Sequence[TransferJob]) -> None:
        """Start these copies."""
        if jobs and not self._has_begun:
            take(self._file, self._place.read_decided())
            self._has_begun = True
        for job in jobs:
            if job.direction is Direction.LOAD:
                self._loads[job.transfer] = list(listed(job.pairs()[0]))
        self._worker.submit(jobs)

    def poll(self) -> list[WorkerReport]:
        """The copies that have ended since the last call."""
        reports = self._worker.poll()
        for report in reports:
            slots = self._loads.pop(report.transfer, None)
            if slots is None:
                continue
            if report.good:
                chunk = self._chunk
                self._brought([slot * chunk + part for slot in slots for part in range(chunk)])
            else:
                log.error("kvsm: copy %d from the disk failed: %s", report.transfer, report.error)
        return reports

    def close(self) -> None:
        """Wait for all copies, and close the file."""
        self._worker.close()
