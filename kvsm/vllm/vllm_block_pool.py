"""vLLM's `BlockPool` as kvsm's `DevicePool`. Both have keys of one form: a hash, then four bytes of group."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter
from typing import Any

from kvsm.vllm.versions import must_have

_USED = (
    "touch",
    "free_blocks",
    "blocks",
    "num_gpu_blocks",
    "cached_block_hash_to_block",
    "free_block_queue",
)
_BLOCK_ID = attrgetter("block_id")


class VllmBlockPool:
    """A device pool that counts references on vLLM's own blocks. Raises `ConfigError` for an unknown pool.

    computing: blocks that the step being scheduled writes. vLLM has cached them already, but here they count
        as not cached: a store that leaves with the step would read them too early.
    """

    def __init__(self, pool: Any) -> None:
        must_have(pool, _USED)
        self._pool, self._blocks = pool, pool.blocks
        self.computing: Collection[int] = ()

    def touch(self, blocks: Sequence[int]) -> None:
        """Take a reference to each of these blocks."""
        self._pool.touch([self._blocks[block] for block in blocks])

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Release a reference to each of these blocks."""
        self._pool.free_blocks([self._blocks[block] for block in blocks])

    def retire(self, blocks: Sequence[int]) -> None:
        """Make the pool count as smaller by the blocks of a lost copy. The copy may still write them, and
        keeps its references, so vLLM never uses them again.

        Otherwise no reset of the prefix cache would ever succeed, because it needs every block to be free.
        """
        self._pool.num_gpu_blocks -= len(blocks)

    def key_of(self, block: int) -> bytes | None:
        """Return the key of a cached block; None if it is not cached."""
        key: bytes | None = None if block in self.computing else self._blocks[block].block_hash
        return key

    def keys_of(self, blocks: Sequence[int]) -> list[bytes | None]:
        """Return `key_of` of each block."""
        if self.computing:
            return list(map(self.key_of, blocks))
        every = self._blocks
        return [every[block].block_hash for block in blocks]

    def cached_block(self, key: bytes) -> int | None:
        """Return a cached block with this key; None if there is none."""
        block = self._pool.cached_block_hash_to_block.get_one_block(key)
        return None if block is None or block.block_id in self.computing else int(block.block_id)

    def free_queue(self) -> Iterator[int]:
        """Return the free blocks, beginning with the next one to be taken."""
        return map(_BLOCK_ID, self._pool.free_block_queue.iter_blocks_after(None))

    def references(self, block: int) -> int:
        """Return the number of references to the block."""
        return int(self._blocks[block].ref_cnt)
