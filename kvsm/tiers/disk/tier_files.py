"""The files of a disk tier, and how workers and scheduler exchange what they find in them at the start.

    directory/engine0-rank0         slots of rank 0, written by its worker
    directory/engine0-rank0.found   scan of their headers, written by the worker at its start
    directory/engine0.recovered     which slots serve which keys, written by the scheduler at its start
    directory/engine0.era           which slots are valid, written by the scheduler
    directory/engine0.log           the log of the stores, written by the scheduler for the next engine

Workers start before the scheduler: when the scheduler decides, every worker has written its scan. A worker
reads the decision before its first copy.

An engine can serve without its disk. So every file that cannot be used at the start raises `UnusableFiles`. A
rank that cannot use its file writes no scan, and then the engine serves without the disk:

=========================================  =================================================================
fault                                      consequence
=========================================  =================================================================
a worker cannot use the directory or file  it has no disk, and reports each copy as failed; its `.found` is
                                           missing, so the scheduler plans no copies
the scheduler cannot read or write         it plans no copies; the workers' files stay open and unused
a worker cannot remove an old `.found`     it has no disk; the scheduler may use the old `.found`, and then
                                           each copy fails; if the old `.found` has another number of slots,
                                           the scheduler plans no copies
=========================================  =================================================================
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from kvsm.errors import ConfigError, UnusableFiles
from kvsm.identity import PoolIdentity
from kvsm.system.private_files import read_trusted, write_whole
from kvsm.tiers.disk.directory import TierDirectory
from kvsm.tiers.disk.era import DiskEra, era_at_start
from kvsm.tiers.disk.formats import ERA_ID_BYTES, DiskGeometry
from kvsm.tiers.disk.recovery import CONDITIONS, RankScan, Recovered, decide, scan
from kvsm.tiers.disk.slot_file import SlotFile

_MOST_BYTES = 8 << 30
"""Most bytes of a `.found` or `.recovered` file."""

_Life = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class Decided(NamedTuple):
    """The decision of the scheduler at its start.

    found: which slots serve which keys.
    era: the era at the start.
    made: ranks whose files are new.
    """

    found: Recovered
    era: DiskEra
    made: tuple[int, ...]


class TierFiles(TierDirectory):
    """The files of one engine's disk tier.

    directory, engine: as in `TierDirectory`.
    ranks: number of workers, each with a file of slots.
    """

    def __init__(self, directory: Path, engine: str, ranks: int) -> None:
        super().__init__(directory, engine)
        self.ranks = ranks

    def open_slots(self, rank: int, geometry: DiskGeometry, identity: PoolIdentity) -> SlotFile:
        """Open the slots of a rank in its worker, and write the scan of their headers for the scheduler.

        Raises `UnusableFiles`, and `ConfigError` as `SlotFile` does.
        """
        path = self._found(rank)
        try:
            with suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()  # left by an engine that ended before its scheduler read it
            self.make()
            file = SlotFile(self.slots(rank), geometry, identity)
            try:
                path = file.path
                found = scan(file)
                path = self._found(rank)
                write_whole(path, _encoded(found))
            except BaseException:
                file.close()
                raise
        except OSError as error:
            raise UnusableFiles(
                f"{path}: {error.strerror or error}; make room and give this process the rights it needs, or "
                "give another directory"
            ) from error
        return file

    def decide(self, weights: str, num_slots: int) -> Decided:
        """Decide in the scheduler which slots serve which keys, and publish the decision to the workers.
        Begins a new era if necessary (`era_at_start`). Raises `UnusableFiles`.

        weights: the version of the weights; only blocks that they computed are kept.
        num_slots: number of slots of each rank.
        """
        try:
            self.make()
            scans = [self._read_found(rank, num_slots) for rank in range(self.ranks)]
            era = era_at_start(self.era, weights, max(found.life for found in scans))
            recovered = decide(scans, era.id)
            write_whole(self._recovered, msgspec.msgpack.encode(recovered))
            for rank in range(self.ranks):
                self._found(rank).unlink(missing_ok=True)
        except OSError as error:
            raise UnusableFiles(
                f"{self._directory}: what the ranks have found cannot be read, or nothing can be written: "
                f"{error}; make room and give this process the rights it needs, or give another directory"
            ) from error
        return Decided(recovered, era, tuple(rank for rank, found in enumerate(scans) if found.life == 1))

    def read_decided(self) -> Recovered:
        """Read the scheduler's decision, in a worker. Raises `ConfigError` and `OSError`."""
        try:
            return msgspec.msgpack.decode(read_trusted(self._recovered, _MOST_BYTES), type=Recovered)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self._recovered}: cannot be understood: {error}") from error

    def void(self) -> None:
        """Invalidate all stored blocks for every later engine, durably. No file of slots needs to be open.

        Raises `UnusableFiles` if the system refuses, or if the directory is missing: the blocks may come back
        with it, as when its volume is mounted again. A directory without an era file holds no valid block.
        """
        try:
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                self.era.unlink(missing_ok=True)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UnusableFiles(
                f"{self._directory}: the blocks that are stored there cannot be invalidated: "
                f"{error.strerror or error}; a later engine may serve them. Mount or restore the directory, "
                "give this process the rights it needs, and reset once more; or remove "
                f"{self.era} before an engine uses it"
            ) from error

    def _found(self, rank: int) -> Path:
        return self._file(f"-rank{rank}.found")

    @property
    def _recovered(self) -> Path:
        return self._file(".recovered")

    def _read_found(self, rank: int, num_slots: int) -> RankScan:
        path = self._found(rank)
        try:
            data = read_trusted(path, _MOST_BYTES)
        except FileNotFoundError as error:
            raise UnusableFiles(
                f"{self._directory}: rank {rank} has no slots there; its worker's log says why, unless it is "
                "on another machine: then omit the disk, or give another directory"
            ) from error
        try:
            return _decoded(data, num_slots)
        except ValueError as error:
            raise UnusableFiles(f"{path}: cannot be understood: {error}; remove it") from error


def _encoded(found: RankScan) -> bytes:
    arrays = (found.found.tobytes(), found.lives.tobytes(), found.numbers.tobytes(), found.eras.tobytes())
    return msgspec.msgpack.encode((*arrays, found.keys, found.life))


def _decoded(data: bytes, num_slots: int) -> RankScan:
    """Decode a scan. Raises `ValueError` if it is malformed, or not of `num_slots` slots."""
    *arrays, keys, life = msgspec.msgpack.decode(
        data, type=tuple[bytes, bytes, bytes, bytes, list[bytes], _Life]
    )
    if len(keys) != num_slots:
        raise ValueError(f"it is of {len(keys):,} slots, and the tier has {num_slots:,}")
    found, lives, numbers, eras = arrays
    return RankScan(
        np.frombuffer(found, np.bool_).reshape(num_slots, len(CONDITIONS)),
        np.frombuffer(lives, np.int64).reshape(num_slots),
        np.frombuffer(numbers, np.int64).reshape(num_slots),
        np.frombuffer(eras, f"V{ERA_ID_BYTES}").reshape(num_slots),
        keys,
        life,
    )
