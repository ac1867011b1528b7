"""When long work stops: between two of its steps it asks whether to stop; it is never interrupted inside a
step.

An exception raised by a signal handler could hit any line: inside a callback of C code or a finalizer it is
only printed, and between two writes it leaves half of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

IsOver = Callable[[], bool]
"""Whether to stop now."""


def never() -> bool:
    """Return False: the work ends by itself."""
    return False


class CutShort(KeyboardInterrupt):
    """Raised by work between two of its steps, when it must stop. It is a `KeyboardInterrupt`, which neither
    code under test nor Hypothesis takes for a failure.
    """


def go_on_unless(is_over: IsOver) -> None:
    """Raise `CutShort` if the work must stop."""
    if is_over():
        raise CutShort


class TimeBudget:
    """A number of seconds that several pieces of work share. Only time inside of `spending` counts."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    @contextmanager
    def spending(self) -> Iterator[IsOver]:
        """Count the time of this block against the budget. Yields a function that says whether the budget is
        spent."""
        began, before = monotonic(), self.left
        try:
            yield lambda: monotonic() - began >= before
        finally:
            self.left = before - (monotonic() - began)
