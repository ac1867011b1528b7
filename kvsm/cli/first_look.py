"""Format the first look at a large log for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from kvsm.cli.sparkline import sparkline
from kvsm.explain.report.detectors import number, percent
from kvsm.explain.report.first_look import FirstLook, PartLook
from kvsm.explain.story.times import duration, utc

_BINS = 48
"""Number of equal parts into which the time of the log is divided for sparklines."""


def look_lines(look: FirstLook, log: Path) -> Iterator[str]:
    """Format the look, line by line."""
    from rich.filesize import decimal

    whole, minutes = look.whole, "minute" if look.minutes == 1 else f"{look.minutes} minutes"
    yield f"{log}: events {look.first:,} to {look.last:,}, {decimal(look.bytes)}, counted by the {minutes}"
    yield f"{utc(look.began_ns)} to {utc(look.ended_ns)}, {duration(look.ended_ns - look.began_ns)}"
    yield ""
    yield (
        f"requests    {whole.arrived:,} arrived, {whole.finished:,} ended ({whole.aborted:,} aborted); "
        + number(whole.preempted, "preemption")
    )
    yield f"lookups     {whole.lookups:,}{_served(whole)}"
    yield f"            {sparkline('hits', _over_time(look, _hits, _asked))}"
    yield f"blocks      {whole.stored:,} stored, {whole.loaded:,} loaded, {whole.evicted:,} evicted, " + (
        f"{whole.skipped:,} offered and not stored"
    )
    yield f"copies      {'rank':>4} {'':<5} {'reports':>11} {'failed':>7} {'p50':>9} {'p99':>9} {'max':>9}"
    for one in look.ranks:
        latency = one.latency
        times = [
            "-" if ns is None else f"{duration(ns)}"
            for ns in (latency.p50_ns, latency.p99_ns, latency.max_ns)
        ]
        yield (
            f"            {one.rank:>4} {one.direction or '':<5} {one.reports:>11,} {one.failed:>7,} "
            + " ".join(f"{time:>9}" for time in times)
        )
    if whole.failed:
        yield f"            {sparkline('failed', _over_time(look, _failed, _reports))}"
    for count, what in (
        (whole.resets, number(whole.resets, "reset of the cache", "resets of the cache")),
        (whole.restarts, number(whole.restarts, "restart")),
        (whole.rejected, number(whole.rejected, "rejected report")),
        (whole.lost, number(whole.lost, "lost transfer")),
    ):
        if count:
            yield f"besides     {what}"
    if look.damage is not None:
        yield f"damaged     {look.damage}"
    closer = look.closer
    yield ""
    yield f"The rest of this report covers events {closer.first:,} to {closer.last:,}: {closer.why}."
    yield "Earlier events are not read. --since and --until choose another part."
    yield "--whole indexes the whole log first."
    yield ""


def _served(whole: PartLook) -> str:
    if not whole.asked:
        return ""
    missed = whole.asked - whole.on_device - whole.on_host
    return (
        f", for {whole.asked:,} blocks: device {percent(whole.on_device, whole.asked)}, "
        f"host {percent(whole.on_host, whole.asked)}, missed {percent(missed, whole.asked)}"
    )


def _hits(part: PartLook) -> int:
    return part.on_device + part.on_host


def _asked(part: PartLook) -> int:
    return part.asked


def _failed(part: PartLook) -> int:
    return part.failed


def _reports(part: PartLook) -> int:
    return part.reports


def _over_time(
    look: FirstLook, some: Callable[[PartLook], int], whole: Callable[[PartLook], int]
) -> list[float | None]:
    """Return the ratio of `some` to `whole` in each of the equal parts of the time; None: `whole` is 0
    there."""
    begins, ends = look.parts[0].began_ns, look.parts[-1].began_ns
    bins = min(_BINS, len(look.parts))
    sums = [[0, 0] for _ in range(bins)]
    for part in look.parts:
        place = min(bins - 1, bins * (part.began_ns - begins) // max(1, ends - begins + 1))
        sums[place][0] += some(part)
        sums[place][1] += whole(part)
    return [found / total if total else None for found, total in sums]
