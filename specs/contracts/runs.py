"""Contracts of run merging: the pairs of a job in as few copies as possible, without other bytes.

`merge_runs` works on numpy arrays, which CrossHair cannot follow. These contracts are about `merged`, the
plain reference. `tests/check/proof/test_contracts.py` compares the two on all small jobs.
"""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[int, int]
"""A device block and its host block."""
Run = tuple[int, int, int]
"""First device block, first host block, number of blocks."""


def joins(run: Run, pair: Pair) -> bool:
    """Whether a pair continues a run: it directly follows the run's last pair on both sides."""
    device, host, count = run
    return pair[0] == device + count and pair[1] == host + count


def merged(pairs: Sequence[Pair]) -> list[Run]:
    """Merge pairs, sorted by host block, to runs."""
    runs: list[Run] = []
    for device, host in pairs:
        if runs and joins(runs[-1], (device, host)):
            first_device, first_host, count = runs[-1]
            runs[-1] = first_device, first_host, count + 1
        else:
            runs.append((device, host, 1))
    return runs


def covered(runs: Sequence[Run]) -> list[Pair]:
    """The pairs that runs copy, one by one."""
    return [(device + n, host + n) for device, host, count in runs for n in range(count)]


def two_are_merged_iff_consecutive(pair: Pair, behind: Pair) -> list[Run]:
    """Correct bytes (S15): two neighbours become one copy if and only if they are consecutive on both
    sides.

    post: (len(_) == 1) == (behind[0] == pair[0] + 1 and behind[1] == pair[1] + 1)
    """
    return merged((pair, behind))


def a_run_copies_its_pairs(first: Pair, second: Pair, third: Pair) -> list[Run]:
    """Correct bytes (S15): runs copy all pairs of the job and no others, in their order.

    post: covered(_) == [first, second, third]
    """
    return merged((first, second, third))


def runs_cannot_be_merged_further(first: Pair, second: Pair, third: Pair) -> list[Run]:
    """No run continues the run before it.

    post: all(not joins(run, behind[:2]) for run, behind in zip(_, _[1:]))
    """
    return merged((first, second, third))


def a_run_of_any_length_takes_its_next(device: int, host: int, count: int, pair: Pair) -> bool:
    """The induction step: a pair joins a run exactly if it is the next pair of that run.

    pre: count >= 1
    post: _ == (pair == (device + count, host + count))
    """
    return joins((device, host, count), pair)
