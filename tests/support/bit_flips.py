"""Flip single bits anywhere in the files of a two-tier engine, and check what the next process serves.

    python -m bit_flips --flips 10000

An engine has stored keys on the host and on the disk, and has ended. Bits are flipped in a copy of its files.
The next process opens the copy and serves every key: from the host, and from the disk through the host. It
also stores every host key on the disk. Each byte that reaches a device, or is sealed on the disk, must be the
byte that was stored under its key. So each flip has one of these outcomes, and never wrong bytes:

============  ==============================================================================================
outcome       what happens
============  ==============================================================================================
load failed   the load of the key fails, with an error that names the reason
not found     the recovery of the disk drops the slot, and counts it in the row of the reason
cold          the host, or the disk, starts empty, and a reason is reported
refused       a `ConfigError` says why the file is not used
equal         every key is served as without the flip: the bit is never read, or it has a second copy
============  ==============================================================================================

A flip in a slot, or in its header or checksum, concerns one key, so one process judges many such flips. Any
other flip gets its own process.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from disk_rig import directory

from kvsm.copies import CopyEngine, HostCopyEngine, HostPool, KeptPool, VerifyingCopyEngine
from kvsm.copies.checksums import CHECKSUM_BYTES
from kvsm.copies.host_pools.kept_record import RECORD_BYTES
from kvsm.copies.host_pools.pool_sizes import PAGE_BYTES
from kvsm.core.ledger import readable_keys
from kvsm.core.plan import TransferJob
from kvsm.errors import ConfigError
from kvsm.events import Direction, OffloadConfig
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.ids import pack
from kvsm.tiers.disk import (
    DiskCopyEngine,
    DiskEra,
    DiskGeometry,
    FlushPolicy,
    SlotFile,
    era_at_start,
    recover,
)
from kvsm.tiers.disk.formats import FIRST_SLOT, HEADER_BYTES, HEADER_STEP
from kvsm.tiers.warm_restart import start

BLOCK_BYTES = 256
ON_HOST, ON_DISK = 12, 16
ROWS = ON_HOST + ON_DISK
"""Rows of the host pool; each disk key has its own row, to be loaded into."""

SLOTS = ON_DISK + ON_HOST
"""Slots of the disk; each host key has its own slot, to be stored into."""

HOST_KEYS = [b"host key %02d" % number for number in range(ON_HOST)]
DISK_KEYS = [b"disk key %02d" % number for number in range(ON_DISK)]
IDENTITY = PoolIdentity.of({"model": "small"})
KEEP = KeptPool(IDENTITY)
GEOMETRY = DiskGeometry(BLOCK_BYTES, SLOTS)
CONFIG = OffloadConfig(host_blocks=ROWS, device_blocks=ROWS, block_bytes=BLOCK_BYTES)
TAIL = RECORD_BYTES + PAGE_BYTES
BROUGHT = 1_000_000
"""The generation of the blocks in the host rows of the disk keys."""
EQUAL = "equal"
OUTCOMES = ("load failed", "not found", "cold", "refused", EQUAL)


class Span(NamedTuple):
    """A range of bytes in a file.

    unit: the only key, or host row, that it concerns; empty: several or none.
    """

    file: str
    first: int
    size: int
    unit: bytes = b""


class Flip(NamedTuple):
    """A bit in a file, and the unit of its span."""

    area: str
    file: str
    bit: int
    unit: bytes


def content(key: bytes) -> np.ndarray[Any, Any]:
    """Return the bytes of this key."""
    return np.random.default_rng(list(key)).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


class Process:
    """A process that opens the files in a directory. cold: the reasons why a tier starts empty."""

    def __init__(self, where: Path, stack: ExitStack) -> None:
        self._numbers = count(1_000)
        self.device = np.zeros((ROWS, BLOCK_BYTES), np.uint8)
        pools = [
            stack.enter_context(HostPool(ROWS, size, path=where / name, keep=KEEP))
            for name, size in (("pool", BLOCK_BYTES), ("checksums", CHECKSUM_BYTES))
        ]
        self.host = pools[0].blocks
        below = HostCopyEngine(self.device, self.host, threads=1)
        self.engine = VerifyingCopyEngine(
            below, self.host, threads=0, table=pools[1].blocks, kept=True, every_load=False
        )
        stack.enter_context(closing(self.engine))
        reasons = [reason for pool in pools if not pool.is_warm for reason in pool.cold_reason]
        ids = KeptPools(IDENTITY, tuple(pool.pool_id for pool in pools))
        options = {"segment_bytes": 400, "durability": "none"}
        began = start(where / "log", CONFIG, ids, why_cold=reasons, log=options)
        stack.callback(began.offloader.close)
        self.core, self.cold = began.offloader, [*began.why_cold]
        file = SlotFile(where / "disk", GEOMETRY, IDENTITY)
        self.disk = DiskCopyEngine(
            self.host, file, FlushPolicy.NONE, threads=1, checksums=self.engine.checksums
        )
        stack.enter_context(closing(self.disk))
        self.cold += file.cold_reason
        self.era = era_at_start(where / "era", "v1", file.life).id
        self.found = recover([file], self.era)

    def copy(
        self, engine: CopyEngine, direction: Direction, block: int, to: int, key: bytes, generation: int
    ) -> str:
        """Copy one block. generation: of the host row. Returns the error; empty on success."""
        number = next(self._numbers)
        engine.submit(
            TransferJob(number, direction, pack([block]), pack([to]), (key,), (generation,), self.era)
        )
        engine.wait([number])
        (result,) = engine.poll()
        assert result.good != bool(result.error)
        return result.error

    def serve_host(self, key: bytes, slot: int) -> str:
        """Load a host key to the device, and store it on the disk. Returns the load's error; empty: none."""
        generation, place = self.core.ledger.generation[slot], ON_DISK + HOST_KEYS.index(key)
        error = self.copy(self.engine, Direction.LOAD, 0, slot, key, generation)
        is_right = np.array_equal(self.device[0], content(key))
        assert error or is_right, f"{key!r}: wrong bytes reached the device"
        not_stored = self.copy(self.disk, Direction.STORE, slot, place, key, generation)
        is_right = np.array_equal(self.host[slot], content(key))
        assert not_stored or is_right, f"{key!r}: wrong bytes were sealed on the disk"
        assert bool(error) == bool(not_stored)
        return error

    def serve_disk(self, key: bytes, slot: int) -> str:
        """Load a disk key through the host to the device. Returns the error; empty: none."""
        row = ON_HOST + DISK_KEYS.index(key)
        error = self.copy(self.disk, Direction.LOAD, row, slot, key, BROUGHT)
        error = error or self.copy(self.engine, Direction.LOAD, 0, row, key, BROUGHT)
        is_right = np.array_equal(self.device[0], content(key))
        assert error or is_right, f"{key!r}: wrong bytes reached the device"
        return error


def leave(where: Path) -> None:
    """Run the first process in this directory, and leave its files there."""
    DiskEra("v1").write(where / "era")
    with ExitStack() as stack:
        first = Process(where, stack)
        for slot, key in enumerate(HOST_KEYS):
            first.device[slot] = content(key)
            job = first.core.store((), [key], [slot]).job
            assert job is not None
            first.core.submit([job.transfer])
            first.engine.submit(job)
            first.engine.wait([job.transfer])
            assert first.engine.poll()[0].good
            first.core.report(job.transfer, 0, True)
            first.core.end_step()
        for slot, key in enumerate(DISK_KEYS):
            row = ON_HOST + slot
            first.host[row] = content(key)
            first.engine.checksums.keep([row], ((key,), (BROUGHT,)))
            assert not first.copy(first.disk, Direction.STORE, row, slot, key, BROUGHT)


class Left:
    """The files of a first process, to be damaged in copies."""

    def __init__(self) -> None:
        with directory() as made:
            leave(made)
            self.files = {
                str(path.relative_to(made)): path.read_bytes() for path in made.rglob("*") if path.is_file()
            }
            with self.opened({}) as process:
                assert process.cold == []
                index = process.core.ledger.index
                assert set(readable_keys(process.core.ledger)) == set(HOST_KEYS)
                self.host = {key: index[key] for key in HOST_KEYS}
                self.disk = process.found.slots
        assert set(self.disk) == set(DISK_KEYS)
        self.by_row = {slot: key for key, slot in self.host.items()}
        self.by_slot = {slot: key for key, slot in self.disk.items()}

    @contextmanager
    def opened(self, files: dict[str, bytes]) -> Iterator[Process]:
        """Open a process on a new copy of the files, with the given files replaced."""
        with directory() as made, ExitStack() as stack:
            for name, data in {**self.files, **files}.items():
                path = made / name
                path.parent.mkdir(mode=0o700, exist_ok=True)
                path.touch(mode=0o600)
                path.write_bytes(data)
            yield Process(made, stack)

    def areas(self) -> dict[str, list[Span]]:
        """Return the spans of each area.

        Long areas have an extra span for their beginning, which matters most.
        """
        header, payload = GEOMETRY.header_at, GEOMETRY.payload_at
        padding = GEOMETRY.payload_step - BLOCK_BYTES
        tails = [
            Span(name, len(self.files[name]) - place, size)
            for name in ("pool", "checksums")
            for place, size in ((TAIL, TAIL), (TAIL, 300), (PAGE_BYTES, 60))
        ]
        logs = [Span(name, 0, len(data)) for name, data in self.files.items() if name[:4] == "log/" and data]
        return {
            "slots of the host pool": self._of_rows("pool", BLOCK_BYTES),
            "checksums of the host pool": self._of_rows("checksums", CHECKSUM_BYTES),
            "record and last page of a pool": tails,
            "headers of disk slots": [
                Span("disk", header(at), size, key)
                for at, key in self.by_slot.items()
                for size in (HEADER_BYTES, 200)
            ],
            "behind the headers of disk slots": [
                Span("disk", header(at) + HEADER_BYTES, HEADER_STEP - HEADER_BYTES, key)
                for at, key in self.by_slot.items()
            ],
            "payloads of disk slots": [
                Span("disk", payload(at), BLOCK_BYTES, key) for at, key in self.by_slot.items()
            ],
            "behind the payloads of disk slots": [
                Span("disk", payload(at) + BLOCK_BYTES, padding, key) for at, key in self.by_slot.items()
            ],
            "superblocks of the disk": [Span("disk", 0, FIRST_SLOT), Span("disk", 0, 200)],
            "era of the disk": [Span("era", 0, len(self.files["era"]))],
            "event log": logs,
        }

    def _of_rows(self, file: str, size: int) -> list[Span]:
        unused = [row for row in range(ROWS) if row not in self.by_row][:4]
        names = {**self.by_row, **{row: b"row %d" % row for row in unused}}
        return [Span(file, row * size, size, name) for row, name in names.items()]

    def damaged(self, flips: Iterable[Flip]) -> dict[str, bytes]:
        """Return the changed files, with these bits flipped."""
        changed: dict[str, bytearray] = {}
        for flip in flips:
            data = changed.setdefault(flip.file, bytearray(self.files[flip.file]))
            data[flip.bit // 8] ^= 1 << flip.bit % 8
        return {name: bytes(data) for name, data in changed.items()}

    def outcomes(self, flips: Sequence[Flip]) -> list[str]:
        """Return the outcomes of these flips in one process: flips of different keys, or a single flip."""
        warnings: list[str] = []
        with collected_warnings(warnings):
            try:
                with self.opened(self.damaged(flips)) as process:
                    return self._judged(process, flips, warnings)
            except ConfigError as error:
                if len(flips) > 1 or not str(error):
                    raise
                return ["refused"]

    def _judged(self, process: Process, flips: Sequence[Flip], warnings: list[str]) -> list[str]:
        errors = {key: process.serve_disk(key, slot) for key, slot in process.found.slots.items()}
        index = process.core.ledger.index
        errors |= {key: process.serve_host(key, index[key]) for key in readable_keys(process.core.ledger)}
        missing = {key: key not in errors for key in (*HOST_KEYS, *DISK_KEYS)}
        units = {flip.unit for flip in flips}
        assert not any(error for key, error in errors.items() if key not in units), "another key is lost"
        if units == {b""}:
            lost = [[key for key in some if missing[key]] for some in (HOST_KEYS, DISK_KEYS)]
            assert lost[0] in ([], HOST_KEYS)
            assert lost[1] in ([], DISK_KEYS)
            is_reported = bool(process.cold or warnings)
            assert bool(lost[0] or lost[1]) == is_reported, "exactly the losses are reported"
            return ["cold" if lost[0] or lost[1] else EQUAL]
        assert process.cold == []
        dropped = sum(count for row, count in process.found.told[0].items() if row not in ("kept", "empty"))
        assert dropped == sum(missing.values()), "each dropped slot is counted in a row"
        assert {key for key, is_missing in missing.items() if is_missing} <= units
        return [
            "not found" if missing.get(flip.unit) else "load failed" if errors.get(flip.unit) else EQUAL
            for flip in flips
        ]


@contextmanager
def collected_warnings(warnings: list[str]) -> Iterator[None]:
    """Append the warnings of the disk tier to this list."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "not stored" not in record.getMessage():
                warnings.append(record.getMessage())

    collector, logger = Collector(), logging.getLogger("kvsm.tiers.disk")
    logger.addHandler(collector)
    try:
        yield
    finally:
        logger.removeHandler(collector)


def flip_bits(flips: int, seed: int, alone: float = 0.1) -> Counter[tuple[str, str]]:
    """Flip this many single bits. Returns (area, outcome) -> count.

    alone: the share of flips that do not concern just one key; each needs its own process.
    Raises `AssertionError` if a wrong byte is served, or if a loss is not reported.
    """
    left, chance, counts = Left(), random.Random(seed), Counter[tuple[str, str]]()
    areas = left.areas()
    of_keys = [area for area, spans in areas.items() if spans[0].unit]
    of_none = [area for area in areas if area not in of_keys]
    batches: list[dict[bytes, Flip]] = []

    def judge(some: Sequence[Flip]) -> None:
        counts.update((flip.area, outcome) for flip, outcome in zip(some, left.outcomes(some)))

    for number in range(flips):
        is_alone = chance.random() < alone
        area = (of_none if is_alone else of_keys)[number % len(of_none if is_alone else of_keys)]
        span = chance.choice(areas[area])
        flip = Flip(area, span.file, 8 * span.first + chance.randrange(8 * span.size), span.unit)
        if is_alone:
            judge([flip])
            continue
        batch = next((flips_of for flips_of in batches if flip.unit not in flips_of), None)
        if batch is None:
            batches.append(batch := {})
        batch[flip.unit] = flip
    for batch in batches:
        judge(list(batch.values()))
    return counts


def table(counts: Counter[tuple[str, str]]) -> str:
    """Return the counts as a Markdown table."""
    lines = [f"| area | flips | {' | '.join(OUTCOMES)} |", "| --- " * (len(OUTCOMES) + 2) + "|"]
    for area in dict.fromkeys(area for area, _ in counts):
        row = [counts[area, outcome] for outcome in OUTCOMES]
        lines.append(f"| {area} | {sum(row):,} | {' | '.join(f'{one:,}' for one in row)} |")
    row = [sum(n for (_, one), n in counts.items() if one == outcome) for outcome in OUTCOMES]
    lines.append(f"| all | {sum(row):,} | {' | '.join(f'{one:,}' for one in row)} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--flips", default=10_000)
@click.option("--seed", default=1)
def main(flips: int, seed: int) -> None:
    click.echo(table(flip_bits(flips, seed)))


if __name__ == "__main__":
    main()
