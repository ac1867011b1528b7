"""Requests as lists of block keys, for the control-plane benchmarks."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

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


LONGEST_PAUSE_S = 300
"""The limit of a session's pauses: a session that pauses for hours is not one of those that run at once."""


class Turn(NamedTuple):
    """A request of an agent.

    keys: of the full blocks of its prompt.
    live_blocks: the number of blocks in the last prompts of all running agents, this one included.
    second: the time of its arrival. input_tokens, output_tokens: its lengths.
    """

    agent: int
    keys: list[bytes]
    live_blocks: int
    second: float
    input_tokens: int
    output_tokens: int


def agent_trace(path: Path, at_once: int, block_tokens: int, longest_tokens: int) -> Iterator[TraceRequest]:
    """The requests of `agent_turns` as a trace, which the serving engine can run."""
    ids: dict[bytes | int, int] = {}
    for number, turn in enumerate(agent_turns(path, at_once, None, block_tokens, longest_tokens)):
        blocks: list[bytes | int] = [*turn.keys]
        if turn.input_tokens % block_tokens:
            blocks.append(number)  # A partial block belongs to this request alone.
        yield TraceRequest(
            1000 * turn.second,
            turn.input_tokens,
            max(1, turn.output_tokens),
            tuple([ids.setdefault(block, len(ids)) for block in blocks]),
        )


def agent_turns(
    path: Path,
    at_once: int,
    limit: int | None,
    block_tokens: int = TRACE_BLOCK_TOKENS,
    longest_tokens: int | None = None,
) -> Iterator[Turn]:
    """The requests of recorded sessions, of which `at_once` run at a time.

    path: a gzip file with one session per line. A request is a row `[t, _, _, _, _, keep, runs]`. t is its
        time (s). Its hash ids are the first `keep` ids of the previous row, followed by the runs `[first,
        count, ...]`.
    limit: the most sessions; None for all.
    longest_tokens: sessions with a longer prompt and output are left out; None: all are served.
    """
    with gzip.open(path) as lines:
        every = map(json.loads, lines)
        kept = (one for one in every if longest_tokens is None or _longest_tokens(one) <= longest_tokens)
        sessions = enumerate(kept)
        waiting: list[tuple[float, int, int, Iterator[_Row]]] = []
        live: dict[int, dict[int, int]] = {}
        now, entries = 0.0, 0

        def begin() -> None:
            nonlocal entries
            number, session = next(sessions, (0, None))
            if session is not None and (limit is None or number < limit):
                entries += 1
                heappush(waiting, (now, entries, number, _session_turns(number, session, block_tokens)))

        for _ in range(at_once):
            begin()
        while waiting:
            now, _, number, turns = heappop(waiting)
            turn = next(turns, None)
            if turn is None:
                live.pop(number, None)
                begin()
                continue
            live.setdefault(number, {})[turn.agent] = len(turn.keys)
            blocks = sum(chain.from_iterable(sizes.values() for sizes in live.values()))
            yield Turn(turn.agent, turn.keys, blocks, now, turn.input_tokens, turn.output_tokens)
            entries += 1
            heappush(waiting, (now + turn.pause, entries, number, turns))


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
        sessions never changes. A `Turn.second` is the request's number.
    """
    with gzip.open(path) as lines:
        sessions = (
            _session_turns(number, json.loads(line), block_tokens)
            for number, line in enumerate(islice(lines, limit))
        )
        running: list[Iterator[_Row]] = [iter(())] * at_once
        live: list[dict[int, int]] = [{} for _ in running]
        for number, place in enumerate(order):
            row = next(running[place], None)
            if row is None:
                running[place], live[place] = next(sessions, iter(())), {}
                row = next(running[place], None)
                if row is None:
                    return
            live[place][row.agent] = len(row.keys)
            blocks = sum(chain.from_iterable(sizes.values() for sizes in live))
            yield Turn(row.agent, row.keys, blocks, float(number), row.input_tokens, row.output_tokens)


def _agents(session: dict[str, Any]) -> list[tuple[float, list[Any]]]:
    """(second at which it begins, rows) of the session's agent and of each subagent."""
    subagents = [(subagent["t"], subagent["requests"]) for subagent in session.get("subagents", ())]
    return [(0.0, session["requests"]), *subagents]


def _longest_tokens(session: dict[str, Any]) -> int:
    """Return the tokens of the longest request of this session, with its output."""
    return max(row[3] + row[4] for _, rows in _agents(session) for row in rows)


class _Row(NamedTuple):
    """A request of a session. pause: seconds until the next one."""

    pause: float
    agent: int
    keys: list[bytes]
    input_tokens: int
    output_tokens: int


def _session_turns(number: int, session: dict[str, Any], block_tokens: int) -> Iterator[_Row]:
    """The requests of a session and its subagents, by time."""
    pieces = block_tokens // session["block_size"]
    rows: list[tuple[float, int, list[bytes], int, int]] = []
    for agent, (start, requests) in enumerate(_agents(session)):
        ids: list[int] = []
        keys: list[bytes] = []
        for second, _, _, input_tokens, output_tokens, keep, runs in requests:
            keys = keys[: min(keep, len(ids)) // pieces]
            ids = [*ids[:keep], *chain.from_iterable(range(a, a + n) for a, n in zip(runs[::2], runs[1::2]))]
            for place in range(len(keys), len(ids) // pieces):
                block = repr((number, ids[place * pieces : (place + 1) * pieces])).encode()
                before = keys[-1] if keys else b""
                keys.append(blake2b(block, key=before, digest_size=32).digest() + bytes(4))
            rows.append((start + second, (number << 10) + agent, keys, input_tokens, output_tokens))
    rows.sort(key=lambda row: row[0])
    for (second, *row), after in zip(rows, [*rows[1:], rows[-1]]):
        yield _Row(min(max(after[0] - second, 0.0), LONGEST_PAUSE_S), *row)


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
