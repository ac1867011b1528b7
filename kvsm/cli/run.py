"""`kvsm run`: serve a workload with offload, and prove by the log what happened."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.output import Command, complain, say, say_json, say_table
from kvsm.errors import PropertyBroken
from kvsm.policies import POLICIES
from kvsm.serving.ranks import COPIES
from kvsm.serving.run_options import LAST_STEPS, STORES, RunOptions
from kvsm.serving.workload_run import RunProgress, RunResult, run_workload

_DEFAULTS = RunOptions()
_VIOLATIONS_SHOWN = 10


def _option(flag: str, of: Any, text: str, field: str = "") -> Callable[..., Any]:
    """An option with the default of a field of `RunOptions`. field: its name, if the flag has another."""
    field = field or flag[2:].replace("-", "_")
    return click.option(flag, field, type=of, default=getattr(_DEFAULTS, field), show_default=True, help=text)


@click.command(cls=Command)
@click.option("--trace", metavar="FILE", help="Mooncake-format JSONL trace. Default: a generated workload.")
@click.option(
    "--requests", type=int, metavar="N", help="Generate N requests (4000), or take the first N of a trace."
)
@_option("--block-tokens", int, "Tokens per hash id of the trace, and per block.")
@_option("--groups", str, "KV cache groups: full, sliding:WINDOW, mamba; /TOKENS for other blocks.")
@_option("--device-blocks", int, "Blocks of each device pool, for all groups.")
@_option("--host-blocks", int, "Slots of each host pool.")
@_option("--block-bytes", int, "Bytes of a block on one worker.")
@_option("--blocks-per-chunk", int, "Device blocks that one host slot holds.")
@_option("--workers", int, "Ranks, each with pools of its own.")
@_option("--policy", str, f"Eviction: {', '.join(POLICIES)}, or package.module:Class.")
@_option("--store", click.Choice(STORES), "Store what is computed, or only what nears eviction.")
@_option("--store-threshold", int, "Store a block when it is offered for the n-th time.")
@_option("--defer-ticks", int, "Steps that a request waits for a block in flight.")
@_option("--last-step", click.Choice(LAST_STEPS), "What happens to copies when no request is left.")
@_option("--remote-decode", float, "Share of requests prefilled for remote decode.")
@_option("--abort-rate", float, "Share of requests whose client leaves within 1000 steps.")
@_option("--preempt", float, "Share of steps that preempt a running request without need.", "preempt_rate")
@_option("--fail-rate", float, "Share of copies that copy a part and fail, on each worker.", "failure_rate")
@_option("--reset-every", int, "Steps from one reset of the whole cache to the next; 0: none.")
@_option("--seed", int, "Seed of the generator, of simulated copies, and of what goes wrong.")
@_option(
    "--copies",
    click.Choice(list(COPIES)),
    f"Who copies: {'; '.join(f'{name} ({choice.told})' for name, choice in COPIES.items())}.",
)
@click.option("--verify-copies", is_flag=True, help="Check the bytes of every block that is loaded.")
@click.option("--log", metavar="DIR", help="Keep the event log in DIR, which must be empty or absent.")
@_option("--time-scale", float, "Real seconds for each second of the workload.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def run(as_json: bool, **options: object) -> None:
    """Serve a workload with KV-cache offload, and verify its log.

    Requests arrive at a small serving engine: continuous batching, a prefix cache on the device, a host
    pool behind it, and real copies of real bytes between the two. Every decision is an event in a log. At
    the end the log is replayed. It must give the state that the engine ended with, and every property must
    hold at every event. The bytes that a request computes from are compared with those that were stored.

    \b
    Examples:
      kvsm run                                  4000 requests of generated conversations
      kvsm run --trace FILE --policy arc        a recorded trace, another eviction policy
      kvsm run --device-blocks 96 --host-blocks 400      pressure: preemptions, evictions
      kvsm run --groups full,sliding:4096/1024,mamba     a hybrid model, three KV cache groups
      kvsm run --store lazy --fail-rate 0.05 --abort-rate 0.1 --preempt 0.01 --reset-every 2000
                                                copies, requests and steps fail on purpose
      kvsm run --copies simulated --log DIR     the same log every time, byte for byte; every copy is
                                                watched for races with compute

    \b
    Exit code: 0 if all of this holds; 1 if the digest differs or a property is broken; 2 for input that
    cannot be used (nothing is written then).
    """
    chosen = RunOptions(**options)  # type: ignore[arg-type]
    try:
        result = _run_with_progress(chosen) if sys.stderr.isatty() else run_workload(chosen)
    except PropertyBroken as broken:
        complain(str(broken))
        raise SystemExit(ExitCode.BROKEN) from broken
    if as_json:
        say_json(result)
    else:
        _print(result)
    if not result.good:
        raise SystemExit(ExitCode.BROKEN)


def _run_with_progress(options: RunOptions) -> RunResult:
    """Show the progress in one line on the terminal, until the result is there."""
    with Live(console=Console(stderr=True), refresh_per_second=5, transient=True) as live:
        shown = 0.0

        def show(progress: RunProgress) -> None:
            nonlocal shown
            if time.monotonic() - shown > 0.1:
                shown = time.monotonic()
                live.update(Text(_progress_line(progress)))

        return run_workload(options, show)


def _progress_line(progress: RunProgress) -> str:
    if progress.verified_events:
        return f"verifying the log: {progress.verified_events:,} events"
    rate = progress.copied_bytes / max(progress.seconds, 1e-9) / 1e9
    return (
        f"{progress.requests_done:,} of {progress.requests:,} requests   hit rate {progress.hit_rate:.1%}   "
        f"{rate:.2f} GB/s copied   {progress.seconds:.0f} s"
    )


def _print(result: RunResult) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    for section in (_request_rows, _block_rows, _log_rows):
        for row in section(result):
            table.add_row(*row)
        table.add_section()
        table.add_row()
    say_table(table)
    say(*_verdict(result))


_Row = tuple[str, str, str]


def _request_rows(result: RunResult) -> list[_Row]:
    tokens = result.device_hit_tokens + result.host_hit_tokens + result.computed_tokens
    rows = [
        (
            "requests",
            f"{result.requests:,}",
            f"{result.finished:,} finished, {result.aborted:,} aborted, {result.preemptions:,} preemptions, "
            f"{result.deferrals:,} waits for a block in flight",
        ),
        (
            "loads failed",
            f"{result.failed_loads:,}",
            f"{result.restarts:,} requests restarted; {result.transfers_lost:,} copies lost",
        ),
        (
            "remote decode",
            f"{result.remote_decode:,}",
            f"requests over, {result.fully_offloaded:,} of them offloaded in full",
        ),
        ("resets", f"{result.resets:,}", "of the whole cache"),
        (
            "time",
            f"{result.run_seconds:.1f} s",
            f"{result.workload_seconds:,.0f} s of workload, {result.steps:,} steps",
        ),
    ]
    for name, count in (
        ("tokens hit on device", result.device_hit_tokens),
        ("tokens hit on host", result.host_hit_tokens),
        ("tokens missed", result.computed_tokens),
    ):
        rows.append((name, f"{count:,}", f"{count / max(1, tokens):.1%}"))
    return rows


def _block_rows(result: RunResult) -> list[_Row]:
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in result.blocks_skipped.items())
    rows = [
        ("blocks evicted", f"{result.blocks_evicted:,}", ""),
        ("blocks skipped", f"{sum(result.blocks_skipped.values()):,}", skipped),
    ]
    for name, blocks, copies in (
        ("blocks loaded", result.blocks_loaded, result.loads),
        ("blocks stored", result.blocks_stored, result.stores),
    ):
        rate = copies.gigabytes_per_second
        speed = f" at {rate:.2f} GB/s a thread" if rate else ""
        failed = f", {copies.failed:,} failed" if copies.failed else ""
        detail = f"{copies.transfers:,} copies{failed}, {copies.bytes / 1e9:.2f} GB{speed}"
        rows.insert(0, (name, f"{blocks:,}", detail))
    if result.verified is not None:
        wrong, unknown = result.verified.mismatched, result.verified.unverified
        rows.append(
            ("blocks verified", f"{result.verified.checked:,}", f"{wrong:,} wrong, {unknown:,} unknown")
        )
    return rows


def _log_rows(result: RunResult) -> list[_Row]:
    beside_keys = (result.log_bytes - result.log_key_bytes) / max(1, result.log_entries)
    return [
        ("decision time", f"{result.decision_us:.2f} us", "a block named in an event, log included"),
        ("log events", f"{result.log_events:,}", f"{result.log_entries:,} block entries"),
        (
            "log bytes",
            f"{result.log_bytes:,}",
            f"{beside_keys:.1f} a block entry, and {result.log_key_bytes:,} of keys",
        ),
        (
            "verified in",
            f"{result.verify_seconds:.1f} s",
            result.log or "the log was not kept: --log DIR keeps it",
        ),
    ]


def _verdict(result: RunResult) -> list[str]:
    if result.digest == result.replayed_digest:
        lines = [f"digest equal: {result.digest}, live and replayed"]
    else:
        lines = [f"DIGEST DIFFERS: live {result.digest}, replayed {result.replayed_digest}"]
    if result.damage is not None:
        lines.append(f"LOG DAMAGED: {result.damage}")
    checked = ", ".join(map(str, result.properties))
    lines.append(
        f"properties checked: {checked}; at each of {result.log_events:,} events; "
        f"violations {len(result.violations)}"
    )
    lines += [f"  {one.property}: {one.message}" for one in result.violations[:_VIOLATIONS_SHOWN]]
    hidden = len(result.violations) - _VIOLATIONS_SHOWN
    if hidden > 0:
        lines.append(f"  and {hidden} more")
    return lines
