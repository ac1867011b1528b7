"""Measure what checksums cost the host engine: without checksums, with a kept pool, and with a check of every
load.

All engines are measured in turns, in one run. Wall-clock times go from the call of `submit` to the result,
and CPU time counts all threads of the process. The first load of a block from a kept pool is checked before
its copy begins; later loads are not checked.

    python benchmarks/checksums.py --output benchmarks/results/checksums.md
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click
import numpy as np
from page import markdown_table, publish

from kvsm.copies import CopyEngine, HostCopyEngine, HostPool, VerifyingCopyEngine
from kvsm.copies.checksums import CHECKSUM_BYTES
from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.ids import pack

BLOCK_BYTES = (64 << 10, 1 << 20)
TRANSFER_BYTES = 64 << 20
POOL_TRANSFERS = 4
"""Size of the device pool and of the host pool, in transfers."""


class Cost(NamedTuple):
    """Wall-clock time and CPU time of one transfer (s)."""

    wall_s: float
    cpu_s: float


def job(number: int, direction: Direction, block_bytes: int) -> TransferJob:
    """A transfer of random pairs; the same pairs for equal sizes."""
    chosen = random.Random(block_bytes)
    blocks = TRANSFER_BYTES // block_bytes
    device, host = (chosen.sample(range(POOL_TRANSFERS * blocks), blocks) for _ in range(2))
    # Kept pools need keys; these are as long as vLLM's.
    keys = tuple(b"%036d" % block for block in host)
    return TransferJob(number, direction, pack(device), pack(host), keys, tuple(range(1, 1 + blocks)))


def cost_of(engine: CopyEngine, transfer: TransferJob) -> Cost:
    """Carry out one transfer. Returns its cost."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    engine.submit(transfer)
    engine.wait([transfer.transfer])
    [result] = engine.poll()
    cost = Cost(time.perf_counter() - wall_s, time.process_time() - cpu_s)
    if not result.good:
        raise RuntimeError(result.error)
    return cost


def costs(block_bytes: int, rounds: int) -> dict[str, list[Cost]]:
    """Measure all engines in turns, `rounds` times."""
    blocks = POOL_TRANSFERS * TRANSFER_BYTES // block_bytes
    found: dict[str, list[Cost]] = {}
    with ExitStack() as stack:
        device = stack.enter_context(HostPool(blocks, block_bytes)).blocks
        host = stack.enter_context(HostPool(blocks, block_bytes)).blocks
        device[:], host[:] = 1, 2
        table = np.zeros((blocks, CHECKSUM_BYTES), np.uint8)

        def plain() -> CopyEngine:
            return HostCopyEngine(device, host, threads=2)

        def kept() -> CopyEngine:
            return VerifyingCopyEngine(plain(), host, table=table, kept=True, every_load=False)

        def checked() -> CopyEngine:
            return VerifyingCopyEngine(plain(), host)

        def measure(make: Callable[[], CopyEngine], *steps: tuple[str, Direction]) -> None:
            with closing(make()) as engine:
                for number, (name, direction) in enumerate(steps):
                    found.setdefault(name, []).append(cost_of(engine, job(number, direction, block_bytes)))

        for _ in range(rounds + 1):
            measure(plain, ("none: store", Direction.STORE), ("none: load", Direction.LOAD))
            measure(kept, ("kept: store", Direction.STORE))
            measure(kept, ("kept: first load", Direction.LOAD), ("kept: later load", Direction.LOAD))
            measure(checked, ("every load: store", Direction.STORE), ("every load: load", Direction.LOAD))
    return {name: measured[1:] for name, measured in found.items()}  # the first round touches all pages


@click.command()
@click.option("--rounds", default=25, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write a page there.")
def main(rounds: int, output: Path | None) -> None:
    """Measure what checksums cost."""
    rows = []
    for block_bytes in BLOCK_BYTES:
        measured = costs(block_bytes, rounds)
        for name, taken in measured.items():
            wall_ms = 1e3 * median(one.wall_s for one in taken)
            cpu_ms = 1e3 * median(one.cpu_s for one in taken)
            base = measured["none: store" if name.endswith("store") else "none: load"]
            base_ms = 1e3 * median(one.wall_s for one in base)
            numbers = f"{wall_ms:.1f}", f"{wall_ms / base_ms:.2f}", f"{cpu_ms:.1f}"
            rows.append([f"{block_bytes >> 10} KiB", name, *numbers])
    header = ["block", "checksums: transfer", "wall, ms", "of none", "CPU, ms"]
    note = (
        f"random pairs of blocks, {TRANSFER_BYTES >> 20} MiB a transfer, 2 copying threads and 1 that "
        f"checks; medians of {rounds} rounds; CPU time counts all threads"
    )
    publish("What checksums cost", note, markdown_table(header, rows), output)


if __name__ == "__main__":
    main()
