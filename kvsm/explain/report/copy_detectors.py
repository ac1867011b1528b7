"""The detectors of copies: a rank that fails, is slow or is silent, and copies that requests wait for."""

from __future__ import annotations

from kvsm.explain.report.command_lines import command
from kvsm.explain.report.copy_measures import RATE_TOKENS
from kvsm.explain.report.detectors import Limit, Noticed, number, percent
from kvsm.explain.report.figures import DirectionFigures, FetchFigures, LogFigures, RankFigures, Spread
from kvsm.explain.story.times import after_start, duration
from kvsm.tiers.disk_tier import DISK, HOST

LATE_LEAST_NS, LATE_TIMES = 5_000_000_000, 10
"""A copy is missing after 5 s or ten times the 99th percentile of copy latency, whichever is longer."""


def rank_silent(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect a rank that does not report copies, either any more or some of them."""
    ranks = figures.copies.ranks
    silent = [rank for rank in ranks if rank.missing >= limit.least]
    if not silent:
        return None
    worst = max(silent, key=lambda rank: rank.missing)
    subject = f"Rank {worst.rank}" if len(silent) < len(ranks) else "Every rank"
    if _reports_again(worst, figures.copies.late_ns):
        text = (
            f"{subject} loses copies: it never reported {number(worst.missing, 'copy', 'copies')} of "
            f"{worst.copies:,}, and reported later ones"
        )
    else:
        last_ns = worst.last_ns
        after = "" if last_ns is None else f" after {after_start(last_ns, figures.log_began_ns)}"
        text = (
            f"{subject} went silent{after}: it has not reported "
            f"{number(worst.missing + worst.waiting, 'copy', 'copies')} since, {worst.missing:,} of them "
            "overdue"
        )
    late = duration(figures.copies.late_ns)
    evidence = tuple(
        f"rank {rank.rank} lacks {rank.missing:,} of {rank.copies:,} reports" for rank in silent[:4]
    )
    evidence += (f"a copy is overdue after {late}: 99 % of the copies took a tenth of that or less",)
    if len(silent) < len(ranks):
        evidence += ("every other rank has reported all that was due",)
    where = f"worker = {worst.rank} AND reported IS NULL"
    query = f"SELECT * FROM copies WHERE {where} ORDER BY transfer LIMIT 10"
    return Noticed(
        worst.missing / worst.copies,
        text,
        evidence,
        (command(figures, "query", query), command(figures, "verify")),
    )


def _reports_again(rank: RankFigures, late_ns: int) -> bool:
    """Whether a rank still reported more than `late_ns` after its first missing copy was submitted."""
    last_ns, since_ns = rank.last_ns, rank.missing_since_ns
    return last_ns is not None and since_ns is not None and last_ns > since_ns + late_ns


def rank_fails(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect a rank whose copies fail."""
    ranks = figures.copies.ranks
    failing = [
        rank for rank in ranks if rank.failed >= limit.least and rank.failed >= limit.share * rank.reported
    ]
    if not failing:
        return None
    worst = max(failing, key=lambda rank: rank.failed / rank.reported)
    others = [rank for rank in ranks if rank not in failing]
    subject = f"Rank {worst.rank} fails" if others or len(ranks) == 1 else "Every rank fails"
    text = (
        f"{subject} {percent(worst.failed, worst.reported)} of its copies ({worst.failed:,} of "
        f"{worst.reported:,})"
    )
    evidence = [f"rank {worst.rank} said {times:,} times: {error}" for error, times in worst.errors[:2]]
    if not worst.errors:
        evidence.append("the log does not tell why")
    evidence += [
        f"rank {rank.rank} fails {percent(rank.failed, rank.reported)}"
        for rank in failing
        if rank is not worst
    ]
    if others:
        failed, reported = sum(rank.failed for rank in others), sum(rank.reported for rank in others)
        rest = f"the other {number(len(others), 'rank')}" if len(others) > 1 else f"rank {others[0].rank}"
        evidence.append(f"{rest}: {percent(failed, reported)} ({failed:,} of {reported:,})")
    if figures.requests.failed_loads:
        evidence.append(f"{number(figures.requests.failed_loads, 'load')} of requests failed with it")
    query = f"SELECT * FROM copies WHERE worker = {worst.rank} AND good = 0 ORDER BY transfer LIMIT 10"
    return Noticed(worst.failed / worst.reported, text, tuple(evidence), (command(figures, "query", query),))


def rank_slow(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect a rank whose median copy takes longer than the other ranks' copies, in any direction. A silent
    rank does not count (`rank_silent`): it has reported only some of the transfers, so medians do not
    compare."""
    ranks = [rank for rank in figures.copies.ranks if not rank.missing]
    overall = [("copies", rank, rank.latency) for rank in ranks]
    by_direction = [(f"{one.direction}s", rank, one.latency) for rank in ranks for one in rank.directions]
    for what in ("copies", "stores", "loads"):
        timed = [
            (rank, latency)
            for name, rank, latency in [*overall, *by_direction]
            if name == what and latency.count >= limit.least
        ]
        for slow, latency in sorted(timed, key=lambda one: _p50(one[1]), reverse=True):
            others = sorted(_p50(other) for rank, other in timed if rank is not slow)
            if others and _p50(latency) >= limit.share * others[len(others) // 2]:
                return _slow(figures, slow, what, latency, others[len(others) // 2])
    return None


def _slow(figures: LogFigures, slow: RankFigures, what: str, latency: Spread, usual: int) -> Noticed:
    text = (
        f"Rank {slow.rank} is slow: half of its {what} take {duration(_p50(latency))} or longer; on the "
        f"other ranks {duration(usual)}"
    )
    evidence = (
        f"rank {slow.rank}: p99 {duration(latency.p99_ns or 0)}, longest {duration(latency.max_ns or 0)}; "
        "every transfer waits for its last rank",
    )
    return Noticed(
        1 - usual / max(1, _p50(latency)),
        text,
        evidence,
        (_longest(figures, slow.rank, None if what == "copies" else what.removesuffix("s")),),
    )


def _longest(figures: LogFigures, rank: int, direction: str | None) -> str:
    """Return a query for the longest copies of a rank. direction: None: both."""
    which = "" if direction is None else f" AND direction = '{direction}'"
    return command(
        figures,
        "query",
        f"SELECT *, reported_ns - submitted_ns AS ns FROM copies WHERE worker = {rank}{which} "
        "ORDER BY ns DESC LIMIT 10",
    )


def _p50(latency: Spread) -> int:
    return latency.p50_ns or 0


TAIL_EPISODES = 3
"""A rank has a tail if it was slow at least so many times. One or two are hiccups."""

TAIL_DIFFERENCE = 5
"""A rank has a long tail if its copies are that slow at least this many times as often as on the other
ranks."""


def rank_tail(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect a rank with copies that take far longer than nearly all copies of the other ranks."""
    found = [
        (one.tail / one.latency.count, rank, one)
        for rank in figures.copies.ranks
        for one in rank.directions
        if not rank.missing and _has_tail(one, limit)
    ]
    if not found:
        return None
    share, rank, tail = max(found, key=lambda one: one[0])
    assert tail.tail_ns is not None
    text = (
        f"Rank {rank.rank} has a long tail: {percent(share)} of its {tail.direction}s "
        f"({tail.tail:,} of {tail.latency.count:,}) take {duration(tail.tail_ns)} or longer; on the other "
        f"ranks {percent(tail.others_tail, tail.others)} do"
    )
    evidence = [f"rank {rank.rank}: {tail.direction}s {_spread_text(tail.latency)}"]
    evidence += [
        f"rank {other.rank}: {tail.direction}s {_spread_text(one.latency)}"
        for other in figures.copies.ranks
        if other is not rank
        for one in other.directions
        if one.direction == tail.direction
    ][:3]
    evidence.append("every transfer waits for its last rank")
    return Noticed(share, text, tuple(evidence), (_longest(figures, rank.rank, tail.direction),))


def _has_tail(one: DirectionFigures, limit: Limit) -> bool:
    if one.episodes < TAIL_EPISODES or one.tail < max(limit.least, limit.share * one.latency.count):
        return False
    return one.tail * one.others >= TAIL_DIFFERENCE * one.others_tail * one.latency.count


def _spread_text(latency: Spread) -> str:
    times = (("p50", latency.p50_ns), ("p99", latency.p99_ns), ("max", latency.max_ns))
    return ", ".join(f"{name} {duration(ns or 0)}" for name, ns in times)


def reports_rejected(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that many reports of workers are rejected."""
    rejected = sum(row.reports for row in figures.rejected)
    counted = sum(rank.reported for rank in figures.copies.ranks)
    if rejected < limit.least or rejected < limit.share * (rejected + counted):
        return None
    most = figures.rejected[0]
    text = (
        f"{percent(rejected, rejected + counted)} of the workers' reports are rejected "
        f"({rejected:,} of {rejected + counted:,}); most come from rank {most.rank}"
    )
    evidence = tuple(
        f"rank {row.rank}: {number(row.reports, 'report')}: {row.reason}" for row in figures.rejected[:3]
    )
    query = "SELECT * FROM rejections ORDER BY event LIMIT 10"
    return Noticed(rejected / (rejected + counted), text, evidence, (command(figures, "query", query),))


def waits(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that requests wait long for copies of other requests."""
    waits = figures.waits
    if waits.deferred < limit.least or waits.deferred_ns < limit.share * waits.lived_ns or not waits.top:
        return None
    top = waits.top[0]
    mostly_one = top.waited_ns > waits.deferred_ns / 2
    copy = f"{top.direction} {top.transfer}"
    subject = f"Requests wait for one copy, {copy}" if mostly_one else "Requests wait for copies of others"
    text = (
        f"{subject}: {number(top.requests if mostly_one else waits.deferred, 'request')} waited "
        f"{duration(top.waited_ns if mostly_one else waits.deferred_ns)} together, "
        f"{percent(waits.deferred_ns, waits.lived_ns)} of the time of all requests"
    )
    evidence = [f"the longest wait took {duration(waits.longest_ns)}"]
    if top.rank is not None and top.rank_ns is not None:
        evidence.append(
            f"{copy}: rank {top.rank} reported last, {duration(top.rank_ns)} after its submission; "
            f"of the wait, {top.split}"
        )
    elif top.rank is not None:
        evidence.append(f"{copy}: rank {top.rank} has not reported")
    shown = command(figures, "why", "--transfer", top.transfer)
    return Noticed(waits.deferred_ns / waits.lived_ns, text, tuple(evidence), (shown,))


def slow_loads(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect long waits for requests' own loads. The time until a step notices their end does not count."""
    waits = figures.waits
    loading_ns = waits.loading_ns - waits.loading_split.noticed
    if not waits.lived_ns or loading_ns < limit.share * waits.lived_ns:
        return None
    text = (
        f"Requests wait for their own loads: {duration(loading_ns)} together, "
        f"{percent(loading_ns, waits.lived_ns)} of the time of all requests"
    )
    query = (
        "SELECT transfer, slots, ended_ns - submitted_ns AS ns FROM transfers "
        "WHERE direction = 'load' ORDER BY ns DESC LIMIT 10"
    )
    evidence = (f"of all waits for loads, {waits.loading_split}",)
    return Noticed(loading_ns / waits.lived_ns, text, evidence, (command(figures, "query", query),))


def loads_slower(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that loads from the host take longer than computing the same tokens would take."""
    return _slower_than_computing(figures, limit, HOST, "Loading")


def disk_slower(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that copies from the disk take longer than computing the same tokens would take."""
    return _slower_than_computing(figures, limit, DISK, "The disk")


SLOWEST_BYTES_PER_S, SLOW_BYTES_PER_S = 1_500_000_000, 7_000_000_000
"""Between these rates the host's memory is most likely not page-locked. Slower copies have another cause:
memory that is not page-locked is copied at 2 GB/s and more."""


def pool_not_pinned(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that all ranks copy so slowly that the host memory is most likely not page-locked."""
    copies = figures.copies
    if copies.bytes_per_s is None or copies.measured < limit.least:
        return None
    if not SLOWEST_BYTES_PER_S <= copies.bytes_per_s < SLOW_BYTES_PER_S:
        return None
    config = figures.config
    slot_bytes = config.blocks_per_chunk * config.block_bytes
    text = (
        f"The host pool does not seem to be page-locked: the fastest rank copies "
        f"{copies.bytes_per_s / 1e9:.1f} GB/s"
    )
    evidence = (
        f"the pool has {config.host_blocks * slot_bytes / 2**30:,.1f} GiB a rank; a limit for locked memory "
        "(ulimit -l) or too little free memory makes locking fail, and each rank warns of that at its start",
        "page-locked memory is copied at 12 GB/s and more, other memory at 2 to 6 GB/s",
    )
    query = (
        f"SELECT worker, direction, slots, slots * {slot_bytes} / copied_ns AS gb_per_s FROM copies "
        "JOIN transfers USING (transfer, direction) WHERE copied_ns > 0 ORDER BY slots DESC LIMIT 10"
    )
    slow = 1 - copies.bytes_per_s / SLOW_BYTES_PER_S
    return Noticed(slow, text, evidence, (command(figures, "query", query),))


MOST = 0.5
"""At least this share of the copies must be slower than computing, so that the tail of one rank does not
count."""


def _slower_than_computing(figures: LogFigures, limit: Limit, place: str, subject: str) -> Noticed | None:
    for one in figures.fetches:
        enough = one.place == place and one.copies >= limit.least and one.slower >= MOST * one.copies
        if enough and one.compute_ns and one.spent_ns >= limit.share * one.compute_ns:
            return _slower(figures, one, subject)
    return None


def _slower(figures: LogFigures, one: FetchFigures, subject: str) -> Noticed:
    assert one.compute_ns
    computing = figures.computing
    text = (
        f"{subject} is slower than computing: {number(one.copies, 'copy', 'copies')} from the {one.place} "
        f"took {duration(one.spent_ns)} for {one.tokens:,} tokens, which the engine computes in "
        f"{duration(one.compute_ns)}"
    )
    each = one.spent_ns * RATE_TOKENS // one.tokens
    evidence = (
        f"for {RATE_TOKENS:,} tokens: {duration(each)} to copy, {duration(computing.usual_ns or 0)} to "
        f"compute (a quarter of the prompts takes {duration(computing.fast_ns or 0)} or less, a quarter "
        f"{duration(computing.slow_ns or 0)} or more)",
        f"computing is measured on {number(computing.requests, 'request')} that had nothing to load: from "
        "admission to the first stored blocks",
        f"{one.slower:,} of the copies were slower; a copy from the {one.place}: {_spread_text(one.took)}",
    )
    which = "target IS NULL AND direction = 'load'" if one.place == HOST else f"source = '{one.place}'"
    query = (
        "SELECT transfer, slots, ended_ns - submitted_ns AS ns FROM transfers "
        f"WHERE {which} ORDER BY ns DESC LIMIT 10"
    )
    impact = min(1.0, one.spent_ns / max(1, figures.waits.lived_ns))
    return Noticed(impact, text, evidence, (command(figures, "query", query),))
