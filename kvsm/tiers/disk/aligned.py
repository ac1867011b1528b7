"""Aligned memory and file calls for direct I/O.

A short read or write is an error here. On a regular file it means that the disk is full, or that the file was
truncated.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsm.tiers.disk.formats import ALIGNMENT


def aligned_memory(size: int) -> NDArray[np.uint8]:
    """Allocate at least `size` bytes of zeros, page-aligned. Raises `OSError` or `MemoryError`."""
    return np.frombuffer(mmap.mmap(-1, max(ALIGNMENT, size)), np.uint8)


def read_at(descriptor: int, memory: Any, offset: int) -> None:
    """Fill this memory with the bytes of the file from `offset` on. Raises `OSError`."""
    moved, wanted = os.preadv(descriptor, [memory], offset), memory.nbytes
    if moved != wanted:
        raise OSError(f"only {moved:,} of {wanted:,} bytes were read at {offset:,}")


def write_at(descriptor: int, parts: Sequence[Any], offset: int) -> None:
    """Write these parts of memory to the file, one after another from `offset` on. Raises `OSError`."""
    moved, wanted = os.pwritev(descriptor, parts, offset), sum(part.nbytes for part in parts)
    if moved != wanted:
        raise OSError(f"only {moved:,} of {wanted:,} bytes were written at {offset:,}")


def are_aligned(rows: NDArray[np.uint8]) -> bool:
    """Whether direct I/O can write each of these rows without a copy."""
    address, (count, row_bytes), strides = rows.ctypes.data, rows.shape, rows.strides
    return not (address % ALIGNMENT or row_bytes % ALIGNMENT or (count > 1 and strides[0] % ALIGNMENT))


def use_direct(descriptor: int, use: bool) -> bool:
    """Turn direct I/O of an open file on or off. Returns whether it is on: the operating system may
    lack it, the file system may refuse it, and the disk may require a larger alignment."""
    direct = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if use and direct:
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct)
            read_at(descriptor, aligned_memory(ALIGNMENT), 0)
            return True
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~direct)
    return False
