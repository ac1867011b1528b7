"""The disk tier of one engine, in the scheduler's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from vllm.logger import init_logger

from kvsm.core.kv_events import MEDIUM_STORAGE, Publisher
from kvsm.core.offloader import LogFlush
from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.errors import UnusableFiles
from kvsm.events import Direction
from kvsm.tiers import (
    DiskTier,
    LastLog,
    WritePolicy,
    adopt_found,
    compare_with_last_log,
    disk_config,
    note_log,
)
from kvsm.tiers.disk import Decided, LogNote, OpenEra, Recovered, read_log_note
from kvsm.vllm.deadlines import TransferDeadlines, silent_ranks
from kvsm.vllm.disk_files import DiskPlace
from kvsm.vllm.engine_offloader import EngineOffloader, open_engine_offloader
from kvsm.vllm.extra_config import ConnectorOptions
from kvsm.vllm.pool_identity import weights_version

log = init_logger("vllm.kvsm")


class FoundDisk(NamedTuple):
    """The disk tier as the scheduler's side finds it at start-up.

    decided: which slots serve which keys.
    note: the log of the last process, or why it is unknown.
    """

    place: DiskPlace
    decided: Decided
    note: LogNote | str


def find_disk(place: DiskPlace | None, options: ConnectorOptions, vllm_config: Any) -> FoundDisk | None:
    """Read the disk tier that the workers have opened; None without a disk tier, or if its files cannot be
    used. In the last case the engine serves without it, and one warning says why."""
    if place is None:
        return None
    weights = weights_version(vllm_config, options.weights_version)
    try:
        return FoundDisk(place, place.decide(weights, place.num_slots), read_log_note(place.log_note))
    except UnusableFiles as error:
        log.warning(
            "kvsm: the engine serves without its disk tier (disk_dir): %s. The disk is tried again when the "
            "engine restarts",
            error,
        )
        return None


class EngineDisk:
    """Connects the host's core of an engine with its disk tier.

    tier: plans the copies to the disk and back.

    announces: whether the disk publishes KV events.
    """

    def __init__(
        self,
        disk: FoundDisk,
        options: ConnectorOptions,
        vllm_config: Any,
        host: EngineOffloader,
        announces: bool,
    ) -> None:
        place, decided, note = disk
        found = decided.found
        self._era = OpenEra(place.era, decided.era, found.life)
        index = vllm_config.parallel_config.data_parallel_index
        config = disk_config(host.offloader.config, place.num_slots, options.policy)
        publisher = Publisher(medium=MEDIUM_STORAGE) if announces else None
        self._core: EngineOffloader = open_engine_offloader(config, options, f"{index}-disk", publisher)
        host.share_mark_with(self._core)
        core = self._core.offloader
        kept = adopt_found(core, found)
        _note_log(place, found, self._core, options.disk_flush)
        writes = WritePolicy(options.disk_write)
        self.tier = DiskTier(host.offloader, core, self._begin_era, name=place.name, writes=writes)
        self.deadlines = TransferDeadlines(options.transfer_timeout_s, vllm_config.max_concurrent_batches)
        log.info("kvsm: %s holds %d blocks of earlier processes", place.name, kept)
        for rank, counts in enumerate(found.told):
            rows = ", ".join(f"{count:,} {row}" for row, count in counts.items() if count)
            log.info("kvsm: disk slots of rank %d: %s", rank, rows)
        self._beside = ThreadPoolExecutor(1, "kvsm-last-log")
        self._compared = self._beside.submit(_compare_last_log, place, decided, note, options.policy)

    @property
    def last_log(self) -> LastLog:
        """How the slots that were found agree with the log of the last process.

        Waits for the comparison. It runs while the engine serves, because no decision depends on it, and a
        million slots take 2 s.
        """
        return self._compared.result()

    def plan(self) -> tuple[TransferJob, ...]:
        """Return the copies that leave with this step."""
        self._give_up_overdue()
        jobs = self._era.named(self.tier.plan())
        self.deadlines.submitted(jobs)
        self.tier.disk.end_step()
        return jobs

    def copies_of(self, transfers: Sequence[int]) -> tuple[int, ...]:
        """Return the disk copies among these transfers of the host's ledger, as ids in the disk's ledger."""
        return tuple([copy.disk for copy in self.tier.copies.values() if copy.host in transfers])

    def take(self, reports: Sequence[WorkerReport]) -> None:
        """Take the workers' reports of copies to and from the disk."""
        disk = self.tier.disk
        for report in reports:
            self.tier.report(report)
            if report.transfer not in disk.ledger.transfers:
                self.deadlines.ended(report.transfer)
        if reports:
            disk.flush_log(LogFlush.REPORTS_TAKEN)

    def counts(self) -> Mapping[str, int]:
        """Return the values of `kvsm.explain.metric_table.DISK`."""
        counts = self.tier.counts
        return {
            "disk_blocks": len(self.tier.disk.ledger.index),
            "disk_blocks_stored": counts.to_disk,
            "disk_blocks_loaded": counts.from_disk,
            "disk_blocks_not_stored": counts.not_stored,
        }

    def close(self) -> None:
        """Close the event log of the disk. Waits for the comparison with the last log."""
        self._beside.shutdown()
        error = self._compared.exception()
        if error is not None:
            log.error("kvsm: the slots of the disk were not compared with the last log: %r", error)
        self._core.close()

    def _give_up_overdue(self) -> None:
        ledger = self.tier.disk.ledger
        for transfer in self.deadlines.overdue():
            lost = ledger.transfers[transfer]
            way = "to" if lost.direction is Direction.STORE else "from"
            log.warning(
                "kvsm: copy %d %s the disk is given up: ranks %s have not reported it for %g s. %d host "
                "slots are retired: they are not used again until the engine restarts",
                transfer,
                way,
                silent_ranks(lost, self.tier.disk.config.workers),
                self.deadlines.timeout_s,
                len(lost.slots),
            )
            self.tier.lose(transfer)

    def _begin_era(self, weights: str | None) -> None:
        self._era.begin(weights, self.tier.disk.ledger.seq)


def _compare_last_log(place: DiskPlace, decided: Decided, note: LogNote | str, policy: str) -> LastLog:
    """Compare the slots that were found with the log of the last process, and log the differences."""
    last = compare_with_last_log(note, decided.found, decided.era, decided.made, place.num_slots, policy)
    for line in last.told():
        log.warning("kvsm: %s: %s", place.name, line)
    return last


def _note_log(place: DiskPlace, found: Recovered, core: EngineOffloader, flush: str) -> None:
    """Write the log's directory to a file. Without it, the next process cannot compare the slots with it."""
    written = core.event_log is not None and core.event_log.failure is None
    directory = str(core.event_log.directory) if core.event_log is not None and written else None
    try:
        note_log(place, found.life, directory, flush)
    except OSError as error:
        with suppress(OSError):
            place.log_note.unlink()  # It names an earlier log, which has no events of this process.
        log.warning(
            "kvsm: %s cannot be written, so the log of the disk is not found: %s", place.log_note, error
        )
