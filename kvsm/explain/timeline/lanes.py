"""Assign intervals to the lanes of a track, so that no two in one lane overlap."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush


def pack(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """Return the lane of each interval: the lowest free one. This needs the smallest possible number of
    lanes.

    intervals: (first, last) event of each, both included, sorted by first event.
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
