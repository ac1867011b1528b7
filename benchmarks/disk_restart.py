"""Measure the start of an engine with a full disk tier: the scan of its slots, and the rebuild of its core.

A file with all slots sealed is created, with the log of the process that stored them. Then a new process
starts as an engine does: it opens the file, reads all headers, decides which slots are valid, and rebuilds
the disk's core, with a log of its own. It is ready when the tier reports that it has a key. Direct I/O
bypasses the page cache. Then the found slots are compared with the last log, which an engine does in a
separate thread while it serves.

Before each process a plain loop reads the same bytes, in calls of the same size from equally many threads,
and ignores them. It shows the time that the disk itself needs.

    python benchmarks/disk_restart.py --directory /var/tmp --output benchmarks/results/disk_restart.md
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
import numpy as np
from page import markdown_table, publish

from kvsm.core.offloader import Offloader
from kvsm.events import OffloadConfig
from kvsm.identity import PoolIdentity
from kvsm.tiers import DiskTier, adopt_found, compare_with_last_log, disk_config, host_config, note_log
from kvsm.tiers.disk import (
    DiskEra,
    DiskGeometry,
    FlushPolicy,
    OpenEra,
    SlotFile,
    SlotGeneration,
    TierDirectory,
    decide,
    era_at_start,
    read_log_note,
    scan,
    take,
)
from kvsm.tiers.disk.aligned import aligned_memory
from kvsm.tiers.disk.formats import HEADER_BYTES, HEADER_STEP, HeaderState, SlotHeader
from kvsm.tiers.disk.recovery import SCAN_HEADERS, SCAN_THREADS

IDENTITY = PoolIdentity.of({"benchmark": "disk restart"})
WEIGHTS = "v1"
LOOP, READY = "a plain loop reads the same bytes", "ready"
COMPARISON = "after that: compare with the last log"
HOST_BLOCKS = 100_000
BLOCKS_OF_A_STORE = 64

Seconds = tuple[float, float]
"""(wall-clock time, CPU time)."""

Spans = dict[str, Seconds]
"""Name of a part of the start -> its times."""


def key_of(slot: int) -> bytes:
    """A key of a slot, as long as vLLM's: a hash and the KV cache group."""
    return blake2b(b"%d" % slot, digest_size=32).digest() + bytes(4)


def make(place: TierDirectory, geometry: DiskGeometry, log: Path) -> None:
    """Create a file with all slots sealed, and the log of the stores. Payloads are not written."""
    host = host_config(OffloadConfig(host_blocks=HOST_BLOCKS, device_blocks=1024))
    core = Offloader.open(disk_config(host, geometry.num_slots), log, weights=WEIGHTS)
    pages = aligned_memory(SCAN_HEADERS * HEADER_STEP).reshape(-1, HEADER_STEP)
    with closing(core), closing(SlotFile(place.slots(0), geometry, IDENTITY)) as file:
        era = DiskEra(WEIGHTS)
        era.write(place.era)
        note_log(place, file.life, str(log), FlushPolicy.NONE.value)
        ours = file.file_id, file.digest, era.id
        for first in range(0, geometry.num_slots, SCAN_HEADERS):
            last = min(first + SCAN_HEADERS, geometry.num_slots)
            for slot in range(first, last):
                if slot % BLOCKS_OF_A_STORE == 0:
                    some = range(slot, min(slot + BLOCKS_OF_A_STORE, last))
                    generation = SlotGeneration(file.life, stored(core, list(map(key_of, some))))
                says = slot, generation, geometry.payload_bytes, 0, key_of(slot)
                header = SlotHeader(HeaderState.SEALED, *ours, *says).encode()
                pages[slot - first, :HEADER_BYTES] = np.frombuffer(header, np.uint8)
            file.write([pages[: last - first]], geometry.header_at(first))
        file.flush()


def stored(core: Offloader, keys: list[bytes]) -> int:
    """Log a store of these keys to the next free slots. Returns the id of the transfer."""
    job = core.store((), keys, list(range(len(keys)))).job
    assert job is not None
    core.submit([job.transfer])
    core.report(job.transfer, 0, True)
    core.end_step()
    return job.transfer


def plain_loop(path: Path, geometry: DiskGeometry) -> Seconds:
    """Read the bytes of all headers."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    calls = iter(range(geometry.header_at(0), geometry.payload_at(0), SCAN_HEADERS * HEADER_STEP))

    def some(_: int) -> None:
        memory = aligned_memory(SCAN_HEADERS * HEADER_STEP)
        for offset in calls:  # the threads share the iterator
            os.preadv(descriptor, [memory[: geometry.payload_at(0) - offset]], offset)

    clock, processor = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(SCAN_THREADS) as pool:
        list(pool.map(some, range(SCAN_THREADS)))
    os.close(descriptor)
    return time.perf_counter() - clock, time.process_time() - processor


def begin(directory: Path, geometry: DiskGeometry, life: int) -> tuple[Spans, float]:
    """Start as an engine does. Returns (times of each part, peak memory of this process in bytes)."""
    spans: Spans = {}

    @contextmanager
    def span(name: str) -> Iterator[None]:
        clock, processor = time.perf_counter(), time.process_time()
        yield
        spans[name] = time.perf_counter() - clock, time.process_time() - processor

    host = Offloader(host_config(OffloadConfig(host_blocks=HOST_BLOCKS, device_blocks=1024)))
    with span(READY):
        with span("open the file"):
            place = TierDirectory(directory, "engine")
            file = SlotFile(place.slots(0), geometry, IDENTITY)
            if not file.direct:
                raise click.ClickException(f"{directory}: no direct I/O here")
        with span("read the headers"):
            scanned = scan(file)
        with span("decide which slots count"):
            era = era_at_start(place.era, WEIGHTS, file.life)
            found = decide([scanned], era.id)
            take(file, found)
        with span("rebuild the core"):
            log = directory / f"log-{life}"
            disk = Offloader.open(disk_config(host.config, geometry.num_slots), log, weights=WEIGHTS)
            kept = adopt_found(disk, found)
            open_era = OpenEra(place.era, era, found.life)
            tier = DiskTier(host, disk, lambda weights: open_era.begin(weights, disk.ledger.seq))
        if kept != geometry.num_slots or not tier.has(key_of(kept - 1)):
            raise click.ClickException(f"{kept:,} of {geometry.num_slots:,} slots came back")
    with span(COMPARISON):
        note = read_log_note(place.log_note)
        last = compare_with_last_log(note, found, era, [], geometry.num_slots, host.config.policy)
    if last.slots != kept or last.differences:
        raise click.ClickException(f"the last log has {last.slots:,} slots: {last.told()}")
    disk.close()
    file.close()
    return spans, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def rows_of(directory: Path, geometry: DiskGeometry, rounds: int) -> list[list[str]]:
    place = TierDirectory(directory, "engine")
    place.make()
    make(place, geometry, directory / "log")
    lives = []
    for life in range(rounds):
        loop = plain_loop(place.slots(0), geometry)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            spans, memory = process.submit(begin, directory, geometry, life).result()
        lives.append(({LOOP: loop, **spans}, memory))
    rows = []
    for name in sorted(lives[0][0], key=(READY, COMPARISON).__contains__):
        clocks, processors = zip(*(spans[name] for spans, _ in lives))
        shown = f"**{name}**" if name == READY else name
        size = f"{geometry.slot_bytes >> 10} KiB"
        between = f"{min(clocks):.1f} .. {max(clocks):.1f}"
        most = f"{median(memory for _, memory in lives) / 1e9:.2f}" if name == READY else ""
        rows.append([size, shown, f"{median(clocks):.1f}", between, f"{median(processors):.1f}", most])
    return rows


@click.command(help=__doc__)
@click.option("--directory", default="/var/tmp", help="Directory of the temporary files.")
@click.option("--slots", default=1_000_000, show_default=True)
@click.option("--slot-kib", default=(8, 20), multiple=True, show_default=True, help="Bytes of a slot.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the page to this file too.")
def main(directory: str, slots: int, slot_kib: tuple[int, ...], rounds: int, output: Path | None) -> None:
    rows = []
    for kib in slot_kib:
        with TemporaryDirectory(prefix="kvsm-restart-", dir=directory) as made:
            rows += rows_of(Path(made), DiskGeometry((kib << 10) - 4096, slots), rounds)
    columns = ["slot", "", "s", "least .. most", "CPU s", "most memory, GB"]
    note = (
        f"{slots:,} sealed slots of one rank, direct I/O; {rounds} processes one after the other, medians. A "
        f"slot is its header and its payload. All headers are {slots * HEADER_STEP / 1e9:.1f} GB, and "
        "payloads are not read"
    )
    publish(
        "How long an engine takes to begin with a full disk tier", note, markdown_table(columns, rows), output
    )


if __name__ == "__main__":
    main()
