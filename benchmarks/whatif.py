"""Measure the error of `kvsm whatif` against real runs.

For each of `CASES` the serving engine runs a workload and writes a log. From this log `kvsm.explain.whatif`
predicts the hits of the same workload under other configurations. Then each of these configurations is run
for real. The share of looked-up blocks that the device had or the host served (`found`) is compared, in
percentage points. Rows with `itself` predict the configuration of the log.

The largest differences become the error that `kvsm whatif` prints (`kvsm.explain.whatif.accuracy`).

    KVSM_TRACE=TRACE.jsonl python benchmarks/whatif.py --output benchmarks/results/whatif.md
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from page import markdown_table, publish

from kvsm.core.log import LogReader
from kvsm.explain.story import Trust
from kvsm.explain.whatif.demand import Demand, read_demand
from kvsm.explain.whatif.simulate import Scenario, Served, counted_lookups, recorded, simulate
from kvsm.serving import RunOptions, WorkloadRun, load_workload


class Case(NamedTuple):
    """One log, and the configurations that are predicted from it.

    options: the options of the run that writes the log.
    targets: (host_blocks, policy, store_threshold) of each predicted configuration.
    """

    name: str
    options: dict[str, Any]
    targets: tuple[tuple[int, str, int], ...]


COMMON: dict[str, Any] = {"copies": "simulated", "workers": 1, "block_bytes": 64}
"""Options of all runs. Copies are simulated, so equal options give equal logs."""


def _cross(sizes: tuple[int, ...], policies: tuple[str, ...]) -> tuple[tuple[int, str, int], ...]:
    return tuple((size, policy, 1) for size in sizes for policy in policies)


CASES = (
    Case(
        "small pool",
        {"requests": 800, "device_blocks": 160, "host_blocks": 300},
        _cross((150, 300, 600, 1200, 2400), ("lru", "arc", "s3fifo", "slru")),
    ),
    Case(
        "large pool",
        {"requests": 800, "device_blocks": 160, "host_blocks": 2400},
        _cross((300, 600, 1200, 2400), ("lru", "arc", "sieve")),
    ),
    Case(
        "another policy",
        {"requests": 800, "device_blocks": 320, "host_blocks": 600, "policy": "s3fifo", "seed": 1},
        _cross((300, 600, 1200), ("lru", "s3fifo", "slru")),
    ),
    Case(
        "threshold",
        {"requests": 800, "device_blocks": 160, "host_blocks": 600, "seed": 2},
        ((600, "lru", 1), (600, "lru", 2), (600, "lru", 3), (300, "lru", 2), (1200, "lru", 2)),
    ),
    Case(
        "threshold 2 before",
        {"requests": 800, "device_blocks": 160, "host_blocks": 600, "store_threshold": 2, "seed": 2},
        ((600, "lru", 1), (600, "lru", 2), (1200, "lru", 2), (1200, "lru", 1)),
    ),
    Case(
        "aborts, preemptions, failed copies",
        {
            "requests": 800,
            "device_blocks": 160,
            "host_blocks": 600,
            "abort_rate": 0.1,
            "preempt_rate": 0.01,
            "failure_rate": 0.01,
            "seed": 3,
        },
        _cross((300, 600, 1200), ("lru", "arc")),
    ),
    Case(
        "resets",
        {"requests": 800, "device_blocks": 160, "host_blocks": 600, "reset_every": 4000, "seed": 4},
        _cross((300, 600, 1200), ("lru", "arc")),
    ),
    Case(
        "two blocks a slot",
        {"requests": 800, "device_blocks": 160, "host_blocks": 300, "blocks_per_chunk": 2, "seed": 5},
        _cross((150, 300, 600), ("lru",)),
    ),
)

TRACE_CASE = Case(
    "public trace",
    {"requests": 1000, "device_blocks": 600, "host_blocks": 1000},
    _cross((500, 1000, 4000), ("lru", "arc", "s3fifo")),
)


class Predicted(NamedTuple):
    """A prediction, and the real run of the same configuration.

    kind: what differs from the log's configuration.
    """

    case: str
    kind: str
    target: tuple[int, str, int]
    predicted: Served
    real: Served

    @property
    def points(self) -> float:
        """The predicted minus the real share of found blocks (percentage points)."""
        return 100 * (self.predicted.found_share - self.real.found_share)


def demand_of(options: RunOptions) -> Demand:
    """Run a workload, and read its demand from the log."""
    with tempfile.TemporaryDirectory() as directory:
        log = str(Path(directory) / "log")
        WorkloadRun(msgspec.structs.replace(options, log=log), load_workload(options), log).serve()
        return read_demand(LogReader(log), Trust())


def compared(case: Case, trace: Path | None = None) -> list[Predicted]:
    """Predict all targets of a case from its log, and run them."""
    options = RunOptions(**{**COMMON, **case.options}, trace=None if trace is None else str(trace))
    demand = demand_of(options)
    lookups = counted_lookups(demand)
    itself = options.host_blocks, options.policy, options.store_threshold
    rows = []
    for target in case.targets:
        host_blocks, policy, threshold = target
        real = recorded(lookups)
        if target != itself:
            other = msgspec.structs.replace(
                options, host_blocks=host_blocks, policy=policy, store_threshold=threshold
            )
            real = recorded(counted_lookups(demand_of(other)))
        predicted = simulate(demand, Scenario(host_blocks, policy, threshold), lookups)
        rows.append(Predicted(case.name, _kind(itself, target), target, predicted, real))
        click.echo(f"  {case.name}, {target}: {rows[-1].points:+.2f} points", err=True)
    return rows


def _kind(itself: tuple[int, str, int], target: tuple[int, str, int]) -> str:
    if itself == target:
        return "itself"
    if itself[2] != target[2]:
        return "threshold"
    return "capacity" if itself[1] == target[1] else "policy"


def report(rows: list[Predicted]) -> list[str]:
    """The page: the largest differences by kind, and every comparison."""
    lines = ["### Largest differences", ""]
    summary = []
    for kind in ("itself", "capacity", "policy", "threshold"):
        points = [abs(row.points) for row in rows if row.kind == kind]
        if points:
            mean = sum(points) / len(points)
            summary.append([kind, f"{len(points)}", f"{mean:.2f}", f"{max(points):.2f}"])
    lines += markdown_table(["changed", "comparisons", "mean (points)", "largest (points)"], summary)
    lines += ["", "### All comparisons", ""]
    lines += markdown_table(
        ["log", "host slots", "policy", "threshold", "predicted", "real", "difference", "host alone"],
        [
            [
                row.case,
                f"{row.target[0]:,}",
                row.target[1],
                f"{row.target[2]}",
                f"{row.predicted.found_share:.1%}",
                f"{row.real.found_share:.1%}",
                f"{row.points:+.2f}",
                f"{row.predicted.host_share:.1%} / {row.real.host_share:.1%}",
            ]
            for row in rows
        ],
    )
    return lines


@click.command()
@click.option(
    "--trace", type=click.Path(path_type=Path), envvar="KVSM_TRACE", help="A Mooncake-format trace."
)
@click.option("--case", "only", multiple=True, help="Only the cases of this name. Repeatable.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the tables here, with the command.")
def main(trace: Path | None, only: tuple[str, ...], output: Path | None) -> None:
    """Compare predictions of `kvsm whatif` with real runs of the serving engine."""
    rows = []
    for case in CASES:
        if not only or case.name in only:
            rows += compared(case)
    if trace is not None and (not only or TRACE_CASE.name in only):
        rows += compared(TRACE_CASE, trace)
    publish(
        "What-if beside real runs", "eager store, one KV cache group, simulated copies", report(rows), output
    )


if __name__ == "__main__":
    main()
