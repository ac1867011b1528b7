"""Power loss: whatever part of the unsynced bytes is on the disk, all promised events are read (rule 6).

The system calls of a real writer are recorded. Then disks are made as a crash after any of these calls may
leave them. A file has the bytes of its last sync, and on top of these any of the pages that were written
since. In the place of a new page that is not there, a file system may show zeros or anything else. The names
are those of the directory's last sync, or newer ones: a file system keeps their order.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from log_life import Life, directory, event
from log_openings import slow_openings

from examples import some
from kvsm.core.log import LogDirectory, LogEnd, LogReader, find_end
from kvsm.core.log.frames import MARK_OFFSET
from kvsm.errors import LogDamaged, LogError

PAGE = 4096


class Call(NamedTuple):
    """A system call of the writer.

    file: number of the file.
    content: of this file, after the call.
    names: the files of the directory by name.
    promised: the last event that the writer took for durable, or has flushed with `every`.
    """

    what: str
    file: int
    content: bytes
    names: dict[str, int]
    promised: int


class Recorder:
    """Records what a writer does to its directory.

    failing: numbers of the writes of frames that fail.
    """

    def __init__(self, path: Path, failing: frozenset[int]) -> None:
        self.path, self.failing = path, failing
        self.calls: list[Call] = []
        self.life: Life | None = None
        self._files: dict[int, int] = {}
        self._contents: dict[int, bytes] = {}
        self._numbers, self._frames, self._promised = count(), count(), 0

    def promise(self, seq: int) -> None:
        """All up to this event must be read, unless the writer tells that they are lost."""
        self._promised = max(self._promised, seq)

    def _note(self, what: str, file: int = -1) -> None:
        if self.life is not None:
            self.promise(self.life.writer._place.segment.synced.seq)
        names = {one.name: self._files[one.stat().st_ino] for one in self.path.iterdir()}
        self.calls.append(Call(what, file, self._contents.get(file, b""), names, self._promised))

    @contextmanager
    def recording(self) -> Iterator[None]:
        pwrite, fdatasync, fsync, ftruncate = os.pwrite, os.fdatasync, os.fsync, os.ftruncate

        def file(descriptor: int) -> int:
            return self._files[os.fstat(descriptor).st_ino]

        def write(descriptor: int, data: bytes, offset: int) -> int:
            if offset == 0:  # A new file, perhaps with the inode of one that was deleted.
                self._files[os.fstat(descriptor).st_ino] = next(self._numbers)
            elif offset != MARK_OFFSET and next(self._frames) in self.failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = pwrite(descriptor, data, offset)
            number = file(descriptor)
            old = self._contents.get(number, b"").ljust(offset, b"\0")
            self._contents[number] = old[:offset] + data[:done] + old[offset + done :]
            self._note("write", number)
            return done

        def sync(descriptor: int) -> None:
            fdatasync(descriptor)
            self._note("sync", file(descriptor))

        def sync_names(descriptor: int) -> None:
            fsync(descriptor)
            self._note("sync names")

        def cut(descriptor: int, size: int) -> None:
            ftruncate(descriptor, size)
            self._contents[file(descriptor)] = self._contents[file(descriptor)][:size]
            self._note("cut", file(descriptor))

        ticks = count(0, 30_000_000)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", write)
            patch.setattr(os, "fdatasync", sync)
            patch.setattr(os, "fsync", sync_names)
            patch.setattr(os, "ftruncate", cut)
            patch.setattr("kvsm.core.log.writer.time.monotonic_ns", lambda: next(ticks))
            yield


class Recorded(NamedTuple):
    """What a writer did, and the numbers of the events that it did not lose."""

    calls: list[Call]
    kept: list[int]


def record(
    seed: int,
    durability: str,
    failing: frozenset[int] = frozenset(),
    lives: int = 1,
    slow: bool = False,
    **options: Any,
) -> Recorded:
    """A log of about ten segments, which is closed. All lives but the last one are killed.

    slow: segments take several flushes to open.
    """
    chance = random.Random(seed)
    with directory() as path, slow_openings(slow):
        path.mkdir()
        recorder = Recorder(path, failing)
        with recorder.recording():
            options = {"segment_bytes": 10_000, "on_failure": "continue", **options}
            life = Life(path, durability=durability, **options)
            recorder.life = life
            for number in range(60):
                if number and number % (60 // lives) == 0:
                    life.kill()
                    recorder.life = None
                    life = Life(find_end(LogDirectory(path, durable=False)), durability=durability, **options)
                    recorder.life = life
                life.append(chance.choice([1, 2, 20, 60, 130]))
                if durability == "every":
                    recorder.promise(life.seq)
            life.writer.close()
        lost = [seq for first, last in gaps(path) for seq in range(first, last + 1)]
        return Recorded(recorder.calls, [seq for seq in range(1, life.seq + 1) if seq not in lost])


def gaps(path: Path) -> list[tuple[int, int]]:
    reader = LogReader(path)
    for segment in reader.segments():
        list(segment.batches())
    return reader.gaps


def crash(calls: list[Call], done: int, chance: random.Random, path: Path) -> None:
    """Make the directory as a crash after `done` calls may leave it."""
    past = calls[:done]
    synced_names = max([0, *(number for number, call in enumerate(past) if call.what == "sync names")])
    # The call that the crash interrupts may have had an effect on the names.
    names = chance.choice([call.names for call in calls[synced_names : done + 1]])
    path.mkdir()
    for name, file in names.items():
        (path / name).write_bytes(crashed_file([call for call in past if call.file == file], chance))


def crashed_file(calls: list[Call], chance: random.Random) -> bytes:
    """The bytes of one file after a crash behind these calls."""
    synced = max([-1, *(number for number, call in enumerate(calls) if call.what == "sync")])
    safe = calls[synced].content if synced >= 0 else b""
    versions = [safe, *(call.content for call in calls[synced + 1 :])]
    size = len(chance.choice(versions))
    arrived = chance.random()
    pages = []
    for start in range(0, size, PAGE):
        end = min(start + PAGE, size)
        written = [one[start:end] for one in versions if len(one) > start]
        page = written[0] if chance.random() > arrived else chance.choice(written)
        if len(safe) <= start and chance.random() > arrived:
            page = b""
        # Old bytes are shifted by one: an older frame exactly where the next one belongs would be damage.
        fill = chance.choice(
            [bytes(PAGE), chance.randbytes(PAGE), safe[1 : PAGE + 1], versions[-1][-PAGE:-1]]
        )
        # A page that was partly written before the sync has its old bytes, and zeros behind them.
        pages.append(page.ljust(end - start, b"\0") if len(safe) > start else (page + fill[len(page) :]))
    return b"".join(page[:PAGE].ljust(PAGE, b"\0") for page in pages)[:size]


def check_crash(recorded: Recorded, done: int, chance: random.Random) -> None:
    """All promised events are read, no others, and what is missing is told."""
    promised = recorded.calls[done - 1].promised if done else 0
    with directory() as path:
        crash(recorded.calls, done, chance, path)
        if not list(path.glob("*.kvsm")):
            assert promised == 0
            return
        reader = LogReader(path)
        seen = [one for segment in reader.segments() for one in segment.events()]
        before = reader.head.seq  # Retention has deleted what is older.
        kept = [seq for seq in recorded.kept if seq > before]
        assert seen == [event(seq) for seq in kept[: len(seen)]]
        assert len(seen) >= sum(seq <= promised for seq in kept)
        assert reader.missing is None
        if len(seen) < len(kept):
            assert reader.end in (LogEnd.OPEN, LogEnd.BROKEN)
        if done == len(recorded.calls):
            assert (reader.end, reader.torn) == (LogEnd.CLOSED, None)
        check_continued(path, reader, len(seen))


def check_continued(path: Path, reader: LogReader, count: int) -> None:
    """What a crash has left can be continued, unless the state at its end is lost."""
    try:
        life = Life(find_end(LogDirectory(path, durable=False)))
    except LogError:
        assert reader.end is LogEnd.BROKEN
        return
    life.append(3)
    life.writer.close()
    seen = [one.seq for segment in LogReader(path).segments() for one in segment.events()]
    assert seen[count:] == [life.seq - 2, life.seq - 1, life.seq]


SYNCED = [
    ("interval", frozenset[int](), {}),
    ("every", frozenset[int](), {}),
    ("interval", frozenset({9, 30}), {}),
    ("interval", frozenset[int](), {"compress": True, "segment_bytes": 2500}),
    ("every", frozenset[int](), {"lives": 5, "segment_bytes": 20_000}),
    ("interval", frozenset[int](), {"slow": True}),
    ("interval", frozenset[int](), {"slow": True, "sync_thread": True, "max_bytes": 30_000}),
    ("every", frozenset({30}), {"slow": True, "segment_bytes": 2500, "compress": True}),
    ("interval", frozenset({9, 30}), {"slow": True, "sync_thread": True}),
    ("interval", frozenset[int](), {"slow": True, "sync_thread": True, "lives": 4, "segment_bytes": 3000}),
]


@pytest.mark.parametrize(("durability", "failing", "options"), SYNCED)
def test_power_loss_takes_no_promised_event(
    durability: str, failing: frozenset[int], options: dict[str, Any]
) -> None:
    """With `interval` and `every`, what is behind the last sync is a torn end, and all before it is read."""
    recorded = record(1, durability, failing, **options)
    assert len({call.file for call in recorded.calls}) > 4
    chance = random.Random(2)
    for done in some(range(0, len(recorded.calls) + 1, 3)):
        check_crash(recorded, done, chance)
    check_crash(recorded, len(recorded.calls), chance)


@pytest.mark.slow
@pytest.mark.parametrize(("durability", "failing", "options"), SYNCED)
@pytest.mark.parametrize("seed", range(2))
def test_power_loss_takes_no_promised_event_at_length(
    durability: str, failing: frozenset[int], options: dict[str, Any], seed: int
) -> None:
    recorded = record(seed, durability, failing, **options)
    chance = random.Random(seed)
    for done in range(len(recorded.calls) + 1):
        for _ in range(3):
            check_crash(recorded, done, chance)


def test_power_loss_without_syncs_gives_no_wrong_event() -> None:
    """With `none` nothing is promised: a reader gives a valid prefix, or says that the log is damaged."""
    recorded = record(1, "none")
    chance = random.Random(3)
    for done in some(range(0, len(recorded.calls) + 1, 3)):
        with directory() as path:
            crash(recorded.calls, done, chance, path)
            seen = []
            if list(path.glob("*.kvsm")):
                with suppress(LogDamaged):
                    for segment in LogReader(path).segments():
                        seen += segment.events()
            assert seen == [event(seq) for seq in recorded.kept[: len(seen)]]
