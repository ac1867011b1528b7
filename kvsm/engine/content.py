"""What the bytes of a device block must be, so that a wrong copy is seen (S15).

A block's content follows from its key (hash and KV cache group) and the worker's rank: eight bytes, repeated
over the block. Other key, other rank, other bytes; so a block that was copied from the wrong place, too
early, too late or in part does not pass. Order inside one block is not checked: every eighth byte is the
same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvsm.kv_events import GROUP_INDEX_BYTES
from kvsm.traces import HASH_BYTES

_WORD = 8
_MIX = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: odd, so that multiplying by it loses nothing."""


class DeviceContent:
    """Writes and checks the device pools of all ranks; `pools[rank]` is `[blocks, block_bytes]`, uint8."""

    def __init__(self, pools: Sequence[NDArray[np.uint8]]) -> None:
        block_bytes = pools[0].shape[1]
        self._bytes = block_bytes
        self._whole_words = block_bytes % _WORD == 0
        """Then eight bytes at a time are written and compared, several times faster than one by one."""
        self._pools = [pool.view("<u8") if self._whole_words else pool for pool in pools]

    def write(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """What compute does: on every rank, blocks[i] now holds the content of keys[i]."""
        where = np.asarray(blocks, dtype=np.int64)
        for rank, pool in enumerate(self._pools):
            pool[where] = self._expected(keys, rank)

    def mismatches(self, blocks: Sequence[int], keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """(rank, block) of each block that does not hold exactly what its key demands."""
        where = np.asarray(blocks, dtype=np.int64)
        wrong = []
        for rank, pool in enumerate(self._pools):
            equal = (pool[where] == self._expected(keys, rank)).all(axis=1)
            wrong += [(rank, block) for block in where[~equal].tolist()]
        return wrong

    def _expected(self, keys: Sequence[bytes], rank: int) -> NDArray[np.uint64] | NDArray[np.uint8]:
        """One row a key: its word (to be broadcast over the block), or the block's bytes."""
        # A key starts with a hash, so its first eight bytes are a hash too; it ends with the group.
        whole = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, HASH_BYTES + GROUP_INDEX_BYTES)
        heads = np.ascontiguousarray(whole[:, :_WORD]).view("<u8")
        groups = np.ascontiguousarray(whole[:, HASH_BYTES:]).view(">u4").astype("<u8")
        words: NDArray[np.uint64] = (heads ^ (groups << np.uint64(32)) ^ np.uint64(rank)) * _MIX
        if self._whole_words:
            return words
        return np.tile(words.view(np.uint8), -(-self._bytes // _WORD))[:, : self._bytes]
