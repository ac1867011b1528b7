"""Starts with failing file operations, and checks of such a start and of the next one.

`StartWorld` is a directory with a kept pool and the log of an earlier process. Its pool is a dict in which
each process records the key that each slot holds. `DiskStartWorld` is a directory with the real files of a
disk tier. Operations on other files, such as /proc, never fail.
"""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from disk_rig import DISK_IDENTITY, PAYLOAD, content, job

from kvsm.check.worlds.memory_marks import memory_marks
from kvsm.core.ledger import readable_keys
from kvsm.core.log import LateLog, segment_file
from kvsm.errors import LogError, UnusableFiles
from kvsm.events import Direction, OffloadConfig
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.tiers.disk import (
    Decided,
    DiskCopyEngine,
    DiskGeometry,
    FlushPolicy,
    OpenEra,
    SlotFile,
    TierFiles,
    take,
)
from kvsm.tiers.warm_restart import Start, start

SLOTS = 6
CONFIG = OffloadConfig(host_blocks=SLOTS, device_blocks=12)
IDENTITY = PoolIdentity.of({"model": "small"})

OPERATIONS = (
    "open",
    "pwrite",
    "pread",
    "pwritev",
    "preadv",
    "ftruncate",
    "posix_fallocate",
    "lseek",
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "mkdir",
    "rmdir",
    "unlink",
    "listdir",
    "scandir",
    "stat",
    "lstat",
    "fstat",
)
"""The functions of `os` that can fail."""

Plan = Callable[[int, str], int | None]
"""(number, name) of an operation -> its errno; None: it succeeds."""


@contextmanager
def failing(directory: Path, plan: Plan) -> Iterator[list[str]]:
    """Let operations on files below `directory` fail as planned. Yields the names of the tried operations."""
    tried: list[str] = []

    def is_ours(file: Any) -> bool:
        if isinstance(file, int):
            with suppress(OSError):
                file = os.readlink(f"/proc/self/fd/{file}")
        return not isinstance(file, int) and str(file).startswith(str(directory))

    def faulty(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def operation(file: Any, *more: Any, **options: Any) -> Any:
            if not is_ours(file):
                return call(file, *more, **options)
            tried.append(name)
            number = plan(len(tried), name)
            if number is None:
                return call(file, *more, **options)
            raise OSError(number, os.strerror(number), None if isinstance(file, int) else str(file))

        return operation

    # In Python 3.10 `Path` calls the functions that this object has taken from `os`.
    accessor = getattr(pathlib, "_normal_accessor", None)
    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            call = getattr(os, name)
            for place in (os, accessor):
                if getattr(place, name, None) is call:
                    patch.setattr(place, name, faulty(name, call))
        make = io.FileIO

        def new_file(path: Any, mode: str, opener: Any = None) -> io.FileIO:
            # The opener was bound to `os.open` before it was replaced.
            return faulty("create", lambda path: make(path, mode, opener=opener))(path)

        patch.setattr(segment_file, "FileIO", new_file)
        yield tried


class StartWorld:
    """Processes on one pool and one log. `start` begins a process, `live` stores in it, `end` ends it."""

    def __init__(self, directory: Path, on_failure: str) -> None:
        self.directory, self.log = directory, directory / "log"
        self.on_failure = on_failure
        self.ids = (b"pool 0", b"checksums 0")
        self.marks = memory_marks()
        self.held: dict[int, bytes] = {}
        """Slot -> the key whose bytes it holds."""
        self.stored = 0

    def begin(self) -> Start:
        """Begin the next process."""
        options = {"on_failure": self.on_failure, "durability": "every"}
        pools = KeptPools(IDENTITY, self.ids)
        return start(self.log, CONFIG, pools, marks=self.marks, log=options)

    def start(self) -> Start:
        """Begin the next process, and check that it serves only the keys that the slots hold."""
        started = self.begin()
        self.check(started)
        return started

    def check(self, started: Start) -> None:
        """Check for stale data (S14), and that the reason of a cold start is true."""
        ledger = started.offloader.ledger
        for key in readable_keys(ledger):
            assert self.held[ledger.index[key]] == key, "a slot holds another key's bytes"
        assert started.kept == len(readable_keys(ledger))
        assert started.kept > 0 or not self.stored or started.why_cold, "cold, and no reason"

    def live(self, started: Start, blocks: int = 4) -> None:
        """Store new keys; the pool has no room for all of them, so slots are reused."""
        core = started.offloader
        for _ in range(blocks):
            self.stored += 1
            key = b"key %d" % self.stored
            job = core.prepare_store(f"r{self.stored}", [key], [0]).job
            assert job is not None
            core.submit([job.transfer])
            self.held[int(job.host_blocks[0])] = key
            core.complete_store(job.transfer)
            core.finish(f"r{self.stored}")
            core.end_step()

    def end(self, started: Start, killed: bool) -> None:
        """End the process normally, or like a kill: its files and locks are closed without further writes."""
        core = started.offloader
        writer = core.writer
        if isinstance(writer, LateLog):
            writer = writer._writer
        if killed and writer is not None:
            for segment in writer._retention.segments:
                segment.close()
            writer._claimed.close()
            writer._closed = True
        core.close()


def try_start(world: StartWorld, plan: Plan) -> tuple[Start | None, str, list[str]]:
    """Return the start, None if it was refused; the refusal's text; and the operations that were tried."""
    with failing(world.directory, plan) as tried:
        try:
            started = world.begin()
        except LogError as error:
            return None, str(error), tried
    world.check(started)
    return started, "", tried


AWAY = ("its parent is missing", "it is missing", "a file is there", "a link is there")
"""The ways in which a disk's directory can be missing."""


class DiskLife(NamedTuple):
    """A start of an engine with a disk tier.

    files: the files of the ranks that have one. decided: None if the engine serves without a disk.
    """

    files: dict[int, SlotFile]
    decided: Decided | None
    refusals: list[str]


class DiskStartWorld:
    """Processes of an engine of two ranks on one disk tier.

    `begin` starts like the workers and then the scheduler; `live` loads all blocks found, and stores; `reset`
    resets; `away` takes the directory away for a while.
    """

    RANKS = 2

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tier = TierFiles(directory / "disk", "engine0", self.RANKS)
        self.valid: set[int] = set()
        """Keys that were stored since the last reset that succeeded."""
        self.stored = 0

    def begin(self) -> DiskLife:
        """Start. Files that cannot be used must raise `UnusableFiles`, and no other error."""
        files, refusals = {}, []
        for rank in range(self.RANKS):
            geometry = DiskGeometry(PAYLOAD, SLOTS, rank, self.RANKS)
            try:
                files[rank] = self.tier.open_slots(rank, geometry, DISK_IDENTITY)
            except UnusableFiles as error:
                refusals.append(str(error))
        try:
            decided = self.tier.decide("v1", SLOTS)
        except UnusableFiles as error:
            return DiskLife(files, None, [*refusals, str(error)])
        return DiskLife(files, decided, refusals)

    def live(self, life: DiskLife) -> int:
        """Check the blocks found, store one more key, and end like a kill. Returns the number found."""
        found, decided = 0, life.decided
        if decided is not None and len(life.files) == self.RANKS:
            found = self._load_and_store(life.files, decided)
        for file in life.files.values():
            file.close()
        return found

    def reset(self, life: DiskLife) -> str:
        """Reset. Returns the error, after which older blocks may come back; empty on success."""
        decided = life.decided
        try:
            if decided is None:
                self.tier.void()
            else:
                OpenEra(self.tier.era, decided.era, decided.found.life).begin(None, 1000)
        except (OSError, UnusableFiles) as error:
            return str(error)
        self.valid = set()
        return ""

    @contextmanager
    def away(self, how: str) -> Iterator[None]:
        """Take the disk's directory away in one of the ways in `AWAY`, and bring it back."""
        path = self.directory if how == "its parent is missing" else self.directory / "disk"
        aside = self.directory.with_name("aside")
        path.rename(aside)
        if how == "a file is there":
            path.write_text("a file")
        elif how == "a link is there":
            other = self.directory.with_name("other")
            other.mkdir(mode=0o700)
            path.symlink_to(other)
        yield
        if how.endswith("is there"):
            path.unlink()
        elif path.exists():
            path.rmdir()
        aside.rename(path)

    def _load_and_store(self, files: Mapping[int, SlotFile], decided: Decided) -> int:
        keys = {int(key.split()[1]): slot for key, slot in decided.found.slots.items()}
        assert keys.keys() <= self.valid, "a key of before a reset comes back"
        self.stored += 1
        free = next(slot for slot in range(SLOTS) if slot not in keys.values())
        for rank, file in files.items():
            take(file, self.tier.read_decided())
            host = np.zeros((1, PAYLOAD), np.uint8)
            engine = DiskCopyEngine(host, file, FlushPolicy.NONE, threads=1)
            for number, (key, slot) in enumerate(keys.items(), 1):
                host[:] = 0
                engine.submit(job(number, Direction.LOAD, [0], [slot], [key], decided.era.id))
                engine.wait([number])
                assert engine.poll()[0].good
                assert np.array_equal(host[0], content(key)), f"rank {rank} serves wrong bytes"
            host[0] = content(self.stored)
            engine.submit(job(100, Direction.STORE, [0], [free], [self.stored], decided.era.id))
            engine.wait([100])
            assert engine.poll()[0].good
            engine.close()
        self.valid = {*keys, self.stored}
        return len(keys)
