"""Explain an open condition by an example: a state of a few members, and the step that breaks the claim.

With few members of each set every quantifier can be written out. Then z3 always answers, and its model is a
state of the explorer. The explorer says whether this state can be reached. If it can, the protocol is
wrong. If it cannot, an invariant is missing: one that excludes the state. As a hint, the result names a
set of facts of the state that are never all true in a reachable state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvsm.check.explore.model import Refutation, Verdict
from kvsm.check.proof.any_size_proof import conditions_of
from kvsm.check.proof.conditions import TAKEN, Condition, Induction
from kvsm.check.proof.counting_lemma import ALL, known_counts
from kvsm.check.proof.smt import SmtWriter, member_name, sort_of, value_name
from kvsm.check.protocol.cell_layout import Cell, CellLayout
from kvsm.check.protocol.explore import ReachedStates, explore
from kvsm.check.protocol.plain import Move, State, evaluate
from kvsm.check.protocol.terms import (
    And,
    Const,
    Declaration,
    Domain,
    Exists,
    ForAll,
    IndexSet,
    Not,
    OneOf,
    Or,
    Term,
    Words,
    for_all,
    implies,
)

REACH_SECONDS = 20.0
"""How long the explorer looks for the state of an example."""


@dataclass(frozen=True)
class Example:
    """A state in which all hypotheses hold, and a step after which a claim does not.

    move: the step with the numbers of its members.
    values: the cells that differ from the initial state, with their values, for people.
    state: the same state for the explorer; None if the tables do not lead to all of its words.
    """

    declared: Declaration
    step: str
    claim: str
    move: Move
    values: dict[str, str]
    state: State | None


@dataclass(frozen=True)
class Reached:
    """The explorer's result for an example.

    refutation: a shortest path from the start to a broken claim or invariant; None if none was found.
    complete: whether all reachable states were seen. If so, and nothing is broken, the example's state is not
        among them: its step would break something.
    excluding: facts of the state that are never all true in a reachable state.
    """

    refutation: Refutation | None
    complete: bool
    excluding: tuple[str, ...] = ()


def never_taken(versions: Iterable[Sequence[Declaration]]) -> tuple[str, ...]:
    """Return the steps that z3 finds possible in no version, in no state in which all hypotheses hold.

    The proofs about such a step are vacuous: its guard may be false by mistake.

    versions: for each version its declarations with few members of each set.
    """
    possible: dict[str, bool] = {}
    for sized in versions:
        for declared in sized:
            induction = Induction(declared, sizes_of(declared))
            for step in induction.steps:
                if not possible.get(step.name):
                    question = induction.condition(step.name, "", induction.taken(step).text)
                    possible[step.name] = _is_satisfiable(question.texts[-1])
    return tuple(name for name, is_possible in possible.items() if not is_possible)


def never_met(versions: Iterable[Sequence[Declaration]]) -> tuple[str, ...]:
    """Return the conditions A of claims "if A, then B" that hold in no version, in no state in which all
    hypotheses hold, as far as z3 can tell.

    Such a part of a claim is proved vacuously: A may be false by mistake. A condition is named by its claim
    and by its number among the conditions of this claim.

    versions: as in `never_taken`.
    """
    possible: dict[str, bool] = {}
    for sized in versions:
        for declared in sized:
            induction, numbers = Induction(declared, sizes_of(declared)), Counter[str]()
            for claim in (*declared.always, *declared.invariants):
                for condition in _conditions_in(claim.term):
                    name = str(claim.name)
                    numbers[name] += 1
                    numbered = f"condition {numbers[name]} of {name!r}"
                    if not possible.get(numbered):
                        question = induction.condition("", name, induction.holds(condition))
                        possible[numbered] = _is_satisfiable(question.texts[-1])
    return tuple(name for name, is_possible in possible.items() if not is_possible)


def _conditions_in(term: Term) -> Iterator[Term]:
    """Yield each condition A of a claim's "if A, then B": that A holds for some values of its parameters."""
    match term:
        case ForAll(param, body):
            yield from (Exists(param, condition) for condition in _conditions_in(body))
        case And(terms):
            for part in terms:
                yield from _conditions_in(part)
        case Or((Not(condition), _)):
            yield condition


def _is_satisfiable(text: str) -> bool:
    import z3

    solver = z3.Solver(ctx=z3.Context())
    solver.set("timeout", 20_000)
    solver.from_string(text)
    return bool(solver.check() == z3.sat)


class ExampleSearch:
    """Looks for examples in declarations of one protocol, with few members of each set first."""

    def __init__(self, sized: Sequence[Declaration]) -> None:
        self._sized = sized

    def example(self, step: str, claim: str) -> Example | None:
        """An example for an open condition with the fewest members; None if these declarations have none."""
        for declared in self._sized:
            for condition in conditions_of(declared, sizes_of(declared), step):
                if condition.claim == claim:
                    values = _Solved(declared, condition).values()
                    if values is not None:
                        return _told(declared, condition, values)
        return None


def sizes_of(declared: Declaration) -> dict[IndexSet, int]:
    """Return the size of each index set, as declared for the explorer."""
    return {members: members.size for members in declared.index_sets}


class _Solved:
    """z3's model of a condition with few members, with as many cells as possible in their initial state."""

    def __init__(self, declared: Declaration, condition: Condition) -> None:
        import z3

        self._declared, self._layout = declared, CellLayout(declared)
        self._solver = z3.Solver(ctx=z3.Context())
        self._solver.set("timeout", 20_000)
        self._solver.from_string("\n".join((condition.texts[-1], *self._cells(), *self._forgotten())))
        self._possible = self._solver.check() == z3.sat
        """Whether there is a model."""

    def values(self) -> dict[str, str] | None:
        """The named constants: cells as `cell!3`, the step's members. None if there is no model."""
        import z3

        if not self._possible:
            return None
        constants = {str(one): one() for one in self._solver.model() if one.arity() == 0}
        for place, cell in enumerate(self._layout.cells):
            constant = constants[f"cell!{place}"]
            first = _name_of(cell.variable.domain, cell.variable.domain.initial)
            same = z3.Not(constant) if first == "false" else constant == _value(constant, first)
            self._solver.push()
            self._solver.add(same)
            if self._solver.check() != z3.sat:
                self._solver.pop()
        self._solver.check()
        model = self._solver.model()
        values = {name: model.eval(one, model_completion=True) for name, one in constants.items()}
        return {name: str(one).lower() if z3.is_bool(one) else str(one) for name, one in values.items()}

    def _cells(self) -> Iterator[str]:
        for place, cell in enumerate(self._layout.cells):
            sort = sort_of(cell.variable.domain)
            yield f"(declare-const cell!{place} {sort})"
            yield f"(assert (= cell!{place} ({cell.variable.name} {' '.join(_members(cell))})))"

    def _forgotten(self) -> Iterator[str]:
        """Assert that nothing is left to forget, because the explorer sees only such states."""
        writer = SmtWriter(self._declared, sizes_of(self._declared))
        for forget in self._declared.forgets:
            domain = forget.cell.variable.domain
            term: Term = implies(forget.when, forget.cell.equals(Const(domain, domain.initial)))
            yield f"(assert {writer.say(for_all(term))})"


def _members(cell: Cell) -> list[str]:
    return [member_name(one, number) for one, number in zip(cell.variable.indices, cell.indices)]


def _value(constant: Any, name: str) -> Any:
    sort = constant.sort()
    return next(
        sort.constructor(n)() for n in range(sort.num_constructors()) if str(sort.constructor(n)) == name
    )


def _name_of(domain: Domain, value: int) -> str:
    if isinstance(domain, OneOf) and value != domain.initial:
        return member_name(domain.members, value)
    return value_name(domain, value)


# From z3's names to the explorer's values.


def _told(declared: Declaration, condition: Condition, values: dict[str, str]) -> Example:
    layout = CellLayout(declared)
    state, words = _state(declared, layout, values)
    labels = {}
    for place, cell in enumerate(layout.cells):
        domain = cell.variable.domain
        if isinstance(domain, Words):
            label, first = words[place], domain.label(domain.initial)
        else:
            label, first = domain.label(state[place]), domain.label(domain.initial)
        if label != first:
            labels[str(cell)] = label
    move = _move(declared, condition.step, values)
    known = tuple(state) if all(value >= 0 for value in state) else None
    return Example(declared, condition.step, condition.claim, move, labels, known)


def _state(
    declared: Declaration, layout: CellLayout, values: dict[str, str]
) -> tuple[list[int], dict[int, str]]:
    """The values of the cells, -1 for a word to which no table leads; and the labels of all words."""
    state = []
    for place, cell in enumerate(layout.cells):
        domain, name = cell.variable.domain, values[f"cell!{place}"]
        count = len(domain.words) if isinstance(domain, Words) else domain.size
        # Of words only the state is known yet: any word in it will do until its counters are counted.
        state.append(next(value for value in range(count) if _name_of(domain, value) == name))
    counted, labels = list(state), {}
    for place, cell in enumerate(layout.cells):
        domain = cell.variable.domain
        if isinstance(domain, Words):
            word = domain.words[state[place]]
            counts = tuple(
                _count(declared, layout, state, cell, name.name) for name in domain.machine.counters
            )
            found = (word[0], counts) if word else None
            counted[place] = domain.words.index(found) if found in domain.words else -1
            named = ", ".join(f"{one.name}={count}" for one, count in zip(domain.machine.counters, counts))
            labels[place] = f"{domain.machine.states(word[0]).name}({named})" if word else "ILLEGAL"
    return counted, labels


def _count(declared: Declaration, layout: CellLayout, state: Sequence[int], cell: Cell, counter: str) -> int:
    """Return how many members a counter counts in a state; where it counts none, its value by the table."""
    words = cell.variable.domain
    assert isinstance(words, Words)
    counting = next(
        one for one in declared.countings if (one.cell.variable, one.counter) == (cell.variable, counter)
    )
    given: Any = dict(zip(counting.cell.indices, cell.indices))
    if evaluate(counting.when, layout, state, given):
        members = range(counting.member.members.size)
        return sum(
            evaluate(counting.counts, layout, state, {**given, counting.member: one}) for one in members
        )
    place = [one.name for one in words.machine.counters].index(counter)
    word = words.words[state[layout.place(cell.variable, cell.indices)]]
    known = known_counts(words.machine, place, words.start[place] > 0).get(word[0], 0) if word else 0
    return words.start[place] if known == ALL else int(known)


def _move(declared: Declaration, step: str, values: dict[str, str]) -> Move:
    """The step with the numbers of its members: ("start", 0, 1)."""
    params = next(
        (one.params for one in Induction(declared).steps if one.name == step and _taken(one.params, values)),
        (),
    )
    return (step, *(int(values[f"{param.name}{TAKEN}"].rpartition("_")[2]) for param in params))


def _taken(params: Sequence[Any], values: dict[str, str]) -> bool:
    return all(f"{param.name}{TAKEN}" in values for param in params)


def reached(example: Example, seconds: float = REACH_SECONDS) -> Reached:
    """Whether the protocol breaks a claim or an invariant with as few members as the example has.

    If it does not, the result names facts that are never all true in a reachable state.

    seconds: the limit of each of two explorations.
    """
    declared = replace(example.declared, always=(*example.declared.always, *example.declared.invariants))
    found = explore(replace(declared, sometimes=()), max_seconds=seconds)
    if found.verdict is not Verdict.PROVED:
        return Reached(found.refutation, found.verdict is Verdict.REFUTED)
    return Reached(None, True, _excluding(example, seconds))


def _excluding(example: Example, seconds: float) -> tuple[str, ...]:
    """As few facts of the state as possible that are never all true in a reachable state.

    Empty if time is short.
    """
    state = example.state
    if state is None:  # The tables lead to none of these words.
        return tuple(f"{cell} is {value}" for cell, value in example.values.items() if "=" in value)
    states = ReachedStates(example.declared, seconds)
    if not states.complete:
        return ()
    layout = CellLayout(example.declared)
    facts = dict(enumerate(state))
    # Facts that the state shares with the initial state say least, so they are dropped first.
    for place in sorted(facts, key=lambda one: state[one] != layout.initial[one]):
        rest = {one: value for one, value in facts.items() if one != place}
        if rest and not states.holding(rest):
            facts = rest
    labels = ((layout.cells[place], value) for place, value in facts.items())
    return tuple(f"{cell} is {cell.variable.domain.label(value)}" for cell, value in labels)
