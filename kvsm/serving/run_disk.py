"""The disk tier of a run: a file of slots for each rank, the disk's core with its log, and the copies.

All ranks are in this process, so recovery reads their files one after the other, without messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvsm.copies import FailingCopyEngine
from kvsm.copies.worker import Worker
from kvsm.core.ledger.invariants import Violation, check_rest
from kvsm.core.ledger.snapshot import digest
from kvsm.core.offloader import LogFlush, Offloader
from kvsm.core.plan import TransferJob, TransferPlan
from kvsm.errors import ConfigError
from kvsm.events import Direction
from kvsm.explain.metrics import Metrics
from kvsm.explain.story import Verification
from kvsm.identity import PoolIdentity
from kvsm.properties import Property
from kvsm.serving.copy_totals import CopyTotals, copy_totals
from kvsm.serving.in_flight import Latency, TransfersInFlight
from kvsm.serving.ranks import Rank
from kvsm.tiers import (
    DiskTier,
    LastLog,
    WritePolicy,
    adopt_found,
    compare_with_last_log,
    disagreements,
    note_log,
)
from kvsm.tiers.disk import (
    DiskCopyEngine,
    DiskGeometry,
    FlushPolicy,
    OpenEra,
    SlotFile,
    TierDirectory,
    era_at_start,
    read_log_note,
    recover,
)

if TYPE_CHECKING:
    from kvsm.serving.run_options import RunOptions

WEIGHTS = ""
"""The version of the weights: the bytes of a block follow from its key, in each run."""

CHECK_STEPS = 256
"""The number of steps between two comparisons of the two ledgers."""

DISK_LATENCY = {Direction.LOAD: Latency(2, 16), Direction.STORE: Latency(4, 16)}
"""Latencies of copies to and from the disk, which is slower than host memory."""


class DiskResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the disk tier of a run. Its blocks are slots of the host pool.

    directory: the directory of the slot files.
    slots: the number of blocks for which the disk has room.
    slot_bytes: the size of a block in the file of one rank, with header and padding (bytes).
    blocks_found: blocks that earlier runs have stored, and that could be served at the start.
    why_cold: why the slot files were empty at the start, a line for each reason; empty if they were reused.
    last_log: how the blocks that were found agree with the log of the run before.
    blocks_loaded: blocks that were loaded from the disk because the host had evicted them.
    blocks_stored: blocks that this run has stored on the disk of every rank.
    blocks_not_stored: blocks whose copy to the disk failed, found no room, or was overtaken by a reset.
    blocks_evicted: blocks that were evicted from the disk.
    blocks: blocks on the disk at the end.
    stores, loads: copies to and from the disk.
    log: directory of the log of the disk's core; None: it is not kept.
    log_entries: slots named in events.
    digest, replayed_digest: digests of the state at the end, live and rebuilt from the log.
    """

    directory: str
    slots: int
    slot_bytes: int
    blocks_found: int
    why_cold: tuple[str, ...]
    last_log: LastLog
    blocks_loaded: int
    blocks_stored: int
    blocks_not_stored: int
    blocks_evicted: int
    blocks: int
    stores: CopyTotals
    loads: CopyTotals
    log: str | None
    log_events: int
    log_entries: int
    digest: str
    replayed_digest: str
    damage: str | None


class RunFiles:
    """The open slot files of all ranks, and the blocks that earlier runs have stored in them.

    era: the era with which the run starts.
    found: which slots serve which keys.
    last_log: how these slots agree with the log of the last run.

    Raises `ConfigError`, and closes all files first.
    """

    def __init__(self, options: RunOptions) -> None:
        assert options.disk_dir is not None
        self.place = TierDirectory(Path(options.disk_dir), "run")
        self.place.make()
        with ExitStack() as opened:
            self.files = [
                opened.enter_context(closing(_slot_file(self.place, options, rank)))
                for rank in range(options.workers)
            ]
            self.why_cold = tuple(dict.fromkeys(why for file in self.files for why in file.cold_reason))
            try:
                life = max(file.life for file in self.files)
                self.era = era_at_start(self.place.era, WEIGHTS, life)
                self.found = recover(self.files, self.era.id)
            except OSError as error:
                raise ConfigError(
                    f"{self.place.name}: cannot be written: {error}; give another disk_dir"
                ) from error
            made = [rank for rank, file in enumerate(self.files) if not file.found_life]
            self.last_log = compare_with_last_log(
                read_log_note(self.place.log_note),
                self.found,
                self.era,
                made,
                options.disk_blocks,
                options.policy,
            )
            self.close = opened.pop_all().close


def _slot_file(place: TierDirectory, options: RunOptions, rank: int) -> SlotFile:
    geometry = DiskGeometry(
        options.block_bytes * options.blocks_per_chunk, options.disk_blocks, rank, options.workers
    )
    facts = {
        "engine": "kvsm run",
        "groups": options.groups,
        "tokens of a block": options.block_tokens,
        "bytes of a block": options.block_bytes,
        "blocks of a slot": options.blocks_per_chunk,
    }
    return SlotFile(place.slots(rank), geometry, PoolIdentity.of(facts))


class RunDisk:
    """Drives the disk tier of a run.

    options: the options of the run.
    files: the open slot files. `close` closes them.
    ranks: the ranks whose host pools are stored.
    host: the core of the host.
    core: the core of the disk.
    clock: returns seconds; after a failure, the tier takes no stores for some time of this clock.

    Attributes: `tier`; `violations`, the violations so far.
    """

    def __init__(
        self,
        options: RunOptions,
        files: RunFiles,
        ranks: Sequence[Rank],
        host: Offloader,
        core: Offloader,
        clock: Callable[[], float],
    ) -> None:
        self._files, self._core = files, core
        self._metrics = Metrics.attached_to(core)
        self._era = OpenEra(files.place.era, files.era, files.found.life)
        self._found = adopt_found(core, files.found)
        self._note_log(options)
        writes = WritePolicy(options.disk_write)
        self.tier = DiskTier(host, core, self._begin_era, name=files.place.name, writes=writes, clock=clock)
        self._workers = [
            Worker(number, _disk_engine(options, number, rank, file))
            for number, (rank, file) in enumerate(zip(ranks, files.files))
        ]
        self._in_flight = TransfersInFlight(self._workers, DISK_LATENCY)
        self.violations: list[Violation] = []

    def has_work(self) -> bool:
        """Whether a copy is in flight or may begin."""
        return self.tier.has_work()

    def take(self, step: int) -> None:
        """Take the reports that are due in this step."""
        reports = self._in_flight.collect(step)
        for report in reports:
            self.tier.report(report)
        if reports:
            self._core.flush_log(LogFlush.REPORTS_TAKEN)
        if step % CHECK_STEPS == 0:
            self._compare()

    def start(self, step: int) -> None:
        """Start the copies that leave in this step."""
        loads: list[TransferJob] = []
        stores: list[TransferJob] = []
        for job in self._era.named(self.tier.plan()):
            (stores if job.direction is Direction.STORE else loads).append(job)
        if loads or stores:
            self._in_flight.start(TransferPlan(tuple(loads), tuple(stores)), step)
        self._core.end_step()

    def flush(self, transfers: Sequence[int], step: int) -> None:
        """Make the disk copies among these transfers of the host's ledger end with this step."""
        flushed = [copy.disk for copy in self.tier.copies.values() if copy.host in transfers]
        self._in_flight.start(TransferPlan(flush=tuple(flushed)), step)

    def check_rest(self) -> list[Violation]:
        """Return all violations after the last step, with the transfers and requests that must have ended by
        now (progress, S9)."""
        self._compare()
        return [*self.violations, *check_rest(self._core.ledger)]

    def _compare(self) -> None:
        """Check conservation (S1): each copy between the tiers is in both ledgers."""
        self.violations += [Violation(Property.CONSERVATION, line) for line in disagreements(self.tier)]

    def close(self) -> None:
        """Wait for all copies, flush unless `disk_flush` is `none`, and close the files."""
        for worker in self._workers:
            worker.close()

    def result(self, log: str | None, verification: Verification) -> DiskResult:
        """Return the result of the disk tier. verification: the verification of the disk's log."""
        counts = self.tier.counts
        return DiskResult(
            directory=str(self._files.files[0].path.parent),
            slots=self._core.config.host_blocks,
            slot_bytes=self._files.files[0].geometry.slot_bytes,
            blocks_found=self._found,
            why_cold=self._files.why_cold,
            last_log=self._files.last_log,
            blocks_loaded=counts.from_disk,
            blocks_stored=counts.to_disk,
            blocks_not_stored=counts.not_stored,
            blocks_evicted=self._metrics.values()["blocks_evicted"],
            blocks=len(self._core.ledger.index),
            stores=copy_totals(self._workers, Direction.STORE),
            loads=copy_totals(self._workers, Direction.LOAD),
            log=log,
            log_events=verification.events,
            log_entries=verification.entries,
            digest=digest(self._core.ledger),
            replayed_digest=verification.digest,
            damage=verification.damage,
        )

    def _note_log(self, options: RunOptions) -> None:
        writer = self._core.writer
        kept = None if writer is None or options.log is None else str(writer.directory)
        try:
            note_log(self._files.place, self._files.found.life, kept, options.disk_flush)
        except OSError as error:
            raise ConfigError(
                f"{self._files.place.name}: cannot be written: {error}; give another disk_dir"
            ) from error

    def _begin_era(self, weights: str | None) -> None:
        try:
            self._era.begin(weights, self._core.ledger.seq)
        except OSError as error:
            raise ConfigError(
                f"{self._files.place.name}: a reset cannot be written: {error}; give another disk_dir"
            ) from error


def _disk_engine(options: RunOptions, number: int, rank: Rank, file: SlotFile) -> FailingCopyEngine:
    blocks = np.asarray(rank.host.blocks)
    engine = DiskCopyEngine(
        blocks.reshape(options.host_blocks, -1),
        file,
        FlushPolicy(options.disk_flush),
        checksums=rank.checksums,
    )
    # Another seed than that of the rank's copies between device and host.
    return FailingCopyEngine(engine, options.seed + options.workers + number, options.failure_rate)
