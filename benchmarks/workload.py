"""Requests as lists of block keys, for the control-plane benchmarks."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from kvsm.serving.traces import multi_turn, read_trace

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


LONGEST_PAUSE_S = 300
"""The limit of a session's pauses: a session that pauses for hours is not one of those that run at once."""


class Turn(NamedTuple):
    """A request of an agent.

    live_blocks: the number of blocks in the last prompts of all running agents, this one included.
    """

    agent: int
    keys: list[bytes]
    live_blocks: int


def agent_turns(path: Path, at_once: int, limit: int | None) -> Iterator[Turn]:
    """The requests of recorded sessions, of which `at_once` run at a time.

    path: a gzip file with one session per line. A request is a row `[t, _, _, _, _, keep, runs]`. t is its
        time (s). Its hash ids are the first `keep` ids of the previous row, followed by the runs `[first,
        count, ...]`.
    limit: the most sessions; None for all.
    """
    with gzip.open(path) as lines:
        sessions = enumerate(map(json.loads, lines))
        waiting: list[tuple[float, int, int, Iterator[tuple[float, int, list[bytes]]]]] = []
        live: dict[int, dict[int, int]] = {}
        now, entries = 0.0, 0

        def begin() -> None:
            nonlocal entries
            number, session = next(sessions, (0, None))
            if session is not None and (limit is None or number < limit):
                entries += 1
                heappush(waiting, (now, entries, number, _session_turns(number, session)))

        for _ in range(at_once):
            begin()
        while waiting:
            now, _, number, turns = heappop(waiting)
            turn = next(turns, None)
            if turn is None:
                live.pop(number, None)
                begin()
                continue
            pause, agent, keys = turn
            live.setdefault(number, {})[agent] = len(keys)
            yield Turn(agent, keys, sum(chain.from_iterable(sizes.values() for sizes in live.values())))
            entries += 1
            heappush(waiting, (now + pause, entries, number, turns))


def _session_turns(number: int, session: dict[str, Any]) -> Iterator[tuple[float, int, list[bytes]]]:
    """(seconds until the next request, agent, keys) of a session's and its subagents' requests, by time."""
    pieces = TRACE_BLOCK_TOKENS // session["block_size"]
    rows: list[tuple[float, int, list[bytes]]] = []
    subagents = session.get("subagents", ())
    for agent, (start, requests) in enumerate(
        [(0.0, session["requests"]), *((subagent["t"], subagent["requests"]) for subagent in subagents)]
    ):
        ids: list[int] = []
        keys: list[bytes] = []
        for second, _, _, _, _, keep, runs in requests:
            keys = keys[: min(keep, len(ids)) // pieces]
            ids = [*ids[:keep], *chain.from_iterable(range(a, a + n) for a, n in zip(runs[::2], runs[1::2]))]
            for place in range(len(keys), len(ids) // pieces):
                block = repr((number, ids[place * pieces : (place + 1) * pieces])).encode()
                before = keys[-1] if keys else b""
                keys.append(blake2b(block, key=before, digest_size=32).digest() + bytes(4))
            rows.append((start + second, (number << 10) + agent, keys))
    rows.sort(key=lambda row: row[0])
    for (second, agent, keys), after in zip(rows, [*rows[1:], rows[-1]]):
        yield min(max(after[0] - second, 0.0), LONGEST_PAUSE_S), agent, keys


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
