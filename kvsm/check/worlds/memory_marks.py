"""Marks of kept pools that no file holds, for worlds and tests whose pools are no files."""

from __future__ import annotations

import mmap

from kvsm.copies.checksums import CHECKSUM_BYTES
from kvsm.copies.host_pools.pool_mark import MARK_BYTES, PoolMark
from kvsm.copies.host_pools.pool_sizes import PoolSizes

_BLOCK_BYTES = 4096


def memory_marks(ranks: int = 1) -> list[PoolMark]:
    """The marks of a pool of blocks and a pool of checksums for each rank. Forked processes share them."""
    return [
        PoolMark(mmap.mmap(-1, MARK_BYTES), PoolSizes(1, 1, block_bytes))
        for _ in range(ranks)
        for block_bytes in (_BLOCK_BYTES, CHECKSUM_BYTES)
    ]
