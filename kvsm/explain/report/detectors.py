"""The detectors: one function for each kind of trouble.

A detector judges the figures of a log. Below its limit it returns None, else a text that says what is wrong,
the numbers that show it, and commands that show more. `troubles.py` has the limits and their reasons.
"""

from __future__ import annotations

from typing import NamedTuple

from kvsm.explain.report.command_lines import command as _command
from kvsm.explain.report.figures import LogFigures


class Limit(NamedTuple):
    """The limit of a detector: at least `least` cases, and at least `share` of the whole (0: no share)."""

    share: float = 0.0
    least: int = 1

    def __str__(self) -> str:
        if not self.share:
            return f"{self.least:,}"
        share = percent(self.share) if self.share < 1 else f"{self.share:g} times"
        return f"{share}, and {self.least:,} cases" if self.least > 1 else share


class Noticed(NamedTuple):
    """What a detector found. The fields are those of `Trouble`."""

    impact: float
    text: str
    evidence: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


APART_NS = 5_000_000_000
"""A block was computed twice if two lookups at least 5 s apart missed it."""


def percent(part: float, whole: float = 1.0) -> str:
    """`62 %`, `4.1 %` or `0.2 %`."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f} %" if share >= 9.95 or share == 0 else f"{share:.1f} %"


def number(count: int, thing: str, things: str = "") -> str:
    """`1 copy` or `1,200 copies`."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


# The log or the state is wrong.


def property_broken(figures: LogFigures, _limit: Limit) -> Noticed | None:
    """Detect an event that breaks a property, or that cannot follow."""
    check = figures.check
    if not check.broken:
        return None
    return Noticed(
        1.0,
        f"Event {check.event} breaks a property: {check.broken[0]}",
        tuple(check.broken[1:4]),
        (_command(figures, "verify"),),
    )


def damaged(figures: LogFigures, _limit: Limit) -> Noticed | None:
    """Detect damage: bytes that are not the ones that were written."""
    if figures.check.damage is None:
        return None
    text = f"The log is damaged, and is read up to event {figures.last:,}: {figures.check.damage}"
    return Noticed(1.0, text, (), (_command(figures, "verify"),))


def events_missing(figures: LogFigures, _limit: Limit) -> Noticed | None:
    """Detect events that are missing before the end."""
    if figures.end.complete:
        return None
    text = f"Events are missing from the log: {figures.end.notes[0]}"
    why = "a disk that is full or fails is the usual cause; figures about what is missing are too low"
    return Noticed(0.9, text, (*figures.end.notes[1:], why), (_command(figures, "verify"),))
