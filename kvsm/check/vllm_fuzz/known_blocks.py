"""The blocks that a connector has, concluded from its own answers, and the longest answer that they allow.

An answer that ends at a block shows that the connector has all blocks that the KV cache groups read there,
except those on the device. Together, the answers to one prompt show what the connector has. The longest
answer then follows from the definition of each group: it ends at the last block for which all blocks read
there are known. How a connector searches for its hits plays no part.

If a drafter has a KV cache, vLLM's own connectors also require the block after the hit, because the
drafter's KV of a block's last token depends on the token after the block (`use_eagle_block_drop`). They
require it in the drafter's group, or in all groups with attention if vLLM has marked none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS, STATES
from kvsm.check.worlds.longest_hit import tokens_read
from kvsm.core.scheduler import GroupKind, KVCacheGroup


class KnownBlocks:
    """The blocks of one prompt that a connector is known to have. Blocks are numbered from 0.

    windows: the sliding window of each KV cache group (tokens); 0 for full attention, `STATES` for mamba
        states.
    chunk: device blocks in a chunk of the connector: answers end with a chunk, and have at least one.
    drops: the groups in which the connector may also require the chunk after the hit.
    """

    def __init__(self, windows: Sequence[int], chunk: int = 1, drops: Collection[int] = ()) -> None:
        self._groups = [_group(window) for window in windows]
        self._known: list[set[int]] = [set() for _ in windows]
        self._chunk = chunk
        self._dropped = [chunk if group in drops else 0 for group in range(len(windows))]

    def add(self, group: int, block: int) -> None:
        """Record that the connector has a block."""
        self._known[group].add(block)

    def answered(self, computed: int, end: int) -> None:
        """Record an answer: with `computed` blocks on the device, the connector serves all blocks up to
        `end`."""
        if end > computed:
            for known, group in zip(self._known, self._groups):
                known |= _blocks_read(group, computed, end)

    def served(self, end: int) -> None:
        """Record that the connector has all that a hit up to `end` needs."""
        for known, group, dropped in zip(self._known, self._groups, self._dropped):
            known |= _wanted(group, 0, end, dropped)

    def longest(self, computed: int, most: int) -> int:
        """Return the end of the longest answer that must be given; `computed` for none.

        most: the last possible end.
        """
        first = computed + self._chunk
        for end in range(most - most % self._chunk - max(self._dropped), first - 1, -self._chunk):
            groups = zip(self._known, self._groups, self._dropped)
            if all(_wanted(group, computed, end, dropped) <= known for known, group, dropped in groups):
                return end
        return computed


def _group(window: int) -> KVCacheGroup:
    if window == STATES:
        return KVCacheGroup(BLOCK_TOKENS, GroupKind.MAMBA)
    return KVCacheGroup(BLOCK_TOKENS, GroupKind.SLIDING_WINDOW if window else GroupKind.FULL, window)


def _wanted(group: KVCacheGroup, computed: int, end: int, dropped: int) -> set[int]:
    """The blocks of a group that a hit up to `end` may require, or one that is `dropped` blocks longer."""
    wanted = _blocks_read(group, computed, end)
    if dropped and group.kind is not GroupKind.MAMBA:
        wanted |= _blocks_read(group, computed, end + dropped)
    return wanted


def _blocks_read(group: KVCacheGroup, computed: int, end: int) -> set[int]:
    """The blocks after the first `computed` ones that the group's layers read to compute after block
    `end`."""
    return {token // BLOCK_TOKENS for token in tokens_read(group, end * BLOCK_TOKENS)} - set(range(computed))
