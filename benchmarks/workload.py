"""Requests as lists of block keys, for the control-plane benchmarks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import blake2b
from itertools import count, cycle, islice
from pathlib import Path
from typing import NamedTuple

from kvsm.serving.agent_sessions import Session, read_sessions, session_requests, session_turns
from kvsm.serving.agent_sessions import Turn as SessionTurn
from kvsm.serving.traces import TraceRequest, multi_turn, read_trace

TRACE_BLOCK_TOKENS = 512
Requests = list[list[bytes]]


def expanded(trace: Path | None, block_tokens: int, limit: int | None) -> Requests:
    """The requests of a trace, with each block of 512 tokens divided into blocks of `block_tokens`.

    Without a trace, conversations are generated. Keys have vLLM's layout: 32 bytes of hash, 4 bytes of group
    index.
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


class Turn(NamedTuple):
    """A request of an agent.

    keys: of the full blocks of its prompt.
    live_blocks: the number of blocks in the last prompts of all running agents, this one included.
    """

    agent: int
    keys: list[bytes]
    live_blocks: int


def agent_trace(path: Path, at_once: int, block_tokens: int, longest_tokens: int) -> Iterator[TraceRequest]:
    """The requests of recorded sessions, of which `at_once` run at a time.

    longest_tokens: sessions with a longer prompt and output are left out.
    """
    kept = (one for one in read_sessions(path) if one.longest_tokens <= longest_tokens)
    return session_requests(kept, at_once, block_tokens)


def agent_turns(
    path: Path, at_once: int, limit: int | None, block_tokens: int = TRACE_BLOCK_TOKENS
) -> Iterator[Turn]:
    """The requests of the first `limit` recorded sessions (None: all), of which `at_once` run at a time."""
    sessions: Iterator[Session] = islice(read_sessions(path), limit)
    for turn in session_turns(sessions, at_once, block_tokens):
        yield Turn(turn.agent, [_key(block) for block in turn.blocks], turn.live_blocks)


def agents_in_lock_step(
    path: Path, at_once: int, limit: int | None, block_tokens: int = TRACE_BLOCK_TOKENS
) -> Iterator[Turn]:
    """The requests of recorded sessions that take turns: in each round every running session sends one."""
    return _agents_in_order(path, at_once, limit, block_tokens, cycle(range(at_once)))


def agents_at_random(
    path: Path, at_once: int, limit: int | None, block_tokens: int = TRACE_BLOCK_TOKENS, seed: int = 0
) -> Iterator[Turn]:
    """The requests of recorded sessions with memoryless think times: the next request is from any of the
    running sessions, with equal chances."""
    draw = random.Random(seed)
    places = iter(lambda: draw.randrange(at_once), -1)
    return _agents_in_order(path, at_once, limit, block_tokens, places)


def _agents_in_order(
    path: Path, at_once: int, limit: int | None, block_tokens: int, order: Iterable[int]
) -> Iterator[Turn]:
    """The requests of recorded sessions, in another order than the recorded times give.

    order: which of the `at_once` running sessions sends the next request. A session that has ended is
        replaced by the next one of the file. If none is left, the workload ends: the number of running
        sessions never changes.
    """
    fresh = count()
    sessions = (
        session_turns([session], 1, block_tokens, fresh) for session in islice(read_sessions(path), limit)
    )
    begun = count()
    running: list[Iterator[SessionTurn]] = [iter(())] * at_once
    live, number = [0] * at_once, [0] * at_once
    for place in order:
        turn = next(running[place], None)
        if turn is None:
            running[place], number[place] = next(sessions, iter(())), next(begun)
            turn = next(running[place], None)
            if turn is None:
                return
        live[place] = turn.live_blocks
        agent = (number[place] << 10) + turn.agent
        yield Turn(agent, [_key(block) for block in turn.blocks], sum(live))


@cache
def _key(block: int) -> bytes:
    return blake2b(b"%d" % block, digest_size=32).digest() + bytes(4)


def single_blocks(steps: int, per_step: int, distinct: int, seed: int = 0) -> Requests:
    """Requests of one block each, drawn with a heavy-tailed distribution from `distinct` keys. Within a step
    all keys differ."""
    draw = random.Random(seed)
    keys = [blake2b(b"%d" % n, digest_size=32).digest() + bytes(4) for n in range(distinct)]
    requests: Requests = []
    for _ in range(steps):
        chosen: dict[bytes, None] = {}
        while len(chosen) < per_step:
            chosen[keys[min(int(draw.paretovariate(0.3)) - 1, distinct - 1)]] = None
        requests += [[key] for key in chosen]
    return requests
