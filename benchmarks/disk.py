"""Measure the disk tier's speed as a share of the disk's own speed.

The disk's own speed is that of a plain loop over the same offsets of another file, in the same order: direct
I/O, equally many threads, one call for each block. Loop and engine are measured in turns, in one run, on
files of the same size.

    python benchmarks/disk.py --directory /var/tmp --output benchmarks/results/disk.md
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
import numpy as np
from page import markdown_table, publish

from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.identity import PoolIdentity
from kvsm.ids import pack
from kvsm.tiers.disk import DiskCopyEngine, DiskGeometry, FlushPolicy, SlotFile
from kvsm.tiers.disk.aligned import aligned_memory, use_direct

BLOCK_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
IDENTITY = PoolIdentity.of({"benchmark": "disk"})
JOB_BYTES = 64 << 20

Seconds = tuple[float, float]
"""(wall-clock time, CPU time)."""

LOOP, ENGINE = "loop", "engine"
Taken = dict[tuple[Direction, str, str], list[Seconds]]
"""(direction, order of the slots, LOOP or ENGINE) -> the times of each round."""


@contextmanager
def timed(into: list[Seconds]) -> Iterator[None]:
    clock, processor = time.perf_counter(), time.process_time()
    yield
    into.append((time.perf_counter() - clock, time.process_time() - processor))


def plain_loop(
    path: Path, geometry: DiskGeometry, slots: Sequence[int], threads: int, call: Callable[..., int]
) -> None:
    """Write or read these slots in this order, with one call for each."""
    descriptor = os.open(path, os.O_RDWR)
    if not use_direct(descriptor, True):
        raise click.ClickException(f"{path}: no direct I/O here")
    memories = [aligned_memory(geometry.payload_step) for _ in range(threads)]

    def some(number: int) -> None:
        for slot in slots[number::threads]:
            call(descriptor, [memories[number]], geometry.payload_at(slot))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(some, range(threads)))
    os.close(descriptor)


def jobs(direction: Direction, geometry: DiskGeometry, slots: Sequence[int], first: int) -> list[TransferJob]:
    """Transfers of about `JOB_BYTES`, with random blocks of the host pool."""
    step = max(1, JOB_BYTES // geometry.payload_bytes)
    blocks = random.Random(7).sample(range(geometry.num_slots), geometry.num_slots)
    made = []
    for start in range(0, len(slots), step):
        some = slots[start : start + step]
        keys = tuple(slot.to_bytes(32, "little") for slot in some)
        device = pack(blocks[start : start + step])
        made.append(TransferJob(first + len(made), direction, device, pack(some), keys))
    return made


def run(engine: DiskCopyEngine, made: Sequence[TransferJob]) -> None:
    for job in made:
        engine.submit(job)
    engine.drain()
    bad = [result.error for result in engine.poll() if not result.good]
    if bad:
        raise click.ClickException(f"a copy failed: {bad[0]}")


def rows_of(directory: Path, block_bytes: int, total: int, threads: int, rounds: int) -> list[list[str]]:
    """Measure blocks of one size. Returns their rows of the table."""
    geometry = DiskGeometry(block_bytes, total // block_bytes)
    host = aligned_memory(total).reshape(geometry.num_slots, block_bytes)  # like a host pool
    host[:] = np.random.default_rng(1).integers(0, 256, host.shape, dtype=np.uint8)
    plain, path = directory / "plain", directory / "tier"
    SlotFile(plain, geometry, IDENTITY).close()
    orders = {
        "neighbours": list(range(geometry.num_slots)),
        "random": random.Random(3).sample(range(geometry.num_slots), geometry.num_slots),
    }
    taken: Taken = {}
    number = 0
    with closing(
        DiskCopyEngine(host, SlotFile(path, geometry, IDENTITY), FlushPolicy.NONE, threads=threads)
    ) as engine:
        run(engine, jobs(Direction.STORE, geometry, orders["neighbours"], 1))
        plain_loop(plain, geometry, orders["neighbours"], threads, os.pwritev)
        for turn in range(rounds):
            for direction, call in ((Direction.STORE, os.pwritev), (Direction.LOAD, os.preadv)):
                for name, slots in orders.items():
                    number += 100_000
                    made = jobs(direction, geometry, slots, number)
                    turns: list[tuple[str, Callable[[], None]]] = [
                        (LOOP, partial(plain_loop, plain, geometry, slots, threads, call)),
                        (ENGINE, partial(run, engine, made)),
                    ]
                    for who, copies in turns if turn % 2 else turns[::-1]:
                        with timed(taken.setdefault((direction, name, who), [])):
                            copies()
    plain.unlink()
    path.unlink()
    return list(_table(block_bytes, geometry, taken))


def _table(block_bytes: int, geometry: DiskGeometry, taken: Taken) -> Iterator[list[str]]:
    gigabytes = geometry.num_slots * block_bytes / 1e9
    for direction in Direction:
        for name in ("neighbours", "random"):
            loop, engine = taken[direction, name, LOOP], taken[direction, name, ENGINE]
            own, speed = (gigabytes / median(clock for clock, _ in times) for times in (loop, engine))
            shares = [its / mine for (its, _), (mine, _) in zip(loop, engine)]
            yield [
                f"{block_bytes >> 10} KiB",
                direction.name.lower(),
                name,
                f"{own:.2f}",
                f"{speed:.2f}",
                f"{median(shares):.2f} ({min(shares):.2f} .. {max(shares):.2f})",
                f"{median(processor for _, processor in engine) / gigabytes:.2f}",
                f"{median(processor for _, processor in loop) / gigabytes:.2f}",
            ]


@click.command(help=__doc__)
@click.option("--directory", default="/var/tmp", help="Directory of the temporary files.")
@click.option("--total-mib", default=1024, help="Payload of a file.")
@click.option("--threads", default=8)
@click.option("--rounds", default=3)
@click.option("--output", type=click.Path(path_type=Path), help="Write the page to this file too.")
def main(directory: str, total_mib: int, threads: int, rounds: int, output: Path | None) -> None:
    total = total_mib << 20
    with TemporaryDirectory(prefix="kvsm-disk-", dir=directory) as made:
        rows = [row for size in BLOCK_BYTES for row in rows_of(Path(made), size, total, threads, rounds)]
    columns = ["block", "", "slots", "disk GB/s", "kvsm GB/s", "share", "CPU s/GB", "CPU s/GB, loop"]
    note = (
        f"direct I/O, {threads} threads, {total >> 20} MiB a file, no flushes; medians of {rounds} rounds in "
        "turns. The disk's own speed is a plain loop over the same places, with a call for each block. "
        "Share: kvsm beside the loop of the same round, and the least and most of all rounds. "
        "Every store is hashed and every load is proved; the loop does neither, so other load takes less "
        f"from it: {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end"
    )
    publish("The disk tier beside its disk", note, markdown_table(columns, rows), output)


if __name__ == "__main__":
    main()
