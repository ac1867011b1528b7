"""Format times for people: wall time in UTC, seconds after the start of a log, and durations.

The log holds Unix time in nanoseconds. `utc` and `after_start` give the forms that `--since` and `--until`
take, cut (not rounded) to milliseconds, so that `--since` with a time that was shown finds its event.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MS = 1_000_000
_S = 1_000 * _MS
_MINUTE, _HOUR, _DAY = 60 * _S, 3600 * _S, 86_400 * _S


def utc(ns: int) -> str:
    """Wall time as `2026-11-22T11:04:29.123Z`.

    ns: Unix time (ns).
    """
    moment = _EPOCH + timedelta(microseconds=ns // 1000)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03}Z"


def after_start(ns: int, began_ns: int) -> str:
    """Seconds after the first event of a log: `+12.345s`; `-0.002s` if the clock was set back.

    ns, began_ns: Unix time of an event and of the first one (ns).
    """
    passed = ns - began_ns
    milliseconds = abs(passed) // _MS
    return f"{'-' if passed <= -_MS else '+'}{milliseconds // 1000}.{milliseconds % 1000:03}s"


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
