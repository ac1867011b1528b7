"""Which lane of a track an interval is drawn in, so that no two overlap."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush


def pack(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """The lane of each interval: the lowest one that is free. There are as few lanes as can be.

    intervals: (first, last) event of each, both included, in the order of their first events.
    """
    lanes: list[int] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    used = 0
    for first, last in intervals:
        while busy and busy[0][0] < first:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else used
        used = max(used, lane + 1)
        heappush(busy, (last, lane))
        lanes.append(lane)
    return lanes
