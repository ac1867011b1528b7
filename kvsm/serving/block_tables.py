"""The block tables of requests: one for each KV cache group, all from one pool.

A place of a table is a block of tokens. Where there is no block stands the null block: what lies before the
window of a sliding window group, or before the last state of a mamba group, is given back as the request
proceeds. A mamba block is the running state while the tokens of its place are computed, and at their end the
state that a hit needs; the next place begins with a copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsm.scheduler import GroupKind, KVCacheGroup, SchedulerConfig
from kvsm.scheduler.hits import HitSearch
from kvsm.serving.serving_block_pool import ServingBlockPool
from kvsm.serving.serving_request import ServingRequest
from kvsm.traces import started_blocks


def peak_blocks(group: KVCacheGroup, tokens: int, step_tokens: int) -> int:
    """The most blocks that a request of so many tokens holds of a group, if a step computes up to
    `step_tokens`."""
    blocks = started_blocks(tokens, group.block_tokens)
    if group.kind is GroupKind.FULL:
        return blocks
    # States that were completed in the last step are held while they are handed over.
    reach = group.window if group.kind is GroupKind.SLIDING_WINDOW else step_tokens
    return min(blocks, started_blocks(reach + step_tokens, group.block_tokens) + 1)


class BlockTables:
    """Fills and empties block tables. step_tokens: computed in a step, for one request, at most."""

    def __init__(self, pool: ServingBlockPool, config: SchedulerConfig, step_tokens: int) -> None:
        self._pool, self._config, self._step_tokens = pool, config, step_tokens
        self.groups = config.groups
        self.block_sizes = tuple(dict.fromkeys(group.block_tokens for group in config.groups))

    def longest_hit(self, request: ServingRequest) -> int:
        """Tokens that the device serves for all groups; at least one is left to compute (S18)."""
        if request.skip_reading_prefix_cache:
            return 0
        cached = self._pool.cached_block
        lookup = HitSearch(self._config, 1, request.keys, 0)
        return lookup.longest_hit(request.num_tokens - 1, lambda key: cached(key) is not None)

    def has_room(self, request: ServingRequest, hit: int) -> bool:
        """Whether the whole request could be placed now, behind a device hit of `hit` tokens."""
        lacking = free_hits = 0
        for group, hits in zip(self.groups, self._hits(request, hit, hit)):
            blocks = [block for block in hits if block != self._config.null_block]
            free_hits += sum(map(self._pool.is_free, blocks))
            lacking += max(0, peak_blocks(group, request.num_tokens, self._step_tokens) - len(blocks))
        return lacking <= self._pool.num_free_blocks - free_hits

    def _hits(self, request: ServingRequest, hit: int, end: int) -> list[list[int]]:
        """Device blocks of each group up to `hit`, of which a request that goes on at `end` needs the last;
        the null block for the others."""
        tables = []
        for group, keys in zip(self.groups, request.keys):
            last = hit // group.block_tokens
            first = min(last, group.first_needed_token(end) // group.block_tokens)
            found = [self._pool.cached_block(key) for key in keys[first:last]]
            table = [self._config.null_block] * first
            table += [block for block in found if block is not None]
            assert len(table) == last, "what a hit counted is there"
            tables.append(table)
        return tables

    def place(self, request: ServingRequest, hit: int, end: int, tokens: int) -> bool:
        """Give a waiting request its tables: device blocks up to `hit`, new ones for what is loaded from
        there to `end`, and new ones for `tokens` tokens behind. False, and nothing done, without room."""
        tables = self._hits(request, hit, end)
        hits = [block for table in tables for block in table if block != self._config.null_block]
        wanted: list[list[int]] = []
        for group, table in zip(self.groups, tables):
            first_needed = group.first_needed_token(end) // group.block_tokens
            table += [self._config.null_block] * (min(first_needed, end // group.block_tokens) - len(table))
            wanted.append([0] * (started_blocks(end + tokens, group.block_tokens) - len(table)))
        if sum(map(len, wanted)) > self._pool.num_free_blocks - sum(map(self._pool.is_free, hits)):
            return False
        self._pool.touch(hits)
        for table, lacking in zip(tables, wanted):
            table += self._pool.get_new_blocks(len(lacking))
        request.tables = tables
        request.num_computed_tokens = request.num_cached_tokens = hit
        return True

    def grow(self, request: ServingRequest, tokens: int) -> list[list[int]] | None:
        """Extend the tables to so many tokens. Returns the new blocks by group; None, and nothing done,
        without room."""
        lacking = [
            max(0, started_blocks(tokens, group.block_tokens) - len(table))
            for group, table in zip(self.groups, request.tables)
        ]
        if sum(lacking) > self._pool.num_free_blocks:
            return None
        new = [self._pool.get_new_blocks(count) for count in lacking]
        for table, blocks in zip(request.tables, new):
            table += blocks
        return new

    def remove_skipped_blocks(self, request: ServingRequest) -> None:
        """Give back what no token to come looks at."""
        null = self._config.null_block
        for group, table in zip(self.groups, request.tables):
            if group.kind is GroupKind.FULL:
                continue
            first = group.first_needed_token(request.num_computed_tokens) // group.block_tokens
            skipped = []
            for place in range(min(first, len(table)) - 1, -1, -1):
                if table[place] == null:
                    break
                skipped.append(table[place])
                table[place] = null
            self._pool.free_blocks(skipped)

    def free(self, request: ServingRequest) -> None:
        """Give back all; of a prefix, the end is to be taken before the beginning."""
        null = self._config.null_block
        for table in request.tables:
            self._pool.free_blocks([block for block in reversed(table) if block != null])

    def cache_blocks(self, request: ServingRequest) -> None:
        """Let the blocks that are full serve hits."""
        first, last = request.num_cached_tokens, request.num_computed_tokens
        if first < last:
            self._pool.cache_full_blocks(*self.full_blocks(request, first, last))
            request.num_cached_tokens = last

    def full_blocks(self, request: ServingRequest, first: int, last: int) -> tuple[list[int], list[bytes]]:
        """Blocks, and their keys, of all groups, that end behind token `first` and up to token `last`."""
        blocks: list[int] = []
        keys: list[bytes] = []
        for group, table, own_keys in zip(self.groups, request.tables, request.keys):
            places = slice(first // group.block_tokens, last // group.block_tokens)
            blocks += table[places]
            keys += own_keys[places]
        null = self._config.null_block
        if null in blocks:
            kept = [place for place, block in enumerate(blocks) if block != null]
            return [blocks[place] for place in kept], [keys[place] for place in kept]
        return blocks, keys

    def needed_blocks(self, request: ServingRequest) -> tuple[list[int], list[bytes]]:
        """Full blocks, and their keys, that the next token of the request looks at. None is null."""
        blocks: list[int] = []
        keys: list[bytes] = []
        end = request.num_computed_tokens
        for group, table, own_keys in zip(self.groups, request.tables, request.keys):
            places = slice(group.first_needed_token(end) // group.block_tokens, end // group.block_tokens)
            blocks += table[places]
            keys += own_keys[places]
        return blocks, keys

    def completed_states(
        self, request: ServingRequest, first: int, last: int
    ) -> Sequence[tuple[int, int, int]]:
        """(group, block, tokens) of the mamba states at the block boundaries behind `first`, up to `last`."""
        states = []
        for index, (group, table) in enumerate(zip(self.groups, request.tables)):
            size = group.block_tokens
            if group.kind is GroupKind.MAMBA:
                states += [
                    (index, table[place], (place + 1) * size) for place in range(first // size, last // size)
                ]
        return states
