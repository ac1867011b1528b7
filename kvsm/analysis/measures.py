"""What fills the figures of a report: queries over the tables of a log, cut to one window of events.

Each function asks the tables a few times in SQL, and gives one struct of `figures.py`. Nothing here judges:
`findings.py` does.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import accumulate
from typing import Any

from kvsm.analysis.figures import (
    BurstFigures,
    CopyFigures,
    EvictionFigures,
    GroupFigures,
    HitFigures,
    PoolFigures,
    RankFigures,
    RecomputedFigures,
    RejectedFigures,
    RequestFigures,
    ResetFigures,
    SkipFigures,
    Spread,
    StopFigures,
    WaitedFor,
    WaitFigures,
)
from kvsm.analysis.opened import OpenedLog
from kvsm.analysis.rows import Gone
from kvsm.kv_events import GROUP_INDEX_BYTES
from kvsm.replay.window import Window

BINS = 48
"""Points of a sparkline: the time of the window in equal parts."""

SHOWN = 3
"""How many names, errors or transfers a figure keeps at most."""

GROUP_DIGITS = 2 * GROUP_INDEX_BYTES
"""A key in hex ends with this many digits of its KV cache group."""


class Tables:
    """The tables of a log, cut to a window.

    first, last: its events. began_ns, ended_ns: their times.
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
        """A condition in SQL: the column `event` is in the window."""
        return "1" if self.whole else f"{event} BETWEEN {self.first} AND {self.last}"

    def all(self, query: str) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        return self.log.sql(query).fetchall()

    def one(self, query: str) -> tuple[Any, ...]:
        """The only row of a query."""
        row: tuple[Any, ...] = self.log.sql(query).fetchone()
        return row

    def bin_of(self, wall_ns: str) -> str:
        """In SQL: which part of the window's time the column `wall_ns` is in, from 0 to `BINS` - 1."""
        span = max(1, self.ended_ns - self.began_ns + 1)
        return f"max(0, min({BINS - 1}, ({wall_ns} - {self.began_ns}) / {-(-span // BINS)}))"

    def bin_start_ns(self, place: int) -> int:
        """When a part of the window's time begins (ns)."""
        span = max(1, self.ended_ns - self.began_ns + 1)
        return int(self.began_ns + place * -(-span // BINS))

    def spread(self, value: str, table: str, where: str, weight: str = "1") -> Spread:
        """How the values of an expression are spread. weight: how many things a row stands for."""
        total, most = self.one(
            f"SELECT sum({weight}), max({value}) FROM {table} WHERE {where} AND {value} IS NOT NULL"
        )
        if not total:
            return Spread(0, None, None, None)
        upto = f"sum({weight}) OVER (ORDER BY {value} ROWS UNBOUNDED PRECEDING)"
        middle, high = [(total - 1) * part // 100 for part in (50, 99)]
        p50, p99 = self.one(
            f"SELECT min(value) FILTER (WHERE upto > {middle}), min(value) FILTER (WHERE upto > {high})"
            f" FROM (SELECT {value} AS value, {upto} AS upto FROM {table}"
            f" WHERE {where} AND {value} IS NOT NULL)"
        )
        return Spread(total, p50, p99, most)


def hit_figures(tables: Tables) -> HitFigures:
    """What lookups found, in numbers and over time. A request counts once: see `RequestRow.asked`."""
    lookups, stopped = tables.one(
        f"SELECT count(*), count(missed) FROM lookups WHERE {tables.within('event')}"
    )
    told = f"on_device IS NOT NULL AND {tables.within('arrived')}"
    asked, on_device, on_host = tables.one(
        f"SELECT sum(asked), sum(on_device), sum(on_host) FROM requests WHERE {told}"
    )
    if asked is None:
        part, hits, source = "count(*)", "sum(hit_slots > 0)", f"lookups WHERE {tables.within('event')}"
    else:
        part, hits, source = "sum(asked)", "sum(on_device + on_host)", f"requests WHERE {told}"
    place = tables.bin_of("wall_ns" if asked is None else "arrived_ns")
    over_time: list[float | None] = [None] * BINS
    for when, whole, found in tables.all(
        f"SELECT {place} AS place, {part}, {hits} FROM {source} GROUP BY place"
    ):
        if when is not None and whole:
            over_time[when] = found / whole
    return HitFigures(
        lookups=lookups,
        stopped=stopped,
        asked=asked,
        on_device=on_device,
        on_host=on_host,
        block_tokens=tables.log.config.block_tokens,
        over_time=tuple(over_time),
    )


def stop_figures(tables: Tables) -> tuple[StopFigures, ...]:
    """Why prefixes stopped, the most frequent reason first."""
    rows = tables.all(
        "SELECT why, count(*) AS lookups, sum(asked - on_device - on_host) FROM lookups "
        f"WHERE why IS NOT NULL AND {tables.within('event')} GROUP BY why ORDER BY lookups DESC, why"
    )
    return tuple([StopFigures(*row) for row in rows])


def recomputed_figures(tables: Tables, apart_ns: int) -> RecomputedFigures:
    """How often a block was computed again because it had never been stored."""
    lookups, keys = tables.one(
        "SELECT count(*), count(DISTINCT missed) FROM ("
        " SELECT missed, wall_ns - lag(wall_ns) OVER (PARTITION BY missed ORDER BY event) AS apart"
        f" FROM lookups WHERE why = '{Gone.NEVER_STORED}' AND {tables.within('event')}"
        f") WHERE apart >= {apart_ns}"
    )
    return RecomputedFigures(lookups, keys, apart_ns)


def eviction_figures(tables: Tables) -> EvictionFigures:
    """How old evicted blocks were, and how many of them were wanted again."""
    where = f"why = '{Gone.EVICTED}' AND {tables.within('gone')}"
    evicted, unread, wanted = tables.one(
        "SELECT coalesce(sum(blocks), 0), coalesce(sum(blocks * (hits = 0)), 0),"
        f" coalesce(sum(blocks * (wanted IS NOT NULL)), 0) FROM block_runs WHERE {where}"
    )
    place, over_time = tables.bin_of("gone_ns"), [0] * BINS
    wanted_where = f"{where} AND wanted IS NOT NULL"
    for part, blocks in tables.all(
        f"SELECT {place} AS place, sum(blocks) FROM block_runs WHERE {wanted_where} GROUP BY place"
    ):
        over_time[part or 0] += blocks
    return EvictionFigures(
        evicted=evicted,
        unread=unread,
        wanted=wanted,
        age=tables.spread("gone_ns - stored_ns", "block_runs", where, "blocks"),
        until_wanted=tables.spread("wanted_ns - gone_ns", "block_runs", wanted_where, "blocks"),
        over_time=tuple(over_time),
        burst=_burst(tables, over_time, wanted_where),
    )


BURST_PART = 0.7
"""Part of the wanted blocks that a burst holds."""


def shortest_run(counts: list[int], part: float) -> tuple[int, int] | None:
    """(first, last) of the shortest run of places that holds this part of the sum. None if the sum is 0."""
    needed, total, begin, best = part * sum(counts), 0, 0, None
    for end, count in enumerate(counts):
        total += count
        while total - counts[begin] >= needed and begin < end:
            total -= counts[begin]
            begin += 1
        if total and total >= needed and (best is None or end - begin < best[1] - best[0]):
            best = begin, end
    return best


def _burst(tables: Tables, over_time: list[int], where: str) -> BurstFigures | None:
    run = shortest_run(over_time, BURST_PART)
    if run is None:
        return None
    began_ns, ended_ns = tables.bin_start_ns(run[0]), tables.bin_start_ns(run[1] + 1)
    during = f"{where} AND gone_ns >= {began_ns} AND gone_ns < {ended_ns}"
    evictors: Counter[str] = Counter()
    for requests, blocks in tables.all(
        f"SELECT gone_for_requests, sum(blocks) FROM block_runs WHERE {during} GROUP BY gone_for_requests"
    ):
        evictors.update(dict.fromkeys(_names(requests), blocks))
    return BurstFigures(
        began_ns,
        min(ended_ns, tables.ended_ns),
        sum(over_time[run[0] : run[1] + 1]),
        len(evictors),
        len(evictors) - len(_read_again(tables, set(evictors))),
        tuple([name for name, _ in evictors.most_common(SHOWN)]),
    )


def _names(requests: str | None) -> list[str]:
    """The requests of a JSON list in a table."""
    names: list[str] = json.loads(requests) if requests else []
    return names


def _read_again(tables: Tables, requests: set[str]) -> set[str]:
    """Which of the requests have stored a block that was ever hit."""
    found = tables.all("SELECT DISTINCT requests FROM block_runs WHERE hits > 0")
    return requests.intersection(name for [names] in found for name in _names(names))


def group_figures(tables: Tables) -> tuple[GroupFigures, ...]:
    """Blocks by KV cache group."""
    stops = dict(
        tables.all(
            f"SELECT substr(missed, -{GROUP_DIGITS}) AS part, count(*) FROM lookups "
            f"WHERE why = '{Gone.EVICTED}' AND {tables.within('event')} GROUP BY part"
        )
    )
    evicted = f"(why = '{Gone.EVICTED}')"
    rows = tables.all(
        f"SELECT hex(substr(s.keys, 1 + s.key_bytes - {GROUP_INDEX_BYTES}, {GROUP_INDEX_BYTES})) AS part,"
        f" sum(blocks * (stored IS NOT NULL)), sum(blocks * hits), coalesce(sum(blocks * {evicted}), 0),"
        f" coalesce(sum(blocks * ({evicted} AND hits = 0)), 0)"
        " FROM block_runs r JOIN _stores s ON s.life = r.store"
        f" WHERE {tables.within('transfer')} AND s.key_bytes >= {GROUP_INDEX_BYTES}"
        " GROUP BY part ORDER BY part"
    )
    return tuple(
        [
            GroupFigures(int(part, 16), stored, hits, gone, unread, stops.get(part.lower(), 0))
            for part, stored, hits, gone, unread in rows
            if part.startswith(_SMALL_GROUP)
        ]
    )


_SMALL_GROUP = "00" * (GROUP_INDEX_BYTES - 1)
"""How a key's group begins, if the key has one: no model has 256 groups."""


def copy_figures(tables: Tables, late_least_ns: int, late_times: int) -> CopyFigures:
    """The copies of each rank.

    late_least_ns, late_times: a copy without a report is late after this time, and after this many times as
        long as 99 % of the reported copies took.
    """
    within, took = tables.within("transfer"), "reported_ns - submitted_ns"
    usual = tables.spread(took, "copies", within).p99_ns or 0
    late_ns = max(late_least_ns, late_times * usual)
    ended = tables.all(
        "SELECT direction || ' ' || outcome, count(*) FROM transfers "
        f"WHERE outcome IS NOT NULL AND {within} GROUP BY 1 ORDER BY 1"
    )
    ranks = [rank for [rank] in tables.all(f"SELECT DISTINCT worker FROM copies WHERE {within} ORDER BY 1")]
    figures = tuple([_rank_figures(tables, rank, late_ns) for rank in ranks])
    return CopyFigures(late_ns=late_ns, ranks=figures, transfers=dict(ended))


def _rank_figures(tables: Tables, rank: int, late_ns: int) -> RankFigures:
    where = f"worker = {rank} AND {tables.within('transfer')}"
    copies, reported, failed, last_ns = tables.one(
        f"SELECT count(*), count(reported), sum(good = 0), max(reported_ns) FROM copies WHERE {where}"
    )
    late = f"outcome IS NULL AND copies.submitted_ns <= {tables.ended_ns - late_ns}"
    [missing] = tables.one(
        "SELECT count(*) FROM copies JOIN transfers USING (transfer) "
        f"WHERE {where} AND reported IS NULL AND (outcome = 'lost' OR {late})"
    )
    errors = tables.all(
        f"SELECT error, count(*) AS times FROM copies WHERE {where} AND good = 0 AND error != '' "
        f"GROUP BY error ORDER BY times DESC, error LIMIT {SHOWN}"
    )
    return RankFigures(
        rank=rank,
        copies=copies,
        reported=reported,
        failed=failed or 0,
        missing=missing,
        waiting=copies - reported - missing,
        latency=tables.spread("reported_ns - submitted_ns", "copies", where),
        errors=tuple(errors),
        last_ns=last_ns,
    )


def wait_figures(tables: Tables) -> WaitFigures:
    """How long requests waited, and for what."""
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
    return WaitedFor(transfer, direction, requests, waited_ns, rank, rank_ns)


def pool_figures(tables: Tables) -> PoolFigures:
    """How the slots of the host pool were used."""
    slots, within = tables.log.config.host_blocks, tables.within("event")
    samples, free, pinned, mean, storing, quarantined, retired = tables.one(
        "SELECT count(*), coalesce(min(free), 0), coalesce(max(pinned), 0), coalesce(avg(pinned), 0.0),"
        " coalesce(max(storing), 0), coalesce(max(quarantined), 0), coalesce(max(retired), 0)"
        f" FROM occupancy WHERE {within}"
    )
    place = tables.bin_of("wall_ns")
    used_over_time: list[float | None] = [None] * BINS
    pinned_over_time: list[float | None] = [None] * BINS
    for part, least_free, most_pinned in tables.all(
        f"SELECT {place} AS place, min(free), max(pinned) FROM occupancy WHERE {within} GROUP BY place"
    ):
        used_over_time[part] = (slots - least_free) / slots
        pinned_over_time[part] = most_pinned / slots
    return PoolFigures(
        slots=slots,
        samples=samples,
        used=slots - free if samples else 0,
        pinned=pinned,
        pinned_mean=mean,
        storing=storing,
        quarantined=quarantined,
        retired=retired,
        used_over_time=_held(used_over_time),
        pinned_over_time=_held(pinned_over_time),
    )


def _held(samples: list[float | None]) -> tuple[float | None, ...]:
    """Samples over time; where there is none, the one before it still holds."""
    return tuple(accumulate(samples, lambda before, now: before if now is None else now))


def request_figures(tables: Tables, overdue_least_ns: int, overdue_times: int) -> RequestFigures:
    """How requests ended, and which did not.

    overdue_least_ns, overdue_times: a request without an end is overdue after this time, and after this many
        times as long as the longest request that ended took.
    """
    within, open_too = tables.within("arrived"), "finished IS NULL"
    total, finished, aborted, preemptions, preempted, failed, longest = tables.one(
        "SELECT count(*), count(finished), coalesce(sum(aborted), 0), coalesce(sum(preemptions), 0),"
        " coalesce(sum(preemptions > 0), 0), coalesce(sum(failed_loads), 0),"
        f" coalesce(max(finished_ns - arrived_ns), 0) FROM requests WHERE {within}"
    )
    overdue_ns = max(overdue_least_ns, overdue_times * longest)
    overdue = f"{open_too} AND {within} AND arrived_ns < {tables.ended_ns - overdue_ns}"
    names = tables.all(f"SELECT request FROM requests WHERE {overdue} ORDER BY arrived LIMIT {SHOWN}")
    [number] = tables.one(f"SELECT count(*) FROM requests WHERE {overdue}")
    states = tables.all(
        f"SELECT state, count(*) FROM requests WHERE {open_too} AND {within} GROUP BY state ORDER BY state"
    )
    return RequestFigures(
        requests=total,
        finished=finished,
        aborted=aborted,
        preemptions=preemptions,
        preempted=preempted,
        failed_loads=failed,
        longest_ns=longest,
        open=total - finished,
        overdue=number,
        overdue_ns=overdue_ns,
        oldest=tuple([name for [name] in names]),
        states=dict(states),
    )


def skip_figures(tables: Tables) -> tuple[SkipFigures, ...]:
    """Offered blocks that were not stored, by reason."""
    rows = tables.all(
        f"SELECT reason, sum(blocks) AS total FROM skips WHERE {tables.within('event')} "
        "GROUP BY reason ORDER BY total DESC, reason"
    )
    return tuple([SkipFigures(*row) for row in rows])


def reset_figures(tables: Tables) -> ResetFigures:
    """Resets that dropped keys."""
    found = tables.one(
        f"SELECT count(*), coalesce(sum(keys), 0) FROM resets WHERE keys > 0 AND {tables.within('event')}"
    )
    return ResetFigures(*found)


def rejected_figures(tables: Tables) -> tuple[RejectedFigures, ...]:
    """Reports that changed nothing, by rank and reason."""
    rows = tables.all(
        "SELECT worker, reason, count(*) AS total FROM rejections "
        f"WHERE {tables.within('event')} GROUP BY worker, reason ORDER BY total DESC, worker, reason"
    )
    return tuple([RejectedFigures(*row) for row in rows])


def stored_blocks(tables: Tables) -> int:
    """Blocks whose store ended well."""
    [stored] = tables.one(
        "SELECT coalesce(sum(blocks), 0) FROM block_runs"
        f" WHERE stored IS NOT NULL AND {tables.within('transfer')}"
    )
    return int(stored)
