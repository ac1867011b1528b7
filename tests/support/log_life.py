"""Helpers for tests of the log: a stand-in core that writes a log, ways to read it, a disk that fills up."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import msgspec
import pytest

from kvsm.core.log import EndedLog, LogReader, LogWriter, StateCopy, Torn, WholeState
from kvsm.core.log.frames import END, HEADER, PREAMBLE_BYTES, Frame, FrameReader, run_mark
from kvsm.errors import LogError
from kvsm.events import HitMatched, OffloadConfig, OffloadingEvent, RequestArrived, StepEnded

CONFIG = OffloadConfig(host_blocks=8, device_blocks=8)
RUN = bytes(range(16))
"""The run id of each `Life`."""


class Life:
    """A stand-in for a core: numbers events; its snapshot is the last number."""

    def __init__(self, directory: Path | EndedLog, **options: Any) -> None:
        self.seq = directory.seq if isinstance(directory, EndedLog) else 0
        self.writer = LogWriter(
            directory,
            config=CONFIG,
            snapshot=self.snapshot,
            clock=lambda: 7,
            **{"durability": "none", "run": RUN, **options},
        )

    def snapshot(self) -> StateCopy:
        return WholeState(str(self.seq).encode())

    def append(self, count: int, flush: bool = True) -> list[OffloadingEvent]:
        events = [event(self.seq + number) for number in range(1, count + 1)]
        for one in events:
            self.seq = one.seq
            self.writer.append(one)
        if flush:
            self.writer.flush()
        return events

    def kill(self) -> None:
        """End like a killed process: flushed events are in the files, and the log is not closed."""
        self.writer._place.segment.close()
        self.writer._claimed.close()


def no_locks(_descriptor: int, _how: int) -> None:
    """Replace `flock`, as on a file system that cannot lock a directory."""
    raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def event(seq: int) -> OffloadingEvent:
    """Return an event with this number, of one of three kinds; every third event ends in zero bytes."""
    if seq % 3 == 0:
        return HitMatched(seq, 0, 0, "r", (), bytes(9))
    return RequestArrived(seq, seq, 0, f"r{seq}") if seq % 3 == 1 else StepEnded(seq, seq, 1)


def write(directory: Path, frames: list[int], **options: Any) -> list[OffloadingEvent]:
    """Write and close a log whose frames have these numbers of events."""
    life = Life(directory, **options)
    with life.writer:
        return [one for count in frames for one in life.append(count)]


def write_open(directory: Path, frames: list[int], **options: Any) -> list[OffloadingEvent]:
    """Write a log whose frames have these numbers of events, and leave it as after a kill."""
    life = Life(directory, **options)
    written = [one for count in frames for one in life.append(count)]
    life.kill()
    return written


def read(directory: Path) -> tuple[list[OffloadingEvent], LogError | None, Torn | None]:
    """Return the events that a reader gives, the error that ended it, and the torn tail that it reported."""
    reader = LogReader(directory)
    events: list[OffloadingEvent] = []
    try:
        for batch in reader.batches():
            events += batch
    except LogError as error:
        return events, error, reader.torn
    return events, None, reader.torn


def names(directory: Path) -> list[int]:
    return [int(path.stem) for path in sorted(directory.glob("*.kvsm"))]


def frame_ends(path: Path) -> list[int]:
    """Return the offsets after the head, after each frame of events, and after the tail."""
    ends, seq = [PREAMBLE_BYTES], int(path.stem)
    with path.open("rb") as file:
        file.seek(PREAMBLE_BYTES)
        frames = FrameReader(file, str(path), None, complete=False)
        while isinstance(frame := frames.read(ends[-1], seq), Frame):
            ends.append(frame.end)
            seq += frame.event_count
    return ends[1:]


def raw_frame(value: object, count: int, first: int, flags: int = 0, run: bytes = RUN) -> bytes:
    """Return a frame of any content with right checksums."""
    payload = msgspec.msgpack.encode(value) + END
    covered = HEADER.pack(run_mark(run), len(payload), flags, count, first, 0, crc32(payload), 0)[:-4]
    return covered + crc32(covered).to_bytes(4, "little") + payload


@contextmanager
def directory() -> Iterator[Path]:
    """Make a new directory for each example; `tmp_path` is the same for the whole test."""
    with TemporaryDirectory() as name:
        yield Path(name) / "log"


class Disk:
    """`os.pwrite` on a disk with `free` bytes. Only growth takes space. The bytes that fit are written."""

    def __init__(self, free: int) -> None:
        self.free = free

    def pwrite(self, descriptor: int, data: bytes, offset: int, write: Callable[..., int] = os.pwrite) -> int:
        room = os.fstat(descriptor).st_size + self.free - offset
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        grown = max(0, offset + min(len(data), room) - os.fstat(descriptor).st_size)
        self.free -= grown
        return write(descriptor, data[:room], offset)


@contextmanager
def disk(free: int) -> Iterator[Disk]:
    with pytest.MonkeyPatch.context() as patch:
        limited = Disk(free)
        patch.setattr(os, "pwrite", limited.pwrite)
        yield limited


def run_child(body: str, path: Path) -> subprocess.Popen[str]:
    """Run a process that writes a log to `path` with this module's definitions."""
    script = f"import sys; from pathlib import Path; from log_life import *; path = Path(sys.argv[1])\n{body}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    )
