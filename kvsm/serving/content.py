"""The bytes that a device block must hold, so that a wrong copy is detected (S15).

The content follows from the block's key (hash and KV cache group) and the rank: eight bytes, repeated over
the block. So a block that was copied from the wrong place, too early, too late or in part is detected. The
order of the eight-byte words of a block is not checked, because all are equal.

Writing and checking are compute of the rank: they are queued, and run in the order of the rank's compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.core.kv_events import GROUP_INDEX_BYTES
from kvsm.serving.ranks import WORD_BYTES, Rank
from kvsm.serving.traces import HASH_BYTES

_MIX = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio. It is odd, so different words stay different when multiplied by it."""

_COMPARED_AT_MOST = 256
"""The most checks that may wait before their results are read. Reading a result waits for the device."""


class Mismatch(NamedTuple):
    """Device block `block` of rank `rank` did not hold the content of `key` when request `reader` read it."""

    rank: int
    block: int
    key: bytes
    reader: str


class _Compared(NamedTuple):
    """The result of one check on one rank. equal: whether each block is right; may still be on the device."""

    rank: int
    equal: Any
    blocks: Sequence[int]
    keys: Sequence[bytes]
    readers: Sequence[str]


class DeviceContent:
    """Writes and checks the device pools of all ranks."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._compared: list[_Compared] = []
        self._mismatches: list[Mismatch] = []

    def write(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Queue the compute of blocks: on every rank, blocks[i] gets the content of keys[i]."""
        where = np.asarray(blocks, dtype=np.int64)
        for number, rank in enumerate(self._ranks):
            content = _expected(keys, number, rank.block_bytes)

            def action(rank: Rank = rank, content: NDArray[Any] = content) -> None:
                rank.words[rank.upload(where)] = rank.upload(content)

            rank.launch("write", (), blocks, action)

    def check(self, blocks: Sequence[int], keys: Sequence[bytes], readers: Sequence[str]) -> None:
        """Queue a check before compute: on every rank, blocks[i] must hold the content of keys[i].

        readers: readers[i] is the request that needs blocks[i].
        """
        where = np.asarray(blocks, dtype=np.int64)
        for number, rank in enumerate(self._ranks):
            content = _expected(keys, number, rank.block_bytes)

            def action(number: int = number, rank: Rank = rank, content: NDArray[Any] = content) -> None:
                equal = (rank.words[rank.upload(where)] == rank.upload(content)).all(1)
                self._compared.append(_Compared(number, equal, blocks, keys, readers))

            rank.launch("read", blocks, (), action)
        if len(self._compared) > _COMPARED_AT_MOST:
            self._read_results()

    def mismatches(self) -> list[Mismatch]:
        """Return all mismatches so far. Waits for all queued compute."""
        for rank in self._ranks:
            rank.synchronize()
        self._read_results()
        return list(self._mismatches)

    def _read_results(self) -> None:
        compared, self._compared = self._compared, []
        for number, equal, blocks, keys, readers in compared:
            for place in np.flatnonzero(~self._ranks[number].download(equal)).tolist():
                self._mismatches.append(Mismatch(number, blocks[place], keys[place], readers[place]))


def _expected(keys: Sequence[bytes], rank: int, block_bytes: int) -> NDArray[Any]:
    """Return a row for each key: the word to repeat over the block, or all bytes if words do not fit."""
    # A key starts with a hash, so its first eight bytes are a hash too; it ends with the group.
    whole = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, HASH_BYTES + GROUP_INDEX_BYTES)
    heads = np.ascontiguousarray(whole[:, :WORD_BYTES]).view("<u8")
    groups = np.ascontiguousarray(whole[:, HASH_BYTES:]).view(">u4").astype("<u8")
    words: NDArray[np.uint64] = (heads ^ (groups << np.uint64(32)) ^ np.uint64(rank)) * _MIX
    if block_bytes % WORD_BYTES == 0:
        return words
    return np.tile(words.view(np.uint8), -(-block_bytes // WORD_BYTES))[:, :block_bytes]
