"""The longest hit that all groups serve together.

Each group lowers the end of the hit to the largest end that it can serve. Another group may not serve that
end, so the groups are searched in turn until none lowers it. The result is the longest hit that all groups
serve. vLLM's coordinator does the same. What a group needs for a hit:

    full attention    every chunk behind what the device has
    sliding window    the chunks that hold the last `window - 1` tokens before the end
    mamba             the last block before the end: the state

A group with a drafter is searched like any group of its kind. vLLM drops the last block of the hit in such a
group, because the drafter's KV of a block's last token depends on the token behind the block. Keeping the
block is safe: at worst a draft is rejected, because the model checks each draft.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple, cast

import numpy as np

from kvsm.core.ledger.key_index import KeyIndex
from kvsm.core.scheduler.groups import FULL, SchedulerConfig
from kvsm.ids import SMALL, IdArray

Has = Callable[[bytes], bool]
FindPrefix = Callable[[int, int, int], IdArray | None]
"""(group, first chunk, end chunk) -> the slots of these chunks, up to the first chunk whose key is missing.
None: look up each key instead."""

PIECE = 16
"""How many keys of a prompt are built together, once its first key was found."""


class Span(NamedTuple):
    """Chunks of one group, from `first` up to but not with `last`."""

    first: int
    last: int


def hit_limit(num_tokens: int, local: int, max_load_tokens: int) -> int:
    """Return the largest end of a hit (tokens): one token is left to compute (S18).

    local: tokens that are cached on the device.
    """
    return min(num_tokens - 1, local + max_load_tokens)


class HitSearch:
    """Searches the hits of one request.

    keys: its chunk keys, by group.
    local: tokens that are cached on the device.
    lacking: after a search, the missing key that ended the hit: with it the hit would be longer, unless other
        keys are missing too. None if the hit reaches the limit, or the last token that the engine has hashed.
    """

    def __init__(
        self, config: SchedulerConfig, blocks_per_chunk: int, keys: Sequence[Sequence[bytes]], local: int
    ) -> None:
        self._groups, self._alignment = config.groups, config.alignment
        self._chunk_tokens = [group.block_tokens * blocks_per_chunk for group in config.groups]
        self._keys, self._local = keys, local
        self.lacking: bytes | None = None
        self._found: IdArray | None = None
        """After a search with one group: the slots of the hit, if the search found them."""

    def longest_hit(self, limit: int, has: Has, find_prefix: FindPrefix | None = None) -> int:
        """Return the end of the longest hit (tokens), at most `limit`; `local` if there is no hit.

        has: whether a key may be part of the hit.
        find_prefix: the same for many chunks of a full-attention group in one call.
        """
        limit = min([limit, *self._hashed(limit)])
        end, self.lacking = self._align(limit), None
        self._found = None
        asked: int | None = None
        while end != asked and end > self._local:
            asked = end
            for index in range(len(self._groups)):
                end = self._align(self._served(index, end, has, find_prefix))
            if len(self._groups) == 1:
                break
            self._found = None
        return max(end, self._local)

    def longest_hit_within(self, most: int, limit: int, has: Has) -> int:
        """Return the end of the longest hit (tokens) that needs at most `most` chunks; 0 if there is none.

        limit, has: as for `longest_hit`. The search must begin at the first token.
        """
        end = self.longest_hit(limit, has)
        while end and self.chunks(end) > most:
            shorter = range(0, end, self._alignment)
            fitting = bisect_right(shorter, most, key=self.chunks)
            end = self.longest_hit(shorter[fitting - 1], has)
        return end

    def chunks(self, end: int) -> int:
        """Return the number of chunks that a hit up to `end` loads."""
        return sum([last - first for first, last in self.needed(end)])

    def slots(self, end: int, index: KeyIndex) -> IdArray:
        """Return the slots of the hit up to `end` that was just found. The index must have all its keys."""
        if self._found is not None:
            return self._found
        slots = index.find(self.needed_keys(end))
        return cast(IdArray, np.array(slots, dtype=np.int64) if len(slots) > SMALL else tuple(slots))

    def needed(self, end: int) -> list[Span]:
        """Return the chunks of each group that a hit up to `end` loads."""
        return [self._span(index, end) for index in range(len(self._groups))]

    def _span(self, index: int, end: int) -> Span:
        """Return the chunks of this group that a hit up to `end` loads. `end` may lie within a chunk."""
        tokens = self._chunk_tokens[index]
        first, last = max(self._local, self._groups[index].first_needed_token(end)), -(-end // tokens)
        # A window of one token needs nothing.
        return Span(first // tokens if first < end else last, last)

    def needed_keys(self, end: int) -> list[bytes]:
        """Return the keys that a hit up to `end` loads, group by group."""
        needed: list[bytes] = []
        if end <= self._local:
            return needed
        for keys, span in zip(self._keys, self.needed(end)):
            needed += keys[span.first : span.last]
        return needed

    def parents(self, end: int) -> dict[int, bytes]:
        """Map the index in `needed_keys(end)` of each group's first key to the key of the preceding chunk.

        That is b"" at the start of a prompt, and for groups without full attention, which do not need it.
        """
        parents, place = dict[int, bytes](), 0
        for group, keys, span in zip(self._groups, self._keys, self.needed(end)):
            continues = group.kind is FULL and span.first > 0
            parents[place] = keys[span.first - 1] if continues else b""
            place += span.last - span.first
        return parents

    def _hashed(self, limit: int) -> list[int]:
        """Return the end of the last hashed chunk of each group that reads a token before `limit`."""
        groups = zip(self._groups, self._keys, self._chunk_tokens)
        return [
            max(len(keys) * size, group.fresh_start(limit))
            for group, keys, size in groups
            if group.first_needed_token(limit) < limit
        ]

    def _align(self, tokens: int) -> int:
        return tokens - tokens % self._alignment

    def _served(self, index: int, end: int, has: Has, find_prefix: FindPrefix | None) -> int:
        """Return the largest end up to `end` that this group serves; `local` or less if there is none."""
        group, tokens, keys = self._groups[index], self._chunk_tokens[index], self._keys[index]
        while end > self._local:
            first, last = self._span(index, end)
            if group.kind is FULL:
                self._found = find_prefix(index, first, last) if find_prefix is not None else None
                if self._found is not None:
                    missing = first + len(self._found)
                else:
                    missing = _first_missing(keys, first, last, has)
                if missing == last:
                    return end
                self.lacking = keys[missing]
                return self._align(missing * tokens)
            if first < last and last > len(keys):
                # A chunk that is read is not full. A larger end may need none, in chunked local attention.
                end = self._align(max(len(keys) * tokens, group.fresh_start(end)))
                continue
            wanted = keys[first:last]
            found = len(list(takewhile(has, reversed(wanted))))
            if found == len(wanted):
                return end
            missing = last - 1 - found
            end, self.lacking = self._align(max(missing * tokens, group.fresh_start(end))), keys[missing]
        return end


def _first_missing(keys: Sequence[bytes], first: int, last: int, has: Has) -> int:
    """Return the first of these chunks whose key is missing; `last` if none is.

    Check the first key alone: most misses miss there. Build the other keys lazily, `PIECE` at a time.
    """
    size = 1
    while first < last:
        piece = keys[first : min(first + size, last)]
        found = len(list(takewhile(has, piece)))
        first, size = first + found, PIECE
        if found < len(piece):
            break
    return first
