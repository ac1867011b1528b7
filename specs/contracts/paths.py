"""Contracts of the copy path: a copy's cell in the measured table, and the guard that overrides the table."""

from __future__ import annotations

from kvsm.cuda_io.paths import (
    MEASURED_BYTES,
    NOT_MEASURED,
    RECTANGLE_ROWS,
    VERSION,
    CopyPath,
    PathTable,
    _place,
    _powers,
)
from kvsm.events import Direction

CELLS = tuple(range(17))
"""The cells of the row of the smallest fragments: for 1, 2, 4, ... 65,536 fragments."""
LARGEST = 1 << 48
"""More bytes or fragments than any copy has: a bound for CrossHair, which explores a path for each power."""
PITCHED_FIRST = tuple(sorted(CopyPath, key=lambda path: path is not CopyPath.PITCHED))
TABLE = PathTable(VERSION, NOT_MEASURED, None, ((PITCHED_FIRST,) * 2,) * 2, ((PITCHED_FIRST,) * 2,) * 2)
"""A table in which pitched copies are best in every cell, so that only the guard prevents them."""


def an_amount_has_one_cell(amount: int) -> int:
    """The cell of an amount is the largest power of two up to it; beyond the table it is the last cell.

    pre: 0 <= amount < LARGEST
    post: 0 <= _ < len(CELLS)
    post: amount == 0 or (1 << _) <= amount
    post: amount < (2 << _) or _ == len(CELLS) - 1
    """
    return _place(amount, CELLS)


def more_is_never_looked_up_lower(less: int, more: int) -> tuple[int, int]:
    """Cells are in the order of the amounts.

    pre: 0 <= less <= more < 1 << 20
    post: _[0] <= _[1]
    """
    return _place(less, CELLS), _place(more, CELLS)


def a_row_ends_with_the_measured_bytes(fragment_bytes: int) -> tuple[int, bool]:
    """A row has a cell for each power of two of fragments that fit into the measured bytes, and no others.

    pre: 1 <= fragment_bytes <= MEASURED_BYTES
    post: _[0] >= 1 and _[1]
    """
    cells = _powers(fragment_bytes)
    last = fragment_bytes << (cells - 1)
    return cells, last <= MEASURED_BYTES < 2 * last


def only_high_rectangles_go_pitched(
    store: bool, fragment_bytes: int, count: int, rectangles: int
) -> tuple[bool, bool]:
    """Where pitched copies are best, a copy is pitched exactly if its rectangles have as many rows as the
    measured ones. Returns (whether it is pitched, whether it has so many rows).

    pre: 0 <= fragment_bytes < 1 << 16 and rectangles >= 1
    pre: 0 <= count < 1 << 12
    post: _[0] == _[1]
    """
    path = TABLE.choose(Direction.STORE if store else Direction.LOAD, fragment_bytes, count, rectangles)
    return path is CopyPath.PITCHED, count >= rectangles * RECTANGLE_ROWS
