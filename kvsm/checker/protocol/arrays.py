"""The protocol for many states at once: each action instance is a mask, then a few columns written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsm.checker.protocol.layout import ActionInstance, Binding, CellLayout, assignments
from kvsm.checker.protocol.nodes import ArrayNode, Columns, FixedNode, NodeFactory, StateBatch, Values
from kvsm.checker.protocol.terms import TRUE, After, If, Not, Term, Words, words_of

Taken = dict[tuple[Words, int], NDArray[np.bool_]]
"""By words and trigger: the words from which the step was taken."""


@dataclass(frozen=True)
class _StepTaken:
    """A step that an effect takes where `when` holds."""

    words: Words
    trigger: int
    word: ArrayNode
    when: ArrayNode


@dataclass(frozen=True)
class _CompiledAction:
    """An action instance, compiled. forgets: those that its effects may give reason to, in order."""

    instance: ActionInstance
    guard: ArrayNode
    assigns: tuple[tuple[int, ArrayNode], ...]
    steps: tuple[_StepTaken, ...]
    forgets: tuple[tuple[int, ArrayNode, int], ...]


@dataclass(frozen=True)
class Successors:
    """What may follow on some states: the states after, and from which on each instance took whom.

    `bounds[i]:bounds[i + 1]` are the places of what instance i made; `sources` tells of which state.
    """

    columns: Columns
    sources: NDArray[np.intp]
    bounds: list[int]
    taken: Taken


class Transitions:
    """All actions of a protocol on columns."""

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
        """Every state that follows on one of these, by instance."""
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
        """Let an action happen in all these states."""
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
            # Else neither the condition nor the cell has changed since it was applied last.
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
    """The steps that a value takes, and when it takes them."""
    match term:
        case After(_, word):
            yield term, when
            yield from _steps(word, when)
        case If(condition, then, otherwise):
            yield from _steps(then, when & condition)
            yield from _steps(otherwise, when & Not(condition))


def columns_of(states: list[tuple[int, ...]]) -> Columns:
    """Rows of cells as columns."""
    return np.ascontiguousarray(np.array(states, dtype=np.uint8).T)


def rows_of(columns: Columns) -> list[tuple[Any, ...]]:
    """Columns as one tuple of cells for each state."""
    return [tuple(row) for row in columns.T.tolist()]
