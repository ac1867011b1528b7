"""The file of a host pool that the ranks of one host share, for example in /dev/shm.

The rows of all ranks for one block are contiguous. The last page says what the file is:

    | b0 rank 0 | b0 rank 1 | b1 rank 0 | b1 rank 1 | ...  | format name, sizes, a byte for each rank |

A kept pool has its mark (`pool_mark.py`) and its record (`kept_record.py`) before the last page.

Consecutive ranks may hold the same bytes. Then they are replicas, and share one row:

    | b0 ranks 0 and 1 | b0 ranks 2 and 3 | b1 ranks 0 and 1 | ...

Locks decide which rank creates the file. The kernel releases them when a process dies:

==============================  =======================================  =====================================
a rank finds                    it                                       because
==============================  =======================================  =====================================
no file, or an empty file       creates the pool                         a rank that dies while it creates the
                                                                         file may leave an empty file
a pool that no rank uses        removes it, and creates another          the ledger of those bytes is gone
a pool of equal sizes, in use   takes its own rows                       they belong to its run
- this rank was in it before    takes its own rows, and zeroes them,     only replicas still use the old bytes
                                unless it has replicas
- this rank is in it now        refuses                                  two runs never share bytes
a pool of other sizes, in use   refuses                                  likewise
a pool that is kept             refuses                                  its bytes are still needed
anything else                   refuses; see `system/private_files.py`   it is other data, or an attack
==============================  =======================================  =====================================
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvsm.copies.host_pools.pool_locks import is_free, lock, wait_for_lock
from kvsm.copies.host_pools.pool_sizes import MOST_RANKS, PAGE_BYTES, PoolSizes, check_memory
from kvsm.copies.host_pools.reservations import reserved
from kvsm.errors import ConfigError, UnusableFiles
from kvsm.system.private_files import names, open_private, open_private_to_read, remove_own, why_not_private

_LOGGER = logging.getLogger("kvsm.copies")

_NAME = b"kvsm host pool "
_FORMAT = _NAME + b"5"
_SIZES = "<QQQQQ"
"""The sizes of the pool, and the bytes of its mark and record: 0 if it is not kept."""
_RANK_BYTES = len(_FORMAT) + struct.calcsize(_SIZES)
"""Offset of the bytes of the ranks in the last page."""

_TRIES = 100
"""How often a rank tries to enter a file that is replaced or removed meanwhile."""

LEAVE_S = 1.0
"""How long a rank waits for the lock to find out whether other ranks are in the file (s)."""

_MOST_ENTRIES = 10_000
"""Most directory entries that a search for pools of dead runs reads."""


class PoolHead(NamedTuple):
    """The content of the last page of a pool. record_bytes: size of mark and record; 0 if it is not kept."""

    sizes: PoolSizes
    record_bytes: int

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.sizes.mapped_bytes + self.record_bytes + PAGE_BYTES


class SharedPoolFile:
    """The file of a pool, opened by one rank. The module's docstring says which rank does what.

    path: the file.
    sizes: the sizes of the whole pool.
    rank: the number of this rank.
    wait_s: how long to wait for another rank that creates or checks the file (s).

    There are two kinds of locks. `flock` lets one rank at a time check and create the file. A lock on byte r
    says that rank r has the pool open; it belongs to the open file and not to the process. Raises
    `ConfigError`.
    """

    record_bytes = 0
    """Size of mark and record, between the rows and the last page; 0 if the pool is not kept."""

    def __init__(self, path: Path, sizes: PoolSizes, rank: int, wait_s: float) -> None:
        if not hasattr(fcntl, "F_OFD_SETLK"):
            raise ConfigError(f"{path}: host pools in files need Linux; leave the path out")
        self._path, self._sizes, self._rank, self._made = path, sizes, rank, False
        deadline, tries = time.monotonic() + wait_s, 0
        while tries < _TRIES:
            self._descriptor, is_new = open_private(path, "a host pool")
            is_in = False
            try:
                wait_for_lock(self._descriptor, path, deadline)
                # Another rank may have removed or replaced the file since it was opened.
                is_in = names(path, self._descriptor) and self._enter(is_new)
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            finally:
                if not is_in:
                    os.close(self._descriptor)
            if is_in:
                return
            if not self._waited(deadline):
                tries += 1
        raise ConfigError(
            f"{path}: is made and removed by others again and again; give each run its own path"
        )

    def map(self) -> mmap.mmap:
        """Map the blocks of all ranks."""
        return mmap.mmap(self._descriptor, self._sizes.mapped_bytes, flags=mmap.MAP_SHARED)

    def is_first_of_its_rank(self) -> bool:
        """Whether this rank number was never in this file before: then its rows are still zeros."""
        return not any(os.pread(self._descriptor, 1, self._rank_byte))

    def note_rank(self) -> None:
        """Mark in the file that the rows of this rank may no longer be zeros."""
        os.pwrite(self._descriptor, b"\1", self._rank_byte)

    def remove_name_if_all_are_in(self) -> None:
        """Unlink the file if every rank is in it: then the memory is freed even if all ranks are killed.

        Raises `ConfigError` if another rank holds the lock of the file for too long.
        """
        wait_for_lock(self._descriptor, self._path, time.monotonic() + LEAVE_S)
        others = (rank for rank in range(self._sizes.ranks) if rank != self._rank)
        if not any(is_free(self._descriptor, rank) for rank in others):
            remove_own(self._path, self._descriptor)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _waited(self, deadline: float) -> bool:  # noqa: ARG002 (only a kept pool has processes to wait for)
        """Wait for the processes that kept the last try from entering. Returns False if there are none."""
        return False

    def close(self) -> None:
        """Close the file. Remove it if this rank created it, or is the last rank in it."""
        lock(self._descriptor, fcntl.F_UNLCK)
        with suppress(ConfigError):
            # Another rank may leave at the same time. Without the wait, neither would find itself the last.
            wait_for_lock(self._descriptor, self._path, time.monotonic() + LEAVE_S)
            self._made = self._made or lock(self._descriptor, fcntl.F_WRLCK)
        if self._made:
            remove_own(self._path, self._descriptor)
        # Closing does not release the locks while a mapping with a view keeps the file open.
        lock(self._descriptor, fcntl.F_UNLCK)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)

    @property
    def _rank_byte(self) -> int:
        return self._sizes.mapped_bytes + _RANK_BYTES + self._rank

    def _enter(self, is_new: bool) -> bool:
        """Enter the pool as this rank. Returns False if the file was a dead run's; then it is removed."""
        if not lock(self._descriptor, fcntl.F_WRLCK):
            self._check_sizes()
        elif os.fstat(self._descriptor).st_size:
            head = read_head(self._descriptor)
            if head is None:
                raise ConfigError(f"{self._path}: is not a host pool; give another path, or remove the file")
            if head.record_bytes:
                raise ConfigError(
                    f"{self._path}: is a host pool that is kept, and this one is not to be kept; give "
                    "another path, or remove the file"
                )
            # Remove it first: a file system in memory, such as /dev/shm, may have no room for both.
            remove_own(self._path, self._descriptor)
            return False
        else:
            self._make(is_new)
            self._made = True
            lock(self._descriptor, fcntl.F_UNLCK)
        self._take_rank()
        return True

    def _take_rank(self) -> None:
        if not lock(self._descriptor, fcntl.F_WRLCK, self._rank, 1):
            raise ConfigError(
                f"{self._path}: rank {self._rank} of this host pool is in use; give each rank its own "
                "number, and each run its own path"
            )

    def _make(self, is_new: bool) -> None:
        head = PoolHead(self._sizes, self.record_bytes)
        need = head.file_bytes
        _warn_of_dead_pools(self._path.parent)
        try:
            self._check_room(need)
            # Write the last page first: if this rank dies after that, the next rank recognizes the file and
            # removes it.
            last_page = _FORMAT + struct.pack(_SIZES, *self._sizes, self.record_bytes)
            os.pwrite(self._descriptor, last_page.ljust(PAGE_BYTES, b"\0"), need - PAGE_BYTES)
            # Allocate everything now: later a full file system would kill the process with SIGBUS.
            os.posix_fallocate(self._descriptor, 0, need)
        except BaseException as error:
            if is_new:
                remove_own(self._path, self._descriptor)
            else:
                os.ftruncate(self._descriptor, 0)  # as it was found
            if isinstance(error, OSError):
                raise UnusableFiles(
                    f"{self._path}: no room for a host pool of {need:,} bytes: {error}"
                ) from error
            raise

    def _check_room(self, need: int) -> None:
        with reserved(need) as others:
            check_memory(self._sizes, others.promised)
        system = os.fstatvfs(self._descriptor)
        have = system.f_bavail * system.f_frsize
        if need > have:
            raise UnusableFiles(
                f"{self._path}: a host pool of {self._sizes} needs {need:,} bytes, and the file system has "
                f"{have:,}; make the pool smaller, or the file system larger (for a container: --shm-size)"
            )

    def _check_sizes(self) -> None:
        found = read_head(self._descriptor)
        if found is None:
            raise ConfigError(f"{self._path}: is in use, and is not a host pool; give another path")
        if found.record_bytes:
            raise ConfigError(f"{self._path}: is in use as a host pool that is kept; give another path")
        if found.sizes != self._sizes:
            raise ConfigError(
                f"{self._path}: is in use as a host pool of {found.sizes}, and this rank asks for "
                f"{self._sizes}; all ranks of a run need equal sizes, and each run its own path"
            )


def map_to_read(path: Path) -> tuple[mmap.mmap, PoolSizes]:
    """Map the blocks of all ranks of another process's pool, read-only. Returns the mapping and the sizes.
    Raises `ConfigError` unless the file is private (see `open_private`) and whole.

    The pool may be removed at any time, but the mapping keeps its memory allocated: close it soon after use.
    """
    descriptor = open_private_to_read(path, "a host pool")
    try:
        head = read_head(descriptor)
        # Reading a mapped page behind the end of the file would kill this process with SIGBUS.
        if head is None or os.fstat(descriptor).st_size != head.file_bytes:
            raise ConfigError(f"{path}: is not a host pool; give the path of one")
        return mmap.mmap(descriptor, head.sizes.mapped_bytes, prot=mmap.PROT_READ), head.sizes
    finally:
        os.close(descriptor)


def remove_dead_pools(directory: Path) -> None:
    """Remove the unused pools of this user, except kept pools: on tmpfs they take memory until they are
    removed. Use it only for a directory that holds nothing but pools."""
    for name, size in list(_dead_pools(directory)):  # a list, because the search itself locks each pool
        path = Path(name)
        with suppress(ConfigError, OSError):
            descriptor, is_new = open_private(path, "a host pool")
            try:
                # The lock of a rank that enters: no rank can enter between the check and the removal.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_new or lock(descriptor, fcntl.F_WRLCK):
                    remove_own(path, descriptor)
                    _LOGGER.info(
                        "removed %s, the host pool of a run that was killed (%s bytes)", path, f"{size:,}"
                    )
            finally:
                os.close(descriptor)


def read_head(descriptor: int) -> PoolHead | None:
    """Read the last page of an open file. None if the file holds no pool."""
    place = max(0, os.fstat(descriptor).st_size - PAGE_BYTES)
    found = os.pread(descriptor, _RANK_BYTES, place)
    if len(found) < _RANK_BYTES or not found.startswith(_FORMAT):
        return None
    *numbers, record_bytes = struct.unpack(_SIZES, found[len(_FORMAT) :])
    sizes = PoolSizes(*numbers)
    if not sizes.replicas or sizes.ranks % sizes.replicas or sizes.ranks > MOST_RANKS:
        return None
    return PoolHead(sizes, record_bytes)


def is_of_another_version(descriptor: int) -> bool:
    """Whether an open file holds a pool of another version of kvsm."""
    place = max(0, os.fstat(descriptor).st_size - PAGE_BYTES)
    found = os.pread(descriptor, len(_FORMAT), place)
    return found.startswith(_NAME) and found != _FORMAT


def _warn_of_dead_pools(directory: Path) -> None:
    """Warn about unused pools of this user in the directory. If each run has its own path, no later run opens
    the file that a killed run has left."""
    for path, size in _dead_pools(directory):
        _LOGGER.warning(
            "%s is the host pool of a run that was killed; nobody uses its %s bytes: remove the file",
            path,
            f"{size:,}",
        )


def _dead_pools(directory: Path) -> Iterator[tuple[str, int]]:
    with suppress(OSError), os.scandir(directory) as entries:
        for entry, _ in zip(entries, range(_MOST_ENTRIES)):
            found = entry.stat(follow_symlinks=False)
            if why_not_private(found) or found.st_size <= PAGE_BYTES or found.st_size % PAGE_BYTES:
                continue
            with suppress(OSError):
                descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    head = read_head(descriptor)
                    if head is not None and not head.record_bytes and nobody_is_in(descriptor):
                        yield entry.path, found.st_size
                finally:
                    os.close(descriptor)


def nobody_is_in(descriptor: int) -> bool:
    """Whether no rank is in a pool, or about to enter it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return is_free(descriptor, length=0)
