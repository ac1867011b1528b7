"""The declaration evaluated for one state at a time, in plain Python: slow, and easy to trust.

It serves two purposes. Tests compare it with the numpy evaluation (`arrays.py`), with which it shares the
declaration and its cells and nothing else. And it describes a counterexample step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvsm.check.protocol.cell_layout import ActionInstance, Binding, Cell, CellLayout, assignments
from kvsm.check.protocol.terms import (
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
from kvsm.check.worlds.requirement import Kind, Requirement
from kvsm.check.worlds.world import Finding
from kvsm.properties import Property

State = tuple[int, ...]
Move = tuple[str | int, ...]


def evaluate(term: Term, layout: CellLayout, state: Sequence[int], binding: Binding) -> int:
    """The value of a term in a state. A truth value is 1 or 0."""

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


def seen_in(
    term: Term, layout: CellLayout, state: Sequence[int], binding: Binding, holds: bool = False
) -> list[int]:
    """The places of the cells that show why a term holds, or does not hold.

    One part decides why an "or" holds and why an "and" does not. Otherwise all parts do.
    """

    def seen(one: Term, given: Binding, wanted: bool = holds) -> list[int]:
        return seen_in(one, layout, state, given, wanted)

    match term:
        case Not(inner):
            return seen(inner, binding, not holds)
        case If(condition, then, otherwise):
            whether = bool(evaluate(condition, layout, state, binding))
            return _once(seen(condition, binding, whether), seen(then if whether else otherwise, binding))
        case And(terms) | Or(terms):
            parts = [(one, binding) for one in terms]
        case ForAll(param, body) | Exists(param, body):
            parts = [(body, {**binding, param: member}) for member in range(param.members.size)]
        case _:
            return _once(_read_by(term, layout, binding))
    if isinstance(term, Or | Exists) == holds:
        decides = next(part for part in parts if bool(evaluate(part[0], layout, state, part[1])) == holds)
        return seen(*decides)
    return _once(*(seen(*part) for part in parts))


def _once(*places: Iterable[int]) -> list[int]:
    """Return all places without repetitions, in order of first occurrence."""
    return list(dict.fromkeys(place for some in places for place in some))


def _read_by(term: Term, layout: CellLayout, binding: Binding) -> Iterator[int]:
    match term:
        case Read():
            yield layout.place_of(term, binding)
        case ForAll(param, body) | Exists(param, body) | Total(param, body):
            for member in range(param.members.size):
                yield from _read_by(body, layout, {**binding, param: member})
        case _:
            for part in term.parts:
                yield from _read_by(part, layout, binding)


def _kept(cell: Cell, value: int) -> int:
    """Return the value after an action: a word whose state is not in `Words.kept` becomes ILLEGAL."""
    domain = cell.variable.domain
    return min(value, domain.illegal) if isinstance(domain, Words) else value


class ProtocolModel:
    """A declaration as a `Model` of the checker. A state is a tuple with one value for each cell."""

    def __init__(self, declared: Declaration) -> None:
        self.declared = declared
        self.layout = CellLayout(declared)
        self.name, self.bounds = declared.name, declared.bounds
        progress = Claim(Property.PROGRESS, "Winding down leads to rest.", declared.rest)
        self.requirements: tuple[Requirement[State], ...] = (
            *(self._requirement(Kind.ALWAYS, claim) for claim in declared.always),
            *(self._requirement(Kind.SOMETIMES, claim) for claim in declared.sometimes),
            self._requirement(Kind.EVENTUALLY, progress),
        )
        self._instances = {instance.move: instance for instance in self.layout.instances}

    def initial(self) -> Iterable[State]:
        """The one initial state."""
        return (self.layout.initial,)

    def actions(self, state: State) -> list[Move]:
        """The actions that are possible, in the order of the declaration."""
        return [one.move for one in self.layout.instances if self._may(one, state)]

    def next(self, state: State, action: Move) -> State | None:
        """The state after an action; None if it is not possible."""
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
        """The state itself."""
        return state

    def wind_down(self, state: State) -> Move | None:
        """The first draining action that is possible; any would do, because each makes the rank smaller."""
        draining = (one for one in self.layout.instances if one.action.drains)
        return next((one.move for one in draining if self._may(one, state)), None)

    def save(self, state: State) -> State:
        """The state itself: it is immutable."""
        return state

    def load(self, saved: State) -> State:
        """The saved state itself."""
        return saved

    def describe(self, state: State) -> dict[str, str]:
        """The cells that differ from the initial state, by name, with their values."""
        named = zip(self.layout.cells, state, self.layout.initial)
        return {str(cell): cell.variable.domain.label(now) for cell, now, first in named if now != first}

    def finding(self, claim: Claim, state: State) -> Finding:
        """The finding about a claim that does not hold: it names the cells that show it."""
        seen = []
        for place in seen_in(claim.term, self.layout, state, {}):
            cell = self.layout.cells[place]
            seen.append(f"{cell} is {cell.variable.domain.label(state[place])}")
        return Finding(claim.name, f"{claim.says} But {', '.join(seen)}")

    def _may(self, instance: ActionInstance, state: State) -> bool:
        return bool(evaluate(instance.action.guard, self.layout, state, instance.binding))

    def _requirement(self, kind: Kind, claim: Claim) -> Requirement[State]:
        def holds(state: State) -> bool:
            return bool(evaluate(claim.term, self.layout, state, {}))

        return Requirement(kind, claim.name, claim.says, holds)
