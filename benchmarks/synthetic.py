"""Generate workloads for eviction policies: loops, scans, a flood of unique prompts, a moving working set.

Each defeats some of the policies. A prompt is a list of block keys, and a key names the whole
prefix that ends with its block. Equal seeds give equal requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import count, cycle, islice
from random import Random

from workload import TRACE_BLOCK_TOKENS, Requests, expanded

REQUESTS = 8_000
PREFIX_BLOCKS, QUESTION_BLOCKS, SCAN_BLOCKS = 10, 2, 20


def prompt(name: str, blocks: int, prefix: Sequence[bytes] = ()) -> list[bytes]:
    """Make a prompt: `prefix`, then this many blocks that no prompt of another name has."""
    own = [blake2b(f"{name}/{place}".encode(), digest_size=32).digest() + bytes(4) for place in range(blocks)]
    return [*prefix, *own]


def loop(requests: int, loop_blocks: int) -> Requests:
    """Read the same prompts round and round, `loop_blocks` blocks a round.

    If the pool is smaller than the loop, LRU always evicts a block before its next use.
    """
    prompts = [prompt(f"loop {n}", PREFIX_BLOCKS) for n in range(loop_blocks // PREFIX_BLOCKS)]
    return list(islice(cycle(prompts), requests))


def scans_beside_prefixes(requests: int, prefixes: int, seed: int = 0) -> Requests:
    """Half of the requests ask a new question after one of the prefixes (Zipf's law, exponent 1). The others
    are scans: long prompts that no other request shares a block with."""
    random, system_prompts = Random(seed), _Prefixes("system", prefixes)
    return [
        system_prompts.question(random, number)
        if random.random() < 0.5
        else prompt(f"scan {number}", SCAN_BLOCKS)
        for number in range(requests)
    ]


def flood_beside_conversations(requests: int, seed: int = 0) -> Requests:
    """Half of the requests are one tenant's conversations (`multi_turn`). The others are another tenant's
    unique prompts, which are as long on average."""
    random = Random(seed)
    conversations = expanded(None, TRACE_BLOCK_TOKENS, max(1, requests // 2))
    blocks = sum(map(len, conversations)) // len(conversations)
    turns = iter(conversations)
    floods = (prompt(f"flood {number}", blocks) for number in count())
    left = [len(conversations), requests - len(conversations)]
    merged: Requests = []
    for _ in range(requests):
        [which] = random.choices((0, 1), left)
        left[which] -= 1
        merged.append(next(floods if which else turns))
    return merged


def moving_set(requests: int, prefixes: int, moves_every: int, seed: int = 0) -> Requests:
    """Ask new questions after prefixes (Zipf's law, exponent 1). After each `moves_every` requests, all
    prefixes are replaced."""
    random = Random(seed)
    sets = [_Prefixes(f"set {n}", prefixes) for n in range(-(-requests // moves_every))]
    return [sets[number // moves_every].question(random, number) for number in range(requests)]


class _Prefixes:
    """Prefixes that many prompts share."""

    def __init__(self, name: str, number: int) -> None:
        self._prefixes = [prompt(f"{name} {rank}", PREFIX_BLOCKS) for rank in range(number)]
        self._weights = [1 / rank for rank in range(1, number + 1)]

    def question(self, random: Random, number: int) -> list[bytes]:
        """Return a prompt of one of the prefixes and a question of its own."""
        [prefix] = random.choices(self._prefixes, self._weights)
        return prompt(f"question {number}", QUESTION_BLOCKS, prefix)
