"""The sizes of a host pool, and whether the machine has room for it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple

from kvsm.copies.host_pools.available_memory import Promised, available_memory_bytes
from kvsm.errors import ConfigError

PAGE_BYTES = mmap.PAGESIZE

MOST_RANKS = 1024
"""Most ranks of one file. The last page has a byte for each."""


class PoolSizes(NamedTuple):
    """The sizes of a pool. All ranks that share a file must agree on them.

    num_blocks: number of host blocks, each with a row for each shard.
    ranks: number of ranks that share the pool.
    block_bytes: size of a row.
    replicas: number of consecutive ranks that share rows.
    """

    num_blocks: int
    ranks: int
    block_bytes: int
    replicas: int = 1

    @property
    def shards(self) -> int:
        """Number of rows of a block."""
        return self.ranks // self.replicas

    @property
    def total_bytes(self) -> int:
        """Size of all rows."""
        return self.num_blocks * self.shards * self.block_bytes

    @property
    def mapped_bytes(self) -> int:
        """Size of all rows, rounded up to whole pages."""
        return -(-self.total_bytes // PAGE_BYTES) * PAGE_BYTES

    def __str__(self) -> str:
        together = f", {self.replicas} ranks together" if self.replicas > 1 else ""
        return f"{self.num_blocks:,} blocks for {self.ranks} ranks{together}, {self.block_bytes:,} bytes each"


def check_memory(sizes: PoolSizes, promised: Sequence[Promised] = ()) -> None:
    """Raise `ConfigError` if the machine, or a control group of this process, has no memory for the pool.

    promised: memory promised to other pools.
    """
    available = available_memory_bytes(promised=promised)
    if available is not None and sizes.mapped_bytes > available:
        promised_bytes = sum(promise.size for promise in promised)
        others = f"; {len(promised)} other pools here will take {promised_bytes:,} more"
        raise ConfigError(
            f"a host pool of {sizes} needs {sizes.mapped_bytes:,} bytes of memory, and {available:,} are "
            f"available to this process, its control groups counted{others if promised else ''}; make the "
            "pool smaller (all ranks of a host share its memory)"
        )
