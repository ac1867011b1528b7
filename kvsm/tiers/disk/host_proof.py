"""Links the checksums on disk to the checksum table of the host pool, so that damaged bytes never get a valid
checksum.

To the disk: bytes that changed in host memory since their store must not get a new checksum on disk. So the
written bytes must have the checksum in the host's table. From the disk: the table gets the checksums of the
bytes that were proved on disk, and not of the bytes in memory after the copy.

A slot of the disk holds a row, which is one or more host blocks. If it is one block, the two checksums are
equal and computed once. Otherwise each block is hashed, too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvsm.copies.checksums import NO_NAMES, BlockChecksums, Names
from kvsm.errors import ConfigError

RowName = tuple[bytes, int] | None
"""Key and generation of a row in the host pool. None for a pool that is not kept."""


class HostProof:
    """Access to the checksum table of a host pool by rows, for the disk tier.

    checksums: the table, with an entry for each host block.
    num_rows, row_bytes: the rows of the disk tier's host pool. A row is one or more host blocks.

    Raises `ConfigError` if table and rows are of different pools. Threads may use different rows at the same
    time.
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
        """Whether `wrong` and `end` need the name of a row."""
        return self._checksums.is_kept

    def of_blocks(self, payload: NDArray[np.uint8], checksum: int) -> NDArray[np.uint64]:
        """Return the checksums of the blocks of a row.

        payload: the bytes of the row.
        checksum: the checksum of the whole row.
        """
        if self._is_same:
            return np.array([checksum], np.uint64)
        return self._checksums.of_copies(payload.reshape(self._chunk, -1))

    def wrong(self, row: int, found: NDArray[np.uint64], name: RowName = None) -> str:
        """Compare the checksums of a row's blocks with the table. Returns the error, or an empty text."""
        return self._checksums.wrong(self._blocks(row), found, self._names(name))

    def begin(self, rows: NDArray[np.int64]) -> None:
        """Clear the checksums of rows that are about to be written: an interrupted load leaves unknown
        bytes."""
        for row in rows.tolist():
            self._checksums.clear(self._blocks(row))

    def end(self, row: int, found: NDArray[np.uint64], name: RowName = None) -> None:
        """Record the checksums of the blocks of a row, after they were copied from proved bytes."""
        self._checksums.put(self._blocks(row), found, self._names(name))

    def _names(self, name: RowName) -> Names:
        return NO_NAMES if name is None else ([name[0]] * self._chunk, [name[1]] * self._chunk)

    def _blocks(self, row: int) -> NDArray[np.int64]:
        return np.arange(row * self._chunk, (row + 1) * self._chunk)
