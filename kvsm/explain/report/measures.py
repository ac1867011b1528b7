"""`Tables`: the tables of a log, cut to one window of events, from which a report computes its figures."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsm.explain.report.figures import Spread
from kvsm.explain.story.window import Window
from kvsm.explain.tables.opened import OpenedLog

BINS = 48
"""Number of equal parts into which the time of the window is divided for sparklines."""

SHOWN = 3
"""Most names, errors or transfers in one figure."""

NOT_TOLD = -(1 << 63)
"""Replaces a time that is NULL in the tables, in arrays of integers."""

ADMITTED = "admitted IS NOT NULL AND NOT resumed"
"""SQL condition for the lookup with which each request was first admitted: only these lookups count."""


class Tables:
    """The tables of a log, cut to a window.

    first, last: first and last event of the window.
    began_ns, ended_ns: wall time of these two events.
    whole: whether the window covers the whole log.
    """

    def __init__(self, log: OpenedLog, window: Window) -> None:
        self.log = log
        self.whole = window.first is None and window.last is None
        self.first = max(log.first, window.first or log.first)
        self.last = log.last if window.last is None else min(log.last, window.last)
        at = "SELECT wall_ns FROM events WHERE event {} {} ORDER BY event {} LIMIT 1"
        [self.began_ns] = self.one(at.format(">=", self.first, "ASC"))
        [self.ended_ns] = self.one(at.format("<=", self.last, "DESC"))

    def within(self, event: str) -> str:
        """Return an SQL condition: the event in the column `event` is in the window."""
        return "1" if self.whole else f"{event} BETWEEN {self.first} AND {self.last}"

    def all(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        """All rows of a query. values: the values of its `?` parameters."""
        return self.log.sql(query, values).fetchall()

    def one(self, query: str, *values: str) -> tuple[Any, ...]:
        """The only row of a query."""
        row: tuple[Any, ...] = self.log.sql(query, values).fetchone()
        return row

    def bin_of(self, wall_ns: str) -> str:
        """Return an SQL expression: the part of the window, 0 to `BINS` - 1, that has the time `wall_ns`."""
        span = max(1, self.ended_ns - self.began_ns + 1)
        return f"max(0, min({BINS - 1}, ({wall_ns} - {self.began_ns}) / {-(-span // BINS)}))"

    def bin_start_ns(self, place: int) -> int:
        """The Unix time at which a part of the window's time begins (ns)."""
        span = max(1, self.ended_ns - self.began_ns + 1)
        return int(self.began_ns + place * -(-span // BINS))

    def numbers(self, columns: str, rest: str, *values: str) -> NDArray[np.int64]:
        """All rows of a query over integers, as an array of shape (rows, columns).

        Sorting such an array is several times faster than sorting in SQL.

        columns: SQL expressions that are never NULL.
        rest: the query from FROM on.
        """
        rows = self.log.sql(f"SELECT {columns} {rest}", values)
        found = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
        return found.reshape(-1, len(rows.description))


def spread_of(values: NDArray[np.int64], weights: NDArray[np.int64] | None = None) -> Spread:
    """Median, 99th percentile and maximum of values. weights: how often each value counts; None: once."""
    if not len(values):
        return Spread(0, None, None, None)
    order = np.argsort(values)
    upto = np.arange(1, len(values) + 1) if weights is None else np.cumsum(weights[order])
    total = int(upto[-1])
    middle, high = [
        int(values[order[np.searchsorted(upto, (total - 1) * part // 100, side="right")]])
        for part in (50, 99)
    ]
    return Spread(total, middle, high, int(values[order[-1]]))


def shortest_run(counts: list[int], part: float) -> tuple[int, int] | None:
    """(first, last) index of the shortest run of counts with this share of the sum; None if the sum is 0."""
    needed, total, begin, best = part * sum(counts), 0, 0, None
    for end, count in enumerate(counts):
        total += count
        while total - counts[begin] >= needed and begin < end:
            total -= counts[begin]
            begin += 1
        if total and total >= needed and (best is None or end - begin < best[1] - best[0]):
            best = begin, end
    return best
