"""Runs of a log writer that are interrupted at the n-th line or opcode."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from log_life import CONFIG, event

import kvsm.core.log
from kvsm.core.log import LogReader, LogWriter, WholeState
from kvsm.errors import LogError
from kvsm.events import OffloadingEvent

REFUSED = "another call of this writer has not returned"
"""A possible refusal: a trace, unlike a signal, can raise in the `finally` that records the end of a call."""

PACKAGE = str(Path(kvsm.core.log.__file__).parent)


class Interrupts:
    """Raises `KeyboardInterrupt` at the moments in `at`, counted over all code of kvsm/core/log.

    opcodes: whether a moment is an opcode; otherwise a line.
    package: the directory of the counted code, instead of kvsm/core/log.

    `lines`: line of code -> its moments.
    """

    def __init__(self, at: set[int], opcodes: bool, package: str = PACKAGE) -> None:
        self.at, self.moments, self._opcodes, self._package = at, 0, opcodes, package
        self.lines: dict[tuple[str, int], list[int]] = {}

    def __call__(self, frame: FrameType, *_: object) -> Callable[..., Any] | None:
        """The function for `sys.settrace`: traces calls into the package."""
        if not frame.f_code.co_filename.startswith(self._package):
            return None
        frame.f_trace_opcodes = self._opcodes
        return self._moment

    def _moment(self, frame: FrameType, kind: str, _: object) -> Callable[..., Any]:
        if kind == ("opcode" if self._opcodes else "line"):
            self.moments += 1
            self.lines.setdefault((frame.f_code.co_filename, frame.f_lineno), []).append(self.moments)
            if self.moments == max(self.at, default=0):
                sys.settrace(None)
            if self.moments in self.at:
                raise KeyboardInterrupt
        return self._moment


@contextmanager
def interrupted(at: set[int], opcodes: bool, package: str = PACKAGE) -> Iterator[Interrupts]:
    """Count the moments of a block, and interrupt it at some of them."""
    interrupts, before = Interrupts(at, opcodes, package), sys.gettrace()
    sys.settrace(interrupts)
    try:
        yield interrupts
    finally:
        sys.settrace(before)


class StubbornLife:
    """Appends and flushes `frames`, then closes. Repeats each call that was interrupted.

    flushed: the last event before a flush that returned.
    """

    writer: LogWriter
    directory: Path

    def __init__(self, path: Path, frames: list[int], options: dict[str, Any]) -> None:
        path.mkdir()
        self.path, self.frames, self.options = path, frames, options
        self.seq = self.flushed = 0

    def open(self) -> None:
        """Open a writer.

        After an interrupt, open another one in a new directory: the first writer is lost.
        """
        self.directory = self.path / str(len(list(self.path.iterdir())))
        self.writer = LogWriter(
            self.directory,
            config=CONFIG,
            snapshot=lambda: WholeState(str(self.seq).encode()),
            clock=lambda: 7,
            **self.options,
        )

    def run(self, patient: bool = True) -> None:
        """Write all frames. Raises `LogError` if the writer refuses; raises interrupts unless `patient`."""
        for count in self.frames:
            for _ in range(count):
                self.seq += 1
                if patient:
                    self._append(event(self.seq))
                else:
                    self.writer.append(event(self.seq))
            until_done(self.writer.flush) if patient else self.writer.flush()
            self.flushed = self.seq
        until_done(self.writer.close) if patient else self.writer.close()

    def _append(self, appended: OffloadingEvent) -> None:
        """Append an event until no interrupt comes, without knowing whether an interrupted call took it."""
        try:
            until_done(lambda: self.writer.append(appended))
        except LogError as error:
            seq = appended.seq
            if f"event {seq} was appended where {seq + 1} is next" not in str(error):
                raise


def until_done(call: Callable[[], None]) -> None:
    """Repeat the call until no interrupt ends it."""
    done = False
    while not done:
        with suppress(KeyboardInterrupt):
            call()
            done = True


def check_interrupted(
    path: Path, frames: list[int], options: dict[str, Any], at: set[int], opcodes: bool
) -> Interrupts:
    """Check that all events are read, once and in order; if a call was refused, those flushed before it.

    Returns the moments of the run.
    """
    life = StubbornLife(path, frames, options)
    refusal = None
    with interrupted(at, opcodes) as interrupts:
        try:
            until_done(life.open)
            life.run()
        except LogError as error:
            refusal = error
    for directory in path.iterdir():
        seen, reader = read_all(directory)
        if directory != life.directory:
            assert seen == []
            continue
        assert reader is not None
        last = reader.head.seq + len(seen)
        assert (reader.gaps, life.writer.dropped) == ([], 0)
        if refusal is None:
            assert (last, reader.end.value, reader.torn) == (sum(frames), "closed", None)
            assert life.writer.events == sum(frames)
        else:
            assert REFUSED in str(refusal)
            assert last >= life.flushed
    return interrupts


def check_given_up(
    path: Path, frames: list[int], options: dict[str, Any], at: set[int], opcodes: bool
) -> None:
    """Let the first interrupt end the run, and close the log, as `with` does.

    Checks that all flushed events are read without damage, even if a second interrupt comes before the close.
    """
    life = StubbornLife(path, frames, options)
    writer, refused = None, ""
    try:
        with interrupted(at, opcodes), suppress(KeyboardInterrupt):
            life.open()
            writer = life.writer
            with writer:
                life.run(patient=False)
    except LogError as error:
        refused = str(error)
    assert REFUSED in refused or not refused
    for directory in path.iterdir():
        seen, reader = read_all(directory)
        if writer is not None:
            assert reader is not None
            assert reader.head.seq + len(seen) >= life.flushed


def read_all(directory: Path) -> tuple[list[OffloadingEvent], LogReader | None]:
    """Return the events of a log, which must have no damage and no doubled event. None if there is no log."""
    if not list(directory.glob("*.kvsm")):
        return [], None
    reader = LogReader(directory)
    seen = list(reader.events())
    assert seen == [event(reader.head.seq + number) for number in range(1, len(seen) + 1)]
    return seen, reader
