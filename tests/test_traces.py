"""Workloads: what a trace may hold, how it is refused, and what the generator promises."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsm.errors import TraceError
from kvsm.traces import (
    BLOCK_TOKENS,
    CONTEXT_MOST,
    TraceRequest,
    block_keys,
    multi_turn,
    output_key,
    read_trace,
)

GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}'


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


# Reading.


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32), requests=st.integers(1, 60))
def test_a_generated_workload_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, seed: int, requests: int
) -> None:
    """What the generator makes is a trace that the reader accepts, and the same one."""
    made = list(multi_turn(seed, requests))
    lines = [msgspec.json.encode(request).decode() for request in made]
    assert list(read_trace(write(tmp_path_factory.mktemp("trace") / "t.jsonl", *lines))) == made


def test_a_line_is_a_request(tmp_path: Path) -> None:
    """Fields have their Mooncake names, and unknown ones are passed over."""
    line = GOOD.replace("{", '{"session": "x", ')
    assert list(read_trace(write(tmp_path / "t", line))) == [TraceRequest(5, 600, 3, (0, 1))]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"timestamp": 5, "input_length"', "not JSON"),
        ("\\xff\\xfe", "not JSON"),
        ("[1, 2]", "Expected `object`, got `array`"),
        (GOOD.replace("600", '"600"'), "Expected `int`, got `str`"),
        (GOOD.replace("600", "600.5"), "Expected `int`, got `float`"),
        (GOOD.replace("[0, 1]", "7"), "Expected `array`, got `int`"),
        (GOOD.replace("[0, 1]", '["a", "b"]'), "Expected `int`, got `str`"),
        (GOOD.replace('"output_length": 3, ', ""), "missing required field `output_length`"),
        (GOOD.replace("600", "-1"), "Expected `int` >= 1"),
        (GOOD.replace("3,", "0,"), "Expected `int` >= 1"),
        (GOOD.replace("[0, 1]", "[0, -1]"), "Expected `int` >= 0"),
        (GOOD.replace(": 5", ": -5"), "Expected `float` >= 0"),
        (GOOD.replace(": 5", ": 4"), "timestamp 4 comes after 5"),
        (GOOD.replace("[0, 1]", "[0]"), "1 hash_ids for 600 tokens; blocks of 512 tokens make 2"),
        (GOOD.replace("[0, 1]", "[]"), "0 hash_ids for 600 tokens"),
        ("", "is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    """One line of text: file, line number, and what is wrong. The lines before it were good."""
    reader = read_trace(write(tmp_path / "t.jsonl", GOOD, line, GOOD))
    assert next(reader).input_length == 600
    with pytest.raises(TraceError) as caught:
        list(reader)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 't.jsonl'}: line 2: ")
    assert says in message
    assert "\n" not in message


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    """A binary file is refused at its first line, not with a traceback."""
    (tmp_path / "t").write_bytes(b'{"timestamp": 0, "x": "\xff\xfe"}\n')
    with pytest.raises(TraceError, match="line 1"):
        list(read_trace(tmp_path / "t"))


@pytest.mark.parametrize(
    ("name", "says"), [("absent", "No such file"), (".", "directory"), ("empty", "no request")]
)
def test_a_file_without_requests_is_refused(tmp_path: Path, name: str, says: str) -> None:
    """Nothing to read is an error about the file as a whole."""
    (tmp_path / "empty").touch()
    with pytest.raises(TraceError, match=says) as caught:
        list(read_trace(tmp_path / name))
    assert caught.value.line == 0


# Generating.


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_hash_id_names_its_whole_prefix(seed: int) -> None:
    """As in Mooncake: an id always stands behind the same id, so that equal ids mean equal prefixes."""
    before: dict[int, int | None] = {}
    latest = 0.0
    for request in multi_turn(seed, 80):
        assert request.arrival_ms >= latest
        assert len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS)
        assert request.input_length + request.output_length <= CONTEXT_MOST
        latest, previous = request.arrival_ms, None
        for one in request.hash_ids:
            assert before.setdefault(one, previous) == previous
            previous = one


def test_equal_seeds_give_equal_workloads() -> None:
    """S11 starts here; another seed is another workload."""
    assert list(multi_turn(7, 100)) == list(multi_turn(7, 100))
    assert list(multi_turn(7, 100)) != list(multi_turn(8, 100))


def test_a_longer_workload_begins_with_the_shorter_one() -> None:
    """How many are asked for does not change what the first of them are."""
    assert list(multi_turn(3, 90))[:40] == list(multi_turn(3, 40))


def test_turns_extend_conversations_and_users_share_system_prompts() -> None:
    """There is something for a cache to hit: within a conversation, and between conversations."""
    seen: dict[int, int] = {}
    extended = 0
    for request in multi_turn(0, 500):
        full = request.hash_ids[: request.input_length // BLOCK_TOKENS]
        known = sum(one in seen for one in full)
        extended += known > 8192 // BLOCK_TOKENS
        for one in full:
            seen[one] = seen.get(one, 0) + 1
    assert extended > 50, "prefixes longer than any system prompt come back: turns of one conversation"
    assert max(seen.values()) > 50, "some system prompt is used by many"


# Keys.


def test_a_key_is_a_hash_and_a_group() -> None:
    """vLLM's layout: 32 bytes of hash, 4 of group index, which is 0."""
    keys = block_keys([1, 2, 1])
    assert [len(key) for key in keys] == [36, 36, 36]
    assert {key[32:] for key in keys} == {bytes(4)}
    assert keys[0] == keys[2] != keys[1]


def test_output_blocks_have_keys_of_their_own() -> None:
    """No block filled by output is taken for another one, nor for a prompt's."""
    outputs = {output_key(name, index) for name in ("r1", "r11") for index in (1, 11, 111)}
    assert len(outputs) == 6
    assert outputs.isdisjoint(block_keys(range(1000)))
