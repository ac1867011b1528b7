"""`ReuseAges`: what blocks are worth, learned from the ages at which blocks are used again.

The *age* of a block is how far the policy's clock has advanced since the block's last use. For each number of
uses and each range of ages, a table counts the blocks that were used again at such an age (`hits`), and those
that were forgotten at it (`lost`). With the blocks that still wait for their next use, this is a life table
(the actuarial form of the estimator of Kaplan and Meier, 1958): of the blocks that reached a range, the share
that was used in it. A forgotten or waiting block counts up to the age that it has reached. Without these
blocks, the estimate would see only those that were used again.

The *worth* of a block is the highest ratio, over all horizons, of the chance that it is used before the
horizon to the expected time for which it takes a slot until then: its Gittins index (Gittins, 1979; for
caches compare Beckmann and Sanchez, "Maximizing cache performance under uncertainty", HPCA 2017). Keeping the
blocks with the highest worth gives the most hits per slot and unit of time.

All counts are whole numbers and the order of all operations is fixed, so a replay gives the same worths to
the bit.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

_FIRST = 16
"""The end of the first range of ages. Each further end is 1.41 times the previous one."""
_FARTHEST = 16
"""The last range begins below this many times the capacity."""
_MOST = 1 << 48
"""No count gets there."""
_KEPT = 16
"""All counts are halved after this many hits per slot, so that the estimates follow a changing workload."""

Numbers = NDArray[np.int64]


class ReuseAgesState(msgspec.Struct, array_like=True):
    """The state that `snapshot` saves."""

    hits: bytes
    lost: bytes
    worth: bytes
    counted: int


class ReuseAges:
    """The life table and worths of blocks with 0 to `classes` - 1 uses, for a pool of `capacity` slots."""

    def __init__(self, classes: int, capacity: int) -> None:
        begins, end = [0], float(_FIRST)
        while end < _FARTHEST * capacity:
            begins.append(int(end))
            end *= 2**0.5
        self._begins: Numbers = np.array(begins, dtype=np.int64)
        self._widths = [after - begin for begin, after in zip(begins, [*begins[1:], int(end)])]
        self._halve_after = _KEPT * max(capacity, _FIRST)
        self._shape = classes, len(begins)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._hits: Numbers = np.zeros(self._shape, dtype=np.int64)
        self._lost: Numbers = np.zeros(self._shape, dtype=np.int64)
        self._worth: NDArray[np.float64] = np.zeros(self._shape, dtype=np.float64)
        self._counted = 0

    def hit(self, uses: Numbers, ages: Numbers) -> None:
        """Count blocks that are used again at these ages. uses: how often each was used before."""
        np.add.at(self._hits, (uses, self._range(ages)), 1)
        self._counted += len(ages)

    def lose(self, uses: Numbers, ages: Numbers) -> None:
        """Count blocks that are forgotten at these ages."""
        np.add.at(self._lost, (uses, self._range(ages)), 1)

    def worth(self, uses: Numbers, ages: Numbers) -> NDArray[np.float64]:
        """Return the worth of blocks, as of the last `learn`; 0 before the first one."""
        worth: NDArray[np.float64] = self._worth[uses, self._range(ages)]
        return worth

    def waiting(self, uses: Numbers, ages: Numbers, each: int) -> Numbers:
        """Return a table of these blocks, for `learn`. each: how many blocks one of these stands for."""
        table: Numbers = np.zeros(self._shape, dtype=np.int64)
        np.add.at(table, (uses, self._range(ages)), each)
        return table

    def learn(self, waiting: Numbers) -> None:
        """Estimate the worths. waiting: the table of blocks that are stored or remembered now (`waiting`)."""
        for uses in range(self._shape[0]):
            chances = _chances(self._hits[uses].tolist(), (self._lost[uses] + waiting[uses]).tolist())
            self._worth[uses] = _worths(chances, self._widths)
        if self._counted >= self._halve_after:
            self._hits >>= 1
            self._lost >>= 1
            self._counted = 0

    def snapshot(self) -> bytes:
        """Return the state as bytes, equal for equal states."""
        state = ReuseAgesState(
            self._hits.astype("<i8").tobytes(),
            self._lost.astype("<i8").tobytes(),
            self._worth.astype("<f8").tobytes(),
            self._counted,
        )
        return msgspec.msgpack.encode(state)

    def restore(self, state: bytes) -> None:
        """Restore what `snapshot` saved. Raises `ValueError` for a table of another shape, or impossible
        counts."""
        saved = msgspec.msgpack.decode(state, type=ReuseAgesState)
        self._hits = np.frombuffer(saved.hits, "<i8").reshape(self._shape).astype(np.int64)
        self._lost = np.frombuffer(saved.lost, "<i8").reshape(self._shape).astype(np.int64)
        self._worth = np.frombuffer(saved.worth, "<f8").reshape(self._shape).astype(np.float64)
        self._counted = saved.counted
        for table in (self._hits, self._lost):
            if table.min() < 0 or table.max() > _MOST:
                raise ValueError("the snapshot has ages with impossible counts")
        if not np.all(np.isfinite(self._worth)) or not 0 <= self._counted <= _MOST:
            raise ValueError("the snapshot has impossible worths")

    def _range(self, ages: Numbers) -> Numbers:
        found: Numbers = np.searchsorted(self._begins, ages, side="right") - 1
        return found


def _chances(hits: list[int], censored: list[int]) -> list[float]:
    """Return for each range the chance that a block which reaches it is used in it.

    censored: the blocks that reached a range, and were forgotten or still wait in it. They count as seen for
        half of it.
    """
    chances, beyond = [0.0] * len(hits), 0
    for place in reversed(range(len(hits))):
        reached = 2 * (beyond + hits[place]) + censored[place]
        if reached:
            chances[place] = 2 * hits[place] / reached
        beyond += hits[place] + censored[place]
    return chances


def _worths(chances: list[float], widths: list[int]) -> list[float]:
    """Return the worth at the beginning of each range: the highest ratio of chance to time."""
    worths = []
    for begin in range(len(chances)):
        alive, gained, taken, best = 1.0, 0.0, 0.0, 0.0
        for chance, width in zip(chances[begin:], widths[begin:]):
            gained += alive * chance
            taken += alive * width * (1 - chance / 2)
            alive *= 1 - chance
            best = max(best, gained / taken)
        worths.append(best)
    return worths
