"""Format numbers over time as a line of bars."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvsm.explain.report.detectors import percent

_BARS, _PLAIN_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*%#"


def sparkline(name: str, shares: Sequence[float | None], legend: str = "") -> str:
    """Format shares over time, from 0 to 1, as one character each; a blank for times without any event.

    legend: text behind the line; by default, the smallest and the largest share.
    """
    bars = _BARS if _can_encode(_BARS) else _PLAIN_BARS
    line = "".join(
        " " if share is None else bars[1 + round(min(1.0, max(0.0, share)) * (len(bars) - 2))]
        for share in shares
    )
    known = [share for share in shares if share is not None]
    legend = legend or (f"{percent(min(known))} to {percent(max(known))}" if known else "never")
    return f"{name:<8}|{line}| {legend}"


def _can_encode(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
