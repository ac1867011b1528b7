"""Words: a state and its counters share one int without touching each other, in plain arithmetic.

`Codec` packs with shifts and masks, which CrossHair cannot follow. What is proved here is about `packed`
and `unpacked`, which say the same with times and divide; that `Codec` is equal to them for every machine,
over the whole range of every counter, is enumerated in `tests/check/proof/test_contracts.py`.
"""

from __future__ import annotations

STATE_SIZE = 1 << 4
"""Room for states in a word; the first counter begins behind it."""


def packed(state: int, first: int, second: int, first_size: int) -> int:
    """`second` is 0 for a machine with one counter. first_size: how many values the first counter has."""
    return state + STATE_SIZE * (first + first_size * second)


def unpacked(word: int, first_size: int) -> tuple[int, int, int]:
    counts = word // STATE_SIZE
    return word % STATE_SIZE, counts % first_size, counts // first_size


def unpacking_gives_back_what_was_packed(
    state: int, first: int, second: int, first_size: int
) -> tuple[int, int, int]:
    """No field spills into its neighbour. The sizes are the ranges of the machines' first counters: request,
    transfer, block and lease.

    pre: first_size in (1 << 1, 1 << 10, 1 << 12)
    pre: 0 <= state < STATE_SIZE and 0 <= first < first_size and 0 <= second
    post: _ == (state, first, second)
    """
    return unpacked(packed(state, first, second, first_size), first_size)
