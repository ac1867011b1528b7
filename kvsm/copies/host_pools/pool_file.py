"""The file of a host pool that ranks of one host share, for example in /dev/shm.

Block b of all ranks is contiguous. The last page says what the file is:

    | b0 rank 0 | b0 rank 1 | b1 rank 0 | b1 rank 1 | ...  | the mark, the sizes, a byte for each rank |

A kept pool has its mark (`pool_mark.py`) and its record (`kept_record.py`) before the last page.

Consecutive ranks may hold the same bytes. They are replicas then, and have one row together:

    | b0 ranks 0 and 1 | b0 ranks 2 and 3 | b1 ranks 0 and 1 | ...

Locks decide which rank makes the file. The kernel drops them when a process dies:

==============================  =======================================  =====================================
a rank finds                    it                                       because
==============================  =======================================  =====================================
no file, or an empty one        makes it                                 a rank that dies before it has made
                                                                         the file leaves an empty one
a pool, and nobody in it        removes it, and makes another            the ledger that knew those bytes is
                                                                         gone; a view of it stays what it is
a pool of equal sizes, in use   takes its own rows                       they belong to its run
- and its rank was there        takes its own rows, and zeroes them;     nobody knows those bytes any more
                                rows of replicas stay as they are        but its replicas
- and its rank is there         refuses                                  two runs never share bytes
a pool of other sizes, in use   refuses                                  likewise
a pool that is kept             refuses                                  its bytes are still of use
anything else                   refuses; see `system/private_files.py`   it is somebody's data, or a trap
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
_MARK = _NAME + b"5"
_SIZES = "<QQQQQ"
"""The sizes of the pool, and how many bytes its mark and its record have: 0 if it is not kept."""
_RANK_BYTES = len(_MARK) + struct.calcsize(_SIZES)
"""Where the bytes of the ranks begin in the last page."""

_TRIES = 100
"""How often a file may be replaced while a rank waits for its lock. Each time another run has ended."""

LEAVE_S = 1.0
"""How long a rank that leaves waits for the lock, to see whether it is the last one (s)."""

_MOST_ENTRIES = 10_000
"""Of a directory in which pools of dead runs are looked for."""


class PoolHead(NamedTuple):
    """What the last page of a pool says. record_bytes: 0 if the pool is not kept."""

    sizes: PoolSizes
    record_bytes: int

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.sizes.mapped_bytes + self.record_bytes + PAGE_BYTES


class SharedPoolFile:
    """The file of a pool, opened by one rank. The head of this module says which rank does what.

    path: its name.
    sizes: of the whole pool.
    rank: the number of this rank.
    wait_s: how long to wait for a rank that makes the file or looks at it (s).

    There are two kinds of locks. `flock` lets one rank at a time look at the file and make it. A lock on
    one byte says that the rank of that number is there, as long as its pool is open; it belongs to the open
    file and not to the process. Raises `ConfigError`.
    """

    record_bytes = 0
    """Between the rows and the last page, for a kept pool."""

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
                # The pool may have been removed in the meantime, and another one may have its name.
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
        """The blocks of all ranks."""
        return mmap.mmap(self._descriptor, self._sizes.mapped_bytes, flags=mmap.MAP_SHARED)

    def is_first_of_its_rank(self) -> bool:
        """Whether no rank of this number was in this file before: then its rows are still zeros."""
        return not any(os.pread(self._descriptor, 1, self._rank_byte))

    def note_rank(self) -> None:
        """Say in the file that the rows of this rank are no longer known to be zeros."""
        os.pwrite(self._descriptor, b"\1", self._rank_byte)

    def remove_name_if_all_are_in(self) -> None:
        """Take the name away once every rank is in the file: then nothing is left of ranks that are killed.

        Raises `ConfigError` if another rank holds the lock of the file for too long.
        """
        wait_for_lock(self._descriptor, self._path, time.monotonic() + LEAVE_S)
        others = (rank for rank in range(self._sizes.ranks) if rank != self._rank)
        if not any(is_free(self._descriptor, rank) for rank in others):
            remove_own(self._path, self._descriptor)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _waited(self, deadline: float) -> bool:  # noqa: ARG002 (only a kept pool has somebody to wait for)
        """Wait for somebody whom the last try has met. Returns False if it has met nobody."""
        return False

    def close(self) -> None:
        """Leave the file. Remove it if this rank made it, or is the last one."""
        lock(self._descriptor, fcntl.F_UNLCK)
        with suppress(ConfigError):
            # Another rank may leave at the same time. Without the wait neither would be the last one.
            wait_for_lock(self._descriptor, self._path, time.monotonic() + LEAVE_S)
            self._made = self._made or lock(self._descriptor, fcntl.F_WRLCK)
        if self._made:
            remove_own(self._path, self._descriptor)
        # Closing is not enough: a mapping keeps the file open too, as long as there is a view.
        lock(self._descriptor, fcntl.F_UNLCK)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)

    @property
    def _rank_byte(self) -> int:
        return self._sizes.mapped_bytes + _RANK_BYTES + self._rank

    def _enter(self, is_new: bool) -> bool:
        """Take the rank. Returns False if the file belonged to a dead run: it is removed then."""
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
            # Memory, as in /dev/shm, may have no room for both.
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
        _name_dead_pools(self._path.parent)
        try:
            self._check_room(need)
            # The whole last page comes first: from now on a rank that dies leaves a file that the next one
            # removes.
            mark = _MARK + struct.pack(_SIZES, *self._sizes, self.record_bytes)
            os.pwrite(self._descriptor, mark.ljust(PAGE_BYTES, b"\0"), need - PAGE_BYTES)
            # All of it now: later a full file system would kill the process with a signal.
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
    """The blocks of all ranks of a pool that another process has made, and its sizes. The mapping cannot be
    written. Raises `ConfigError` unless the file is private, as `open_private` says, and whole.

    The pool may end at any time. The mapping keeps the memory, so it is to be closed soon after its use.
    """
    descriptor = open_private_to_read(path, "a host pool")
    try:
        head = read_head(descriptor)
        # A page that the file does not have would kill this process at the first look at it.
        if head is None or os.fstat(descriptor).st_size != head.file_bytes:
            raise ConfigError(f"{path}: is not a host pool; give the path of one")
        return mmap.mmap(descriptor, head.sizes.mapped_bytes, prot=mmap.PROT_READ), head.sizes
    finally:
        os.close(descriptor)


def remove_dead_pools(directory: Path) -> None:
    """Remove the pools of this user in which nobody is, but not those that are kept. Only for a directory
    that holds nothing else, as a pool on tmpfs takes memory until somebody removes it."""
    for name, size in list(_dead_pools(directory)):  # which locks a pool while it is looked at
        path = Path(name)
        with suppress(ConfigError, OSError):
            descriptor, is_new = open_private(path, "a host pool")
            try:
                # Locked as by a rank that enters it: no rank comes in between the look and the end.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_new or lock(descriptor, fcntl.F_WRLCK):
                    remove_own(path, descriptor)
                    _LOGGER.info(
                        "removed %s, the host pool of a run that was killed (%s bytes)", path, f"{size:,}"
                    )
            finally:
                os.close(descriptor)


def read_head(descriptor: int) -> PoolHead | None:
    """What the last page of an open file says; None if it holds no pool."""
    place = max(0, os.fstat(descriptor).st_size - PAGE_BYTES)
    found = os.pread(descriptor, _RANK_BYTES, place)
    if len(found) < _RANK_BYTES or not found.startswith(_MARK):
        return None
    *numbers, record_bytes = struct.unpack(_SIZES, found[len(_MARK) :])
    sizes = PoolSizes(*numbers)
    if not sizes.replicas or sizes.ranks % sizes.replicas or sizes.ranks > MOST_RANKS:
        return None
    return PoolHead(sizes, record_bytes)


def is_of_another_version(descriptor: int) -> bool:
    """Whether an open file holds a pool of another version of kvsm."""
    place = max(0, os.fstat(descriptor).st_size - PAGE_BYTES)
    found = os.pread(descriptor, len(_MARK), place)
    return found.startswith(_NAME) and found != _MARK


def _name_dead_pools(directory: Path) -> None:
    """Warn about pools of this user in which nobody is. Where each run has a path of its own, nobody else
    would ever look at what a killed run left."""
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
