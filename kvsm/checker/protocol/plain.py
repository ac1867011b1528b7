"""The protocol one state at a time, in plain Python: slow, and easy to believe.

It shares with `arrays.py` the declaration and the order of its cells, and no way of evaluating it, so that
the two can be held against each other. And it shows a counterexample step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvsm.checker.model import Kind, Requirement
from kvsm.checker.protocol.layout import ActionInstance, Binding, Cell, CellLayout, assignments
from kvsm.checker.protocol.terms import (
    Add,
    After,
    And,
    Claim,
    Const,
    CounterOf,
    Declaration,
    Equal,
    Exists,
    ForAll,
    If,
    InState,
    Less,
    Minus,
    Not,
    Or,
    Param,
    Read,
    Term,
    Total,
    Words,
    words_of,
)
from kvsm.properties import Property
from kvsm.worlds.world import Finding

State = tuple[int, ...]
Move = tuple[str | int, ...]


def evaluate(term: Term, layout: CellLayout, state: Sequence[int], binding: Binding) -> int:
    """The value of a term in a state."""

    def value(one: Term) -> int:
        return evaluate(one, layout, state, binding)

    def over(param: Param, body: Term) -> Iterator[int]:
        for member in range(param.members.size):
            yield evaluate(body, layout, state, {**binding, param: member})

    match term:
        case Const(_, constant):
            return constant
        case Param():
            return binding[term]
        case Read():
            return state[layout.place_of(term, binding)]
        case Equal(left, right):
            return int(value(left) == value(right))
        case Less(left, right):
            return int(value(left) < value(right))
        case Not(inner):
            return 1 - value(inner)
        case And(terms):
            return int(all(map(value, terms)))
        case Or(terms):
            return int(any(map(value, terms)))
        case Add(terms):
            return sum(map(value, terms))
        case Minus(left, right):
            return value(left) - value(right)
        case If(condition, then, otherwise):
            return value(then) if value(condition) else value(otherwise)
        case ForAll(param, body):
            return int(all(over(param, body)))
        case Exists(param, body):
            return int(any(over(param, body)))
        case Total(param, body):
            return sum(over(param, body))
    return _of_word(term, value)


def _of_word(term: Term, value: Callable[[Term], int]) -> int:
    match term:
        case After(trigger, word):
            return words_of(word).next[trigger][value(word)]
        case InState(word, states):
            found = words_of(word).words[value(word)]
            return int(found is not None and found[0] in states)
        case CounterOf(word, name):
            words = words_of(word)
            names = [counter.name for counter in words.machine.counters]
            found = words.words[value(word)]
            return 0 if found is None else found[1][names.index(name)]
    raise TypeError(f"{term} is no term")


def _seen_in(term: Term, layout: CellLayout, state: Sequence[int], binding: Binding) -> list[int]:
    """Where a term that does not hold reads: in the first of its parts that does not."""
    match term:
        case And(terms):
            failing = (one for one in terms if not evaluate(one, layout, state, binding))
            return _seen_in(next(failing), layout, state, binding)
        case ForAll(param, body):
            given = ({**binding, param: member} for member in range(param.members.size))
            failing_with = next(one for one in given if not evaluate(body, layout, state, one))
            return _seen_in(body, layout, state, failing_with)
    return list(dict.fromkeys(_read_by(term, layout, binding)))


def _read_by(term: Term, layout: CellLayout, binding: Binding) -> Iterator[int]:
    match term:
        case Read():
            yield layout.place_of(term, binding)
        case ForAll(param, body) | Exists(param, body) | Total(param, body):
            for member in range(param.members.size):
                yield from _read_by(body, layout, {**binding, param: member})
        case _:
            for part in term.parts():
                yield from _read_by(part, layout, binding)


def _kept(cell: Cell, value: int) -> int:
    """A word that is over at once is none that a variable holds after an action."""
    domain = cell.variable.domain
    return min(value, domain.illegal) if isinstance(domain, Words) else value


class ProtocolModel:
    """A protocol as a `Model`: states are tuples, one value for each cell."""

    def __init__(self, declared: Declaration) -> None:
        self.declared = declared
        self.layout = CellLayout(declared)
        self.name, self.bounds = declared.name, declared.bounds
        self.requirements: tuple[Requirement[State], ...] = (
            *(self._property(Kind.ALWAYS, claim) for claim in declared.always),
            *(self._property(Kind.SOMETIMES, claim) for claim in declared.sometimes),
            self._property(
                Kind.EVENTUALLY, Claim(Property.PROGRESS, "Winding down leads to rest.", declared.rest)
            ),
        )
        self._instances = {instance.move: instance for instance in self.layout.instances}

    def initial(self) -> Iterable[State]:
        return (self.layout.initial,)

    def actions(self, state: State) -> list[Move]:
        return [one.move for one in self.layout.instances if self._may(one, state)]

    def next(self, state: State, action: Move) -> State | None:
        instance = self._instances[action]
        if not self._may(instance, state):
            return None
        layout, after = self.layout, list(state)
        for assign, binding in assignments(instance.action.effects, instance.binding):
            after[layout.place_of(assign.cell, binding)] = evaluate(assign.value, layout, state, binding)
        for forget, binding in layout.forgets:
            if evaluate(forget.when, layout, after, binding):
                after[layout.place_of(forget.cell, binding)] = forget.cell.variable.domain.initial
        return tuple(map(_kept, layout.cells, after))

    def fingerprint(self, state: State) -> State:
        return state

    def wind_down(self, state: State) -> Move | None:
        """Any draining action will do: each makes the rank smaller. The first one."""
        draining = (one for one in self.layout.instances if one.action.drains)
        return next((one.move for one in draining if self._may(one, state)), None)

    def save(self, state: State) -> State:
        return state

    def load(self, saved: State) -> State:
        return saved

    def describe(self, state: State) -> dict[str, str]:
        """Each cell by its name, with what it holds; not those that hold what they did at first."""
        named = zip(self.layout.cells, state, self.layout.initial)
        return {str(cell): cell.variable.domain.label(now) for cell, now, first in named if now != first}

    def finding(self, claim: Claim, state: State) -> Finding:
        """A claim that does not hold, with the cells in which it is seen."""
        cells = [self.layout.cells[place] for place in _seen_in(claim.term, self.layout, state, {})]
        values = [cell.variable.domain.label(state[self.layout.cells.index(cell)]) for cell in cells]
        seen = ", ".join(f"{cell} is {value}" for cell, value in zip(cells, values))
        return Finding(claim.name, f"{claim.says} But {seen}")

    def _may(self, instance: ActionInstance, state: State) -> bool:
        return bool(evaluate(instance.action.guard, self.layout, state, instance.binding))

    def _property(self, kind: Kind, claim: Claim) -> Requirement[State]:
        def holds(state: State) -> bool:
            return bool(evaluate(claim.term, self.layout, state, {}))

        return Requirement(kind, claim.name, claim.says, holds)
