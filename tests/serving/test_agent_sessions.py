"""Recorded agent sessions: both forms give the same requests, and bad files are refused by name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.errors import ConfigError, TraceError
from kvsm.serving.agent_sessions import LONGEST_PAUSE_S, read_recorded, read_sessions, session_turns
from kvsm.serving.run_options import RunOptions
from kvsm.serving.traces import TraceRequest
from kvsm.serving.workload_run import load_workload

Object = dict[str, Any]
Prompts = list[tuple[float, list[int], int]]
"""The requests of an agent: (second, hash ids, tokens after the last full block)."""


def sent(second: float, ids: list[int], rest: int = 0, block_size: int = 4) -> Object:
    """A request in the form of the source."""
    return {"t": second, "type": "n", "in": len(ids) * block_size + rest, "out": 2, "hash_ids": ids}


def session(*requests: Object, **fields: Any) -> Object:
    return {"id": "x", "block_size": 4, "requests": list(requests), **fields}


def rows(requests: list[Object]) -> list[list[Any]]:
    """The same requests as rows. Each id that is not kept is a run of its own."""
    before: list[int] = []
    made = []
    for one in requests:
        ids = one["hash_ids"]
        keep = next((n for n, (a, b) in enumerate(zip(before, ids)) if a != b), min(len(before), len(ids)))
        runs = [number for first in ids[keep:] for number in (first, 1)]
        made.append([one["t"], None, 1.5, one["in"], one["out"], keep, runs])
        before = ids
    return made


def as_rows(source: Object) -> Object:
    """The same session in the form with rows."""
    own = [one for one in source["requests"] if one["type"] != "subagent"]
    others = [one for one in source["requests"] if one["type"] == "subagent"]
    subagents = [{"t": one["t"], "requests": rows(one["requests"])} for one in others]
    return {**source, "requests": rows(own), **({"subagents": subagents} if subagents else {})}


def write(path: Path, *sessions: Object, indent: int | None = None) -> Path:
    path.write_text("".join(json.dumps(one, indent=indent) + "\n" for one in sessions))
    return path


def read(path: Path, block_tokens: int = 4, at_once: int | None = None) -> list[TraceRequest]:
    return list(read_recorded(path, block_tokens, at_once))


@st.composite
def agents(draw: st.DrawFn) -> Prompts:
    """Prompts that grow, shrink or change, as those of an agent do."""
    made: Prompts = []
    second, ids = 0.0, list[int]()
    for _ in range(draw(st.integers(1, 5))):
        keep = draw(st.integers(0, len(ids)))
        ids = ids[:keep] + draw(st.lists(st.integers(0, 9), max_size=5))
        made.append((second, ids, draw(st.integers(0 if ids else 1, 3))))
        second += draw(st.integers(0, 400))
    return made


@st.composite
def sessions(draw: st.DrawFn) -> Object:
    requests = [sent(*prompt) for prompt in draw(agents())]
    for prompts in draw(st.lists(agents(), max_size=2)):
        second = draw(st.integers(0, 500))
        requests.append({"t": second, "type": "subagent", "requests": [sent(*prompt) for prompt in prompts]})
    return session(*requests, hash_id_scope=draw(st.sampled_from(["local", "global"])))


# Requests.


@settings(max_examples=examples(30), deadline=None)
@given(
    source=st.lists(sessions(), min_size=1, max_size=3),
    pieces=st.integers(1, 3),
    at_once=st.integers(1, 3),
    compressed=st.booleans(),
)
def test_both_forms_give_the_same_requests(
    tmp_path_factory: pytest.TempPathFactory,
    source: list[Object],
    pieces: int,
    at_once: int,
    compressed: bool,
) -> None:
    """A directory with a file for each session, and a file with a row session in each line, plain or in gzip:
    the requests are the same, in order of arrival, and have an id for each started block."""
    directory = tmp_path_factory.mktemp("sessions")
    file = write(directory / "rows", *map(as_rows, source))
    for number, one in enumerate(source):
        write(directory / f"{number}.json", one, indent=number or None)
    if compressed:
        for path in directory.iterdir():
            path.write_bytes(gzip.compress(path.read_bytes()))
    made = read(directory, 4 * pieces, at_once)
    assert made == read(file, 4 * pieces, at_once)
    assert [one.arrival_ms for one in made] == sorted(one.arrival_ms for one in made)
    assert all(len(one.hash_ids) == -(-one.input_length // (4 * pieces)) for one in made)


@settings(max_examples=examples(30), deadline=None)
@given(source=st.lists(sessions(), min_size=1, max_size=3), pieces=st.integers(1, 3))
def test_equal_ids_mean_equal_prefixes(
    tmp_path_factory: pytest.TempPathFactory, source: list[Object], pieces: int
) -> None:
    """Two full blocks have the same id if and only if they end the same prefix of the same session, or of any
    session with global ids. An id of a block that is not full is never used again."""
    path = write(tmp_path_factory.mktemp("sessions") / "x", *source)
    names: dict[Any, int] = {}
    partial: list[int] = []
    # One session at a time, so the requests come session by session, each sorted by time.
    prompts = [(number, one, ids) for number, one in enumerate(source) for ids in by_time(one)]
    made = read(path, 4 * pieces, 1)
    assert len(made) == len(prompts)
    for request, (number, one, ids) in zip(made, prompts):
        full = request.input_length // (4 * pieces)
        for place, block in enumerate(request.hash_ids[:full], 1):
            scope = None if one["hash_id_scope"] == "global" else number
            assert names.setdefault((scope, *ids[: place * pieces]), block) == block
        partial += request.hash_ids[full:]
    every = [*names.values(), *partial]
    assert len(every) == len(set(every))


def by_time(source: Object) -> list[list[int]]:
    """The hash ids of a session's requests, in order of arrival; at equal times its agents in their order."""
    own = [(one["t"], one["hash_ids"]) for one in source["requests"] if one["type"] != "subagent"]
    for one in source["requests"]:
        if one["type"] == "subagent":
            own += [(one["t"] + inner["t"], inner["hash_ids"]) for inner in one["requests"]]
    return [ids for _, ids in sorted(own, key=lambda request: request[0])]


def test_sessions_run_at_once_with_their_pauses(tmp_path: Path) -> None:
    """Two sessions start at once; the third starts when one of them ends. A pause of an hour is cut."""
    long = session(sent(0, [1]), sent(40, [1, 2]), sent(3640, [1, 2, 3]))
    short = session(sent(0, [1], 1), sent(30, [1, 2], 1))
    path = write(tmp_path / "x", long, short, short)
    seconds = [(one.arrival_ms / 1000, one.input_length) for one in read(path, 4, 2)]
    assert seconds == [(0, 4), (0, 5), (30, 9), (30, 5), (40, 8), (60, 9), (40 + LONGEST_PAUSE_S, 12)]
    live = [(turn.second, turn.live_blocks) for turn in session_turns(read_sessions(path), 2, 4)]
    assert live == [(0, 1), (0, 2), (30, 3), (30, 2), (40, 3), (60, 4), (340, 3)]


def test_subagents_of_subagents_have_their_place_in_time(tmp_path: Path) -> None:
    """Times of a subagent count from its own begin, at any depth; they share the ids of their session."""
    inner = {"t": 5, "type": "subagent", "requests": [sent(1, [1, 2])]}
    outer = {"t": 10, "type": "subagent", "requests": [sent(0, [1]), inner, sent(20, [1, 3])]}
    made = read(write(tmp_path / "x", session(sent(0, [1]), outer, sent(12, [1, 4]))))
    assert [one.arrival_ms / 1000 for one in made] == [0, 10, 12, 16, 30]
    assert [one.hash_ids for one in made] == [(0,), (0,), (0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize(("scope", "second"), [("local", (1,)), ("global", (0,))])
def test_global_ids_are_shared_by_sessions(tmp_path: Path, scope: str, second: tuple[int, ...]) -> None:
    """Equal ids of two sessions are the same block only if they are global."""
    one = session(sent(0, [7]), hash_id_scope=scope)
    assert [one.hash_ids for one in read(write(tmp_path / "x", one, one))] == [(0,), second]


def test_an_id_of_a_block_that_is_not_full_is_ignored(tmp_path: Path) -> None:
    """Some recorders give the last block an id of its own. It is not a full block, so nobody may hit it."""
    requests = [{**sent(second, [1, 2]), "in": 7} for second in (0, 1)]
    assert [one.hash_ids for one in read(write(tmp_path / "x", session(*requests)))] == [(0, 1), (0, 2)]


def test_options_of_a_run_choose_the_requests(tmp_path: Path) -> None:
    """`requests` takes the first ones, and `at_once` says how many sessions run at a time; by default, 8."""
    path = str(write(tmp_path / "x", *[session(sent(0, [1]), sent(9, [1]))] * 20))

    def arrivals(**options: int) -> list[float]:
        made = load_workload(RunOptions(trace=path, block_tokens=4, **options))  # type: ignore[arg-type]
        return [one.arrival_ms / 1000 for one in made]

    assert arrivals(requests=10) == [0] * 8 + [9] * 2
    assert arrivals(requests=4, at_once=2) == [0, 0, 9, 9]


def test_a_mooncake_trace_is_still_one(tmp_path: Path) -> None:
    """In gzip, too, and with a field whose name a session also has; it has no sessions to run at once."""
    line = b'{"timestamp": 5, "input_length": 6, "output_length": 3, "hash_ids": [0, 1], "requests": 3}\n'
    (tmp_path / "x").write_bytes(gzip.compress(line))
    assert read(tmp_path / "x") == [TraceRequest(5, 6, 3, (0, 1))]
    with pytest.raises(ConfigError, match=r"at_once is 4, and .*x has no sessions"):
        read(tmp_path / "x", at_once=4)


# What is refused.

GOOD = session(sent(0, [1, 2]), sent(1, [1, 2, 3]))


def changed(number: int, **fields: Any) -> Object:
    requests = [{**one, **fields} if place == number else one for place, one in enumerate(GOOD["requests"])]
    return {**GOOD, "requests": requests}


def row(number: int, column: int, value: Any) -> Object:
    made = as_rows(GOOD)
    made["requests"][number][column] = value
    return made


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({**GOOD, "requests": []}, "the session has no request"),
        ({**GOOD, "block_size": 0}, "Expected `int` >= 1 - at `$.block_size`"),
        ({**GOOD, "block_size": 2}, "requests[0] has 2 hash ids; its 8 tokens fill 4 blocks of 2"),
        ({**GOOD, "block_size": 8}, "its hash ids are of 8 tokens; blocks of 4 tokens are no multiple"),
        ({**GOOD, "hash_id_scope": "here"}, "Invalid enum value 'here'"),
        ({"requests": GOOD["requests"]}, "missing required field `block_size`"),
        ({"block_size": 4}, "missing required field `requests`"),
        ({**GOOD, "requests": 7}, "Expected `array`, got `int`"),
        (changed(1, type="q"), "Invalid value 'q' - at `$.requests[1].type`"),
        (changed(1, hash_ids=[1]), "requests[1] has 1 hash ids; its 12 tokens fill 3 blocks of 4"),
        (changed(1, hash_ids=[1, 2, 3, 4]), "requests[1] has 4 hash ids"),
        (changed(0, t=9), "requests[1] is at 1 s and follows one at 9 s"),
        (changed(0, t=-1), "Expected `float` >= 0"),
        (changed(0, **{"in": 0}), "Expected `int` >= 1 - at `$.requests[0].in`"),
        (row(1, 5, 3), "requests[1] keeps 3 ids; the request before it has 2"),
        (row(1, 6, [3]), "requests[1] has a run without its count"),
        (row(1, 6, [3, 10**15]), "requests[1] has 1000000000000002 hash ids for 12 tokens"),
        (row(1, 6, [3, 2]), "requests[1] has 4 hash ids"),
        (row(0, 3, 1 << 40), "Expected `int` <= 16777216 - at `$.requests[0][3]`"),
        (changed(0, **{"in": 1 << 40}), "Expected `int` <= 16777216 - at `$.requests[0].in`"),
        (row(0, 3, "8"), "Expected `int`, got `str` - at `$.requests[0][3]`"),
        ({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}, "not an agent session"),
        ([1], "not an agent session: Expected `object`, got `array`"),
    ],
)
def test_a_bad_session_is_named(tmp_path: Path, bad: Any, says: str) -> None:
    """One line of text: file, line number, the request, and what is wrong."""
    with pytest.raises(TraceError) as caught:
        read(write(tmp_path / "x", GOOD, bad), 4)
    assert str(caught.value).startswith(f"{tmp_path / 'x'}: line 2: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (cut(gzip.compress(json.dumps(GOOD).encode(), mtime=0)), "x.json: cannot be decompressed: "),
        (gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20, "x.json: cannot be decompressed: "),
        (b"\x1f\x8b no gzip", "x.json: cannot be read: "),
        (json.dumps(GOOD).encode()[:-3] + b"\n" + json.dumps(GOOD).encode(), "x.json: line 1: not JSON"),
        (cut(json.dumps(GOOD, indent=1).encode()), "x.json: not JSON: Input data was truncated"),
        (json.dumps(GOOD).encode() + b"\n\n", "x.json: line 2: is empty"),
        (b'{"block_size": 4, "requests": ' + b"[" * 10_000, "x.json: line 1: not JSON"),
        (b"\xff\xfe", "x.json: line 1: not JSON"),
        (b'{"timestamp": 5, "input_length"\n\n', "x.json: line 1: not JSON"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    """A file that is cut off or damaged is refused with its name, also within a directory."""
    (tmp_path / "x.json").write_bytes(content)
    at_once = 2 if b"block_size" in content else None  # A Mooncake trace would refuse it.
    for path in (tmp_path / "x.json", tmp_path):
        with pytest.raises(TraceError) as caught:
            read(path, at_once=at_once)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_directory_without_sessions_is_refused(tmp_path: Path) -> None:
    """Other files of a directory are left alone; if there are only those, there is nothing to serve."""
    (tmp_path / "readme.txt").write_text("no session")
    with pytest.raises(TraceError, match="holds no file of sessions"):
        read(tmp_path)
    write(tmp_path / "x.json", GOOD)
    assert len(read(tmp_path)) == 2
    (tmp_path / "y.json").touch()
    with pytest.raises(TraceError, match=r"y\.json: holds no session"):
        read(tmp_path)
