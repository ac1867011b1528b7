"""When long work stops: it asks between two of its steps, and is never interrupted inside one.

A signal handler that raised would raise wherever the process happens to be: inside a callback of C code or a
finalizer the exception is printed and lost, and between two writes it leaves half of a result.
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
    """Raised between two steps of work that is over, by the work itself.

    It is a `KeyboardInterrupt` because neither code under test nor Hypothesis takes that for a failure.
    """


def go_on_unless(is_over: IsOver) -> None:
    """Raise `CutShort` if the work is over."""
    if is_over():
        raise CutShort


class TimeBudget:
    """Seconds that several pieces of work share. Time counts only inside of `spending`."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    @contextmanager
    def spending(self) -> Iterator[IsOver]:
        """Count time against the budget. Yields whether it is spent."""
        began, before = monotonic(), self.left
        try:
            yield lambda: monotonic() - began >= before
        finally:
            self.left = before - (monotonic() - began)
