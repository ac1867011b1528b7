"""`SeenKeys`: the uses of evicted and refused blocks, by key.

Unlike ghosts (`KeyQueue`), the keys themselves are not kept, so they cannot be recalled. The table has a
fixed size and is 8-way set-associative: the hash of a key selects a row of eight places, and a place has a
fingerprint of the key, 32 other bits of the hash. A new key replaces the least recently used one in its row.
So nothing grows or moves, and a key takes 13 bytes. Two keys of one row have the same fingerprint with a
chance of 2^-32; then an estimate changes, but never which bytes are served.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvsm.core.policies.policy_copies import Column

_WAYS = 8

Numbers = NDArray[np.int64]
Hashes = NDArray[np.uint64]


class Uses(NamedTuple):
    """The number of uses of some blocks, and the clock at the last use of each."""

    uses: Numbers
    last: Numbers


class SeenKeys:
    """Has places for about `size` to twice as many keys. The clock at a use must be above 0."""

    def __init__(self, size: int) -> None:
        self._rows = 1 << max(0, (size // _WAYS - 1).bit_length())
        self.clear()

    def clear(self) -> None:
        """Forget all keys."""
        places = self._rows * _WAYS
        self._fingerprints, self._uses = Column(places, "<u4"), Column(places, "<u1")
        self._last = Column(places, "<i8")
        """The clock at the last use. An empty place has 0 in all columns."""

    def find(self, keys: Sequence[bytes]) -> Uses:
        """Return the uses of each key; -1 uses if it is not remembered."""
        return self._at(self._places_of(_hashes(keys)))

    def take(self, keys: Sequence[bytes]) -> Uses:
        """Return the uses of each key, as `find` does, and forget the keys."""
        places = self._places_of(_hashes(keys))
        found = self._at(places)
        for column in self.columns():
            column.put(places[places >= 0], 0)
        return found

    def add(self, keys: Sequence[bytes], uses: Numbers, last: Numbers) -> Uses:
        """Remember distinct keys, or update their uses. Returns the uses of the keys that they replace."""
        hashes = _hashes(keys)
        rows = self._rows_of(hashes)
        if len(set(rows.tolist())) == len(rows):
            return self._put(hashes, rows, uses, last)
        forgotten: list[Uses] = []
        left = np.arange(len(keys))
        while len(left):
            # Each round adds one key per row.
            _, first = np.unique(rows[left], return_index=True)
            some = left[first]
            forgotten.append(self._put(hashes[some], rows[some], uses[some], last[some]))
            left = np.delete(left, first)
        return Uses(*(np.concatenate(part) for part in zip(*forgotten)))

    def _put(self, hashes: Hashes, rows: Numbers, uses: Numbers, last: Numbers) -> Uses:
        """As `add`, for keys of distinct rows."""
        place = self._places_of(hashes)
        before = self._last.values
        oldest = rows * _WAYS + np.argmin(before[_places_in(rows)], axis=1)
        is_new = place < 0
        lost = oldest[is_new & (before[oldest] > 0)]
        forgotten = Uses(self._uses.values[lost].astype(np.int64), before[lost])
        place = np.where(is_new, oldest, place)
        for column, values in zip(self.columns(), (_fingerprints(hashes), uses, last)):
            column.put(place, values)
        return forgotten

    def _at(self, places: Numbers) -> Uses:
        known = places >= 0
        uses: Numbers = np.where(known, self._uses.values[places].astype(np.int64), -1)
        return Uses(uses, np.where(known, self._last.values[places], 0))

    def sample(self, most: int) -> tuple[Uses, int]:
        """Return the uses of the keys in every n-th place, at most `most` of them, and n."""
        step = -(-len(self._last.values) // most)
        last = self._last.values[::step]
        taken = last > 0
        return Uses(self._uses.values[::step][taken].astype(np.int64), last[taken]), step

    def columns(self) -> tuple[Column, Column, Column]:
        """The whole state: fingerprints, uses and last uses."""
        return self._fingerprints, self._uses, self._last

    def _places_of(self, hashes: Hashes) -> Numbers:
        """Return the place of each key; -1 if it is not remembered."""
        around = _places_in(self._rows_of(hashes))
        is_filled = self._last.values[around] > 0
        same = (self._fingerprints.values[around] == _fingerprints(hashes)[:, None]) & is_filled
        which = np.argmax(same, axis=1)
        each = np.arange(len(hashes))
        return np.where(same[each, which], around[each, which], -1)

    def _rows_of(self, hashes: Hashes) -> Numbers:
        return (hashes & np.uint64(self._rows - 1)).astype(np.int64)


def _places_in(rows: Numbers) -> Numbers:
    """Return the places of these rows, one line per row."""
    places: Numbers = rows[:, None] * _WAYS + np.arange(_WAYS)
    return places


def _hashes(keys: Sequence[bytes]) -> Hashes:
    return np.fromiter(map(xxh3_64_intdigest, keys), np.uint64, len(keys))


def _fingerprints(hashes: Hashes) -> NDArray[np.uint32]:
    return (hashes >> np.uint64(32)).astype(np.uint32)
