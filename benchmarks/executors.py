"""Measure the walk of the core with 1 and 2 workers, in forked processes and in a Ray cluster on this
machine.

All contestants make the same runs from one seed, in turns, in several rounds. For comparison the runs are
also made in this process. The start of the Ray cluster is not counted; its workers are warm, as in a long
walk.

A second table shows what limits a driver with many workers: the bytes that are sent for a batch of runs, and
the driver's time for an item without work. The processor time of a batch, divided by the driver's time for an
item, is the number of workers that a driver could keep busy.

    python benchmarks/executors.py --output benchmarks/results/executors.md
"""

from __future__ import annotations

import os
import pickle
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import click
from page import markdown_table, publish

from kvsm.check.walks import walk as walking
from kvsm.check.walks.targets import draw_case
from kvsm.check.walks.walk import walk
from kvsm.check.worlds.world import World
from kvsm.system.executors.executor import Executor
from kvsm.system.executors.forked import ForkedProcesses
from kvsm.system.executors.ray_cluster import RayCluster

NO_OPS = 3000
ALONE = "this process"


class Measured(NamedTuple):
    """The time of a walk (s). driver: processor time of this process. all: the same with its descendants."""

    wall: float
    driver: float
    all: float


def make_world(random: Random) -> World:
    """Draw a core world."""
    return draw_case("core", random).make()


def measured(work: Callable[[], object]) -> Measured:
    """Run `work`. Returns the time that it took."""
    wall, driver, all_ = time.monotonic(), time.process_time(), _with_descendants()
    work()
    return Measured(time.monotonic() - wall, time.process_time() - driver, _with_descendants() - all_)


def _with_descendants() -> float:
    """Processor time of this process and all its descendants, including ended ones."""
    times: dict[int, float] = {}
    below: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            below[int(fields[1])].append(int(entry.name))
            times[int(entry.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    todo, total = [os.getpid()], 0.0
    while todo:
        process = todo.pop()
        total += times.get(process, 0.0)
        todo += below[process]
    return total


def walks(contestants: dict[str, Executor | None], runs: int, rounds: int) -> list[list[str]]:
    """Measure walks.

    Returns a row for each contestant: medians, and ratios to this process in the same round.
    """
    found: dict[str, list[Measured]] = defaultdict(list)
    results = set()
    for number in range(rounds):
        for name, executor in contestants.items():

            def work(executor: Executor | None = executor, seed: int = number) -> None:
                result = walk(make_world, seed, runs=runs, executor=executor)
                results.add((seed, result.runs, result.operations))

            found[name].append(measured(work))
            click.echo(f"  round {number}, {name}: {found[name][-1]}", err=True)
    assert len(results) == rounds, "equal seeds gave other results"
    rows = []
    for name, mine in found.items():
        faster = [alone.wall / one.wall for alone, one in zip(found[ALONE], mine)]
        dearer = [one.all / alone.all for alone, one in zip(found[ALONE], mine)]
        rows.append(
            [
                name,
                f"{runs / statistics.median(one.wall for one in mine):.1f}",
                f"{statistics.median(faster):.2f} ({min(faster):.2f} to {max(faster):.2f})",
                f"{statistics.median(dearer):.2f} ({min(dearer):.2f} to {max(dearer):.2f})",
                f"{1000 * statistics.median(one.driver for one in mine) / runs:.2f}" if name != ALONE else "",
            ]
        )
    return rows


def no_ops(contestants: dict[str, Executor | None], seconds: float, payload: int) -> list[list[str]]:
    """Measure items without work. Returns a row for each executor: the driver's time for an item, and how
    many workers it could keep busy.

    seconds: processor time of a batch of runs.
    payload: bytes of a batch's results.
    """
    rows = []
    for name, executor in contestants.items():
        if executor is None:
            continue

        def work(executor: Executor = executor) -> None:
            with executor.results(Answering(payload), range(NO_OPS)) as results:
                for _ in results:
                    pass

        took = min((measured(work) for _ in range(3)), key=lambda one: one.driver)
        each = took.driver / NO_OPS
        rows.append([name, f"{1e6 * each:.0f}", f"{NO_OPS / took.wall:,.0f}", f"{seconds / each:,.0f}"])
    return rows


class Answering:
    """A task that does nothing and returns `size` bytes."""

    def __init__(self, size: int) -> None:
        self._answer = bytes(size)

    def __call__(self, _number: int) -> bytes:
        return self._answer


def batch_facts(runs: int) -> tuple[float, int, int]:
    """(processor seconds of a batch of runs, most bytes of its results, bytes of an item)."""
    maker = walking.WorldRuns(make_world, 1, True)
    first, sizes, began = 0, [], time.process_time()
    while first < runs:
        made = maker.batch(first)
        sizes.append(len(pickle.dumps(made)))
        first += len(made)
    return (time.process_time() - began) / len(sizes), max(sizes), len(pickle.dumps(first))


@click.command()
@click.option("--runs", default=96, show_default=True, help="Runs of a walk.")
@click.option("--rounds", default=5, show_default=True, help="Walks of each contestant.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the tables here, with the command.")
def main(runs: int, rounds: int, output: Path | None) -> None:
    """Compare the executors."""
    contestants: dict[str, Any] = {ALONE: None}
    contestants |= {f"{workers} forked": ForkedProcesses(workers) for workers in (1, 2)}
    forked_first = measured(lambda: walk(make_world, 0, runs=8, executor=contestants["2 forked"]))
    click.echo(f"  warm: {forked_first}", err=True)
    seconds, payload, item = batch_facts(runs)
    with RayCluster("local", 2) as cluster:
        for workers in (1, 2):
            limited = _Limited(cluster, workers)
            contestants[f"{workers} in Ray"] = limited
            walk(make_world, 0, runs=16, executor=limited)
        rows = walks(contestants, runs, rounds)
        idle = no_ops(contestants, seconds, payload)
    lines = [
        f"{rounds} rounds of {runs} runs. Each ratio compares two figures of one round: median, least, most.",
        "",
        *markdown_table(
            [
                "who works",
                "runs a second",
                "times as fast as this process",
                "processor time, as a ratio",
                "driver (ms a run)",
            ],
            rows,
        ),
        "",
        "### What a driver can keep busy",
        "",
        f"A batch is 8 runs: {1000 * seconds:.0f} ms of processor time, {payload:,} bytes of results at "
        f"most, {item} bytes of an item. Each item below does nothing and answers with as many bytes.",
        "",
        *markdown_table(
            ["who works", "driver (us an item)", "items a second", "workers that a driver could keep busy"],
            idle,
        ),
    ]
    publish("Executors", "two cores that others use too", lines, output)


class _Limited:
    """An executor that uses only some workers of a cluster."""

    def __init__(self, cluster: RayCluster, workers: int) -> None:
        self._cluster, self.workers = cluster, workers

    @property
    def losses(self) -> int:
        return self._cluster.losses

    def results(self, *arguments: Any, **options: Any) -> Any:
        self._cluster.workers = self.workers
        return self._cluster.results(*arguments, **options)


if __name__ == "__main__":
    main()
