"""The most that any eviction policy could have served, with all requests known in advance.

A bound, and not a goal. A policy does not know the future, may not refuse a store, and may not evict what a
copy or a request holds; copies take time. Here none of this counts. What remains is a problem of intervals. A
use of a block can be served if the pool has kept the block since it was last offered, or last used. Each slot
keeps one block at a time. The most uses that a pool of a size can serve is found exactly: when too many
blocks are kept, the one whose use is furthest away goes (Belady's MIN, with stores that may be refused).

Each block counts alone, but a real hit needs all blocks before it too. So the bound may be higher than what
any choice of evictions reaches. It is reached if the device never has a part of a prompt: then each use of a
block also uses the blocks before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from kvsm.explain.whatif.demand import CutOff, Demand, Emptied, Finished, Lookup, Offers, Preempted

Numbers = NDArray[np.int64]


class Optimum:
    """Bounds for one demand. lookups: those whose uses count (`simulate.counted_lookups`)."""

    def __init__(self, demand: Demand, lookups: Sequence[Lookup]) -> None:
        uses = _Uses(demand, {one.seq for one in lookups})
        self._intervals = uses.intervals()
        self._asked = sum(one.asked for one in lookups)
        self._on_device = sum(one.on_device for one in lookups)
        self._chunk = demand.config.blocks_per_chunk
        self.unlimited = self._share(len(self._intervals))
        """The share of the blocks that are found if the pool never evicts."""

    def found_share(self, host_blocks: int) -> float:
        """The share of the asked blocks that the device had or a pool of this size could have served."""
        return self._share(most_kept(self._intervals, host_blocks))

    def _share(self, served: int) -> float:
        found = min(self._asked, self._on_device + served * self._chunk)
        return found / self._asked if self._asked else 0.0


def most_kept(intervals: Sequence[tuple[int, int]], capacity: int) -> int:
    """How many intervals can be kept whole if no more than `capacity` overlap.

    intervals: (start, end), start before end, sorted by start. One may begin where another one ends.
    """
    ending: dict[int, int] = {}
    ends: list[int] = []
    """A heap of the ends that still lie ahead, as negative numbers, and of some that do not."""
    passed: list[int] = []
    kept = served = 0
    for start, group in groupby(intervals, itemgetter(0)):
        while passed and passed[0] <= start:
            over = ending.pop(heappop(passed), 0)
            kept, served = kept - over, served + over
        for _, end in group:
            if end not in ending:
                ending[end] = 0
                heappush(passed, end)
            ending[end] += 1
            heappush(ends, -end)
            kept += 1
        while kept > capacity:
            ending[-heappop(ends)] -= 1
            kept -= 1
    return served + sum(ending.values())


class _Uses:
    """When each block is offered and used, in numbers of operations."""

    def __init__(self, demand: Demand, counted: set[int]) -> None:
        self._parts: list[tuple[Numbers, int, bool]] = []
        """(keys, time, whether this is a use that counts)."""
        self._available = np.zeros(len(demand.keys) + 1, dtype=np.bool_)
        self._keys = len(demand.keys)
        self._epoch = 0
        offered: dict[int, int] = {}
        self._offer(np.array(demand.initial, dtype=np.int64), -1)
        for time, one in enumerate(demand.operations):
            if isinstance(one, Lookup):
                self._use(_chain(demand, one.life, one.first, one.end), time, one.seq in counted)
            elif isinstance(one, Offers):
                for life, upto in one.offers:
                    self._offer(_chain(demand, life, offered.get(life, 0), upto), time)
                    offered[life] = upto
            elif isinstance(one, Finished):
                self._offer(_chain(demand, one.life, 0, one.chunks), time)
                offered.pop(one.life, None)
            elif isinstance(one, Preempted):
                offered.pop(one.life, None)
            elif isinstance(one, CutOff):
                offered.clear()
            elif isinstance(one, Emptied):
                self._available[:] = False
                self._epoch += 1
                offered.clear()

    def _use(self, keys: Numbers, time: int, counts: bool) -> None:
        lacking = np.flatnonzero(~self._available[keys])
        useful = keys[: lacking[0]] if len(lacking) else keys
        if counts and len(useful):
            self._parts.append((self._named(useful), time, True))

    def _offer(self, keys: Numbers, time: int) -> None:
        keys = keys[keys >= 0]
        self._available[keys] = True
        if len(keys):
            self._parts.append((self._named(keys), time, False))

    def _named(self, keys: Numbers) -> Numbers:
        """A key of another epoch is another key."""
        return keys + self._epoch * self._keys

    def intervals(self) -> list[tuple[int, int]]:
        """From the last offer or use before each use to this use, sorted by start."""
        if not self._parts:
            return []
        sizes = [len(keys) for keys, _, _ in self._parts]
        keys = np.concatenate([keys for keys, _, _ in self._parts])
        times = np.repeat([time for _, time, _ in self._parts], sizes)
        uses = np.repeat([use for _, _, use in self._parts], sizes)
        order = np.lexsort((times, keys))
        keys, times, uses = keys[order], times[order], uses[order]
        ends = np.flatnonzero((keys[1:] == keys[:-1]) & uses[1:]) + 1
        pairs = np.stack((times[ends - 1], times[ends]), axis=1)
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        return [(start, end) for start, end in pairs.tolist() if start < end]


def _chain(demand: Demand, life: int, first: int, last: int) -> Numbers:
    return np.array(demand.chains[life][first:last], dtype=np.int64)
