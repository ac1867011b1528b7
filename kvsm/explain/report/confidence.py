"""How often each finding is right, measured on generated logs.

`benchmarks/findings.py --logs 200 --seed 20261129 --confidence FILE` writes this file, and
benchmarks/results/findings.md has the same run. Half of the kinds of incidents were unknown to the authors of
the detectors.
"""

from __future__ import annotations

MEASURED: dict[str, tuple[int, int]] = {
    "blocks skipped": (11, 11),
    "clock jumped": (17, 17),
    "cold start": (12, 12),
    "device blocks leak": (15, 15),
    "disk slower than computing": (10, 10),
    "engine killed": (7, 7),
    "engine stopped": (4, 4),
    "events missing": (8, 8),
    "eviction burst": (3, 3),
    "group floods": (5, 5),
    "hits fell": (10, 11),
    "loads slow": (0, 1),
    "loads slower than computing": (10, 10),
    "log damaged": (8, 8),
    "pool not pinned": (5, 5),
    "pool too small": (8, 10),
    "preemptions": (3, 4),
    "processes killed": (5, 5),
    "property broken": (20, 20),
    "rank fails": (14, 14),
    "rank silent": (14, 14),
    "rank slow": (7, 9),
    "rank tail": (22, 27),
    "reports rejected": (12, 12),
    "requests aborted": (21, 21),
    "requests unfinished": (7, 7),
    "reset storm": (10, 12),
    "stores behind": (6, 9),
    "tenant floods": (4, 4),
    "waits": (3, 3),
}
"""Name of a trouble -> (logs in which it was a true cause, logs in which it was one of the first two
findings)."""

LEAST_LOGS = 3
"""With fewer logs than this, no share is given."""


def confidence_in(trouble: str) -> float | None:
    """The share of the generated logs with this finding in which it was a true cause; None: too few logs."""
    right, shown = MEASURED.get(trouble, (0, 0))
    return right / shown if shown >= LEAST_LOGS else None
