"""Format times for people: wall time in UTC, seconds after the start of a log, and durations.

The log holds Unix time in nanoseconds. A virtual clock counts from 0 instead: its times have no date, and are
shown since the start. `moment` and `after_start` return the forms that `--since` and `--until` accept. They
truncate to milliseconds instead of rounding, so that an event is found with `--since` and its printed time.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MS = 1_000_000
_S = 1_000 * _MS
_MINUTE, _HOUR, _DAY = 60 * _S, 3600 * _S, 86_400 * _S


VIRTUAL_NS = 365 * _DAY
"""Earlier times (ns) are those of a virtual clock: no log is as old as 1971."""


def utc(ns: int) -> str:
    """Wall time as `2026-11-22T11:04:29.123Z`, or `12.345s of a virtual clock`.

    ns: Unix time (ns).
    """
    if ns < VIRTUAL_NS:
        return f"{after_start(ns, 0).removeprefix('+')} of a virtual clock"
    moment = _EPOCH + timedelta(microseconds=ns // 1000)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03}Z"


def after_start(ns: int, began_ns: int) -> str:
    """Seconds after the first event of a log: `+12.345s`; `-0.002s` if the clock was set back.

    ns, began_ns: Unix time of an event and of the first one (ns).
    """
    passed = ns - began_ns
    milliseconds = abs(passed) // _MS
    return f"{'-' if passed <= -_MS else '+'}{milliseconds // 1000}.{milliseconds % 1000:03}s"


def moment(ns: int, began_ns: int) -> str:
    """The time of an event: `2026-11-22T11:04:29.123Z +12.345s`; with a virtual clock only `+12.345s`.

    ns, began_ns: Unix time of the event and of the log's first one (ns).
    """
    after = after_start(ns, began_ns)
    return after if ns < VIRTUAL_NS else f"{utc(ns)} {after}"


def duration(ns: int) -> str:
    """A length of time with two or three digits: `350 ns`, `18.2 ms`, `0.61 s`, `5 min 12 s`, `3 h 5 min`.

    ns: nanoseconds; below 0 if a clock was set back.
    """
    if ns < 0:
        return f"-{duration(-ns)}"
    if ns < 1000:
        return f"{ns} ns"
    if ns < _MS:
        return f"{_digits(ns / 1000)} us"
    if ns < 100 * _MS:
        return f"{_digits(ns / _MS)} ms"
    if ns < 10 * _S:
        return f"{ns / _S:.2f} s"
    if ns < _MINUTE:
        return f"{ns / _S:.1f} s"
    if ns < _HOUR:
        return _two(ns, _MINUTE, "min", _S, "s")
    return _two(ns, _HOUR, "h", _MINUTE, "min") if ns < _DAY else _two(ns, _DAY, "d", _HOUR, "h")


def _digits(number: float) -> str:
    """`1.25`, `18.2` or `350`."""
    return f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 100 else f"{number:.0f}"


def _two(ns: int, large: int, large_name: str, small: int, small_name: str) -> str:
    rest = ns % large // small
    return f"{ns // large:,} {large_name}" + (f" {rest} {small_name}" if rest else "")
