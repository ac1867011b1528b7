"""Failing system calls of a log writer, and the checks of its log afterwards."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from log_life import CONFIG, event

from kvsm.core.log import LogEnd, LogReader, LogWriter, WholeState, segment_file
from kvsm.errors import LogDamaged, LogError, LogWriteFailed
from kvsm.events import OffloadingEvent

FULL, BROKEN, QUOTA, INTERRUPTED = errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR
SHORT, LATE = -1, -2
"""SHORT: a write of only a part, without an error. LATE: a call that has its effect, and then fails."""


Plan = Callable[[int], int | None]
"""The fault of the n-th call, or None."""


class Faults:
    """Makes system calls fail as `plan` says: with an errno, `SHORT` or `LATE`.

    calls: the names of all calls. without_effect: the numbers of the calls that did nothing, or only a part.
    """

    def __init__(self, plan: Plan) -> None:
        self.calls: list[str] = []
        self.without_effect: list[int] = []
        self._plan = plan

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call, which fails as planned."""

        def faulty(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            fault = self._plan(len(self.calls))
            if fault is None:
                return call(*args, **options)
            if name == "pwrite":
                descriptor, data, offset = args
                part = call(descriptor, data[: len(data) // 2], offset) if fault in (SHORT, LATE) else 0
                self.without_effect.append(len(self.calls))
                if fault == SHORT and part:
                    return part
            elif (fault in (SHORT, LATE) and name != "create") or name == "close":
                call(*args, **options)
            else:
                self.without_effect.append(len(self.calls))
            number = fault if fault > 0 else BROKEN
            raise OSError(number, os.strerror(number))

        return faulty


@contextmanager
def faults(plan: Plan) -> Iterator[Faults]:
    """Fail some of the system calls that a writer makes."""
    made = Faults(plan)

    class FaultyFile(io.FileIO):
        """A segment's file, whose opening and closing may fail."""

        __init__ = made.wrap("create", io.FileIO.__init__)
        _close = made.wrap("close", io.FileIO.close)

        def close(self) -> None:
            """Close the file; only the first close is a system call."""
            if not self.closed:
                self._close()

    with pytest.MonkeyPatch.context() as patch:
        for name in ("pwrite", "ftruncate", "fdatasync", "fsync", "rename"):
            really = (lambda _: None) if name in ("fdatasync", "fsync") else getattr(os, name)
            patch.setattr(os, name, made.wrap(name, really))
        patch.setattr(Path, "unlink", made.wrap("unlink", Path.unlink))
        patch.setattr(segment_file, "FileIO", FaultyFile)
        yield made


class FaultyLife:
    """A short run of a writer whose system calls fail as planned.

    calls: names of the system calls that were made.
    raised: the writer's own error, or None.
    uncut: numbers of the calls that should have truncated a file, and did not.
    flushed: the last event appended before a flush that returned.
    """

    def __init__(self, path: Path, plan: Plan, options: dict[str, Any]) -> None:
        self.path, self.options, self.seq, self.flushed = path, options, 0, 0
        self.writer: LogWriter | None = None
        self.raised: LogError | None = None
        with faults(plan) as made:
            self._live()
        self.calls = made.calls
        self.uncut = [number for number in made.without_effect if made.calls[number - 1] == "ftruncate"]
        if self.writer is not None:
            self.writer.close()  # It is closed. A second call does nothing.
        assert open_files(path) == [], "a descriptor was left open"

    def _live(self) -> None:
        """Run the writer. A raw system error that escapes from it fails the test."""
        try:
            self.writer = LogWriter(
                self.path,
                config=CONFIG,
                snapshot=lambda: WholeState(str(self.seq).encode()),
                clock=lambda: 7,
                **self.options,
            )
            for count in (2, 1, 3, 1):
                for _ in range(count):
                    self.seq += 1
                    self.writer.append(event(self.seq))
                self.writer.flush()
                self.flushed = self.seq
            self.writer.close()
        except LogError as error:
            self.raised = error
        if self.raised is not None and self.writer is not None:
            with pytest.raises(LogWriteFailed):
                self.writer.flush()
            with suppress(LogWriteFailed):
                self.writer.close()

    def check(self) -> bool:
        """Check that each event is read, or reported as lost by a reader or the writer.

        Returns whether the log is damaged; the writer must have reported the damage.
        """
        if self.writer is None:
            assert self.raised is not None
            return False
        reader = LogReader(self.path)
        seen, missing, damage = read_across_gaps(reader)
        assert seen == [event(one.seq) for one in seen]
        numbers = [one.seq for one in seen]
        assert numbers == sorted(set(numbers))
        if self.raised is not None:
            assert isinstance(self.raised, LogWriteFailed)
            assert self.writer.failure is not None
            if self.options["on_failure"] == "stop" and self.options["durability"] != "interval":
                assert numbers[: self.flushed] == list(range(1, self.flushed + 1))
            return damage is not None
        assert damage is None, "damage that the writer did not tell"
        lost = list(range(max([0, *missing, *numbers]) + 1, self.seq + 1))
        assert sorted([*missing, *lost, *numbers]) == list(range(1, self.seq + 1))
        assert reader.broken_from == self.writer.broken_from == min([*missing, *lost], default=None)
        assert (self.writer.events, self.writer.dropped) == (len(seen), len(missing) + len(lost))
        if reader.torn is not None:
            # Only the record of the end, if it was written in part and could not be taken back.
            assert self.uncut
            assert (reader.torn.seq, reader.end) == (self.seq + 1, LogEnd.OPEN)
            assert self.writer.failure is not None
            assert "the record of its end is missing" in self.writer.failure
        assert all(file.suffix == ".kvsm" for file in self.path.iterdir())
        return False


def open_files(directory: Path) -> list[str]:
    """Return the files below this directory that this process has open."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # The one that lists them is closed by now.
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [name for name in names if name.startswith(str(directory))]


def read_across_gaps(reader: LogReader) -> tuple[list[OffloadingEvent], list[int], LogDamaged | None]:
    """Return the events, the numbers in the gaps, and the damage at which reading ends."""
    seen: list[OffloadingEvent] = []
    missing: list[int] = []
    try:
        for segment in reader.segments():
            if segment.gap is not None:
                missing += range(segment.gap[0], segment.gap[1] + 1)
                assert segment.head.snapshot == str(segment.gap[1]).encode()
            for batch in segment.batches():
                seen += batch
    except LogDamaged as error:
        return seen, missing, error
    return seen, missing, None
