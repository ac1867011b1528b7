"""The state of a declared protocol of any size: the cells that differ from their initial values.

A log may have millions of transfers, so nothing here has a bound. A member of an index set is any hashable
value. A cell is a member, or a tuple of members if its variable has several indices. A cell that is absent
has the variable's initial value. "None" of an index set is Python's None.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from contextlib import suppress
from typing import Any

from kvsm.check.protocol.terms import Labels, OneOf, Truth, UpTo, Variable, Words
from kvsm.states.machine import Machine, UndefinedStep

Member = Hashable
"""A member of an index set: a slot's number, a transfer's id, a key."""

CellKey = Any
"""A member, or a tuple of members."""

_NO_CELLS: frozenset[CellKey] = frozenset()
_NO_STATE = -1


class MachineWord:
    """A state of a machine with its counters, or ILLEGAL. Each is made once: words are compared by identity.

    state: its number; -1 for ILLEGAL.
    """

    __slots__ = ("counts", "label", "state")

    def __init__(self, state: int, counts: tuple[int, ...], label: str) -> None:
        self.state, self.counts, self.label = state, counts, label

    def __repr__(self) -> str:
        return self.label


class _StepsByTrigger(dict[MachineWord, MachineWord]):
    """Word -> the word after one trigger, by the machine's own table."""

    __slots__ = ("_table", "_trigger")

    def __init__(self, table: MachineWords, trigger: int) -> None:
        super().__init__()
        self._table, self._trigger = table, trigger

    def __missing__(self, word: MachineWord) -> MachineWord:
        after = self._table.illegal
        if word is not after:
            with suppress(UndefinedStep):
                after = self._table.word(*self._table.machine.step(word.state, word.counts, self._trigger))
        self[word] = after
        return after


class MachineWords:
    """The words of one machine, with counters of any size; `after[trigger][word]` is a step."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._made: dict[tuple[int, tuple[int, ...]], MachineWord] = {}
        self.illegal = MachineWord(
            _NO_STATE, (0,) * len(machine.counters), "ILLEGAL (no row allows the step)"
        )
        self.after = tuple(_StepsByTrigger(self, trigger) for trigger in machine.triggers)

    def word(self, state: int, counts: tuple[int, ...]) -> MachineWord:
        """The word of a state and its counters."""
        found = self._made.get((state, counts))
        if found is None:
            named = ", ".join(f"{one.name}={count}" for one, count in zip(self.machine.counters, counts))
            name = self.machine.states(state).name
            found = self._made[state, counts] = MachineWord(state, counts, f"{name}({named})")
        return found


class ProtocolCells:
    """One variable: its cells that differ from the initial value, and on demand the cells of each value.

    members: all members of the variable's one index set; None if it has several, or no bound.
    touched: the cells written since the caller last cleared this list.
    """

    __slots__ = ("_where", "initial", "members", "touched", "values", "variable", "words")

    def __init__(
        self, variable: Variable, words: MachineWords | None, members: Sequence[Member] | None
    ) -> None:
        self.variable, self.words, self.members = variable, words, members
        self.initial = first_value(variable, words)
        self.values: dict[CellKey, Any] = {}
        self.touched: list[CellKey] = []
        self._where: dict[Any, set[CellKey]] | None = None

    @property
    def is_indexed(self) -> bool:
        """Whether the cells of each value are indexed."""
        return self._where is not None

    def index(self) -> None:
        """Index the cells by value from now on."""
        if self._where is None:
            self._where = {}
            for cell, value in self.values.items():
                self._where.setdefault(value, set()).add(cell)

    def get(self, cell: CellKey) -> Any:
        """The value of a cell."""
        return self.values.get(cell, self.initial)

    def put(self, cell: CellKey, value: Any) -> None:
        """Give a cell a value."""
        values, where, first = self.values, self._where, self.initial
        before = values.pop(cell, first)
        if value != first:
            values[cell] = value
        if where is not None and value != before:
            if before != first:
                places = where[before]
                places.discard(cell)
                if not places:
                    del where[before]
            if value != first:
                if value in where:
                    where[value].add(cell)
                else:
                    where[value] = {cell}
        self.touched.append(cell)

    def where(self, value: Any) -> Collection[CellKey]:
        """The cells of an indexed variable that have this value.

        Raises `LookupError` for the initial value of a variable whose cells have no bound.
        """
        assert self._where is not None
        if value != self.initial:
            return self._where.get(value, _NO_CELLS)
        if self.members is None:
            raise LookupError(f"{self.variable.name}: any number of cells have the value {value}")
        return {one for one in self.members if one not in self.values}

    def clear(self) -> None:
        """Give every cell the initial value."""
        self.values.clear()
        self.touched.clear()
        if self._where is not None:
            self._where.clear()

    def told(self, value: Any) -> str | None:
        """A value for people; None for a member of an index set."""
        domain = self.variable.domain
        if isinstance(domain, Words):
            return str(value.label)
        if isinstance(domain, Labels | Truth | UpTo):
            return domain.label(int(value))
        return "none" if value is None else None


def first_value(variable: Variable, words: MachineWords | None) -> Any:
    """Return the initial value of a variable's cells."""
    domain = variable.domain
    if isinstance(domain, Words):
        assert words is not None
        return words.word(int(domain.machine.initial), domain.start)
    return None if isinstance(domain, OneOf) else domain.initial
