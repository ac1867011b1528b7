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


_at_each_step: Callable[[], None] | None = None


def go_on_unless(is_over: IsOver) -> None:
    """Raise `CutShort` if the work must stop. Called before each step."""
    if _at_each_step is not None:
        _at_each_step()
    if is_over():
        raise CutShort


@contextmanager
def watching_steps(at_each_step: Callable[[], None]) -> Iterator[None]:
    """A `with` block in which this is called before each step of any work of the process."""
    global _at_each_step
    before, _at_each_step = _at_each_step, at_each_step
    try:
        yield
    finally:
        _at_each_step = before


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
