"""The record of a kept pool: what its bytes mean, and which processes use it.

The record is between the mark (`pool_mark.py`) and the last page of the file. It is written in one piece
under the lock of the file. It begins with a seal, a digest of the rest of the record and of the last page. A
pool whose seal is wrong is not whole, and starts cold. So a process may be killed between any two system
calls, and in the middle of a write.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from kvsm.copies.host_pools.pool_mark import MARK_BYTES
from kvsm.copies.host_pools.pool_sizes import PAGE_BYTES, PoolSizes
from kvsm.errors import ConfigError
from kvsm.identity import PoolIdentity
from kvsm.system.processes import ProcessName

RECORD_BYTES = -(-(64 << 10) // PAGE_BYTES) * PAGE_BYTES
"""Size of the record in a file, in whole pages. 1,024 ranks take 32 KiB of it."""

KEPT_BYTES = MARK_BYTES + RECORD_BYTES
"""Size of mark and record, which a kept pool has between its rows and its last page."""

MOST_IDENTITY_BYTES = 8 << 10
"""Most bytes of an encoded `KeptPool`."""

_MOST_REASON_BYTES = 12 << 10
_SEAL_BYTES = 16
_LENGTH = "<I"
_HEAD_BYTES = _SEAL_BYTES + struct.calcsize(_LENGTH)


class KeptPool(msgspec.Struct, frozen=True):
    """The request to keep a pool when its processes have ended.

    identity: what its bytes mean. A pool with another identity is replaced.
    run: a unique name of this run, equal on all its ranks. If it is empty, a rank recognizes the pool of
        another run only by its own number among the ranks that have entered.
    """

    identity: PoolIdentity
    run: str = ""


class RankInPool(msgspec.Struct, frozen=True, array_like=True):
    """A rank of the current life of a pool. left: whether it has closed the pool."""

    rank: int
    process: ProcessName
    left: bool = False


class PoolRecord(msgspec.Struct, frozen=True, array_like=True):
    """The record of a kept pool. A life begins when a rank enters a pool that no process uses.

    identity, digest: what its bytes mean.
    pool_id: random, new for each file.
    boot: the boot id of the system in which the pool was created.
    run: the run of its current life, or of its last life.
    cold_reason: why this life began with zeros, a line for each difference; empty if it is warm.
    ranks: the ranks of this life, in the order in which they entered.
    """

    identity: PoolIdentity
    digest: bytes
    pool_id: bytes
    boot: str
    run: str
    cold_reason: tuple[str, ...]
    ranks: tuple[RankInPool, ...] = ()

    def entered(self, rank: int) -> PoolRecord:
        """Return the record after this process has entered as this rank."""
        entry = RankInPool(rank, ProcessName.own())
        return msgspec.structs.replace(self, ranks=(*self.ranks, entry))

    def left(self, rank: int) -> PoolRecord:
        """Return the record after this rank has closed the pool."""
        ranks = (msgspec.structs.replace(one, left=True) if one.rank == rank else one for one in self.ranks)
        return msgspec.structs.replace(self, ranks=tuple(ranks))

    def processes(self) -> list[ProcessName]:
        """Return the other processes that have not closed the pool, and so may still write."""
        own = ProcessName.own()
        return [one.process for one in self.ranks if not one.left and one.process != own]


def new_record(keep: KeptPool, boot: str, cold_reason: Iterable[str]) -> PoolRecord:
    """Return the record of a new pool. `cold_reason` is cut to the room in the record."""
    lines, room = [], _MOST_REASON_BYTES
    for line in cold_reason:
        room -= len(line.encode())
        lines.append(line if room >= 0 else "and more")
        if room < 0:
            break
    return PoolRecord(keep.identity, keep.identity.digest(), os.urandom(16), boot, keep.run, tuple(lines))


def check_kept(keep: KeptPool) -> None:
    """Raise `ConfigError` if a pool's record has no room for this identity and run."""
    size = len(msgspec.msgpack.encode(keep))
    if size > MOST_IDENTITY_BYTES:
        raise ConfigError(
            f"the identity of the host pool has {size:,} bytes, and a pool has room for "
            f"{MOST_IDENTITY_BYTES:,}; shorten its facts"
        )


def write_record(descriptor: int, sizes: PoolSizes, record: PoolRecord) -> None:
    """Write and seal the record. The caller must hold the lock of the file. Raises `OSError`."""
    body = msgspec.msgpack.encode(record)
    sealed = (struct.pack(_LENGTH, len(body)) + body).ljust(RECORD_BYTES - _SEAL_BYTES, b"\0")
    assert len(sealed) == RECORD_BYTES - _SEAL_BYTES
    place = sizes.mapped_bytes + MARK_BYTES
    page = os.pread(descriptor, PAGE_BYTES, place + RECORD_BYTES)
    os.pwrite(descriptor, _seal(sealed + page) + sealed, place)


def read_record(descriptor: int, sizes: PoolSizes) -> PoolRecord | None:
    """Read the record of a kept pool. None if the pool is not whole. Raises `OSError`."""
    place, length = sizes.mapped_bytes + MARK_BYTES, RECORD_BYTES + PAGE_BYTES
    if os.fstat(descriptor).st_size != place + length:
        return None
    found = os.pread(descriptor, length, place)
    if len(found) < length or _seal(found[_SEAL_BYTES:]) != found[:_SEAL_BYTES]:
        return None
    (size,) = struct.unpack_from(_LENGTH, found, _SEAL_BYTES)
    try:
        record = msgspec.msgpack.decode(found[_HEAD_BYTES : _HEAD_BYTES + size], type=PoolRecord)
    except msgspec.DecodeError:  # sealed by another version of kvsm
        return None
    return record if record.digest == record.identity.digest() else None


def _seal(content: bytes) -> bytes:
    return blake2b(content, digest_size=_SEAL_BYTES).digest()
