"""How often each finding is right, as measured on generated logs.

`benchmarks/findings.py --logs 200 --seed 20261129 --confidence FILE` writes this file, and
benchmarks/results/findings.md has the same run. Half of the kinds of incidents were unknown to the authors of
the detectors.
"""

from __future__ import annotations

MEASURED: dict[str, tuple[int, int]] = {}
"""Name of a trouble -> (logs in which it was a true cause, logs in which it was one of the first two
findings)."""

LEAST_LOGS = 3
"""With fewer logs a share says nothing."""


def confidence_in(trouble: str) -> float | None:
    """The share of the generated logs with this finding in which it was a true cause; None: too few logs."""
    right, shown = MEASURED.get(trouble, (0, 0))
    return right / shown if shown >= LEAST_LOGS else None
