"""The detectors: one function for each kind of trouble.

A detector judges the figures of a log. Below its limit it returns None, else a text that says what is wrong,
the numbers that show it, and commands that show more. `troubles.py` has the limits and their reasons.
"""

from __future__ import annotations

import shlex
from typing import NamedTuple

from kvsm.core.kv_events import GROUP_INDEX_BYTES
from kvsm.core.log import LogEnd
from kvsm.events import SkipReason
from kvsm.explain.report.figures import BurstFigures, GroupFigures, LogFigures, RankFigures
from kvsm.explain.story.times import after_start, duration, utc
from kvsm.explain.tables.row_kinds import Gone


class Limit(NamedTuple):
    """The limit of a detector: at least `least` cases, and at least `share` of the whole (0: no share)."""

    share: float = 0.0
    least: int = 1

    def __str__(self) -> str:
        if not self.share:
            return f"{self.least:,}"
        share = percent(self.share) if self.share < 1 else f"{self.share:g} times"
        return f"{share}, and {self.least:,} cases" if self.least > 1 else share


class Noticed(NamedTuple):
    """What a detector found. The fields are those of `Trouble`."""

    impact: float
    text: str
    evidence: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


LATE_LEAST_NS, LATE_TIMES = 5_000_000_000, 10
"""A copy is missing after 5 s or ten times the 99th percentile of copy latency, whichever is longer."""

OVERDUE_LEAST_NS, OVERDUE_TIMES = 60_000_000_000, 2
"""A request is overdue after a minute or twice the time of the longest ended request, whichever is longer."""

APART_NS = 5_000_000_000
"""A block was computed twice if two lookups at least 5 s apart missed it."""

STILL_WRITTEN_NS = 60_000_000_000
"""A log that is not closed, and whose last event is younger than a minute, may still be written."""

BURST_TIME = 0.2
"""A burst of evictions takes at most this share of the time."""

FLOOD_STORED, FLOOD_READ = 0.6, 1 / 3
"""A KV cache group floods the pool if it has at least `FLOOD_STORED` of the stored blocks, and its blocks on
average have at most `FLOOD_READ` times as many hits as blocks of the other groups."""


def percent(part: float, whole: float = 1.0) -> str:
    """`62 %`, `4.1 %` or `0.2 %`."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f} %" if share >= 9.95 or share == 0 else f"{share:.1f} %"


def number(count: int, thing: str, things: str = "") -> str:
    """`1 copy` or `1,200 copies`."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def _command(figures: LogFigures, verb: str, *arguments: object) -> str:
    """A `kvsm` command line with quoted arguments, safe to paste into a shell."""
    return " ".join(["kvsm", verb, *map(_quoted, (figures.log, *arguments))])


def _other_pools(figures: LogFigures, *options: object) -> str:
    """A command that predicts other pools; with several KV cache groups, which `whatif` lacks, a query."""
    if len(figures.groups) > 1:
        return _command(figures, "query", _BY_GROUP)
    return _command(figures, "whatif", *options)


_BY_GROUP = (
    f"SELECT substr(key, -{2 * GROUP_INDEX_BYTES}) AS kv_group, count(*) AS blocks, sum(hits) AS hits, "
    "sum(why = 'evicted') AS evicted FROM blocks GROUP BY kv_group"
)


def _quoted(argument: object) -> str:
    """Quote an argument for a shell; SQL that contains single quotes, in double quotes if that is safe."""
    text = str(argument)
    return f'"{text}"' if "'" in text and not set(text) & set('"$`\\!') else shlex.quote(text)


# The log or the state is wrong.


def property_broken(figures: LogFigures, _limit: Limit) -> Noticed | None:
    """Detect an event that breaks a property, or that cannot follow."""
    check = figures.check
    if not check.broken:
        return None
    return Noticed(
        1.0,
        f"Event {check.event} breaks a property: {check.broken[0]}",
        tuple(check.broken[1:4]),
        (_command(figures, "verify"),),
    )


def damaged(figures: LogFigures, _limit: Limit) -> Noticed | None:
    """Detect damage: bytes that are not the ones that were written."""
    if figures.check.damage is None:
        return None
    text = f"The log is damaged, and is read up to event {figures.last:,}: {figures.check.damage}"
    return Noticed(1.0, text, (), (_command(figures, "verify"),))


def events_missing(figures: LogFigures, _limit: Limit) -> Noticed | None:
    """Detect events that are missing before the end."""
    if figures.end.complete:
        return None
    text = f"Events are missing from the log: {figures.end.notes[0]}"
    why = "a disk that is full or fails is the usual cause; figures about what is missing are too low"
    return Noticed(0.9, text, (*figures.end.notes[1:], why), (_command(figures, "verify"),))


# The engine ended, or something in it hangs.


def engine_stopped(figures: LogFigures, _limit: Limit) -> Noticed | None:
    """Detect that the engine closed the log with an error."""
    if figures.end.engine != LogEnd.STOPPED.value:
        return None
    text = f"The engine ended with an error: {figures.end.error}"
    return Noticed(1.0, text, _left_behind(figures), (_command(figures, "verify"),))


GIVE_TIME = "Give it time to end: `vllm serve --shutdown-timeout 30`"
"""The advice if an engine was killed before it had ended after a stop signal."""


def engine_killed(figures: LogFigures, _limit: Limit) -> Noticed | None:
    """Detect a log that was not closed, and to which no process writes."""
    end = figures.end
    if end.engine != LogEnd.OPEN.value or end.silent_ns is None or end.silent_ns < STILL_WRITTEN_NS:
        return None
    busy = figures.requests.open or any(rank.waiting + rank.missing for rank in figures.copies.ranks)
    if end.stopped_by:
        text = (
            f"The engine was stopped by {end.stopped_by}, and killed before it closed the log. Its last "
            f"event came {duration(end.silent_ns)} ago. {GIVE_TIME}"
        )
        return Noticed(1.0, text, _left_behind(figures), (_command(figures, "verify"),))
    text = (
        f"The engine was killed, or {'hangs' if busy else 'is idle'}: it did not close the log, and its last "
        f"event came at {utc(figures.ended_ns)}, {duration(end.silent_ns)} ago"
    )
    return Noticed(1.0, text, _left_behind(figures), (_command(figures, "verify"),))


def processes_killed(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect processes that ended without closing the log, before another process resumed it."""
    restarts = figures.restarts
    if restarts.killed < limit.least:
        return None
    times = "once" if restarts.killed == 1 else f"{restarts.killed:,} times"
    text = (
        f"The process ended {times} without closing the log, and another one went on: "
        f"{number(figures.requests.cut_off, 'request')} and {number(restarts.transfers, 'transfer')} cut off"
    )
    evidence = tuple(f"{count:,} before a restart: {how}" for how, count in restarts.ended)
    evidence += (
        f"what was stored was kept: {number(restarts.kept, 'block')}; {restarts.lost:,} were being stored",
        "out of memory and a stop that takes too long are the usual causes; the system's log tells",
    )
    query = "SELECT event, wall_ns, last_end, kept, storing, requests_cut_off FROM restarts ORDER BY event"
    impact = restarts.killed / (restarts.restarts + 1)
    return Noticed(impact, text, evidence, (_command(figures, "query", query),))


def _left_behind(figures: LogFigures) -> tuple[str, ...]:
    """Evidence: the requests and transfers that were open when the engine ended."""
    copies = max((rank.waiting + rank.missing for rank in figures.copies.ranks), default=0)
    states = ", ".join(f"{count:,} {state}" for state, count in figures.requests.states.items())
    parts = [f"{number(figures.requests.open, 'request')} ({states})"] if states else []
    parts += [f"{number(copies, 'transfer')} in flight"] if copies else []
    return (f"open at the end: {', '.join(parts) or 'nothing'}",)


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
        (_command(figures, "query", query), _command(figures, "verify")),
    )


def _reports_again(rank: RankFigures, late_ns: int) -> bool:
    """Whether a rank still reported more than `late_ns` after its first missing copy was submitted."""
    last_ns, since_ns = rank.last_ns, rank.missing_since_ns
    return last_ns is not None and since_ns is not None and last_ns > since_ns + late_ns


def requests_unfinished(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect overdue requests: without an end, and much older than any request that ended."""
    requests = figures.requests
    if requests.overdue < limit.least:
        return None
    names = ", ".join(requests.oldest)
    closed = figures.end.engine == LogEnd.CLOSED.value
    text = (
        f"{number(requests.open, 'request')} of {requests.requests:,} never ended"
        f"{', although the engine closed the log' if closed else ''}: {requests.overdue:,} are overdue"
    )
    evidence = (
        f"the oldest: {names}; a request is overdue after {duration(requests.overdue_ns)}",
        f"the longest request that ended took {duration(requests.longest_ns)}",
        "such requests were never finished or aborted: their blocks on the device or the host stay held",
    )
    oldest = requests.oldest[0]
    shown = _command(figures, "why", *(["--", oldest] if oldest.startswith("-") else [oldest]))
    return Noticed(requests.overdue / requests.requests, text, evidence, (shown, _command(figures, "verify")))


# A part fails or is slow.


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
    return Noticed(worst.failed / worst.reported, text, tuple(evidence), (_command(figures, "query", query),))


def rank_slow(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect a rank whose median copy takes longer than the other ranks' copies."""
    timed = [rank for rank in figures.copies.ranks if rank.reported >= limit.least]
    for slow in sorted(timed, key=_p50, reverse=True):
        others = sorted(_p50(rank) for rank in timed if rank is not slow)
        if others and _p50(slow) >= limit.share * others[len(others) // 2]:
            usual = others[len(others) // 2]
            text = (
                f"Rank {slow.rank} is slow: half of its copies take {duration(_p50(slow))} or longer, and "
                f"{duration(usual)} on the other ranks"
            )
            evidence = (
                f"rank {slow.rank}: p99 {duration(slow.latency.p99_ns or 0)}, longest "
                f"{duration(slow.latency.max_ns or 0)}; every transfer waits for its last rank",
            )
            took = "reported_ns - submitted_ns"
            query = f"SELECT *, {took} AS ns FROM copies WHERE worker = {slow.rank} ORDER BY ns DESC LIMIT 10"
            return Noticed(
                1 - usual / max(1, _p50(slow)), text, evidence, (_command(figures, "query", query),)
            )
    return None


def _p50(rank: RankFigures) -> int:
    return rank.latency.p50_ns or 0


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
    return Noticed(rejected / (rejected + counted), text, evidence, (_command(figures, "query", query),))


# Work is done twice, or waits.


def _evicted_stops(figures: LogFigures, limit: Limit) -> float | None:
    """The share of the lookups that stopped at an evicted block; None: below the limit."""
    stops, lookups = figures.stops_at(Gone.EVICTED.value), figures.hits.lookups
    return stops / lookups if stops >= limit.least and stops >= limit.share * lookups else None


def _burst(figures: LogFigures) -> BurstFigures | None:
    """The burst that contains most evictions of wanted blocks; None: they are spread over the time."""
    burst = figures.evictions.burst
    if burst is None or burst.ended_ns - burst.began_ns > BURST_TIME * (figures.ended_ns - figures.began_ns):
        return None
    return burst


def _flood(figures: LogFigures) -> GroupFigures | None:
    """The KV cache group that fills the pool with blocks that are hardly read; None: there is none."""
    stored, hits = sum(group.stored for group in figures.groups), sum(group.hits for group in figures.groups)
    for group in figures.groups:
        rest, rest_hits = stored - group.stored, hits - group.hits
        most = bool(rest) and group.stored >= FLOOD_STORED * stored
        if most and group.hits / group.stored <= FLOOD_READ * rest_hits / rest:
            return group
    return None


def eviction_burst(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that most evictions of wanted blocks happened in a short time."""
    share, burst = _evicted_stops(figures, limit), _burst(figures)
    if share is None or burst is None:
        return None
    evictions = figures.evictions
    began, ended = [after_start(ns, figures.log_began_ns) for ns in (burst.began_ns, burst.ended_ns)]
    text = (
        f"A burst evicted what was wanted later: {burst.wanted:,} of {evictions.wanted:,} such blocks went "
        f"between {began} and {ended}"
    )
    evidence = (
        f"{percent(share)} of the lookups stopped at an evicted block",
        f"they made room for {number(burst.requests, 'request')}, most for {', '.join(burst.names)}; "
        f"of {burst.unread:,} of these no block was ever read again",
        "a policy that resists scans (arc, s3fifo, sieve) or a store threshold keeps such blocks out",
    )
    commands = (
        _other_pools(figures, "--policy", "lru,arc,s3fifo,slru,sieve"),
        _command(figures, "report", "--since", began, "--until", ended),
    )
    return Noticed(share, text, evidence, commands)


def group_floods(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that one KV cache group fills the pool with blocks that are hardly read."""
    share, flood = _evicted_stops(figures, limit), _flood(figures)
    if share is None or flood is None:
        return None
    stored = sum(group.stored for group in figures.groups)
    text = (
        f"KV cache group {flood.group} thrashes: it has {percent(flood.stored, stored)} of the stored "
        f"blocks, and {percent(flood.unread, flood.evicted)} of its evicted blocks were never read"
    )
    evidence = (
        f"{percent(share)} of the lookups stopped at an evicted block",
        "; ".join(
            f"group {group.group}: {group.stored:,} stored, {group.hits:,} read, {group.evicted:,} evicted"
            for group in figures.groups
        ),
        "a sliding window stores every block, and a hit needs only the blocks at its end",
    )
    return Noticed(share, text, evidence, (_command(figures, "query", _BY_GROUP),))


def pool_too_small(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that lookups stop at evicted blocks, without a burst or a group that floods the pool."""
    share = _evicted_stops(figures, limit)
    if share is None or _burst(figures) is not None or _flood(figures) is not None:
        return None
    evictions, slots = figures.evictions, figures.config.host_blocks
    text = (
        f"The host pool is too small: {percent(share)} of the lookups stopped at a block that was evicted "
        "before"
    )
    evidence = (
        f"{number(evictions.evicted, 'block')} evicted from {slots:,} slots, "
        f"{percent(evictions.unread, evictions.evicted)} of them never read",
        f"half of them lived {duration(evictions.age.p50_ns or 0)}; half of the wanted ones were wanted "
        f"within {duration(evictions.until_wanted.p50_ns or 0)} after",
    )
    larger = _other_pools(figures, "--host-blocks", f"{slots}..{8 * slots}")
    return Noticed(share, text, evidence, (larger,))


def resets(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that resets drop blocks which later lookups miss."""
    stops, lookups, resets = figures.stops_at(Gone.RESET.value), figures.hits.lookups, figures.resets
    if resets.resets < limit.least or stops < limit.share * lookups or not stops:
        return None
    text = (
        f"The cache is reset too often: {number(resets.resets, 'reset')} dropped {resets.keys:,} blocks, and "
        f"{percent(stops, lookups)} of the lookups stopped at one of them"
    )
    every = (figures.ended_ns - figures.began_ns) // resets.resets
    evidence = (f"one every {duration(every)} on average; look for calls of reset_prefix_cache",)
    query = "SELECT event, wall_ns, keys FROM resets ORDER BY event LIMIT 10"
    return Noticed(stops / lookups, text, evidence, (_command(figures, "query", query),))


def never_stored(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that blocks are computed twice, because they were not stored in between."""
    again, lookups = figures.recomputed, figures.hits.lookups
    if again.lookups < limit.least or again.lookups < limit.share * lookups:
        return None
    text = (
        f"Stores do not keep up: {percent(again.lookups, lookups)} of the lookups stopped at a block that "
        "was computed before and never stored"
    )
    evidence = (
        f"{number(again.keys, 'block')}, missed again {duration(again.apart_ns)} later or more",
        "with a lazy store the device evicts blocks before they are stored: raise lazy_target_blocks, or "
        "store eagerly",
    )
    query = (
        "SELECT missed, count(*) AS times FROM lookups WHERE why = 'never stored' "
        "GROUP BY missed ORDER BY times DESC LIMIT 10"
    )
    return Noticed(again.lookups / lookups, text, evidence, (_command(figures, "query", query),))


_AVOIDABLE = {
    SkipReason.POOL_FULL.value: "every slot is pinned or copied: raise host_blocks, or see what pins them",
    SkipReason.TOO_MANY_TRANSFERS.value: "copies are slow, or max_live_transfers is too low",
}
"""The reasons for a skip that a user can do something about, with advice."""


def skipped(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that offered blocks are skipped, because the pool is full or too many transfers are live."""
    skips = [skip for skip in figures.skips if skip.reason in _AVOIDABLE]
    skipped = sum(skip.blocks for skip in skips)
    offered = skipped + figures.stored
    if skipped < limit.least or skipped < limit.share * offered:
        return None
    text = (
        f"Blocks are offered and not stored: {skipped:,} times, and {figures.stored:,} blocks were stored "
        f"({skips[0].reason})"
    )
    evidence = tuple(f"{skip.reason}: {skip.blocks:,}: {_AVOIDABLE[skip.reason]}" for skip in skips)
    pool = figures.pool
    evidence += (f"of {pool.slots:,} slots up to {pool.pinned:,} were pinned, {pool.storing:,} being stored",)
    query = "SELECT reason, sum(blocks) FROM skips GROUP BY reason"
    return Noticed(skipped / offered, text, evidence, (_command(figures, "query", query),))


def preemptions(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that many requests are preempted."""
    requests = figures.requests
    if requests.preempted < limit.least or requests.preempted < limit.share * requests.requests:
        return None
    text = (
        f"The device pool is too small for what runs on it: {number(requests.preemptions, 'preemption')} of "
        f"{requests.preempted:,} requests ({percent(requests.preempted, requests.requests)})"
    )
    evidence = (
        f"{figures.config.device_blocks:,} device blocks; a preempted request loads or computes all its "
        "blocks again: admit fewer requests, or give the device more blocks",
    )
    query = "SELECT request, preemptions FROM requests ORDER BY preemptions DESC LIMIT 10"
    return Noticed(
        requests.preempted / requests.requests, text, evidence, (_command(figures, "query", query),)
    )


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
    shown = _command(figures, "why", "--transfer", top.transfer)
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
    return Noticed(loading_ns / waits.lived_ns, text, evidence, (_command(figures, "query", query),))
