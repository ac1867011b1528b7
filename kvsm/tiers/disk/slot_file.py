"""The file of one rank's disk tier, opened by one process.

The file under the given path decides what happens. Its blocks are kept only if all of these are equal:

=============================================  ===============================================
found                                          what happens
=============================================  ===============================================
no file, or a file without any data            created: cold
a file that another process has locked         refused; the error names that process
a link, a pipe, a file open to other users     refused; see `private_files.py`
a file without kvsm's superblock               refused: it is other data
kvsm's file, and both superblocks are damaged  replaced: cold; `cold_reason` says why
- of another format                            likewise
- of another identity or geometry              likewise, with a line for each difference
- longer or shorter than it was created        likewise
- equal in all of this                         kept: warm
=============================================  ===============================================

Opening raises the life of the file in both superblocks, and returns when that is on disk. So the generations
of this life are newer than the generations of every earlier life.

The lock is the `flock` of the file. The kernel releases it when this process has ended and its last calls are
finished; so no write of a killed process comes after its successor has the lock. A forked child closes its
copy of the file at once.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.errors import ConfigError, UnusableFiles
from kvsm.identity import PoolIdentity
from kvsm.system.file_locks import lock_holder
from kvsm.system.private_files import names, open_private, remove_own, sync_directory
from kvsm.tiers.disk.aligned import aligned_memory, read_at, use_direct, write_at
from kvsm.tiers.disk.formats import (
    FILE_ID_BYTES,
    FIRST_SLOT,
    SUPERBLOCK_BYTES,
    SUPERBLOCKS,
    DiskGeometry,
    Superblock,
    is_superblock,
    read_superblock,
)
from kvsm.tiers.disk.slot_table import SlotTable

_LOGGER = logging.getLogger("kvsm.tiers.disk")
_PURPOSE = "a disk tier"
_TRIES = 100
"""How often to open the path again, if the file is replaced meanwhile."""


class SlotFile:
    """An open file of a disk tier. The module's docstring says which files are kept, replaced or refused.

    path: the file, readable by this user only.
    geometry: sizes and rank.
    identity: what the bytes mean.
    direct: use direct I/O if the file system supports it.

    Raises `UnusableFiles`; `ConfigError` if another process has locked the file, or if the identity is too
    long. Attributes: `direct`, whether direct I/O is used; `cold_reason`, why no block of an earlier life is
    kept, empty if warm; `found_life`, the last life before this one, 0 if cold; `table`, the state of the
    slots.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        geometry: DiskGeometry,
        identity: PoolIdentity,
        direct: bool = True,
    ) -> None:
        geometry.check()
        Superblock(0, bytes(FILE_ID_BYTES), geometry, identity).encode()  # raises if it is too long
        self.path, self.geometry, self.identity = Path(path), geometry, identity
        self.digest = identity.digest()
        self.direct = False
        self.cold_reason: list[str] = []
        self.table = SlotTable(geometry.num_slots)
        self._descriptor = -1
        _OPEN.add(self)
        try:
            self._superblock = self._opened()
            self.found_life = self._superblock.life
            self._write_life(self.found_life + 1)
            self.direct = use_direct(self._descriptor, direct)
        except OSError as error:
            self.close()
            raise UnusableFiles(
                f"{self.path}: cannot be used for {_PURPOSE}: {error.strerror or error}; fix that, or give "
                "another directory"
            ) from error
        except BaseException:
            self.close()
            raise
        if direct and not self.direct:
            _LOGGER.warning("%s: its file system grants no direct I/O, so the page cache is used", self.path)

    @property
    def life(self) -> int:
        """How often the file was opened, this time included."""
        return self._superblock.life

    @property
    def file_id(self) -> bytes:
        """Random id, new for each created file."""
        return self._superblock.file_id

    def raise_life(self, life: int) -> None:
        """Continue as a later life, before the first store, so that the files of all ranks have the same
        life.

        Raises `OSError`, and `ValueError` for an earlier life.
        """
        if life < self.life:
            raise ValueError(f"life {life} is before life {self.life}")
        if life > self.life:
            self._write_life(life)

    def read(self, memory: Any, offset: int) -> None:
        """Fill this aligned memory with the bytes of the file from `offset` on. Raises `OSError`."""
        read_at(self._open(), memory, offset)

    def write(self, parts: Sequence[Any], offset: int) -> None:
        """Write these aligned parts of memory, one after another from `offset` on. Raises `OSError`."""
        write_at(self._open(), parts, offset)

    def flush(self) -> None:
        """Return when all earlier writes are on disk. Raises `OSError`: Linux reports an error only once."""
        os.fdatasync(self._open())

    def check_there(self) -> None:
        """Raise `OSError` if the file was removed or truncated since it was opened: new stores would be lost
        with this process, or would make a file with holes."""
        found = os.fstat(self._open())
        if not found.st_nlink:
            raise OSError(errno.ENOENT, "the file was removed; start again to make a new one")
        if found.st_size != self.geometry.file_bytes:
            raise OSError(
                errno.EIO, f"the file has {found.st_size:,} bytes, and had {self.geometry.file_bytes:,}"
            )

    def close(self) -> None:
        """Close the file and release its lock. The file is not removed. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _open(self) -> int:
        if self._descriptor < 0:
            raise OSError(errno.EBADF, "the file is closed")
        return self._descriptor

    def _opened(self) -> Superblock:
        """Open and lock the file. Returns its superblock; that of a new file if it is created or replaced."""
        for _ in range(_TRIES):
            self.close()
            self._descriptor, _ = open_private(self.path, _PURPOSE)
            self._lock()
            if not names(self.path, self._descriptor):
                continue
            if _has_no_data(self._descriptor):
                return self._made()
            superblock = self._found()
            if superblock is not None:
                return superblock
            _LOGGER.warning("%s: starts cold: %s", self.path, "; ".join(self.cold_reason))
            remove_own(self.path, self._descriptor)
        raise UnusableFiles(f"{self.path}: comes and goes while it is opened; give another path")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock_holder(self._descriptor)
            raise ConfigError(f"{self.path}: is in use by {holder}; end it, or give another path") from None

    def _made(self) -> Superblock:
        """Create the file. Write its superblocks first: if this process is killed meanwhile, the next process
        recognizes the file and replaces it."""
        size = self.geometry.file_bytes
        made = Superblock(0, os.urandom(FILE_ID_BYTES), self.geometry, self.identity)
        try:
            os.ftruncate(self._descriptor, 0)
            write_at(self._descriptor, [_page_of(made)] * SUPERBLOCKS, 0)
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            remove_own(self.path, self._descriptor)
            raise UnusableFiles(
                f"{self.path}: no room for {size:,} bytes: {error.strerror}; make room, or give another "
                "directory or a smaller size"
            ) from error
        self.cold_reason = self.cold_reason or ["there was no file"]
        sync_directory(self.path.parent)
        return made

    def _found(self) -> Superblock | None:
        """Return the newest superblock of the file. None, with `cold_reason` set, if the file must be
        replaced."""
        copies = self._copies()
        read = [read_superblock(copy) for copy in copies]
        whole = [copy for copy in read if isinstance(copy, Superblock)]
        if not whole:
            if not any(map(is_superblock, copies)):
                raise UnusableFiles(
                    f"{self.path}: is not a file of a disk tier; give another path, or remove the file"
                )
            self.cold_reason = [str(read[not is_superblock(copies[0])])]
            return None
        last = max(whole, key=lambda superblock: superblock.life)
        size = os.fstat(self._descriptor).st_size
        reasons = last.identity.differences(self.identity)
        if last.geometry != self.geometry:
            reasons.append(f"it has {last.geometry}, and now {self.geometry} are asked for")
        elif size != self.geometry.file_bytes:
            reasons.append(f"it has {size:,} bytes, and was made with {self.geometry.file_bytes:,}")
        self.cold_reason = reasons
        return None if reasons else last

    def _copies(self) -> list[bytes]:
        return [
            os.pread(self._descriptor, SUPERBLOCK_BYTES, number * SUPERBLOCK_BYTES)
            for number in range(SUPERBLOCKS)
        ]

    def _write_life(self, life: int) -> None:
        """Write both superblocks, the older copy first, so that at any moment one copy is whole."""
        self._superblock = msgspec.structs.replace(self._superblock, life=life)
        memory = aligned_memory(SUPERBLOCK_BYTES)
        read = []
        for number in range(SUPERBLOCKS):
            read_at(self._descriptor, memory, number * SUPERBLOCK_BYTES)
            read.append(read_superblock(memory.tobytes()))
        lives = [copy.life if isinstance(copy, Superblock) else -1 for copy in read]
        page = _page_of(self._superblock)
        for number in np.argsort(lives, kind="stable").tolist():
            write_at(self._descriptor, [page], number * SUPERBLOCK_BYTES)
            os.fdatasync(self._descriptor)


def _page_of(superblock: Superblock) -> NDArray[np.uint8]:
    """Return the encoded superblock in aligned memory."""
    page = aligned_memory(SUPERBLOCK_BYTES)
    page[:] = np.frombuffer(superblock.encode(), np.uint8)
    return page


def _has_no_data(descriptor: int) -> bool:
    """Whether the file has no written byte, so that no data is lost if it is replaced. Its creator may have
    been killed after it had only set the size."""
    if not os.fstat(descriptor).st_size:
        return True
    try:
        return os.lseek(descriptor, 0, os.SEEK_DATA) < 0
    except OSError as error:
        return error.errno == errno.ENXIO


_OPEN: WeakSet[SlotFile] = WeakSet()


def _close_in_child() -> None:
    for file in list(_OPEN):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)

assert FIRST_SLOT == SUPERBLOCKS * SUPERBLOCK_BYTES
