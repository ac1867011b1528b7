"""Count the cases in which a check could have failed, so that a report can say which properties were
exercised.

A check that never meets its case shows nothing: without an eviction during a load, "no reuse in flight" was
not exercised. So a check calls `count_case` each time that its case arises. `kvsm conform` reads the counts
of its process; nothing else does.
"""

from __future__ import annotations

from collections import Counter

from kvsm.properties import Property

Case = tuple[Property, str]
"""A property, and the name of a case: (Property.NO_REUSE_IN_FLIGHT, "evictions during a copy")."""

_counts: Counter[Case] = Counter()
_taken = 0


def count_case(tried: Property, case: str, times: int = 1) -> None:
    """Record that this property could have been found broken `times` times, in this case."""
    if times:
        _counts[tried, case] += times


def taken_counts() -> dict[Case, int]:
    """Return the counts since the last call, and start again from zero."""
    global _taken
    taken = dict(_counts)
    _taken += _counts.total()
    _counts.clear()
    return taken


def total_counted() -> int:
    """Return the number of all cases so far. A watchdog sees a hang by it: a call that hangs counts no
    case."""
    return _taken + _counts.total()
