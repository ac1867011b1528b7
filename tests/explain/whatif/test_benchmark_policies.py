"""The benchmark of the policies: its optimum, its counts, and the order and keys of its workloads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from examples import examples

BENCHMARKS = ROOT / "benchmarks"

Requests = list[list[bytes]]

prompts = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def benchmark_module() -> Iterator[Callable[[str], Any]]:
    """Import a module of the benchmarks, which are scripts beside the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield import_module


def keys_of(prompt: str) -> list[bytes]:
    """One key a block; it names the whole prefix."""
    return [prompt[:end].encode() for end in range(1, len(prompt) + 1)]


def best_of_all(requests: Requests, host_blocks: int) -> int:
    """Try every set of blocks that a pool could hold after each request."""
    best = {frozenset[bytes](): 0}
    for keys in requests:
        after: dict[frozenset[bytes], int] = {}
        for resident, so_far in best.items():
            hits = so_far + sum(1 for _ in takewhile(resident.__contains__, keys))
            known = sorted(resident.union(keys))
            for size in range(min(host_blocks, len(known)) + 1):
                for kept in map(frozenset, combinations(known, size)):
                    after[kept] = max(after.get(kept, 0), hits)
        best = after
    return max(best.values())


@given(prompts=prompts, host_blocks=st.integers(1, 4))
@settings(max_examples=examples(40), deadline=None)
def test_no_choice_of_evictions_hits_more(
    benchmark_module: Callable[[str], Any], prompts: list[str], host_blocks: int
) -> None:
    optimal_hits = benchmark_module("policies").optimal_hits
    requests = [keys_of(prompt) for prompt in prompts]
    assert optimal_hits(requests, host_blocks) == best_of_all(requests, host_blocks)


def test_hits_and_stores_are_counted(benchmark_module: Callable[[str], Any]) -> None:
    """In a pool without a limit each block is stored once, and all of its later uses are hits."""
    requests = [keys_of(prompt) for prompt in ("ab", "abba", "b", "abb")]
    served = benchmark_module("policies").serve("lru", requests, 16)
    assert (served.hits, served.stores) == (5, 5)
    # "b" evicts the second block, which "abb" stores again; there is never room for a third block.
    tight = benchmark_module("policies").serve("lru", requests, 2)
    assert (tight.hits, tight.stores) == (3, 4)


def test_a_policy_is_compared_with_the_best_other_one_and_the_optimum(
    benchmark_module: Callable[[str], Any],
) -> None:
    module = benchmark_module("policies")
    served = {
        policy: module.Served(hits, 0, 0.0) for policy, hits in (("lru", 20), ("arc", 30), ("auto", 35))
    }
    row = module.Row("", "", 100, served, 50, 60)
    assert (row.best_other(), round(row.ahead(), 6), row.closed()) == ("arc", 5.0, "50%")
    assert row._replace(optimum=20).closed() == "no gap"


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    """Sessions of 2, 3, 1 and 3 requests, each of which adds a block to the previous one."""
    path = tmp_path / "sessions.jsonl.gz"
    with gzip.open(path, "wt") as lines:
        for length in (2, 3, 1, 3):
            rows = [[n, None, None, n + 1, 1, n, [n, 1]] for n in range(length)]
            lines.write(json.dumps({"block_size": 1, "requests": rows}) + "\n")
    return path


def session_and_blocks(turns: Iterator[Any]) -> list[tuple[int, int, int]]:
    """The session of each turn, the number of its blocks, and the live blocks."""
    return [(turn.agent >> 10, len(turn.keys), turn.live_blocks) for turn in turns]


def test_sessions_in_lock_step_take_turns(benchmark_module: Callable[[str], Any], sessions: Path) -> None:
    """An ended session's place goes to the next session. The workload ends when none is left for a place."""
    turns = session_and_blocks(benchmark_module("workload").agents_in_lock_step(sessions, 2, None, 1))
    expected = [(0, 1, 1), (1, 1, 2), (0, 2, 3), (1, 2, 4), (2, 1, 3), (1, 3, 4), (3, 1, 4)]
    assert turns == expected
    assert (
        session_and_blocks(benchmark_module("workload").agents_in_lock_step(sessions, 2, 2, 1))
        == expected[:4]
    )


def test_sessions_at_random_keep_their_own_order(
    benchmark_module: Callable[[str], Any], sessions: Path
) -> None:
    workload = benchmark_module("workload")
    orders = [session_and_blocks(workload.agents_at_random(sessions, 2, None, 1, seed)) for seed in range(8)]
    assert orders[3] == session_and_blocks(workload.agents_at_random(sessions, 2, None, 1, 3))
    assert len({tuple(order) for order in orders}) > 1
    for order in orders:
        for session in range(4):
            sizes = [blocks for number, blocks, _ in order if number == session]
            assert sizes == list(range(1, len(sizes) + 1))


def test_keys_of_generated_workloads_name_whole_prefixes(benchmark_module: Callable[[str], Any]) -> None:
    """Otherwise MIN would not be the optimum: a block always has the same block before it."""
    module, policies = benchmark_module("synthetic"), benchmark_module("policies")
    for workload in policies.synthetic_workloads(80):
        for requests in workload.variants:
            before: dict[bytes, bytes] = {}
            assert len(requests) == 80
            for keys in requests:
                assert len(set(keys)) == len(keys)
                for parent, key in zip([b"", *keys], keys):
                    assert before.setdefault(key, parent) == parent
    assert policies.serve("lru", module.loop(320, 1_600), 1_590).hits == 0
    assert policies.optimal_hits(module.loop(320, 1_600), 1_600) == 1_600
