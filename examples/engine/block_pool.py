"""The device blocks: their reference counts, their content, and the order in which they are reused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class BlockPool:
    """A `DevicePool` of kvsm: blocks with reference counts, and a prefix cache over them.

    A block without references keeps its content until it is allocated again.
    """

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self._free = dict.fromkeys(range(num_blocks))
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    # What kvsm calls.

    def touch(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            self._free.pop(block, None)
            self.references[block] += 1

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block. A block that has none left joins the end of the free queue."""
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                self._free[block] = None

    def key_of(self, block: int) -> bytes | None:
        """Return the key of the content that the block caches."""
        return self._key_of.get(block)

    def cached_block(self, key: bytes) -> int | None:
        """Return a block that caches the content of `key`."""
        return self._block_of.get(key)

    def free_queue(self) -> Iterator[int]:
        """Iterate over the free blocks, the next one to be allocated first."""
        return iter(self._free)

    # What only the engine calls, under vLLM's names.

    def num_free(self) -> int:
        """Return how many blocks can be allocated."""
        return len(self._free)

    def get_new_blocks(self, count: int) -> list[int]:
        """Allocate blocks. They lose their cached content."""
        blocks = [block for block, _ in zip(self._free, range(count), strict=False)]
        self.touch(blocks)
        for block in blocks:
            self._forget(block)
        return blocks

    def cache_full_blocks(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Cache keys[i] in blocks[i], unless another block caches it already."""
        for block, key in zip(blocks, keys, strict=True):
            if self._block_of.setdefault(key, block) == block:
                self._key_of[block] = key

    def reset_prefix_cache(self) -> None:
        """Remove all keys."""
        for block in list(self._key_of):
            self._forget(block)

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
