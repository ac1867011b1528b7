"""Compute the figures of the engine: how its requests and processes ended, and whether its clock was set."""

from __future__ import annotations

import numpy as np

from kvsm.core.log import is_stop
from kvsm.events import LogOpened
from kvsm.explain.report.figures import (
    AbortFigures,
    ClockFigures,
    DeviceFigures,
    HandOverFigures,
    RequestFigures,
    RestartFigures,
)
from kvsm.explain.report.measures import BINS, SHOWN, Tables, shortest_run, spread_of
from kvsm.tiers.hand_over.leases import LeaseEnd


def request_figures(tables: Tables, overdue_least_ns: int, overdue_times: int) -> RequestFigures:
    """Compute how requests ended, and which did not.

    overdue_least_ns, overdue_times: a request without an end is overdue after the longer of two times:
        `overdue_least_ns`, and `overdue_times` times the longest life of a request that ended.
    """
    within, open_too = tables.within("arrived"), "finished IS NULL"
    total, ended, aborted, cut_off, preemptions, preempted, failed, longest = tables.one(
        "SELECT count(*), count(finished), coalesce(sum(aborted), 0), coalesce(sum(cut_off), 0),"
        " coalesce(sum(preemptions), 0), coalesce(sum(preemptions > 0), 0), coalesce(sum(failed_loads), 0),"
        f" coalesce(max((finished_ns - arrived_ns) * NOT cut_off), 0) FROM requests WHERE {within}"
    )
    overdue_ns = max(overdue_least_ns, overdue_times * longest)
    overdue = f"{open_too} AND {within} AND arrived_ns < {tables.ended_ns - overdue_ns}"
    names = tables.all(f"SELECT request FROM requests WHERE {overdue} ORDER BY arrived LIMIT {SHOWN}")
    number, running = tables.one(
        f"SELECT count(*), coalesce(sum(state = 'RUNNING'), 0) FROM requests WHERE {overdue}"
    )
    states = tables.all(
        f"SELECT state, count(*) FROM requests WHERE {open_too} AND {within} GROUP BY state ORDER BY state"
    )
    return RequestFigures(
        requests=total,
        finished=ended - cut_off,
        aborted=aborted,
        cut_off=cut_off,
        preemptions=preemptions,
        preempted=preempted,
        failed_loads=failed,
        longest_ns=longest,
        open=total - ended,
        overdue=number,
        overdue_running=running,
        overdue_ns=overdue_ns,
        oldest=tuple([name for [name] in names]),
        states=dict(states),
    )


def restart_figures(tables: Tables) -> RestartFigures:
    """Count the restarts, how the processes before them ended, and what was kept."""
    sums = tables.one(
        "SELECT count(*), coalesce(sum(kept), 0), coalesce(sum(storing + planned), 0),"
        f" coalesce(sum(transfers_cut_off), 0) FROM restarts WHERE {tables.within('event')}"
    )
    ended = tables.all(
        "SELECT last_end, count(*) AS times FROM restarts"
        f" WHERE last_end IS NOT NULL AND {tables.within('event')}"
        " GROUP BY last_end ORDER BY times DESC, last_end"
    )
    stopped = sum(times for how, times in ended if is_stop(how))
    return RestartFigures(
        killed=sum(times for _, times in ended) - stopped,
        stopped=stopped,
        ended=tuple([(how, times) for how, times in ended[:SHOWN]]),
        **dict(zip(("restarts", "kept", "lost", "transfers"), sums, strict=True)),
    )


def hand_over_figures(tables: Tables) -> HandOverFigures:
    """Count the hand-overs to other engines, by how they ended."""
    ended = dict(
        tables.all(
            "SELECT hand_over, count(*) FROM requests"
            f" WHERE hand_over IS NOT NULL AND {tables.within('finished')} GROUP BY hand_over"
        )
    )
    taken, not_needed = ended.pop(LeaseEnd.TAKEN.value, 0), ended.pop(LeaseEnd.NOT_NEEDED.value, 0)
    [held] = tables.one(
        "SELECT count(*) FROM requests WHERE held AND session IS NULL AND finished IS NULL"
        f" AND {tables.within('arrived')}"
    )
    return HandOverFigures(taken=taken, not_needed=not_needed, given_up=sum(ended.values()), held=held)


ABORTS_PART = 0.5
"""The share of all aborts that `AbortFigures` covers."""


def abort_figures(tables: Tables) -> AbortFigures | None:
    """Find the shortest time with half of all aborts; None: no request was aborted.

    Requests that ended in a gap of the log have no time, and are left out.
    """
    ended = f"finished_ns IS NOT NULL AND NOT cut_off AND {tables.within('finished')}"
    rows = tables.numbers(f"{tables.bin_of('finished_ns')}, aborted", f"FROM requests WHERE {ended}")
    aborts = np.bincount(rows[rows[:, 1] == 1, 0], minlength=BINS).astype(np.int64).tolist()
    run = shortest_run(aborts, ABORTS_PART)
    if run is None:
        return None
    began_ns, ended_ns = tables.bin_start_ns(run[0]), tables.bin_start_ns(run[1] + 1)
    during = f"{ended} AND finished_ns >= {began_ns} AND finished_ns < {ended_ns}"
    known = f"{during} AND aborted AND arrived_ns IS NOT NULL"
    ages = tables.numbers("finished_ns - arrived_ns", f"FROM requests WHERE {known}")
    [later] = tables.one(
        f"SELECT count(*) FROM requests WHERE arrived_ns >= {ended_ns} AND {tables.within('arrived')}"
    )
    return AbortFigures(
        began_ns=began_ns,
        ended_ns=min(ended_ns, tables.ended_ns),
        aborted=sum(aborts[run[0] : run[1] + 1]),
        ended=int(((rows[:, 0] >= run[0]) & (rows[:, 0] <= run[1])).sum()),
        age=spread_of(ages[:, 0]),
        later=later,
    )


def device_figures(tables: Tables, groups: int) -> DeviceFigures | None:
    """Compute how many device blocks requests hold at most when one is preempted; None: unknown.

    A request holds the blocks of its prompt, at most a block for each `block_tokens` steps since its arrival,
    and two that are not full.

    groups: number of KV cache groups.
    """
    config = tables.log.config
    [elsewhere] = tables.one("SELECT count(*) FROM transfers WHERE coalesce(source, target) IS NOT NULL")
    if groups > 1 or elsewhere or not config.block_tokens:
        return None
    preempted = tables.all(
        "SELECT min(event), step FROM events WHERE kind = 'RequestPreempted'"
        f" AND {tables.within('event')} GROUP BY step ORDER BY step"
    )
    late = preempted[len(preempted) // 2 :]
    if not late:
        return None
    stays = tables.numbers(
        f"s.began, coalesce(s.ended, {_NEVER}), r.asked + 2, coalesce(r.arrived_step, 0)",
        "FROM request_states s JOIN requests r ON r.request = s.request AND s.began >= r.arrived"
        " AND s.began <= coalesce(r.finished, s.began)"
        " WHERE s.state IN ('RUNNING', 'LOADING') AND r.asked IS NOT NULL",
    )
    stores = tables.numbers(
        f"submitted, coalesce(ended, {_NEVER}), slots * {config.blocks_per_chunk}",
        "FROM transfers WHERE direction = 'store' AND submitted IS NOT NULL",
    )
    held = []
    for event, step in late[:: -(-len(late) // SAMPLED_STEPS)]:
        running = stays[(stays[:, 0] < event) & (stays[:, 1] >= event)]
        output = np.maximum(0, step - running[:, 3]) // config.block_tokens
        copied = stores[(stores[:, 0] < event) & (stores[:, 1] >= event), 2]
        held.append(int(running[:, 2].sum() + output.sum() + copied.sum()))
    return DeviceFigures(steps=len(preempted), held=int(np.median(held)))


SAMPLED_STEPS = 200
"""At most this many steps with a preemption are examined."""

_NEVER = 1 << 62
"""Placeholder for a missing event number in arrays of integers."""


def clock_figures(tables: Tables) -> ClockFigures:
    """Return the jumps of the clock in the window."""
    jumps = [jump for jump in tables.log.clock_jumps if tables.first < jump.event <= tables.last]
    largest = max(jumps, key=lambda jump: abs(jump.by_ns), default=None)
    return ClockFigures(jumps=len(jumps), largest=largest)


def cold_reasons(tables: Tables) -> tuple[str, ...]:
    """Return why the process that began the log did not take over the blocks of its predecessor, a line
    each."""
    for event in tables.log.events(tables.first, tables.first):
        if isinstance(event, LogOpened):
            return event.cold
    return ()
