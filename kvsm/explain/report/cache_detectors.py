"""The detectors for hits, evictions, floods and the pool: one function for each kind of trouble.

They work as those of `detectors.py`.
"""

from __future__ import annotations

from kvsm.core.kv_events import GROUP_INDEX_BYTES
from kvsm.events import SkipReason
from kvsm.explain.report.command_lines import command as _command
from kvsm.explain.report.detectors import Limit, Noticed, number, percent
from kvsm.explain.report.figures import BurstFigures, GroupFigures, LogFigures
from kvsm.explain.story.times import after_start, duration
from kvsm.explain.tables.row_kinds import Gone

BURST_TIME = 0.2
"""A burst of evictions takes at most this share of the time."""

FLOOD_STORED, FLOOD_READ = 0.6, 1 / 3
"""A KV cache group floods the pool if it has at least `FLOOD_STORED` of the stored blocks, and its blocks on
average have at most `FLOOD_READ` times as many hits as blocks of the other groups."""


def _other_pools(figures: LogFigures, *options: object) -> str:
    """A command that predicts other pools; with several KV cache groups, which `whatif` lacks, a query."""
    if len(figures.groups) > 1:
        return _command(figures, "query", _BY_GROUP)
    return _command(figures, "whatif", *options)


_BY_GROUP = (
    f"SELECT substr(key, -{2 * GROUP_INDEX_BYTES}) AS kv_group, count(*) AS blocks, sum(hits) AS hits, "
    "sum(why = 'evicted') AS evicted FROM blocks GROUP BY kv_group"
)


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
