"""Helpers for tests of the disk tier: small tiers, their contents, and jobs with keys.

Imports little, because programs that are started only to be killed import this, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kvsm.check.worlds.world_files import IN_MEMORY
from kvsm.copies import CopyResult
from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.identity import PoolIdentity
from kvsm.ids import pack
from kvsm.tiers.disk import (
    DiskCopyEngine,
    DiskGeometry,
    FlushPolicy,
    Recovered,
    SlotFile,
    SlotGeneration,
    recover,
)
from kvsm.tiers.disk.formats import HEADER_COLUMNS, HeaderState, SlotHeader, header_keys, whole_headers

DISK_IDENTITY = PoolIdentity.of({"model": "a test"})

SLOTS = 8
PAYLOAD = 512
GEOMETRY = DiskGeometry(PAYLOAD, SLOTS)


@contextmanager
def directory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kvsm-test-", dir=IN_MEMORY) as made:
        yield Path(made)


def content(key: int) -> np.ndarray[Any, Any]:
    """Return the bytes of a key, the same in every process."""
    return np.random.default_rng(key).integers(0, 256, PAYLOAD, dtype=np.uint8)


def name(key: int) -> bytes:
    return f"key {key}".encode()


def read_header(page: bytes) -> SlotHeader | None:
    """Return the header on this page; None if it is not intact."""
    pages = np.frombuffer(page, np.uint8)
    columns = pages.view(HEADER_COLUMNS)
    ((_, (key,)),) = header_keys(columns, np.array([0]))
    says = columns[0]
    if not whole_headers(pages)[0]:
        return None
    return SlotHeader(
        HeaderState(says["state"]),
        says["file"].tobytes(),
        says["identity"].tobytes(),
        says["era"].tobytes(),
        int(says["slot"]),
        SlotGeneration(int(says["life"]), int(says["number"])),
        int(says["length"]),
        int(says["payload"]),
        key,
    )


def job(
    transfer: int,
    direction: Direction,
    blocks: Sequence[int],
    slots: Sequence[int],
    keys: Sequence[int],
    era: bytes = b"",
) -> TransferJob:
    return TransferJob(transfer, direction, pack(blocks), pack(slots), tuple(map(name, keys)), era=era)


class Tier:
    """A disk tier of one rank: an engine, its host pool and its file. era: the era of all further jobs."""

    era = b""

    def __init__(
        self,
        path: Path,
        flush: FlushPolicy = FlushPolicy.NONE,
        geometry: DiskGeometry = GEOMETRY,
        threads: int = 1,
    ) -> None:
        self.path = path
        self.file = SlotFile(path, geometry, DISK_IDENTITY)
        self.host = np.zeros((geometry.num_slots, PAYLOAD), np.uint8)
        self.engine = DiskCopyEngine(self.host, self.file, flush, threads=threads)
        self._transfers = 0

    def recover(self) -> Recovered:
        return recover([self.file])

    def begin_store(self, slots: Sequence[int], keys: Sequence[int]) -> int:
        """Submit a store of these keys to these slots, from the first blocks of the host pool."""
        blocks = range(len(slots))
        for block, key in zip(blocks, keys):
            self.host[block] = content(key)
        self._transfers += 1
        self.engine.submit(job(self._transfers, Direction.STORE, blocks, slots, keys, self.era))
        return self._transfers

    def store(self, slots: Sequence[int], keys: Sequence[int]) -> CopyResult:
        return self._ended(self.begin_store(slots, keys))

    def load(self, slots: Sequence[int], keys: Sequence[int]) -> CopyResult:
        """Clear the first blocks of the host pool, and load slots into them."""
        self.host[: len(slots)] = 0
        self._transfers += 1
        self.engine.submit(job(self._transfers, Direction.LOAD, range(len(slots)), slots, keys, self.era))
        return self._ended(self._transfers)

    def holds(self, slot: int, key: int) -> bool:
        """Load a slot, and check the loaded bytes. Returns whether the load succeeded."""
        result = self.load([slot], [key])
        if result.good:
            assert np.array_equal(self.host[0], content(key)), f"slot {slot} served wrong bytes"
        else:
            assert not self.host[0].any(), f"slot {slot}: bytes of a failed load reached the host"
        return result.good

    def _ended(self, transfer: int) -> CopyResult:
        self.engine.wait([transfer])
        (result,) = self.engine.poll()
        return result

    def close(self) -> None:
        self.engine.close()
