"""Processes of the whole world, one after another: what outlives them, and how the next one starts.

What outlives a process: the directory of its log, which the real `LogWriter` writes, the file of the disk's
era, the slots on disk, and, unless they are lost, the host pools. The next process begins with the shipped
start (`kvsm.tiers.warm_restart.start`, `era_at_start`, `decide`, `adopt_found`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kvsm.check.worlds.memory_marks import memory_marks
from kvsm.check.worlds.restart_world import leave_log
from kvsm.check.worlds.simulated_disk import SimulatedDisk
from kvsm.check.worlds.tier_rank import DiskSlot
from kvsm.check.worlds.world_files import suppressed_warnings, world_directory
from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import Ledger
from kvsm.core.log import LogReader, MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.errors import LogError, PropertyBroken
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.properties import Property
from kvsm.tiers.disk.era import DiskEra
from kvsm.tiers.warm_restart import start

_IDENTITY = PoolIdentity.of({"model": "small"})
_WRITER = {"durability": "none"}
_WRITER_ON_A_FAILING_DISK = {"durability": "every", "on_failure": "continue"}


class LeftOnDisk(NamedTuple):
    """What the last process has left on disk. life: its number. disks: the slots of each rank."""

    life: int = 0
    disks: tuple[Sequence[DiskSlot], ...] = ()


class MirroredLog(MemoryLog):
    """The events of a core in memory, which are also appended to its log on disk.

    flushed: the number of the last event that is in the log on disk.
    """

    def __init__(self, events: Iterable[OffloadingEvent], log: Any) -> None:
        super().__init__(events)
        self._log, self._last = log, self[-1].seq
        self.flushed = self._last

    @property
    def is_whole(self) -> bool:
        """Whether it has all events since the first one of its core."""
        return [event.seq for event in self] == list(range(1, self._last + 1))

    def append(self, event: OffloadingEvent) -> None:
        super().append(event)
        self._log.append(event)
        self._last = event.seq

    def flush(self) -> None:
        self._log.flush()
        self.flushed = self._last


class SurvivingState:
    """What outlives the processes.

    weights: the version of the weights that the next process has.
    epoch: counts resets and changes of the weights. Bytes from before the last one are stale.
    left: the slots on disk.
    logs: whether a process writes a log on disk. Without one its host pools end with it.
    fails: whether the disk of the log may fail. Then its writer syncs each flush, and continues after errors.
    """

    def __init__(self, ranks: int, *, logs: bool, fails: bool = False) -> None:
        place = world_directory()
        weakref.finalize(self, place.cleanup)
        self.directory, self.logs, self._ranks = Path(place.name), logs, ranks
        self.weights, self.epoch, self._pool = 1, 0, 1
        self.left = LeftOnDisk()
        self._marks = memory_marks(ranks) if logs else []
        self.log_disk = SimulatedDisk() if fails else None
        self._failed_before = 0
        """How many calls had failed when the process began."""
        self._core: list[Offloader] = []
        """The core whose log is open."""
        weakref.finalize(self, _leave_logs, self._core)

    def attached(self) -> AbstractContextManager[None]:
        """Let the log write to its simulated disk, if it has one."""
        return nullcontext() if self.log_disk is None else self.log_disk.attached()

    @property
    def has_failed(self) -> bool:
        """Whether the disk of the log has failed since the process began."""
        return self.log_disk is not None and self.log_disk.failed > self._failed_before

    @property
    def era_file(self) -> Path:
        """The file of the disk's era."""
        return self.directory / "era"

    @property
    def weights_name(self) -> str:
        """The version of the weights, as cores and eras name it."""
        return f"v{self.weights}"

    def after_kill(self, era: DiskEra, left: LeftOnDisk) -> SurvivingState:
        """Return a copy after a kill now in which the host pools are lost, without a log."""
        surviving = SurvivingState(self._ranks, logs=False)
        surviving.weights, surviving.epoch, surviving.left = self.weights, self.epoch, left
        era.write(surviving.era_file)
        return surviving

    def lose_pools(self) -> None:
        """Let the next process find new host pools."""
        self._pool += 1
        self._marks = memory_marks(self._ranks)

    def open_core(self, config: OffloadConfig, publisher: Publisher | None) -> tuple[Offloader, MemoryLog]:
        """Start the core of the next process. Returns it and the events of its log so far."""
        if not self.logs:
            log = MemoryLog()
            core = Offloader(config, log, weights=self.weights_name, publisher=publisher, clock_ns=lambda: 0)
            return core, log
        pools = [b"%s %02d %04d" % (kind, rank, self._pool) for rank in range(self._ranks) for kind in _KINDS]
        with suppressed_warnings():
            begun = start(
                self.directory / "log",
                config,
                KeptPools(_IDENTITY, tuple([name.ljust(16, b"\0") for name in pools])),
                weights=self.weights_name,
                marks=self._marks,
                publisher=publisher,
                clock_ns=lambda: 0,
                log=_WRITER if self.log_disk is None else _WRITER_ON_A_FAILING_DISK,
                past_logs_max_bytes=0,
            )
        core = begun.offloader
        self._core.append(core)
        assert core.writer is not None
        core.writer.flush()
        log = core.log = MirroredLog(self._read_log(), core.log)
        if log[-1].seq != core.ledger.seq:
            message = f"the log ends with event {log[-1].seq}, but its core is at event {core.ledger.seq}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        return core, log

    def _read_log(self) -> list[OffloadingEvent]:
        """Read the log of all processes so far, as any reader does. It may lack events that were lost."""
        events: list[OffloadingEvent] = []
        try:
            for segment in LogReader(self.directory / "log").segments():
                for batch in segment.batches():
                    events += batch
        except LogError as error:
            message = f"the log ends after {len(events)} events: {error}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message) from error
        return events

    def kill(self) -> None:
        """Kill the process: events that were not flushed are lost."""
        _leave_logs(self._core)
        if self.log_disk is not None:
            self.log_disk.forget_faults()
            self._failed_before = self.log_disk.failed

    def lose_power(self, chosen: int) -> None:
        """Let the log lose what was not synced. Call it after `kill`."""
        if self.log_disk is not None:
            self.log_disk.lose_power(self.directory / "log", Random(chosen))


_KINDS = (b"pool", b"sums")


def _leave_logs(cores: list[Offloader]) -> None:
    while cores:
        leave_log(cores.pop())


def kept_by_log(config: OffloadConfig, log: MirroredLog) -> dict[bytes, int]:
    """The blocks that a process must take over from this log after a kill now: key -> slot."""
    ledger = Ledger(config)
    for event in log:
        if event.seq <= log.flushed:
            ledger.apply(event)
    return {key: slot for key, slot in ledger.index.items() if ledger.readable(slot)}
