"""The block tables of requests: one for each KV cache group, all from one pool.

Each entry of a table is for one block of tokens. An entry without a block holds the null block: a request
frees the blocks before its window (sliding window) or before its last state (mamba). A mamba block holds the
running state while the tokens of its entry are computed. After the last of these tokens it holds the state
that a hit needs, and the next entry begins with a copy of that state.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvsm.core.scheduler import GroupKind, KVCacheGroup, SchedulerConfig
from kvsm.core.scheduler.groups import WINDOWED
from kvsm.core.scheduler.hits import HitSearch
from kvsm.serving.serving_block_pool import ServingBlockPool
from kvsm.serving.serving_request import ServingRequest
from kvsm.serving.traces import started_blocks


def peak_blocks(group: KVCacheGroup, tokens: int, step_tokens: int) -> int:
    """Return the most blocks of a group that a request of `tokens` tokens holds at once.

    step_tokens: the most tokens that a step computes.
    """
    blocks = started_blocks(tokens, group.block_tokens)
    if group.kind is GroupKind.FULL:
        return blocks
    # The states of the last step stay held until the connector gets them in this step.
    reach = group.window if group.kind in WINDOWED else step_tokens
    return min(blocks, started_blocks(reach + step_tokens, group.block_tokens) + 1)


class BlockTables:
    """Fills and empties the block tables of requests.

    step_tokens: the most tokens that a step computes for one request.
    """

    def __init__(self, pool: ServingBlockPool, config: SchedulerConfig, step_tokens: int) -> None:
        self._pool, self._config, self._step_tokens = pool, config, step_tokens
        self.groups = config.groups
        self.block_sizes = tuple(dict.fromkeys(group.block_tokens for group in config.groups))

    def longest_hit(self, request: ServingRequest) -> int:
        """Return how many tokens the device serves for all groups. At least one is left to compute (S18)."""
        if request.skip_reading_prefix_cache:
            return 0
        cached = self._pool.cached_block
        lookup = HitSearch(self._config, 1, request.keys, 0)
        return lookup.longest_hit(request.num_tokens - 1, lambda key: cached(key) is not None)

    def has_room(self, request: ServingRequest, hit: int) -> bool:
        """Whether the pool has blocks for the whole request, of which the device serves `hit` tokens."""
        lacking = free_hits = 0
        for group, hits in zip(self.groups, self._hits(request, hit, hit)):
            blocks = [block for block in hits if block != self._config.null_block]
            free_hits += sum(map(self._pool.is_free, blocks))
            lacking += max(0, peak_blocks(group, request.num_tokens, self._step_tokens) - len(blocks))
        return lacking <= self._pool.num_free_blocks - free_hits

    def _hits(self, request: ServingRequest, hit: int, end: int) -> list[list[int]]:
        """Return each group's device blocks up to token `hit`, null where the token at `end` needs none."""
        tables = []
        for group, keys in zip(self.groups, request.keys):
            last = hit // group.block_tokens
            first = min(last, group.first_needed_token(end) // group.block_tokens)
            found = [self._pool.cached_block(key) for key in keys[first:last]]
            table = [self._config.null_block] * first
            table += [block for block in found if block is not None]
            assert len(table) == last, "a block that the hit counted is gone"
            tables.append(table)
        return tables

    def place(self, request: ServingRequest, hit: int, end: int, tokens: int) -> bool:
        """Fill the tables of a waiting request. Returns False, without any change, if there is no room.

        hit: the number of tokens that the device has; their blocks are shared.
        end: the number of tokens that the request has after its load; loaded tokens get new blocks.
        tokens: the number of tokens behind `end` that also get new blocks.
        """
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
        """Extend the tables to `tokens` tokens. Returns the new blocks by group.

        Returns None, without any change, if there is no room.
        """
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
        """Free the blocks that no later token needs."""
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
        """Free all blocks, the last one first, so that the end of a prefix is reused before its beginning."""
        null = self._config.null_block
        for table in request.tables:
            self._pool.free_blocks([block for block in reversed(table) if block != null])

    def cache_blocks(self, request: ServingRequest) -> None:
        """Add the blocks that have become full to the prefix cache."""
        first, last = request.num_cached_tokens, request.num_computed_tokens
        if first < last:
            self._pool.cache_full_blocks(*self.full_blocks(request, first, last))
            request.num_cached_tokens = last

    def full_blocks(self, request: ServingRequest, first: int, last: int) -> tuple[list[int], list[bytes]]:
        """Return the blocks of all groups that end after token `first` and up to token `last`, and their
        keys."""
        return self._blocks_and_keys(request, [first] * len(self.groups), last)

    def needed_blocks(self, request: ServingRequest) -> tuple[list[int], list[bytes]]:
        """Return the full blocks that the next token of the request needs, and their keys."""
        end = request.num_computed_tokens
        return self._blocks_and_keys(request, [group.first_needed_token(end) for group in self.groups], end)

    def _blocks_and_keys(
        self, request: ServingRequest, firsts: Sequence[int], last: int
    ) -> tuple[list[int], list[bytes]]:
        """Return the full blocks from token `firsts[group]` of each group up to token `last`, and their keys.

        Null blocks are left out.
        """
        blocks: list[int] = []
        keys: list[bytes] = []
        for group, first, table, own_keys in zip(self.groups, firsts, request.tables, request.keys):
            places = slice(first // group.block_tokens, last // group.block_tokens)
            blocks += table[places]
            keys += own_keys[places]
        null = self._config.null_block
        if null in blocks:
            kept = [place for place, block in enumerate(blocks) if block != null]
            return [blocks[place] for place in kept], [keys[place] for place in kept]
        return blocks, keys

    def completed_states(
        self, request: ServingRequest, first: int, last: int
    ) -> Sequence[tuple[int, int, int]]:
        """Return the mamba states at the block boundaries after token `first` and up to `last`.

        Each is (group, block, tokens that the state covers).
        """
        states = []
        for index, (group, table) in enumerate(zip(self.groups, request.tables)):
            size = group.block_tokens
            if group.kind is GroupKind.MAMBA:
                states += [
                    (index, table[place], (place + 1) * size) for place in range(first // size, last // size)
                ]
        return states
