"""Processes with a core and real copies; each is killed at one of its system calls.

A process opens a kept host pool and its checksums, starts on the log of the process before, and stores,
loads, evicts and resets at random. All calls that write a file, and all copies, are counted. At the chosen
one the process kills itself: before the call, in the middle of its bytes, or after it. The keys that the next
process finds are compared with the second book of the log (`kvsm.explain.verify.book`).
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import numpy as np

from kvsm.copies import HostCopyEngine, HostPool, KeptPool, VerifyingCopyEngine
from kvsm.copies.checksums import CHECKSUM_BYTES
from kvsm.copies.host_pools.pool_sizes import PAGE_BYTES
from kvsm.copies.rank_memory import NumpyPools
from kvsm.copies.worker import Worker
from kvsm.core.ledger import readable_keys
from kvsm.core.log import LogReader
from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferJob
from kvsm.events import OffloadConfig
from kvsm.explain.verify.book import READABLE, Book
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.tiers.warm_restart import Start, start

SLOTS, DEVICE_BLOCKS, BLOCK_BYTES = 12, 16, 256
CONFIG = OffloadConfig(host_blocks=SLOTS, device_blocks=DEVICE_BLOCKS, block_bytes=BLOCK_BYTES)
IDENTITY = PoolIdentity.of({"model": "small"})
KEYS = [b"key %02d" % number for number in range(30)]
OPERATIONS = 40
CALLS = ("pwrite", "ftruncate", "posix_fallocate", "rename", "unlink", "mkdir", "fsync", "fdatasync")


def content(key: bytes) -> np.ndarray[Any, Any]:
    """Return the bytes of this key."""
    return np.frombuffer(blake2b(key, digest_size=64).digest() * (BLOCK_BYTES // 64), np.uint8)


class Killer:
    """Kills this process at the n-th counted call.

    where: before it (0), in the middle (1), or after it (2).
    """

    def __init__(self, at: int, where: int) -> None:
        self.at, self.where, self.calls = at, where, 0

    def watch(self) -> None:
        """Start to count this process's calls."""
        for name in CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))
        real = NumpyPools.copy

        def copy(pools: NumpyPools, direction: Any, device_blocks: Any, host_blocks: Any) -> None:
            def part(blocks: int) -> None:
                real(pools, direction, device_blocks[:blocks], host_blocks[:blocks])

            self._call(lambda: part(len(host_blocks)), lambda: part(len(host_blocks) // 2))

        NumpyPools.copy = copy  # type: ignore[method-assign]

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            def half() -> None:
                if name == "pwrite":
                    descriptor, data, offset = args
                    # The system stops between two pages, and not within one.
                    cut = (offset + len(data) // 2) // PAGE_BYTES * PAGE_BYTES - offset
                    real(descriptor, data[: max(0, cut)], offset)

            return self._call(lambda: real(*args, **options), half)

        return call

    def _call(self, whole: Callable[[], Any], half: Callable[[], None]) -> Any:
        self.calls += 1
        if self.calls != self.at:
            return whole()
        if self.where:
            (half if self.where == 1 else whole)()
        return os.kill(os.getpid(), signal.SIGKILL)


class KilledLife:
    """The random work of one process."""

    def __init__(self, directory: Path, random: Random, expected: set[bytes]) -> None:
        self.random, self.device = random, np.zeros((DEVICE_BLOCKS, BLOCK_BYTES), np.uint8)
        keep = KeptPool(IDENTITY)
        self.pool = HostPool(SLOTS, BLOCK_BYTES, path=directory / "pool", keep=keep)
        self.table = HostPool(SLOTS, CHECKSUM_BYTES, path=directory / "checksums", keep=keep)
        pools = KeptPools(IDENTITY, (self.pool.pool_id, self.table.pool_id))
        engine = VerifyingCopyEngine(
            HostCopyEngine(self.device, self.pool.blocks),
            self.pool.blocks,
            table=self.table.blocks,
            kept=True,
            every_load=False,
        )
        self.worker = Worker(0, engine)
        options = {"segment_bytes": 2000, "durability": "none"}
        self.started: Start = start(directory / "log", CONFIG, pools, log=options)
        self.core: Offloader = self.started.offloader
        found = set(readable_keys(self.core.ledger))
        assert found == expected, (sorted(found), sorted(expected), self.started.why_cold)
        self.targets: dict[int, list[tuple[bytes, int]]] = {}
        self.requests = 0

    def run(self) -> None:
        """Take random actions; then, in one of three processes, close the log."""
        for _ in range(OPERATIONS):
            self.random.choice((self.store, self.store, self.load, self.load, self.take))()
            if self.random.random() < 0.02:
                self.core.reset()
            self.core.end_step()
        if self.random.random() < 0.3:
            self.worker.wait(list(self.core.ledger.transfers))
            self.take()
            self.core.close()

    def store(self) -> None:
        """Store some keys from device blocks that hold their bytes."""
        busy = np.flatnonzero(self.core.ledger.leases.view).tolist()
        free = [block for block in range(DEVICE_BLOCKS) if block not in busy]
        keys = self.random.sample(KEYS, min(self.random.randrange(1, 5), len(free)))
        for key, block in zip(keys, free):
            self.device[block] = content(key)
        self.core.rewrite(free[: len(keys)])
        self.submit(self.core.store((), keys, free[: len(keys)]).job)

    def load(self) -> None:
        """Load the stored prefix of a sequence of keys."""
        busy = np.flatnonzero(self.core.ledger.leases.view).tolist()
        free = [block for block in range(DEVICE_BLOCKS) if block not in busy]
        self.requests += 1
        name = f"life {self.core.ledger.life} request {self.requests}"
        keys = self.random.sample(KEYS, 4)
        hits = min(self.core.match(name, keys).hits, len(free))
        job = self.core.prepare_load(name, free[:hits]) if hits else None
        if job is not None:
            self.targets[job.transfer] = list(zip(keys, free[:hits]))
        self.submit(job)
        self.core.finish(name)

    def submit(self, job: TransferJob | None) -> None:
        """Submit a job to the worker, if there is one."""
        if job is not None:
            self.core.submit([job.transfer])
            self.worker.submit([job])

    def take(self) -> None:
        """Take the reports, and check the loaded bytes."""
        for report in self.worker.poll():
            wanted = self.targets.pop(report.transfer, [])
            assert report.good, report
            for key, block in wanted:
                assert (self.device[block] == content(key)).all(), f"{key!r} is wrong in block {block}"
            self.core.report(report.transfer, 0, report.good, report.error)


def expected_keys(directory: Path) -> set[bytes]:
    """Return the keys that are readable after a log's last event, by the second book."""
    if not (directory / "log").exists() or not list((directory / "log").glob("*.kvsm")):
        return set()
    book = Book(CONFIG)
    try:
        for event in LogReader(directory / "log").events():
            assert book.follow(event) == []
    except FileNotFoundError:
        return set()
    return {key for key, slot in book._held.items() if book._slots[slot][0] in READABLE}


def live(directory: Path, seed: int, kill_at: int, where: int) -> int:
    """Run one life in a child process. Returns its exit status: 9 if it was killed, 0 if it completed."""
    expected = expected_keys(directory)
    child = os.fork()
    if not child:
        _child(directory, seed, kill_at, where, expected)
    return os.waitpid(child, 0)[1]


def _child(directory: Path, seed: int, kill_at: int, where: int, expected: set[bytes]) -> NoReturn:
    try:
        Killer(kill_at, where).watch()
        KilledLife(directory, Random(seed), expected).run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
