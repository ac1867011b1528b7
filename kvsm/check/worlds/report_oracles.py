"""A second count of those figures of `kvsm report` that are counts, numerators of shares, or sums of times.

Each entry of `REPORT_ORACLES` has a figure as the report computes it from the tables, and the same figure
counted from a `PastLog`. Not compared: figures that choose or estimate (bursts, falls, floods, tails, rates,
remedies), and sparklines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvsm import events as ev
from kvsm.check.worlds.past_blocks import PastAnswer
from kvsm.check.worlds.past_log import PastLog
from kvsm.check.worlds.past_transfers import COMPLETED, CUT_OFF, LOST, PastTransfer
from kvsm.check.worlds.table_oracles import TABLE_ORACLES
from kvsm.errors import PropertyBroken
from kvsm.explain.report import cache_measures, copy_measures, engine_measures
from kvsm.explain.report.copy_detectors import LATE_LEAST_NS, LATE_TIMES
from kvsm.explain.report.engine_detectors import OVERDUE_LEAST_NS, OVERDUE_TIMES
from kvsm.explain.report.figures import Spread
from kvsm.explain.report.measures import Tables
from kvsm.explain.tables.row_kinds import TABLES
from kvsm.ids import to_list
from kvsm.properties import Property

_Figure = Callable[[Any], Any]


def _rows(past: PastLog, table: str) -> list[dict[str, Any]]:
    """The rows of a table as its oracle counts them: column -> value."""
    return [dict(zip(TABLES[table].__struct_fields__, row)) for row in TABLE_ORACLES[table](past)]


def _spread(values: Iterable[int]) -> Spread:
    ordered = sorted(values)
    if not ordered:
        return Spread(0, None, None, None)
    middle, high = (ordered[(len(ordered) - 1) * part // 100] for part in (50, 99))
    return Spread(len(ordered), middle, high, ordered[-1])


def _firsts(past: PastLog) -> list[PastAnswer]:
    """The answers with which requests were admitted for the first time."""
    return [one for one in past.answers if one.admitted is not None and not one.admitted.resumed]


def _hits(tables: Tables) -> tuple[Any, ...]:
    found = cache_measures.hit_figures(tables)
    return found.lookups, found.stopped, found.asked or 0, found.on_device or 0, found.on_host or 0


def _hits_again(past: PastLog) -> tuple[Any, ...]:
    firsts = _firsts(past)
    given = [(one.asked, one.on_device, one.on_host) for first in firsts if (one := first.admitted)]
    counted = [numbers for numbers in given if None not in numbers]
    stopped = sum(one.event.missed is not None for one in firsts)
    return len(firsts), stopped, *(map(sum, zip(*counted)) if counted else (0, 0, 0))


def _stops(tables: Tables) -> dict[str, int]:
    return {stop.why: stop.lookups for stop in cache_measures.stop_figures(tables)}


def _evictions(tables: Tables) -> tuple[Any, ...]:
    found = cache_measures.eviction_figures(tables)
    return found.evicted, found.unread, found.wanted, found.age, found.until_wanted


def _evictions_again(past: PastLog) -> tuple[Any, ...]:
    assert past.answers is not None  # They note who wanted a block.
    evicted = [(block, block.gone.wall_ns) for block in past.blocks if block.gone and block.evictor]
    waits = [block.wanted.wall_ns - gone_ns for block, gone_ns in evicted if block.wanted is not None]
    ages = [gone_ns - block.store.ended.wall_ns for block, gone_ns in evicted if block.store.ended]
    unread = sum(not block.hits for block, _ in evicted)
    return len(evicted), unread, len(waits), _spread(ages), _spread(waits)


def _groups(tables: Tables) -> list[tuple[int, ...]]:
    found = cache_measures.group_figures(tables)
    return [(one.group, one.stored, one.hits, one.evicted, one.unread, one.stops) for one in found]


def _groups_again(past: PastLog) -> list[tuple[int, ...]]:
    digits, counts = cache_measures.GROUP_DIGITS, dict[int, list[int]]()
    for block in past.blocks:
        if 2 * len(block.key) >= digits:
            figures = counts.setdefault(int(block.key.hex()[-digits:], 16), [0] * 5)
            evicted = block.evictor is not None
            figures[0] += block.store.outcome == COMPLETED
            figures[1] += len(block.hits)
            figures[2] += evicted
            figures[3] += evicted and not block.hits
    for answer in _firsts(past):
        key = answer.event.missed or b""
        if answer.why == "evicted" and 2 * len(key) >= digits:
            counts[int(key.hex()[-digits:], 16)][4] += 1
    small = {group: figures for group, figures in counts.items() if group < 256}
    return [(group, *small[group]) for group in sorted(small)]


def _pool(tables: Tables) -> tuple[Any, ...]:
    found = cache_measures.pool_figures(tables)
    most = found.used, found.pinned, found.storing, found.quarantined, found.retired
    return found.samples, *most, found.pinned_mean


def _pool_again(past: PastLog) -> tuple[Any, ...]:
    rows = _rows(past, "occupancy")
    names = ("pinned", "storing", "quarantined", "retired")
    most = [max(row[name] for row in rows) for name in names]
    used = past.config.host_blocks - min(row["free"] for row in rows)
    return len(rows), used, *most, sum(row["pinned"] for row in rows) / len(rows)


def _copies(tables: Tables) -> tuple[Any, ...]:
    found = copy_measures.copy_figures(tables, LATE_LEAST_NS, LATE_TIMES)
    ranks = [
        (
            *(rank.rank, rank.copies, rank.reported, rank.failed, rank.cut_off),
            *(rank.latency, rank.queued, rank.copied, rank.noticed, rank.last_ns),
        )
        for rank in found.ranks
    ]
    return found.transfers, ranks


def _copies_again(past: PastLog) -> tuple[Any, ...]:
    rows, ranks = _rows(past, "copies"), []
    cut = {number for number, transfer in past.transfers.items() if transfer.outcome == CUT_OFF}
    for rank in sorted({row["worker"] for row in rows}):
        own = [row for row in rows if row["worker"] == rank]
        done = [row for row in own if row["reported"] is not None]
        spreads = [
            _spread(row[name] for row in done if row[name] is not None)
            for name in ("queued_ns", "copied_ns", "noticed_ns")
        ]
        latency = _spread(row["reported_ns"] - row["submitted_ns"] for row in done)
        failed = sum(not row["good"] for row in done)
        silent = sum(row["reported"] is None and row["transfer"] in cut for row in own)
        last_ns = max((row["reported_ns"] for row in done), default=None)
        ranks.append((rank, len(own), len(done), failed, silent, latency, *spreads, last_ns))
    kinds = [
        f"{one.direction} {one.outcome}"
        for one in past.transfers.values()
        if one.outcome is not None and not getattr(one.plan, "target", "")
    ]
    return dict(Counter(kinds)), ranks


def _missing(tables: Tables) -> dict[int, int]:
    found = copy_measures.copy_figures(tables, LATE_LEAST_NS, LATE_TIMES)
    return {rank.rank: rank.missing for rank in found.ranks if rank.missing}


def _missing_again(past: PastLog) -> dict[int, int]:
    lost = [one for one in past.transfers.values() if one.outcome == LOST]
    ranks = range(past.config.workers)
    return dict(Counter(rank for one in lost for rank in ranks if rank not in one.reports))


def _requests(tables: Tables) -> tuple[Any, ...]:
    found = engine_measures.request_figures(tables, OVERDUE_LEAST_NS, OVERDUE_TIMES)
    ends = found.requests, found.finished, found.aborted, found.cut_off, found.open
    return *ends, found.preemptions, found.preempted, found.failed_loads, found.longest_ns


def _requests_again(past: PastLog) -> tuple[Any, ...]:
    rows = _rows(past, "requests")
    over = [row for row in rows if row["finished"] is not None]
    own = [row for row in over if not row["cut_off"]]
    lives = [row["finished_ns"] - row["arrived_ns"] for row in own]
    return (
        len(rows),
        len(own),
        sum(row["aborted"] for row in rows),
        len(over) - len(own),
        len(rows) - len(over),
        sum(isinstance(event, ev.RequestPreempted) for event in past.log),
        sum(row["preemptions"] > 0 for row in rows),
        sum(row["failed_loads"] for row in rows),
        max([0 if len(own) < len(rows) else -(1 << 63), *lives]) if rows else 0,
    )


def _waits(tables: Tables) -> tuple[int, ...]:
    found = copy_measures.wait_figures(tables)
    return found.lived_ns, found.deferred_ns, found.loading_ns, found.deferred


def _waits_again(past: PastLog) -> tuple[int, ...]:
    rows, last_ns = _rows(past, "requests"), past.log[-1].wall_ns
    lives = [
        (last_ns if row["finished_ns"] is None else row["finished_ns"]) - row["arrived_ns"] for row in rows
    ]
    names = {wait.began.request for wait in past.waits}
    sums = [sum(row[name] for row in rows) for name in ("deferred_ns", "loading_ns")]
    return sum(max(0, life) for life in lives), *sums, len(names)


def _restarts(tables: Tables) -> tuple[int, ...]:
    found = engine_measures.restart_figures(tables)
    return found.restarts, found.killed + found.stopped, found.kept, found.lost, found.transfers


def _restarts_again(past: PastLog) -> tuple[int, ...]:
    restarts = [event for event in past.log if isinstance(event, ev.Restarted)]
    kept = sum(block.is_stored_at(event.seq - 1) for block in past.blocks for event in restarts)
    lost = sum(block.why == "restart" for block in past.blocks)
    cut = sum(transfer.outcome == CUT_OFF for transfer in past.transfers.values())
    return len(restarts), sum(bool(event.ended) for event in restarts), kept, lost, cut


def _elsewhere(tables: Tables) -> dict[tuple[str, str], tuple[int, dict[str, int]]]:
    found = copy_measures.elsewhere_figures(tables)
    return {(one.direction, one.place): (one.blocks, one.ended) for one in found}


def _elsewhere_again(past: PastLog) -> dict[tuple[str, str], tuple[int, dict[str, int]]]:
    places = dict[tuple[str, str], list[PastTransfer]]()
    for transfer in past.transfers.values():
        place = getattr(transfer.plan, "source" if transfer.is_store else "target")
        if place:
            places.setdefault((transfer.direction, place), []).append(transfer)
    return {
        where: (
            sum(len(one.slots) for one in copies if one.outcome == COMPLETED),
            dict(Counter(one.outcome for one in copies if one.outcome is not None)),
        )
        for where, copies in places.items()
    }


def _skips_again(past: PastLog) -> dict[str, int]:
    skips = Counter[str]()
    for event in past.log:
        if isinstance(event, ev.StoreSkipped):
            skips[event.reason.value] += len(event.keys)
    return dict(skips)


def _rejected_again(past: PastLog) -> dict[tuple[int, str], int]:
    rejected = [event for event in past.log if isinstance(event, ev.ReportRejected)]
    return dict(Counter((event.worker, event.reason.value) for event in rejected))


def _resets_again(past: PastLog) -> tuple[int, int]:
    ended = Counter(block.gone.seq for block in past.blocks if block.gone and block.why == "reset")
    return len(ended), ended.total()


def _held_again(past: PastLog) -> int:
    """Requests that hold blocks for another engine, and have not ended."""
    holding = [one for one in past.requests if not one.target and one.finished is None]
    matches = [(event.asked, to_list(event.slots)) for one in holding for event in one.of_kind(ev.HitMatched)]
    return sum(asked == 0 and len(slots) > 0 for asked, slots in matches)


REPORT_ORACLES: Mapping[str, tuple[_Figure, _Figure]] = {
    "hits": (_hits, _hits_again),
    "stops": (_stops, lambda past: dict(Counter(one.why for one in _firsts(past) if one.why))),
    "stored": (
        cache_measures.stored_blocks,
        lambda past: sum(block.store.outcome == COMPLETED for block in past.blocks),
    ),
    "evictions": (_evictions, _evictions_again),
    "groups": (_groups, _groups_again),
    "pool": (_pool, _pool_again),
    "copies": (_copies, _copies_again),
    "missing reports": (_missing, _missing_again),
    "requests": (_requests, _requests_again),
    "waits": (_waits, _waits_again),
    "restarts": (_restarts, _restarts_again),
    "elsewhere": (_elsewhere, _elsewhere_again),
    "skips": (
        lambda tables: {one.reason: one.blocks for one in cache_measures.skip_figures(tables)},
        _skips_again,
    ),
    "rejected reports": (
        lambda tables: {
            (one.rank, one.reason): one.reports for one in copy_measures.rejected_figures(tables)
        },
        _rejected_again,
    ),
    "resets": (
        lambda tables: (
            cache_measures.reset_figures(tables).resets,
            cache_measures.reset_figures(tables).keys,
        ),
        _resets_again,
    ),
    "held": (lambda tables: engine_measures.hand_over_figures(tables).held, _held_again),
}
"""Figure -> (from the tables, from the log)."""


def check_report(tables: Tables, past: PastLog) -> None:
    """Compare the figures of a report of a log at rest with the second count. Raises `PropertyBroken`."""
    for name, (figure, oracle) in REPORT_ORACLES.items():
        value, counted = figure(tables), oracle(past)
        if value != counted:
            message = f"the report says {value} for {name}, but a second count gives {counted}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
