"""The states that were seen: sorted arrays of packed states, and no pointer.

A packed state's first word is a hash of it and a part of it at once (`packing.py`), so that arrays are sorted
by it alone. States that differ and are alike in it are told apart by their other words.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvsm.checker.protocol.packing import Packed

_MERGED_FROM = 4
"""A run is merged with the one before it as soon as that is not so many times as long."""


class Visited:
    """A set of packed states that only grows. Its runs are sorted, each much shorter than the one before."""

    def __init__(self) -> None:
        self._runs: list[Packed] = []

    def __len__(self) -> int:
        return sum(run.shape[1] for run in self._runs)

    def add(self, states: Packed) -> None:
        """states: distinct ones, sorted, and not in the set."""
        self._runs.append(states)
        while len(self._runs) > 1 and self._runs[-2].shape[1] < _MERGED_FROM * self._runs[-1].shape[1]:
            last = self._runs.pop()
            both = np.concatenate((self._runs.pop(), last), axis=1)
            # Stable sorting sees that these are two sorted runs, and merges them.
            self._runs.append(both[:, np.argsort(both[0], kind="stable")])

    def unseen(self, states: Packed) -> Packed:
        """Those of these sorted states that are not in the set."""
        for run in self._runs:
            states = states[:, ~_contained(states, run)]
        return states


def distinct(states: Packed) -> Packed:
    """These states, each once, sorted."""
    ordered = states[:, np.argsort(states[0])]
    same, alike = _same_as_before(ordered)
    if (alike & ~same).any():
        ordered = states[:, np.lexsort(states[::-1])]
        same, _ = _same_as_before(ordered)
    return ordered[:, ~same]


def _same_as_before(states: Packed) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Of each state, whether it equals the one before it, and whether its first word does."""
    alike = np.zeros(states.shape[1], dtype=np.bool_)
    np.equal(states[0, 1:], states[0, :-1], out=alike[1:])
    same = alike.copy()
    for word in states[1:]:
        same[1:] &= word[1:] == word[:-1]
    return same, alike


def _contained(states: Packed, run: Packed) -> NDArray[np.bool_]:
    """Of each of the sorted states, whether it is in the sorted run."""
    found = np.zeros(states.shape[1], dtype=np.bool_)
    last = run.shape[1] - 1
    if last < 0:
        return found
    places = np.searchsorted(run[0], states[0])
    looking = np.flatnonzero(places <= last)
    while len(looking):
        # Almost always one round: another one only where first words are alike.
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
