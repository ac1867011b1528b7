"""Shards: together they make each run of a walk once, however they are limited and resumed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsm.check.walks.shard import Shard
from kvsm.check.walks.walk import RunMaker, WalkedRun, walk
from kvsm.errors import ConfigError
from kvsm.system.stopping import IsOver, never


class Noting(RunMaker):
    """Notes the numbers of its runs."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def run(self, number: int, is_over: IsOver = never) -> WalkedRun:  # noqa: ARG002
        self.made.append(number)
        return WalkedRun(1, 0, None)


def runs_of(shard: Shard, first: int, runs: int) -> tuple[list[int], int]:
    maker = Noting()
    result = walk(maker, 1, first_run=first, runs=runs, shard=shard)
    assert result.runs == len(maker.made)
    return maker.made, result.next_run


@given(of=st.integers(1, 9), first=st.integers(0, 40), runs=st.integers(1, 40))
def test_the_shards_of_a_walk_make_exactly_its_runs(of: int, first: int, runs: int) -> None:
    """Also if some of them have none."""
    made = []
    for number in range(1, of + 1):
        mine, next_run = runs_of(Shard(number, of), first, runs)
        assert next_run == first + runs
        made += mine
    assert sorted(made) == [*range(first, first + runs)]


@given(of=st.integers(1, 9), number=st.integers(1, 9), parts=st.lists(st.integers(1, 20), max_size=4))
def test_a_resumed_shard_makes_the_runs_of_an_uninterrupted_one(
    of: int, number: int, parts: list[int]
) -> None:
    shard = Shard(min(number, of), of)
    made, next_run = [], 0
    for runs in parts:
        more, next_run = runs_of(shard, next_run, runs)
        made += more
    assert made == [run for run in range(sum(parts)) if run % of == shard.number - 1]


def test_a_shard_that_time_ends_goes_on_after_its_last_run() -> None:
    maker = Noting()
    result = walk(maker, 1, seconds=0, shard=Shard(3, 8))
    assert maker.made == [2]
    walk(maker, 1, first_run=result.next_run, seconds=0, shard=Shard(3, 8))
    assert maker.made == [2, 10]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9/8", "8 shards are numbered from 1 to 8"),
        ("0/8", "8 shards are numbered from 1 to 8"),
        ("1/0", "at least one shard"),
        ("3", "such as 3/8 for the third of eight"),
        ("-1/8", "such as 3/8"),
        ("a/b", "such as 3/8"),
    ],
)
def test_a_shard_that_there_is_not_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Shard.parse(text)


def test_a_shard_is_read_as_it_is_written() -> None:
    assert str(Shard.parse("3/8")) == "3/8"
