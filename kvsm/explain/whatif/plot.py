"""Plot the share of found blocks over the size of the host pool, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor

HEIGHT = 12
COLUMN = 9


def plot(sizes: Sequence[int], curves: Mapping[str, Sequence[float]]) -> list[str]:
    """The lines of a plot, with the sizes from left to right.

    curves: name -> one share from 0 to 1 for each size. Curves are drawn with the letters a, b, ... in the
        order of the mapping. Where curves meet, the first of them is drawn.
    """
    letters = {name: chr(ord("a") + number) for number, name in enumerate(curves)}
    shares = [share for curve in curves.values() for share in curve]
    low, high = floor(min(shares) * 20) / 20, ceil(max(shares) * 20) / 20
    high = max(high, low + 0.05)
    rows = [[" "] * (COLUMN * len(sizes)) for _ in range(HEIGHT + 1)]
    for name in reversed(list(curves)):
        for column, share in enumerate(curves[name]):
            height = round((share - low) / (high - low) * HEIGHT)
            rows[HEIGHT - height][COLUMN * column + COLUMN // 2] = letters[name]
    lines = []
    for number, row in enumerate(rows):
        share = high - (high - low) * number / HEIGHT
        mark = f"{share:6.1%} |" if number % 3 == 0 else f"{'':6} |"
        lines.append((mark + "".join(row)).rstrip())
    lines.append(f"{'':6} +{'-' * (COLUMN * len(sizes))}")
    lines.append((f"{'':8}" + "".join(f"{size:,}".center(COLUMN) for size in sizes)).rstrip())
    lines.append(f"{'':8}" + "   ".join(f"{letter} {name}" for name, letter in letters.items()))
    return lines
