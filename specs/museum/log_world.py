"""The world of a log on a disk that fails: the real writer, one process after another.

An engine appends, flushes and closes. Any write and any sync may fail. A sync that runs in a thread of its
own ends when an action says so, or when the writer waits for it. A process is killed, or the power is lost,
and the next one goes on behind what is left (`kvsm.core.log.continued`).

What is read then is what was appended, each event once and in order: events are state (S10). What is missing
is told:

- an event that a sync had made durable is there, whatever fails later;
- before a mark that says from which event on a log is broken, nothing is missing;
- a log that was closed well has all events but those that count as lost;
- the log stops, or has a gap, only if something has failed: progress (S9).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from kvsm.check.worlds.world import Action
from kvsm.core.log import LogDirectory, LogEnd, LogReader, LogWriter, WholeState, find_end
from kvsm.core.log.log_thread import _serve
from kvsm.errors import LogDamaged, LogError, LogWriteFailed, PropertyBroken
from kvsm.events import OffloadConfig, OffloadingEvent, RequestArrived
from kvsm.properties import Property
from museum.log_disk import LogDisk

_CONFIG = OffloadConfig(host_blocks=2, device_blocks=2)
_SNAPSHOT = bytes(700)
_LONG = 30
"""A log with this many events is left behind, for each end reads all of it."""
_ENDS = ("close", "kill", "lose_power")
_LIKELY = (*["append", "flush", "sync", "open"] * 4, *["fail_write", "fail_sync"] * 3, *_ENDS)


class LogOptions(NamedTuple):
    """How a log is written, as `LogWriter` takes it."""

    durability: str
    sync_thread: bool
    on_failure: str
    segment_bytes: int


class _HeldJobs:
    """In the place of the queue of a `LogThread`. A job waits here until it may run, or the writer waits."""

    def __init__(self) -> None:
        self.held: Any = None

    def put(self, job: Any) -> None:
        """The writer begins a job, or waits for the one that it began."""
        if job is None or job.ended.is_set():
            return
        if self.held is job:
            self.run()
        else:
            self.held = job

    def run(self) -> None:
        """What the thread does with it."""
        queue: SimpleQueue[Any] = SimpleQueue()
        for one in (self.held, None):
            queue.put(one)
        self.held = None
        _serve(queue)


class _Found(NamedTuple):
    """What a reader finds. gaps: the numbers of the events that it tells as lost."""

    events: list[OffloadingEvent]
    gaps: set[int]
    end: LogEnd
    broken_from: int | None

    @property
    def last(self) -> int:
        """The last event that is there or told as lost."""
        return max([0, *self.gaps, *(event.seq for event in self.events)])


class FailingLogWorld:
    """A `World`. Two in which the same actions happened are equal."""

    events: tuple[OffloadingEvent, ...] = ()
    """Empty: the log is on disk."""
    check_every = 50

    def __init__(self, options: LogOptions) -> None:
        place = TemporaryDirectory(prefix="kvsm-museum-")
        weakref.finalize(self, place.cleanup)
        self._options, self._root, self._logs = options, Path(place.name), 0
        self._disk, self._syncs, self._openings = LogDisk(), _HeldJobs(), _HeldJobs()
        self._appended: list[OffloadingEvent] = []
        """All events of this log; the first has number 1."""
        self._durable = 0
        """The last event that a good sync has covered."""
        self._writer: LogWriter | None = None
        self._stopped = False
        self._log = self._new_place()
        with self._disk.attached():
            self._do_start()

    def _new_place(self) -> Path:
        self._logs += 1
        return self._root / f"log-{self._logs}"

    # What may happen.

    def actions(self) -> list[Action]:
        if self._writer is None:
            return [("start",)]
        ends: list[Action] = [("close",), ("kill",), ("lose_power", 0)]
        if self._stopped:
            return ends
        held: list[Action] = [("sync",)] if self._syncs.held is not None else []
        held += [("open",)] if self._openings.held is not None else []
        return [
            ("append", 20),
            ("append", 900),
            ("flush",),
            ("fail_write", 0),
            ("fail_sync", 0),
            *held,
            *ends,
        ]

    def draw(self, random: Random) -> Action:
        name = random.choice(_ENDS if self._stopped else _LIKELY) if self._writer is not None else "start"
        if name == "append":
            return (name, random.choice((20, 300, 900)))
        return (name, random.randrange(100)) if name in ("fail_write", "fail_sync", "lose_power") else (name,)

    def do(self, action: Action) -> bool:
        name, *numbers = action
        if (name == "start") != (self._writer is None):
            return False
        if self._stopped and name not in ("close", "kill", "lose_power"):
            return False
        move: Callable[..., bool] = getattr(self, f"_do_{name}")
        with self._disk.attached():
            done = move(*numbers)
        self._note_durable()
        return done

    # A process writes.

    def _do_append(self, size: int) -> bool:
        seq = len(self._appended) + 1
        event = RequestArrived(seq, seq, 0, f"r{seq}".ljust(size, "-"))
        self._appended.append(event)
        self._call(lambda writer: writer.append(event))
        return True

    def _do_flush(self) -> bool:
        self._call(lambda writer: writer.flush())
        return True

    def _do_sync(self) -> bool:
        """The sync in the background ends."""
        if self._syncs.held is None:
            return False
        self._syncs.run()
        return True

    def _do_open(self) -> bool:
        """What makes the next segment in the background ends."""
        if self._openings.held is None:
            return False
        self._openings.run()
        return True

    def _do_fail_write(self, which: int) -> bool:
        self._disk.arm("write", which)
        return True

    def _do_fail_sync(self, which: int) -> bool:
        self._disk.arm("sync", which)
        return True

    def _call(self, call: Callable[[LogWriter], None]) -> bool:
        """Returns whether the writer goes on. It stops only if something has failed, and if it may."""
        assert self._writer is not None
        try:
            call(self._writer)
        except LogWriteFailed as failure:
            if not self._disk.failed:
                raise PropertyBroken(
                    Property.PROGRESS, f"the log stops without a reason: {failure}"
                ) from failure
            self._stopped = True
            return False
        return True

    def _note_durable(self) -> None:
        if self._writer is not None and not self._stopped:
            segment = self._writer._place.segment
            if segment.loss is None:
                self._durable = max(self._durable, segment.synced.seq)

    # It ends.

    def _do_close(self) -> bool:
        """The engine ends well, and right after that the power is lost."""
        writer = self._writer
        assert writer is not None
        good = self._call(lambda one: one.close())
        self._note_durable()
        with suppress(LogWriteFailed):
            writer.close()
        self._end(writer)
        self._disk.lose_power(self._log, Random(len(self._appended)))
        found = self._look()
        if good and found.end is LogEnd.CLOSED and found.last != len(self._appended):
            message = f"a log that was closed ends with event {found.last} of {len(self._appended)}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        return True

    def _do_kill(self) -> bool:
        """The process is killed. Nothing that was written is lost."""
        writer = self._writer
        assert writer is not None
        loss, place = writer._place.segment.loss, writer._place
        written = place.first - 1 if loss is None else loss.first - 1
        self._end(writer)
        found = self._look()
        if not self._stopped and found.last < written:
            message = f"{written} events were written, and the log ends with event {found.last}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        return True

    def _do_lose_power(self, which: int) -> bool:
        writer = self._writer
        assert writer is not None
        self._end(writer)
        self._disk.lose_power(self._log, Random(which))
        self._look()
        return True

    def _end(self, writer: LogWriter) -> None:
        self._syncs.held = self._openings.held = None
        writer._place.segment.close()
        writer._claimed.close()
        self._writer = None
        self._disk.forget_faults()

    def _look(self) -> _Found:
        """Read the log, and compare."""
        found = self._read()
        numbers = [event.seq for event in found.events]
        if found.events != [self._appended[number - 1] for number in numbers]:
            raise PropertyBroken(Property.EVENTS_ARE_STATE, f"events {numbers} are read, and some are others")
        known = [*sorted(found.gaps), *numbers]
        if sorted(known) != list(range(1, found.last + 1)):
            message = f"of events 1 to {found.last}, {numbers} are read and {sorted(found.gaps)} told as lost"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        if found.gaps and not self._disk.failed:
            raise PropertyBroken(Property.PROGRESS, f"events {sorted(found.gaps)} are lost without a reason")
        if (
            found.broken_from is not None
            and found.end is LogEnd.BROKEN
            and found.last < found.broken_from - 1
        ):
            message = f"the log is broken from event {found.broken_from} on, and ends with event {found.last}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        if found.last < self._durable:
            message = f"event {self._durable} was durable, and the log ends with event {found.last}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        return found

    def _read(self) -> _Found:
        reader, events = LogReader(self._log), list[OffloadingEvent]()
        try:
            for segment in reader.segments():
                for batch in segment.batches():
                    events += batch
        except LogDamaged as error:
            message = f"the log is damaged behind {len(events)} events, and nobody was told: {error}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message) from error
        gaps = {seq for first, last in reader.gaps for seq in range(first, last + 1)}
        return _Found(events, gaps, reader.end, reader.broken_from)

    # The next one begins.

    def _do_start(self) -> bool:
        """Behind what is left, or in another directory if nobody knows the state there, or if it is long."""
        found = self._look() if self._log.is_dir() else None
        where: Any = None
        if found is not None and found.last < _LONG:
            claimed = LogDirectory(self._log, durable=False)
            try:
                where = find_end(claimed)
            except LogError as error:
                claimed.close()
                if found.end is not LogEnd.BROKEN:
                    message = f"the log cannot be continued: {error}"
                    raise PropertyBroken(Property.PROGRESS, message) from error
        if where is None:
            self._log = self._new_place() if found is not None else self._log
            self._appended = []
        else:
            del self._appended[where.seq :]
        self._durable, self._stopped = len(self._appended), False
        options = self._options
        writer: Any = LogWriter(
            self._log if where is None else where,
            config=_CONFIG,
            snapshot=lambda: WholeState(_SNAPSHOT),
            durability=options.durability,  # type: ignore[arg-type]
            sync_interval_ms=0,
            sync_thread=options.sync_thread,
            segment_bytes=options.segment_bytes,
            on_failure=options.on_failure,  # type: ignore[arg-type]
            clock=lambda: 7,
            run=bytes([self._logs]) * 16,
        )
        for thread, held in ((writer._syncing.thread, self._syncs), (writer._opening_thread, self._openings)):
            thread._queue, thread._thread = held, held
        self._writer = writer
        if where is None:
            self._disk.failed = 0
        return True

    # What must hold.

    def check(self) -> None:
        """All is watched at each end."""

    def wind_down(self) -> Action | None:
        return ("close",) if self._writer is not None else None

    def describe(self) -> dict[str, str]:
        return {
            "events": str(len(self._appended)),
            "durable": str(self._durable),
            "writer": "none" if self._writer is None else self._writer.failure or "writes",
        }

    def fingerprint(self) -> bytes:
        return repr((self.describe(), self._logs, self._stopped, self._disk.failed)).encode()


def drawn_log(random: Random) -> FailingLogWorld:
    """A log that is synced. Without syncs nothing is promised."""
    options = LogOptions(
        durability=random.choice(("interval", "interval", "interval", "every")),
        sync_thread=random.random() < 0.9,
        on_failure=random.choice(("stop", "continue")),
        segment_bytes=random.choice((200, 2_000, 1 << 20)),
    )
    return FailingLogWorld(options)
