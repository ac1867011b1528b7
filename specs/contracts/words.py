"""Contracts of words: a state and its counters share one int without overlapping.

`Codec` packs with shifts and masks, which CrossHair cannot follow. So the contracts are about `packed` and
`unpacked`, which do the same by multiplication and division. `tests/check/proof/test_contracts.py` enumerates
that `Codec` equals them for every machine, over the whole range of every counter.
"""

from __future__ import annotations

STATE_SIZE = 1 << 4
"""The size of a word's field for the state; the first counter follows it."""


def packed(state: int, first: int, second: int, first_size: int) -> int:
    """Pack a state and two counters. second: 0 for a machine with one counter. first_size: the number of
    values of the first counter."""
    return state + STATE_SIZE * (first + first_size * second)


def unpacked(word: int, first_size: int) -> tuple[int, int, int]:
    counts = word // STATE_SIZE
    return word % STATE_SIZE, counts % first_size, counts // first_size


def unpacking_gives_back_what_was_packed(
    state: int, first: int, second: int, first_size: int
) -> tuple[int, int, int]:
    """No field overlaps its neighbour. The sizes are the ranges of the first counters of the machines:
    request, transfer, block and lease.

    pre: first_size in (1 << 1, 1 << 10, 1 << 12)
    pre: 0 <= state < STATE_SIZE and 0 <= first < first_size and 0 <= second
    post: _ == (state, first, second)
    """
    return unpacked(packed(state, first, second, first_size), first_size)
