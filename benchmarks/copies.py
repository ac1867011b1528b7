"""Measure copies of random blocks, relative to one contiguous copy of the same bytes.

Every row is measured in one run, in turns: the contiguous copy, kvsm's engine, and on a GPU the methods of
other systems. Times are wall-clock times from the call to the last byte, including CPU work.

    python benchmarks/copies.py --output benchmarks/results/copies_host.md           the host engine
    python benchmarks/copies.py --gpu --output benchmarks/results/copies_gpu.md      the CUDA engine
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import click
import numpy as np
from copies_gpu import gpu_tables
from numpy.typing import NDArray
from page import markdown_table, publish

from kvsm.copies import HostCopyEngine, VerifyingCopyEngine
from kvsm.copies.simulated import SimulatedDevice
from kvsm.copies.streams import StreamCopyEngine
from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.ids import pack

FRAGMENT_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
TRANSFER_BYTES = 256 << 20
CHUNK_BYTES = 4 << 20
"""The size of a piece of the contiguous copy. The engine divides work into similar pieces."""


def job(number: int, direction: Direction, blocks: int, pool_blocks: int, seed: int) -> TransferJob:
    """A transfer of `blocks` random pairs."""
    chosen = random.Random(seed)
    device, host = (chosen.sample(range(pool_blocks), blocks) for _ in range(2))
    return TransferJob(number, direction, pack(device), pack(host))


def contiguous(source: NDArray[Any], target: NDArray[Any], threads: int) -> float:
    """Copy one array into another with `threads` threads, a part each. Returns the seconds."""

    def copy(first: int, last: int) -> None:
        for start in range(first, last, CHUNK_BYTES):
            stop = min(last, start + CHUNK_BYTES)
            target[start:stop] = source[start:stop]

    part = -(-len(source) // threads)
    working = [
        Thread(target=copy, args=(place * part, min(len(source), (place + 1) * part)))
        for place in range(threads)
    ]
    started = time.perf_counter()
    for thread in working:
        thread.start()
    for thread in working:
        thread.join()
    return time.perf_counter() - started


def engine_seconds(engine: Any, jobs: Sequence[TransferJob]) -> float:
    started = time.perf_counter()
    for submitted in jobs:
        engine.submit(submitted)
    engine.wait([submitted.transfer for submitted in jobs])
    taken = time.perf_counter() - started
    bad = [result.error for result in engine.poll() if not result.good]
    if bad:
        raise click.ClickException(f"a copy failed: {bad[0]}")
    return taken


def host_rows(threads: int, rounds: int) -> list[list[str]]:
    rows = []
    for block_bytes in FRAGMENT_BYTES:
        # New pools each time, because the speed of memory depends on its address.
        measured = [host_round(block_bytes, threads, number) for number in range(rounds)]
        columns = {name: median(one[name] for one in measured) for name in measured[0]}
        rows.append(
            [
                f"{block_bytes >> 10} KiB",
                f"{columns['contiguous']:.1f}",
                *(f"{columns[name]:.2f}" for name in ("store", "load", "both", "verified")),
            ]
        )
    return rows


def host_round(block_bytes: int, threads: int, number: int) -> dict[str, float]:
    """Measure once: the contiguous copy (GB/s), kvsm's copies as shares of it, and verified copies relative
    to unverified ones."""
    blocks = TRANSFER_BYTES // block_bytes
    device = np.ones((2 * blocks, block_bytes), np.uint8)
    host = np.ones((2 * blocks, block_bytes), np.uint8)
    source, target = device.reshape(-1)[:TRANSFER_BYTES], host.reshape(-1)[:TRANSFER_BYTES]
    store = job(1, Direction.STORE, blocks, 2 * blocks, number)
    load = job(2, Direction.LOAD, blocks, 2 * blocks, 1000 + number)
    there_and_back = store, _back(store)
    plain = HostCopyEngine(device, host, threads)
    verifying = VerifyingCopyEngine(HostCopyEngine(device, host, threads), host)
    with closing(plain), closing(verifying):
        base = contiguous(source, target, threads)
        plainly = sum(engine_seconds(plain, [one]) for one in there_and_back)
        verified = sum(engine_seconds(verifying, [one]) for one in there_and_back)
        return {
            "contiguous": TRANSFER_BYTES / base / 1e9,
            "store": base / engine_seconds(plain, [store]),
            "load": base / engine_seconds(plain, [load]),
            "both": base / engine_seconds(plain, _both_ways(blocks // 2, 2 * blocks, number)),
            "verified": verified / plainly,
        }


def _both_ways(blocks: int, pool_blocks: int, seed: int) -> tuple[TransferJob, TransferJob]:
    """A store and a load that have no block in common."""
    chosen = random.Random(seed)
    device, host = (chosen.sample(range(pool_blocks), 2 * blocks) for _ in range(2))
    return (
        TransferJob(1, Direction.STORE, pack(device[:blocks]), pack(host[:blocks])),
        TransferJob(2, Direction.LOAD, pack(device[blocks:]), pack(host[blocks:])),
    )


def _back(store: TransferJob) -> TransferJob:
    """The load of the blocks of this store, which have checksums then."""
    return TransferJob(2, Direction.LOAD, store.device_blocks, store.host_blocks)


def host_table(threads: int, rounds: int) -> list[str]:
    header = [
        "block",
        f"contiguous memcpy, {threads} threads, GB/s",
        "store, of that",
        "load, of that",
        "both at once, of that",
        "with `--verify-copies`, times as long",
    ]
    return markdown_table(header, host_rows(threads, rounds))


def simulated_table() -> list[str]:
    """Measure the steps per second of the simulated device with its race detector. A step is a kernel, a
    piece of a copy, an event or a call."""
    rows = []
    for blocks in (1, 16, 64):
        device, host = (np.zeros((4 * blocks, 64), np.uint8) for _ in range(2))
        simulated = SimulatedDevice(device, host, random.Random(0).randrange)
        engine, steps, started = StreamCopyEngine(simulated), 0, time.perf_counter()
        for number in range(4000 // blocks):
            simulated.launch("step", writes=range(2 * blocks))
            for one in _both_ways(blocks, 4 * blocks, number):
                engine.submit(one)
            while simulated.step():
                steps += 1
            engine.poll()
        rows.append([str(blocks), f"{steps / (time.perf_counter() - started):,.0f}"])
        engine.close()
    return markdown_table(["blocks a transfer", "steps of the simulated device a second"], rows)


@click.command(help=__doc__)
@click.option("--gpu", is_flag=True, help="Measure the CUDA engine; needs an NVIDIA GPU.")
@click.option("--threads", default=2, show_default=True, help="Threads of the host engine and of memcpy.")
@click.option("--rounds", default=7, show_default=True, help="Rounds, of which the median is reported.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the page to this file too.")
def main(gpu: bool, threads: int, rounds: int, output: Path | None) -> None:
    if gpu:
        device_name, lines = gpu_tables(rounds)
        publish("Copies on a GPU", f"{device_name}; medians of {rounds} rounds", lines, output)
    else:
        note = f"random pairs of blocks, {TRANSFER_BYTES >> 20} MiB a transfer; medians of {rounds} rounds"
        publish("Copies on the host", note, [*host_table(threads, rounds), "", *simulated_table()], output)


if __name__ == "__main__":
    main()
