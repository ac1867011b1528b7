"""The memory of a host pool: private or shared between the ranks of one host, page-locked if possible.

A pool that does not fit is refused before any of it is allocated; all pools of a host share its memory
(`reservations.py`). Huge pages and page-locking are optional: if the system refuses them, the pool works, but
copies are slower. `page_locked` says whether the memory is page-locked.

Ranks of one host may have their blocks in one file, for example in /dev/shm: see `pool_file.py`. Ranks that
hold the same bytes store them there once: they are replicas (`replicas.py`).
"""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.copies.host_pools.kept_file import KeptPoolFile
from kvsm.copies.host_pools.kept_record import KeptPool
from kvsm.copies.host_pools.pool_file import SharedPoolFile
from kvsm.copies.host_pools.pool_mark import OPEN_MARKS
from kvsm.copies.host_pools.pool_sizes import MOST_RANKS, PoolSizes, check_memory
from kvsm.copies.host_pools.reservations import reserved
from kvsm.errors import ConfigError, described

_LOGGER = logging.getLogger("kvsm.copies")

_NOT_KEPT = "the pool is not kept"

_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = ("tmpfs", "devtmpfs", "hugetlbfs", "ramfs")
"""File systems in memory: a driver can page-lock their files. Other file systems write pages to a disk."""


class PageLocking(NamedTuple):
    """Functions that page-lock memory for a device.

    lock: called with an address and a number of bytes; raises if the driver refuses.
    unlock: called with the address.
    """

    lock: Callable[[int, int], None]
    unlock: Callable[[int], None]


class HostPool:
    """Host memory of one rank. `blocks` is its uint8 array `[num_blocks, block_bytes]`, zeros at first unless
    the pool is warm; after `close` it has no rows.

    num_blocks, block_bytes: the size.
    path: a file that the ranks of this run share; each run needs its own file, readable by this user only.
        Unless `keep` is given, it is removed when the pool that created it, or the last pool, is closed.
        None: private memory of this process.
    ranks: number of ranks that share the file.
    rank: number of this rank, from 0. A rank that opens the file again also gets zeros, unless it has
        replicas.
    replicas: number of consecutive ranks that share rows.
    nameless: whether to unlink the file once all ranks have opened it. Then no other process can open it, and
        the memory is freed even if all ranks are killed.
    keep: make the file outlive its processes; says what the bytes mean (`kept_file.py`). None: the file is
        removed. `is_warm` is whether the rows hold the bytes of an earlier run, `cold_reason` has a line for
        each reason why not, and `pool_id` is a random id of the file, by which
        `kvsm.tiers.warm_restart.start` finds the mark of an open pool.
    page_locking: how to page-lock the memory; None: not at all. `page_locked` is whether it succeeded.
    lock_timeout_s: how long to wait for another rank that creates the file, and for the processes of an
        earlier run of a kept pool to end (s).

    `close`, or the end of the process, releases the file and the page lock; a kept pool that was not closed
    is in use until the process has ended. The memory is freed with its last view. Raises `ConfigError`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        *,
        path: str | os.PathLike[str] | None = None,
        ranks: int = 1,
        rank: int = 0,
        replicas: int = 1,
        nameless: bool = False,
        keep: KeptPool | None = None,
        page_locking: PageLocking | None = None,
        lock_timeout_s: float = 300.0,
    ) -> None:
        sizes = PoolSizes(num_blocks, ranks, block_bytes, replicas)
        _check(sizes, rank, shared=path is not None)
        if keep is not None and (path is None or nameless):
            raise ConfigError("a host pool that is kept needs a file with a name; give a path, not nameless")
        self.is_warm, self.pool_id, self.cold_reason = False, b"", [_NOT_KEPT]
        self._file: SharedPoolFile | None = None
        if path is not None and keep is not None:
            kept = self._file = KeptPoolFile(Path(path), sizes, rank, lock_timeout_s, keep)
            self.is_warm, self.pool_id, self.cold_reason = kept.is_warm, kept.record.pool_id, kept.cold_reason
            OPEN_MARKS[self.pool_id] = kept.mark()
        elif path is not None:
            self._file = SharedPoolFile(Path(path), sizes, rank, lock_timeout_s)
        try:
            mapping = _anonymous(sizes) if self._file is None else self._file.map()
            _advise(mapping, is_private=self._file is None)
            whole: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
            rows = whole[: sizes.total_bytes].reshape(num_blocks, sizes.shards, block_bytes)
            self.blocks: NDArray[np.uint8] = rows[:, rank // replicas, :]
            if self._file is not None:
                if replicas == 1 and keep is None:
                    _forget_earlier_rank(self._file, self.blocks)
                if nameless:
                    self._file.remove_name_if_all_are_in()
        except BaseException:
            if self._file is not None:
                self._file.close()
            raise
        self._address, self._mapped_bytes = int(whole.ctypes.data), sizes.mapped_bytes
        self._process = os.getpid()
        self._page_locking = page_locking
        self.page_locked = page_locking is not None and _page_lock(
            page_locking, self._address, self._mapped_bytes, path
        )
        # At the end of the process a thread may still copy into a kept pool. So a kept pool is not closed
        # here: the next run waits until the process has ended.
        if keep is None and (self.page_locked or self._file is not None):
            atexit.register(self.close)

    def close(self) -> None:
        """Release the file, the page lock and `blocks`. No copy may be in flight. Idempotent."""
        atexit.unregister(self.close)
        self.blocks = np.empty((0, self.blocks.shape[1]), np.uint8)
        if os.getpid() != self._process:
            return  # in a forked child: file and page lock belong to the parent
        file, self._file = self._file, None
        OPEN_MARKS.pop(self.pool_id, None)
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


def _check(sizes: PoolSizes, rank: int, shared: bool) -> None:
    for name, value in sizes._asdict().items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; a host pool needs at least 1")
    if not 0 <= rank < sizes.ranks:
        raise ConfigError(f"rank is {rank}; it must be from 0 to {sizes.ranks - 1}")
    if sizes.ranks > MOST_RANKS:
        raise ConfigError(f"ranks is {sizes.ranks:,}; at most {MOST_RANKS:,} share a host pool")
    if sizes.ranks % sizes.replicas:
        raise ConfigError(
            f"replicas is {sizes.replicas}; the number of ranks, {sizes.ranks}, must be a multiple"
        )
    if sizes.ranks > 1 and not shared:
        raise ConfigError(f"ranks is {sizes.ranks}; ranks share a host pool through a file, so give a path")


def _forget_earlier_rank(file: SharedPoolFile, rows: NDArray[np.uint8]) -> None:
    """Zero the rows if an earlier process with this rank has used them. Writing zeros keeps the pages
    allocated; after punching a hole, the file system might have no room for them later."""
    if file.is_first_of_its_rank():
        file.note_rank()
    else:
        rows[:] = 0


def _anonymous(sizes: PoolSizes) -> mmap.mmap:
    """Map private memory, and reserve it (`reservations.py`) until it is freed."""
    with reserved(sizes.mapped_bytes) as others:
        check_memory(sizes, others.promised)
        try:
            # Private: huge pages of shared memory are a separate system setting, mostly off.
            mapping = mmap.mmap(-1, sizes.mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(
                f"the system refuses {sizes.mapped_bytes:,} bytes for a host pool: {error}; make it smaller"
            ) from error
        others.note(mapping)
        return mapping


def _advise(mapping: mmap.mmap, is_private: bool) -> None:
    """Ask for huge pages. Also exclude private memory from forked children: its pages may be page-locked,
    and a fork would copy every page."""
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK") if is_private else ("MADV_HUGEPAGE",):
        if hasattr(mmap, name):
            with suppress(OSError):  # a kernel that was built without it
                mapping.madvise(getattr(mmap, name))


def _page_lock(
    page_locking: PageLocking, address: int, size: int, path: str | os.PathLike[str] | None
) -> bool:
    try:
        page_locking.lock(address, size)
    except Exception as error:
        _LOGGER.warning(
            "the host pool of %s bytes is not page-locked, and copies to and from it are slow: %s. %s",
            f"{size:,}",
            described(error),
            _what_to_do(path),
        )
        return False
    return True


def _what_to_do(path: str | os.PathLike[str] | None) -> str:
    """Return advice for memory that could not be page-locked. path: its file; None for private memory."""
    kind = "" if path is None else _file_system(Path(path).parent)
    if kind not in ("", *_IN_MEMORY):
        return f"The pool is in {path}, on {kind}. Only files in memory can be page-locked: use /dev/shm"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return "This process may lock all memory, so the log of the kernel (dmesg) may show the reason"
    return (
        f"This process may lock {limit:,} bytes: raise that with `ulimit -l unlimited`, for a container with "
        "`--ulimit memlock=-1`, for a service with LimitMEMLOCK=infinity"
    )


def _file_system(directory: Path) -> str:
    """Return the type of a directory's file system, such as tmpfs; empty if it is unknown."""
    try:
        device = directory.stat().st_dev
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kinds = [line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == wanted]
    return kinds[-1] if kinds else ""
