"""The host pool of another process of this machine, to copy blocks out of it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvsm.copies.host_pools.pool_file import map_to_read
from kvsm.errors import ConfigError


class BorrowedPool:
    """The rows of one rank in a host pool that another process keeps in a file (`HostPool(path=...)`).

    path: the file.
    block_bytes: what a row must have.
    rank: whose rows.

    `blocks` is a uint8 array `[num_blocks, block_bytes]` that cannot be written; after `close` it has no
    rows. It shows what the other process writes, at any moment. So both processes must agree on when a row
    does not change.

    Raises `ConfigError` for a file that is no such pool, or that others than its user can touch.
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
        """Give the memory back, once no other view of it is left. Idempotent."""
        self.blocks = np.empty((0, self.blocks.shape[1]), np.uint8)

    def __enter__(self) -> BorrowedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
