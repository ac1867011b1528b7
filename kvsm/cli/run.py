"""`kvsm run`: serve a workload with offload, and prove by the log what happened."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.output import Command, complain, say_json
from kvsm.cli.run_result import print_result
from kvsm.core.policies import POLICIES
from kvsm.errors import PropertyBroken
from kvsm.serving.ranks import COPIES
from kvsm.serving.run_options import DISK_FLUSHES, DISK_WRITES, LAST_STEPS, STORES, RunOptions
from kvsm.serving.workload_run import RunProgress, RunResult, run_workload

_DEFAULTS = RunOptions()
LOG = "kvsm-log"
"""Where the log is kept if no place was named."""


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
@_option("--disk-blocks", int, "Slots of each rank's file below its host pool; 0: no disk tier.")
@click.option(
    "--disk-dir",
    metavar="DIR",
    help="Keep these files in DIR. The next run finds what this one stored.",
)
@_option("--disk-write", click.Choice(DISK_WRITES), "Store on disk at once, or before the host evicts.")
@_option("--disk-flush", click.Choice(DISK_FLUSHES), "When stores to the disk are flushed.")
@_option("--block-bytes", int, "Bytes of a block on one worker.")
@_option("--blocks-per-chunk", int, "Device blocks that one host slot holds.")
@_option("--workers", int, "Ranks, each with pools of its own.")
@_option("--policy", str, f"Eviction: {', '.join(POLICIES)}, or package.module:Class.")
@_option("--store", click.Choice(STORES), "Store what is computed, or only what nears eviction.")
@_option("--store-threshold", int, "Store a block when it is offered for the n-th time.")
@click.option(
    "--defer-ticks",
    type=int,
    help="Steps that a request waits for a block in flight.  [default: 64; 2048 with a disk]",
)
@click.option(
    "--last-step",
    type=click.Choice(LAST_STEPS),
    help="What happens to copies when no request is left.  [default: flush; keep-stepping with a disk]",
)
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
@click.option(
    "--log",
    metavar="DIR",
    help="Keep the event log in DIR, which must be empty or absent.  [default: kvsm-log, or kvsm-log-2, ...]",
)
@_option("--time-scale", float, "Real seconds for each second of the workload.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def run(as_json: bool, **options: object) -> None:
    """Serve a workload with KV-cache offload, and verify its log.

    Without options this takes about ten seconds. Requests arrive at a small serving engine: continuous
    batching, a prefix cache on the device, a host pool behind it, and real copies of real bytes between the
    two. Every decision is an event in a log. At the end the log is replayed. It must give the state that the
    engine ended with, and every property must hold at every event. The bytes that a request
    computes from are compared with the bytes that were stored.

    \b
    Examples:
      kvsm run                                  4000 requests of generated conversations; log in ./kvsm-log
      kvsm run --trace FILE --policy arc        a recorded trace, another eviction policy
      kvsm run --device-blocks 96 --host-blocks 400      pressure: preemptions, evictions
      kvsm run --groups full,sliding:4096/1024,mamba     a hybrid model, three KV cache groups
      kvsm run --host-blocks 1600 --disk-blocks 30000 --disk-dir kvsm-disk
                                                a disk tier; run it twice: the second run finds on disk
                                                what the first one stored
      kvsm run --store lazy --fail-rate 0.05 --abort-rate 0.1 --preempt 0.01 --reset-every 2000
                                                copies, requests and steps fail on purpose
      kvsm run --copies simulated --log DIR     the same log every time, byte for byte; every copy is
                                                watched for races with compute

    \b
    Exit code: 0 if all of this holds; 1 if the digest differs or a property is broken; 2 for input that
    cannot be used (nothing is written then).
    """
    options["log"] = options["log"] or free_name(LOG)
    chosen = RunOptions(**options)  # type: ignore[arg-type]
    try:
        result = _run_with_progress(chosen) if sys.stderr.isatty() else run_workload(chosen)
    except PropertyBroken as broken:
        complain(str(broken))
        complain(f"the log until then is in {chosen.log}")
        raise SystemExit(ExitCode.BROKEN) from broken
    if as_json:
        say_json(result)
    else:
        print_result(result)
    if not result.good:
        raise SystemExit(ExitCode.BROKEN)


def free_name(name: str) -> str:
    """`name` if nothing has it, else the first of `name-2`, `name-3`, ... that nothing has."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(one for one in names if not os.path.lexists(one))


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
