"""Measure the index of a log: the time to build it, its size, and the time of queries.

Two logs are measured: one of large batches (the trace with 16 tokens per block, written as in
`control_plane.py`) and one of small events (`kvsm run`). Then a query over the Parquet files of a fleet of
logs is measured, with DuckDB.

    python benchmarks/tables.py --megabytes 1000 --trace TRACE.jsonl --output benchmarks/results/tables.md
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import count
from pathlib import Path

import click
from control_plane import DEVICE_BLOCKS, serve_step
from page import markdown_table, publish
from workload import expanded

import kvsm
from kvsm.core.log import LogReader
from kvsm.core.log.frames import segment_paths
from kvsm.core.offloader import Offloader
from kvsm.events import OffloadConfig
from kvsm.explain.tables.arrow import write_parquet
from kvsm.explain.tables.table_index import INDEX_NAME
from kvsm.serving import RunOptions, run_workload

QUERIES = {
    "why lookups stopped": "SELECT why, COUNT(*) FROM lookups GROUP BY why",
    "age of evicted blocks": "SELECT SUM(blocks), SUM(blocks * (gone_ns - stored_ns)) / SUM(blocks)"
    " FROM block_runs WHERE why = 'evicted'",
    "blocks wanted after eviction": "SELECT SUM(blocks) FROM block_runs WHERE wanted IS NOT NULL",
    "copies by rank": "SELECT worker, COUNT(*), SUM(good = 0), MAX(reported_ns - submitted_ns)"
    " FROM copies GROUP BY worker",
    "requests that never ended": "SELECT * FROM requests WHERE finished IS NULL",
    "one request's lookups": "SELECT * FROM lookups WHERE request = (SELECT MAX(request) FROM requests)",
    "every block by fate": "SELECT why, COUNT(*) FROM blocks GROUP BY why",
    "one key": "SELECT * FROM blocks WHERE key = '00'",
}

FLEET_QUERY = """\
SELECT log, COUNT(*) AS lookups, AVG((why = 'evicted')::INT) AS evicted
FROM read_parquet('{out}/lookups/*.parquet') GROUP BY log ORDER BY evicted DESC LIMIT 10"""


def requests_for_ever(trace: Path | None) -> Iterator[list[bytes]]:
    """The requests of the trace, and endless repetitions with other keys."""
    for round_ in count():
        for keys in expanded(trace, 16, None):
            if round_:
                salt = round_.to_bytes(4, "little")
                yield [blake2b(key + salt, digest_size=32).digest() + key[32:] for key in keys]
            else:
                yield keys


def write_batches(directory: Path, trace: Path | None, size: int) -> None:
    config = OffloadConfig(host_blocks=200_000, device_blocks=DEVICE_BLOCKS)
    with Offloader.open(config, directory, durability="none") as core:
        for number, keys in enumerate(requests_for_ever(trace)):
            serve_step(core, number, [keys])
            if number % 100 == 0 and log_bytes(directory) >= size:
                return


def write_small(directory: Path, requests: int) -> None:
    run_workload(RunOptions(requests=requests, copies="simulated", host_blocks=4096, log=str(directory)))


def log_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in segment_paths(directory))


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Run `work`. Returns (CPU seconds of this process, wall-clock seconds)."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def measure(name: str, directory: Path) -> tuple[list[str], list[list[str]]]:
    """Measure one log. Returns (row of the index, a row for each query)."""
    first, _ = seconds_of(lambda: kvsm.open(directory).close())
    again, _ = seconds_of(lambda: kvsm.open(directory).close())
    rows = []
    with kvsm.open(directory) as log:
        events, blocks = log.sql(
            "SELECT (SELECT COUNT(*) FROM events), (SELECT SUM(blocks) FROM block_runs)"
        ).fetchone()
        for what, query in QUERIES.items():
            taken = seconds_of(lambda query=query: log.sql(query).fetchall())  # type: ignore[misc]
            rows.append([name, what, f"{taken[0]:.3f}"])
    size, index = log_bytes(directory), (directory / INDEX_NAME).stat().st_size
    row = [
        name,
        f"{size / 1e6:,.0f}",
        f"{events:,}",
        f"{blocks:,}",
        f"{first:.1f}",
        f"{events / first / 1e3:,.0f} k",
        f"{index / 1e6:,.0f}",
        f"{again:.2f}",
    ]
    return row, rows


def measure_fleet(directory: Path, logs: int) -> list[str]:
    import duckdb

    out = directory / "fleet"
    (out / "lookups").mkdir(parents=True)
    exporting = 0.0
    for number in range(logs):
        log = directory / f"log-{number}"
        run_workload(RunOptions(requests=100, seed=number, copies="simulated", host_blocks=400, log=str(log)))

        def export(log: Path = log) -> None:
            with kvsm.open(log) as opened:
                name = LogReader(log).head.run.hex()
                write_parquet(opened.connection, "lookups", out / "lookups" / f"{name}.parquet", log.name)

        exporting += seconds_of(export)[0]
        shutil.rmtree(log)
    query = FLEET_QUERY.format(out=out)
    cpu, wall = seconds_of(lambda: duckdb.sql(query).fetchall())
    return [f"{logs}", f"{exporting:.1f}", f"{cpu:.3f}", f"{wall:.3f}"]


@click.command()
@click.option("--trace", type=click.Path(path_type=Path, exists=True), help="Mooncake-format trace.")
@click.option("--megabytes", default=1000, show_default=True, help="Size of the log of large batches.")
@click.option("--requests", default=40_000, show_default=True, help="Requests of the log of small events.")
@click.option("--logs", default=100, show_default=True, help="Logs of the fleet.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the tables here, with the command.")
def main(trace: Path | None, megabytes: int, requests: int, logs: int, output: Path | None) -> None:
    """Measure the index."""
    with tempfile.TemporaryDirectory() as directory:
        batches, small = Path(directory) / "batches", Path(directory) / "small"
        write_batches(batches, trace, megabytes * 10**6)
        about, answers = measure("large batches", batches)
        shutil.rmtree(batches)
        write_small(small, requests)
        about_small, answers_small = measure("small events", small)
        shutil.rmtree(small)
        fleet = measure_fleet(Path(directory), logs)
    header = [
        "log",
        "MB",
        "events",
        "lives of blocks",
        "first opening (s)",
        "events a second",
        "index (MB)",
        "opening again (s)",
    ]
    lines = [
        *markdown_table(header, [about, about_small]),
        "",
        *markdown_table(["log", "query", "answered in (s)"], [*answers, *answers_small]),
        "",
        "The fleet: `kvsm export --table lookups` of every log, and then DuckDB over all files:",
        "",
        *[f"    {line}" for line in FLEET_QUERY.format(out="fleet").splitlines()],
        "",
        *markdown_table(["logs", "export (s)", "query (s)", "query on the wall (s)"], [fleet]),
    ]
    publish("The tables of a log", "seconds of processor time, two cores that others use too", lines, output)


if __name__ == "__main__":
    main()
