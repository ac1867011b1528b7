"""`SeenKeys`: what a policy remembers of keys that are not in the pool: when they were used, and how often.

A table of fixed size without the keys themselves: eight places for each of many rows, and a key belongs to
one row. A place has 32 bits of the key's hash. A new key takes the place in its row whose use is longest ago.
So nothing grows or is moved, and 13 bytes a key are enough. Two keys of one row are taken for each other once
in 2^32; that changes an estimate, and not what is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvsm.core.policies.policy_copies import Column

_WAYS = 8
_PRINT = (1 << 32) - 1

Numbers = NDArray[np.int64]
Hashes = NDArray[np.uint64]


class Uses(NamedTuple):
    """Some keys' numbers of uses, and the clock at their last use."""

    uses: Numbers
    last: Numbers


class SeenKeys:
    """Remembers some `size` keys or more. The clock at a use must be above 0."""

    def __init__(self, size: int) -> None:
        self._rows = 1 << max(0, (size // _WAYS - 1).bit_length())
        self.clear()

    def clear(self) -> None:
        """Forget all keys."""
        places = self._rows * _WAYS
        self._prints, self._uses = Column(places, "<u4"), Column(places, "<u1")
        self._last = Column(places, "<i8")
        """The clock at the last use; 0 if the place is empty. Then the other columns have 0, too."""

    def find(self, keys: Sequence[bytes]) -> Uses:
        """Return what is known of each key; -1 uses of a key that is not remembered."""
        return self._at(self._places_of(_hashes(keys)))

    def take(self, keys: Sequence[bytes]) -> Uses:
        """Return what is known of each key, as `find` does, and forget it."""
        places = self._places_of(_hashes(keys))
        found = self._at(places)
        for column in self.columns():
            column.put(places[places >= 0], 0)
        return found

    def add(self, keys: Sequence[bytes], uses: Numbers, last: Numbers) -> Uses:
        """Remember distinct keys, or change what is known of them. Returns what was forgotten for them."""
        hashes = _hashes(keys)
        rows = self._rows_of(hashes)
        if len(set(rows.tolist())) == len(rows):
            return self._put(hashes, rows, uses, last)
        forgotten: list[Uses] = []
        left = np.arange(len(keys))
        while len(left):
            # Of several keys of a row, one is added in each round.
            _, first = np.unique(rows[left], return_index=True)
            some = left[first]
            forgotten.append(self._put(hashes[some], rows[some], uses[some], last[some]))
            left = np.delete(left, first)
        return Uses(*(np.concatenate(part) for part in zip(*forgotten)))

    def _put(self, hashes: Hashes, rows: Numbers, uses: Numbers, last: Numbers) -> Uses:
        """Remember keys of distinct rows. Returns what was forgotten for them."""
        place = self._places_of(hashes)
        before = self._last.values
        oldest = rows * _WAYS + np.argmin(before[_row(rows)], axis=1)
        is_new = place < 0
        lost = oldest[is_new & (before[oldest] > 0)]
        forgotten = Uses(self._uses.values[lost].astype(np.int64), before[lost])
        place = np.where(is_new, oldest, place)
        for column, values in zip(self.columns(), (_prints(hashes), uses, last)):
            column.put(place, values)
        return forgotten

    def _at(self, places: Numbers) -> Uses:
        known = places >= 0
        uses: Numbers = np.where(known, self._uses.values[places].astype(np.int64), -1)
        return Uses(uses, np.where(known, self._last.values[places], 0))

    def sample(self, most: int) -> tuple[Uses, int]:
        """Return every n-th key, about `most` of them, and n."""
        step = -(-len(self._last.values) // most)
        last = self._last.values[::step]
        taken = last > 0
        return Uses(self._uses.values[::step][taken].astype(np.int64), last[taken]), step

    def columns(self) -> tuple[Column, Column, Column]:
        """The whole state."""
        return self._prints, self._uses, self._last

    def _places_of(self, hashes: Hashes) -> Numbers:
        """Return the place of each key; -1 if it is not remembered."""
        around = _row(self._rows_of(hashes))
        same = (self._prints.values[around] == _prints(hashes)[:, None]) & (self._last.values[around] > 0)
        which = np.argmax(same, axis=1)
        each = np.arange(len(hashes))
        return np.where(same[each, which], around[each, which], -1)

    def _rows_of(self, hashes: Hashes) -> Numbers:
        return (hashes & np.uint64(self._rows - 1)).astype(np.int64)


def _row(rows: Numbers) -> Numbers:
    """The places of these rows, a line for each."""
    places: Numbers = rows[:, None] * _WAYS + np.arange(_WAYS)
    return places


def _hashes(keys: Sequence[bytes]) -> Hashes:
    return np.fromiter(map(xxh3_64_intdigest, keys), np.uint64, len(keys))


def _prints(hashes: Hashes) -> NDArray[np.uint32]:
    return (hashes >> np.uint64(32)).astype(np.uint32)
