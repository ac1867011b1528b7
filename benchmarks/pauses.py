"""Measure the longest calls of the core, with 10,000 to 10,000,000 slots.

The pool is full. Requests of 64 blocks are matched, stored and finished one after the other, so each one
evicts. Each call is measured separately, in CPU time of its thread and in wall time. Then requests are
measured while the next segment of the log opens, from the call that begins it to the call that ends it. Last,
the cache is reset. The log is written as in vLLM: one thread syncs it, and another one writes its snapshots.

These tables are measured with LRU. The last table compares all policies, at one size. It also measures
requests after all blocks of the pool were used, which is the worst case for a policy that passes over used
blocks in its search for victims.

    python benchmarks/pauses.py --output benchmarks/results/pauses.md
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from page import markdown_table, publish

from kvsm.core import native
from kvsm.core.offloader import Offloader
from kvsm.core.policies import POLICIES
from kvsm.events import OffloadConfig

BLOCKS = 64
FILL_BLOCKS = 4096
REQUESTS_ALL_USED = 200
WHILE = ", while a segment opens"
SEGMENT_BYTES = 1 << 40
"""So large that no segment gets full: the benchmark opens the next segment explicitly."""


class Clock:
    """Times of calls (ns), by name of the call."""

    def __init__(self) -> None:
        self.cpu: dict[str, list[int]] = {}
        self.wall: dict[str, list[int]] = {}

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        result = function(*arguments)
        self.cpu.setdefault(name, []).append(time.thread_time_ns() - cpu)
        self.wall.setdefault(name, []).append(time.perf_counter_ns() - wall)
        return result


def keys_of(number: int, blocks: int) -> list[bytes]:
    """The keys of a request."""
    return [b"%032d" % (number * FILL_BLOCKS + block) for block in range(blocks)]


def serve(core: Offloader, clock: Clock, number: int, blocks: int) -> None:
    """Serve a new request: match, store and finish it."""
    request, keys = str(number), keys_of(number, blocks)
    clock.call("match", core.match, request, keys)
    job = clock.call("prepare_store", core.prepare_store, request, keys, range(blocks)).job
    clock.call("submit", core.submit, [job.transfer])
    clock.call("complete_store", core.complete_store, job.transfer)
    clock.call("finish", core.finish, request)
    clock.call("end_step", core.end_step)


def use(core: Offloader, number: int) -> None:
    """Match the blocks that are left of an earlier request, so that they are used."""
    request = f"{number} again"
    core.match(request, keys_of(number, FILL_BLOCKS))
    core.finish(request)
    core.end_step()


def opened(slots: int, policy: str, path: Path) -> Offloader:
    """A core with a log that a thread syncs."""
    config = OffloadConfig(host_blocks=slots, device_blocks=FILL_BLOCKS, policy=policy)
    return Offloader.open(config, path, sync_thread=True, segment_bytes=SEGMENT_BYTES)


def fill(core: Offloader) -> int:
    """Fill the pool. Returns the number of requests."""
    number = 0
    while core.ledger.free:
        number += 1
        serve(core, Clock(), number, min(FILL_BLOCKS, len(core.ledger.free)))
    gc.collect()
    return number


def measured_all_used(slots: int, policy: str) -> Clock:
    """Measure requests after all blocks were used as often as any policy counts. This is done twice, because
    a policy may have moved the blocks in between."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as directory:
        core = opened(slots, policy, Path(directory) / "log")
        number = filling = fill(core)
        for _ in range(2):
            for earlier in list(range(1, filling + 1)) * 3:
                use(core, earlier)
            for _ in range(REQUESTS_ALL_USED):
                number += 1
                serve(core, clock, number, BLOCKS)
        core.close()
    return clock


def measured(slots: int, requests: int, policy: str = "lru") -> dict[str, Any]:
    """Measure all figures at this size."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log"
        core = opened(slots, policy, path)
        assert core.writer is not None
        number = fill(core)
        clock = Clock()
        for _ in range(requests):
            number += 1
            serve(core, clock, number, BLOCKS)
        core.writer._place.segment.full_at = 0  # the next flush begins to open a segment
        change, began = Clock(), time.perf_counter()
        while len(list(path.glob("*.kvsm"))) == 1:
            number += 1
            serve(core, change, number, BLOCKS)
        seconds = time.perf_counter() - began
        reset = Clock()
        reset.call("reset", core.reset)
        core.close()
    return {"clock": clock, "change": change, "reset": reset, "seconds": seconds}


def spread(times: dict[str, list[int]]) -> list[str]:
    """p50, p99 and p99.9 of a request, and the longest call (us)."""
    a_request = np.sum([np.array(of_call) for of_call in times.values()], axis=0) / 1000
    longest = max(max(of_call) for of_call in times.values()) / 1000
    return [f"{np.percentile(a_request, share):,.0f}" for share in (50, 99, 99.9)] + [f"{longest:,.0f}"]


def longest(clock: Clock) -> list[str]:
    """The longest call (ms of CPU time, ms of wall time)."""
    return [
        f"{max(max(of_call) for of_call in times.values()) / 1e6:,.2f}" for times in (clock.cpu, clock.wall)
    ]


def policy_rows(slots: int, requests: int) -> list[list[str]]:
    """Measure each policy. Returns a row for each."""
    rows = []
    for policy in POLICIES:
        figures = measured(slots, requests, policy)
        p50, p99, _, most = spread(figures["clock"].cpu)
        reset, _ = longest(figures["reset"])
        all_used = spread(measured_all_used(slots, policy).cpu)[-1]
        rows.append([policy, p50, p99, most, spread(figures["change"].cpu)[-1], all_used, reset])
        click.echo(f"  {rows[-1]}", err=True)
        gc.collect()
    return rows


@click.command()
@click.option("--slots", multiple=True, type=int, default=(10_000, 100_000, 1_000_000, 10_000_000))
@click.option("--policy-slots", default=1_000_000, show_default=True, help="Slots in the table of policies.")
@click.option("--requests", default=4000, show_default=True, help="Requests on the clock at each size.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the tables here, with the command.")
def main(slots: tuple[int, ...], policy_slots: int, requests: int, output: Path | None) -> None:
    """Measure the longest calls of the core."""
    header = ["slots", "p50", "p99", "p99.9", "longest call"]
    kinds = [f"{kind} time{when}" for when in ("", WHILE) for kind in ("CPU", "wall")]
    tables: dict[str, list[list[str]]] = {kind: [] for kind in kinds}
    long_rows = []
    for size in slots:
        figures = measured(size, requests)
        for when, clock in (("", figures["clock"]), (WHILE, figures["change"])):
            tables[f"CPU time{when}"].append([f"{size:,}", *spread(clock.cpu)])
            tables[f"wall time{when}"].append([f"{size:,}", *spread(clock.wall)])
        requests_meanwhile = len(figures["change"].cpu["match"])
        took = [f"{figures['seconds']:,.2f}", f"{requests_meanwhile:,}"]
        long_rows.append([f"{size:,}", *took, *longest(figures["reset"])])
        click.echo(f"  {size:,} slots: {[rows[-1] for rows in tables.values()]} {long_rows[-1]}", err=True)
        gc.collect()
    lines = []
    for kind, rows in tables.items():
        lines += [f"### A request of {BLOCKS} blocks on a full pool, us of {kind}", ""]
        lines += [*markdown_table(header, rows), ""]
    lines += ["### How long a segment takes to open, and a reset", ""]
    wide = ["slots", "segment, s", "requests meanwhile", "reset, ms of CPU", "reset, ms of wall time"]
    lines += [*markdown_table(wide, long_rows), ""]
    lines += [f"### By policy: {policy_slots:,} slots, CPU time", ""]
    columns = [
        "p50, us",
        "p99, us",
        "longest call, us",
        f"longest{WHILE}, us",
        "longest, all used, us",
        "reset, ms",
    ]
    lines += [*markdown_table(["policy", *columns], policy_rows(policy_slots, requests)), ""]
    publish("Pauses", f"body of the fold: {native.described()}", lines, output)


if __name__ == "__main__":
    main()
