"""What a kept pool says about itself: what its bytes mean, and who is in it.

The record lies between the mark (`pool_mark.py`) and the last page of the file. It is written in one piece
under the lock of the file. It begins with a seal, a digest of everything else in the record and of the last
page. A pool whose seal is wrong is not whole, and starts cold. So a process may be killed between
any two system calls, and in the middle of a write.
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
"""Room for the record in a file. 1,024 ranks take 32 KiB of it."""

KEPT_BYTES = MARK_BYTES + RECORD_BYTES
"""What a kept pool has between its rows and its last page."""

MOST_IDENTITY_BYTES = 8 << 10
"""Of the facts of an identity."""

_MOST_REASON_BYTES = 12 << 10
_SEAL_BYTES = 16
_LENGTH = "<I"
_HEAD_BYTES = _SEAL_BYTES + struct.calcsize(_LENGTH)


class KeptPool(msgspec.Struct, frozen=True):
    """That a pool is kept after its processes, and for whom.

    identity: what its bytes mean. A pool with another identity is not taken.
    run: a name that all ranks of a run know, and no other run has. Without it ranks tell runs apart by who
        was there before.
    """

    identity: PoolIdentity
    run: str = ""


class RankInPool(msgspec.Struct, frozen=True, array_like=True):
    """A rank of the present life of a pool. left: whether it has closed the pool."""

    rank: int
    process: ProcessName
    left: bool = False


class PoolRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a kept pool says about itself. A life begins when a rank enters a pool in which nobody is.

    identity, digest: what its bytes mean.
    pool_id: random, and new with each pool that is made.
    boot: the run of the system in which it was written.
    run: the run of its present life, or of its last one.
    cold_reason: why this life began with zeros, a line for each difference; empty if it is warm.
    ranks: of this life, in the order in which they came.
    """

    identity: PoolIdentity
    digest: bytes
    pool_id: bytes
    boot: str
    run: str
    cold_reason: tuple[str, ...]
    ranks: tuple[RankInPool, ...] = ()

    def entered(self, rank: int) -> PoolRecord:
        """The record once this process has come in as that rank."""
        came = RankInPool(rank, ProcessName.own())
        return msgspec.structs.replace(self, ranks=(*self.ranks, came))

    def left(self, rank: int) -> PoolRecord:
        """The record once that rank has closed the pool."""
        ranks = (msgspec.structs.replace(one, left=True) if one.rank == rank else one for one in self.ranks)
        return msgspec.structs.replace(self, ranks=tuple(ranks))

    def processes(self) -> list[ProcessName]:
        """Those that may still write: they have not closed the pool, and it is not this process."""
        own = ProcessName.own()
        return [one.process for one in self.ranks if not one.left and one.process != own]


def new_record(keep: KeptPool, boot: str, cold_reason: Iterable[str]) -> PoolRecord:
    """The record of a pool that is made now."""
    lines, room = [], _MOST_REASON_BYTES
    for line in cold_reason:
        room -= len(line.encode())
        lines.append(line if room >= 0 else "and more")
        if room < 0:
            break
    return PoolRecord(keep.identity, keep.identity.digest(), os.urandom(16), boot, keep.run, tuple(lines))


def check_kept(keep: KeptPool) -> None:
    """Raises `ConfigError` if a pool has no room to say this."""
    size = len(msgspec.msgpack.encode(keep))
    if size > MOST_IDENTITY_BYTES:
        raise ConfigError(
            f"the identity of the host pool has {size:,} bytes, and a pool has room for "
            f"{MOST_IDENTITY_BYTES:,}; shorten its facts"
        )


def write_record(descriptor: int, sizes: PoolSizes, record: PoolRecord) -> None:
    """Write and seal the record. The caller holds the lock of the file. Raises `OSError`."""
    body = msgspec.msgpack.encode(record)
    sealed = (struct.pack(_LENGTH, len(body)) + body).ljust(RECORD_BYTES - _SEAL_BYTES, b"\0")
    assert len(sealed) == RECORD_BYTES - _SEAL_BYTES
    place = sizes.mapped_bytes + MARK_BYTES
    page = os.pread(descriptor, PAGE_BYTES, place + RECORD_BYTES)
    os.pwrite(descriptor, _seal(sealed + page) + sealed, place)


def read_record(descriptor: int, sizes: PoolSizes) -> PoolRecord | None:
    """The record of a kept pool; None if the pool is not whole. Raises `OSError`."""
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
