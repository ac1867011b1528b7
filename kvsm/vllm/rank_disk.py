"""The disk tier of one rank, in its worker: copies between the host pool and a file, and their reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.logger import init_logger

from kvsm.copies.checksums import BlockChecksums
from kvsm.copies.worker import Worker
from kvsm.core.plan import TransferJob, WorkerReport, failed_reports
from kvsm.errors import ConfigError, UnusableFiles
from kvsm.events import Direction
from kvsm.identity import PoolIdentity
from kvsm.tiers.disk import DiskCopyEngine, FlushPolicy, take
from kvsm.vllm.disk_files import DiskPlace

log = init_logger("vllm.kvsm")


class RankDisk:
    """Copies between the host pool and the disk file of one rank.

    place: the files of the engine's disk tier.
    identity: what the bytes of a block mean on this rank.
    blocks: the host pool, uint8 `[host blocks, block bytes]`.
    chunk: host blocks per slot.
    flush: when stores are flushed.
    checksums: checksums of the blocks of the host pool; None: there are none.

    Raises `UnusableFiles`, and `ConfigError` if another process uses the file.
    """

    def __init__(
        self,
        place: DiskPlace,
        rank: int,
        identity: PoolIdentity,
        blocks: Any,
        chunk: int,
        flush: FlushPolicy,
        checksums: BlockChecksums | None,
    ) -> None:
        self._place, self._rank = place, rank
        self._file = place.open_rank(rank, identity)
        try:
            rows = blocks.reshape(len(blocks) // chunk, -1)
            self._engine = DiskCopyEngine(rows, self._file, flush, checksums=checksums)
            self._worker = Worker(rank, self._engine)
        except OSError as error:
            self._file.close()
            raise UnusableFiles(f"{self._file.path}: {error.strerror or error}") from error
        except BaseException:
            self._file.close()
            raise
        self._has_begun = False
        self._loads: set[int] = set()
        """Copies from the disk in flight."""
        self._reports: list[WorkerReport] = []
        """Reports that `poll` has not returned yet."""
        log.info("kvsm: rank %d has %d disk slots in %s", rank, place.num_slots, self._file.path)
        for reason in self._file.cold_reason:
            log.info("kvsm: the disk tier of rank %d is cold: %s", rank, reason)

    def start(self, jobs: Sequence[TransferJob]) -> None:
        """Start these copies. If the decision of recovery cannot be read, they fail, and the next call tries
        again."""
        if jobs and not self._has_begun:
            try:
                take(self._file, self._place.read_decided())
            except (ConfigError, OSError) as error:
                log.error("kvsm: the disk tier of rank %d cannot begin: %s", self._rank, error)
                self._reports += failed_reports(jobs, self._rank, str(error))
                return
            self._has_begun = True
        for job in jobs:
            if job.direction is Direction.LOAD:
                self._loads.add(job.transfer)
        self._worker.submit(jobs)

    def is_loading(self) -> bool:
        """Whether a copy from the disk is in flight. A request may wait for it."""
        self._poll_worker()
        return bool(self._loads)

    def unreported(self, transfers: Iterable[int]) -> set[int]:
        """Return which of these copies have not ended."""
        self._poll_worker()
        return self._worker.unreported(transfers)

    def wait(self, transfers: Iterable[int]) -> None:
        """Wait until these copies have ended."""
        self._worker.wait(transfers)

    def poll(self) -> list[WorkerReport]:
        """Return the reports of the copies that have ended since the last call."""
        self._poll_worker()
        reports, self._reports = self._reports, []
        return reports

    def _poll_worker(self) -> None:
        reports = self._worker.poll()
        self._reports += reports
        for report in reports:
            if report.transfer in self._loads and not report.good:
                log.error("kvsm: copy %d from the disk failed: %s", report.transfer, report.error)
            self._loads.discard(report.transfer)

    def prove_host(self, checksums: BlockChecksums | None) -> None:
        """Use these checksums of the host pool from now on."""
        self._engine.prove_host(checksums)

    def close(self) -> None:
        """Wait for all copies, and close the file."""
        self._worker.close()
