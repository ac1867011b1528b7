"""Read recorded agent sessions, and serve some of them at a time.

A session is a JSON object with `block_size` and `requests`. Each hash id of a request stands for the content
of one full block of `block_size` prompt tokens, without its prefix. A request has one of two forms:

- An object, as in the traces of callanjfox/kv-cache-tester: `t` (seconds since the start), `type` (`s` or
  `n`), `in` and `out` (tokens) and all `hash_ids`. An entry of type `subagent` has `requests` of its own,
  whose times count from its own `t`.
- A row `[t, server_seconds, client_seconds, in, out, keep, runs]`, which is shorter. Its ids are the first
  `keep` ids of the previous row, followed by the runs `[first, count, first, count, ...]`. The session lists
  `subagents`, each with `t` and `requests` of this form.

A file holds one session, or one per line. Of a directory, the files are read whose names end with .json,
.jsonl, .json.gz or .jsonl.gz. Each agent has its own context; all agents of a session share its hash ids.
Unless `hash_id_scope` is `global`, equal ids of different sessions are different blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec

from kvsm.errors import ConfigError, TraceError
from kvsm.serving.trace_files import NOT_DECODED, Text, not_json, texts_of
from kvsm.serving.traces import TraceRequest, parse_requests

AT_ONCE = 8
"""The default number of sessions that run at a time."""

LONGEST_PAUSE_S = 300
"""Longer pauses of a session are cut to this: a session that pauses for hours is not really running."""

MOST_TOKENS = 1 << 24
"""The longest prompt. A run of ids is short in the file however long it is, and a list of them is not."""

_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
_Length = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Row(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request in the short form."""

    second: _Seconds
    server_seconds: float | None
    client_seconds: float | None
    input_tokens: _Tokens
    output_tokens: _Count
    keep: _Count
    runs: tuple[_Count, ...]

    def ids_after(self, before: list[int]) -> tuple[int, list[int]]:
        """Return how many of the previous request's ids this one keeps, and the ids that follow.

        Raises `ValueError` for impossible ids.
        """
        firsts, counts = self.runs[::2], self.runs[1::2]
        if len(firsts) != len(counts):
            raise ValueError("has a run without its count")
        if self.keep > len(before):
            raise ValueError(f"keeps {self.keep} ids; the request before it has {len(before)}")
        if sum(counts) > self.input_tokens:
            raise ValueError(f"has {self.keep + sum(counts)} hash ids for {self.input_tokens} tokens")
        return self.keep, list(
            chain.from_iterable(range(first, first + number) for first, number in zip(firsts, counts))
        )


class _Object(
    msgspec.Struct,
    frozen=True,
    tag_field="type",
    rename={"second": "t", "input_tokens": "in", "output_tokens": "out"},
):
    """A request in the form of kv-cache-tester."""

    second: _Seconds
    input_tokens: _Tokens
    output_tokens: _Count
    hash_ids: tuple[_Count, ...]

    def ids_after(self, before: list[int]) -> tuple[int, list[int]]:
        """Return how many leading ids this request shares with the previous one, and the ids that follow."""
        kept = _common(before, self.hash_ids)
        return kept, list(self.hash_ids[kept:])


class _Streamed(_Object, frozen=True, tag="s"):
    """A request whose response was streamed."""


class _Whole(_Object, frozen=True, tag="n"):
    """A request whose response was not streamed."""


class _Subagent(msgspec.Struct, frozen=True, tag_field="type", tag="subagent", rename={"second": "t"}):
    """A subagent, as an entry of its parent's requests."""

    second: _Seconds
    requests: list[_Streamed | _Whole | _Subagent]


class _SubagentRows(msgspec.Struct, frozen=True, rename={"second": "t"}):
    second: _Seconds
    requests: list[_Row]


class _Session(msgspec.Struct, frozen=True):
    block_size: _Length
    hash_id_scope: Literal["local", "global"] = "local"


class _RowSession(_Session, frozen=True, kw_only=True):
    requests: list[_Row]
    subagents: list[_SubagentRows] = []


class _ObjectSession(_Session, frozen=True, kw_only=True):
    requests: list[_Streamed | _Whole | _Subagent]


class _Shape(msgspec.Struct, frozen=True):
    """The fields that tell a session from a Mooncake request, and its form. A missing field is empty."""

    timestamp: msgspec.Raw = msgspec.Raw()
    block_size: msgspec.Raw = msgspec.Raw()
    requests: msgspec.Raw = msgspec.Raw()


_Request: TypeAlias = "_Row | _Object"


class _Agent(NamedTuple):
    """The requests of an agent, each with its JSON path in the session. start: the agent's first second."""

    start: float
    requests: list[tuple[str, _Request]]


class Session(NamedTuple):
    """A recorded session. path, line: its position, as in `TraceError`."""

    path: str
    line: int
    block_tokens: int
    has_global_ids: bool
    agents: list[_Agent]

    @property
    def longest_tokens(self) -> int:
        """The tokens of its longest request, prompt and output."""
        lengths = [one.input_tokens + one.output_tokens for agent in self.agents for _, one in agent.requests]
        return max(lengths)

    def error(self, reason: str) -> TraceError:
        """Return an error that names this session."""
        return TraceError(self.path, self.line, reason)


class Turn(NamedTuple):
    """A request of an agent.

    agent: a number that is unique among the agents of all sessions.
    blocks: the ids of the full blocks of the prompt. An id stands for the prefix up to the block's end.
    live_blocks: the number of full blocks in the last prompts of all running agents, including this one.
    second: the arrival time. input_tokens, output_tokens: the lengths of prompt and output.
    """

    agent: int
    blocks: tuple[int, ...]
    live_blocks: int
    second: float
    input_tokens: int
    output_tokens: int


# Reading.

_shape = msgspec.json.Decoder(_Shape).decode
_of_rows = msgspec.json.Decoder(_RowSession).decode
_of_objects = msgspec.json.Decoder(_ObjectSession).decode


def read_recorded(
    path: str | os.PathLike[str], block_tokens: int, at_once: int | None = None
) -> Iterator[TraceRequest]:
    """Stream the requests of a Mooncake trace or of agent sessions; the content of the file decides which.

    at_once: how many sessions run at a time. Raises `ConfigError` if it is given for a Mooncake trace, and
    `TraceError` for what cannot be read.
    """
    name = os.fspath(path)
    if os.path.isdir(path):
        return session_requests(read_sessions(path), at_once or AT_ONCE, block_tokens)
    texts = texts_of(path)
    first = next(texts, None)
    texts = chain(() if first is None else (first,), texts)
    if first is not None and _is_session(first[1]):
        return session_requests(_parse_sessions(name, texts), at_once or AT_ONCE, block_tokens)
    if at_once is not None:
        raise ConfigError(
            f"at_once is {at_once}, and {name} has no sessions: it is a Mooncake trace, which gives the "
            "arrival time of each request; omit at_once"
        )
    return parse_requests(name, texts, block_tokens)


def read_sessions(path: str | os.PathLike[str]) -> Iterator[Session]:
    """Stream the sessions of a file, or of all files of a directory, by name. Raises `TraceError`."""
    if not os.path.isdir(path):
        yield from _parse_sessions(os.fspath(path), texts_of(path))
        return
    try:
        files = sorted(file for file in Path(path).iterdir() if file.name.endswith(_SUFFIXES))
    except OSError as error:
        raise TraceError(os.fspath(path), 0, f"cannot be read: {error.strerror or error}") from error
    if not files:
        raise TraceError(
            os.fspath(path), 0, f"holds no file of sessions; their names must end with {', '.join(_SUFFIXES)}"
        )
    for file in files:
        yield from _parse_sessions(str(file), texts_of(file))


def _is_session(text: bytes) -> bool:
    try:
        shape = _shape(text)
    except NOT_DECODED:
        return b'"block_size"' in text
    is_request = bool(bytes(shape.timestamp))
    return not is_request and bool(bytes(shape.block_size) or bytes(shape.requests))


def _parse_sessions(name: str, texts: Iterable[Text]) -> Iterator[Session]:
    empty = True
    for line, text in texts:
        empty = False
        try:
            requests = _shape(text).requests
            has_rows = bytes(memoryview(requests)[1:64]).lstrip().startswith(b"[")
            decoded = _of_rows(text) if has_rows else _of_objects(text)
        except NOT_DECODED as error:
            raise TraceError(name, line, not_json(text, error, "an agent session")) from error
        if isinstance(decoded, _RowSession):
            agents = _agents_of_rows(decoded)
        else:
            agents = list(_agents_of_objects(0.0, "requests", decoded.requests))
        session = Session(name, line, decoded.block_size, decoded.hash_id_scope == "global", agents)
        _check_times(session)
        yield session
    if empty:
        raise TraceError(name, 0, "holds no session")


def _agents_of_rows(session: _RowSession) -> list[_Agent]:
    lists: list[tuple[float, str, list[_Row]]] = [
        (0.0, "requests", session.requests),
        *[
            (one.second, f"subagents[{number}].requests", one.requests)
            for number, one in enumerate(session.subagents)
        ],
    ]
    return [
        _Agent(start, [(f"{path}[{number}]", row) for number, row in enumerate(rows)])
        for start, path, rows in lists
    ]


def _agents_of_objects(
    start: float, path: str, entries: Sequence[_Streamed | _Whole | _Subagent]
) -> Iterator[_Agent]:
    """Yield an agent, then its subagents and theirs."""
    places = [(f"{path}[{number}]", entry) for number, entry in enumerate(entries)]
    yield _Agent(start, [(place, entry) for place, entry in places if not isinstance(entry, _Subagent)])
    for place, entry in places:
        if isinstance(entry, _Subagent):
            yield from _agents_of_objects(start + entry.second, f"{place}.requests", entry.requests)


def _check_times(session: Session) -> None:
    if not any(agent.requests for agent in session.agents):
        raise session.error("the session has no request")
    for agent in session.agents:
        latest = 0.0
        for place, request in agent.requests:
            if request.second < latest:
                raise session.error(
                    f"{place} is at {request.second:g} s and follows one at {latest:g} s; sort them by time"
                )
            latest = request.second


def _common(some: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    least = min(len(some), len(others))
    if tuple(some[:least]) == tuple(others[:least]):
        return least
    return next(number for number, (one, other) in enumerate(zip(some, others)) if one != other)


# Serving.


def session_requests(sessions: Iterable[Session], at_once: int, block_tokens: int) -> Iterator[TraceRequest]:
    """Yield the requests of sessions, of which `at_once` run at a time, in the order of their arrival.

    If the last block of a prompt is not full, it is shared with no other request.
    """
    fresh = count()
    for turn in session_turns(sessions, at_once, block_tokens, fresh):
        partial = (next(fresh),) if turn.input_tokens % block_tokens else ()
        yield TraceRequest(
            1000 * turn.second, turn.input_tokens, max(1, turn.output_tokens), turn.blocks + partial
        )


def session_turns(
    sessions: Iterable[Session], at_once: int, block_tokens: int, fresh: Iterator[int] | None = None
) -> Iterator[Turn]:
    """Yield the turns of sessions, of which `at_once` run at a time, in the order of their arrival.

    When a session ends, the next one begins. fresh: yields an unused id for each new block.
    """
    fresh, shared = count() if fresh is None else fresh, _Blocks()
    numbered, entries = enumerate(sessions), count()
    waiting: list[tuple[float, int, int, Iterator[_Next]]] = []
    live: dict[int, dict[int, int]] = {}

    def begin(now: float) -> None:
        number, session = next(numbered, (0, None))
        if session is not None:
            known = shared if session.has_global_ids else _Blocks()
            turns = _turns_of(session, block_tokens, known, fresh)
            heappush(waiting, (now, next(entries), number, turns))

    for _ in range(at_once):
        begin(0.0)
    while waiting:
        now, _, number, turns = heappop(waiting)
        turn = next(turns, None)
        if turn is None:
            live.pop(number, None)
            begin(now)
            continue
        live.setdefault(number, {})[turn.agent] = len(turn.blocks)
        blocks = sum(chain.from_iterable(sizes.values() for sizes in live.values()))
        agent = (number << 10) + turn.agent
        yield Turn(agent, turn.blocks, blocks, now, turn.input_tokens, turn.output_tokens)
        heappush(waiting, (now + turn.pause, next(entries), number, turns))


class _Blocks(dict[tuple[int, ...], int]):
    """(id of the previous block, or -1; then the hash ids of a block) -> id of the block."""


class _Next(NamedTuple):
    """A request of a session.

    pause: seconds until the session's next request. agent: its number in the session.
    """

    pause: float
    agent: int
    blocks: tuple[int, ...]
    input_tokens: int
    output_tokens: int


class _Context:
    """The last prompt of an agent: its hash ids, and the ids of its blocks."""

    __slots__ = ("blocks", "ids")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.blocks: list[int] = []


def _turns_of(
    session: Session, block_tokens: int, known: dict[tuple[int, ...], int], fresh: Iterator[int]
) -> Iterator[_Next]:
    """Yield the requests of a session, including its subagents, by time."""
    if block_tokens % session.block_tokens:
        raise session.error(
            f"its hash ids are of {session.block_tokens} tokens; blocks of {block_tokens} tokens are no "
            "multiple of that"
        )
    contexts = [_Context() for _ in session.agents]
    turns = [
        (agent.start + request.second, number, place, request)
        for number, agent in enumerate(session.agents)
        for place, request in agent.requests
    ]
    turns.sort(key=lambda turn: turn[0])
    seconds = [turn[0] for turn in turns]
    for (second, number, place, request), after in zip(turns, [*seconds[1:], seconds[-1]]):
        context = contexts[number]
        try:
            kept = _take_ids(context, request, session.block_tokens)
        except ValueError as error:
            raise session.error(f"{place} {error}") from error
        parts = block_tokens // session.block_tokens
        del context.blocks[kept // parts :]
        for start in range(len(context.blocks) * parts, request.input_tokens // block_tokens * parts, parts):
            block = (context.blocks[-1] if context.blocks else -1, *context.ids[start : start + parts])
            if block not in known:
                known[block] = next(fresh)
            context.blocks.append(known[block])
        pause = min(after - second, LONGEST_PAUSE_S)
        yield _Next(pause, number, tuple(context.blocks), request.input_tokens, request.output_tokens)


def _take_ids(context: _Context, request: _Request, hash_tokens: int) -> int:
    """Update the hash ids of an agent's context to those of its next request. Return how many are kept.

    A request has one id per full block. One more, for a last block that is not full, is ignored. Raises
    `ValueError` for another number of ids.
    """
    kept, added = request.ids_after(context.ids)
    full, odd = divmod(request.input_tokens, hash_tokens)
    found = kept + len(added)
    if found != full and not (odd and found == full + 1):
        raise ValueError(
            f"has {found} hash ids; its {request.input_tokens} tokens fill {full} blocks of {hash_tokens}"
        )
    context.ids[kept:] = added
    return kept
