"""Scenarios of the log: a writer that syncs in a thread of its own, on a disk that may fail, and a reader."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvsm.check.threads.control import control
from kvsm.check.threads.faulty_disk import FaultyDisk
from kvsm.check.threads.primitives import ControlledThread
from kvsm.check.threads.scenario import ThreadScenario
from kvsm.core.log import EventsTakenBack, LogFollower, LogReader, LogWriter, WholeState
from kvsm.core.log.segment_file import SegmentFile
from kvsm.errors import LogWriteFailed, PropertyBroken
from kvsm.events import OffloadConfig, OffloadingEvent, RequestArrived
from kvsm.properties import Property

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where the files of a run lie. The disk that syncs them is simulated."""

LOG_MODULES = (
    "kvsm.core.log.continued",
    "kvsm.core.log.frames",
    "kvsm.core.log.log_thread",
    "kvsm.core.log.opening",
    "kvsm.core.log.reader",
    "kvsm.core.log.retention",
    "kvsm.core.log.segment_file",
    "kvsm.core.log.segment_maker",
    "kvsm.core.log.writer",
)
"""The modules under test of each scenario of the log."""

_CONFIG = OffloadConfig(host_blocks=8, device_blocks=8)


class SyncedLog(ThreadScenario):
    """An engine appends, flushes and closes. Every sync of the log may fail; somebody follows the log."""

    says = "a log is written and synced in a thread of its own while a reader follows it, and a sync may fail"
    sizes: Mapping[str, int] = {"events": 2, "polls": 2, "goes_on": 0, "segments": 0}
    modules = LOG_MODULES
    line_modules = (
        "kvsm.core.log.segment_file",
        "kvsm.core.log.log_thread",
    )
    notable = (
        "a flush comes during a sync",
        "a sync fails",
        "all syncs are good",
        "what was read is taken back",
    )

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes)
        self._disk = FaultyDisk(0)

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "fdatasync": lambda descriptor: self._disk.fdatasync(descriptor),
            "ftruncate": lambda descriptor, size: self._disk.ftruncate(descriptor, size),
        }

    def body(self) -> None:
        run = control()
        self._disk = FaultyDisk(-1)
        with TemporaryDirectory(prefix="kvsm-threads-", dir=IN_MEMORY) as place:
            log = Path(place) / "log"
            writer = LogWriter(
                log,
                config=_CONFIG,
                snapshot=lambda: WholeState(b"state"),
                sync_interval_ms=0,
                sync_thread=True,
                segment_bytes=64 if self.size["segments"] else 1 << 20,
                on_failure="continue" if self.size["goes_on"] else "stop",
                clock=lambda: 7,
                run=bytes(range(16)),
            )
            # Its beginning is synced before anything follows.
            most = self.size["events"] + 3
            self._disk.failing = self._disk.syncs + run.choose("the sync that fails, or none", most)
            events: list[OffloadingEvent] = [
                RequestArrived(seq, seq, 0, f"r{seq}") for seq in range(1, self.size["events"] + 1)
            ]
            appended: list[OffloadingEvent] = []
            reader = ControlledThread(target=self._follow, name="reader", args=(log, appended, events))
            reader.start()
            failure = self._write(writer, appended, events)
            reader.join()
            self._check_end(log, writer, events, failure)

    def _write(
        self, writer: LogWriter, appended: list[OffloadingEvent], events: list[OffloadingEvent]
    ) -> LogWriteFailed | None:
        """Append and flush each event, then close. Returns the failure that the engine was told."""
        disk = self._disk
        try:
            for event in events:
                appended.append(event)
                writer.append(event)
                writer.flush()
                if disk.syncs > len(disk.good) + len(disk.bad):
                    control().note_reached("a flush comes during a sync")
                self._check_claim(writer._place.segment)
            writer.close()
        except LogWriteFailed as failure:
            with suppress(LogWriteFailed):
                writer.close()
            return failure
        return None

    def _check_claim(self, segment: SegmentFile) -> None:
        """What the writer takes for durable is. Readers take a torn end behind it for a power loss."""
        claimed = segment.synced.offset
        durable = self._disk.durable.get(os.stat(segment.path).st_ino, 0)
        if claimed > durable:
            raise PropertyBroken(
                Property.FAILURE_IS_NOT_SUCCESS,
                f"{claimed} bytes of the log count as durable, and {durable} are",
            )

    def _follow(self, log: Path, appended: list[OffloadingEvent], events: list[OffloadingEvent]) -> None:
        """A reader, in a thread of its own: it sees what was appended, each event once and in order."""
        follower, seen = LogFollower(log), list[OffloadingEvent]()
        for _ in range(self.size["polls"]):
            control().reach("looks what is new")
            try:
                for news in follower.poll():
                    seen += news.events
            except EventsTakenBack:
                if not self._disk.failed:
                    raise
                control().note_reached("what was read is taken back")
                return
            if seen != events[: len(seen)] and not self._disk.failed:
                raise PropertyBroken(
                    Property.EVENTS_ARE_STATE, f"a reader sees events {[one.seq for one in seen]}"
                )
            if len(seen) > len(appended):
                raise PropertyBroken(Property.EVENTS_ARE_STATE, "a reader sees what was not appended")

    def _check_end(
        self,
        log: Path,
        writer: LogWriter,
        events: list[OffloadingEvent],
        failure: LogWriteFailed | None,
    ) -> None:
        disk, read = self._disk, LogReader(log)
        kept = [one for segment in read.segments() for batch in segment.batches() for one in batch]
        control().note_reached("a sync fails" if disk.failed else "all syncs are good")
        if disk.failed and failure is None and not self.size["goes_on"]:
            raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, "a sync failed, and nobody was told")
        if failure is not None and not disk.failed:
            raise PropertyBroken(Property.PROGRESS, f"the log stops without a reason: {failure}")
        lost = {seq for first, last in read.gaps for seq in range(first, last + 1)}
        whole = [one for one in events if one.seq not in lost]
        if not disk.failed and kept != events:
            raise PropertyBroken(
                Property.EVENTS_ARE_STATE, f"the log has {len(kept)} of {len(events)} events"
            )
        if kept != whole[: len(kept)]:
            raise PropertyBroken(
                Property.EVENTS_ARE_STATE, f"the log keeps events {[one.seq for one in kept]}"
            )
        if not disk.failed and read.end.value != "closed":
            raise PropertyBroken(Property.PROGRESS, f"the log ends as {read.end.value}")
        if self.size["goes_on"] and failure is None and len(kept) + writer.dropped != len(events):
            raise PropertyBroken(
                Property.FAILURE_IS_NOT_SUCCESS,
                f"{len(kept)} events are kept and {writer.dropped} count as lost, of {len(events)}",
            )
