"""Measure the benefit and the cost of a disk tier in the serving engine, with a host pool of a tenth of the
working set.

The working set is all blocks of the prompts. The same requests are served without a disk, with an empty disk,
with the disk that this run has filled, with an empty disk in write-back mode, and without a disk by a host
pool that holds everything. All are measured in turns in one process. Their logs are verified, and the bytes
that requests compute from are compared.

The engine computes nothing and does not wait: its time is spent on decisions, copies and comparisons. So
requests per second show the cost of a tier. Its benefit is the prompt tokens that need no compute.

    python benchmarks/disk_tier.py --directory /var/tmp --output benchmarks/results/disk_tier.md
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import click
import msgspec
from page import markdown_table, publish

from kvsm.core.log import LogReader
from kvsm.events import LoadPlanned, StorePlanned
from kvsm.ids import to_list
from kvsm.serving import RunOptions, RunResult, WorkloadRun, load_workload
from kvsm.serving.traces import TraceRequest

PLAIN = "no disk"
LARGE = "no disk, all on the host"
NAMES = (PLAIN, "disk, empty", "disk, filled before", "disk, empty, write-back", LARGE)


class Served(NamedTuple):
    """The result of one run.

    fetched: blocks that were fetched from the disk.
    used: how many of these blocks a request has loaded.
    from_disk: loads of these blocks to the device, counted for each request.
    """

    result: RunResult
    seconds: float
    cpu_seconds: float
    fetched: int
    used: int
    from_disk: int

    @property
    def requests_per_second(self) -> float:
        return self.result.requests / self.seconds


def serve(options: RunOptions, requests: list[TraceRequest]) -> Served:
    with TemporaryDirectory(prefix="kvsm-log-") as made:
        log = f"{made}/log"
        run = WorkloadRun(msgspec.structs.replace(options, log=log), requests, log)
        clock, processor = time.perf_counter(), time.process_time()
        run.serve()
        seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - processor
        result = run.prove()
        if not result.good:
            raise click.ClickException(f"{result.violations[:3]}, {result.damage}")
        return Served(result, seconds, cpu_seconds, *ways_from_disk(log, result))


def ways_from_disk(log: str, result: RunResult) -> tuple[int, int, int]:
    """(fetched, used, from_disk) of a `Served`, from the log of the host."""
    fetched: dict[int, bool] = {}
    """Slot whose content was fetched from the disk -> whether a request has loaded it."""
    used = loads = blocks = 0
    if result.disk is None:
        return 0, 0, 0
    for event in LogReader(log).events():
        if isinstance(event, StorePlanned):
            for slot in to_list(event.slots):
                fetched.pop(slot, None)
                if event.source:
                    fetched[slot] = False
                    blocks += 1
        elif isinstance(event, LoadPlanned) and not event.target:
            for slot in to_list(event.slots):
                if slot in fetched:
                    used += not fetched[slot]
                    loads += 1
                    fetched[slot] = True
    return blocks, used, loads


def rounds_of(options: RunOptions, directory: Path, rounds: int) -> dict[str, list[Served]]:
    """Contestant -> its runs."""
    requests = load_workload(options)
    working_set = len({block for request in requests for block in request.hash_ids})
    plain = msgspec.structs.replace(options, host_blocks=working_set // 10)
    large = msgspec.structs.replace(options, host_blocks=2 * working_set)
    found: dict[str, list[Served]] = {}
    for number in range(rounds + 1):
        with TemporaryDirectory(prefix="kvsm-disk-", dir=directory) as made:
            tier = msgspec.structs.replace(plain, disk_dir=f"{made}/disk", disk_blocks=2 * working_set)
            back = msgspec.structs.replace(tier, disk_dir=f"{made}/back", disk_write="back")
            chosen_by = dict(zip(NAMES, (plain, tier, tier, back, large)))
            for name in NAMES if number % 2 else (LARGE, *NAMES[:-1]):
                served = serve(chosen_by[name], requests)
                click.echo(f"round {number}: {name}: {served.requests_per_second:.0f} requests/s", err=True)
                if number:  # round 0 warms up
                    found.setdefault(name, []).append(served)
    return {name: found[name] for name in NAMES}


def spread(values: list[float], digits: int = 2) -> str:
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f} .. {max(values):,.{digits}f})"


def tables(found: dict[str, list[Served]]) -> list[str]:
    speeds, hits, ways = [], [], []
    for name, runs in found.items():
        beside = [mine.requests_per_second / its.requests_per_second for mine, its in zip(runs, found[PLAIN])]
        speeds.append(
            [
                name,
                spread([one.requests_per_second for one in runs], 0),
                spread(beside),
                spread([one.seconds for one in runs], 1),
                spread([one.cpu_seconds for one in runs], 1),
            ]
        )
        result = runs[0].result
        device, host, computed = result.device_hit_tokens, result.host_hit_tokens, result.computed_tokens
        shares = [f"{100 * one / (device + host + computed):.1f}%" for one in (device, host, computed)]
        hits.append([name, *shares, f"{result.deferrals:,}", f"{result.preemptions:,}"])
        if result.disk is not None:
            ways.append([name, *_ways(runs[0])])
    return [
        "Least and most of the rounds in brackets. Ratios compare the same round; quote these.",
        "",
        *markdown_table(["", "requests/s", "times no disk", "s", "CPU s, all threads"], speeds),
        "",
        "## Where prompt tokens came from",
        "",
        "Again after a preemption. Decisions are the same in each round.",
        "",
        *markdown_table(["", "device", "host or disk", "computed", "waits", "preemptions"], hits),
        "",
        "## What the disk reads and writes",
        "",
        "Read amplification: bytes read from the disk, headers included, divided by bytes that went from "
        "host to device. The first figure counts all of the latter, the second one only blocks that came "
        "from the disk. Not used: blocks that came from the disk, and that the host lost before a request "
        "loaded them.",
        "",
        *markdown_table(
            [
                "",
                "blocks found",
                "blocks stored",
                "not stored",
                "GB written",
                "blocks read",
                "GB read",
                "GB to the device",
                "amplification",
                "of the disk's blocks",
                "not used",
            ],
            ways,
        ),
    ]


def _ways(served: Served) -> list[str]:
    disk, loaded = served.result.disk, served.result.loads.bytes
    assert disk is not None
    ranks = served.result.loads.bytes // max(1, served.result.blocks_loaded)
    read, written = disk.blocks_loaded * disk.slot_bytes, disk.blocks_stored * disk.slot_bytes
    return [
        f"{disk.blocks_found:,}",
        f"{disk.blocks_stored:,}",
        f"{disk.blocks_not_stored:,}",
        f"{written / 1e9:.2f}",
        f"{disk.blocks_loaded:,}",
        f"{read / 1e9:.2f}",
        f"{loaded / 1e9:.2f}",
        f"{read / max(1, loaded):.2f}",
        f"{read / max(1, served.from_disk * ranks):.2f}",
        f"{100 * (1 - served.used / max(1, served.fetched)):.0f}%",
    ]


@click.command(help=__doc__)
@click.option("--directory", default="/var/tmp", help="Directory of the temporary files.")
@click.option("--trace", help="Mooncake-format trace. Default: generated conversations.")
@click.option("--requests", default=2000, show_default=True)
@click.option("--block-kib", default=64, show_default=True)
@click.option("--device-blocks", default=256, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Measured rounds, after one to warm up.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the page to this file too.")
def main(
    directory: str,
    trace: str | None,
    requests: int,
    block_kib: int,
    device_blocks: int,
    rounds: int,
    output: Path | None,
) -> None:
    options = RunOptions(
        trace=trace,
        requests=requests,
        block_bytes=block_kib << 10,
        device_blocks=device_blocks,
        host_blocks=1 << 14,
        workers=1,
        last_step="keep-stepping",
    )
    found = rounds_of(options, Path(directory), rounds)
    note = (
        f"{requests:,} requests, one rank, blocks of {block_kib} KiB; {device_blocks} blocks on the device, "
        "a tenth of the working set on the host, twice the working set on the disk; medians of "
        f"{rounds} rounds in turns"
    )
    publish("A disk tier below a host pool that is too small", note, tables(found), output)


if __name__ == "__main__":
    main()
