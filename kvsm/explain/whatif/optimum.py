"""An upper bound for any eviction policy: the most blocks it could have served if it knew all requests ahead.

This is a bound, not a goal. A real policy does not know the future, may not refuse a store, and may not evict
a block that a copy or a request holds; and copies take time. The bound ignores all of this, which leaves a
problem of intervals. A use of a block can be served if the pool has kept the block since its last offer or
use. Each slot keeps one block at a time. The largest number of uses that a pool can serve is computed
exactly: when too many blocks are kept, the one whose next use is furthest away is dropped (Belady's MIN,
with stores that may be refused).

Each block counts alone, but a real hit needs all blocks before it too. So the bound may be higher than any
choice of evictions can reach. It can be reached if the device never has a part of a prompt, because then each
use of a block also uses the blocks before it.
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
    """Upper bounds for one demand. lookups: the lookups that count (`simulate.counted_lookups`)."""

    def __init__(self, demand: Demand, lookups: Sequence[Lookup]) -> None:
        uses = _Uses(demand, {lookup.seq for lookup in lookups})
        self._intervals = uses.intervals()
        self._asked = sum(lookup.asked for lookup in lookups)
        self._on_device = sum(lookup.on_device for lookup in lookups)
        self._chunk = demand.config.blocks_per_chunk
        self.unlimited = self._share(len(self._intervals))
        """The largest share of the asked blocks that is found if the pool never evicts."""

    def found_share(self, host_blocks: int) -> float:
        """The share of the asked blocks that the device had or a pool of this size could have served."""
        return self._share(most_kept(self._intervals, host_blocks))

    def _share(self, served: int) -> float:
        found = min(self._asked, self._on_device + served * self._chunk)
        return found / self._asked if self._asked else 0.0


def most_kept(intervals: Sequence[tuple[int, int]], capacity: int) -> int:
    """The largest number of intervals that can be kept so that no more than `capacity` of them overlap.

    intervals: (start, end), start before end, sorted by start. An interval that begins where another ends
        does not overlap it.
    """
    ending: dict[int, int] = {}
    ends: list[int] = []
    """A heap of the ends of kept intervals, negated: the latest is first. Some of the ends have passed."""
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
    """When each block is offered and used. A time is the index of an operation of the demand."""

    def __init__(self, demand: Demand, counted: set[int]) -> None:
        self._parts: list[tuple[Numbers, int, bool]] = []
        """(keys, time, whether this is a use that counts); not a use: an offer."""
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
        """Make keys of different epochs distinct: a reset ends all blocks of an epoch."""
        return keys + self._epoch * self._keys

    def intervals(self) -> list[tuple[int, int]]:
        """(last offer or use of the block, this use) for each use that counts, sorted by start."""
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
