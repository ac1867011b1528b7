"""Measure the error of `kvsm whatif` against real runs.

For each of `CASES` the serving engine runs a workload and writes a log. From this log `kvsm.explain.whatif`
predicts the hits of the same workload under other configurations. Then each of these configurations is run
for real. The share of looked-up blocks that the device had or the host served (`found`) is compared, in
percentage points. Rows with `itself` predict the configuration of the log.

There are four kinds of workload:

- chats: generated conversations (`kvsm.serving.traces.multi_turn`), blocks of 512 tokens;
- agents: recorded sessions of coding agents, 24 at once, blocks of 1,024 tokens (`KVSM_AGENTS`);
- trace: the first requests of a Mooncake trace, blocks of 512 tokens (`KVSM_TRACE`);
- mixed: agents and generated conversations in one engine (`KVSM_AGENTS`).

The largest differences become the errors that `kvsm whatif` prints (`kvsm.explain.whatif.accuracy`).

    KVSM_TRACE=TRACE.jsonl KVSM_AGENTS=SESSIONS.jsonl.gz python benchmarks/whatif.py \
        --jobs 2 --output benchmarks/results/whatif.md
"""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from page import markdown_table, publish
from workload import agent_trace

from kvsm.core.log import LogReader
from kvsm.explain.story import Trust
from kvsm.explain.whatif.accuracy import repeated_share
from kvsm.explain.whatif.demand import Demand, read_demand
from kvsm.explain.whatif.simulate import Scenario, Served, counted_lookups, recorded, simulate
from kvsm.serving import RunOptions, WorkloadRun
from kvsm.serving.traces import TraceRequest, multi_turn, read_trace
from kvsm.system.executors.forked import ForkedProcesses

AGENTS_AT_ONCE = 24
AGENT_BLOCK_TOKENS = 1_024
AGENT_LONGEST_TOKENS = 400 * AGENT_BLOCK_TOKENS
"""Sessions with a longer request than this are left out: it would fill most of the device."""

Target = tuple[int, str, int]
"""(host_blocks, policy, store_threshold)."""


class Case(NamedTuple):
    """One log, and the configurations that are predicted from it.

    kind: the workload.
    options: the options of the run that writes the log.
    targets: the predicted configurations.
    """

    kind: str
    name: str
    options: dict[str, Any]
    targets: tuple[Target, ...]


COMMON: dict[str, Any] = {"copies": "simulated", "workers": 1, "block_bytes": 64}
"""Options of all runs. Copies are simulated, so equal options give equal logs."""

AGENTS: dict[str, Any] = {"requests": 500, "block_tokens": AGENT_BLOCK_TOKENS, "device_blocks": 600}

DISTURBED: dict[str, Any] = {"abort_rate": 0.1, "preempt_rate": 0.01, "failure_rate": 0.01}


def _cross(sizes: tuple[int, ...], policies: tuple[str, ...], threshold: int = 1) -> tuple[Target, ...]:
    return tuple((size, policy, threshold) for size in sizes for policy in policies)


CASES = (
    Case(
        "agents",
        "24 at once",
        {**AGENTS, "host_blocks": 696},
        (
            *_cross((348, 696, 1392, 2784), ("lru", "s3fifo")),
            *_cross((696, 1392), ("arc", "slru")),
            *_cross((696, 1392), ("lru",), threshold=2),
        ),
    ),
    Case(
        "agents",
        "large pool",
        {**AGENTS, "host_blocks": 2784},
        _cross((696, 1392, 2784, 5568), ("lru",)),
    ),
    Case(
        "agents",
        "aborts, preemptions, failed copies",
        {**AGENTS, "host_blocks": 1392, "seed": 3, **DISTURBED},
        _cross((696, 1392, 2784), ("lru",)),
    ),
    Case(
        "mixed",
        "agents and chats",
        {**AGENTS, "device_blocks": 400, "host_blocks": 700},
        (*_cross((350, 700, 1400, 2800), ("lru", "s3fifo")), (700, "slru", 1), (700, "lru", 2)),
    ),
    Case(
        "trace",
        "small pool",
        {"requests": 800, "device_blocks": 600, "host_blocks": 1000},
        _cross((500, 1000, 4000), ("lru", "arc", "s3fifo")),
    ),
    Case(
        "trace",
        "large pool",
        {"requests": 800, "device_blocks": 600, "host_blocks": 8000},
        (*_cross((1000, 4000, 8000), ("lru",)), (8000, "slru", 1), (8000, "lru", 2)),
    ),
    Case(
        "chats",
        "small pool",
        {"requests": 600, "device_blocks": 160, "host_blocks": 300},
        _cross((150, 300, 600, 1200), ("lru", "s3fifo", "slru")),
    ),
    Case(
        "chats",
        "large pool",
        {"requests": 600, "device_blocks": 160, "host_blocks": 2400},
        (*_cross((300, 600, 1200, 2400), ("lru", "arc")), (600, "sieve", 1)),
    ),
    Case(
        "chats",
        "another policy",
        {"requests": 600, "device_blocks": 320, "host_blocks": 600, "policy": "s3fifo", "seed": 1},
        _cross((300, 600, 1200), ("lru", "s3fifo", "slru")),
    ),
    Case(
        "chats",
        "threshold",
        {"requests": 600, "device_blocks": 160, "host_blocks": 600, "seed": 2},
        ((600, "lru", 1), (600, "lru", 2), (600, "lru", 3), (300, "lru", 2), (1200, "lru", 2)),
    ),
    Case(
        "chats",
        "threshold 2 before",
        {"requests": 600, "device_blocks": 160, "host_blocks": 600, "store_threshold": 2, "seed": 2},
        ((600, "lru", 1), (600, "lru", 2), (1200, "lru", 2), (1200, "lru", 1)),
    ),
    Case(
        "chats",
        "aborts, preemptions, failed copies",
        {"requests": 600, "device_blocks": 160, "host_blocks": 600, "seed": 3, **DISTURBED},
        _cross((300, 600, 1200), ("lru", "arc")),
    ),
    Case(
        "chats",
        "resets",
        {"requests": 600, "device_blocks": 160, "host_blocks": 600, "reset_every": 4000, "seed": 4},
        _cross((300, 600, 1200), ("lru", "arc")),
    ),
    Case(
        "chats",
        "two blocks a slot",
        {"requests": 600, "device_blocks": 160, "host_blocks": 300, "blocks_per_chunk": 2, "seed": 5},
        _cross((150, 300, 600), ("lru",)),
    ),
)


def requests_of(case: Case, trace: Path | None, agents: Path | None) -> list[TraceRequest] | None:
    """Return the workload of a case; None if its data file is not given."""
    count = case.options["requests"]
    if case.kind == "chats":
        return list(multi_turn(case.options.get("seed", 0), count))
    if case.kind == "trace":
        return None if trace is None else list(islice(read_trace(trace), count))
    if agents is None:
        return None
    sessions = agent_trace(agents, AGENTS_AT_ONCE, AGENT_BLOCK_TOKENS, AGENT_LONGEST_TOKENS)
    if case.kind == "agents":
        return list(islice(sessions, count))
    return _mixed(list(islice(sessions, count // 2)), list(multi_turn(0, count // 2, AGENT_BLOCK_TOKENS)))


def _mixed(some: list[TraceRequest], others: list[TraceRequest]) -> list[TraceRequest]:
    """Merge two workloads for one engine, over the same time. They share no block."""
    scale = some[-1].arrival_ms / others[-1].arrival_ms
    first = 1 + max(max(request.hash_ids, default=0) for request in some)
    moved = [
        msgspec.structs.replace(
            request,
            arrival_ms=scale * request.arrival_ms,
            hash_ids=tuple([first + block for block in request.hash_ids]),
        )
        for request in others
    ]
    return sorted([*some, *moved], key=lambda request: request.arrival_ms)


class Predicted(NamedTuple):
    """A prediction, and the real run of the same configuration.

    repeated: the log's share of repeated blocks, by which `kvsm whatif` tells the kind of a log. changed:
        what differs from the log's configuration.
    """

    case: Case
    repeated: float
    changed: str
    target: Target
    predicted: Served
    real: Served

    @property
    def points(self) -> float:
        """The predicted minus the real share of found blocks (percentage points)."""
        return 100 * (self.predicted.found_share - self.real.found_share)


def demand_of(options: RunOptions, requests: list[TraceRequest]) -> Demand:
    """Run a workload, and read its demand from the log."""
    with tempfile.TemporaryDirectory() as directory:
        log = str(Path(directory) / "log")
        WorkloadRun(msgspec.structs.replace(options, log=log), requests, log).serve()
        return read_demand(LogReader(log), Trust())


def compared(number: int, trace: Path | None, agents: Path | None) -> list[Predicted]:
    """Predict all targets of a case from its log, and run them. Empty without the data of the workload.

    number: the place of the case in `CASES`.
    """
    case = CASES[number]
    requests = requests_of(case, trace, agents)
    if requests is None:
        click.echo(f"  {case.kind}, {case.name}: left out, its data are not given", err=True)
        return []
    options = RunOptions(**COMMON, **case.options)
    demand = demand_of(options, requests)
    lookups, share = counted_lookups(demand), repeated_share(demand)
    itself = options.host_blocks, options.policy, options.store_threshold
    rows = []
    for target in case.targets:
        host_blocks, policy, threshold = target
        real = recorded(lookups)
        if target != itself:
            other = msgspec.structs.replace(
                options, host_blocks=host_blocks, policy=policy, store_threshold=threshold
            )
            real = recorded(counted_lookups(demand_of(other, requests)))
        predicted = simulate(demand, Scenario(host_blocks, policy, threshold), lookups)
        rows.append(Predicted(case, share, _changed(itself, target), target, predicted, real))
        click.echo(f"  {case.kind}, {case.name}, {target}: {rows[-1].points:+.2f} points", err=True)
    return rows


def _changed(itself: Target, target: Target) -> str:
    if itself == target:
        return "itself"
    if itself[2] != target[2]:
        return "threshold"
    return "capacity" if itself[1] == target[1] else "policy"


def report(rows: list[Predicted]) -> list[str]:
    """Format the page: the largest differences by kind of workload and kind of change, then every
    comparison."""
    lines = ["### Largest differences", ""]
    kinds = dict.fromkeys(row.case.kind for row in rows)
    table = []
    for kind in kinds:
        of_kind = [row for row in rows if row.case.kind == kind]
        shares = sorted(row.repeated for row in of_kind)
        for changed in ("itself", "capacity", "policy", "threshold"):
            points = [abs(row.points) for row in of_kind if row.changed == changed]
            if points:
                mean, repeated = sum(points) / len(points), f"{shares[0]:.1%} to {shares[-1]:.1%}"
                table.append([kind, repeated, changed, f"{len(points)}", f"{mean:.2f}", f"{max(points):.2f}"])
    header = ["workload", "repeated", "changed", "comparisons", "mean (points)", "largest (points)"]
    lines += markdown_table(header, table)
    lines += ["", "repeated: share of the blocks of a prompt that an earlier prompt of the log has too.", ""]
    lines += ["### All comparisons", ""]
    lines += markdown_table(
        [
            "workload",
            "log",
            "host slots",
            "policy",
            "threshold",
            "predicted",
            "real",
            "difference",
            "host alone",
        ],
        [
            [
                row.case.kind,
                row.case.name,
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
@click.option(
    "--agents", type=click.Path(path_type=Path), envvar="KVSM_AGENTS", help="Recorded sessions, in gzip."
)
@click.option("--kind", "only", multiple=True, help="Only workloads of this kind. Repeatable.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the tables here, with the command.")
def main(
    trace: Path | None, agents: Path | None, only: tuple[str, ...], jobs: int, output: Path | None
) -> None:
    """Compare predictions of `kvsm whatif` with real runs of the serving engine."""
    chosen = [number for number, case in enumerate(CASES) if not only or case.kind in only]
    rows = list[Predicted]()
    with ForkedProcesses(jobs).results(partial(compared, trace=trace, agents=agents), chosen) as results:
        for found in results:
            rows += found
    publish(
        "What-if beside real runs", "eager store, one KV cache group, simulated copies", report(rows), output
    )


if __name__ == "__main__":
    main()
