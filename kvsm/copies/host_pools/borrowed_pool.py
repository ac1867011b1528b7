"""Read access to the host pool of another process of this machine, to copy blocks out of it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvsm.copies.host_pools.pool_file import map_to_read
from kvsm.errors import ConfigError


class BorrowedPool:
    """The rows of one rank in a host pool that another process has in a file (`HostPool(path=...)`).

    path: the file.
    block_bytes: the expected size of a row.
    rank: the rank of the other engine whose rows are read.

    `blocks` is a read-only uint8 array `[num_blocks, block_bytes]`; after `close` it has no rows. It shows
    every write of the other process at once, so both processes must agree on when a row does not change.

    Raises `ConfigError` for a file that is no such pool, or that other users can access.
    """

    def __init__(self, path: str | os.PathLike[str], block_bytes: int, rank: int = 0) -> None:
        mapping, sizes = map_to_read(Path(path))
        if sizes.block_bytes != block_bytes or not 0 <= rank < sizes.ranks:
            mapping.close()
            raise ConfigError(
                f"{path}: is a host pool of {sizes}; rank {rank} with {block_bytes:,} bytes a block was "
                "asked for"
            )
        whole: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        rows = whole[: sizes.total_bytes].reshape(sizes.num_blocks, sizes.shards, block_bytes)
        self.blocks: NDArray[np.uint8] = rows[:, rank // sizes.replicas, :]

    def close(self) -> None:
        """Drop `blocks`. The memory is unmapped when no other view of it is left. Idempotent."""
        self.blocks = np.empty((0, self.blocks.shape[1]), np.uint8)

    def __enter__(self) -> BorrowedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
