"""Workloads: what a trace may contain, how bad traces are refused, and properties of the generator."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.errors import TraceError
from kvsm.serving.traces import (
    BLOCK_TOKENS,
    CONTEXT_MOST,
    TraceRequest,
    multi_turn,
    output_hash,
    prompt_hashes,
    read_trace,
)

GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}'


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


# Reading.


@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 1 << 32), requests=st.integers(1, 60))
def test_a_generated_workload_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, seed: int, requests: int
) -> None:
    """The reader accepts a generated trace, and returns the same requests."""
    made = list(multi_turn(seed, requests))
    lines = [msgspec.json.encode(request).decode() for request in made]
    assert list(read_trace(write(tmp_path_factory.mktemp("trace") / "t.jsonl", *lines))) == made


def test_a_line_is_a_request(tmp_path: Path) -> None:
    """Fields have their Mooncake names, and unknown fields are ignored."""
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


@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_hash_id_names_its_whole_prefix(seed: int) -> None:
    """As in Mooncake, an id always follows the same id, so that equal ids mean equal prefixes."""
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
    """A longer workload begins with the shorter one."""
    assert list(multi_turn(3, 90))[:40] == list(multi_turn(3, 40))


def test_turns_extend_conversations_and_users_share_system_prompts() -> None:
    """A cache can get hits, within a conversation and between conversations."""
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


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 1 << 32), block_tokens=st.sampled_from([4, 16, 64, 1000]))
def test_a_workload_of_other_blocks_is_as_large_in_blocks(seed: int, block_tokens: int) -> None:
    """Lengths scale with the block, so small blocks give the same workload in about the same number of
    blocks."""
    made = list(multi_turn(seed, 60, block_tokens))
    for request in made:
        assert len(request.hash_ids) == -(-request.input_length // block_tokens)
    usual = sum(len(one.hash_ids) for one in multi_turn(seed, 60))
    assert 0.3 * usual < sum(len(one.hash_ids) for one in made) < 3 * usual


def test_a_trace_of_other_blocks_is_read(tmp_path: Path) -> None:
    """Not every trace has a hash id for each 512 tokens."""
    path = write(tmp_path / "t", GOOD)
    assert list(read_trace(path, 300)) == [TraceRequest(5, 600, 3, (0, 1))]
    with pytest.raises(TraceError, match="2 hash_ids for 600 tokens; blocks of 200 tokens make 3"):
        list(read_trace(path, 200))


# Hashes.


def hashes(ids: tuple[int, ...], tokens: int, hash_tokens: int) -> list[bytes]:
    return prompt_hashes(TraceRequest(0, tokens, 1, ids), 8, hash_tokens)


def test_a_hash_is_of_whole_blocks() -> None:
    """There is one hash for each whole block of the prompt, and equal ids give equal hashes."""
    first, second, third = hashes((1, 2, 1), 24, 8)
    assert len(first) == 32
    assert first == third != second
    assert hashes((1, 2, 1), 23, 8) == [first, second]


@settings(max_examples=examples(50))
@given(
    ids=st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple),
    lacking=st.integers(0, 7),
    parts=st.sampled_from([2, 4, 8]),
)
def test_parts_of_a_block_have_hashes_of_their_own(ids: tuple[int, ...], lacking: int, parts: int) -> None:
    """For every size of parts, the last part of an id's block has the hash of the id, and parts with
    different indices or ids have different hashes."""
    tokens = len(ids) * 8 - lacking
    fine, whole = hashes(ids, tokens, 8 // parts), hashes(ids, tokens, 8)
    assert len(fine) == tokens // (8 // parts)
    assert fine[parts - 1 :: parts] == whole
    names = [(ids[number // parts], number % parts) for number in range(len(fine))]
    assert len(set(fine)) == len(set(names))


def test_output_blocks_have_hashes_of_their_own() -> None:
    """A block filled by output has a hash that no other block has."""
    outputs = {output_hash(name, index) for name in ("r1", "r11") for index in (1, 11, 111)}
    assert len(outputs) == 6
    assert outputs.isdisjoint(prompt_hashes(TraceRequest(0, 1000, 1, tuple(range(1000))), 1, 1))
