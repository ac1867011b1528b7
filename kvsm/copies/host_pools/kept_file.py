"""The file of a host pool that is kept: it outlives its processes, and the next run finds its bytes.

Nobody removes it or zeroes it at its end. Its record (`kept_record.py`) says what the bytes mean, and which
processes are in it. A *life* of the pool begins when a rank enters it while nobody is in it. That rank
decides whether the life is warm: whether the bytes are those that an earlier life has left. The other ranks
of the run take its decision.

==========================================  =======================  =====================================
a rank finds                                it                       because
==========================================  =======================  =====================================
no file, or an empty one                    makes it: cold           there are no bytes
a pool that is not kept, nobody in it       replaces it: cold        nobody knows what its bytes mean
a pool that is not kept, in use             refuses                  two runs never share bytes
a pool of another version, nobody in it     replaces it: cold        it cannot be read
a kept pool, nobody in it, and
- a process of its last life is not gone    waits, then refuses      its device may still write
- it is not whole                           replaces it: cold        its maker was killed, or it was damaged
- it has another identity or other sizes    replaces it: cold        its bytes mean something else
- the system was started since              replaces it: cold        the log may lack what memory had
- it is equal in all of this                takes it: warm
a kept pool in use, and
- all of its life are in it, this rank was  takes its rows: as the   they belong to its run
  not, and run, identity, sizes are equal   first rank decided
- anything else                             waits until nobody is    the ranks of a dead run are gone
                                            in it, then refuses      before a life begins
anything else                               refuses                  it is somebody's data, or a trap
==========================================  =======================  =====================================

A pool is replaced under its name. The old file goes first, because memory, as in /dev/shm, may have no room
for both. Each wait ends with `wait_s`.

**Nobody of the old run writes to a warm pool.** A rank holds a lock on its byte of the file, and its process
is in the record. Both must be gone:

- The lock is dropped when the last descriptor of that open file is closed. A forked child has the descriptor
  and the mapping too, and might write. So its parent's lock stays as long as the child lives.
- A device copies into page-locked memory without any descriptor of the file. Its copies end when the dying
  process has closed the files of the device too, and the kernel closes files in any order. All of them are
  closed when no thread of the process is left, that is, once it is a zombie or gone. A process id that is
  used again is told by the start of its process.

A process of another pid namespace, as in another container, cannot be seen. For that one the lock must do.
A rank that closes its pool waits for its copies first, and says in the record that it has left. A child
that it has forked and that goes on writing after that is not found.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from kvsm.copies.checksums import CHECKSUM_BYTES
from kvsm.copies.host_pools.kept_record import (
    KEPT_BYTES,
    KeptPool,
    PoolRecord,
    check_kept,
    new_record,
    read_record,
    write_record,
)
from kvsm.copies.host_pools.pool_file import (
    LEAVE_S,
    PoolHead,
    SharedPoolFile,
    is_of_another_version,
    read_head,
)
from kvsm.copies.host_pools.pool_locks import is_free, lock, wait_for_lock
from kvsm.copies.host_pools.pool_mark import MARK_BYTES, PoolMark
from kvsm.copies.host_pools.pool_sizes import PoolSizes
from kvsm.errors import ConfigError
from kvsm.identity import PoolIdentity
from kvsm.system.private_files import open_private, open_private_to_read, remove_own
from kvsm.system.processes import ProcessName, boot_id, wait_for_end

_LOGGER = logging.getLogger("kvsm.copies")

_PAUSE_S = 0.02
"""Between two looks at a pool that is in use (s)."""

_NO_POOL = "there was no pool under this name"
_NOT_WHOLE = "the pool that was here is not whole: its maker was killed, or the file was damaged"


class PoolUser(NamedTuple):
    """Somebody who is in a kept pool. process: None if the record does not tell."""

    rank: int
    process: ProcessName | None
    is_locked: bool

    def __str__(self) -> str:
        if self.process is None:
            return f"rank {self.rank} by a process that the pool does not name"
        if self.is_locked and self.process.ended():
            return f"rank {self.rank} by a child of {self.process}, which has ended"
        return f"rank {self.rank} by {self.process}"


class KeptPoolFacts(NamedTuple):
    """What a kept pool says about itself.

    identity, pool_id: None if the pool is not whole.
    cold_reason: why nobody can take it warm, a line for each reason; empty if a run of equal identity can.
    users: who is in it, or has not ended yet.
    """

    sizes: PoolSizes
    identity: PoolIdentity | None
    pool_id: bytes | None
    cold_reason: list[str]
    users: list[PoolUser]


def read_kept_pool(path: Path) -> KeptPoolFacts:
    """What a kept pool says, for a process that does not enter it. Raises `ConfigError` if the file is not
    private, as `open_private` says, or no kept pool."""
    descriptor = open_private_to_read(path, "a host pool")
    try:
        head = read_head(descriptor)
        if head is None or head.record_bytes != KEPT_BYTES:
            raise ConfigError(f"{path}: is not a host pool that is kept; give the path of one")
        record = read_record(descriptor, head.sizes)
        users = _users(descriptor, head.sizes, record)
        if record is None:
            return KeptPoolFacts(head.sizes, None, None, [_NOT_WHOLE], users)
        return KeptPoolFacts(head.sizes, record.identity, record.pool_id, _rebooted(record), users)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    finally:
        os.close(descriptor)


def open_mark(path: Path) -> PoolMark:
    """The mark of a kept pool, for the process that writes its log and does not enter the pool. Raises
    `ConfigError` as `read_kept_pool` does."""
    descriptor, is_new = open_private(path, "a host pool")
    try:
        head = None if is_new else read_head(descriptor)
        if is_new:
            remove_own(path, descriptor)
        if head is None or head.record_bytes != KEPT_BYTES:
            raise ConfigError(f"{path}: is not a host pool that is kept; give the path of one")
        return _map_mark(descriptor, head.sizes)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    finally:
        os.close(descriptor)


def _map_mark(descriptor: int, sizes: PoolSizes) -> PoolMark:
    rows = None
    if sizes.block_bytes == CHECKSUM_BYTES:
        rows = np.frombuffer(mmap.mmap(descriptor, sizes.mapped_bytes), np.uint8)
    return PoolMark(mmap.mmap(descriptor, MARK_BYTES, offset=sizes.mapped_bytes), sizes, rows)


def remove_kept_pool(path: Path) -> bool:
    """Remove a kept pool. Returns whether nobody was in it, and it is gone. Raises `ConfigError` unless the
    file is private."""
    descriptor, is_new = open_private(path, "a host pool")
    try:
        # Locked as by a rank that enters it: no rank comes in between the look and the end.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        head = read_head(descriptor)
        record = None if head is None else read_record(descriptor, head.sizes)
        if head is not None and _users(descriptor, head.sizes, record):
            return False
        if is_new or lock(descriptor, fcntl.F_WRLCK):
            remove_own(path, descriptor)
            return not is_new
    except BlockingIOError:  # Somebody is about to enter it.
        return False
    finally:
        os.close(descriptor)
    return False


class KeptPoolFile(SharedPoolFile):
    """The file of a kept pool, opened by one rank. The head of this module says which rank does what.

    keep: what its bytes mean, and for which run.
    Raises `ConfigError`. `record` is what the pool says since this rank is in it.
    """

    record: PoolRecord
    record_bytes = KEPT_BYTES
    _has_told = False

    def __init__(self, path: Path, sizes: PoolSizes, rank: int, wait_s: float, keep: KeptPool) -> None:
        check_kept(keep)
        self._keep = keep
        self._found: list[str] = []
        """Why this rank has replaced a pool."""
        self._waits_for = ""
        self._ending: list[ProcessName] = []
        try:
            super().__init__(path, sizes, rank, wait_s)
        except OSError as error:
            raise ConfigError(f"{path}: the host pool cannot be kept: {error}") from error

    @property
    def cold_reason(self) -> list[str]:
        """Why the pool is cold; empty if it is warm."""
        return [] if self.is_warm else self._found or list(self.record.cold_reason)

    @property
    def is_warm(self) -> bool:
        """Whether the bytes are those that an earlier life has left."""
        return not self.record.cold_reason

    def mark(self) -> PoolMark:
        """The mark of the pool."""
        return _map_mark(self._descriptor, self._sizes)

    def close(self) -> None:
        """Leave the file, which stays."""
        with suppress(ConfigError, OSError):
            # Without the lock the record stays as it is: then the next run waits for the end of this process.
            wait_for_lock(self._descriptor, self._path, time.monotonic() + LEAVE_S)
            record = read_record(self._descriptor, self._sizes)
            if record is not None:
                write_record(self._descriptor, self._sizes, record.left(self._rank))
        lock(self._descriptor, fcntl.F_UNLCK)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)

    def _enter(self, is_new: bool) -> bool:
        """Take the rank. Returns False if the pool was removed, or somebody is to be waited for."""
        self._waits_for, self._ending = "", []
        is_empty = lock(self._descriptor, fcntl.F_WRLCK)
        head = read_head(self._descriptor)
        if head is not None and head.record_bytes == KEPT_BYTES:
            record = read_record(self._descriptor, head.sizes)
            return self._begin(head, record) if is_empty else self._join(head, record)
        if not is_empty:
            raise ConfigError(
                f"{self._path}: is in use, and is not a host pool that is kept; give another path"
            )
        if os.fstat(self._descriptor).st_size:
            return self._replace([self._why_no_kept_pool(head)])
        self._make(is_new)
        self._found = self._found or [_NO_POOL]
        self._take(new_record(self._keep, boot_id(), self._found))
        return True

    def _begin(self, head: PoolHead, record: PoolRecord | None) -> bool:
        """Begin a life of a pool in which nobody is."""
        self._ending = [one for one in record.processes() if not one.ended()] if record is not None else []
        if self._ending:
            self._waits_for = ", ".join(map(str, self._ending)) + ": of its last run, and has not ended yet"
            return False
        reasons = self._why_cold(head, record)
        if reasons or record is None:
            return self._replace(reasons)
        self._take(msgspec.structs.replace(record, run=self._keep.run, cold_reason=(), ranks=()))
        return True

    def _join(self, head: PoolHead, record: PoolRecord | None) -> bool:
        """Join the life of a pool that is in use."""
        reasons = self._why_cold(head, record)
        if record is not None and not reasons:
            if record.run != self._keep.run:
                reasons = [f"it is in use by run {record.run!r}, and this is run {self._keep.run!r}"]
            elif any(one.rank == self._rank for one in record.ranks):
                reasons = [f"rank {self._rank} was in it before"]
            elif any(one.left or is_free(self._descriptor, one.rank) for one in record.ranks):
                reasons = ["some ranks of its run have left"]
        if record is None or reasons:
            users = ", ".join(map(str, _users(self._descriptor, head.sizes, record)))
            self._waits_for = f"{users}; {'; '.join(reasons)}"
            return False
        self._take(record)
        return True

    def _take(self, record: PoolRecord) -> None:
        # The record comes first: a rank that has the lock is always named in it.
        self.record = record.entered(self._rank)
        write_record(self._descriptor, self._sizes, self.record)
        lock(self._descriptor, fcntl.F_UNLCK)
        self._take_rank()

    def _replace(self, reasons: list[str]) -> bool:
        self._found = reasons
        remove_own(self._path, self._descriptor)
        return False

    def _why_cold(self, head: PoolHead, record: PoolRecord | None) -> list[str]:
        if record is None:
            return [_NOT_WHOLE]
        reasons = _rebooted(record)
        if head.sizes != self._sizes:
            reasons.append(f"the pool that was here is of {head.sizes}, and now {self._sizes} are asked for")
        return reasons + record.identity.differences(self._keep.identity)

    def _why_no_kept_pool(self, head: PoolHead | None) -> str:
        if head is not None:
            return "the pool that was here was not kept"
        if is_of_another_version(self._descriptor):
            return "the pool that was here is of another version of kvsm"
        raise ConfigError(f"{self._path}: is not a host pool; give another path, or remove the file")

    def _waited(self, deadline: float) -> bool:
        if not self._waits_for:
            return False
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ConfigError(
                f"{self._path}: is in use: {self._waits_for}; end that process, give another path, or a "
                "larger lock_timeout_s"
            )
        if not self._has_told:
            self._has_told = True
            _LOGGER.warning("%s: is in use: %s; waiting up to %.0f s", self._path, self._waits_for, left_s)
        if self._ending:
            wait_for_end(self._ending, left_s)
        else:
            time.sleep(min(_PAUSE_S, left_s))
        self._waits_for = ""
        return True


def _rebooted(record: PoolRecord) -> list[str]:
    if record.boot == boot_id():
        return []
    return ["the system was started again since, and the log may lack what the pool holds"]


def _users(descriptor: int, sizes: PoolSizes, record: PoolRecord | None) -> list[PoolUser]:
    last = {} if record is None else {one.rank: one for one in record.ranks}
    users = []
    for rank in range(sizes.ranks):
        is_locked, known = not is_free(descriptor, rank), last.get(rank)
        if is_locked or (known is not None and not known.left and not known.process.ended()):
            users.append(PoolUser(rank, None if known is None else known.process, is_locked))
    return users
