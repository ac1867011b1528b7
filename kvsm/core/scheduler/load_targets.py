"""Find the device blocks that a load fills."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from kvsm.core.scheduler.groups import SchedulerConfig
from kvsm.core.scheduler.hits import Span
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.errors import WrongArgument


class LoadTargets(NamedTuple):
    """The device blocks that a hit fills.

    blocks: device blocks, group by group.
    parts: for each block, the position of its part in the match, counted in device blocks; empty if the load
        fills whole chunks.
    chunks: number of slots of the match that are read.
    """

    blocks: list[int]
    parts: Sequence[int]
    chunks: int


def load_targets(
    config: SchedulerConfig, blocks_per_chunk: int, tracked: TrackedRequest, spans: Sequence[Span], end: int
) -> LoadTargets:
    """Return what a load up to token `end` fills. spans: the chunks of each group that it reads.

    Raises `WrongArgument` if the request has too few blocks.
    """
    targets, places, chunks = list[int](), list[Sequence[int]](), 0
    for number, (group, table, span) in enumerate(zip(config.groups, tracked.tables, spans)):
        first = max(tracked.local, group.first_needed_token(end)) // group.block_tokens
        last = end // group.block_tokens
        if last > len(table):
            problem = f"has {len(table)} blocks, and a hit of {end} tokens ends in block {last - 1}"
            raise WrongArgument("update_state_after_alloc", f"block_ids[{number}]", problem)
        before = (chunks - span.first) * blocks_per_chunk
        blocks: Sequence[int] = table[first:last]
        here: Sequence[int] = range(before + first, before + last)
        if config.null_block in blocks:
            here = [place for place, block in zip(here, blocks) if block != config.null_block]
            blocks = [block for block in blocks if block != config.null_block]
        targets += blocks
        places.append(here)
        chunks += span.last - span.first
    are_whole = len(targets) == chunks * blocks_per_chunk
    return LoadTargets(targets, () if are_whole else list(chain.from_iterable(places)), chunks)
