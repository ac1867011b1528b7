"""The conditions of a proof by induction: each claim holds initially, and each step keeps each claim.

A step is an action, or a forget. Each condition is a separate question, so an open one names a step and a
claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from kvsm.check.proof.rewriting import conjuncts
from kvsm.check.proof.smt import (
    Given,
    Names,
    Sizes,
    SmtWriter,
    formals,
    joined,
    none_name,
    sort_name,
    sort_of,
    value_name,
)
from kvsm.check.protocol.terms import (
    TRUE,
    After,
    And,
    Assign,
    Claim,
    Const,
    Declaration,
    Each,
    Effect,
    Equal,
    Exists,
    ForAll,
    If,
    IndexSet,
    Not,
    Param,
    Read,
    Term,
    Variable,
    words_of,
)
from kvsm.errors import ConfigError

AFTER = "!after"
"""Ends the name of the function with a variable's values after a step."""
TAKEN = "!taken"
"""Ends the name of a step's parameter."""


@dataclass(frozen=True)
class Condition:
    """One question to a solver. The condition holds if the text cannot be satisfied.

    texts: the same question with fewer and with more hypotheses; one that cannot be satisfied is enough.
    """

    step: str
    claim: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """An action, or a forget: what it needs and what it assigns."""

    name: str
    params: tuple[Param, ...]
    guard: Term
    effects: tuple[Effect, ...]
    forgets: bool = False

    @cached_property
    def assigned(self) -> dict[str, list[Assign]]:
        """Variable -> its assignments, in order. Where two assign one cell, the last one counts."""
        found: dict[str, list[Assign]] = {}
        for assign in _assigned(self.effects, self.params):
            found.setdefault(assign.cell.variable.name, []).append(assign)
        return found


NO_STEP = Step("at first", (), TRUE, ())


@dataclass(frozen=True)
class Taken:
    """A step as SMT text.

    given: the text of each parameter.
    names: for each variable the function with its values after the step.
    """

    step: Step
    given: Given
    names: Names
    text: str


def _assigned(effects: tuple[Effect, ...], bound: tuple[Param, ...]) -> Iterator[Assign]:
    """The assignments. bound: the parameters around them, which no `Each` may bind again."""
    for effect in effects:
        if not isinstance(effect, Each):
            yield effect
        elif effect.param in bound:
            raise ConfigError(f"an effect binds the parameter {effect.param.name!r}, which is bound already")
        else:
            yield from _assigned(effect.effects, (*bound, effect.param))


def _words_after(term: Term, params: frozenset[Term]) -> Iterator[After]:
    """Yield the machine steps on single cells whose indices are all among these parameters."""
    if isinstance(term, After) and isinstance(term.word, Read) and set(term.word.indices) <= params:
        yield term
    if isinstance(term, ForAll | Exists):
        params -= {term.param}
    for part in term.parts:
        yield from _words_after(part, params)


def _cells_at(term: Term, params: frozenset[Term]) -> list[Read]:
    """The cells that a term reads at these parameters."""

    def read(one: Term) -> Iterator[Read]:
        if isinstance(one, Read) and set(one.indices) <= params:
            yield one
        for part in one.parts:
            yield from read(part)

    return list(dict.fromkeys(read(term)))


def steps_of(declared: Declaration) -> list[Step]:
    """All steps. A forget after an action is a step of its own: if it keeps the claims, both together do."""
    steps = [Step(one.name, one.params, one.guard, one.effects) for one in declared.actions]
    for forget in declared.forgets:
        domain = forget.cell.variable.domain
        effect = Assign(forget.cell, Const(domain, domain.initial))
        steps.append(Step(f"forget {forget.cell.variable.name}", forget.params, forget.when, (effect,), True))
    return steps


def parts_of(declared: Declaration, claim: Claim) -> tuple[Term, ...]:
    """The parts of a claim that must all hold. Its parts about counters are left to the counting lemma."""
    counted = [one.claim for one in declared.countings]
    return tuple(one for one in conjuncts(claim.term) if one not in counted)


def variables_read(term: Term) -> set[str]:
    """The names of the variables that a term reads."""
    found = {term.variable.name} if isinstance(term, Read) else set()
    return found.union(*(variables_read(part) for part in term.parts))


def asks_for_witness(term: Term, holds: bool = True, given: bool = False) -> bool:
    """Whether a term says that for every member of a set there is a member of another one.

    holds: whether the term is asserted or negated. given: whether it is below a "for every".
    """
    match term:
        case ForAll(_, body) | Exists(_, body):
            exists = isinstance(term, Exists) is holds
            return (exists and given) or asks_for_witness(body, holds, given or not exists)
        case Not(inner):
            return asks_for_witness(inner, not holds, given)
        case And() | Read():
            return any(asks_for_witness(part, holds, given) for part in term.parts)
        case If(condition, then, otherwise):
            both = any(asks_for_witness(condition, one, given) for one in (True, False))
            return both or any(asks_for_witness(one, holds, given) for one in (then, otherwise))
    either = (holds, not holds) if isinstance(term, Equal) else (holds,)
    return any(asks_for_witness(part, one, given) for part in term.parts for one in either)


class Induction:
    """Writes the conditions of one declaration.

    sizes: the members of each index set; None for any number of them.
    """

    def __init__(self, declared: Declaration, sizes: Sizes | None = None) -> None:
        _refuse_loose_variables(declared)
        self.declared = declared
        self.writer = SmtWriter(declared, sizes)
        claims = (*declared.always, *declared.invariants)
        self.claims: dict[str, tuple[Term, ...]] = {}
        for claim in claims:
            name = str(claim.name)
            self.claims[name] = (*self.claims.get(name, ()), *parts_of(declared, claim))
        self.steps = steps_of(declared)

    @cached_property
    def prelude(self) -> str:
        """Sorts, variables, and the only assumption: each index set has a member."""
        return self.writer.prelude()

    @cached_property
    def _hypotheses(self) -> tuple[str, dict[Term, str]]:
        """The claims as hypotheses: those that ask for no witness, and each of the others."""
        plain, asking = [], {}
        for name, parts in self.claims.items():
            for part in parts:
                said = f"(assert {self.writer.say(part)}) ; {name}\n"
                if asks_for_witness(part):
                    asking[part] = said
                else:
                    plain.append(said)
        return "".join(plain), asking

    def condition(self, step: str, claim: str, question: str, part: Term = TRUE) -> Condition:
        """A question under the hypotheses. part: the part of the claim that it asks about.

        Solvers are faster with few hypotheses, and above all with few that ask for a witness. So there are
        several texts: without such hypotheses, with one of them, with all. For a part that asks for a
        witness, that one hypothesis is the part itself.
        """
        plain, asking = self._hypotheses
        chosen = (asking[part],) if part in asking else ("", *asking.values())
        every = ("".join(asking.values()),) if len(asking) > 1 else ()
        return Condition(
            step, claim, tuple(self.prelude + plain + one + question for one in (*chosen, *every))
        )

    def at_first(self) -> Iterator[Condition]:
        """Each claim in the initial state."""
        first = self.prelude + "\n".join(self._initial()) + "\n"
        for name, parts in self.claims.items():
            for part in parts:
                yield Condition(NO_STEP.name, name, (first + self.fails(part, self.taken(NO_STEP)),))

    def holds(self, term: Term) -> str:
        """Return the text that asserts that a term holds before a step."""
        return f"(assert {self.writer.say(term)})\n"

    def kept(self, step: Step) -> Iterator[Condition]:
        """Each claim after one step."""
        taken = self.taken(step)
        for name, parts in self.claims.items():
            for part in parts:
                if variables_read(part) & set(step.assigned):
                    yield self.condition(step.name, name, taken.text + self.fails(part, taken), part)

    def fails(self, term: Term, taken: Taken) -> str:
        """Assert that a term fails after a step, for some values of its leading parameters.

        Each cell at these values gets a name, so the change by the step is encoded once.
        """
        lines, given, term = self.some_case(term)
        cells: dict[Term, str] = {}
        with self.writer.naming(lines):
            for number, cell in enumerate(_cells_at(term, frozenset(given))):
                name, indices = f"case!{number}", [given[index] for index in cell.indices]
                value = self.after(taken, cell.variable, indices)
                lines += [
                    f"(declare-const {name} {sort_of(cell.variable.domain)})",
                    f"(assert (= {name} {value}))",
                ]
                cells[cell] = name
        lines.append(f"(assert (not {self.writer.say(term, taken.names, {**given, **cells})}))")
        return "\n".join(lines) + "\n"

    def some_case(self, term: Term) -> tuple[list[str], dict[Term, str], Term]:
        """Declare values of a term's leading parameters. Return the lines, the names, and the inner term."""
        lines: list[str] = []
        given: dict[Term, str] = {}
        while isinstance(term, ForAll):
            given[term.param] = f"{term.param.name}!case"
            lines += member(given[term.param], term.param.members)
            term = term.body
        return lines, given, term

    def name_words(self, terms: Iterable[Term], given: dict[Term, str], lines: list[str]) -> None:
        """Introduce a solver variable for each word step, so each guard is encoded once."""
        found = dict.fromkeys(one for term in terms for one in _words_after(term, frozenset(given)))
        for number, word in enumerate(found):
            name, sort = f"word!{number}", sort_of(words_of(word))
            lines.append(f"(declare-const {name} {sort})")
            lines.append(f"(assert (= {name} {self.writer.say(word, given=given)}))")
            given[word] = name

    def taken(self, step: Step) -> Taken:
        """Encode a step: its parameters, its guard, and the variables after it."""
        given: dict[Term, str] = {param: f"{param.name}{TAKEN}" for param in step.params}
        lines = [line for param in step.params for line in member(given[param], param.members)]
        assigned = (assign.value for changes in step.assigned.values() for assign in changes)
        self.name_words((step.guard, *assigned), given, lines)
        lines.append(f"(assert {self.writer.say(step.guard, given=given)})")
        names = {**self.writer.now, **{variable: f"{variable}{AFTER}" for variable in step.assigned}}
        taken = Taken(step, given, names, "")
        lines += (self._define_after(taken, self.declared.variable(name)) for name in step.assigned)
        return replace(taken, text="\n".join(lines) + "\n")

    def after(self, taken: Taken, variable: Variable, indices: list[str]) -> str:
        """The value of a cell after a step."""
        text = f"({variable.name} {' '.join(indices)})"
        for assign in taken.step.assigned.get(variable.name, []):
            given, conditions = self.at(taken, assign, indices)
            value = self.writer.say(assign.value, given=given)
            text = f"(ite {joined('and', conditions, '')} {value} {text})" if conditions else value
        return text

    def at(self, taken: Taken, assign: Assign, indices: list[str]) -> tuple[dict[Term, str], list[str]]:
        """Return the text of an assignment's parameters at one cell, and when it writes this cell."""
        given, conditions = dict(taken.given), []
        for name, index in zip(indices, assign.cell.indices):
            if index in taken.given:
                conditions.append(f"(= {name} {given[index]})")
            else:
                given[index] = name
        return given, conditions

    def _define_after(self, taken: Taken, variable: Variable) -> str:
        names, declared = formals(variable.indices)
        text = self.after(taken, variable, names)
        return f"(define-fun {variable.name}{AFTER} ({declared}) {sort_of(variable.domain)} {text})"

    def _initial(self) -> Iterator[str]:
        for variable in self.declared.variables:
            names, declared = formals(variable.indices)
            value = value_name(variable.domain, variable.domain.initial)
            yield f"(assert (forall ({declared}) (= ({variable.name} {' '.join(names)}) {value})))"


def _refuse_loose_variables(declared: Declaration) -> None:
    """Raise `ConfigError` if no action assigns a variable, or an action assigns one that is not declared.

    A step does not change a variable that it does not assign. If no action assigns it, it was forgotten.
    """
    assigned = {
        name for one in declared.actions for name in Step(one.name, one.params, TRUE, one.effects).assigned
    }
    known = {variable.name for variable in declared.variables}
    for name in sorted(known - assigned):
        raise ConfigError(
            f"no action of {declared.name} assigns {name!r}: the proof would be about a constant"
        )
    for name in sorted(assigned - known):
        raise ConfigError(f"an action of {declared.name} assigns {name!r}, which is not among its variables")


def member(name: str, members: IndexSet) -> list[str]:
    """Declare a constant that is a member of an index set."""
    return [
        f"(declare-const {name} {sort_name(members)})",
        f"(assert (not (= {name} {none_name(members)})))",
    ]
