"""The file of a kept host pool: it outlives its processes, and the next run can use its bytes.

No process removes or zeroes the file when it ends. Its record (`kept_record.py`) says what the bytes mean,
and which processes use the pool. A *life* of the pool begins when a rank enters a pool that no process uses.
This rank decides whether the life is warm: whether it keeps the bytes of the earlier life. The other ranks of
the run follow its decision.

==========================================  =======================  =====================================
a rank finds                                it                       because
==========================================  =======================  =====================================
no file, or an empty file                   creates it: cold         there are no bytes
a pool that is not kept, unused             replaces it: cold        the meaning of its bytes is unknown
a pool that is not kept, in use             refuses                  two runs never share bytes
a pool of another version, unused           replaces it: cold        it cannot be read
a kept pool, unused, and
- a process of its last life still exists   waits, then refuses      its device may still write
- it is not whole                           replaces it: cold        its creator was killed, or it was
                                                                     damaged
- it has another identity or other sizes    replaces it: cold        its bytes mean something else
- the machine was rebooted since            replaces it: cold        the log may lack events of the pool
- none of these                             takes it: warm
a kept pool in use, and
- all ranks of its life are still in it,    takes its rows, warm or  they belong to its run
  this rank was not in it, and run,         cold as the first rank
  identity and sizes are equal              decided
- anything else                             waits until it is        the ranks of a dead run must be gone
                                            unused, then refuses     before a life begins
anything else                               refuses                  it is other data, or an attack
==========================================  =======================  =====================================

A pool is replaced under its name. The old file is removed first, because a file system in memory, such as
/dev/shm, may have no room for both. No wait is longer than `wait_s`.

**No process of the old run writes to a warm pool.** A rank holds a lock on its byte of the file, and its
process is in the record. A life begins only when all locks are released, and each process in the record has
ended or has closed the pool. Both are needed:

- The lock is released when the last descriptor of that open file is closed. A forked child also has the
  descriptor and the mapping, and might write. Its parent's lock is held as long as the child lives.
- A device copies into page-locked memory without a descriptor of the file. Its copies end when the dying
  process has closed the files of the device, and the kernel closes files in any order. All files are closed
  when no thread of the process is left, that is, once it is a zombie or gone. The start time of the process
  distinguishes it from a later one with the same id.

A process in another pid namespace, such as another container, cannot be seen. Then only its lock is checked.
A rank that closes its pool waits for its copies first, and then records that it has left. A forked child that
writes after that is not detected.
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
"""Pause between two checks of a pool that is in use (s)."""

_NO_POOL = "there was no pool under this name"
_NOT_WHOLE = "the pool that was here is not whole: its maker was killed, or the file was damaged"


class PoolUser(NamedTuple):
    """A rank that uses a kept pool, or whose process has not ended.

    process: the process of the rank; None if the record does not name it.
    is_locked: whether the lock of the rank is held, by `process` or by a child of it.
    """

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
    """What a kept pool file says, for tools and for the scheduler.

    identity, pool_id: None if the pool is not whole.
    cold_reason: why no run can take it warm, a line for each reason; empty if a run with the same identity
        can.
    users: the ranks that use it, or whose processes have not ended.
    """

    sizes: PoolSizes
    identity: PoolIdentity | None
    pool_id: bytes | None
    cold_reason: list[str]
    users: list[PoolUser]


def read_kept_pool(path: Path) -> KeptPoolFacts:
    """Read the facts of a kept pool without entering it. Raises `ConfigError` if the file is not private (see
    `open_private`), or is no kept pool."""
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
    """Map the mark of a kept pool, for the process that writes the log and does not enter the pool. Raises
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
    """Remove a kept pool unless it is in use. Returns whether it was removed. Raises `ConfigError` unless the
    file is private."""
    descriptor, is_new = open_private(path, "a host pool")
    try:
        # The lock of a rank that enters: no rank can enter between the check and the removal.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        head = read_head(descriptor)
        record = None if head is None else read_record(descriptor, head.sizes)
        if head is not None and _users(descriptor, head.sizes, record):
            return False
        if is_new or lock(descriptor, fcntl.F_WRLCK):
            remove_own(path, descriptor)
            return not is_new
    except BlockingIOError:  # a rank is about to enter it
        return False
    finally:
        os.close(descriptor)
    return False


class KeptPoolFile(SharedPoolFile):
    """The file of a kept pool, opened by one rank. The module's docstring says which rank does what.

    keep: what the bytes mean, and the run of this rank.
    Raises `ConfigError`. `record` is the record that this rank wrote when it entered the pool.
    """

    record: PoolRecord
    record_bytes = KEPT_BYTES
    _has_warned = False

    def __init__(self, path: Path, sizes: PoolSizes, rank: int, wait_s: float, keep: KeptPool) -> None:
        check_kept(keep)
        self._keep = keep
        self._found: list[str] = []
        """Why this rank has created or replaced the pool; empty if it did not."""
        self._waits_for = ""
        """Who uses the pool, so that this rank must wait; empty if it need not."""
        self._ending: list[ProcessName] = []
        """Processes of the last life that have not ended, to wait for."""
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
        """Whether the pool holds the bytes of an earlier life."""
        return not self.record.cold_reason

    def mark(self) -> PoolMark:
        """The mark of the pool."""
        return _map_mark(self._descriptor, self._sizes)

    def close(self) -> None:
        """Record that this rank has left, and close the file. The file is not removed."""
        with suppress(ConfigError, OSError):
            # Without the lock, leave the record unchanged: then the next run waits until this process ends.
            wait_for_lock(self._descriptor, self._path, time.monotonic() + LEAVE_S)
            record = read_record(self._descriptor, self._sizes)
            if record is not None:
                write_record(self._descriptor, self._sizes, record.left(self._rank))
        lock(self._descriptor, fcntl.F_UNLCK)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)

    def _enter(self, is_new: bool) -> bool:
        """Enter the pool as this rank. Returns False if the pool was removed, or is still in use."""
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
        """Begin a life of an unused pool. Returns as `_enter` does."""
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
        """Join the life of a pool that is in use. Returns as `_enter` does."""
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
        # Write the record before taking the lock: every rank that has the lock is named in the record.
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
        if not self._has_warned:
            self._has_warned = True
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
