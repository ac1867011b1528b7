"""Copies many fragments of memory in one call: `process_vm_readv` of Linux.

A copying thread releases the interpreter's lock (GIL) during the copy, and must take it again after each
call. If another thread computes in Python, this takes up to the switch interval of 5 ms, even for a fragment
that was copied in 5 us. Then the time depends on the number of calls.

The call is meant to read another process's memory. It also reads the caller's own memory, 1024 fragments at a
time. It differs from 1024 calls of `memcpy` in two ways. The kernel looks up each page of the source, which
costs up to a third of the speed with small pages. And memory that is not mapped gives an error instead of
killing the process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from kvsm.copies.geometry import Fragments, spread
from kvsm.copies.layout import MemoryRows

MOST_FRAGMENTS = 1024
"""Most fragments of one call (UIO_MAXIOV of the kernel)."""

LONGEST_BYTES = 1 << 20
"""Longer fragments are cut, because the kernel copies less than 2 GiB in one call."""


def copy_vectored(fragments: Fragments) -> None:
    """Copy these fragments, whose targets must not overlap. Raises `OSError`; the targets may then hold part
    of the bytes. The addresses must be right: a wrong address in mapped memory is not detected."""
    call = _process_vm_readv()
    fragments = _cut(fragments)
    for first in range(0, len(fragments.sizes), MOST_FRAGMENTS):
        part = slice(first, first + MOST_FRAGMENTS)
        lengths = fragments.sizes[part]
        targets = np.stack((fragments.targets[part], lengths), axis=1)
        sources = np.stack((fragments.sources[part], lengths), axis=1)
        count, expected = len(lengths), int(lengths.sum())
        # Not cached, because a forked child has another process id.
        copied = call(os.getpid(), targets.ctypes.data, count, sources.ctypes.data, count, 0)
        if copied < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"process_vm_readv: {os.strerror(number)}")
        if copied != expected:
            raise OSError(f"process_vm_readv copied {copied} of {expected} bytes; the rest is not mapped")


def reaches(pools: Iterable[MemoryRows]) -> bool:
    """Whether `copy_vectored` can read these rows.

    It cannot on systems other than Linux, in sandboxes that forbid the call, and for memory without pages,
    such as a mapped device's.
    """
    byte = np.zeros(1, np.uint8)
    try:
        for rows in pools:
            if rows.num_rows:
                first_byte = (rows.address, byte.ctypes.data, 1)
                copy_vectored(Fragments(*(np.array([column], np.uint64) for column in first_byte)))
    except (AttributeError, OSError, TypeError):
        return False
    return True


def _cut(fragments: Fragments) -> Fragments:
    """Cut longer fragments into fragments of at most `LONGEST_BYTES`."""
    parts = (fragments.sizes.view(np.int64) - 1) // LONGEST_BYTES + 1
    if bool((parts == 1).all()):
        return fragments
    whole, part = spread(parts)
    skipped = (part * LONGEST_BYTES).view(np.uint64)
    sizes = np.minimum(fragments.sizes[whole] - skipped, np.uint64(LONGEST_BYTES))
    return Fragments(fragments.sources[whole] + skipped, fragments.targets[whole] + skipped, sizes)


@cache
def _process_vm_readv() -> Any:
    """Return the function of the C library. Raises `AttributeError` or `TypeError` if there is none."""
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    number = ctypes.c_ulong
    call.argtypes = (ctypes.c_int, ctypes.c_void_p, number, ctypes.c_void_p, number, number)
    call.restype = ctypes.c_ssize_t
    return call
