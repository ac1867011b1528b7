"""Count the outcomes of starts with older copies of a log, a kept pool or its checksums: the table in
docs/warm-restart.md.

    PYTHONPATH=specs:tests/support python specs/restored_files.py
"""

from __future__ import annotations

import sys
from collections import Counter

from kvsm.check.worlds.restored_world import LIVES, MOST_MOMENTS, OUTCOMES, RestoredOptions, RestoredWorld

SEEDS, MOMENTS = range(4), 14
"""The seeds of the random lives, and their length."""


def counts() -> Counter[tuple[str, str]]:
    """(set of older files, outcome) -> number of starts. Raises `PropertyBroken`."""
    total: Counter[tuple[str, str]] = Counter()
    for life in LIVES.values():
        world = RestoredWorld(RestoredOptions(moments=MOST_MOMENTS))
        world.live(life)
        total += world.counts
    for seed in SEEDS:
        world = RestoredWorld(RestoredOptions(moments=MOMENTS))
        world.walk(seed)
        total += world.counts
    return total


def table(found: Counter[tuple[str, str]]) -> str:
    """The counts as a Markdown table."""
    rows = [
        (older, [found[older, outcome] for outcome in OUTCOMES])
        for older in dict.fromkeys(k for k, _ in found)
    ]
    rows.append(("all", [sum(numbers) for numbers in zip(*(numbers for _, numbers in rows))]))
    lines = [
        f"| older than the rest, or damaged | {' | '.join(OUTCOMES)} |",
        "| --- |" + " ---: |" * len(OUTCOMES),
    ]
    lines += [f"| {older} | {' | '.join(f'{number:,}' for number in numbers)} |" for older, numbers in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table(counts())}\n")
