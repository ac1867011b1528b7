"""The memory behind a host pool: exactly as large as asked, page-locked if the system allows it, shared
between the ranks of one host if asked.

A pool that does not fit is refused before any of it is allocated; all pools of a host share its memory
(`reservations.py`). Large pages and page-locking are asked for.
If the system refuses them, the pool works, slower, and says what it got.

Ranks of one host may keep their blocks in one file, for example in /dev/shm: see `pool_file.py`. Ranks that
hold the same bytes keep them there once: they are replicas (`replicas.py`).
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

_MAPPINGS = Path("/proc/self/smaps")
"""Where the system tells which pages a mapping has."""
_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = ("tmpfs", "devtmpfs", "hugetlbfs", "ramfs")
"""File systems whose files a driver can page-lock. Of others, the kernel writes pages back to a disk."""


class PageLocking(NamedTuple):
    """How to page-lock memory for a device.

    lock: takes address and bytes; raises if that is refused.
    unlock: takes the address.
    """

    lock: Callable[[int, int], None]
    unlock: Callable[[int], None]


class HostPool:
    """Host memory of one rank. `blocks` is its uint8 array `[num_blocks, block_bytes]`, zeros at first unless
    the pool is warm; after `close` it has no rows.

    num_blocks, block_bytes: the size.
    path: a file that ranks of this run share, and no other run; None: memory of this process. Only this user
        can read it. The pool that made the file removes it, and so does the last one.
    ranks: how many ranks share the file.
    rank: the number of this one. A rank that comes back sees zeros, too, unless it has replicas.
    replicas: how many consecutive ranks have the same rows.
    nameless: whether the file loses its name once all ranks have it. Nobody else can open it then, and
        nothing is left of ranks that are killed.
    keep: that the file stays when its processes have ended, and what its bytes mean; None: it goes with
        them. `is_warm` tells whether the rows hold what an earlier run has left, `cold_reason` why not, a
        line for each reason, and `pool_id` is a random name of the file. See `kept_file.py`. While the pool
        is open, `kvsm.tiers.warm_restart.start` finds its mark by that name.
    page_locking: how to page-lock the memory; None: not at all. `page_locked` tells whether it succeeded.
    lock_timeout_s: how long to wait for another rank that makes the file, and for the processes of an
        earlier run of a kept pool to end (s).

    The pool gives back what it holds of the system when it is closed, or at the end of the process; a kept
    pool that was not closed is in use until the process has ended. Memory goes when the last view of it is
    gone. Raises `ConfigError`.
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
        # At the end of the process a thread may still copy into a kept pool. So that pool is not closed: the
        # next run waits until the process is gone.
        if keep is None and (self.page_locked or self._file is not None):
            atexit.register(self.close)

    def close(self) -> None:
        """Give back what the pool holds. No copy may be under way. Idempotent."""
        atexit.unregister(self.close)
        self.blocks = np.empty((0, self.blocks.shape[1]), np.uint8)
        if os.getpid() != self._process:
            return  # a forked child has a copy of this object, but everything in it belongs to the parent
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
    """Zero what an earlier rank of this number wrote. The pages stay: a hole could find no room later."""
    if file.is_first_of_its_rank():
        file.note_rank()
    else:
        rows[:] = 0


def _anonymous(sizes: PoolSizes) -> mmap.mmap:
    """Memory of this process, noted for other ranks until it is freed."""
    with reserved(sizes.mapped_bytes) as others:
        check_memory(sizes, others.promised)
        try:
            # Private: large pages of shared memory are a separate setting of the system, and mostly off.
            mapping = mmap.mmap(-1, sizes.mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(
                f"the system refuses {sizes.mapped_bytes:,} bytes for a host pool: {error}; make it smaller"
            ) from error
        others.note(mapping)
        return mapping


def _advise(mapping: mmap.mmap, is_private: bool) -> None:
    """Ask for large pages. Private memory is not inherited by a forked child: its pages may be page-locked,
    and a fork would copy every one of them."""
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
    """What helps if memory is not page-locked. path: of its file; None: it has none."""
    kind = "" if path is None else _file_system(Path(path).parent)
    if kind not in ("", *_IN_MEMORY):
        return f"The pool is in {path}, on {kind}. Only files in memory can be page-locked: use /dev/shm"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return "This process may lock all memory, so the log of the kernel (dmesg) may tell more"
    return (
        f"This process may lock {limit:,} bytes: raise that with `ulimit -l unlimited`, for a container with "
        "`--ulimit memlock=-1`, for a service with LimitMEMLOCK=infinity"
    )


def _file_system(directory: Path) -> str:
    """The type of the file system of a directory, such as tmpfs; empty if the system does not tell."""
    try:
        device = directory.stat().st_dev
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kinds = [line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == wanted]
    return kinds[-1] if kinds else ""
