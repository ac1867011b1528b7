"""The actions of a declaration on many states at once: an action is a mask, then a few columns to write."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsm.check.protocol.cell_layout import ActionInstance, Binding, CellLayout, assignments
from kvsm.check.protocol.nodes import ArrayNode, Columns, FixedNode, NodeFactory, StateBatch, Values
from kvsm.check.protocol.terms import TRUE, After, If, Not, Term, Words, words_of

Taken = dict[tuple[Words, int], NDArray[np.bool_]]
"""By machine words and trigger: which words took the trigger."""


@dataclass(frozen=True)
class _StepTaken:
    """A machine step that an effect takes where `when` holds."""

    words: Words
    trigger: int
    word: ArrayNode
    when: ArrayNode


@dataclass(frozen=True)
class _CompiledAction:
    """An action with its parameters given, as nodes.

    assigns: (column, value) for each cell that it writes.
    steps: the machine steps among the values.
    forgets: (column, when, initial value) for each forget that its effects can trigger, in order.
    """

    instance: ActionInstance
    guard: ArrayNode
    assigns: tuple[tuple[int, ArrayNode], ...]
    steps: tuple[_StepTaken, ...]
    forgets: tuple[tuple[int, ArrayNode, int], ...]


@dataclass(frozen=True)
class Successors:
    """The successors of some states.

    columns: the states after, grouped by action instance.
    sources: for each of them, the place of the state before.
    bounds: instance i made the states at `bounds[i]:bounds[i + 1]`.
    taken: the machine steps that were taken.
    """

    columns: Columns
    sources: NDArray[np.intp]
    bounds: list[int]
    taken: Taken

    def maker(self, place: int) -> int:
        """The action instance that made the state at `place`."""
        return bisect_right(self.bounds, place) - 1


class Transitions:
    """All actions of a declaration, as operations on columns."""

    def __init__(self, layout: CellLayout) -> None:
        self.layout = layout
        self.nodes = NodeFactory(layout)
        self._forgets = [
            (layout.place_of(forget.cell, binding), self.nodes.of(forget.when, binding), forget)
            for forget, binding in layout.forgets
        ]
        self._illegal = [
            (place, cell.variable.domain.illegal)
            for place, cell in enumerate(layout.cells)
            if isinstance(cell.variable.domain, Words)
        ]
        self.moves = [self._compiled(instance) for instance in layout.instances]

    def after(self, columns: Columns) -> Successors:
        """All successors of these states."""
        batch, taken = StateBatch(columns), Taken()
        chosen = [np.flatnonzero(move.guard.of(batch)) for move in self.moves]
        bounds = [0, *np.cumsum([len(one) for one in chosen]).tolist()]
        sources = np.concatenate(chosen)
        after = np.take(columns, sources, axis=1)
        for place, move in enumerate(self.moves):
            if len(chosen[place]):
                self._apply(move, after[:, bounds[place] : bounds[place + 1]], taken)
        for place, illegal in self._illegal:
            np.minimum(after[place], illegal, out=after[place])
        return Successors(after, sources, bounds, taken)

    def _apply(self, move: _CompiledAction, columns: Columns, taken: Taken) -> None:
        """Perform an action in all these states, in place; note the machine steps in `taken`."""
        batch = StateBatch(columns)
        for step in move.steps:
            words, key = step.word.of(batch), (step.words, step.trigger)
            if not isinstance(step.when, FixedNode):
                words = words[step.when.of(batch)]
            met = np.bincount(words, minlength=len(step.words.words)) > 0
            taken[key] = met | taken[key] if key in taken else met
        written: list[tuple[int, Values]] = [(place, node.of(batch).copy()) for place, node in move.assigns]
        for place, values in written:
            columns[place] = values
        batch = StateBatch(columns)
        for place, when, initial in move.forgets:
            forgotten = when.of(batch)
            if forgotten.any():
                columns[place][forgotten.astype(np.bool_)] = initial
                batch = StateBatch(columns)

    def _compiled(self, instance: ActionInstance) -> _CompiledAction:
        layout, nodes = self.layout, self.nodes
        assigned = assignments(instance.action.effects, instance.binding)
        assigns = tuple(
            (layout.place_of(assign.cell, binding), nodes.of(assign.value, binding))
            for assign, binding in assigned
        )
        steps = tuple(
            self._taken(step, when, binding)
            for assign, binding in assigned
            for step, when in _steps(assign.value, TRUE)
            if not _never(nodes.of(when, binding))
        )
        touched = {place for place, _ in assigns}
        forgets: list[tuple[int, ArrayNode, int]] = []
        for place, when, forget in self._forgets:
            # Otherwise neither the condition nor the cell has changed since this forget was last applied.
            if place in touched or not touched.isdisjoint(when.columns):
                touched.add(place)
                forgets.append((place, when, forget.cell.variable.domain.initial))
        guard = nodes.of(instance.action.guard, instance.binding)
        return _CompiledAction(instance, guard, assigns, steps, tuple(forgets))

    def _taken(self, step: After, when: Term, binding: Binding) -> _StepTaken:
        nodes = self.nodes
        return _StepTaken(
            words_of(step.word), step.trigger, nodes.of(step.word, binding), nodes.of(when, binding)
        )


def _never(when: ArrayNode) -> bool:
    return isinstance(when, FixedNode) and not when.value


def _steps(term: Term, when: Term) -> Iterator[tuple[After, Term]]:
    """The machine steps within a value, each with its condition."""
    match term:
        case After(_, word):
            yield term, when
            yield from _steps(word, when)
        case If(condition, then, otherwise):
            yield from _steps(then, when & condition)
            yield from _steps(otherwise, when & Not(condition))


def columns_of(states: list[tuple[int, ...]]) -> Columns:
    """States, given as one tuple each, as columns."""
    return np.ascontiguousarray(np.array(states, dtype=np.uint8).T)


def rows_of(columns: Columns) -> list[tuple[Any, ...]]:
    """Columns as one tuple for each state."""
    return [tuple(row) for row in columns.T.tolist()]
