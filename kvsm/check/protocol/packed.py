"""States as a few 64-bit words each, without loss, and the set of the states seen, as sorted arrays.

A state's cells are the digits of a number in mixed radix, spread over as few words as hold them. The first
word is then stirred: multiplied, and xor-ed with the others, by steps that can be undone. So the first word
is both a part of the state and a hash of it. Arrays are sorted and searched by the first word alone.
Different states with the same first word are rare, and their other words distinguish them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from kvsm.check.protocol.nodes import Columns

Packed = NDArray[np.uint64]
"""One row for each word, one column for each state."""

_HALF = np.uint64(32)
_STIR = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93))
_UNSTIR = tuple(np.uint64(pow(int(factor), -1, 1 << 64)) for factor in _STIR)
_SPREAD = (np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0xA0761D6478BD642F))


class Packing:
    """Packs columns of small ints into words, and unpacks them.

    sizes: the number of values of each column.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        largest_first = sorted(enumerate(sizes), key=lambda item: -item[1])
        self._words = [
            [(columns, _room(columns)) for columns in _filled(word, 16)]
            for word in _filled(largest_first, 64)
        ]
        """For each word its digits. A digit is a group of columns that fit in 16 bits together, for speed."""

    @property
    def width(self) -> int:
        """The number of words of a packed state."""
        return len(self._words)

    def pack(self, columns: Columns) -> Packed:
        """Pack the states of these columns."""
        count = columns.shape[1]
        packed = np.zeros((self.width, count), dtype=np.uint64)
        for word, digits in zip(packed, self._words):
            for group, room in digits:
                np.multiply(word, np.uint64(room), out=word)
                np.add(word, _digit(columns, group), out=word)
        self._stir(packed)
        return packed

    def unpack(self, packed: Packed) -> Columns:
        """Unpack states to columns."""
        packed = packed.copy()
        self._unstir(packed)
        columns = np.empty((len(self.sizes), packed.shape[1]), dtype=np.uint8)
        for word, digits in zip(packed, self._words):
            for group, room in reversed(digits):
                rest = word // np.uint64(room)
                digit = (word - rest * np.uint64(room)).astype(np.uint16)
                word = rest
                for column, size in reversed(group):
                    less = digit // np.uint16(size)
                    columns[column] = digit - less * np.uint16(size)
                    digit = less
        return columns

    def _stir(self, packed: Packed) -> None:
        first = packed[0]
        for other, factor in zip(packed[1:], _SPREAD * self.width):
            first ^= other * factor
        for factor in _STIR:
            first *= factor
            first ^= first >> _HALF

    def _unstir(self, packed: Packed) -> None:
        first = packed[0]
        for factor in reversed(_UNSTIR):
            first ^= first >> _HALF
            first *= factor
        for other, factor in zip(packed[1:], _SPREAD * self.width):
            first ^= other * factor


def _digit(columns: Columns, group: Sequence[tuple[int, int]]) -> NDArray[np.uint16]:
    digit: NDArray[np.uint16] = columns[group[0][0]].astype(np.uint16)
    for column, size in group[1:]:
        digit *= np.uint16(size)
        digit += columns[column]
    return digit


def _filled(items: Sequence[tuple[int, int]], bits: int) -> list[list[tuple[int, int]]]:
    """The (column, size) items in groups whose sizes multiply to at most 2 ** bits, filled first fit."""
    groups: list[list[tuple[int, int]]] = []
    for item in items:
        fitting = (group for group in groups if _room([*group, item]) <= 1 << bits)
        group = next(fitting, None)
        if group is None:
            groups.append([item])
        else:
            group.append(item)
    return groups


def _room(group: Sequence[tuple[int, int]]) -> int:
    """The number of combinations of these columns' values."""
    return prod(size for _, size in group)


_MERGED_FROM = 4
"""A run is merged with the previous run unless the previous one is at least this many times longer."""


class Visited:
    """A growing set of packed states, in sorted runs. Each run is much shorter than the one before."""

    def __init__(self) -> None:
        self._runs: list[Packed] = []

    def __len__(self) -> int:
        return sum(run.shape[1] for run in self._runs)

    def add(self, states: Packed) -> None:
        """Add states, which must be distinct, sorted, and not in the set."""
        self._runs.append(states)
        while len(self._runs) > 1 and self._runs[-2].shape[1] < _MERGED_FROM * self._runs[-1].shape[1]:
            last = self._runs.pop()
            both = np.concatenate((self._runs.pop(), last), axis=1)
            # A stable sort recognises two sorted runs and merges them.
            self._runs.append(both[:, np.argsort(both[0], kind="stable")])

    def unseen(self, states: Packed) -> Packed:
        """Return those of these sorted states that are not in the set."""
        for run in self._runs:
            states = states[:, ~_contained(states, run)]
        return states


def distinct(states: Packed) -> Packed:
    """These states sorted, without repetitions."""
    ordered = states[:, np.argsort(states[0])]
    same, alike = _same_as_before(ordered)
    if (alike & ~same).any():
        ordered = states[:, np.lexsort(states[::-1])]
        same, _ = _same_as_before(ordered)
    return ordered[:, ~same]


def _same_as_before(states: Packed) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For each state: whether it equals the one before it, and whether its first word does."""
    alike = np.zeros(states.shape[1], dtype=np.bool_)
    np.equal(states[0, 1:], states[0, :-1], out=alike[1:])
    same = alike.copy()
    for word in states[1:]:
        same[1:] &= word[1:] == word[:-1]
    return same, alike


def _contained(states: Packed, run: Packed) -> NDArray[np.bool_]:
    """For each of the sorted states: whether it is in the sorted run."""
    found = np.zeros(states.shape[1], dtype=np.bool_)
    last = run.shape[1] - 1
    if last < 0:
        return found
    places = np.searchsorted(run[0], states[0])
    looking = np.flatnonzero(places <= last)
    while len(looking):
        # Almost always one round. Another follows only where different states share a first word.
        at = places[looking]
        alike = run[0, at] == states[0, looking]
        looking, at = looking[alike], at[alike]
        same = np.ones(len(looking), dtype=np.bool_)
        for word, wanted in zip(run[1:], states[1:]):
            same &= word[at] == wanted[looking]
        found[looking[same]] = True
        looking = looking[~same]
        places[looking] += 1
        looking = looking[places[looking] <= last]
    return found
