"""Starts whose file operations fail, and what must hold of this start and of the next one.

A world is a directory with a kept pool and the log of a process that is gone. The pool is a book: each life
writes into it which key each slot holds. Operations on other files, such as /proc, never fail.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvsm.errors import LogError
from kvsm.events import OffloadConfig
from kvsm.identity import KeptPools, PoolIdentity
from kvsm.ledger import readable_keys
from kvsm.log import LateLog, segment_file
from kvsm.restart import Start, start
from kvsm.worlds.memory_marks import memory_marks

SLOTS = 6
CONFIG = OffloadConfig(host_blocks=SLOTS, device_blocks=12)
IDENTITY = PoolIdentity.of({"model": "small"})

OPERATIONS = (
    "open",
    "pwrite",
    "pread",
    "ftruncate",
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
"""The functions of `os` that fail."""

Plan = Callable[[int, str], int | None]
"""The error of the n-th operation, which has this name; None: it succeeds."""


@contextmanager
def failing(directory: Path, plan: Plan) -> Iterator[list[str]]:
    """Let operations on files below `directory` fail. Gives the names of those that were tried."""
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

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, faulty(name, getattr(os, name)))
        make = io.FileIO

        def new_file(path: Any, mode: str, opener: Any = None) -> io.FileIO:
            # The opener was bound to `os.open` before it was replaced.
            return faulty("create", lambda path: make(path, mode, opener=opener))(path)

        patch.setattr(segment_file, "FileIO", new_file)
        yield tried


class StartWorld:
    """Lives on one pool and one log. `start` begins a life, `live` stores in it, `end` ends it."""

    def __init__(self, directory: Path, on_failure: str) -> None:
        self.directory, self.log = directory, directory / "log"
        self.on_failure = on_failure
        self.ids = (b"pool 0", b"checksums 0")
        self.marks = memory_marks()
        self.held: dict[int, bytes] = {}
        """Slot -> the key whose bytes it holds."""
        self.stored = 0

    def begin(self) -> Start:
        """Begin the next life."""
        options = {"on_failure": self.on_failure, "durability": "every"}
        pools = KeptPools(IDENTITY, self.ids)
        return start(self.log, CONFIG, pools, marks=self.marks, log=options)

    def start(self) -> Start:
        """The same. What it serves must be what the slots hold."""
        started = self.begin()
        self.check(started)
        return started

    def check(self, started: Start) -> None:
        """No stale data (S14), and the reason is true."""
        ledger = started.offloader.ledger
        for key in readable_keys(ledger):
            assert self.held[ledger.index[key]] == key, "a slot holds another key's bytes"
        assert started.kept == len(readable_keys(ledger))
        assert started.kept > 0 or not self.stored or started.why_cold, "cold, and no reason"

    def live(self, started: Start, blocks: int = 4) -> None:
        """Store new keys; the pool has no room for all of them, so slots are used again."""
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
        """End a life well, or as a kill does: its files and locks are closed, and nothing is written."""
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
    """(the start, or None if it was refused; the refusal's text; the operations that were tried)"""
    with failing(world.directory, plan) as tried:
        try:
            started = world.begin()
        except LogError as error:
            return None, str(error), tried
    world.check(started)
    return started, "", tried
