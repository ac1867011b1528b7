"""Make the times of a log increase with its events even if the clock of the engine was set.

The log holds the clock's times. If the clock was set, the difference of two such times is no duration. Steady
time is the clock's time plus a shift that is constant between two jumps: each jump changes the shift so that
time continues where it was. The tables of an opened log have steady times (`use_steady_time`); the logged
times remain in `main.events` and the other tables of `main`.

A jump is found from the events alone:

- Backward: an event is at least a second earlier than the event before it.
- Forward: much more time passed than the engine steps between two events take, while a request was running.
  An idle engine makes no steps, so the rule needs a request that arrived before the gap and ended after it. A
  suspended machine or a paused process looks the same as a jump, and is removed from the times too.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.explain.tables.row_kinds import TABLES

BACKWARD_NS = 1_000_000_000
"""Least time (ns) that counts as a jump backward. Smaller corrections of a clock change no finding."""

FORWARD_NS = 20_000_000_000
"""Least time (ns), beyond that of the steps, that counts as a jump forward: no engine step takes as long."""

LEAST_STEPS = 100
"""Least number of measured steps to know how long a step takes. With fewer, no jump forward is detected."""

STEP_SLACK = 20
"""A step may take this many times as long as the median step before the rest counts as a jump."""


class ClockJump(msgspec.Struct, frozen=True):
    """The clock was set between two events, or the process stood still there.

    event: the first event after it.
    from_ns, to_ns: what the clock said at the event before, and at this event (Unix time, ns).
    shift_ns: steady time minus the clock's time, from this event on (ns).
    """

    event: int
    from_ns: int
    to_ns: int
    shift_ns: int

    @property
    def by_ns(self) -> int:
        """By how much the clock jumped (ns); below 0: backward."""
        return self.to_ns - self.from_ns


def use_steady_time(connection: sqlite3.Connection, jumps: tuple[ClockJump, ...]) -> tuple[ClockJump, ...]:
    """Hide the tables of this connection behind views with steady times, if there are jumps. Returns them."""
    if jumps:
        shifts = [(0, 0), *[(jump.event, jump.shift_ns) for jump in jumps]]
        connection.execute("CREATE TEMP TABLE _clock (event INTEGER PRIMARY KEY, shift INTEGER)")
        connection.executemany("INSERT INTO temp._clock VALUES (?, ?)", shifts)
        for table in TABLES:
            connection.execute(_view(table))
    return jumps


def shift_at(jumps: Sequence[ClockJump], event: int) -> int:
    """Steady time minus the clock's time at an event (ns)."""
    place = bisect_right(jumps, event, key=attrgetter("event"))
    return jumps[place - 1].shift_ns if place else 0


def find_jumps(connection: sqlite3.Connection) -> tuple[ClockJump, ...]:
    """Find the jumps of the clock, in order."""
    found, shift = [], 0
    candidates = connection.execute(
        "SELECT event, before_ns, wall_ns, step - before_step FROM ("
        " SELECT event, step, wall_ns, kind, lag(wall_ns) OVER (ORDER BY event) AS before_ns,"
        " lag(step) OVER (ORDER BY event) AS before_step FROM events"
        f") WHERE before_ns - wall_ns >= {BACKWARD_NS}"
        f" OR (wall_ns - before_ns >= {FORWARD_NS} AND kind != 'Restarted')"
    ).fetchall()
    forward = [row for row in candidates if row[2] > row[1]]
    step_ns = _median_step_ns(connection) if forward else None
    busy = set() if step_ns is None else _busy_at(connection, [event for event, *_ in forward])
    for event, before_ns, wall_ns, steps in candidates:
        excess_ns = wall_ns - before_ns
        if excess_ns > 0:
            usual_ns = steps * (step_ns or 0)
            if event not in busy or excess_ns - STEP_SLACK * usual_ns < FORWARD_NS:
                continue
            excess_ns -= usual_ns
        shift -= excess_ns
        found.append(ClockJump(event, before_ns, wall_ns, shift))
    return tuple(found)


def _median_step_ns(connection: sqlite3.Connection) -> int | None:
    """The median time of a step (ns), from events in different steps; None: there are too few."""
    rows = connection.execute("SELECT step, wall_ns FROM events ORDER BY event").fetchall()
    steps, times = np.array(rows, dtype=np.int64).T
    passed, taken = np.diff(steps), np.diff(times)
    known = (passed > 0) & (taken >= 0)
    return int(np.median(taken[known] // passed[known])) if known.sum() >= LEAST_STEPS else None


def _busy_at(connection: sqlite3.Connection, events: Sequence[int]) -> set[int]:
    """The events at which a request was running that arrived before, and ended by itself then or later."""
    if not events:
        return set()
    rows = connection.execute(
        "SELECT arrived, finished FROM requests WHERE finished IS NOT NULL AND NOT cut_off AND NOT held"
    ).fetchall()
    arrived: NDArray[np.int64] = np.sort(np.array([row[0] for row in rows], dtype=np.int64))
    finished: NDArray[np.int64] = np.sort(np.array([row[1] for row in rows], dtype=np.int64))
    begun, ended = np.searchsorted(arrived, events), np.searchsorted(finished, events)
    return {event for event, busy in zip(events, (begun > ended).tolist(), strict=True) if busy}


_RESTARTS = "(SELECT event FROM main.restarts)"

_EVENT_OF = {
    "copies.submitted_ns": "(SELECT submitted FROM main.transfers t WHERE t.transfer = r.transfer)",
    "blocks.planned_ns": "r.transfer",
    "block_runs.planned_ns": "r.transfer",
    "transfers.wall_ns": "r.transfer",
    **{
        f"{table}.{end}_ns": f"r.{end} - (r.{end} IN {_RESTARTS})"
        for table in TABLES
        for end in ("finished", "ended", "gone")
    },
}
"""Column with a time -> the number of its event, if that is not clear from the column's name. A thing that a
restart ended has the time of the event before the restart."""


def _shifted(table: str, column: str) -> str:
    named = "r.event" if column == "wall_ns" else f"r.{column.removesuffix('_ns')}"
    event = _EVENT_OF.get(f"{table}.{column}", named)
    return (
        f"r.{column} + (SELECT c.shift FROM temp._clock c WHERE c.event <= {event}"
        " ORDER BY c.event DESC LIMIT 1)"
    )


def _waited(state: str) -> str:
    """The time that a request spent in a state, up to the end of the log."""
    return (
        "coalesce((SELECT sum(max(0, coalesce(s.ended_ns, (SELECT wall_ns FROM temp.events ORDER BY event"
        " DESC LIMIT 1)) - s.began_ns)) FROM temp.request_states s WHERE s.request = r.request"
        f" AND s.state = '{state}' AND s.began >= r.arrived AND s.began <= coalesce(r.finished, s.began)), 0)"
    )


_DURATIONS = {
    ("requests", "deferred_ns"): _waited("DEFERRED"),
    ("requests", "loading_ns"): _waited("LOADING"),
    ("copies", "queued_ns"): "r.queued_ns",
    ("copies", "copied_ns"): "r.copied_ns",
    ("copies", "noticed_ns"): "CASE WHEN r.noticed_ns IS NOT NULL THEN max(0, "
    f"{_shifted('copies', 'reported_ns')} - ({_shifted('copies', 'submitted_ns')})"
    " - r.queued_ns - r.copied_ns) END",
}
"""Columns that hold a duration, and how to compute it in steady time."""


def _view(table: str) -> str:
    """The SQL statement that hides a table behind a view of the same name, with steady times."""
    columns = []
    for column in TABLES[table].__struct_fields__:
        is_time = column.endswith("_ns")
        value = f"r.{column}" if not is_time else _DURATIONS.get((table, column), _shifted(table, column))
        columns.append(f"{value} AS {column}")
    return f"CREATE TEMP VIEW {table} AS SELECT {', '.join(columns)} FROM main.{table} r"
