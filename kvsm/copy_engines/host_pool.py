"""The memory behind a host pool: exactly as large as asked, page-locked if the system allows it, shared
between the ranks of one host if asked.

A pool that does not fit is refused before any of it is allocated. Large pages and page-locking are asked for.
If the system refuses them, the pool works, slower, and says what it got.

Ranks of one host may keep their blocks in one file, for example in /dev/shm. Block b of all ranks is
contiguous:

    | b0 rank 0 | b0 rank 1 | b1 rank 0 | b1 rank 1 | ...  | last page: the sizes |

Locks decide which rank makes the file. The kernel drops them when a process dies:

=============================  =====================================  ==================================
a rank finds                   it                                     because
=============================  =====================================  ==================================
nobody in the file             makes it, over what a dead run left    the ledger that knew those bytes is
                                                                      gone
others, of equal sizes         takes its own rows                     they belong to its run
others, and its rank taken     refuses                                two runs never share bytes
others, of other sizes         refuses                                likewise
a file that is no host pool    refuses                                it is somebody's data
=============================  =====================================  ==================================
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import mmap
import os
import resource
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.copy_engines.available_memory import available_memory_bytes
from kvsm.errors import ConfigError, described

_LOGGER = logging.getLogger("kvsm.copy_engines")

PAGE_BYTES = mmap.PAGESIZE

_MAPPINGS = Path("/proc/self/smaps")
"""Where the system tells which pages a mapping has."""


class PageLocking(NamedTuple):
    """How to page-lock memory for a device.

    lock: takes address and bytes; raises if that is refused.
    unlock: takes the address.
    """

    lock: Callable[[int, int], None]
    unlock: Callable[[int], None]


class _PoolSizes(NamedTuple):
    """The sizes of a pool. All ranks that share a file must agree on them."""

    num_blocks: int
    ranks: int
    block_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.ranks * self.block_bytes

    @property
    def mapped_bytes(self) -> int:
        """In whole pages, as a mapping has them."""
        return -(-self.total_bytes // PAGE_BYTES) * PAGE_BYTES

    def __str__(self) -> str:
        return f"{self.num_blocks:,} blocks for {self.ranks} ranks, {self.block_bytes:,} bytes each"


class HostPool:
    """Host memory of one rank. `blocks` is its uint8 array `[num_blocks, block_bytes]`, zeros at first; after
    `close` it has no rows.

    num_blocks, block_bytes: the size.
    path: a file that ranks of this run share, and no other run; None: memory of this process. The pool that
        made
    the file removes it.
    ranks: how many ranks share the file.
    rank: the number of this one.
    page_locking: how to page-lock the memory; None: not at all. `page_locked` tells whether it succeeded.

    The pool gives back what it holds of the system when it is closed, or at the end of the process. Memory
    goes when the last view of it is gone. Raises `ConfigError`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        *,
        path: str | os.PathLike[str] | None = None,
        ranks: int = 1,
        rank: int = 0,
        page_locking: PageLocking | None = None,
    ) -> None:
        sizes = _PoolSizes(num_blocks, ranks, block_bytes)
        _check(sizes, rank, shared=path is not None)
        self._file = None if path is None else _SharedPoolFile(Path(path), sizes, rank)
        try:
            mapping = _anonymous(sizes) if self._file is None else self._file.map()
        except BaseException:
            if self._file is not None:
                self._file.close()
            raise
        _advise(mapping, is_private=self._file is None)
        whole: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        rows = whole[: sizes.total_bytes].reshape(num_blocks, ranks, block_bytes)
        self.blocks: NDArray[np.uint8] = rows[:, rank, :]
        self._address, self._mapped_bytes = int(whole.ctypes.data), sizes.mapped_bytes
        self._process = os.getpid()
        self._page_locking = page_locking
        self.page_locked = page_locking is not None and _page_lock(
            page_locking, self._address, self._mapped_bytes
        )
        if self.page_locked or self._file is not None:
            atexit.register(self.close)

    @property
    def huge_page_bytes(self) -> int:
        """How much of the memory is on large pages now; 0 if the system does not tell. Pages come with
        their first use, or with page-locking."""
        return _huge_page_bytes(self._address, self._mapped_bytes) if len(self.blocks) else 0

    def close(self) -> None:
        """Give back what the pool holds. No copy may be under way. Idempotent."""
        atexit.unregister(self.close)
        self.blocks = np.empty((0, self.blocks.shape[1]), np.uint8)
        if os.getpid() != self._process:
            return  # a forked child has a copy of this object, but everything in it belongs to the parent
        file, self._file = self._file, None
        try:
            if self.page_locked and self._page_locking is not None:
                self.page_locked = False
                self._page_locking.unlock(self._address)
        finally:
            if file is not None:
                file.close()

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check(sizes: _PoolSizes, rank: int, shared: bool) -> None:
    for name, value in sizes._asdict().items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; a host pool needs at least 1")
    if not 0 <= rank < sizes.ranks:
        raise ConfigError(f"rank is {rank}; it must be from 0 to {sizes.ranks - 1}")
    if sizes.ranks > 1 and not shared:
        raise ConfigError(f"ranks is {sizes.ranks}; ranks share a host pool through a file, so give a path")


def _check_memory(sizes: _PoolSizes) -> None:
    available = available_memory_bytes()
    if available is not None and sizes.mapped_bytes > available:
        raise ConfigError(
            f"a host pool of {sizes} needs {sizes.mapped_bytes:,} bytes of memory, and {available:,} are "
            "available to this process, its control groups counted; make the pool smaller"
        )


def _anonymous(sizes: _PoolSizes) -> mmap.mmap:
    _check_memory(sizes)
    try:
        # Private: large pages of shared memory are a separate setting of the system, and mostly off.
        return mmap.mmap(-1, sizes.mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"the system refuses {sizes.mapped_bytes:,} bytes for a host pool: {error}"
        ) from error


def _advise(mapping: mmap.mmap, is_private: bool) -> None:
    """Ask for large pages. Private memory is not inherited by a forked child: its pages may be page-locked,
    and a fork would copy every one of them."""
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK") if is_private else ("MADV_HUGEPAGE",):
        if hasattr(mmap, name):
            with suppress(OSError):  # a kernel that was built without it
                mapping.madvise(getattr(mmap, name))


def _page_lock(page_locking: PageLocking, address: int, size: int) -> bool:
    try:
        page_locking.lock(address, size)
    except Exception as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        allowed = "has no limit" if limit == resource.RLIM_INFINITY else f"is limited to {limit:,} bytes"
        _LOGGER.warning(
            "the host pool of %s bytes is not page-locked, and copies to and from it are slow: %s. Locked "
            "memory %s in this process: raise it with `ulimit -l unlimited`, for a container with "
            "`--ulimit memlock=-1`, for a service with LimitMEMLOCK=infinity",
            f"{size:,}",
            described(error),
            allowed,
        )
        return False
    return True


def _huge_page_bytes(address: int, size: int) -> int:
    try:
        lines = _MAPPINGS.read_text().splitlines()
    except OSError:
        return 0
    total, is_ours = 0, False
    for line in lines:
        head, *rest = line.split(maxsplit=1)
        if not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            is_ours = first < address + size and address < last
        elif is_ours and head in ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"):
            total += int(rest[0].split()[0]) * 1024
    return min(total, size)


class _SharedPoolFile:
    """The file of a pool, opened by one rank and made by the first. The head of this module says who does
    what.

    There are two kinds of locks. `flock` lets one rank at a time look at the file and make it. A lock on
    one byte says that the rank of that number is there, as long as its pool is open; it belongs to the open
    file and not to the process.
    """

    _MARK = b"kvsm host pool 1"

    def __init__(self, path: Path, sizes: _PoolSizes, rank: int) -> None:
        if not hasattr(fcntl, "F_OFD_SETLK"):
            raise ConfigError(f"{path}: host pools in files need Linux; leave the path out")
        self._path, self._sizes, self.made = path, sizes, False
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be opened for a host pool: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            self._enter(rank)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        except BaseException:
            os.close(self._descriptor)
            raise

    def map(self) -> mmap.mmap:
        """The blocks of all ranks."""
        return mmap.mmap(self._descriptor, self._sizes.mapped_bytes, flags=mmap.MAP_SHARED)

    def close(self) -> None:
        """Leave the file, and remove it if this rank made it."""
        with suppress(FileNotFoundError):
            # Another run may have a file of that name by now.
            if self.made and os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                self._path.unlink()
        # Closing is not enough: a mapping keeps the file open too, as long as there is a view.
        self._lock(fcntl.F_UNLCK)
        os.close(self._descriptor)

    def _enter(self, rank: int) -> None:
        if self._lock(fcntl.F_WRLCK):
            self._make()
            self.made = True
            self._lock(fcntl.F_UNLCK)
        else:
            self._check_sizes()
        if not self._lock(fcntl.F_WRLCK, rank, 1):
            raise ConfigError(
                f"{self._path}: rank {rank} of this host pool is in use; give each rank its own number, and "
                "each run its own path"
            )

    def _make(self) -> None:
        found = os.fstat(self._descriptor)
        if found.st_size and self._read_sizes() is None:
            raise ConfigError(f"{self._path}: is not a host pool; give another path, or remove the file")
        need = self._sizes.mapped_bytes + PAGE_BYTES
        try:
            # What a dead run left goes first: memory, as in /dev/shm, may have no room for both.
            os.ftruncate(self._descriptor, 0)
            self._check_room(need)
            # All of it now: later a full file system would kill the process with a signal.
            os.posix_fallocate(self._descriptor, 0, need)
            os.pwrite(self._descriptor, self._MARK + struct.pack("<QQQ", *self._sizes), need - PAGE_BYTES)
        except BaseException as error:
            self._path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise ConfigError(
                    f"{self._path}: no room for a host pool of {need:,} bytes: {error}"
                ) from error
            raise

    def _check_room(self, need: int) -> None:
        _check_memory(self._sizes)
        system = os.fstatvfs(self._descriptor)
        have = system.f_bavail * system.f_frsize
        if need > have:
            raise ConfigError(
                f"{self._path}: a host pool of {self._sizes} needs {need:,} bytes, and the file system has "
                f"{have:,}; make the pool smaller, or the file system larger (for a container: --shm-size)"
            )

    def _check_sizes(self) -> None:
        found = self._read_sizes()
        if found is None:
            raise ConfigError(f"{self._path}: is in use, and is not a host pool; give another path")
        if found != self._sizes:
            raise ConfigError(
                f"{self._path}: is in use as a host pool of {found}, and this rank asks for {self._sizes}; "
                "all ranks of a run need equal sizes, and each run its own path"
            )

    def _read_sizes(self) -> _PoolSizes | None:
        place = max(0, os.fstat(self._descriptor).st_size - PAGE_BYTES)
        found = os.pread(self._descriptor, len(self._MARK) + 24, place)
        if len(found) < len(self._MARK) + 24 or not found.startswith(self._MARK):
            return None
        return _PoolSizes(*struct.unpack("<QQQ", found[len(self._MARK) :]))

    def _lock(self, kind: int, start: int = 0, length: int = 0) -> bool:
        """Lock or unlock bytes of the file; length 0: all from `start` on. Returns whether they were free."""
        # struct flock: kind, what `start` counts from, start, length, and a process that must be 0.
        request = struct.pack("@hhqqi0q", kind, os.SEEK_SET, start, length, 0)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):
            return False
        return True
