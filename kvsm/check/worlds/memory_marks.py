"""Marks of kept pools in memory, for worlds and tests whose pools are not files."""

from __future__ import annotations

import mmap

from kvsm.copies.checksums import CHECKSUM_BYTES
from kvsm.copies.host_pools.pool_mark import MARK_BYTES, PoolMark
from kvsm.copies.host_pools.pool_sizes import PoolSizes

_BLOCK_BYTES = 4096


def memory_marks(ranks: int = 1) -> list[PoolMark]:
    """For each rank the marks of a block pool and of a checksum pool. Forked processes share them."""
    return [
        PoolMark(mmap.mmap(-1, MARK_BYTES), PoolSizes(1, 1, block_bytes))
        for _ in range(ranks)
        for block_bytes in (_BLOCK_BYTES, CHECKSUM_BYTES)
    ]
