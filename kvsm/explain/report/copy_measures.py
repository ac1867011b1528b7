"""Compute the figures of copies: of each rank, of the waits for them, and of what loads save."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.explain.report.figures import (
    ComputeFigures,
    CopyFigures,
    DirectionFigures,
    ElsewhereFigures,
    FetchFigures,
    RankFigures,
    RejectedFigures,
    WaitedFor,
    WaitFigures,
    WaitSplit,
)
from kvsm.explain.report.measures import ADMITTED, NOT_TOLD, SHOWN, Tables, spread_of
from kvsm.explain.tables.open_rows import CUT_OFF


def copy_figures(tables: Tables, late_least_ns: int, late_times: int) -> CopyFigures:
    """Compute the figures of each rank's copies.

    late_least_ns, late_times: a copy without a report is late after the longer of two times: `late_least_ns`,
        and `late_times` times the 99th percentile of the reported copies' latency.
    """
    within = tables.within("transfer")
    copies = tables.numbers(
        f"worker, coalesce(good, {_NO_REPORT}), coalesce(reported_ns - submitted_ns, {NOT_TOLD}),"
        f" coalesce(reported_ns, 0), coalesce(queued_ns, {NOT_TOLD}), coalesce(copied_ns, {NOT_TOLD}),"
        f" coalesce(noticed_ns, {NOT_TOLD}), direction = 'load'",
        f"FROM copies WHERE {within}",
    )
    known = copies[copies[:, 2] != NOT_TOLD, 2]
    late_ns = max(late_least_ns, late_times * (spread_of(known).p99_ns or 0))
    late = f"outcome IS NULL AND copies.submitted_ns <= {tables.ended_ns - late_ns}"
    missing = {
        rank: (count, since_ns)
        for rank, count, since_ns in tables.all(
            "SELECT worker, count(*), min(copies.submitted_ns) FROM copies JOIN transfers USING (transfer) "
            f"WHERE {within} AND reported IS NULL AND (outcome = 'lost' OR {late}) GROUP BY worker"
        )
    }
    cut_off = dict(
        tables.all(
            "SELECT worker, count(*) FROM copies JOIN transfers USING (transfer) "
            f"WHERE {within} AND reported IS NULL AND outcome = '{CUT_OFF}' GROUP BY worker"
        )
    )
    errors: dict[int, list[tuple[str, int]]] = {}
    for rank, error, times in tables.all(
        f"SELECT worker, error, count(*) AS times FROM copies WHERE {within} AND good = 0 "
        "AND error IS NOT NULL GROUP BY worker, error ORDER BY times DESC, error"
    ):
        errors.setdefault(rank, []).append((error, times))
    ended = tables.all(
        "SELECT direction || ' ' || outcome, count(*) FROM transfers "
        f"WHERE outcome IS NOT NULL AND target IS NULL AND {within} GROUP BY 1 ORDER BY 1"
    )
    ranks = [
        _rank_figures(
            rank,
            copies[copies[:, 0] == rank],
            missing.get(rank, (0, None)),
            cut_off.get(rank, 0),
            errors.get(rank, []),
            _directions(copies, rank),
        )
        for rank in np.unique(copies[:, 0]).tolist()
    ]
    measured, bytes_per_s = _rate(tables)
    return CopyFigures(
        late_ns=late_ns,
        ranks=tuple(ranks),
        transfers=dict(ended),
        measured=measured,
        bytes_per_s=bytes_per_s,
    )


LEAST_RATED = 30
"""A rate is estimated only from at least this many measured copies of a rank."""


def _rate(tables: Tables) -> tuple[int, int | None]:
    """Return the number of measured copies, and the rate of the fastest rank (bytes/s; None: unknown).

    The faster direction counts: memory that is not page-locked slows both.
    The rate is the difference in bytes divided by the difference in time between the medians of the largest
    third and the smallest third of the copies. So neither the time to start a copy nor a tail counts.
    """
    config = tables.log.config
    slot_bytes = config.block_bytes * config.blocks_per_chunk
    rows = tables.numbers(
        "worker, copies.direction = 'load', slots, copied_ns",
        "FROM copies JOIN transfers USING (transfer) WHERE copied_ns > 0 AND good AND source IS NULL"
        f" AND target IS NULL AND {tables.within('transfer')} ORDER BY slots",
    )
    rates = []
    for rank, is_load in np.unique(rows[:, :2], axis=0):
        own = rows[(rows[:, 0] == rank) & (rows[:, 1] == is_load)]
        third = len(own) // 3
        if len(own) >= LEAST_RATED:
            small, large = (np.median(part[:, 2:], axis=0) for part in (own[:third], own[-third:]))
            slots, copied_ns = large - small
            if slots > 0 and copied_ns > 0:
                rates.append(slots * slot_bytes * 1e9 / copied_ns)
    return len(rows), int(max(rates)) if slot_bytes and rates else None


TAIL_TIMES = 2
"""A copy is in the tail of its rank if it took at least this many times as long as 99 % of the copies of all
other ranks."""


def _directions(copies: NDArray[np.int64], rank: int) -> tuple[DirectionFigures, ...]:
    """The figures of a rank's copies by direction. copies: rows of `copy_figures`, of all ranks."""
    found = []
    for direction, is_load in (("store", 0), ("load", 1)):
        timed = copies[(copies[:, 7] == is_load) & (copies[:, 2] != NOT_TOLD)]
        of_rank, others = timed[timed[:, 0] == rank], timed[timed[:, 0] != rank, 2]
        own = of_rank[:, 2]
        if not len(own):
            continue
        figures = DirectionFigures(direction=direction, latency=spread_of(own))
        if len(others):
            tail_ns = TAIL_TIMES * (spread_of(others).p99_ns or 0)
            figures = msgspec.structs.replace(
                figures,
                tail=int((own >= tail_ns).sum()),
                episodes=_episodes(of_rank[own >= tail_ns]),
                tail_ns=tail_ns,
                others_tail=int((others >= tail_ns).sum()),
                others=len(others),
            )
        found.append(figures)
    return tuple(found)


def _episodes(copies: NDArray[np.int64]) -> int:
    """Return the number of groups of copies that were in flight together. copies: rows of `copy_figures`."""
    if not len(copies):
        return 0
    submitted, reported = copies[:, 3] - copies[:, 2], copies[:, 3]
    order = np.argsort(submitted)
    until = np.maximum.accumulate(reported[order])
    return 1 + int((submitted[order][1:] > until[:-1]).sum())


_NO_REPORT = 2
"""Replaces `good` of a copy without a report, in arrays of integers."""


def _rank_figures(
    rank: int,
    copies: NDArray[np.int64],
    missing: tuple[int, int | None],
    cut_off: int,
    errors: list[tuple[str, int]],
    directions: tuple[DirectionFigures, ...],
) -> RankFigures:
    good, reported_ns = copies[:, 1], copies[:, 3]
    latency, queued, copied, noticed = (
        spread_of(times[times != NOT_TOLD]) for times in copies[:, (2, 4, 5, 6)].T
    )
    reported = int((good != _NO_REPORT).sum())
    return RankFigures(
        rank=rank,
        copies=len(copies),
        reported=reported,
        failed=int((good == 0).sum()),
        missing=missing[0],
        missing_since_ns=missing[1],
        cut_off=cut_off,
        waiting=len(copies) - reported - missing[0] - cut_off,
        latency=latency,
        queued=queued,
        copied=copied,
        noticed=noticed,
        errors=tuple(errors[:SHOWN]),
        last_ns=int(reported_ns.max()) if reported else None,
        directions=directions,
    )


def wait_figures(tables: Tables) -> WaitFigures:
    """Compute how long requests waited, and for which transfers."""
    within = tables.within("arrived")
    lived, deferred, loading = tables.one(
        f"SELECT coalesce(sum(max(0, coalesce(finished_ns, {tables.ended_ns}) - arrived_ns)), 0),"
        f" coalesce(sum(deferred_ns), 0), coalesce(sum(loading_ns), 0) FROM requests WHERE {within}"
    )
    waited = f"coalesce(ended_ns, {tables.ended_ns}) - began_ns"
    where = f"state = 'DEFERRED' AND {tables.within('began')}"
    requests, longest = tables.one(
        f"SELECT count(DISTINCT request), coalesce(max({waited}), 0) FROM request_states WHERE {where}"
    )
    top = tables.all(
        f"SELECT transfer, count(DISTINCT request), sum({waited}) AS total FROM request_states "
        f"WHERE {where} GROUP BY transfer ORDER BY total DESC, transfer LIMIT {SHOWN}"
    )
    return WaitFigures(
        lived_ns=lived,
        deferred_ns=deferred,
        loading_ns=loading,
        deferred_split=_wait_split(tables, where),
        loading_split=_wait_split(tables, f"state = 'LOADING' AND {tables.within('began')}"),
        deferred=requests,
        longest_ns=longest,
        top=tuple([_waited_for(tables, *row) for row in top if row[0] is not None]),
    )


def _waited_for(tables: Tables, transfer: int, requests: int, waited_ns: int) -> WaitedFor:
    copies = tables.all(
        "SELECT direction, worker, reported_ns - submitted_ns FROM copies "
        f"WHERE transfer = {transfer} ORDER BY reported IS NOT NULL, reported DESC LIMIT 1"
    )
    direction, rank, rank_ns = copies[0] if copies else ("transfer", None, None)
    split = _wait_split(tables, f"state = 'DEFERRED' AND transfer = {transfer} AND {tables.within('began')}")
    return WaitedFor(transfer, direction, requests, waited_ns, rank, rank_ns, split)


def _wait_split(tables: Tables, stays: str) -> WaitSplit:
    """Split the waiting time of requests by what the last rank to report did meanwhile.

    stays: an SQL condition for rows of `request_states`.

    The rank's durations, added to the submission time, give when its copy began and ended. Only the part of
    the copy during the wait counts. If a rank measured how long it copied but not when it began, as on a GPU,
    the rest of the wait is unknown.
    """
    query = f"""
        WITH last AS (
            SELECT transfer, submitted_ns + queued_ns AS begun, submitted_ns + queued_ns + copied_ns AS done,
                coalesce(copied_ns, 0) AS copied_ns, max(reported)
            FROM copies WHERE reported IS NOT NULL GROUP BY transfer
        ), stay AS (
            SELECT began_ns, max(began_ns, coalesce(ended_ns, {tables.ended_ns})) AS ended_ns, begun, done,
                coalesce(copied_ns, 0) AS copied_ns
            FROM request_states LEFT JOIN last USING (transfer) WHERE {stays} AND began_ns IS NOT NULL
        )
        SELECT
            coalesce(sum(max(0, min(ended_ns, begun) - began_ns)), 0),
            coalesce(sum(CASE WHEN done IS NULL THEN min(ended_ns - began_ns, copied_ns)
                ELSE max(0, min(ended_ns, done) - max(began_ns, begun)) END), 0),
            coalesce(sum(max(0, ended_ns - max(began_ns, done))), 0),
            coalesce(sum(CASE WHEN done IS NULL THEN max(0, ended_ns - began_ns - copied_ns) END), 0)
        FROM stay
    """
    return WaitSplit(*tables.one(query))


RATE_TOKENS = 1000
"""Times to compute are given for this many tokens."""

LEAST_COMPUTED = 10
"""The time to compute is estimated only from at least this many requests."""


def compute_figures(tables: Tables) -> ComputeFigures:
    """Estimate how fast the engine computes prompts, from requests that had nothing to load.

    A request's first store after its admission contains the blocks that the engine has computed since. If the
    store has blocks of other requests too, one chunk is subtracted for each of these requests.
    """
    config = tables.log.config
    admitted = tables.all(
        "SELECT admitted, request, asked - on_device,"
        " (SELECT wall_ns FROM events WHERE event = admitted) FROM lookups"
        f" WHERE on_device IS NOT NULL AND on_host = 0 AND asked > on_device AND {ADMITTED}"
        f" AND {tables.within('admitted')}"
    )
    stores = tables.all(
        "SELECT transfer, owner.value, slots - json_array_length(requests) + 1, wall_ns"
        " FROM transfers, json_each(requests) AS owner"
        f" WHERE direction = 'store' AND source IS NULL AND wall_ns IS NOT NULL"
        f" AND {tables.within('transfer')}"
    )
    waiting: dict[str, tuple[int, int]] = {}
    times, tokens = [], []
    for _, request, blocks, wall_ns, is_store in _merged(admitted, stores):
        if not is_store:
            waiting[request] = blocks, wall_ns
        elif request in waiting:
            missed, since_ns = waiting.pop(request)
            computed = min(missed, blocks * config.blocks_per_chunk) * config.block_tokens
            if computed > 0:
                times.append(wall_ns - since_ns)
                tokens.append(computed)
    weights = np.array(tokens, dtype=np.int64)
    rates = np.array(times, dtype=np.int64) * RATE_TOKENS // weights
    known = len(times) >= LEAST_COMPUTED
    fast, usual, slow = _quartiles(rates, weights) if known else (None, None, None)
    return ComputeFigures(requests=len(times), tokens=sum(tokens), fast_ns=fast, usual_ns=usual, slow_ns=slow)


def _merged(
    admitted: Iterable[tuple[Any, ...]], stores: Iterable[tuple[Any, ...]]
) -> list[tuple[int, str, int, int, bool]]:
    """Admissions and stores in the order of their events: (event, request, blocks, time, whether a store)."""
    rows = [(event, request, blocks, ns, False) for event, request, blocks, ns in admitted]
    rows += [(transfer, request, slots, ns, True) for transfer, request, slots, ns in stores]
    return sorted(rows)


def _quartiles(values: NDArray[np.int64], weights: NDArray[np.int64]) -> tuple[int, int, int]:
    """Return the quartiles of values. weights: how often each value counts."""
    order = np.argsort(values)
    upto = np.cumsum(weights[order])
    first, middle, third = (
        int(values[order[np.searchsorted(upto, (int(upto[-1]) - 1) * part // 4, side="right")]])
        for part in (1, 2, 3)
    )
    return first, middle, third


def fetch_figures(tables: Tables, computing: ComputeFigures) -> tuple[FetchFigures, ...]:
    """Compute how long the copies took that brought requests their blocks, by place."""
    return tuple([found for place in _places(tables) if (found := _fetched(tables, place, computing)).copies])


def _places(tables: Tables) -> list[str]:
    rows = tables.all(
        f"SELECT source FROM transfers WHERE source IS NOT NULL AND {tables.within('transfer')}"
        f" GROUP BY 1 ORDER BY count(*) DESC, 1 LIMIT {SHOWN}"
    )
    return [_HOST, *[place for (place,) in rows]]


_HOST = "host"


def _fetched(tables: Tables, place: str, computing: ComputeFigures) -> FetchFigures:
    """Figures of the completed copies from a place.

    The time of a copy is what its slowest rank measured. If none measured it, it is the time
    from submission until a step noticed the end, without that step: the copy ended at some time during it.
    """
    which = "direction = 'load' AND target IS NULL" if place == _HOST else "source = ?"
    rows = tables.numbers(
        "ended_ns - submitted_ns, slots, max(1, coalesce(ended_step - submitted_step, 1)), coalesce((SELECT"
        f" max(queued_ns + copied_ns) FROM copies c WHERE c.transfer = t.transfer), {NOT_TOLD})",
        f"FROM transfers t WHERE {which} AND outcome = 'completed' AND submitted_ns IS NOT NULL"
        f" AND ended_ns IS NOT NULL AND {tables.within('transfer')}",
        *([] if place == _HOST else [place]),
    )
    took, slots, steps, measured = rows.T
    spent = np.where(measured == NOT_TOLD, took - took // steps, np.minimum(measured, took))
    config = tables.log.config
    tokens = slots * config.blocks_per_chunk * config.block_tokens
    slow_ns = computing.slow_ns if config.block_tokens else None
    compute_ns = None if slow_ns is None else tokens * slow_ns // RATE_TOKENS
    return FetchFigures(
        place=place,
        copies=len(rows),
        tokens=int(tokens.sum()),
        took=spread_of(took),
        spent_ns=int(spent.sum()),
        compute_ns=None if compute_ns is None else int(compute_ns.sum()),
        slower=0 if compute_ns is None else int((spent >= compute_ns).sum()),
    )


def rejected_figures(tables: Tables) -> tuple[RejectedFigures, ...]:
    """Count the rejected reports, by rank and reason."""
    rows = tables.all(
        "SELECT worker, reason, count(*) AS total FROM rejections "
        f"WHERE {tables.within('event')} GROUP BY worker, reason ORDER BY total DESC, worker, reason"
    )
    return tuple([RejectedFigures(*row) for row in rows])


def elsewhere_figures(tables: Tables) -> tuple[ElsewhereFigures, ...]:
    """Figures of the copies from and to other places than the device: the `SHOWN` busiest by direction."""
    return tuple(
        [
            _elsewhere(tables, direction, column, place)
            for direction, column in (("store", "source"), ("load", "target"))
            for (place,) in tables.all(
                f"SELECT {column} FROM transfers WHERE {column} IS NOT NULL AND {tables.within('transfer')}"
                f" GROUP BY 1 ORDER BY count(*) DESC, 1 LIMIT {SHOWN}"
            )
        ]
    )


def _elsewhere(tables: Tables, direction: str, column: str, place: str) -> ElsewhereFigures:
    copies = f"FROM transfers WHERE {column} = ? AND {tables.within('transfer')}"
    completed = f"{copies} AND outcome = 'completed'"
    known = f"{completed} AND ended_ns IS NOT NULL AND submitted_ns IS NOT NULL"
    [blocks] = tables.one(f"SELECT coalesce(sum(slots), 0) {completed}", place)
    ended = tables.all(
        f"SELECT outcome, count(*) {copies} AND outcome IS NOT NULL GROUP BY 1 ORDER BY 1", place
    )
    return ElsewhereFigures(
        place=place,
        direction=direction,
        blocks=blocks,
        ended=dict(ended),
        took=spread_of(tables.numbers("ended_ns - submitted_ns", known, place)[:, 0]),
    )
