"""Scenarios of a log that begins new segments and deletes its oldest ones while a reader follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from kvsm.check.threads.control import control
from kvsm.check.threads.faulty_disk import FaultyDisk
from kvsm.check.threads.log_scenarios import IN_MEMORY, LOG_MODULES
from kvsm.check.threads.primitives import ControlledThread, as_step
from kvsm.check.threads.scenario import ThreadScenario
from kvsm.core.log import Durability, EventsTakenBack, LogEnd, LogFollower, LogReader, LogWriter, WholeState
from kvsm.core.log.follower import News
from kvsm.core.log.frames import segment_path, segment_paths
from kvsm.errors import LogWriteFailed, PropertyBroken
from kvsm.events import OffloadConfig, RequestArrived
from kvsm.properties import Property

_CONFIG = OffloadConfig(host_blocks=8, device_blocks=8)
_SEGMENT_BYTES = 32
"""Less than a frame: each event ends its segment."""
_HAS_BOTH = "a reader has read events of the new segment in the one before it"
_MAX_BYTES = 2000
"""Room for some segments of one event, but not for all."""


class _SteppedPath(type(Path())):  # type: ignore[misc]
    """A path whose deletion is a step."""

    def unlink(self, missing_ok: bool = False) -> None:
        control().reach("calls unlink")
        super().unlink(missing_ok)


def _stepped_segment_path(directory: Path, first: int) -> Path:
    return _SteppedPath(segment_path(directory, first))


class RotatedLog(ThreadScenario):
    """Each event begins a new segment. A follower reads all of them, or is told which it has missed."""

    says = "a log begins a new segment for each event while a reader follows it"
    sizes: Mapping[str, int] = {"events": 2, "polls": 2, "deletes": 0, "failures": 0, "goes_on": 0}
    durability: Durability = "every"
    more_flushes = 0
    """Before the log is closed."""
    modules = (*LOG_MODULES, "kvsm.core.log.follower")
    line_modules = ("kvsm.core.log.follower", "kvsm.core.log.reader")
    constants: Mapping[str, Any] = {
        "kvsm.core.log.reader:segment_paths": as_step("a listing of the directory", segment_paths),
        "kvsm.core.log.segment_file:segment_path": _stepped_segment_path,
    }
    notable: Sequence[str] = ("a reader goes on to a new segment",)

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes)
        self._disk = FaultyDisk(-1)

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "fdatasync": lambda descriptor: self._disk.fdatasync(descriptor),
            "ftruncate": lambda descriptor, size: self._disk.ftruncate(descriptor, size),
        }

    def body(self) -> None:
        self._disk = FaultyDisk(-1)
        self._appended, self._is_taken_back = 0, False
        with TemporaryDirectory(prefix="kvsm-threads-", dir=IN_MEMORY) as place:
            log = Path(place) / "log"
            writer = LogWriter(
                log,
                config=_CONFIG,
                snapshot=lambda: WholeState(_state(self._appended)),
                durability=self.durability,
                sync_interval_ms=0,
                sync_thread=True,
                segment_bytes=_SEGMENT_BYTES,
                max_bytes=_MAX_BYTES if self.size["deletes"] else None,
                on_failure="continue" if self.size["goes_on"] else "stop",
                clock=lambda: 7,
                run=bytes(range(16)),
            )
            if self.size["failures"]:
                most = 3 * self.size["events"] + 2
                self._disk.failing = self._disk.syncs + control().choose("the sync that fails", most)
            reader = _WatchedFollower(log, lambda: self._appended)
            following = ControlledThread(target=self._follow, name="reader", args=(reader,))
            following.start()
            self._write(writer)
            following.join()
            self._look(reader)
            if not self._disk.failed or (self.size["goes_on"] and not self._is_taken_back):
                reader.expect_all(self.size["events"], writer.failure)
            if reader.log.overtaken:
                control().note_reached("a reader is overtaken")

    def _write(self, writer: LogWriter) -> None:
        try:
            for seq in range(1, self.size["events"] + 1):
                self._appended = seq
                writer.append(RequestArrived(seq, seq, 0, f"r{seq}"))
                writer.flush()
            for _ in range(self.more_flushes):
                writer.flush()
            writer.close()
        except LogWriteFailed:
            if not self._disk.failed:
                raise
            control().note_reached("the writer stops")
            with suppress(LogWriteFailed):
                writer.close()

    def _follow(self, reader: _WatchedFollower) -> None:
        for _ in range(self.size["polls"]):
            control().reach("looks what is new")
            self._look(reader)

    def _look(self, reader: _WatchedFollower) -> None:
        try:
            reader.look()
        except EventsTakenBack:
            if not self._disk.failed:
                raise
            self._is_taken_back = True
            control().note_reached("what was read is taken back")


class SlowOpening(RotatedLog):
    """The same, and a thread makes the new segment, while another event goes to the one before it."""

    says = "a thread opens the next segment of a log while events and a reader go on"
    durability: Durability = "none"
    more_flushes = 2
    constants: Mapping[str, Any] = {**RotatedLog.constants, "kvsm.core.log.opening:AT_ONCE_BYTES": -1}
    notable = (*RotatedLog.notable, _HAS_BOTH)


class SyncedOpening(SlowOpening):
    """The same, with another thread that syncs, and any sync may fail."""

    says = "a thread opens the next segment of a log, another one syncs it, and any sync may fail"
    sizes: Mapping[str, int] = {**RotatedLog.sizes, "polls": 1, "failures": 1}
    durability: Durability = "interval"
    more_flushes = 4
    notable = (*SlowOpening.notable, "the writer stops", "what was read is taken back")


class DeletingLog(RotatedLog):
    """The same with a limit of bytes, so that the reader may come too late."""

    says = "a log begins a new segment for each event, and deletes old ones, while a reader follows it"
    sizes: Mapping[str, int] = {**RotatedLog.sizes, "events": 6, "deletes": 1}
    notable = (*RotatedLog.notable, "a reader is overtaken")


class ReadOnceLog(RotatedLog):
    """The same, and somebody reads the log once, as commands do: all of it up to some moment."""

    says = "a log begins a new segment for each event while somebody reads it once from its beginning"
    sizes: Mapping[str, int] = {**RotatedLog.sizes, "polls": 0}
    notable = ("a reader goes on to a new segment", "a reader ends before the log does", "a reader reads all")

    def _follow(self, reader: _WatchedFollower) -> None:
        log, last = LogReader(reader.log.directory), 0
        for segment in log.segments():
            if segment.head.seq:
                control().note_reached("a reader goes on to a new segment")
            for batch in segment.batches():
                if batch[0].seq != last + 1:
                    _fail(f"event {batch[0].seq} follows event {last}")
                last = batch[-1].seq
                control().reach("has read events")
            control().reach("has read a segment")
        is_whole = last == self.size["events"]
        if log.end is LogEnd.CLOSED and not is_whole:
            _fail(f"a reader comes to event {last}, and sees that the log was closed")
        if log.end not in (LogEnd.CLOSED, LogEnd.OPEN):
            _fail(f"a reader sees that the log ends as {log.end.value}")
        control().note_reached("a reader reads all" if is_whole else "a reader ends before the log does")


class FailingRotatedLog(RotatedLog):
    """The same, and any sync may fail."""

    says = "a log begins a new segment for each event, any sync may fail, and a reader follows it"
    sizes: Mapping[str, int] = {**RotatedLog.sizes, "failures": 1}
    notable = (*RotatedLog.notable, "the writer stops", "what was read is taken back")


class GoingOnLog(RotatedLog):
    """The same with `on_failure="continue"`: behind lost events a new segment begins with the state."""

    says = "a log begins a new segment for each event and behind each loss, and a reader follows it"
    sizes: Mapping[str, int] = {**RotatedLog.sizes, "failures": 1, "goes_on": 1}
    notable = (*RotatedLog.notable, "events are lost", "what was read is taken back")


class _WatchedFollower:
    """A follower whose news are checked: it tells of each event that is lost, and states are right.

    appended: returns the last event that was appended.
    """

    def __init__(self, directory: Path, appended: Callable[[], int]) -> None:
        self.log, self._appended = LogFollower(directory), appended
        self._next = 1

    def look(self) -> None:
        """Take what is new."""
        for news in self.log.poll():
            if not news.events:
                self._begin_segment(news)
            for event in news.events:
                if event.seq != self._next:
                    _fail(f"event {event.seq} comes, and {self._next} is next")
                self._next += 1
            if self._next - 1 > self._appended():
                _fail(f"event {self._next - 1} comes, which nobody has appended")

    def expect_all(self, last: int, failure: str | None) -> None:
        """This was the last event, and the log is closed. failure: why it may not be."""
        if self._next - 1 != last:
            _fail(f"the log ends after event {last}, and a reader came to event {self._next - 1}")
        if not self.log.closed and failure is None:
            _fail(f"the log was closed, and a reader sees that it ends as {self.log.end.value}")

    def _begin_segment(self, news: News) -> None:
        head, gap = news.segment.head, news.segment.gap
        if gap is not None and gap != (self._next, head.seq):
            _fail(f"events {gap[0]} to {gap[1]} are told to be lost, and {self._next} to {head.seq} are")
        if gap is None and head.seq + 1 > self._next:
            _fail(f"a segment begins with event {head.seq + 1}, and {self._next} is next")
        if head.seq + 1 < self._next:
            control().note_reached(_HAS_BOTH)
        if bytes(head.snapshot) != _state(head.seq):
            _fail(f"the state after event {head.seq} is {head.snapshot!r}")
        if gap is not None and not self.log.overtaken:
            control().note_reached("events are lost")
        if head.seq and gap is None:
            control().note_reached("a reader goes on to a new segment")
        self._next = max(self._next, head.seq + 1)


def _state(seq: int) -> bytes:
    """What stands for a snapshot after this event."""
    return f"after {seq}".encode() if seq else b""


def _fail(what: str) -> NoReturn:
    raise PropertyBroken(Property.EVENTS_ARE_STATE, what)
