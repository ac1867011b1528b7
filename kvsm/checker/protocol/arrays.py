"""The protocol for many states at once: each action instance is a mask, then a few columns written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsm.checker.protocol.layout import Binding, Instance, Layout, assignments
from kvsm.checker.protocol.nodes import Batch, Columns, Fixed, Node, Nodes, Values
from kvsm.checker.protocol.terms import TRUE, If, Not, Step, Term, Words, words_of

Taken = dict[tuple[Words, int], NDArray[np.bool_]]
"""By words and trigger: the words from which the step was taken."""


@dataclass(frozen=True)
class _Taken:
    """A step that an effect takes where `when` holds."""

    words: Words
    trigger: int
    word: Node
    when: Node


@dataclass(frozen=True)
class _Move:
    """An action instance, compiled. forgets: those that its effects may give reason to, in order."""

    instance: Instance
    guard: Node
    assigns: tuple[tuple[int, Node], ...]
    steps: tuple[_Taken, ...]
    forgets: tuple[tuple[int, Node, int], ...]


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

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.nodes = Nodes(layout)
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
        batch, taken = Batch(columns), Taken()
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

    def _apply(self, move: _Move, columns: Columns, taken: Taken) -> None:
        """Let an action happen in all these states."""
        batch = Batch(columns)
        for step in move.steps:
            words, key = step.word.of(batch), (step.words, step.trigger)
            if not isinstance(step.when, Fixed):
                words = words[step.when.of(batch)]
            met = np.bincount(words, minlength=len(step.words.words)) > 0
            taken[key] = met | taken[key] if key in taken else met
        written: list[tuple[int, Values]] = [(place, node.of(batch).copy()) for place, node in move.assigns]
        for place, values in written:
            columns[place] = values
        batch = Batch(columns)
        for place, when, initial in move.forgets:
            forgotten = when.of(batch)
            if forgotten.any():
                columns[place][forgotten.astype(np.bool_)] = initial
                batch = Batch(columns)

    def _compiled(self, instance: Instance) -> _Move:
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
        forgets: list[tuple[int, Node, int]] = []
        for place, when, forget in self._forgets:
            # Else neither the condition nor the cell has changed since it was applied last.
            if place in touched or not touched.isdisjoint(when.columns):
                touched.add(place)
                forgets.append((place, when, forget.cell.variable.domain.initial))
        guard = nodes.of(instance.action.guard, instance.binding)
        return _Move(instance, guard, assigns, steps, tuple(forgets))

    def _taken(self, step: Step, when: Term, binding: Binding) -> _Taken:
        nodes = self.nodes
        return _Taken(
            words_of(step.word), step.trigger, nodes.of(step.word, binding), nodes.of(when, binding)
        )


def _never(when: Node) -> bool:
    return isinstance(when, Fixed) and not when.value


def _steps(term: Term, when: Term) -> Iterator[tuple[Step, Term]]:
    """The steps that a value takes, and when it takes them."""
    match term:
        case Step(_, word):
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
