"""The detectors for hits, evictions, floods and the pool: one function for each kind of trouble, as in
`detectors.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from kvsm.core.kv_events import GROUP_INDEX_BYTES
from kvsm.events import SkipReason
from kvsm.explain.report.command_lines import command as _command
from kvsm.explain.report.detectors import Limit, Noticed, number, percent
from kvsm.explain.report.figures import (
    BurstFigures,
    FloodFigures,
    GroupFigures,
    LogFigures,
    SkipFigures,
    TrialFigures,
)
from kvsm.explain.story.times import after_start, duration
from kvsm.explain.tables.row_kinds import Gone

BURST_TIME = 0.2
"""A burst takes at most this share of the time between the first and the last eviction."""

BURST_TIMES, BURST_DEVIATIONS, BURST_BATCHES, BURST_UNREAD = 2, 4, 20, 0.5
"""Conditions for a burst:

- Three quarters of its time have at least `BURST_TIMES` times the usual rate of evictions.
- Its number of evictions is `BURST_DEVIATIONS` standard deviations above the usual one. By chance this is so
  for the densest of 50 parts of the time in one log of 500.
- The usual rate is known from at least `BURST_BATCHES` evictions outside of the burst.
- At least the share `BURST_UNREAD` of the requests that it makes room for store no block that is ever read.
"""

POOL_STOPS = Limit(0.1, 10)
"""A pool may be too small if at least this many lookups stop at an evicted block."""

TRIED_FROM = Limit(0.05, 10)
"""Remedies are tried if this many lookups stopped at an evicted block: the lowest limit of the detectors that
need them."""

FLOOD_STORED, FLOOD_READ = 0.6, 1 / 3
"""A KV cache group floods the pool if it has at least `FLOOD_STORED` of the stored blocks, and its blocks on
average have at most `FLOOD_READ` times as many hits as blocks of the other groups."""


_BY_GROUP = (
    f"SELECT substr(key, -{2 * GROUP_INDEX_BYTES}) AS kv_group, count(*) AS blocks, sum(hits) AS hits, "
    "sum(why = 'evicted') AS evicted FROM blocks GROUP BY kv_group"
)


def wants_trial(figures: LogFigures) -> bool:
    """Whether a finding may propose a remedy for evictions, so remedies must be simulated."""
    return _evicted_stops(figures, TRIED_FROM) is not None or _finds_no_room(figures)


def has_burst(figures: LogFigures) -> bool:
    """Whether most evictions of wanted blocks come from a burst."""
    return _burst(figures) is not None


def _evicted_stops(figures: LogFigures, limit: Limit) -> float | None:
    """The share of the lookups that stopped at an evicted block; None: below the limit."""
    stops, lookups = figures.stops_at(Gone.EVICTED.value), figures.hits.lookups
    return stops / lookups if stops >= limit.least and stops >= limit.share * lookups else None


def _burst(figures: LogFigures) -> BurstFigures | None:
    """The burst that contains most evictions of wanted blocks; None: they are spread over the time."""
    burst = figures.evictions.burst
    if burst is None or burst.ended_ns - burst.began_ns > BURST_TIME * (burst.last_ns - burst.full_ns):
        return None
    dense = burst.lowest >= BURST_TIMES * burst.usual and burst.deviations >= BURST_DEVIATIONS
    scan = burst.unread >= BURST_UNREAD * burst.requests
    return burst if dense and scan and burst.batches >= BURST_BATCHES else None


def _group_flood(figures: LogFigures) -> GroupFigures | None:
    """The KV cache group that fills the pool with blocks that are hardly read; None: there is none."""
    stored, hits = sum(group.stored for group in figures.groups), sum(group.hits for group in figures.groups)
    for group in figures.groups:
        rest, rest_hits = stored - group.stored, hits - group.hits
        most = bool(rest) and group.stored >= FLOOD_STORED * stored
        if most and group.hits / group.stored <= FLOOD_READ * rest_hits / rest:
            return group
    return None


FALL_PARTING, FALL_DEVIATIONS, FALL_NEW, FALL_RATE = 0.5, 4, 0.7, 0.75
"""Prompts have changed if the share `FALL_PARTING` of them first differ from earlier prompts at the same
block, this share was smaller before by `FALL_DEVIATIONS` standard deviations, the share `FALL_NEW` of the
fall is due to new content, and the number of blocks found per unit of time is at most `FALL_RATE` times that
before. Additional requests of another kind do not lower the latter."""


def hits_fell(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that hits fell because prompts no longer begin like earlier ones. Other causes have their own
    detectors."""
    fall = figures.hits.fall
    if fall is None or min(fall.lookups_before, fall.lookups_after) < limit.least:
        return None
    less = fall.before - fall.after >= limit.share * fall.before
    part = fall.parting >= FALL_PARTING and fall.deviations >= FALL_DEVIATIONS
    evicted = _evicted_stops(figures, TRIED_FROM) is not None
    flooded = evicted and (_tenant_flood(figures) is not None or _burst(figures) is not None)
    if not less or not part or fall.new < FALL_NEW or fall.rate > FALL_RATE or flooded:
        return None
    at, tokens = after_start(fall.at_ns, figures.log_began_ns), figures.hits.block_tokens
    place = f" (tokens {fall.part_at * tokens:,} to {(fall.part_at + 1) * tokens - 1:,})" if tokens else ""
    text = (
        f"Hits fell at {at} from {percent(fall.before)} to {percent(fall.after)} of the asked blocks: "
        f"{percent(fall.parting)} of the prompts since then first differ from all earlier ones at block "
        f"{fall.part_at}{place}; before, {percent(fall.parted_before)} did, and half of the prompts "
        f"shared {number(fall.shared_before, 'block')} or more"
    )
    evidence = (
        f"{number(fall.lookups_before, 'lookup')} before and {fall.lookups_after:,} after; "
        f"{percent(fall.new)} of the fall is due to content that no request had asked for before",
        "the usual causes: a time or an id in the system prompt, tools in random order, another hash seed or "
        "cache salt after a deploy",
    )
    query = (
        "SELECT event, request, asked, on_device + on_host AS found, why FROM lookups "
        f"WHERE event >= {fall.event} AND admitted IS NOT NULL ORDER BY event LIMIT 10"
    )
    commands = (_why(figures, fall.request), _command(figures, "query", query))
    return Noticed(fall.before - fall.after, text, evidence, commands)


def _why(figures: LogFigures, request: str) -> str:
    return _command(figures, "why", *(["--", request] if request.startswith("-") else [request]))


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
        f"{number(burst.evicted, 'block')} evicted in this time; {burst.usual:,} is usual for as much time "
        f"since the first eviction at {after_start(burst.full_ns, figures.log_began_ns)}",
        f"they made room for {number(burst.requests, 'request')}, most for {', '.join(burst.names)}; "
        f"of {burst.unread:,} of these no block was ever read again",
        *_tried(figures, lambda trial: trial.host_blocks == figures.config.host_blocks),
    )
    commands = (_command(figures, "report", "--since", began, "--until", ended), _wanted(figures))
    return Noticed(share, text, evidence, commands)


def group_floods(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that one KV cache group fills the pool with blocks that are hardly read."""
    share, flood = _evicted_stops(figures, limit), _group_flood(figures)
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


def tenant_floods(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect requests whose blocks are hardly read, and evict blocks that other requests want."""
    flood, stops = _tenant_flood(figures), figures.stops_at(Gone.EVICTED.value)
    if flood is None or _burst(figures) is not None:
        return None
    share = stops / max(1, figures.hits.lookups * (flood.of - flood.requests) / flood.of)
    if stops < limit.least or share < limit.share:
        return None
    text = (
        f"Requests {flood.who} flood the host pool: {flood.requests:,} of {flood.of:,} requests stored "
        f"{percent(flood.stored, flood.all_stored)} of the blocks; on average each of these was read "
        f"{_times(flood.read, flood.stored)}, and each block of other requests "
        f"{_times(flood.all_read - flood.read, flood.all_stored - flood.stored)}"
    )
    evidence = (
        f"{percent(min(1.0, share))} of the other requests' lookups stopped at an evicted block",
        f"the requests that stored most: {', '.join(flood.names)}",
        f"if their stores were refused: {_gained(flood)}",
        *_tried(figures, lambda trial: trial.host_blocks != figures.config.host_blocks),
    )
    return Noticed(min(1.0, share), text, evidence, (_command(figures, "query", _BY_REQUEST),))


_BY_REQUEST = (
    "SELECT requests, sum(blocks) AS stored, sum(blocks * hits) AS reads FROM block_runs "
    "WHERE stored IS NOT NULL GROUP BY requests ORDER BY stored DESC LIMIT 10"
)


def pool_too_small(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that lookups stop at evicted blocks that a larger pool would have kept."""
    share, remedies = _evicted_stops(figures, limit), figures.remedies
    if share is None or _burst(figures) is not None or _group_flood(figures) is not None:
        return None
    tried = remedies is not None and remedies.why_not is None
    if tried and (_tenant_flood(figures) is not None or _larger_pool(figures) is None):
        return None
    evictions, slots = figures.evictions, figures.config.host_blocks
    text = (
        f"The host pool {'is' if tried else 'may be'} too small: {percent(share)} of the lookups stopped at "
        "a block that was evicted before"
    )
    evidence = (
        *_tried(figures, lambda trial: trial.host_blocks != slots),
        f"{number(evictions.evicted, 'block')} evicted from {slots:,} slots, "
        f"{percent(evictions.unread, evictions.evicted)} of them never read",
        f"half of them lived {duration(evictions.age.p50_ns or 0)}; half of the wanted ones were wanted "
        f"within {duration(evictions.until_wanted.p50_ns or 0)} after",
    )
    larger = (
        _command(figures, "whatif", "--host-blocks", f"{slots}..{8 * slots}") if tried else _wanted(figures)
    )
    return Noticed(share, text, evidence, (larger,))


def _wanted(figures: LogFigures) -> str:
    """Return a command that lists the evicted blocks that lookups missed, or with several KV cache groups,
    the groups."""
    return _command(figures, "query", _BY_GROUP if len(figures.groups) > 1 else _MISSED)


_MISSED = (
    "SELECT event, request, missed, cause, cause_requests FROM lookups "
    "WHERE why = 'evicted' AND admitted IS NOT NULL AND NOT resumed ORDER BY event LIMIT 10"
)


def _larger_pool(figures: LogFigures) -> TrialFigures | None:
    """The smallest of the larger pools tried that gains; None: none gains."""
    remedies, slots = figures.remedies, figures.config.host_blocks
    trials = () if remedies is None else remedies.trials
    return next((trial for trial in trials if trial.host_blocks > slots and trial.gains), None)


def _tenant_flood(figures: LogFigures) -> FloodFigures | None:
    """The requests that flood the pool, if refusing their stores gains at least as much as doubling the
    pool."""
    if figures.remedies is None or figures.remedies.flood is None:
        return None
    flood = figures.remedies.flood
    return flood if flood.gain >= flood.doubled else None


def _tried(figures: LogFigures, which: Callable[[TrialFigures], bool]) -> tuple[str, ...]:
    """Format the simulated gain of the remedies of one kind, or why none can be simulated."""
    remedies, own = figures.remedies, figures.config
    if remedies is None:
        return ()
    if remedies.why_not is not None:
        return (f"whatif cannot try a remedy on this log: {remedies.why_not}",)
    part = (
        ""
        if (remedies.first, remedies.last) == (figures.first, figures.last)
        else (f", in events {remedies.first:,} to {remedies.last:,}")
    )
    trials = [trial for trial in remedies.trials if which(trial)]
    best = max(trials, key=lambda trial: trial.gain, default=None)
    if best is None:
        return ()
    names = {
        trial: f"{trial.host_blocks:,} slots"
        if trial.host_blocks != own.host_blocks
        else f"a store threshold of {trial.store_threshold}"
        if trial.store_threshold != own.store_threshold
        else trial.policy
        for trial in trials
    }
    if best.gains:
        return (f"with {names[best]}: {_gained(best)}{part} (whatif)",)
    return (f"no gain beyond the error of whatif with {', '.join(names.values())}{part}",)


def _gained(trial: TrialFigures | FloodFigures) -> str:
    points = f"{100 * trial.gain:.1f} points"
    return f"{points} more of the asked blocks found, with an error of up to {100 * trial.error:g}"


def _times(part: int, whole: int) -> str:
    return f"{part / whole if whole else 0:.2g} times"


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
        "store eagerly (not tried: whatif has no model of a lazy store)",
    )
    query = (
        "SELECT missed, count(*) AS times FROM lookups WHERE why = 'never stored' "
        "GROUP BY missed ORDER BY times DESC LIMIT 10"
    )
    return Noticed(again.lookups / lookups, text, evidence, (_command(figures, "query", query),))


_AVOIDABLE = {
    SkipReason.POOL_FULL.value: "every slot is pinned or copied",
    SkipReason.TOO_MANY_TRANSFERS.value: "copies are slow, or max_live_transfers is too low",
}
"""Advice for the reasons of a skip that a user can always do something about."""

_SELDOM = "store_threshold is too high: lookups stop at these blocks"


def _is_wanted(figures: LogFigures, skip: SkipFigures, limit: Limit) -> bool:
    """Whether blocks were skipped because of the store threshold, and many lookups stopped at such blocks."""
    stops = figures.stops_at(Gone.SKIPPED.value)
    wanted = stops >= limit.least and stops >= limit.share * figures.hits.lookups
    return skip.reason == SkipReason.BELOW_THRESHOLD.value and wanted


NO_ROOM = 0.05
"""A larger pool is tried if a full pool skipped at least this many blocks per stored block."""


def _finds_no_room(figures: LogFigures) -> bool:
    """Whether many blocks were skipped because the pool was full."""
    full = sum(skip.blocks for skip in figures.skips if skip.reason == SkipReason.POOL_FULL.value)
    return full > NO_ROOM * figures.stored


def skipped(figures: LogFigures, limit: Limit) -> Noticed | None:
    """Detect that offered blocks are skipped, because the pool is full or too many transfers are live."""
    if _finds_no_room(figures) and pool_too_small(figures, POOL_STOPS) is not None:
        return None
    skips = [skip for skip in figures.skips if skip.reason in _AVOIDABLE or _is_wanted(figures, skip, limit)]
    skipped = sum(skip.blocks for skip in skips)
    offered = skipped + figures.stored
    if skipped < limit.least or skipped < limit.share * offered:
        return None
    text = (
        f"Blocks are offered and not stored: {skipped:,} times, and {figures.stored:,} blocks were stored "
        f"({skips[0].reason})"
    )
    evidence = tuple(
        f"{skip.reason}: {skip.blocks:,}: {_AVOIDABLE.get(skip.reason, _SELDOM)}" for skip in skips
    )
    pool = figures.pool
    if _finds_no_room(figures):
        evidence += _tried(figures, lambda trial: trial.host_blocks != pool.slots)
    evidence += (f"of {pool.slots:,} slots up to {pool.pinned:,} were pinned, {pool.storing:,} being stored",)
    query = "SELECT reason, sum(blocks) FROM skips GROUP BY reason"
    return Noticed(skipped / offered, text, evidence, (_command(figures, "query", query),))
