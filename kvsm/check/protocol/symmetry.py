"""One representative for states that differ only in how device blocks, slots, copies or keys are numbered.

Each member of an index set gets a colour: a hash of everything about it that does not depend on numbering.
Members are renumbered in the order of their colours, keys in the order in which they are met. Whatever the
colours are, the result is a renumbering of the state, so states that differ otherwise are never merged. Two
members may share a colour, by chance or by a symmetry that colours do not see. Then states that could be
merged stay apart: there are more of them than needed, and the verdict is the same.

There are three kinds of index sets. Outer sets are first indices of variables (device blocks, slots, copies).
Inner sets are second indices (workers). Named sets occur only as values (keys).

Outer sets are sorted one after the other. Members of one colour take any order, and the members of the sets
that are sorted later follow this order: of two slots alike, the slot of the first copy comes first. So copies
are sorted first, because each ties a transfer, a device block and a slot together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsm.check.protocol.cell_layout import CellLayout
from kvsm.check.protocol.nodes import Columns
from kvsm.check.protocol.terms import IndexSet, OneOf

Column = NDArray[np.uint8]
Colour = NDArray[np.uint32]
Colours = list[Colour]
"""One for each member of an index set."""

AT_ONCE = 1 << 15
"""States that are renumbered together: few enough to stay in the processor's cache."""

_STIR = np.uint32(0x9E3779B1)
_SHIFT = np.uint32(15)


def _stirred(colour: Colour, salt: int = 0) -> Colour:
    stirred = (colour + np.uint32(salt * 0x632BE5AB & 0xFFFFFFFF)) * _STIR
    stirred ^= stirred >> _SHIFT
    return stirred


class Symmetry:
    """Renumbers the states of one layout."""

    def __init__(self, layout: CellLayout) -> None:
        self._cells = layout.cells
        variables, sets = layout.declared.variables, layout.declared.index_sets
        leading = {variable.indices[0] for variable in variables}
        following = {one for variable in variables for one in variable.indices[1:]}
        outer = [one for one in sets if one in leading]
        self._inner = [one for one in sets if one in following]
        self._named = [one for one in sets if one not in leading and one not in following]
        self._links = [one for one in variables if isinstance(one.domain, OneOf) and len(one.indices) == 1]
        """Variables by which a member of one set names a member of another set."""
        self._outer = sorted(outer, key=lambda one: not self._ties_together(one, outer))
        """In the order in which they are sorted."""
        self._naming = list(self._names())
        self._values = {members: self._places_of_values(members) for members in sets}
        self._exchanged = {
            (members, place): list(self._partners(members, place))
            for members in sets
            for place in range(members.size - 1)
        }

    def rename(self, columns: Columns) -> None:
        """Replace each of these states by its representative, in place."""
        for start in range(0, columns.shape[1], AT_ONCE):
            self._rename(columns[:, start : start + AT_ONCE])

    def _rename(self, columns: Columns) -> None:
        for members in self._inner:
            self._sort(columns, members, self._inner_colours(columns, members))
        colours = {members: self._outer_colours(columns, members) for members in self._outer}
        self._refine(columns, colours)
        for number, members in enumerate(self._outer):
            if members.size > 1:
                self._follow(columns, members, colours[members], self._outer[:number])
                self._sort(columns, members, colours[members])
        for members in self._named:
            if members.size > 1:
                holding = [columns[row] for row in self._values[members]]
                _relabel(holding, _labels(holding, members.size))

    # Colours.

    def _own(self, columns: Columns, indices: tuple[int, ...], sets: tuple[IndexSet, ...]) -> Colour:
        """A number for the cells at these indices; what names a member counts by whether it does."""
        own = np.zeros(columns.shape[1], dtype=np.uint32)
        for place, cell in enumerate(self._cells):
            if cell.indices == indices and cell.variable.indices == sets:
                domain, column = cell.variable.domain, columns[place]
                named = isinstance(domain, OneOf)
                own *= np.uint32(2 if named else domain.size)
                own += column == domain.initial if named else column
        return own

    def _inner_colours(self, columns: Columns, inner: IndexSet) -> Colours:
        colours: Colours = [np.zeros(columns.shape[1], dtype=np.uint32) for _ in range(inner.size)]
        for outer in self._outer:
            for first in range(outer.size):
                own = _stirred(self._own(columns, (first,), (outer,)), outer.size)
                for second, colour in enumerate(colours):
                    colour += _stirred(own + self._own(columns, (first, second), (outer, inner)))
        return colours

    def _outer_colours(self, columns: Columns, outer: IndexSet) -> Colours:
        colours: Colours = []
        for first in range(outer.size):
            colour = _stirred(self._own(columns, (first,), (outer,)))
            for inner in self._inner:
                for second in range(inner.size):
                    colour = _stirred(colour + self._own(columns, (first, second), (outer, inner)), 1)
            colours.append(colour)
        return colours

    def _refine(self, columns: Columns, colours: dict[IndexSet, Colours]) -> None:
        """Mix into each colour the colours of the members that name it, then of those that it names."""
        zero = np.zeros(columns.shape[1], dtype=np.uint32)
        gained = {
            members: [one.copy() for one in colours.get(members, [zero] * members.size)]
            for members in (*self._outer, *self._named)
        }
        for salt, column, namer, first, named in self._named_by(columns):
            stirred = _stirred(colours[namer][first], salt)
            for member, colour in enumerate(gained[named]):
                colour += (column == member) * stirred
        for members in self._outer:
            colours[members] = [one.copy() for one in gained[members]]
        for salt, column, namer, first, named in self._named_by(columns):
            for member, colour in enumerate(gained[named]):
                colours[namer][first] += (column == member) * _stirred(colour, salt)

    def _ties_together(self, members: IndexSet, outer: list[IndexSet]) -> bool:
        """Whether a member of this set names members of several outer sets."""
        named = {one.domain for one in self._links if one.indices[0] == members}
        return sum(OneOf(one) in named for one in outer) > 1

    def _names(self) -> Iterator[tuple[int, int, IndexSet, int, IndexSet]]:
        for place, cell in enumerate(self._cells):
            domain = cell.variable.domain
            if cell.variable in self._links and isinstance(domain, OneOf):
                number, namer = self._links.index(cell.variable), cell.variable.indices[0]
                yield number, place, namer, cell.indices[0], domain.members

    def _named_by(self, columns: Columns) -> Iterator[tuple[int, Column, IndexSet, int, IndexSet]]:
        """For each link: its number, its column, the member that names (set, number), the named set."""
        for number, place, namer, first, named in self._naming:
            yield number, columns[place], namer, first, named

    def _follow(
        self, columns: Columns, members: IndexSet, colours: Colours, sorted_sets: list[IndexSet]
    ) -> None:
        """Mix in the numbers of sorted members that name a member, that it names, or that name its key."""
        keys = {
            named: [np.zeros(columns.shape[1], dtype=np.uint32) for _ in range(named.size)]
            for named in self._named
        }
        for salt, column, namer, first, named in self._named_by(columns):
            if namer in sorted_sets and (named == members or named in keys):
                number = _stirred(np.array([first + 1], dtype=np.uint32), salt)
                for member, colour in enumerate(keys.get(named, colours)):
                    colour += (column == member) * number
        for salt, column, namer, first, named in self._named_by(columns):
            if namer == members and named in sorted_sets:
                colours[first] += _stirred(column.astype(np.uint32), salt)
            elif namer == members and named in keys:
                for member, colour in enumerate(keys[named]):
                    colours[first] += (column == member) * _stirred(colour, salt)

    # Renaming.

    def _sort(self, columns: Columns, members: IndexSet, colours: Colours) -> None:
        """Sort the members by colour, by exchanges of neighbours, and renumber what names them."""
        for end in range(members.size - 1, 0, -1):
            for place in range(end):
                low, high = colours[place], colours[place + 1]
                mask = low > high
                if mask.any():
                    _exchange(low, high, mask * np.uint32(0xFFFFFFFF))
                    self._exchange(columns, members, place, mask)

    def _exchange(self, columns: Columns, members: IndexSet, place: int, mask: NDArray[np.bool_]) -> None:
        """Exchange the members `place` and `place + 1` in the states of the mask."""
        whole = mask * np.uint8(0xFF)
        for row, partner in self._exchanged[members, place]:
            _exchange(columns[row], columns[partner], whole)
        flip = mask * np.uint8(place ^ (place + 1))
        for row in self._values[members]:
            column = columns[row]
            column ^= flip * ((column == place) | (column == place + 1))

    def _partners(self, members: IndexSet, place: int) -> Iterator[tuple[int, int]]:
        """For each column of the member `place`, the same column of the next member."""
        rows = {(cell.variable.name, cell.indices): row for row, cell in enumerate(self._cells)}
        for row, cell in enumerate(self._cells):
            for which, one in enumerate(cell.variable.indices):
                if one == members and cell.indices[which] == place:
                    indices = (*cell.indices[:which], place + 1, *cell.indices[which + 1 :])
                    yield row, rows[cell.variable.name, indices]

    def _places_of_values(self, members: IndexSet) -> list[int]:
        """The columns that hold a member of the set; links come first."""
        found = [
            (cell.variable not in self._links, row)
            for row, cell in enumerate(self._cells)
            if isinstance(cell.variable.domain, OneOf) and cell.variable.domain.members == members
        ]
        return [row for _, row in sorted(found)]


def _exchange(low: NDArray[Any], high: NDArray[Any], mask: NDArray[Any]) -> None:
    """Exchange two columns where the mask is all ones."""
    change = low ^ high
    change &= mask
    low ^= change
    high ^= change


def _labels(columns: list[Column], size: int) -> list[Column]:
    """For each of `size` keys its number, in the order in which these columns name keys; else `size`."""
    count = len(columns[0])
    labels = [np.full(count, size, dtype=np.uint8) for _ in range(size)]
    met = np.zeros(count, dtype=np.uint8)
    for column in columns:
        for key, label in enumerate(labels):
            fresh = ((column == key) & (label == size)).view(np.uint8)
            label -= fresh * (np.uint8(size) - met)
            met += fresh
    return labels


def _relabel(columns: list[Column], labels: list[Column]) -> None:
    """Replace the keys in these columns by their labels."""
    size = len(labels)
    for column in columns:
        renamed = (column == size) * np.uint8(size)
        for key, label in enumerate(labels):
            renamed += (column == key) * label
        column[:] = renamed
