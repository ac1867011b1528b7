"""The copy engine whose host pool is a file, on a disk larger than memory.

A store ends as good only after `fdatasync`, so its bytes survive a crash of the machine. Block b of the host
pool is row b of the file. The file stays when the engine is closed.

Bytes are copied by system calls and not through a memory map: an I/O error then makes the transfer bad, and
does not kill the process with SIGBUS.

docs/extending.md uses this file as its example of a copy engine.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsm.copies.layout import block_bytes_of, tensors_of
from kvsm.copies.pairs import merge_runs
from kvsm.copies.rank_memory import NumpyPools
from kvsm.copies.threaded import ThreadedCopyEngine
from kvsm.errors import ConfigError, TransferFailed
from kvsm.events import Direction
from kvsm.ids import IdArray
from kvsm.system.private_files import open_private, remove_own, sync_directory

MOST_BUFFERS = 1024
"""Most buffers of one call (IOV_MAX of Linux)."""

MOST_BYTES = 1 << 30
"""Most bytes of one call. The limit of Linux is just below 2 GiB."""


class FileCopyEngine(ThreadedCopyEngine):
    """A `CopyEngine` between a device pool in host memory and a host pool in a file.

    device: the tensors of the device pool, or a single tensor; see `NumpyPools`.
    path: the file; created if missing, readable by this user only. An existing file must be as private, and
        have the right size; its bytes are kept.
    num_host_blocks: size of the host pool.
    threads: number of copying threads. Loads run concurrently with a store; stores run one at a time.

    `blocks` is the host pool as a read-only array, which `VerifyingCopyEngine` needs. Raises `ConfigError`.
    """

    def __init__(
        self,
        device: Any | Sequence[Any],
        path: str | os.PathLike[str],
        num_host_blocks: int,
        threads: int = 2,
    ) -> None:
        self.path = Path(path)
        shape = num_host_blocks, block_bytes_of(tensors_of(device))
        self._file = _opened(self.path, shape[0] * shape[1])
        self._storing = Lock()
        try:
            self.blocks = _mapped(self.path, self._file, shape)
            self._pools = NumpyPools(device, self.blocks)
            super().__init__(self._pools.layout, threads)
        except BaseException:
            self._file.close()
            raise

    def copy_blocks(self, direction: Direction, device_blocks: IdArray, host_blocks: IdArray) -> None:
        try:
            if direction is Direction.LOAD:
                self._move(os.preadv, device_blocks, host_blocks)
            else:
                # The system reports a failed write only once, to the next `fdatasync` of the file. With two
                # stores in flight, the wrong store could get the error.
                with self._storing:
                    self._move(os.pwritev, device_blocks, host_blocks)
                    os.fdatasync(self._file.fileno())
        except OSError as error:
            raise TransferFailed(f"{self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        super().close()
        self._file.close()

    def _move(self, call: Callable[..., int], device_blocks: IdArray, host_blocks: IdArray) -> None:
        """Copy these pairs with `preadv` or `pwritev`, as many consecutive blocks a call as it can take."""
        tensors, block_bytes = self._pools.device, self.layout.block_bytes
        most = max(1, min(MOST_BUFFERS // len(tensors), MOST_BYTES // block_bytes))
        runs = merge_runs(np.asarray(device_blocks, np.int64), np.asarray(host_blocks, np.int64))
        for device_block, host_block, count in zip(*(column.tolist() for column in runs)):
            for first in range(0, count, most):
                blocks = range(device_block + first, device_block + min(first + most, count))
                buffers = [rows[block] for block in blocks for rows in tensors]
                moved = call(self._file.fileno(), buffers, (host_block + first) * block_bytes)
                if moved != len(blocks) * block_bytes:
                    raise OSError(f"only {moved:,} of {len(blocks) * block_bytes:,} bytes were copied")


def _opened(path: Path, size: int) -> FileIO:
    """Open the file of a host pool, or create it, and allocate all of its `size` bytes. Raises
    `ConfigError`."""
    descriptor, is_new = open_private(path, "a host pool")
    file = FileIO(descriptor, "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(file.fileno()).st_size
        if found not in (0, size):
            raise ConfigError(
                f"{path}: has {found:,} bytes, and this host pool {size:,}; give another path, or remove it"
            )
        if size > found:
            os.posix_fallocate(file.fileno(), 0, size)
            sync_directory(path.parent)
    except BaseException as error:
        if is_new and not isinstance(error, BlockingIOError):
            remove_own(path, file.fileno())
        file.close()
        if isinstance(error, BlockingIOError):
            raise ConfigError(f"{path}: is in use by another copy engine; give each its own file") from error
        if isinstance(error, OSError):
            raise ConfigError(f"{path}: no room for {size:,} bytes: {error.strerror}") from error
        raise
    return file


def _mapped(path: Path, file: FileIO, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """Map the file as a read-only array. An empty file gives an empty array, because it cannot be mapped.

    The file is opened a second time: a map of the first descriptor would keep its lock after `close`.
    """
    if not shape[0]:
        return np.empty(shape, np.uint8)
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as again:
        if not os.path.samestat(os.fstat(again.fileno()), os.fstat(file.fileno())):
            raise ConfigError(f"{path}: was replaced by another file while it was opened; give another path")
        return np.memmap(again, np.uint8, "r", shape=shape)
