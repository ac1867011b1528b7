"""Find out what any connector has on the host: by requests that are never served, and by filling the host.

`asked_blocks` asks the connector, at every block of a waiting request, what it matches from there. vLLM's
scheduler may ask just as often for a request that gets no blocks, and vLLM says that asking has no side
effects.

To fill the host, new requests are served until it must have evicted all older blocks. Then the connector is
asked for each block of the new requests. A fresh engine of the same shape does the same. If it has more of
the blocks, the host has lost slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.v1.request import Request

from kvsm.check.vllm_fuzz.configs import hasher
from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS, MOST_TOKENS, EngineShape

FILLED_BLOCKS = 3
"""Blocks of each request that fills the host. Even the smallest host pool can hold them all."""

MOST_FILLED = 40
"""The largest host pool that is filled. Filling a larger one would take longer than the run."""


class AskedBlock(NamedTuple):
    """A block of a request's prompt or answer.

    hash: vLLM's block hash.
    text: a description for people.
    is_matched: whether some match contained it; None if the connector answered "ask later".
    ends_a_match: whether some match ended with it.
    """

    hash: bytes
    text: str
    is_matched: bool | None
    ends_a_match: bool


def new_request(name: str, prompt: list[int], salt: str | None = None, adapter: Any = None) -> Request:
    """Make a request for one token."""
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0)
    return Request(name, prompt, sampling, None, lora_request=adapter, block_hasher=hasher(), cache_salt=salt)


def twin_of(name: str, like: Request) -> Request:
    """Make a request whose prompt is the prompt and the answer of another one."""
    return new_request(name, list(like.all_token_ids), like.cache_salt, like.lora_request)


def repeated(name: str, like: Request) -> Request:
    """Make a twin with one more token, because a match always leaves one to compute."""
    prompt = [*like.all_token_ids[: MOST_TOKENS - 1], 0]
    return new_request(name, prompt, like.cache_salt, like.lora_request)


def ask(scheduler: Any, request: Request, computed: int) -> int | None:
    """The number of blocks matched after `computed` blocks; None if the connector answers "ask later"."""
    tokens, _ = scheduler.connector.get_num_new_matched_tokens(request, computed * BLOCK_TOKENS)
    return None if tokens is None else int(tokens) // BLOCK_TOKENS


def asked_blocks(scheduler: Any, request: Request, of: str) -> list[AskedBlock]:
    """The blocks of a waiting request, with what the connector matches. of: the request that it repeats."""
    blocks = (request.num_tokens - 1) // BLOCK_TOKENS
    found: list[bool | None] = [False] * blocks
    ends = set()
    for computed in range(blocks):
        matched = ask(scheduler, request, computed)
        if matched is None:
            found[computed:] = [is_matched or None for is_matched in found[computed:]]
        elif matched:
            found[computed : computed + matched] = [True] * min(matched, blocks - computed)
            ends.add(computed + matched - 1)
    return [
        AskedBlock(request.block_hashes[block], f"block {block} of request {of}", found[block], block in ends)
        for block in range(blocks)
    ]


def is_all_there_is(shape: EngineShape) -> bool:
    """Whether all matches come from the connector's host pool: no tier below, and no other connectors."""
    return not {"secondary_tiers", "connectors"} & set(shape.extra)


def may_be_filled(shape: EngineShape) -> bool:
    """Whether the host can be filled at the end: the size of its pool is known, and small enough.

    With several groups a hit depends on blocks of each, so the number of matched blocks says less about the
    pool.
    """
    is_small = shape.host_blocks <= MOST_FILLED and "cpu_bytes_to_use" not in shape.extra
    return shape.fills and is_small and shape.groups == 1 and is_all_there_is(shape)


def fillers(shape: EngineShape) -> int:
    """The number of requests that replace all blocks of the device and the host."""
    return (shape.device_blocks + shape.host_blocks) // FILLED_BLOCKS + 2
