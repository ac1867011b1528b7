"""`kvsm report`: summarize a log, and list what stands out in it. It needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from kvsm.cli.first_look import look_lines
from kvsm.cli.log_answers import end_lines, leave
from kvsm.cli.log_options import json_option, log_argument, trust_options, window_options
from kvsm.cli.opened_tables import opened_log, opened_tier
from kvsm.cli.output import Command, complain, say, say_json
from kvsm.cli.progress import counting
from kvsm.cli.sparkline import sparkline
from kvsm.core.log import LogEnd, LogReader
from kvsm.explain.report.confidence import MEASURED
from kvsm.explain.report.detectors import number, percent
from kvsm.explain.report.figures import (
    DiskFailureFigures,
    ElsewhereFigures,
    HandOverFigures,
    LogFigures,
    RankFigures,
    Spread,
    TierHitFigures,
)
from kvsm.explain.report.first_look import FirstLook, first_look
from kvsm.explain.report.log_report import Report, left_open, make_report
from kvsm.explain.report.regret import Regret, regret
from kvsm.explain.story import Trust
from kvsm.explain.story.times import VIRTUAL_NS, duration, utc
from kvsm.explain.story.window import EVERYTHING, LogPoint, Window, find_window
from kvsm.explain.tables.log_parts import is_large
from kvsm.explain.tables.opened import OpenedLog

_NAME_WIDTH = 12


@click.command(cls=Command)
@log_argument()
@window_options
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Check every property at every event, as `kvsm verify` does.  [default: if LOG is small (8 MB)]",
)
@click.option("--whole", is_flag=True, help="Index the whole of a large LOG, and report on all of it.")
@click.option(
    "--regret",
    "asks_regret",
    is_flag=True,
    help="Simulate LOG under each eviction policy, as `kvsm whatif` does, and compare.",
)
@trust_options
@json_option
def report(
    log: Path,
    since: LogPoint | None,
    until: LogPoint | None,
    verify: bool | None,
    whole: bool,
    asks_regret: bool,
    as_json: bool,
    **trust: Any,
) -> None:
    """Summarize LOG, and list what stands out in it.

    The summary covers hits, evictions, copies by rank, waits, the pool, and what is open where LOG ends. What
    stands out follows, the most urgent first, with commands to paste that show details.

    If the log of the other tier, host pool or disk, lies beside LOG, both tiers are summarized, with what
    stands out in either log.

    Of a large LOG without an index, the counts of each minute are shown first, within seconds. The summary
    then covers only the part that stands out most, or the part between --since and --until.

    \b
    Examples:
      kvsm report kvsm-log
      kvsm report kvsm-log --since +40s --until +60s     a part of the time
      kvsm report kvsm-log --whole                       all of a large log: indexes it first
      kvsm report kvsm-log --regret                      would another policy have found more?
      kvsm report kvsm-log --json | jq '.troubles[].name'

    Exits with 1 if a property is broken, or if LOG is damaged or lacks events. Anything else that stands out
    leaves the exit code at 0.
    """
    reader, part, look = LogReader(log), EVERYTHING, None
    if not whole and is_large(reader):
        part = find_window(reader, since, until)
        if part == EVERYTHING:
            look = _look(log)
            part = Window(look.closer.first, look.closer.last)
    with opened_log(log, part, **trust) as opened, opened_tier(opened, **trust) as other:
        window = opened.window(since, until) if part == EVERYTHING else EVERYTHING
        found = replace(make_report(opened, window, verify=verify, other=other, **trust), first_look=look)
        if asks_regret:
            found = replace(found, regret=_regret(reader, opened.window(since, until), **trust))
        if as_json:
            say_json(found)
        else:
            say(*([] if look is None else look_lines(look, log)), *report_lines(found, opened))
    check, whole = found.check, look is None or (look.complete and look.damage is None)
    for note in [] if look is None else look.notes:
        if note not in opened.condition.notes():
            complain(note)
    leave(opened.condition, good=whole and not check.broken and check.damage is None)


def _look(log: Path) -> FirstLook:
    with counting("counted up to event") as progress:
        return first_look(log, progress)


def _regret(reader: LogReader, window: Window, **trust: Any) -> Regret:
    with counting("read event") as progress:
        return regret(reader, Trust(**trust), window, progress)


def report_lines(found: Report, opened: OpenedLog) -> Iterator[str]:
    """Format the report for people, line by line."""
    yield from _head(found)
    for name, lines in (
        ("requests", _requests(found)),
        ("lookups", _lookups(found)),
        ("stopped", _stopped(found)),
        ("evicted", _evicted(found)),
        ("copies", _copies(found)),
        ("fetched", _fetches(found)),
        ("waits", _waits(found)),
        ("pool", _pool(found)),
        ("policies", _policies(found)),
        ("tiers", _tiers(found)),
        ("lives", _lives(found)),
        ("besides", _others(found)),
        ("properties", _properties(found)),
    ):
        for place, line in enumerate(lines):
            yield f"{'' if place else name:<{_NAME_WIDTH}}{line}"
    if found.last == opened.last and opened.condition.end is not LogEnd.NOT_REACHED:
        left = left_open(opened)
        if left.finished:
            yield f"{'at the end':<{_NAME_WIDTH}}nothing is open, and the engine closed the log"
        else:
            yield from ("", "at the end:", *end_lines(left))
    yield from ("", *_troubles(found))


def _policies(found: Report) -> Iterator[str]:
    """Say what the log's policy found, beside the best other one and the bound."""
    if found.regret is None:
        return
    if found.regret.own is None:
        yield f"no prediction: {found.regret.why_not}"
        return
    own, (best, *rest), error = found.regret.own, found.regret.others, found.regret.error_points
    points = 100 * (best.found_share - own.found_share)
    gain = f"{abs(points):.1f} points {'more' if points > 0 else 'less'}"
    if abs(points) <= error:
        gain = "no difference beyond the error"
    yield f"{own.policy} finds {own.found_share:.1%} on device or host, in a simulation of this log"
    most = f"{best.policy} finds {best.found_share:.1%}, the most of the others"
    yield f"{most}: {gain} (error {error:g} points)"
    yield f"no policy can find more than {found.regret.bound_share:.1%} in a pool of this size"
    yield ", ".join(f"{one.policy} {one.found_share:.1%}" for one in rest)


def _head(found: LogFigures) -> Iterator[str]:
    config, seconds = found.config, duration(found.ended_ns - found.began_ns)
    is_virtual = found.began_ns < VIRTUAL_NS
    dates = "virtual clock" if is_virtual else f"{utc(found.began_ns)} to {utc(found.ended_ns)}"
    part = "" if found.whole else " (a part of the log)"
    yield f"{found.log}: events {found.first:,} to {found.last:,}{part}"
    yield f"{dates}, {seconds}"
    tokens = f" of {config.block_tokens:,} tokens" if config.block_tokens else ""
    chunk = f" of {config.blocks_per_chunk} device blocks" if config.blocks_per_chunk > 1 else ""
    yield (
        f"{config.host_blocks:,} host slots{chunk} ({config.policy}), {config.device_blocks:,} device "
        f"blocks{tokens}, {number(config.workers, 'rank')}"
    )
    yield ""


def _requests(found: LogFigures) -> Iterator[str]:
    requests = found.requests
    parts = [f"{requests.finished:,} ended"]
    parts += [f"{requests.aborted:,} of them aborted"] if requests.aborted else []
    parts += [f"{requests.cut_off:,} ended with their process"] if requests.cut_off else []
    parts += [f"{requests.open:,} open"] if requests.open else []
    parts += [f"{requests.preempted:,} preempted"] if requests.preempted else []
    parts += [f"{requests.failed_loads:,} failed loads"] if requests.failed_loads else []
    yield f"{requests.requests:,}: {', '.join(parts)}"


def _lookups(found: LogFigures) -> Iterator[str]:
    hits = found.hits
    if hits.asked is None:
        yield f"{hits.lookups:,}; the log does not record how many blocks they asked for"
    elif not hits.asked:
        yield f"{hits.lookups:,}; they asked for no full block"
    else:
        yield f"{hits.lookups:,}, for {_amount(hits.asked, hits.block_tokens)}"
        for name, blocks in (("device", hits.on_device), ("host", hits.on_host), ("missed", hits.missed)):
            share, amount = percent(blocks or 0, hits.asked), _amount(blocks or 0, hits.block_tokens)
            yield f"{name:<7}{share:>6}  {amount}"
    what = "hits" if hits.asked is not None else "served"
    yield sparkline(what, hits.over_time)


def _amount(blocks: int, block_tokens: int) -> str:
    text = number(blocks, "block")
    return f"{text}, {_short(blocks * block_tokens)} tokens" if block_tokens else text


def _short(count: int) -> str:
    """Format a count as `950`, `12.1 k` or `2.9 M`."""
    for size, unit in ((10**9, " G"), (10**6, " M"), (10**4, " k")):
        if count >= size:
            return f"{count / (1000 if unit == ' k' else size):.1f}{unit}"
    return f"{count:,}"


def _stopped(found: LogFigures) -> Iterator[str]:
    lookups = found.hits.lookups
    for one in found.stops:
        missed = "" if one.missed is None else f", {number(one.missed, 'block')} missed"
        yield f"{one.lookups:>6,} {percent(one.lookups, lookups):>6}  {one.why}{missed}"
    if not found.stops:
        yield "no prefix: the device and the host served all requested blocks"


def _evicted(found: LogFigures) -> Iterator[str]:
    evictions = found.evictions
    if not evictions.evicted:
        yield f"nothing; {number(found.stored, 'block')} stored"
        return
    yield (
        f"{number(evictions.evicted, 'block')} of {found.stored:,} stored; "
        f"{percent(evictions.unread, evictions.evicted)} of them never read"
    )
    yield f"age at eviction: {_spread(evictions.age)}"
    if evictions.wanted:
        yield f"wanted again: {evictions.wanted:,}, after {_spread(evictions.until_wanted)}"
        most = max(evictions.over_time)
        yield sparkline("wanted", [count / most for count in evictions.over_time], f"at most {most:,}")
    else:
        yield "wanted again: none"


def _spread(spread: Spread) -> str:
    if not spread.count:
        return "not recorded in the log"
    return f"p50 {_time(spread.p50_ns)}, p99 {_time(spread.p99_ns)}, max {_time(spread.max_ns)}"


def _time(ns: int | None) -> str:
    return "-" if ns is None else duration(ns)


def _copies(found: LogFigures) -> Iterator[str]:
    ended = ", ".join(f"{count:,} {what}" for what, count in found.copies.transfers.items())
    yield f"transfers: {ended or 'none ended'}"
    ranks = found.copies.ranks
    if not ranks:
        return
    worst = _worst(ranks)
    yield f"{'rank':>6} {'copies':>9} {'failed':>7} {'missing':>8} {'p50':>9} {'p99':>9} {'max':>9}"
    for one in ranks:
        latency = one.latency
        times = " ".join(f"{_time(ns):>9}" for ns in (latency.p50_ns, latency.p99_ns, latency.max_ns))
        said = f"  {one.errors[0][0][:60]}" if one.errors else ""
        mark = "  <- worst" if one is worst else ""
        yield f"{one.rank:>6} {one.copies:>9,} {one.failed:>7,} {one.missing:>8,} {times}{mark}{said}"
        for part in one.directions:
            spread = part.latency
            times = " ".join(f"{_time(ns):>9}" for ns in (spread.p50_ns, spread.p99_ns, spread.max_ns))
            yield f"{'':>6} {spread.count:>9,} {part.direction + 's':<16} {times}"
        parts = (("queued", one.queued), ("copied", one.copied), ("noticed after", one.noticed))
        known = [f"{name} {_time(part.p50_ns)} / {_time(part.p99_ns)}" for name, part in parts if part.count]
        if known:
            yield f"{'':>6} of that, p50 / p99: {', '.join(known)}"


def _fetches(found: LogFigures) -> Iterator[str]:
    """Format the time of copies from the host and the disk, and the time to compute the same tokens."""
    for one in found.fetches:
        computed = "unknown" if one.compute_ns is None else duration(one.compute_ns)
        spent = f"{duration(one.spent_ns)} of copying" if one.spent_ns else "less than a step each"
        yield f"from the {one.place}: {_short(one.tokens)} tokens in {spent}; computing takes {computed}"


def _worst(ranks: Sequence[RankFigures]) -> RankFigures | None:
    """Return the rank with the most missing reports, the most failures or the slowest copies.

    None: no rank differs clearly from the others.
    """
    for measure in (_missing, _failing, _latency):
        values = sorted(map(measure, ranks))
        if len(values) > 1 and values[-1] > 1.5 * values[-2]:
            return max(ranks, key=measure)
    return None


def _missing(rank: RankFigures) -> float:
    return rank.missing / max(1, rank.copies)


def _failing(rank: RankFigures) -> float:
    return rank.failed / max(1, rank.reported)


def _latency(rank: RankFigures) -> float:
    return rank.latency.p50_ns or 0


def _waits(found: LogFigures) -> Iterator[str]:
    waits = found.waits
    part = f" ({percent(waits.deferred_ns, waits.lived_ns)} of their time)" if waits.deferred_ns else ""
    longest = f", longest {duration(waits.longest_ns)}" if waits.deferred else ""
    yield (
        f"for copies of others: {number(waits.deferred, 'request')}, {duration(waits.deferred_ns)}"
        f"{part}{longest}"
    )
    if waits.deferred_ns:
        yield f"  {waits.deferred_split}"
    yield f"for their own loads: {duration(waits.loading_ns)} ({percent(waits.loading_ns, waits.lived_ns)})"
    if waits.loading_ns:
        yield f"  {waits.loading_split}"


def _pool(found: LogFigures) -> Iterator[str]:
    pool = found.pool
    if not pool.samples:
        yield "no sample in this part of the log"
        return
    yield sparkline("used", pool.used_over_time, f"at most {percent(pool.used, pool.slots)}")
    yield sparkline("pinned", pool.pinned_over_time, f"at most {percent(pool.pinned, pool.slots)}")
    rest = [
        f"{count:,} {name}"
        for name, count in (
            ("being stored", pool.storing),
            ("quarantined", pool.quarantined),
            ("retired", pool.retired),
        )
        if count
    ]
    if rest:
        yield f"at most {', '.join(rest)}"


def _tiers(found: Report) -> Iterator[str]:
    """Format the host pool and the disk below it. Yields nothing if there is no disk."""
    tiers = found.tiers
    if tiers is None:
        return
    for name, held in (("host", tiers.host), ("disk", tiers.disk)):
        if held is None:
            yield f"{name}    {tiers.why_not}"
        else:
            yield (
                f"{name}    {number(held.blocks, 'block')} at the end, of {held.slots:,}; "
                f"{held.evicted:,} evicted (by {held.log})"
            )
    if tiers.hits is not None:
        yield f"prompts {_served(tiers.hits)}"
    if tiers.found is not None:
        yield f"found   {number(tiers.found, 'block')} on the disk at the start"
    if tiers.to_disk is not None:
        yield f"stored  {number(tiers.to_disk, 'block')} on the disk, {tiers.not_stored or 0:,} not"
    unused = "" if tiers.unused is None else f", {tiers.unused:,} of them never read"
    yield f"back    {number(tiers.from_disk, 'block')} from the disk{unused}"
    if tiers.failures is not None:
        yield from _disk_failures(tiers.failures)


def _served(hits: TierHitFigures) -> str:
    """Format how many blocks of prompts each tier had."""
    parts = ((getattr(hits, name), name) for name in ("device", "host", "disk", "computed"))
    return ", ".join(f"{name} {blocks:,} ({percent(blocks, hits.asked)})" for blocks, name in parts)


def _disk_failures(found: DiskFailureFigures) -> Iterator[str]:
    if found.first_ns is None or found.last_ns is None:
        yield "failed  no copy of the disk"
        return
    yield (
        f"failed  {found.stores:,} stores and {found.loads:,} loads of {found.reports:,} reported by ranks, "
        f"the first at {utc(found.first_ns)}, the last at {utc(found.last_ns)}"
    )
    yield from (f"        {times:,} times: {error}" for error, times in found.errors)


def _lives(found: LogFigures) -> Iterator[str]:
    """Format the restarts between processes that wrote the log. Yields nothing if one wrote all of it."""
    restarts = found.restarts
    if not restarts.restarts:
        return
    closed = restarts.restarts - restarts.killed - restarts.stopped
    before = [f"{times:,} before: {how}" for how, times in restarts.ended]
    before += [f"{closed:,} before: the log was closed"] if closed else []
    yield f"{number(restarts.restarts, 'restart')} ({'; '.join(before)})"
    yield (
        f"{number(restarts.kept, 'block')} kept, {restarts.lost:,} lost while they were being stored; "
        f"{number(restarts.transfers, 'transfer')} and {number(found.requests.cut_off, 'request')} cut off"
    )


def _others(found: LogFigures) -> Iterator[str]:
    """Format what most logs lack: resets, skips, rejected reports, hand-overs, several KV cache groups."""
    if found.resets.resets:
        yield f"{number(found.resets.resets, 'reset')} dropped {number(found.resets.keys, 'block')}"
    for skip in found.skips:
        yield f"{skip.blocks:,} blocks offered and not stored: {skip.reason}"
    for one in found.rejected:
        yield f"{number(one.reports, 'report')} of rank {one.rank} rejected: {one.reason}"
    yield from _hand_overs(found.hand_overs)
    yield from map(_elsewhere, found.elsewhere)
    if len(found.groups) > 1:
        for group in found.groups:
            yield (
                f"KV cache group {group.group}: {group.stored:,} stored, {group.hits:,} read, "
                f"{group.evicted:,} evicted"
            )


def _hand_overs(found: HandOverFigures) -> Iterator[str]:
    given = (
        (found.taken, "taken"),
        (found.not_needed, "not needed"),
        (found.given_up, "given up"),
        (found.held, "without an end"),
    )
    if parts := [f"{count:,} {what}" for count, what in given if count]:
        yield f"hand-overs to other engines: {', '.join(parts)}"


def _elsewhere(found: ElsewhereFigures) -> str:
    way = "from" if found.direction == "store" else "to"
    ended = ", ".join(f"{count:,} {what}" for what, count in found.ended.items()) or "none ended"
    took = f"; {_spread(found.took)}" if found.took.count else ""
    return f"copied {way} {found.place}: {number(found.blocks, 'block')} ({found.direction}s: {ended}{took})"


def _properties(found: LogFigures) -> Iterator[str]:
    check = found.check
    if check.broken or check.damage is not None:
        yield "BROKEN: see below"
    elif check.verified:
        yield "hold at every event (verified)"
    else:
        yield "every event follows from those before; for all properties run kvsm verify, or --verify"


def _troubles(found: Report) -> Iterator[str]:
    if not found.troubles:
        yield "nothing stands out"
        return
    yield "what stands out:"
    for place, one in enumerate(found.troubles, 1):
        tier = "" if one.tier is None else f"{one.tier.capitalize()}: "
        yield f"{place}. {tier}{one.text}"
        yield from (f"     {line}" for line in one.evidence)
        if one.confidence is not None:
            right, shown = MEASURED[one.name]
            yield f"     this finding was right in {right} of {shown} generated logs"
        yield from (f"   $ {line}" for line in one.commands)
