"""Measure the first answers about a large log without an index: `kvsm report`, and `kvsm why` of a request.

Two logs are measured: one of large batches, and one of small events, as in `tables.py`. Each command runs in
a process of its own.

    python benchmarks/first_look.py --trace TRACE.jsonl --output benchmarks/results/first_look.md
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import click
from page import markdown_table, publish
from tables import log_bytes, write_batches, write_small

from kvsm.core.log import LogReader


class Taken(NamedTuple):
    """Seconds of a command: processor time of all its processes, and on the wall."""

    cpu: float
    wall: float


def measured(*arguments: str) -> Taken:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "kvsm", *arguments], check=True, capture_output=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Taken(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall)


def a_request(directory: Path) -> str:
    """A request from the middle of a log."""
    paths = sorted(directory.glob("*.kvsm"))
    for segment in LogReader(directory).segments(int(paths[len(paths) // 2].stem)):
        for event in segment.events():
            if type(event).__name__ == "RequestFinished":
                return str(event.request)  # type: ignore[attr-defined]
    raise AssertionError("no request ends in the middle of the log")


def row_of(name: str, directory: Path) -> list[str]:
    """Measure one log."""
    report = measured("report", str(directory))
    why = measured("why", str(directory), a_request(directory))
    times = [f"{seconds:.1f}" for seconds in (*report, *why)]
    return [name, f"{log_bytes(directory) / 1e6:,.0f}", f"{last_event(directory):,}", *times]


def last_event(directory: Path) -> int:
    newest = max(int(path.stem) for path in directory.glob("*.kvsm"))
    return max(
        batch[-1].seq for segment in LogReader(directory).segments(newest) for batch in segment.batches()
    )


@click.command()
@click.option("--trace", type=click.Path(path_type=Path, exists=True), help="Mooncake-format trace.")
@click.option("--megabytes", default=1000, show_default=True, help="Size of the log of large batches.")
@click.option("--requests", default=60_000, show_default=True, help="Requests of the log of small events.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the table here, with the command.")
def main(trace: Path | None, megabytes: int, requests: int, output: Path | None) -> None:
    """Measure the first answers about a large log."""
    with tempfile.TemporaryDirectory() as directory:
        batches, small = Path(directory) / "batches", Path(directory) / "small"
        write_batches(batches, trace, megabytes * 10**6)
        write_small(small, requests)
        rows = [row_of("large batches", batches), row_of("small events", small)]
    header = ["log", "MB", "events", "report (s)", "on the wall (s)", "why (s)", "on the wall (s)"]
    note = "seconds of processor time of all processes, two cores that others use too"
    publish("The first answers about a large log", note, markdown_table(header, rows), output)


if __name__ == "__main__":
    main()
