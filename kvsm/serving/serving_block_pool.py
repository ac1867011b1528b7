"""The device blocks of the engine: their reference counts, and the keys that they cache.

Names and behaviour follow vLLM's `BlockPool`. The blocks of all KV cache groups come from one pool, and keys
end with the group. A block has a reference for each request whose table contains it, and for each copy in
flight that touches it. A block without references is in the free queue. It keeps its key, and serves prefix
hits, until it is taken. The block that was freed first is taken first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.states import LeaseState
from kvsm.states.words import STATE_MASK, StateWords


class ServingBlockPool:
    """A pool of device blocks.

    leases: the leases of the offload ledger, checked whenever a block is taken.
    num_blocks: the first `num_blocks` blocks with leases belong to the engine; None: all of them.
    """

    def __init__(self, leases: StateWords, num_blocks: int | None = None) -> None:
        self.num_blocks = leases.size if num_blocks is None else num_blocks
        self._leases = leases
        self._references = [0] * self.num_blocks
        self._key_of: list[bytes | None] = [None] * self.num_blocks
        self._cached: dict[bytes, int] = {}
        # Unlike a dict, an OrderedDict removes from its head and its middle in constant time.
        self._free = OrderedDict.fromkeys(range(self.num_blocks))

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks without references."""
        return len(self._free)

    def is_free(self, block: int) -> bool:
        """Whether the block has no references."""
        return self._references[block] == 0

    def held_blocks(self) -> list[int]:
        """Return the blocks with references, except retired ones, which a lost copy keeps forever."""
        words, retired = self._leases.words, int(LeaseState.RETIRED)
        return [
            block
            for block, references in enumerate(self._references)
            if references and words[block] & STATE_MASK != retired
        ]

    def key_of(self, block: int) -> bytes | None:
        """Return the key of the content that the block caches; None if it caches none."""
        return self._key_of[block]

    def cached_block(self, key: bytes) -> int | None:
        """Return the block with the content of `key`, or None. It gets no reference: `touch` it."""
        return self._cached.get(key)

    def free_queue(self) -> Iterator[int]:
        """Return the free blocks, beginning with the next one to be taken."""
        return iter(self._free)

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks, the longest free first, and drop their keys.

        So many must be free: see `num_free_blocks`. Raises `PropertyBroken` (no reuse in flight, S3) if a
        copy still holds a lease on one of them, although it has no references.
        """
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            if self._leases.words[block] != LeaseState.NONE:
                state = self._leases.state(block).name
                raise PropertyBroken(
                    Property.NO_REUSE_IN_FLIGHT, f"device block {block} is free, but a copy holds it: {state}"
                )
            self._references[block] = 1
            key = self._key_of[block]
            if key is not None:
                del self._cached[key]
                self._key_of[block] = None
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block. A free block leaves the free queue and keeps its content."""
        references = self._references
        for block in blocks:
            if references[block] == 0:
                del self._free[block]
            references[block] += 1

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block.

        Pass the blocks of a request from its last to its first: then the end of a prefix is reused first.
        """
        references = self._references
        for block in blocks:
            if references[block] == 0:
                raise PropertyBroken(
                    Property.ONE_RELEASE_PER_HOLD,
                    f"device block {block} was given back more often than taken",
                )
            references[block] -= 1
            if references[block] == 0:
                self._free[block] = None

    def cache_full_blocks(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Let blocks[i] serve hits on keys[i], unless another block already serves the key."""
        for block, key in zip(blocks, keys, strict=True):
            if self._key_of[block] is None and self._cached.setdefault(key, block) == block:
                self._key_of[block] = key

    def reset_prefix_cache(self) -> bool:
        """Make every block stop serving hits. Held blocks keep their content for their holders.

        Returns whether no block is held.
        """
        self._cached.clear()
        self._key_of = [None] * self.num_blocks
        return self.num_free_blocks == self.num_blocks
