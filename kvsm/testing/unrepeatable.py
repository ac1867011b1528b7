"""Notice code that reads a clock, or draws random numbers without its own seed. Such code may decide
differently when its calls are repeated, as in a replay. Comparing a run with its replay seldom shows this: a
test ends before a timeout passes.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from types import FrameType
from typing import Any, NamedTuple

_CLOCKS = {
    *("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"),
    *("localtime", "gmtime", "ctime"),
}
_SHARED: Any = getattr(random.random, "__self__")  # noqa: B009 (the generator of the functions of `random`)


class Unrepeatable(NamedTuple):
    """A read of a clock or a draw. does: in words. place: the user's line, "FILE:LINE"."""

    does: str
    place: str


def _does(function: Any) -> str:
    """Describe what a built-in function does that cannot be repeated; empty if it can be."""
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    if getattr(function, "__module__", None) == "time" and name.removesuffix("_ns") in _CLOCKS:
        return f"reads the clock (time.{name}"
    if isinstance(owner, type) and issubclass(owner, date) and name in ("now", "utcnow", "today"):
        return f"reads the clock ({owner.__name__}.{name}"
    if owner is _SHARED:
        return f"draws random numbers without a seed of its own (random.{name}"
    if name in ("urandom", "getrandom") and getattr(owner, "__name__", "") == "posix":
        return f"draws random numbers without a seed of its own (os.{name}"
    return ""


@contextmanager
def unrepeatable(line_of: Callable[[FrameType], str]) -> Iterator[list[Unrepeatable]]:
    """Collect what the code inside of this context does that cannot be repeated. line_of: returns the user's
    line that led to the call of a built-in function; empty if no line of the user did.
    """
    found: list[Unrepeatable] = []

    def observe(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and (does := _does(function)) and (place := line_of(frame)):
            found.append(Unrepeatable(f"{does} at {place})", place))

    before = sys.getprofile()
    sys.setprofile(observe)
    try:
        yield found
    finally:
        sys.setprofile(before)
