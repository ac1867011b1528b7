"""The world of a log on a failing disk: the real writer, one process after another.

An engine appends, flushes and closes. Any write and any sync may fail. A sync in a background thread ends
when an action says so, or when the writer waits for it. A process is killed, or the power is lost, and the
next process continues after the last event that is left (`kvsm.core.log.continued`).

A reader then finds the appended events, each once and in order: events are state (S10). Missing events are
reported:

- an event that a sync has made durable is found, whatever fails later;
- after a few flushes without new events, all events are durable: progress (S9);
- if a mark says from which event on a log is broken, all earlier events are found;
- a log that was closed normally has all events except those that it reports as lost;
- the log stops, or has a gap, only if a system call has failed: progress (S9);
- the first events are missing only if the log has a limit of bytes, and an old segment is deleted only when
  the names of all newer ones are on the disk.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any, Literal, NamedTuple

import msgspec

from kvsm.check.worlds.simulated_disk import SimulatedDisk
from kvsm.check.worlds.world import Action
from kvsm.check.worlds.world_files import without_directory, world_directory
from kvsm.core.log import LogDirectory, LogEnd, LogReader, LogWriter, WholeState, find_end
from kvsm.core.log.log_thread import _serve
from kvsm.errors import ConfigError, LogDamaged, LogError, LogWriteFailed, PropertyBroken
from kvsm.events import OffloadConfig, OffloadingEvent, RequestArrived
from kvsm.properties import Property

_CONFIG = OffloadConfig(host_blocks=2, device_blocks=2)
_SNAPSHOT = bytes(700)
_LONG = 30
"""A log with this many events is not continued: each end of a process reads the whole log."""
_FEWEST_BYTES, _MOST_BYTES = 200, 1 << 20
"""The range of a segment's size."""
_SIZES = (20, 300, 900)
"""The sizes of events."""
_SIZES_IN_A_LIMIT = (20, 20, 300)
"""The sizes of events in a log with a limit of bytes."""
_MAX_BYTES = 12_000
"""The drawn limit of bytes: room for several small segments."""
_MOST_UNWRITTEN = 4
"""The most events between two flushes in a log with a limit of bytes: together they must fit in it."""
_LEAST_BYTES = 8_000
"""The least limit, besides two segments: room for four heads, and for the events between two flushes."""
_IDLE_FLUSHES = 12
"""More flushes than a writer needs to sync, or to open a segment and sync its name."""
_SEEDS = 100
"""The number of seeds from which faults and power losses are drawn."""
_ENDS = ("close", "kill", "lose_power")
_WRITES = ("append", "flush", "sync", "open")
_LIKELY = (*_WRITES * 4, *["fail_write", "fail_sync"] * 3, "rest", *_ENDS)
_LIKELY_IN_LONG_LIVES = (*_WRITES * 12, "fail_write", "fail_sync", "rest", "lose_power", *_ENDS)


class LogWorldOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of `LogWriter`. A log without syncs promises no durability. Raises `ConfigError`.

    long_lives: whether processes write for a long time, so that a log with `max_bytes` deletes old segments.
    """

    durability: Literal["interval", "every"] = "interval"
    sync_thread: bool = True
    on_failure: Literal["stop", "continue"] = "stop"
    segment_bytes: int = 1 << 20
    max_bytes: int | None = None
    long_lives: bool = False

    def __post_init__(self) -> None:
        if not _FEWEST_BYTES <= self.segment_bytes <= _MOST_BYTES:
            message = f"it must be from {_FEWEST_BYTES} to {_MOST_BYTES:,}"
            raise ConfigError(f"segment_bytes is {self.segment_bytes}; {message}")
        least = _LEAST_BYTES + 2 * self.segment_bytes
        if self.max_bytes is not None and self.max_bytes < least:
            raise ConfigError(f"max_bytes is {self.max_bytes}; it must be {least:,} or more, or null")


def draw_log_options(random: Random) -> LogWorldOptions:
    """Draw how the log is written."""
    segment_bytes = random.choice((200, 2_000, 1 << 20))
    return LogWorldOptions(
        durability=random.choice(("interval", "interval", "interval", "every")),
        sync_thread=random.random() < 0.9,
        on_failure=random.choice(("stop", "continue")),
        segment_bytes=segment_bytes,
        max_bytes=_MAX_BYTES if segment_bytes < _MAX_BYTES and random.random() < 0.5 else None,
        long_lives=random.random() < 0.5,
    )


class _HeldJobs:
    """Replaces a `LogThread`'s queue: holds a job until an action runs it or the writer waits for it."""

    def __init__(self) -> None:
        self.held: Any = None

    def put(self, job: Any) -> None:
        """Hold a new job; run it at once if it is held already, because then the writer waits for it."""
        if job is None or job.ended.is_set():
            return
        if self.held is job:
            self.run()
        else:
            self.held = job

    def run(self) -> None:
        """Run the held job as the thread would."""
        queue: SimpleQueue[Any] = SimpleQueue()
        for job in (self.held, None):
            queue.put(job)
        self.held = None
        _serve(queue)


class _ReadLog(NamedTuple):
    """The log as a reader finds it.

    first: the number of its first event; the segments with earlier events were deleted.
    gaps: the numbers of the events that the reader reports as lost.
    """

    first: int
    events: list[OffloadingEvent]
    gaps: set[int]
    end: LogEnd
    broken_from: int | None

    @property
    def last(self) -> int:
        """The number of the last event that is read or reported as lost."""
        return max([self.first - 1, *self.gaps, *(event.seq for event in self.events)])


class FailingLogWorld:
    """A `World`; worlds with the same options and the same actions are equal."""

    events: tuple[OffloadingEvent, ...] = ()
    """Empty: the log is on disk."""
    check_every = 50

    def __init__(self, options: LogWorldOptions) -> None:
        place = world_directory()
        self._writer: LogWriter | None = None
        weakref.finalize(self, place.cleanup)
        self._options, self._root, self._logs = options, Path(place.name), 0
        self._disk, self._syncs, self._openings = SimulatedDisk(loses_names=True), _HeldJobs(), _HeldJobs()
        self._appended: list[OffloadingEvent] = []
        """All events of this log; the first has number 1."""
        self._durable = 0
        """The number of the last event that a successful sync covers."""
        self._stopped = False
        self._log = self._new_place()
        self._reached: set[str] = set()
        with self._disk.attached():
            self._do_start()

    def __del__(self) -> None:
        writer: LogWriter | None = getattr(self, "_writer", None)
        if writer is not None:
            self._end(writer)

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
            ("append", self._sizes[0]),
            ("append", self._sizes[-1]),
            ("flush",),
            ("rest",),
            ("fail_write", 0),
            ("fail_sync", 0),
            *held,
            *ends,
        ]

    def draw(self, random: Random) -> Action:
        likely = _LIKELY_IN_LONG_LIVES if self._options.long_lives else _LIKELY
        name = random.choice(_ENDS if self._stopped else likely) if self._writer is not None else "start"
        if name == "append":
            return (name, random.choice(self._sizes))
        seeded = name in ("fail_write", "fail_sync", "lose_power")
        return (name, random.randrange(_SEEDS)) if seeded else (name,)

    def do(self, action: Action) -> bool:
        name, *numbers = action
        if (name == "start") != (self._writer is None):
            return False
        if self._stopped and name not in _ENDS:
            return False
        move: Callable[..., bool] = getattr(self, f"_do_{name}")
        with self._disk.attached():
            done = move(*numbers)
        if self._disk.early_deletion:
            raise PropertyBroken(Property.EVENTS_ARE_STATE, self._disk.early_deletion)
        self._note_durable()
        return done

    # A process writes.

    def _do_append(self, size: int) -> bool:
        assert self._writer is not None
        unwritten = len(self._writer._place.events)
        if size not in self._sizes or (self._options.max_bytes and unwritten >= _MOST_UNWRITTEN):
            return False
        seq = len(self._appended) + 1
        event = RequestArrived(seq, seq, 0, f"r{seq}".ljust(size, "-"))
        self._appended.append(event)
        self._call(lambda writer: writer.append(event))
        return True

    @property
    def _sizes(self) -> tuple[int, ...]:
        """The sizes of events."""
        return _SIZES if self._options.max_bytes is None else _SIZES_IN_A_LIMIT

    def _do_flush(self) -> bool:
        self._call(lambda writer: writer.flush())
        return True

    def _do_rest(self) -> bool:
        """Flush often enough, as an idle engine does in its steps, and end the jobs that a flush begins."""
        for _ in range(_IDLE_FLUSHES):
            if not self._call(lambda writer: writer.flush()):
                return True
            for jobs in (self._syncs, self._openings):
                if jobs.held is not None:
                    jobs.run()
        self._note_durable()
        assert self._writer is not None
        if self._writer._place.segment.loss is None and self._durable < len(self._appended):
            what = (
                f"event {self._durable + 1} is not durable after {_IDLE_FLUSHES} flushes without new events"
            )
            raise PropertyBroken(Property.PROGRESS, what)
        return True

    def _do_sync(self) -> bool:
        """End the background sync."""
        if self._syncs.held is None:
            return False
        self._syncs.run()
        return True

    def _do_open(self) -> bool:
        """End the background job that makes the next segment."""
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
        """Make a call on the writer. Returns whether the writer still works.

        It may stop only if a system call has failed.
        """
        assert self._writer is not None
        try:
            call(self._writer)
        except LogWriteFailed as failure:
            if not self._disk.failed:
                what = without_directory(failure, self._root)
                raise PropertyBroken(
                    Property.PROGRESS, f"the log stops without a reason: {what}"
                ) from failure
            self._stopped = True
            return False
        return True

    def _note_durable(self) -> None:
        if self._writer is not None and not self._stopped:
            segment = self._writer._place.segment
            if segment.loss is None and segment.name_is_durable:
                self._durable = max(self._durable, segment.synced.seq)

    # A process ends.

    def _do_close(self) -> bool:
        """Close the log normally, and cut the power right after."""
        writer = self._writer
        assert writer is not None
        good = self._call(lambda open_writer: open_writer.close())
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
        """Kill the process. All written events survive."""
        writer = self._writer
        assert writer is not None
        loss, place = writer._place.segment.loss, writer._place
        written = place.first - 1 if loss is None else loss.first - 1
        self._end(writer)
        found = self._look()
        if not self._stopped and found.last < written:
            message = f"{written} events were written, but the log ends with event {found.last}"
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

    def _look(self) -> _ReadLog:
        """Read the log, and compare it with the appended events."""
        found = self._read()
        self._reached.add(f"a log ends as {found.end.name}{', with a gap' * bool(found.gaps)}")
        numbers = [event.seq for event in found.events]
        if found.events != [self._appended[number - 1] for number in numbers]:
            raise PropertyBroken(Property.EVENTS_ARE_STATE, f"events {numbers} are read, but some differ")
        accounted = [*sorted(found.gaps), *numbers]
        if sorted(accounted) != list(range(found.first, found.last + 1)):
            gaps, which = sorted(found.gaps), f"{found.first} to {found.last}"
            message = f"of events {which}, {numbers} are read and {gaps} reported as lost"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        if found.first > 1 and self._options.max_bytes is None:
            message = f"no segment was deleted, but the log begins with event {found.first}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        if found.gaps and not self._disk.failed:
            raise PropertyBroken(Property.PROGRESS, f"events {sorted(found.gaps)} are lost without a reason")
        if (
            found.broken_from is not None
            and found.end is LogEnd.BROKEN
            and found.last < found.broken_from - 1
        ):
            message = f"the log is broken from event {found.broken_from} on, but ends with event {found.last}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        if found.last < self._durable:
            message = f"event {self._durable} was durable, but the log ends with event {found.last}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
        return found

    def _read(self) -> _ReadLog:
        events, firsts = list[OffloadingEvent](), list[int]()
        try:
            reader = LogReader(self._log)
            for segment in reader.segments():
                firsts.append(segment.head.seq + 1)
                for batch in segment.batches():
                    events += batch
        except LogDamaged as error:
            what = without_directory(error, self._root)
            message = f"the log is damaged after {len(events)} events, without a report: {what}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message) from error
        except LogError as error:
            message = f"no log is left: {without_directory(error, self._root)}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message) from error
        gaps = {seq for first, last in reader.gaps for seq in range(first, last + 1)}
        return _ReadLog(min(firsts, default=1), events, gaps, reader.end, reader.broken_from)

    # The next process begins.

    def _do_start(self) -> bool:
        """Continue the log, or begin one in a new directory if the log is too long or cannot be continued."""
        found = self._look() if self._log.is_dir() else None
        where: Any = None
        if found is not None and len(found.events) < _LONG:
            claimed = LogDirectory(self._log, durable=False)
            try:
                where = find_end(claimed)
            except LogError as error:
                claimed.close()
                if found.end is not LogEnd.BROKEN:
                    message = f"the log cannot be continued: {without_directory(error, self._root)}"
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
            durability=options.durability,
            sync_interval_ms=0,
            sync_thread=options.sync_thread,
            segment_bytes=options.segment_bytes,
            max_bytes=options.max_bytes,
            on_failure=options.on_failure,
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
        """Do nothing: the log is checked at each end of a process."""

    def wind_down(self) -> Action | None:
        return ("close",) if self._writer is not None else None

    def reached(self) -> list[str]:
        """How the logs of this world have ended, for the corpus."""
        return sorted(self._reached)

    def describe(self) -> dict[str, str]:
        return {
            "events": str(len(self._appended)),
            "durable": str(self._durable),
            "writer": "none" if self._writer is None else self._writer.failure or "writes",
        }

    def fingerprint(self) -> bytes:
        return repr((self.describe(), self._logs, self._stopped, self._disk.failed)).encode()
