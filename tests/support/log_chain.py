"""Chains of processes that write one log and are killed at any system call, with checks of what is read."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from log_life import CONFIG, RUN

from kvsm.core.log import (
    LogDirectory,
    LogEnd,
    LogFollower,
    LogReader,
    LogWriter,
    WholeState,
    find_end,
    segment_file,
)
from kvsm.errors import LogError
from kvsm.events import OffloadingEvent, RequestArrived

BEFORE, HALF, AFTER = range(3)
"""When a kill happens: before a system call, after half of a write, or after the call."""

NEVER = 1 << 30


class Killed(BaseException):
    """Raised by each system call of a dead process."""


class Kill:
    """Ends the process at its n-th system call that changes the disk. `calls`: the calls made so far."""

    def __init__(self, at: int, how: int, max_bytes: int | None, path: Path) -> None:
        self.calls: list[str] = []
        self._at, self._how, self._max_bytes, self._path = at, how, max_bytes, path

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call, which raises `Killed` once the process is dead."""

        def killing(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) < self._at:
                answer = call(*args, **options)
                self._check_bytes()
                return answer
            if len(self.calls) == self._at and self._how == HALF and name == "pwrite":
                descriptor, data, offset = args
                if len(data) > 12:  # The mark is within a page: it is written, or it is not.
                    call(descriptor, data[: len(data) // 2], offset)
            elif len(self.calls) == self._at and self._how != BEFORE:
                call(*args, **options)
            raise Killed

        return killing

    def _check_bytes(self) -> None:
        if self._max_bytes is not None:
            assert sum(file.stat().st_size for file in self._path.iterdir()) <= self._max_bytes


@contextmanager
def killed(at: int, how: int, path: Path, max_bytes: int | None = None) -> Iterator[Kill]:
    """Let the process die at its n-th system call. It never has more than `max_bytes` on the disk."""
    kill = Kill(at, how, max_bytes, path)

    class MortalFile(io.FileIO):
        __init__ = kill.wrap("create", io.FileIO.__init__)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("pwrite", "ftruncate", "fdatasync", "fsync", "rename"):
            really = (lambda _: None) if name in ("fdatasync", "fsync") else getattr(os, name)
            patch.setattr(os, name, kill.wrap(name, really))
        patch.setattr(Path, "unlink", kill.wrap("unlink", Path.unlink))
        patch.setattr(segment_file, "FileIO", MortalFile)
        with suppress(Killed):
            yield kill


class PlannedLife(NamedTuple):
    """The plan of one process.

    frames: the number of events of each flush.
    kill_at, how: the kill, as in `Kill`; it happens only if the process gets that far.
    error: the error with which the log is closed otherwise; None: none; "-": a kill at the end, without a
        close.
    """

    frames: list[int]
    kill_at: int = NEVER
    how: int = BEFORE
    error: str | None = None


class Chain:
    """One log, the processes that write it, and a reference of the events that must be read.

    events: number -> event.
    flushed: the last event that must be read. `asked`: the last event that may be read.
    lives: the life, its first event, and its possible ends.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.options = path, {"durability": "every", "segment_bytes": 150, **options}
        self.events: dict[int, OffloadingEvent] = {}
        self.flushed = self.asked = 0
        self.lives: list[tuple[int, int, set[str]]] = []
        self.follower: LogFollower | None = None
        self.followed: list[OffloadingEvent] = []

    def live(self, plan: PlannedLife, **options: Any) -> Kill:
        """Continue the log as a new process, to the end of this plan."""
        max_bytes = self.options.get("max_bytes")
        claimed = writer = None
        ends = {"killed"}
        with killed(plan.kill_at, plan.how, self.path, max_bytes) as kill:
            claimed = LogDirectory(self.path, durable=False)
            end = find_end(claimed)
            assert self.flushed <= end.seq <= self.asked
            seq = self.flushed = self.asked = end.seq
            writer = LogWriter(
                end,
                config=CONFIG,
                snapshot=lambda: WholeState(str(seq).encode()),
                clock=lambda: 7,
                **{"run": RUN, **self.options, **options},
            )
            self._begin_life(end.life)
            for count in plan.frames:
                for _ in range(count):
                    seq += 1
                    self.events[seq] = RequestArrived(
                        seq, seq, end.life, f"life {end.life} of {len(self.events)}"
                    )
                    self.asked = seq
                    writer.append(self.events[seq])
                writer.flush()
                self.flushed = seq
            if plan.error != "-":
                ends |= {plan.error or "closed"}
                writer.close(None if plan.error is None else LogError(plan.error))
                ends -= {"killed"}
        for segment in () if writer is None else writer._retention.segments:
            segment.close()
        if claimed is not None:
            claimed.close()
        if writer is not None:
            self.lives[-1][2].clear()
            self.lives[-1][2].update(ends)
        return kill

    def _begin_life(self, life: int) -> None:
        assert all(one[0] < life or one[1] > self.flushed for one in self.lives)
        # A life that wrote no event leaves no trace.
        self.lives = [one for one in self.lives if one[1] <= self.flushed]
        self.lives.append((life, self.flushed + 1, set()))

    def check(self) -> LogReader | None:
        """Check that a reader gives the events of all processes, in order, and reports the processes."""
        if not list(self.path.glob("*.kvsm")):
            assert not self.flushed
            return None
        reader = LogReader(self.path)
        seen: list[OffloadingEvent] = []
        for segment in reader.segments():
            assert segment.head.snapshot == (str(segment.head.seq).encode() if segment.head.seq else b"")
            assert (segment.gap, segment.head.run) == (None, RUN)
            seen += segment.events()
        first = seen[0].seq if seen else self.flushed + 1
        last = first + len(seen) - 1
        assert seen == [self.events[seq] for seq in range(first, last + 1)]
        assert self.flushed <= last <= self.asked
        assert (reader.missing, reader.broken_from) == (None, None)
        if "max_bytes" not in self.options:
            assert first == 1
        self._check_lives(reader, first, last)
        self._check_follower(last, reader)
        return reader

    def _check_lives(self, reader: LogReader, first: int, last: int) -> None:
        kept = [one for one in reader.lives if one.last >= one.first]
        assert [one.first for one in kept[:1]] in ([first], [])
        assert [one.last for one in kept[-1:]] in ([last], [])
        told = {life: (begun, ends) for life, begun, ends in self.lives if begun <= last}
        assert sorted(told)[len(told) - len(kept) :] == [one.life for one in kept]
        for one, following in zip(kept, [*kept[1:], None], strict=False):
            begun, ends = told[one.life]
            assert one.first == max(begun, first)
            assert following is None or following.first == one.last + 1
            told_end = one.error or ("closed" if one.end is LogEnd.CLOSED else "killed")
            assert told_end in ends

    def _check_follower(self, last: int, reader: LogReader) -> None:
        """Check that a reader that followed the log all the time has seen the same."""
        if self.follower is None:
            self.follower = LogFollower(self.path)
        for news in self.follower.poll():
            self.followed += news.events
        if "max_bytes" not in self.options:
            assert self.follower.lives == reader.lives
        missed = {seq for first, end in self.follower.overtaken for seq in range(first, end + 1)}
        assert self.followed == [self.events[one.seq] for one in self.followed]
        numbers = [one.seq for one in self.followed]
        if numbers or last:
            begun = min([*missed, *numbers], default=last + 1)
            assert sorted({*numbers, *missed}) == list(range(begun, last + 1))
