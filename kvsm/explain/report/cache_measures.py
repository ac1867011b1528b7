"""Compute what a report says about hits, evictions, floods and the pool, from the tables of a log.

Each function returns structs of `figures.py`. `cache_detectors.py` judges the figures.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kvsm.core.kv_events import GROUP_INDEX_BYTES
from kvsm.explain.report.figures import (
    BurstFigures,
    EvictionFigures,
    FallFigures,
    GroupFigures,
    HitFigures,
    PoolFigures,
    RecomputedFigures,
    ResetFigures,
    SkipFigures,
    StopFigures,
)
from kvsm.explain.report.measures import ADMITTED, BINS, NOT_TOLD, SHOWN, Tables, shortest_run, spread_of
from kvsm.explain.tables.row_kinds import Gone

GROUP_DIGITS = 2 * GROUP_INDEX_BYTES
"""Number of hex digits at the end of a key that are the index of its KV cache group."""


def hit_figures(tables: Tables) -> HitFigures:
    """Compute which blocks requests found when they were first admitted, in total and over time."""
    where = f"{ADMITTED} AND {tables.within('admitted')}"
    lookups, stopped = tables.one(f"SELECT count(*), count(missed) FROM lookups WHERE {where}")
    known = f"FROM lookups WHERE asked + on_device + on_host IS NOT NULL AND {where}"
    asked, on_device, on_host = tables.one(f"SELECT sum(asked), sum(on_device), sum(on_host) {known}")
    if asked is None:
        part, hits, source = "count(*)", "sum(hit_slots > 0)", f"FROM lookups WHERE {where}"
    else:
        part, hits, source = "sum(asked)", "sum(on_device + on_host)", known
    over_time: list[float | None] = [None] * BINS
    for when, whole, found in tables.all(
        f"SELECT {tables.bin_of('wall_ns')} AS place, {part}, {hits} {source} GROUP BY place"
    ):
        if whole:
            over_time[when] = found / whole
    return HitFigures(
        lookups=lookups,
        stopped=stopped,
        asked=asked,
        on_device=on_device,
        on_host=on_host,
        block_tokens=tables.log.config.block_tokens,
        over_time=tuple(over_time),
        fall=_fall(tables),
    )


FALL_LEAST = 20
"""A fall needs at least this many lookups before and after it."""


def _fall(tables: Tables) -> FallFigures | None:
    """Find the admission that best splits the lookups into many hits before it and few hits after it."""
    rows = tables.numbers(
        "admitted, wall_ns, asked, found, new",
        "FROM (SELECT admitted, wall_ns, asked, on_device + on_host AS found,"
        f" coalesce(why = '{Gone.NEVER_STORED}', 0)"
        " AND row_number() OVER (PARTITION BY missed ORDER BY event) = 1 AS new"
        f" FROM lookups WHERE {ADMITTED} AND asked > 0 AND on_device + on_host >= 0)"
        f" WHERE {tables.within('admitted')} ORDER BY admitted",
    )
    split = _best_split(rows[:, 2], rows[:, 3])
    if split is None:
        return None
    before, after = rows[:split], rows[split:]
    share_before, share_after = _found_share(before), _found_share(after)
    places, times = np.unique(after[:, 3], return_counts=True)
    part_at = int(places[np.argmax(times)])
    parted_before, parting = [(side[:, 3] <= part_at) & (side[:, 4] == 1) for side in (before, after)]
    first = int(after[np.argmax(after[:, 3] == part_at), 0])
    [request] = tables.one(f"SELECT request FROM lookups WHERE admitted = {first}")
    return FallFigures(
        event=int(after[0, 0]),
        at_ns=int(after[0, 1]),
        lookups_before=len(before),
        lookups_after=len(after),
        before=share_before,
        after=share_after,
        rate=_rate_beside(rows, split),
        new=(_new_share(after) - _new_share(before)) / max(1e-9, share_before - share_after),
        shared_before=int(np.median(before[:, 3])),
        part_at=part_at,
        parted_before=float(parted_before.mean()),
        parting=float(parting.mean()),
        deviations=_deviations(parted_before, parting),
        request=request,
    )


def _best_split(asked: NDArray[np.int64], found: NDArray[np.int64]) -> int | None:
    """The number of lookups before the fall; None: hits do not fall, or there are too few lookups.

    The best split explains most of the variance of the share of found blocks.
    """
    split = np.arange(FALL_LEAST, len(asked) - FALL_LEAST + 1)
    if not len(split):
        return None
    asks, hits = np.cumsum(asked, dtype=np.float64), np.cumsum(found, dtype=np.float64)
    before, hits_before = asks[split - 1], hits[split - 1]
    after, hits_after = np.maximum(1, asks[-1] - before), hits[-1] - hits_before
    fall = hits_before / before - hits_after / after
    best = int(np.argmax(np.where(fall > 0, fall * fall * before * after, 0)))
    return int(split[best]) if fall[best] > 0 else None


def _found_share(rows: NDArray[np.int64]) -> float:
    return float(rows[:, 3].sum() / rows[:, 2].sum())


def _rate_beside(rows: NDArray[np.int64], split: int) -> float:
    """Return the blocks found just after a split, as a multiple of those found in as much time just before
    it. This time is half of the shorter side, so that a load that grows over the whole log matters little.
    """
    times, found = rows[:, 1], rows[:, 3]
    span = min(times[split] - times[0], times[-1] - times[split]) // 2
    before = found[(times >= times[split] - span) & (times < times[split])].sum()
    after = found[(times >= times[split]) & (times < times[split] + span)].sum()
    return float(after / max(1, before))


def _deviations(before: NDArray[np.bool_], after: NDArray[np.bool_]) -> float:
    """By how many standard deviations the shares of two samples differ, with one case of each kind added."""
    shares = [(side.sum() + 1) / (len(side) + 2) for side in (before, after)]
    errors = [(share * (1 - share) / len(side)) ** 0.5 for share, side in zip(shares, (before, after))]
    return float((shares[1] - shares[0]) / np.hypot(*errors))


def _new_share(rows: NDArray[np.int64]) -> float:
    """The share of the blocks that were missed from a key on that no lookup had missed before."""
    return float(((rows[:, 2] - rows[:, 3]) * rows[:, 4]).sum() / rows[:, 2].sum())


def stop_figures(tables: Tables) -> tuple[StopFigures, ...]:
    """Count the lookups that stopped at a missing key, by reason, most frequent first."""
    rows = tables.all(
        "SELECT why, count(*) AS lookups, sum(asked - on_device - on_host) FROM lookups "
        f"WHERE why IS NOT NULL AND {ADMITTED} AND {tables.within('admitted')} "
        "GROUP BY why ORDER BY lookups DESC, why"
    )
    return tuple([StopFigures(*row) for row in rows])


def recomputed_figures(tables: Tables, apart_ns: int) -> RecomputedFigures:
    """Count the blocks that were computed again because they had never been stored."""
    lookups, keys = tables.one(
        "SELECT count(*), count(DISTINCT missed) FROM ("
        " SELECT missed, wall_ns - lag(wall_ns) OVER (PARTITION BY missed ORDER BY event) AS apart"
        f" FROM lookups WHERE why = '{Gone.NEVER_STORED}' AND {ADMITTED} AND {tables.within('admitted')}"
        f") WHERE apart >= {apart_ns}"
    )
    return RecomputedFigures(lookups, keys, apart_ns)


def eviction_figures(tables: Tables) -> EvictionFigures:
    """Compute how old evicted blocks were, and how many of them a later lookup missed."""
    where = f"why = '{Gone.EVICTED}' AND {tables.within('gone')}"
    runs = tables.numbers(
        f"blocks, hits = 0, wanted IS NOT NULL, coalesce(gone_ns - stored_ns, {NOT_TOLD}),"
        f" coalesce(wanted_ns - gone_ns, {NOT_TOLD}), coalesce({tables.bin_of('gone_ns')}, 0),"
        f" coalesce(gone_ns, {NOT_TOLD})",
        f"FROM block_runs WHERE {where}",
    )
    blocks, unread, wanted, ages, waits, places, _ = runs.T
    over_time = np.bincount(places, weights=blocks * wanted, minlength=BINS).astype(np.int64).tolist()
    aged, waited = ages != NOT_TOLD, waits != NOT_TOLD
    return EvictionFigures(
        evicted=int(blocks.sum()),
        unread=int((blocks * unread).sum()),
        wanted=int((blocks * wanted).sum()),
        age=spread_of(ages[aged], blocks[aged]),
        until_wanted=spread_of(waits[waited], blocks[waited]),
        over_time=tuple(over_time),
        burst=_burst(tables, runs[:, [0, 2, 6]], f"{where} AND wanted IS NOT NULL"),
    )


BURST_PART = 0.7
"""Smallest share of all evictions of wanted blocks that a burst contains."""


def _burst(tables: Tables, runs: NDArray[np.int64], where: str) -> BurstFigures | None:
    """Find the shortest time with most evictions of wanted blocks, and the usual rate of evictions outside
    it.

    runs: (blocks, wanted, when they were evicted) of each run of evicted blocks.
    where: an SQL condition for runs of wanted blocks.

    The figures cover the time from the first eviction to the last: before it the pool had room, and after it
    nothing was stored.
    """
    blocks, wanted, gone_ns = runs[runs[:, 2] != NOT_TOLD].T
    if not (blocks * wanted).sum():
        return None
    full_ns, last_ns = int(gone_ns.min()), int(gone_ns.max())
    width = -(-(last_ns - full_ns + 1) // BINS)
    places = (gone_ns - full_ns) // width
    evicted = np.bincount(places, weights=blocks, minlength=BINS).astype(np.float64).astype(np.float64)
    wanted_over_time = np.bincount(places, weights=blocks * wanted, minlength=BINS).astype(np.int64).tolist()
    run = shortest_run(wanted_over_time, BURST_PART)
    assert run is not None, "there is a wanted block"
    inside = slice(run[0], run[1] + 1)
    began_ns, ended_ns = full_ns + run[0] * width, full_ns + (run[1] + 1) * width
    during = f"{where} AND gone_ns >= {began_ns} AND gone_ns < {ended_ns}"
    evictors: Counter[str] = Counter()
    for requests, gone in tables.all(
        f"SELECT gone_for_requests, sum(blocks) FROM block_runs WHERE {during} GROUP BY gone_for_requests"
    ):
        evictors.update(dict.fromkeys(names_of(requests), gone))
    batches = len(np.unique(gone_ns))
    usual, lowest, deviations = _beside_usual(evicted, inside, int(blocks.sum()) / batches)
    return BurstFigures(
        began_ns=began_ns,
        ended_ns=min(ended_ns, last_ns + 1),
        full_ns=full_ns,
        last_ns=last_ns,
        wanted=sum(wanted_over_time[inside]),
        evicted=int(evicted[inside].sum()),
        batches=batches,
        usual=usual,
        lowest=round(lowest),
        deviations=deviations,
        requests=len(evictors),
        unread=len(evictors) - len(_read_again(tables, set(evictors))),
        names=tuple([name for name, _ in evictors.most_common(SHOWN)]),
    )


def _beside_usual(evicted: NDArray[np.float64], inside: slice, batch: float) -> tuple[int, float, float]:
    """Compare a burst with the usual rate: the median of the parts outside that have evictions.

    evicted: blocks evicted in each part of the time with evictions.
    inside: the parts that are the burst.
    batch: mean number of blocks that are evicted together.

    Returns the `usual`, `lowest` and `deviations` of `BurstFigures`.
    """
    rest = np.delete(evicted, np.arange(inside.start, inside.stop))
    rest, parts = rest[rest > 0], inside.stop - inside.start
    usual = float(np.median(rest)) if len(rest) else float(evicted.mean())
    lowest = float(np.quantile(evicted[inside], 0.25))
    deviation = float(evicted.mean() * batch / parts) ** 0.5
    return round(usual * parts), lowest * parts, float(evicted[inside].mean() - usual) / deviation


def names_of(requests: str | None) -> list[str]:
    """The names of requests in a JSON list from a table."""
    names: list[str] = json.loads(requests) if requests else []
    return names


def _read_again(tables: Tables, requests: set[str]) -> set[str]:
    """Which of the requests have stored a block that was ever hit."""
    found = tables.all("SELECT DISTINCT requests FROM block_runs WHERE hits > 0")
    return requests.intersection(name for [names] in found for name in names_of(names))


def group_figures(tables: Tables) -> tuple[GroupFigures, ...]:
    """Count the blocks of each KV cache group."""
    stops = dict(
        tables.all(
            f"SELECT substr(missed, -{GROUP_DIGITS}) AS part, count(*) FROM lookups "
            f"WHERE why = '{Gone.EVICTED}' AND {ADMITTED} AND {tables.within('admitted')} GROUP BY part"
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
"""The hex digits with which a group's index begins. Other keys have no group: no model has 256 groups."""


def pool_figures(tables: Tables) -> PoolFigures:
    """Compute how the slots of the host pool were used."""
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
    """Fill each part of the time that has no sample with the value of the part before it."""
    return tuple(accumulate(samples, lambda before, now: before if now is None else now))


def skip_figures(tables: Tables) -> tuple[SkipFigures, ...]:
    """Count the offered blocks that were not stored, by reason."""
    rows = tables.all(
        f"SELECT reason, sum(blocks) AS total FROM skips WHERE {tables.within('event')} "
        "GROUP BY reason ORDER BY total DESC, reason"
    )
    return tuple([SkipFigures(*row) for row in rows])


def reset_figures(tables: Tables) -> ResetFigures:
    """Count the resets that dropped keys."""
    found = tables.one(
        f"SELECT count(*), coalesce(sum(keys), 0) FROM resets WHERE keys > 0 AND {tables.within('event')}"
    )
    return ResetFigures(*found)


def stored_blocks(tables: Tables) -> int:
    """Count the blocks whose store completed."""
    [stored] = tables.one(
        "SELECT coalesce(sum(blocks), 0) FROM block_runs"
        f" WHERE stored IS NOT NULL AND {tables.within('transfer')}"
    )
    return int(stored)
