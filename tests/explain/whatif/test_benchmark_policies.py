"""The offline optimum that the policies are compared with is the optimum: no choice of evictions beats it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import combinations, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from examples import examples

BENCHMARKS = ROOT / "benchmarks"

Requests = list[list[bytes]]

prompts = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def optimal_hits() -> Iterator[Callable[[Requests, int], int]]:
    """The function of the benchmark, which is a script beside the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield import_module("policies").optimal_hits


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
    optimal_hits: Callable[[Requests, int], int], prompts: list[str], host_blocks: int
) -> None:
    requests = [keys_of(prompt) for prompt in prompts]
    assert optimal_hits(requests, host_blocks) == best_of_all(requests, host_blocks)
