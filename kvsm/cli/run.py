"""`kvsm run`: serve a workload with offload, and verify the run by its log."""

from __future__ import annotations

import os
import sys
import time
from itertools import count

import click

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.output import Command, complain, say_json
from kvsm.cli.run_result import print_result
from kvsm.cli.struct_options import struct_options
from kvsm.errors import PropertyBroken
from kvsm.serving.run_options import RunOptions
from kvsm.serving.workload_run import RunProgress, RunResult, run_workload

LOG = "kvsm-log"
"""Directory of the log if `--log` is not given."""


@click.command(cls=Command)
@struct_options(
    RunOptions,
    flags={"preempt_rate": "--preempt", "failure_rate": "--fail-rate"},
    metavars={"trace": "FILE", "at_once": "N", "requests": "N", "disk_dir": "DIR", "log": "DIR"},
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def run(as_json: bool, **options: object) -> None:
    """Serve a workload with KV-cache offload, and verify its log.

    Without options this takes less than ten seconds. Requests arrive at a small serving engine: continuous
    batching, a prefix cache on the device, a host pool behind it, and real copies of real bytes between the
    two. Every decision is an event in a log. At the end the log is replayed. It must give the state that the
    engine ended with, and every property must hold at every event. The bytes that a request
    computes from are compared with the bytes that were stored.

    FILE of --trace is a Mooncake trace (one request per line), or recorded agent sessions: one session, one
    per line, or a directory of such files. Files may be compressed with gzip. An agent session has
    `block_size` and `requests`, as in callanjfox/kv-cache-tester, or with runs of hash ids. Its requests keep
    their recorded pauses, up to 300 s. When a session ends, the next one begins.

    \b
    Examples:
      kvsm run                                  2000 requests of generated conversations; log in ./kvsm-log
      kvsm run --trace FILE --policy arc        a recorded trace, another eviction policy
      kvsm run --trace DIR --at-once 16 --requests 500   recorded agent sessions, 16 at a time
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
    """Return `name` if no such file exists, else the first of `name-2`, `name-3`, ... that does not exist."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(free for free in names if not os.path.lexists(free))


def _run_with_progress(options: RunOptions) -> RunResult:
    """Run the workload; show its progress in one line on the terminal meanwhile."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

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
    return (
        f"{progress.requests_done:,} of {progress.requests:,} requests   hit rate {progress.hit_rate:.1%}   "
        f"{progress.seconds:.0f} s"
    )
