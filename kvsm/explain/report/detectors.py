"""The detectors: one small function for each kind of trouble.

Each looks at the figures of a log. It returns None below its limit, and else what it saw: what is wrong in
plain words, the numbers that say so, and commands that show it. `troubles.py` has the limits and the reasons
for them.
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
    """From where on a detector speaks: at `share` of the whole, and at `least` cases. 0: no such limit."""

    share: float = 0.0
    least: int = 1

    def __str__(self) -> str:
        if not self.share:
            return f"{self.least:,}"
        share = percent(self.share) if self.share < 1 else f"{self.share:g} times"
        return f"{share}, and {self.least:,} cases" if self.least > 1 else share


class Noticed(NamedTuple):
    """What a detector found: see `Trouble`."""

    impact: float
    text: str
    evidence: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


LATE_LEAST_NS, LATE_TIMES = 5_000_000_000, 10
"""A copy is missing after 5 s, and after ten times as long as 99 % of the copies took."""

OVERDUE_LEAST_NS, OVERDUE_TIMES = 60_000_000_000, 2
"""A request is overdue after a minute, and after twice the time of the longest request that ended."""

APART_NS = 5_000_000_000
"""A block that two lookups miss 5 s apart was computed twice."""

STILL_WRITTEN_NS = 60_000_000_000
"""A log that is not closed, and whose last event is younger than a minute, may still be written."""

BURST_TIME = 0.2
"""A burst of evictions takes at most this part of the time."""

FLOOD_STORED, FLOOD_READ = 0.6, 1 / 3
"""A KV cache group floods the pool if it has this part of the stored blocks, and its blocks are read at most
this often, compared with the others."""


def percent(part: float, whole: float = 1.0) -> str:
    """`62 %`, `4.1 %` or `0.2 %`."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f} %" if share >= 9.95 or share == 0 else f"{share:.1f} %"


def number(count: int, thing: str, things: str = "") -> str:
    """`1 copy` or `1,200 copies`."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def _command(figures: LogFigures, verb: str, *arguments: object) -> str:
    """A command line that can be pasted, for any names in it."""
    return " ".join(["kvsm", verb, *map(_quoted, (figures.log, *arguments))])


def _other_pools(figures: LogFigures, *options: object) -> str:
    """What shows the same log with another pool. `whatif` is for one KV cache group."""
    if len(figures.groups) > 1:
        return _command(figures, "query", _BY_GROUP)
    return _command(figures, "whatif", *options)


_BY_GROUP = (
    f"SELECT substr(key, -{2 * GROUP_INDEX_BYTES}) AS kv_group, count(*) AS blocks, sum(hits) AS hits, "
    "sum(why = 'evicted') AS evicted FROM blocks GROUP BY kv_group"
)


def _quoted(argument: object) -> str:
    """An argument for a shell. SQL has single quotes in it, and reads better in double ones."""
    text = str(argument)
    return f'"{text}"' if "'" in text and not set(text) & set('"$`\\!') else shlex.quote(text)


# The log or the state is wrong.


def property_broken(figures: LogFigures, _limit: Limit) -> Noticed | None:
    """An event breaks a property, or cannot follow."""
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
    """The bytes are not the ones that were written."""
    if figures.check.damage is None:
        return None
    text = f"The log is damaged, and is read up to event {figures.last:,}: {figures.check.damage}"
    return Noticed(1.0, text, (), (_command(figures, "verify"),))


def events_missing(figures: LogFigures, _limit: Limit) -> Noticed | None:
    """Events are missing before the end."""
    if figures.end.complete:
        return None
    text = f"Events are missing from the log: {figures.end.notes[0]}"
    why = "a disk that is full or fails is the usual cause; figures about what is missing are too low"
    return Noticed(0.9, text, (*figures.end.notes[1:], why), (_command(figures, "verify"),))


# The engine ended, or something in it hangs.


def engine_stopped(figures: LogFigures, _limit: Limit) -> Noticed | None:
    """The engine closed the log with an error."""
    if figures.end.engine != LogEnd.STOPPED.value:
        return None
    text = f"The engine ended with an error: {figures.end.error}"
    return Noticed(1.0, text, _left_behind(figures), (_command(figures, "verify"),))


GIVE_TIME = "Give it time to end: `vllm serve --shutdown-timeout 30`"
"""The advice if a stop kills an engine."""


def engine_killed(figures: LogFigures, _limit: Limit) -> Noticed | None:
    """Nobody closed the log, and nobody writes it."""
    end = figures.end
    if end.engine != LogEnd.OPEN.value or end.silent_ns is None or end.silent_ns < STILL_WRITTEN_NS:
        return None
    busy = figures.requests.open or any(one.waiting + one.missing for one in figures.copies.ranks)
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
    """Processes ended without closing the log, and others went on."""
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
    """What was open when the engine ended."""
    copies = max((one.waiting + one.missing for one in figures.copies.ranks), default=0)
    states = ", ".join(f"{count:,} {state}" for state, count in figures.requests.states.items())
    told = [f"{number(figures.requests.open, 'request')} ({states})"] if states else []
    told += [f"{number(copies, 'transfer')} in flight"] if copies else []
    return (f"open at the end: {', '.join(told) or 'nothing'}",)


def rank_silent(figures: LogFigures, limit: Limit) -> Noticed | None:
    """A rank does not report copies any more."""
    ranks = figures.copies.ranks
    silent = [one for one in ranks if one.missing >= limit.least]
    if not silent:
        return None
    worst = max(silent, key=lambda one: one.missing)
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
    told = tuple(f"rank {one.rank} lacks {one.missing:,} of {one.copies:,} reports" for one in silent[:4])
    told += (f"a copy is overdue after {late}: 99 % of the copies took a tenth of that or less",)
    if len(silent) < len(ranks):
        told += ("every other rank has reported all that was due",)
    where = f"worker = {worst.rank} AND reported IS NULL"
    query = f"SELECT * FROM copies WHERE {where} ORDER BY transfer LIMIT 10"
    return Noticed(
        worst.missing / worst.copies,
        text,
        told,
        (_command(figures, "query", query), _command(figures, "verify")),
    )


def _reports_again(rank: RankFigures, late_ns: int) -> bool:
    """Whether a rank went on to report long after a copy that it never reported."""
    last_ns, since_ns = rank.last_ns, rank.missing_since_ns
    return last_ns is not None and since_ns is not None and last_ns > since_ns + late_ns


def requests_unfinished(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Requests without an end that are older than any other."""
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
        "somebody forgets to finish or abort requests: what they hold on the device or the host stays held",
    )
    oldest = requests.oldest[0]
    shown = _command(figures, "why", *(["--", oldest] if oldest.startswith("-") else [oldest]))
    return Noticed(requests.overdue / requests.requests, text, evidence, (shown, _command(figures, "verify")))


# A part fails or is slow.


def rank_fails(figures: LogFigures, limit: Limit) -> Noticed | None:
    """A rank fails copies."""
    ranks = figures.copies.ranks
    failing = [one for one in ranks if one.failed >= limit.least and one.failed >= limit.share * one.reported]
    if not failing:
        return None
    worst = max(failing, key=lambda one: one.failed / one.reported)
    others = [one for one in ranks if one not in failing]
    subject = f"Rank {worst.rank} fails" if others or len(ranks) == 1 else "Every rank fails"
    text = (
        f"{subject} {percent(worst.failed, worst.reported)} of its copies ({worst.failed:,} of "
        f"{worst.reported:,})"
    )
    evidence = [f"rank {worst.rank} said {times:,} times: {error}" for error, times in worst.errors[:2]]
    if not worst.errors:
        evidence.append("the log does not tell why")
    evidence += [
        f"rank {one.rank} fails {percent(one.failed, one.reported)}" for one in failing if one is not worst
    ]
    if others:
        failed, reported = sum(one.failed for one in others), sum(one.reported for one in others)
        rest = f"the other {number(len(others), 'rank')}" if len(others) > 1 else f"rank {others[0].rank}"
        evidence.append(f"{rest}: {percent(failed, reported)} ({failed:,} of {reported:,})")
    if figures.requests.failed_loads:
        evidence.append(f"{number(figures.requests.failed_loads, 'load')} of requests failed with it")
    query = f"SELECT * FROM copies WHERE worker = {worst.rank} AND good = 0 ORDER BY transfer LIMIT 10"
    return Noticed(worst.failed / worst.reported, text, tuple(evidence), (_command(figures, "query", query),))


def rank_slow(figures: LogFigures, limit: Limit) -> Noticed | None:
    """A rank takes longer than the others."""
    timed = [one for one in figures.copies.ranks if one.reported >= limit.least]
    for one in sorted(timed, key=_p50, reverse=True):
        others = sorted(_p50(other) for other in timed if other is not one)
        if others and _p50(one) >= limit.share * others[len(others) // 2]:
            usual = others[len(others) // 2]
            text = (
                f"Rank {one.rank} is slow: half of its copies take {duration(_p50(one))} or longer, and "
                f"{duration(usual)} on the other ranks"
            )
            evidence = (
                f"rank {one.rank}: p99 {duration(one.latency.p99_ns or 0)}, longest "
                f"{duration(one.latency.max_ns or 0)}; every transfer waits for its last rank",
            )
            took = "reported_ns - submitted_ns"
            query = f"SELECT *, {took} AS ns FROM copies WHERE worker = {one.rank} ORDER BY ns DESC LIMIT 10"
            return Noticed(
                1 - usual / max(1, _p50(one)), text, evidence, (_command(figures, "query", query),)
            )
    return None


def _p50(rank: RankFigures) -> int:
    return rank.latency.p50_ns or 0


def reports_rejected(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Reports change nothing."""
    rejected = sum(one.reports for one in figures.rejected)
    counted = sum(one.reported for one in figures.copies.ranks)
    if rejected < limit.least or rejected < limit.share * (rejected + counted):
        return None
    most = figures.rejected[0]
    text = (
        f"{percent(rejected, rejected + counted)} of the workers' reports are rejected "
        f"({rejected:,} of {rejected + counted:,}); most come from rank {most.rank}"
    )
    evidence = tuple(
        f"rank {one.rank}: {number(one.reports, 'report')}: {one.reason}" for one in figures.rejected[:3]
    )
    query = "SELECT * FROM rejections ORDER BY event LIMIT 10"
    return Noticed(rejected / (rejected + counted), text, evidence, (_command(figures, "query", query),))


# Work is done twice, or waits.


def _evicted_stops(figures: LogFigures, limit: Limit) -> float | None:
    """The part of the lookups that stopped at an evicted block. None: below the limit."""
    stops, lookups = figures.stops_at(Gone.EVICTED.value), figures.hits.lookups
    return stops / lookups if stops >= limit.least and stops >= limit.share * lookups else None


def _burst(figures: LogFigures) -> BurstFigures | None:
    """The burst to which most evictions of wanted blocks belong, if there was one."""
    burst = figures.evictions.burst
    if burst is None or burst.ended_ns - burst.began_ns > BURST_TIME * (figures.ended_ns - figures.began_ns):
        return None
    return burst


def _flood(figures: LogFigures) -> GroupFigures | None:
    """The KV cache group that fills the pool with blocks that are hardly read, if there is one."""
    stored, hits = sum(one.stored for one in figures.groups), sum(one.hits for one in figures.groups)
    for one in figures.groups:
        rest, rest_hits = stored - one.stored, hits - one.hits
        most = bool(rest) and one.stored >= FLOOD_STORED * stored
        if most and one.hits / one.stored <= FLOOD_READ * rest_hits / rest:
            return one
    return None


def eviction_burst(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Wanted blocks were evicted in a short time."""
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
    """One KV cache group fills the pool with what is hardly read."""
    share, flood = _evicted_stops(figures, limit), _flood(figures)
    if share is None or flood is None:
        return None
    stored = sum(one.stored for one in figures.groups)
    text = (
        f"KV cache group {flood.group} thrashes: it has {percent(flood.stored, stored)} of the stored "
        f"blocks, and {percent(flood.unread, flood.evicted)} of its evicted blocks were never read"
    )
    evidence = (
        f"{percent(share)} of the lookups stopped at an evicted block",
        "; ".join(
            f"group {one.group}: {one.stored:,} stored, {one.hits:,} read, {one.evicted:,} evicted"
            for one in figures.groups
        ),
        "a sliding window stores every block, and a hit needs only the blocks at its end",
    )
    return Noticed(share, text, evidence, (_command(figures, "query", _BY_GROUP),))


def pool_too_small(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Blocks are evicted that are wanted later."""
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
    """Resets drop what is wanted later."""
    stops, lookups, resets = figures.stops_at(Gone.RESET.value), figures.hits.lookups, figures.resets
    if resets.resets < limit.least or stops < limit.share * lookups or not stops:
        return None
    text = (
        f"The cache is reset too often: {number(resets.resets, 'reset')} dropped {resets.keys:,} blocks, and "
        f"{percent(stops, lookups)} of the lookups stopped at one of them"
    )
    every = (figures.ended_ns - figures.began_ns) // resets.resets
    evidence = (f"one every {duration(every)} on average; somebody calls reset_prefix_cache",)
    query = "SELECT event, wall_ns, keys FROM resets ORDER BY event LIMIT 10"
    return Noticed(stops / lookups, text, evidence, (_command(figures, "query", query),))


def never_stored(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Blocks are computed twice, because no store came in between."""
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
"""Why a block is skipped although there is something to do about it."""


def skipped(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Blocks are offered, and there is no room or no transfer for them."""
    skips = [one for one in figures.skips if one.reason in _AVOIDABLE]
    skipped = sum(one.blocks for one in skips)
    offered = skipped + figures.stored
    if skipped < limit.least or skipped < limit.share * offered:
        return None
    text = (
        f"Blocks are offered and not stored: {skipped:,} times, and {figures.stored:,} blocks were stored "
        f"({skips[0].reason})"
    )
    evidence = tuple(f"{one.reason}: {one.blocks:,}: {_AVOIDABLE[one.reason]}" for one in skips)
    pool = figures.pool
    evidence += (f"of {pool.slots:,} slots up to {pool.pinned:,} were pinned, {pool.storing:,} being stored",)
    query = "SELECT reason, sum(blocks) FROM skips GROUP BY reason"
    return Noticed(skipped / offered, text, evidence, (_command(figures, "query", query),))


def preemptions(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Requests are preempted."""
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
    """Requests wait for copies of others."""
    waits = figures.waits
    if waits.deferred < limit.least or waits.deferred_ns < limit.share * waits.lived_ns or not waits.top:
        return None
    top = waits.top[0]
    one = top.waited_ns > waits.deferred_ns / 2
    copy = f"{top.direction} {top.transfer}"
    subject = f"Requests wait for one copy, {copy}" if one else "Requests wait for copies of others"
    text = (
        f"{subject}: {number(top.requests if one else waits.deferred, 'request')} waited "
        f"{duration(top.waited_ns if one else waits.deferred_ns)} together, "
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
    """Requests wait for their own loads. Time until a step notices the end of a copy is left out."""
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
