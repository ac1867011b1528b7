"""The cells of a state, and each action with its parameters given.

A cell is a variable at one combination of indices. A state is one small int for each cell. The evaluations by
numpy (`arrays.py`) and by plain Python (`plain.py`) share this layout and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

from kvsm.check.protocol.terms import (
    Action,
    Assign,
    Declaration,
    Each,
    Effect,
    Forget,
    Param,
    Read,
    Term,
    Variable,
)

Binding = dict[Param, int]
"""The values of parameters."""


@dataclass(frozen=True)
class Cell:
    """One variable at one combination of indices."""

    variable: Variable
    indices: tuple[int, ...]

    def __str__(self) -> str:
        """`slot content of slot 0, worker 1`."""
        members = zip(self.variable.indices, self.indices)
        named = ", ".join(f"{one.name} {member}" for one, member in members)
        return f"{self.variable.name.replace('_', ' ')} of {named}"


@dataclass(frozen=True)
class ActionInstance:
    """An action with its parameters given."""

    action: Action
    values: tuple[int, ...]

    @cached_property
    def binding(self) -> Binding:
        """The values of its parameters."""
        return dict(zip(self.action.params, self.values))

    @property
    def move(self) -> tuple[str | int, ...]:
        """The action's form in a path: ("start", 0, 1)."""
        return (self.action.name, *self.values)


class CellLayout:
    """A declaration's cells, and its actions and forgets with their parameters given."""

    def __init__(self, declared: Declaration) -> None:
        self.declared = declared
        self.cells = tuple(
            Cell(variable, indices)
            for variable in declared.variables
            for indices in product(*(range(one.size) for one in variable.indices))
        )
        self._places = {(cell.variable.name, cell.indices): place for place, cell in enumerate(self.cells)}
        self.initial = tuple(cell.variable.domain.initial for cell in self.cells)
        self.instances = tuple(
            ActionInstance(action, values)
            for action in declared.acting
            for values in product(*(range(param.members.size) for param in action.params))
        )
        self.forgets: tuple[tuple[Forget, Binding], ...] = tuple(
            (forget, dict(zip(forget.params, values)))
            for forget in declared.forgets
            for values in product(*(range(param.members.size) for param in forget.params))
        )

    def place(self, variable: Variable, indices: tuple[int, ...]) -> int:
        """The place of a cell in a state."""
        return self._places[variable.name, indices]

    def place_of(self, read: Read, binding: Binding) -> int:
        """The place of the cell that a term reads. Raises `TypeError` if an index is no parameter."""
        return self.place(read.variable, tuple(_given(index, binding) for index in read.indices))


def _given(index: Term, binding: Binding) -> int:
    if not isinstance(index, Param):
        raise TypeError(f"{index} is no parameter: the state must not decide which cell is read")
    return binding[index]


def assignments(effects: tuple[Effect, ...], binding: Binding) -> list[tuple[Assign, Binding]]:
    """The effects, with an `Each` written out for every member."""
    found: list[tuple[Assign, Binding]] = []
    for effect in effects:
        if isinstance(effect, Each):
            for value in range(effect.param.members.size):
                found += assignments(effect.effects, {**binding, effect.param: value})
        else:
            found.append((effect, binding))
    return found
