"""What ties the checksums on disk to those beside the host pool, so that no copy gives bad bytes a good one.

On the way to the disk: bytes that changed in host memory since they were stored there must not get a new
checksum on disk. So what is written must have the checksum that the host's table has for it. On the way back:
the table gets the checksums of what was proved on disk, and not of what lies in memory after the copy.

A slot of the disk holds a row, which is one or more host blocks. If it is one, the two checksums are the same
number, and nothing is computed twice. Otherwise each block is hashed as well.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvsm.copies.checksums import NO_NAMES, BlockChecksums, Names
from kvsm.errors import ConfigError

RowName = tuple[bytes, int] | None
"""Key and generation of a row in the host pool. None: the pool is not kept, and needs neither."""


class HostProof:
    """The checksums of a host pool as the disk tier needs them: by rows.

    checksums: of the host blocks.
    num_rows, row_bytes: how the disk tier sees the host pool.

    Raises `ConfigError` if the two are not of one pool. Threads may use it at once for different rows.
    """

    def __init__(self, checksums: BlockChecksums, num_rows: int, row_bytes: int) -> None:
        self._checksums, self._chunk = checksums, row_bytes // checksums.block_bytes
        if (checksums.num_blocks, checksums.block_bytes * self._chunk) != (num_rows * self._chunk, row_bytes):
            raise ConfigError(
                f"the checksums are of {checksums.num_blocks:,} host blocks of {checksums.block_bytes:,} "
                f"bytes, and the disk tier has {num_rows:,} rows of {row_bytes:,}; give the checksums of "
                "the same host pool"
            )
        self._is_same = self._chunk == 1 and checksums.is_plain

    @property
    def needs_names(self) -> bool:
        """Whether `wrong` and `end` need the name of the row."""
        return self._checksums.is_kept

    def of_blocks(self, payload: NDArray[np.uint8], checksum: int) -> NDArray[np.uint64]:
        """The checksums of the blocks of a row.

        payload: its bytes.
        checksum: of all of it. In a store it was computed before, and in a load it is compared afterwards:
            so a bit that changes meanwhile is found by one of the two.
        """
        if self._is_same:
            return np.array([checksum], np.uint64)
        return self._checksums.of_copies(payload.reshape(self._chunk, -1))

    def wrong(self, row: int, found: NDArray[np.uint64], name: RowName = None) -> str:
        """The error if the blocks of this row must not have these checksums; empty if they may."""
        return self._checksums.wrong(self._blocks(row), found, self._names(name))

    def begin(self, rows: NDArray[np.int64]) -> None:
        """These rows are about to be written: nobody must take what a load that is cut off leaves for what
        was stored there."""
        for row in rows.tolist():
            self._checksums.clear(self._blocks(row))

    def end(self, row: int, found: NDArray[np.uint64], name: RowName = None) -> None:
        """The blocks of this row were written, from bytes with these checksums."""
        self._checksums.put(self._blocks(row), found, self._names(name))

    def _names(self, name: RowName) -> Names:
        return NO_NAMES if name is None else ([name[0]] * self._chunk, [name[1]] * self._chunk)

    def _blocks(self, row: int) -> NDArray[np.int64]:
        return np.arange(row * self._chunk, (row + 1) * self._chunk)
