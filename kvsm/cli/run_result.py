"""Print the result of `kvsm run`: what offload saved, what was checked, what to try next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from kvsm.cli.log_answers import print_rows
from kvsm.cli.output import say, say_table
from kvsm.cli.toned import in_green, in_red
from kvsm.properties import Property
from kvsm.serving.copy_totals import CopyTotals
from kvsm.serving.serving_engine import TOKEN_MS
from kvsm.serving.workload_run import RunResult

_VIOLATIONS_SHOWN = 10

CHECKED: tuple[tuple[str, str, tuple[Property, ...]], ...] = (
    (
        "memory",
        "no slot is lost, and none is reused while a copy touches it",
        (Property.CONSERVATION, Property.NO_REUSE_IN_FLIGHT, Property.ONE_RELEASE_PER_HOLD),
    ),
    (
        "keys",
        "a key matches only when every worker has stored its bytes, and they belong to this epoch",
        (
            Property.PUBLISH_AFTER_COMMIT,
            Property.STORED_ONCE,
            Property.NO_STALE_DATA,
            Property.EVENTS_ARE_STATE,
        ),
    ),
    (
        "reports",
        "a late, doubled or bad report never counts as a success",
        (Property.STALE_REPORTS, Property.FAILURE_IS_NOT_SUCCESS),
    ),
    (
        "requests",
        "a match keeps its blocks, and nothing waits forever",
        (Property.MATCH_HOLDS, Property.PROGRESS),
    ),
    (
        "bytes",
        "each request computed from the bytes that were stored",
        (Property.CORRECT_BYTES, Property.COPY_ORDER),
    ),
    (
        "offload",
        "each full block is stored, in flight, or skipped for a reason; no copy is left behind",
        (Property.FULL_OFFLOAD, Property.LAST_STEP, Property.ONE_TOKEN_LEFT),
    ),
)
"""What a run checks: (subject, what must hold, the properties)."""


def print_result(result: RunResult) -> None:
    """Print the result for people. Figures that only benchmarks compare are only in the JSON."""
    say(*_saved(result), "")
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    for section in (_request_rows, _block_rows, _disk_rows, _log_rows):
        rows = list(section(result))
        for name, count, detail in rows:
            table.add_row(name, count, detail)
        if rows:
            table.add_section()
            table.add_row()
    say_table(table)
    say(*_verdict(result))
    if result.good:
        print_rows(*[(f"  {about}", text) for about, text in _checks(result)])
    if result.log is not None:
        say("", "try next:", *[f"  {command}" for command in next_commands(result.log, result.requests)])


def next_commands(log: str, requests: int) -> list[str]:
    """Return three commands that show more of a run's log."""
    place = shlex.quote(log)
    return [
        f"kvsm report {place}",
        f"kvsm why {place} r{requests // 2}",
        f"kvsm timeline {place} -o timeline.html",
    ]


def count(number: int) -> str:
    """Format a number as `12,345`; from a million on as `2.9 M`."""
    return f"{number:,}" if number < 1_000_000 else f"{number / 1e6:,.1f} M"


def _saved(result: RunResult) -> Iterator[str]:
    """Format what offload saved: tokens and time. Hits on the device need no offload and do not count."""
    loaded, all_missed = result.host_hit_tokens, result.host_hit_tokens + result.computed_tokens
    if not loaded:
        yield "offload saved nothing here: no prompt token was found in host memory"
        return
    where = "host memory" if result.disk is None else "host memory, or from disk through it"
    yield (
        f"offload saved {count(loaded)} of {count(all_missed)} prompt tokens that the device did not hold: "
        f"they were loaded from {where}, not computed again"
    )
    yield (
        f"that is {result.saved_seconds:,.1f} s of compute, at the {TOKEN_MS:g} ms a token of the simulated "
        f"model, in {result.workload_seconds:,.0f} s of workload"
    )


_Row = tuple[str, str, str]


def _rows(*rows: tuple[str, int, str]) -> Iterator[_Row]:
    """Format the rows whose number is not zero."""
    return ((name, f"{number:,}", detail) for name, number, detail in rows if number)


def _parts(*parts: tuple[int, str]) -> str:
    """Format the parts that are not zero, as `3,990 finished, 10 aborted`."""
    return ", ".join(f"{number:,} {what}" for number, what in parts if number)


def _request_rows(result: RunResult) -> Iterator[_Row]:
    served = _parts(
        (result.finished, "finished"),
        (result.aborted, "aborted"),
        (result.preemptions, "preemptions"),
        (result.deferrals, "waits for a block in flight"),
        (result.restarts, "restarts after a failed load"),
    )
    full = f"requests, {result.fully_offloaded:,} of them offloaded in full"
    yield from _rows(
        ("requests", result.requests, served),
        ("loads failed", result.failed_loads, ""),
        ("copies lost", result.transfers_lost, "given up, because a worker did not report"),
        ("remote decode", result.remote_decode, full),
        ("resets", result.resets, "of the whole cache"),
    )
    workload = f"for {result.workload_seconds:,.0f} s of workload, {result.steps:,} steps"
    yield "time", f"{result.run_seconds:.1f} s", workload
    tokens = result.device_hit_tokens + result.host_hit_tokens + result.computed_tokens
    for name, number in (
        ("tokens hit on device", result.device_hit_tokens),
        ("tokens hit on host", result.host_hit_tokens),
        ("tokens missed", result.computed_tokens),
    ):
        yield from _rows((name, number, f"{number / max(1, tokens):.1%}"))


def _block_rows(result: RunResult) -> Iterator[_Row]:
    skipped = _parts(*((number, reason) for reason, number in result.blocks_skipped.items()))
    yield from _rows(
        ("blocks stored", result.blocks_stored, _copies(result.stores)),
        ("blocks loaded", result.blocks_loaded, _copies(result.loads)),
        ("blocks evicted", result.blocks_evicted, ""),
        ("blocks skipped", sum(result.blocks_skipped.values()), skipped),
    )
    if result.verified is not None:
        wrong, unknown = result.verified.mismatched, result.verified.unverified
        yield "blocks verified", f"{result.verified.checked:,}", f"{wrong:,} wrong, {unknown:,} unknown"


def _disk_rows(result: RunResult) -> Iterator[_Row]:
    disk = result.disk
    if disk is None:
        return
    found = "; ".join(disk.why_cold) or f"in {disk.directory}, by earlier runs"
    yield "found on disk", f"{disk.blocks_found:,}", found
    yield from (("disk and log", "", line) for line in disk.last_log.told())
    yield "hits from disk", f"{disk.blocks_loaded:,}", _copies(disk.loads)
    yield "stored on disk", f"{disk.blocks_stored:,}", _copies(disk.stores)
    yield from _rows(
        ("not stored on disk", disk.blocks_not_stored, "the copy failed, found no room, or was overtaken"),
        ("evicted from disk", disk.blocks_evicted, ""),
    )
    yield "on disk at the end", f"{disk.blocks:,}", f"of {disk.slots:,}"
    where = f", in {disk.log}" if disk.log else ""
    yield "disk log events", f"{disk.log_events:,}", f"{disk.log_entries:,} block entries{where}"


def _copies(copies: CopyTotals) -> str:
    failed = f", {copies.failed:,} failed" if copies.failed else ""
    return f"in {copies.transfers:,} copies{failed}, {copies.bytes / 1e6:,.1f} MB"


def _log_rows(result: RunResult) -> Iterator[_Row]:
    where = f", in {result.log}" if result.log else ""
    yield "log events", f"{result.log_events:,}", f"{result.log_bytes / 1e6:,.1f} MB{where}"


def _verdict(result: RunResult) -> Iterator[str]:
    """Format the verdict of the run, and what is wrong if it is bad."""
    disk = result.disk
    events = f"{result.log_events + (0 if disk is None else disk.log_events):,} events"
    if result.good:
        yield in_green(
            f"good: {events} of the log, replayed, give the state that the engine ended with, and every "
            "property holds at each of them"
        )
        yield ""
        yield "what was checked:"
        return
    for one in (result,) if disk is None else (result, disk):
        if one.digest != one.replayed_digest:
            yield in_red(f"DIGEST DIFFERS: live {one.digest}, replayed {one.replayed_digest}")
        if one.damage is not None:
            yield in_red(f"LOG DAMAGED: {one.damage}")
    if result.violations:
        yield in_red(f"BROKEN, {len(result.violations)} times, in {events}:")
    yield from (f"  {one.property}: {one.message}" for one in result.violations[:_VIOLATIONS_SHOWN])
    if len(result.violations) > _VIOLATIONS_SHOWN:
        yield f"  and {len(result.violations) - _VIOLATIONS_SHOWN} more"


def _checks(result: RunResult) -> Iterator[tuple[str, str]]:
    """Describe what was checked, with the names of the properties."""
    yield "state", f"the log, replayed, gives the engine's last state: digest {result.digest}"
    if result.disk is not None:
        yield "disk", f"its log gives its state too: digest {result.disk.digest}"
    for about, text, properties in CHECKED:
        names = [str(checked) for checked in properties if checked in result.properties]
        if names:
            yield about, f"{text}: {', '.join(names)}"
