"""What the host has, asked of any connector: by requests that are never served, and by filling the host.

`asked_blocks` asks at every block of a waiting request what the connector matches from there. vLLM's
scheduler asks as often for a request that gets no blocks; vLLM says that this has no side effects.

To fill the host, new requests are served until it must have forgotten all older ones. Then each of their
blocks is asked for. A fresh engine of the same shape does the same. A host that has lost slots has fewer of
the blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.v1.request import Request

from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS, EngineShape

FILLED_BLOCKS = 3
"""Blocks of each request that fills the host. Even the smallest host pool stores them at once."""

MOST_FILLED = 40
"""Host pools with more blocks are not filled: that takes longer than the run. A lost slot shows in any."""


class AskedBlock(NamedTuple):
    """A block of a request's prompt or answer.

    told: for people.
    is_matched: None if the connector answered "ask later".
    ends_a_match: whether some match ended with it.
    """

    hash: bytes
    told: str
    is_matched: bool | None
    ends_a_match: bool


def ask(scheduler: Any, request: Request, computed: int) -> int | None:
    """How many blocks the connector matches behind the computed ones. None: it says that it knows later."""
    tokens, _ = scheduler.connector.get_num_new_matched_tokens(request, computed * BLOCK_TOKENS)
    return None if tokens is None else int(tokens) // BLOCK_TOKENS


def asked_blocks(scheduler: Any, request: Request, of: str) -> list[AskedBlock]:
    """What the connector matches of a request that waits. of: the name of the request that it repeats."""
    blocks = (request.num_tokens - 1) // BLOCK_TOKENS
    found: list[bool | None] = [False] * blocks
    ends = set()
    for computed in range(blocks):
        matched = ask(scheduler, request, computed)
        if matched is None:
            found[computed:] = [one or None for one in found[computed:]]
        elif matched:
            found[computed : computed + matched] = [True] * min(matched, blocks - computed)
            ends.add(computed + matched - 1)
    return [
        AskedBlock(request.block_hashes[block], f"block {block} of request {of}", found[block], block in ends)
        for block in range(blocks)
    ]


def is_all_there_is(shape: EngineShape) -> bool:
    """Whether what the connector matches is in its host pool: it has no tier below, and no siblings."""
    return not {"secondary_tiers", "connectors"} & set(shape.extra)


def may_be_filled(shape: EngineShape) -> bool:
    """Whether the host is filled at the end: the size of its pool is known, and small enough.

    With several groups a hit needs blocks of each, so how many are served says less about the pool.
    """
    is_small = shape.host_blocks <= MOST_FILLED and "cpu_bytes_to_use" not in shape.extra
    return shape.fills and is_small and shape.groups == 1 and is_all_there_is(shape)


def fillers(shape: EngineShape) -> int:
    """How many requests replace all that the device and the host have."""
    return (shape.device_blocks + shape.host_blocks) // FILLED_BLOCKS + 2
