"""Where each variable stands in a state, and each action with its parameters given.

A state is a row of small ints: one for each cell, a cell being a variable at one combination of indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

from kvsm.checker.protocol.terms import (
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
"""Parameters that are given."""


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
        return dict(zip(self.action.params, self.values))

    @property
    def move(self) -> tuple[str | int, ...]:
        """As it stands in a path: ("start", 0, 1)."""
        return (self.action.name, *self.values)


class CellLayout:
    """The cells of a protocol, its actions' instances, and its forgets' ones."""

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
            for action in declared.actions
            for values in product(*(range(param.members.size) for param in action.params))
        )
        self.forgets: tuple[tuple[Forget, Binding], ...] = tuple(
            (forget, dict(zip(forget.params, values)))
            for forget in declared.forgets
            for values in product(*(range(param.members.size) for param in forget.params))
        )

    def place(self, variable: Variable, indices: tuple[int, ...]) -> int:
        return self._places[variable.name, indices]

    def place_of(self, read: Read, binding: Binding) -> int:
        return self.place(read.variable, tuple(index_of(term, binding) for term in read.indices))


def index_of(term: Term, binding: Binding) -> int:
    """The value of an index: a parameter that is given."""
    if not isinstance(term, Param):
        raise TypeError(f"{term} is no parameter: which cell is meant must not depend on the state")
    return binding[term]


def assignments(effects: tuple[Effect, ...], binding: Binding) -> list[tuple[Assign, Binding]]:
    """The effects with every `Each` written out."""
    found: list[tuple[Assign, Binding]] = []
    for effect in effects:
        if isinstance(effect, Each):
            for value in range(effect.param.members.size):
                found += assignments(effect.effects, {**binding, effect.param: value})
        else:
            found.append((effect, binding))
    return found
