"""vLLM's `BlockPool` as kvsm's `DevicePool`. Its keys have kvsm's form: a hash, then four bytes of group."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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


class VllmBlockPool:
    """References are counted on vLLM's own blocks. Raises `ConfigError` for another kind of pool.

    computing: blocks that the step being scheduled writes. vLLM has cached them already, but here they are
        not cached: a store that leaves with the step would read them too early.
    """

    def __init__(self, pool: Any) -> None:
        must_have(pool, _USED)
        self._pool, self._blocks = pool, pool.blocks
        self.computing: Collection[int] = ()

    def touch(self, blocks: Sequence[int]) -> None:
        """Hold these blocks."""
        self._pool.touch([self._blocks[block] for block in blocks])

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Release these blocks."""
        self._pool.free_blocks([self._blocks[block] for block in blocks])

    def retire(self, blocks: Sequence[int]) -> None:
        """A lost copy may still write these blocks, and keeps its references to them.

        So vLLM never takes them again. The pool counts as smaller by them: else no reset of the prefix cache
        would ever succeed, because one needs every block to be free.
        """
        self._pool.num_gpu_blocks -= len(blocks)

    def key_of(self, block: int) -> bytes | None:
        """The key of a cached block."""
        key: bytes | None = None if block in self.computing else self._blocks[block].block_hash
        return key

    def cached_block(self, key: bytes) -> int | None:
        """A block with this key."""
        block = self._pool.cached_block_hash_to_block.get_one_block(key)
        return None if block is None or block.block_id in self.computing else int(block.block_id)

    def free_queue(self) -> Iterator[int]:
        """The free blocks, the next to be taken first."""
        return (block.block_id for block in self._pool.free_block_queue.iter_blocks_after(None))

    def references(self, block: int) -> int:
        """How many holders the block has."""
        return int(self._blocks[block].ref_cnt)
