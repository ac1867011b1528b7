"""A first look at a large log: what happened in each minute, and which minutes to read in full.

    look = first_look(Path("log"))
    print(look.closer.why, look.closer.first, look.closer.last)

The writer saves counts for each minute in the log (`kvsm.core.log.minutes`). So the first look reads the head
of each segment and the events of the last one, and takes seconds for the log of a day. The counts do not hold
everything that a report needs, for example the reason for each miss. So a report reads in full the part of
the log that stands out most (`Closer`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from multiprocessing import get_context
from os import cpu_count
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from kvsm.core.log import LogReader
from kvsm.core.log.fold import condition_of
from kvsm.core.log.frames import segment_bytes, segment_paths
from kvsm.core.log.minutes import (
    MINUTE_NS,
    CopyCounts,
    Minute,
    MinuteCounter,
    SegmentMinutes,
    bucket_start_ns,
    counts_before,
)
from kvsm.core.log.reader import Segment
from kvsm.errors import LogDamaged, LogError
from kvsm.events import Direction
from kvsm.explain.report.detectors import number, percent
from kvsm.explain.report.figures import Spread
from kvsm.explain.story.times import duration
from kvsm.explain.tables.log_parts import most_events


class RankLook(msgspec.Struct, frozen=True):
    """Copies of one rank in one direction, `store` or `load`; None: they were planned in an earlier segment.

    latency: time from submission to report. It is exact to about 25 %.
    """

    direction: str | None
    rank: int
    reports: int
    failed: int
    latency: Spread


class PartLook(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the log's time.

    began_ns: Unix time at which it begins (ns).
    hit_rate: share of the asked blocks that device and host had; None: none was asked for.
    skipped: blocks that were offered and not stored.
    slowest_load_ns: 99th percentile of the loads of the slowest rank; None: no load ended. In the same way
        `slowest_store_ns`.
    """

    began_ns: int
    events: int
    arrived: int
    finished: int
    aborted: int
    preempted: int
    deferred: int
    lookups: int
    asked: int
    on_device: int
    on_host: int
    hit_rate: float | None
    stored: int
    loaded: int
    evicted: int
    skipped: int
    reports: int
    failed: int
    rejected: int
    lost: int
    resets: int
    restarts: int
    set_back_ns: int
    slowest_load_ns: int | None
    slowest_store_ns: int | None


class Closer(msgspec.Struct, frozen=True):
    """The part of the log to read in full: events `first` to `last`, and why this part."""

    first: int
    last: int
    why: str


class FirstLook(msgspec.Struct, frozen=True, kw_only=True):
    """What a first look at a log found.

    first, last: its first and last event. bytes: size of its files.
    began_ns, ended_ns: wall times of these events (Unix time in ns).
    minutes: length of each part (minutes).
    whole: the counts of the whole log, in one part.
    ranks: the copies of each rank, by direction.
    parts: the parts of the time that have events.
    damage: why events at the end are not counted; None: all are.
    complete: whether no event before the end of the log is missing.
    notes: what is wrong with the log itself, as text.
    """

    first: int
    last: int
    bytes: int
    began_ns: int
    ended_ns: int
    minutes: int
    whole: PartLook
    ranks: tuple[RankLook, ...]
    parts: tuple[PartLook, ...]
    closer: Closer
    damage: str | None = None
    complete: bool = True
    notes: tuple[str, ...] = ()


def first_look(directory: Path, progress: Callable[[int], None] | None = None) -> FirstLook:
    """Look at a log. progress: called with the last event that was counted, from time to time.

    Raises `LogError` if there is no log, or no whole event in it.
    """
    size, reader = segment_bytes(segment_paths(directory)), LogReader(directory)
    counts, damage = _counts(reader, progress or _ignore)
    counts = [found for found in counts if found.last >= found.first]
    if not counts:
        raise LogError(f"{directory}: " + (damage or "there is no whole event in this log"))
    condition = condition_of(reader)
    while len({found.minutes for found in counts}) > 1:
        least = min(counts, key=lambda found: found.minutes)
        least.widen()
    places = [*_places(counts)]
    parts: dict[int, Minute] = {}
    for place in places:
        parts.setdefault(place.part, Minute()).add(place.counts)
    whole = Minute()
    for part in parts.values():
        whole.add(part)
    width = counts[0].minutes
    looks = [_look(part * width * MINUTE_NS, parts[part]) for part in sorted(parts)]
    return FirstLook(
        first=counts[0].first,
        last=counts[-1].last,
        bytes=size,
        began_ns=counts[0].began_ns,
        ended_ns=counts[-1].ended_ns,
        minutes=width,
        whole=_look(counts[0].began_ns, whole),
        ranks=tuple([_rank(*key, copies) for key, copies in sorted(whole.copies.items())]),
        parts=tuple(looks),
        closer=_closer(places, looks, counts[-1].last, most_events(whole.events, size)),
        damage=damage,
        complete=condition.complete,
        notes=tuple(condition.notes()),
    )


# Counts of the segments.


class _Counted(NamedTuple):
    """The counts of a segment. damage: why its last events are not counted; None: all are."""

    counts: SegmentMinutes
    damage: str | None = None


def _counts(reader: LogReader, progress: Callable[[int], None]) -> tuple[list[SegmentMinutes], str | None]:
    """Return the counts of each segment, in order, up to damage; and the damage.

    The reader passes over the log, and its attributes describe it. It reads the last segment. Other segments
    without counts are counted in parallel.
    """
    found: list[_Counted | int] = []
    before = damage = None
    try:
        for segment in reader.segments():
            if before is not None:
                left = counts_before(segment.head, before)
                found.append(before if left is None else _Counted(left))
            before = segment.head.seq + 1
            if segment.successor is None:
                found.append(_count_events(segment))
                before = None
    except LogDamaged as error:
        damage = str(error)
    if before is not None:
        found.append(before)
    counts = []
    for one in _count_rest(reader.directory, found):
        counts.append(one.counts)
        progress(one.counts.last)
        if one.damage is not None:
            return counts, one.damage
    return counts, damage


def _count_rest(directory: Path, found: Sequence[_Counted | int]) -> Iterator[_Counted]:
    """Yield the counts of all segments. found: the counts of each segment, or its first event."""
    uncounted = [one for one in found if isinstance(one, int)]
    jobs = min(len(uncounted), cpu_count() or 1)
    with ExitStack() as stack:
        counted: Iterator[_Counted] = map(partial(_count, directory), uncounted)
        if jobs > 1:
            # A fork of a process with threads may hang.
            pool = stack.enter_context(ProcessPoolExecutor(jobs, get_context("spawn")))
            counted = pool.map(partial(_count, directory), uncounted)
        for one in found:
            yield next(counted) if isinstance(one, int) else one


def _count(directory: Path, first: int) -> _Counted:
    """Count the segment whose first event is `first`, in a process of its own."""
    found = None
    try:
        for segment in LogReader(directory).segments(first):
            if found is not None:
                break  # The end of the segment that was counted is checked now.
            found = _count_events(segment)
    except LogDamaged as error:
        if found is not None:
            return _Counted(found.counts, found.damage or str(error))
        raise
    if found is None or found.counts.first != first:
        raise LogError(f"{directory}: the segment of event {first} is gone; retention may have deleted it")
    return found


def _count_events(segment: Segment) -> _Counted:
    counter = MinuteCounter(segment.head.seq + 1)
    try:
        for batch in segment.batches():
            counter.count(batch)
    except LogDamaged as error:
        return _Counted(counter.minutes, str(error))
    return _Counted(counter.minutes)


def _ignore(_event: int) -> None:
    pass


class _Place(NamedTuple):
    """A part of the time within one segment.

    first: the number of its first event, if the clock was never set back in the segment.
    """

    part: int
    first: int
    counts: Minute


def _places(counts: Sequence[SegmentMinutes]) -> Iterator[_Place]:
    for found in counts:
        first = found.first
        for part, minute in found.parts.items():
            yield _Place(part, first, minute)
            first += minute.events


# Figures of the parts.


def _look(began_ns: int, counts: Minute) -> PartLook:
    alike: dict[str, int] = {name: getattr(counts, name) for name in _ALIKE}
    return PartLook(
        **alike,
        began_ns=began_ns,
        hit_rate=(counts.on_device + counts.on_host) / counts.asked if counts.asked else None,
        skipped=sum(counts.skipped.values()),
        reports=sum(copies.reports for copies in counts.copies.values()),
        failed=sum(copies.failed for copies in counts.copies.values()),
        slowest_load_ns=_slowest(counts, Direction.LOAD),
        slowest_store_ns=_slowest(counts, Direction.STORE),
    )


_ALIKE = sorted({*PartLook.__struct_fields__} & {*Minute.__struct_fields__} - {"skipped"})
"""The fields that both structs have."""


def _slowest(counts: Minute, wanted: Direction) -> int | None:
    of_ranks = [_latency(copies) for (way, _), copies in counts.copies.items() if way == wanted]
    return max((one.p99_ns for one in of_ranks if one.p99_ns is not None), default=None)


def _rank(direction: int, rank: int, copies: CopyCounts) -> RankLook:
    name = Direction(direction).name.lower() if direction in set(Direction) else None
    return RankLook(name, rank, copies.reports, copies.failed, _latency(copies))


def _latency(copies: CopyCounts) -> Spread:
    total = sum(copies.durations.values())
    if not total:
        return Spread(0, None, None, None)
    buckets = sorted(copies.durations)
    upto = [*accumulate(copies.durations[bucket] for bucket in buckets)]
    middle, high = [
        bucket_start_ns(buckets[bisect_right(upto, (total - 1) * part // 100)]) for part in (50, 99)
    ]
    return Spread(total, middle, high, bucket_start_ns(buckets[-1]))


# The part to look at closely.


class _Mark(NamedTuple):
    """Something that makes a part of the time stand out.

    share: how much of it there is in a part; the limit is the smallest that stands out.
    says: the reason, as text.
    """

    share: Callable[[PartLook], float]
    limit: float
    says: Callable[[PartLook], str]


def _share(part: int, whole: int, least: int) -> float:
    return part / whole if whole and part >= least else 0.0


_SET_BACK_NS = 1_000_000_000

_MARKS = (
    _Mark(
        lambda part: part.set_back_ns,
        _SET_BACK_NS,
        lambda part: f"the clock was set back by {duration(part.set_back_ns)}",
    ),
    _Mark(lambda part: part.lost, 1, lambda part: f"{number(part.lost, 'transfer')} lost"),
    _Mark(lambda part: part.restarts, 1, lambda part: number(part.restarts, "restart")),
    _Mark(
        lambda part: _share(part.failed, part.reports, 5),
        0.01,
        lambda part: f"{percent(part.failed, part.reports)} of the copies failed",
    ),
    _Mark(
        lambda part: _share(part.rejected, part.rejected + part.reports, 10),
        0.01,
        lambda part: f"{number(part.rejected, 'report')} rejected",
    ),
    _Mark(
        lambda part: _share(part.aborted, part.finished, 20),
        0.3,
        lambda part: f"{percent(part.aborted, part.finished)} of the requests were aborted",
    ),
    _Mark(lambda part: part.resets, 3, lambda part: f"{number(part.resets, 'reset')} of the cache"),
)
"""What makes a part stand out, the most urgent first. Limits equal those of the detector, where there is
one."""

HITS_FELL = 0.2
"""A part stands out if its hit rate is at least this much below the median of all parts."""

_LEAST_LOOKUPS = 20


def _closer(places: Sequence[_Place], looks: Sequence[PartLook], last: int, most: int) -> Closer:
    """Choose the part that stands out most; if none does, the end of the log. most: the most events of it."""
    for mark in _MARKS:
        worst = max(looks, key=mark.share)
        if mark.share(worst) >= mark.limit:
            return _around(places, looks.index(worst), last, most, mark.says(worst))
    rated = [look for look in looks if look.hit_rate is not None and look.lookups >= _LEAST_LOOKUPS]
    if rated:
        usual = median(look.hit_rate for look in rated if look.hit_rate is not None)
        lowest = min(rated, key=lambda look: look.hit_rate or 0.0)
        if (lowest.hit_rate or 0.0) <= usual - HITS_FELL:
            why = f"hits fell to {percent(lowest.hit_rate or 0.0)}, from {percent(usual)} in most minutes"
            return _around(places, looks.index(lowest), last, most, why)
    first = max(places[0].first, last - most + 1)
    return Closer(first, last, "the end of the log, because no minute stands out")


def _around(places: Sequence[_Place], wanted: int, last: int, most: int, why: str) -> Closer:
    """Return at most `most` events around the beginning of a part, a fifth of them before it."""
    part = sorted({place.part for place in places})[wanted]
    begins = next(place.first for place in places if place.part == part)
    first = max(places[0].first, begins - most // 5)
    return Closer(first, min(last, first + most - 1), why)
