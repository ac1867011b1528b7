"""Count the cases in which a check could have failed, so that a report can say which properties were tried.

A check that finds nothing proves nothing if its case never arose: without an eviction while a load runs, "no
reuse in flight" was not tried. So a check calls `count_case` each time that its case arises. `kvsm conform`
reads the counts of its process; nothing else does.
"""

from __future__ import annotations

from collections import Counter

from kvsm.properties import Property

Case = tuple[Property, str]
"""A property, and what was looked at for it: (Property.NO_REUSE_IN_FLIGHT, "evictions during a copy")."""

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
    """Return the number of all cases so far, for a watchdog: a call that hangs counts none."""
    return _taken + _counts.total()
