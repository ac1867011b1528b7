"""The device blocks of the engine: who holds them, and which keys they cache.

Names and behaviour are those of vLLM's `BlockPool`; the blocks of all KV cache groups come from one pool, and
keys end with the group. A block has a reference count: one for each request whose table names it, and one for
each copy in flight that touches it. A block that nobody holds stands
in the free queue and keeps its key until it is taken, so that a free block still serves prefix hits; the
one that was freed first is taken first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.states import LeaseState
from kvsm.states.words import STATE_MASK, StateWords


class ServingBlockPool:
    """`leases.size` device blocks. leases: the offload ledger's, asked before a block is handed out."""

    def __init__(self, leases: StateWords) -> None:
        self.num_blocks = leases.size
        self._leases = leases
        self._references = [0] * leases.size
        self._key_of: list[bytes | None] = [None] * leases.size
        self._cached: dict[bytes, int] = {}
        # An OrderedDict takes from its head and out of its middle in constant time; a dict does not.
        self._free = OrderedDict.fromkeys(range(leases.size))

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def held_blocks(self) -> list[int]:
        """Blocks that somebody holds, but for those that a lost copy may still write: they are gone."""
        words, retired = self._leases.words, int(LeaseState.RETIRED)
        return [
            block
            for block, references in enumerate(self._references)
            if references and words[block] & STATE_MASK != retired
        ]

    def key_of(self, block: int) -> bytes | None:
        """What the block caches, if anything."""
        return self._key_of[block]

    def cached_block(self, key: bytes) -> int | None:
        """The block that holds the content of `key`, if one does. Nothing is held yet: `touch` it."""
        return self._cached.get(key)

    def free_queue(self) -> Iterator[int]:
        """The free blocks, the next to be taken first."""
        return iter(self._free)

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks, the longest free first; what they cached is gone.

        The caller has looked at `num_free_blocks`. Raises `PropertyBroken` (S3) if a copy in flight, or a
        lost one, still holds a lease on one of them: its bytes are not free, whatever the count says.
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
        """One more holder for each block; a free one leaves the free queue and keeps its content."""
        references = self._references
        for block in blocks:
            if references[block] == 0:
                del self._free[block]
            references[block] += 1

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """One holder less for each. Give a request's blocks from its last to its first: of a prefix, the
        end is to be taken before the beginning, without which it is worth nothing."""
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
        """From now on blocks[i] serves hits on keys[i]. A key that another block serves stays with it."""
        for block, key in zip(blocks, keys, strict=True):
            if self._key_of[block] is None and self._cached.setdefault(key, block) == block:
                self._key_of[block] = key

    def reset_prefix_cache(self) -> bool:
        """No block serves hits any more. True if nothing is held: then no content of before is left to be
        used; what is held keeps its content for its holders."""
        self._cached.clear()
        self._key_of = [None] * self.num_blocks
        return self.num_free_blocks == self.num_blocks
