"""Restore the files of two tiers from different moments: the host's log, pool and checksums; the disk's
slots, log and era.

A process stores keys on the host and on the disk, and both tiers evict. The weights change in a reset, or
with the next process. After each action, for every proper subset of the files, that subset is restored from
drawn earlier moments. A process then starts on the files with drawn weights. It loads every key that either
tier serves to the device, stores the host's blocks on the disk, and ends. No byte of another key or of other
weights reaches the device or is sealed on the disk: correct bytes (S15). If all files are of one moment, no
load is refused: events are state (S10).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import combinations, count
from pathlib import Path
from random import Random
from shutil import rmtree
from typing import NamedTuple

import numpy as np

from kvsm.check.worlds.restart_world import leave_log
from kvsm.check.worlds.restored_world import (
    BLOCK_BYTES,
    CONFIG,
    KEYS,
    SLOTS,
    PoolContent,
    RestoredProcess,
    content,
    key_of,
)
from kvsm.check.worlds.world_files import world_directory
from kvsm.copies.checksums import CHECKSUM_BYTES
from kvsm.copies.host_pools.pool_mark import MARK_BYTES
from kvsm.core.ledger import readable_keys
from kvsm.core.log import LogDirectory, find_end
from kvsm.core.offloader import Offloader, PendingHit
from kvsm.core.plan import WorkerReport
from kvsm.errors import PropertyBroken
from kvsm.identity import PoolIdentity
from kvsm.properties import Property
from kvsm.tiers import DiskTier, adopt_found, disk_config, host_config
from kvsm.tiers.disk import (
    DiskCopyEngine,
    DiskEra,
    DiskGeometry,
    FlushPolicy,
    OpenEra,
    SlotFile,
    era_at_start,
    read_era,
    recover,
)

DISK_SLOTS = 2
WEIGHTS = ("v1", "v2")
FILES = ("log", "pool", "checksums", "disk slots", "disk log", "era")
OUTCOMES = ("host cold", "host warm", "refused", "disk cold", "disk serves")
_IDENTITY = PoolIdentity.of({"model": "small"})


class TierMoment(NamedTuple):
    """The contents of the files, in the order of `FILES`."""

    log: dict[str, bytes]
    pool: PoolContent
    checksums: PoolContent
    disk_slots: bytes
    disk_log: dict[str, bytes]
    era: bytes


class TierProcess(RestoredProcess):
    """A process with a disk tier, started on the given files, which it writes into a directory first."""

    config = host_config(CONFIG, places=SLOTS)

    def __init__(self, place: Path, files: TierMoment, weights: str) -> None:
        self._place, self._numbers = place, count()
        _write(place / "log", files.log)
        _write(place / "disk log", files.disk_log)
        for name, written in (("disk", files.disk_slots), ("era", files.era)):
            if written:
                (place / name).write_bytes(written)
                (place / name).chmod(0o600)
        super().__init__(place / "log", files.pool, files.checksums, weights)
        self._file = SlotFile(place / "disk", DiskGeometry(BLOCK_BYTES, DISK_SLOTS), _IDENTITY)
        era = era_at_start(place / "era", weights, self._file.life)
        self._era = OpenEra(place / "era", era, self._file.life)
        found = recover([self._file], era.id)
        self.found = len(found.slots)
        config = disk_config(self.config, DISK_SLOTS)
        rmtree(place / "disk log")  # The core of a disk begins a new log at each start.
        end = find_end(LogDirectory(place / "disk log"))
        disk = Offloader.open(config, end, weights=weights, durability="none")
        adopt_found(disk, found)
        self.tier = DiskTier(self.core, disk, self._begin_era, places=SLOTS)
        self.disk_engine = DiskCopyEngine(
            self.host, self._file, FlushPolicy.NONE, threads=1, checksums=self.engine.checksums
        )

    def store_both(self, number: int) -> bool:
        """Store a key on the host, and from there on the disk."""
        if not self.store(number):
            return False
        self.engine.drain()
        self.report()
        self.tier.stored([key_of(number)])
        self.copy_tiers()
        return True

    def copy_tiers(self) -> int:
        """Carry out the copies between the tiers. Returns how many failed."""
        failed = 0
        while jobs := self._era.named(self.tier.plan()):
            for job in jobs:
                self.disk_engine.submit(job)
                self.disk_engine.wait([job.transfer])
                (result,) = self.disk_engine.poll()
                failed += not result.good
                self.tier.report(WorkerReport(job.transfer, 0, result.good, result.error))
            self.core.end_step()
            self.tier.disk.end_step()
        return failed

    def bring(self, number: int) -> bool | None:
        """Load a key to the device, from either tier.

        Returns whether the load succeeded; None if neither tier has the key. Raises `PropertyBroken` if the
        loaded bytes are not the key's.
        """
        key, request = key_of(number), f"bring {next(self._numbers)}"
        if self.core.match(request, [key]).hits != 1:
            if not self.tier.has(key):
                return None
            self.core.finish(request)
            request = f"bring {next(self._numbers)}"
            self.core.arrive(request)
            self.tier.fetch(PendingHit(request, [key]))
            self.copy_tiers()
            if self.core.match(request, [key]).hits != 1:
                return False
        job = self.core.prepare_load(request, [0])
        assert job is not None
        self.core.submit([job.transfer])
        self.engine.submit(job)
        self.engine.wait([job.transfer])
        (result,) = self.engine.poll()
        self.core.report(job.transfer, 0, result.good, result.error)
        self.core.finish(request)
        if result.good and not np.array_equal(self.device[0], content(key, self.weights)):
            raise PropertyBroken(
                Property.CORRECT_BYTES, f"{key!r} was loaded with the bytes of another block"
            )
        return result.good

    def reset(self, weights: str) -> None:
        """Give the model these weights."""
        self.weights = weights
        self.core.reset(weights)
        self.tier.reset(weights)
        self.report()

    def _begin_era(self, weights: str | None) -> None:
        self._era.begin(weights, self.tier.disk.ledger.seq)

    def leave(self) -> TierMoment:
        """Kill the process. Returns the files that it leaves."""
        self.disk_engine.close()
        for core in (self.core, self.tier.disk):
            leave_log(core)
        return self.files()

    def files(self) -> TierMoment:
        """Return the present contents of the files."""
        moment = self.moment()
        return TierMoment(
            moment.log,
            moment.pool,
            moment.checksums,
            (self._place / "disk").read_bytes(),
            _read(self._place / "disk log"),
            (self._place / "era").read_bytes(),
        )


class RestoredTiers:
    """Random processes with two tiers, and starts on restored copies of their files."""

    def __init__(self, seed: int) -> None:
        place = world_directory()
        weakref.finalize(self, place.cleanup)
        self._place, self._numbers, self._random = Path(place.name), count(), Random(seed)
        self.counts: Counter[tuple[str, str]] = Counter()
        blank = [
            PoolContent(bytes(SLOTS * size), bytes(MARK_BYTES)) for size in (BLOCK_BYTES, CHECKSUM_BYTES)
        ]
        self._process = self._begin(TierMoment({}, *blank, b"", {}, b""), WEIGHTS[0])
        self.moments = [self._process.files()]

    def live(self, actions: int) -> None:
        """Take this many actions. After each, try a start with every proper subset of the files older."""
        for _ in range(actions):
            number = self._random.randrange(KEYS)
            if self._random.random() < 0.2:
                self._process = self._begin(self._process.leave(), self._random.choice(WEIGHTS))
            elif self._random.random() < 0.2:
                self._process.reset(self._random.choice(WEIGHTS))
            elif self._random.random() < 0.3:
                self._process.bring(number)
            else:
                self._process.store_both(number)
            self.moments.append(self._process.files())
            for size in range(len(FILES)):
                for older in combinations(range(len(FILES)), size):
                    self._try(older)
        self._process.leave()

    def _try(self, older: Sequence[int]) -> None:
        chosen = [
            self._random.choice(self.moments[:-1]) if place in older else self.moments[-1]
            for place in range(len(FILES))
        ]
        files = TierMoment(*(moment[place] for place, moment in enumerate(chosen)))
        process = self._begin(files, self._random.choice(WEIGHTS))
        kept = readable_keys(process.core.ledger)
        loaded = [process.bring(number) for number in range(KEYS)]
        process.tier.stored(readable_keys(process.core.ledger))
        refused = loaded.count(False) + process.copy_tiers()
        process.leave()
        self._check_sealed(process)
        named = " and ".join(FILES[place] for place in older) or "none"
        self.counts[named, "host warm" if kept else "host cold"] += 1
        self.counts[named, "disk serves" if process.found else "disk cold"] += 1
        self.counts[named, "refused"] += bool(refused)
        if not older and refused:
            raise PropertyBroken(
                Property.EVENTS_ARE_STATE, f"files of one moment: {refused} blocks are refused"
            )
        rmtree(process._place)

    def _check_sealed(self, process: TierProcess) -> None:
        """Check that each valid slot on the disk holds the bytes of its key."""
        era = read_era(process._place / "era")
        assert isinstance(era, DiskEra)
        geometry = DiskGeometry(BLOCK_BYTES, DISK_SLOTS)
        with ExitStack() as stack:
            file = stack.enter_context(closing(SlotFile(process._place / "disk", geometry, _IDENTITY)))
            written = (process._place / "disk").read_bytes()
            for key, slot in recover([file], era.id).slots.items():
                payload = np.frombuffer(written, np.uint8, BLOCK_BYTES, geometry.payload_at(slot))
                if not np.array_equal(payload, content(key, era.weights)):
                    raise PropertyBroken(
                        Property.CORRECT_BYTES, f"{key!r} is sealed on the disk with other bytes"
                    )

    def _begin(self, files: TierMoment, weights: str) -> TierProcess:
        place = self._place / f"{next(self._numbers)}"
        place.mkdir(mode=0o700)
        return TierProcess(place, files, weights)


def _write(directory: Path, files: dict[str, bytes]) -> None:
    directory.mkdir(mode=0o700)
    for name, written in files.items():
        (directory / name).write_bytes(written)


def _read(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.kvsm"))}
