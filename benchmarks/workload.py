"""Requests as lists of block keys, for the control-plane benchmarks."""

from __future__ import annotations

import random
from hashlib import blake2b
from pathlib import Path

from kvsm.traces import multi_turn, read_trace

TRACE_BLOCK_TOKENS = 512
Requests = list[list[bytes]]


def expanded(trace: Path | None, block_tokens: int, limit: int | None) -> Requests:
    """Each trace block of 512 tokens becomes 512 / block_tokens blocks with keys of their own.

    Keys have vLLM's layout: 32 bytes of hash, 4 bytes of group index.
    """
    pieces = TRACE_BLOCK_TOKENS // block_tokens
    source = read_trace(trace) if trace is not None else multi_turn(seed=0, requests=limit or 12_000)
    known: dict[int, list[bytes]] = {}
    requests: Requests = []
    for request in source:
        if limit is not None and len(requests) >= limit:
            break
        keys: list[bytes] = []
        for block in request.hash_ids:
            if block not in known:
                known[block] = [
                    blake2b(b"%d.%d" % (block, piece), digest_size=32).digest() + bytes(4)
                    for piece in range(pieces)
                ]
            keys += known[block]
        requests.append(keys)
    return requests


def single_blocks(steps: int, per_step: int, distinct: int, seed: int = 0) -> Requests:
    """Requests of one block each, drawn with a heavy tail from `distinct` keys. The keys of a step differ."""
    draw = random.Random(seed)
    keys = [blake2b(b"%d" % n, digest_size=32).digest() + bytes(4) for n in range(distinct)]
    requests: Requests = []
    for _ in range(steps):
        chosen: dict[bytes, None] = {}
        while len(chosen) < per_step:
            chosen[keys[min(int(draw.paretovariate(0.3)) - 1, distinct - 1)]] = None
        requests += [[key] for key in chosen]
    return requests
