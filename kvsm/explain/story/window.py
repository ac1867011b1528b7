"""Parse `--since` and `--until`, and find the part of a log between them.

    point_of("+12.5s")                                   # 12.5 s after the first event of the log
    find_window(LogReader("log"), point_of("1200"), None)    # Window(first=1200, last=None)

A point is an event number, a time after the start of the log, or a UTC time. A window is a range of event
numbers, so a time is converted to an event: `--since` to the first event at or after it, `--until` to the
event before the first later one. If a clock was set back inside the log, the first event that fits counts.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol

from kvsm.core.log import LogReader
from kvsm.errors import ConfigError, LogError
from kvsm.events import OffloadingEvent
from kvsm.explain.story.times import moment, utc


class PointUnit(Enum):
    """The unit in which a point of a log is given."""

    EVENT = "event number"
    AFTER_START = "nanoseconds after the first event"
    UTC = "Unix time in nanoseconds"


class LogPoint(NamedTuple):
    """A point of a log: `value` in `unit`."""

    unit: PointUnit
    value: int


class Window(NamedTuple):
    """Events `first` to `last` of a log, both included. None: from its beginning, to its end."""

    first: int | None = None
    last: int | None = None

    def __contains__(self, seq: object) -> bool:
        """Whether the event of this number is in the window."""
        assert isinstance(seq, int)
        return (self.first is None or self.first <= seq) and (self.last is None or seq <= self.last)


EVERYTHING = Window()
"""The window that covers a whole log."""


_UNITS_NS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}
_AFTER = re.compile(r"\+(\d{1,12}(?:\.\d{1,9})?)(ms|s|min|m|h)")
_UTC = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z?")
_EVENT = re.compile(r"\d{1,18}")
_FORMS = "an event number (1200), a time after the first event (+12.5s), or UTC (2026-11-22T11:04:29)"


def point_of(text: str) -> LogPoint:
    """Parse a point of a log, as `_FORMS` describes it. Raises `ConfigError` if `text` has another form."""
    if _EVENT.fullmatch(text) and int(text):
        return LogPoint(PointUnit.EVENT, int(text))
    if found := _AFTER.fullmatch(text):
        return LogPoint(PointUnit.AFTER_START, int(Decimal(found[1]) * _UNITS_NS[found[2]]))
    if found := _UTC.fullmatch(text):
        try:
            seconds = datetime.fromisoformat(found[1]).replace(tzinfo=timezone.utc).timestamp()
        except ValueError as error:
            raise ConfigError(f"{text!r} is no time: {error}") from None
        return LogPoint(PointUnit.UTC, int(seconds) * 10**9 + int((found[2] or "0").ljust(9, "0")))
    raise ConfigError(f"{text!r} names no point of a log; give {_FORMS}")


class EventTimes(Protocol):
    """Finds the event at a point of a log.

    directory: the log's directory.
    first: number of the log's first event. began_ns: its time (Unix time, ns).
    """

    directory: Path
    first: int
    began_ns: int

    def first_from(self, point: LogPoint) -> int | None:
        """The number of the first event at or after `point`, an event number or a UTC time; None: there is
        none."""

    def last(self) -> tuple[int, int]:
        """The number and the time of the log's last event."""


def find_window(reader: LogReader, since: LogPoint | None, until: LogPoint | None) -> Window:
    """The window from `since` to `until`. Reads the first event of each segment, and at most two segments.

    since, until: None: no limit.

    Raises `LogError` if the window has no event of the log, and `LogDamaged` if a part read is damaged.
    """
    if since is None and until is None:
        return Window()
    return window_between(_ReaderTimes(reader), since, until)


def began_ns(reader: LogReader) -> int:
    """The wall time of the first event of a log (Unix time in ns). Raises `LogError` if it has none."""
    for segment in LogReader(reader.directory).segments():
        for event in segment.events():
            return event.wall_ns
    raise LogError(f"{reader.directory}: there is no whole event in this log")


def window_between(times: EventTimes, since: LogPoint | None, until: LogPoint | None) -> Window:
    """As `find_window`, with any source of times."""
    first = last = None
    if since is not None:
        first = times.first_from(_absolute(since, times.began_ns))
        if first is None:
            raise LogError(f"{times.directory}: no event is at or after --since; {_span(times)}")
    if until is not None:
        last = _last_until(times, _absolute(until, times.began_ns))
        if last is not None and last < (first or times.first):
            what = "--until is before --since" if since is not None else "no event is at or before --until"
            raise LogError(f"{times.directory}: {what}; {_span(times)}")
    return Window(first, last)


class _ReaderTimes:
    """The times of a log as logged. Reads only the first event of each segment. If the clock was set back,
    the first event at or after the time counts.
    """

    def __init__(self, reader: LogReader) -> None:
        self.directory, self._reader = reader.directory, reader
        self._starts: list[tuple[int, int]] = []
        """The number and the time of the first event of each segment."""
        for segment in reader.segments():
            for event in segment.events():
                self._starts.append((event.seq, event.wall_ns))
                break
        if not self._starts:
            raise LogError(f"{reader.directory}: there is no whole event in this log")
        self.first, self.began_ns = self._starts[0]

    def first_from(self, point: LogPoint) -> int | None:
        """Read from the last segment that begins before `point` and before the clock was first set back."""
        begin: tuple[int, int] | None = None
        for start in self._starts:
            if _measure(point, start) >= point.value or (begin is not None and start[1] < begin[1]):
                break
            begin = start
        for segment in self._reader.segments(None if begin is None else begin[0]):
            for event in segment.events():
                if _measure(point, (event.seq, event.wall_ns)) >= point.value:
                    return event.seq
        return None

    def last(self) -> tuple[int, int]:
        """Read the whole log."""
        last: OffloadingEvent | None = None
        for segment in self._reader.segments():
            for batch in segment.batches():
                last = batch[-1]
        assert last is not None
        return last.seq, last.wall_ns


def _absolute(point: LogPoint, began: int) -> LogPoint:
    if point.unit is PointUnit.AFTER_START:
        return LogPoint(PointUnit.UTC, began + point.value)
    return point


def _measure(point: LogPoint, start: tuple[int, int]) -> int:
    return start[0] if point.unit is PointUnit.EVENT else start[1]


def _last_until(times: EventTimes, point: LogPoint) -> int | None:
    """The number of the last event at or before `point`; None if no event is later than `point`."""
    if point.unit is PointUnit.EVENT:
        return point.value
    later = times.first_from(LogPoint(point.unit, point.value + 1))
    return None if later is None else later - 1


def _span(times: EventTimes) -> str:
    """Where the log begins and ends, for a message."""
    last, ended_ns = times.last()
    began, ended = utc(times.began_ns), moment(ended_ns, times.began_ns)
    return f"it has events {times.first} to {last}, from {began} to {ended}"
