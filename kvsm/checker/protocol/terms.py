"""The language in which the protocol is declared: variables, actions and properties, as data.

A declaration (`protocol.py`) is read three ways: numpy evaluates it for a million states at once
(`arrays.py`), plain Python for one state at a time (`plain.py`), and it is written out as Murphi and TLA+.
So this is no more than those can all say: finite index sets, variables over them, first-order terms.

An action happens at once: its effects read the state before it, all of them. Then the declaration's
`Forget`s are applied, one after the other: what nobody can read any more is put back to its initial value,
so that states do not differ by it.

Steps of blocks, transfers and leases are not said here. `After` takes them from the machine's own table
(`kvsm.states`), and a step that the table refuses gives the word ILLEGAL, which a property forbids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

from kvsm.properties import Property
from kvsm.states.machine import Machine, UndefinedStep

# What a variable is indexed by, and what it may hold. Values are small ints, from 0 on.


@dataclass(frozen=True)
class IndexSet:
    """Things that are told apart by a number only, and are interchangeable."""

    name: str
    size: int


@dataclass(frozen=True)
class Truth:
    """0 or 1, false at first."""

    @property
    def size(self) -> int:
        return 2

    @property
    def initial(self) -> int:
        return 0

    def label(self, value: int) -> str:
        return "yes" if value else "no"


@dataclass(frozen=True)
class UpTo:
    """A count, 0 at first."""

    limit: int

    @property
    def size(self) -> int:
        return self.limit + 1

    @property
    def initial(self) -> int:
        return 0

    def label(self, value: int) -> str:
        return str(value)


@dataclass(frozen=True)
class OneOf:
    """A member of an index set, or none: which comes after them all, and is the value at first."""

    members: IndexSet

    @property
    def size(self) -> int:
        return self.members.size + 1

    @property
    def initial(self) -> int:
        return self.members.size

    @property
    def none(self) -> Const:
        return Const(self, self.members.size)

    def label(self, value: int) -> str:
        return "none" if value == self.members.size else f"{self.members.name} {value}"


@dataclass(frozen=True)
class Labels:
    """One of a few named values; the first one at first."""

    name: str
    labels: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.labels)

    @property
    def initial(self) -> int:
        return 0

    def label(self, value: int) -> str:
        return self.labels[value]

    def __getitem__(self, label: str) -> Const:
        return Const(self, self.labels.index(label))


@dataclass(frozen=True, eq=False)
class Words:
    """What a thing that lives by `machine` is: its state and counters, as far as `limits` allow.

    start: the counters at first, in the machine's initial state. kept: states in which a variable may hold
    it; those that are over at once need no room, and one that is held after an action counts as ILLEGAL.
    A value is the place in `words`: first those that are kept, then ILLEGAL, then the others.
    """

    machine: Machine
    start: tuple[int, ...]
    limits: tuple[int, ...]
    kept: frozenset[int]

    @cached_property
    def words(self) -> tuple[tuple[int, tuple[int, ...]] | None, ...]:
        """(state, counters); None is ILLEGAL. All that the table can lead to."""
        first = (int(self.machine.initial), self.start)
        found, waiting = {first: None}, [first]
        while waiting:
            state, counts = waiting.pop()
            for trigger in self.machine.triggers:
                after = self._after(state, counts, trigger)
                if after is not None and after not in found:
                    found[after] = None
                    waiting.append(after)
        kept = sorted(word for word in found if word[0] in self.kept and word != first)
        return (first, *kept, None, *sorted(word for word in found if word[0] not in self.kept))

    @property
    def size(self) -> int:
        return self.illegal + 1

    @property
    def initial(self) -> int:
        return 0

    @cached_property
    def illegal(self) -> int:
        return self.words.index(None)

    @cached_property
    def next(self) -> tuple[tuple[int, ...], ...]:
        """next[trigger][value] is the value that follows; ILLEGAL where the table has no row for it, or a
        counter would pass its limit."""
        places = {word: place for place, word in enumerate(self.words)}
        return tuple(
            tuple(
                self.illegal if word is None else places[self._after(*word, trigger)] for word in self.words
            )
            for trigger in self.machine.triggers
        )

    def label(self, value: int) -> str:
        """`LOADING(copies=1, pins=0)`."""
        word = self.words[value]
        if word is None:
            return "ILLEGAL"
        state, counts = word
        names = (counter.name for counter in self.machine.counters)
        named = ", ".join(f"{name}={count}" for name, count in zip(names, counts))
        return f"{self.machine.states(state).name}({named})"

    def _after(
        self, state: int, counts: tuple[int, ...], trigger: IntEnum
    ) -> tuple[int, tuple[int, ...]] | None:
        try:
            target, after = self.machine.step(state, counts, trigger)
        except UndefinedStep:
            return None
        within = all(count <= limit for count, limit in zip(after, self.limits))
        return (target, after) if within else None


Domain = Truth | UpTo | OneOf | Labels | Words


# Terms. Truth values are 0 and 1.


@dataclass(frozen=True)
class Term:
    """Something that has a value in a state, once its parameters are given."""

    def __and__(self, other: Term) -> Term:
        return And((self, other))

    def __or__(self, other: Term) -> Term:
        return Or((self, other))

    def __invert__(self) -> Term:
        return Not(self)

    def __add__(self, other: Term) -> Term:
        return Add((self, other))

    def equals(self, other: Term) -> Term:
        return Equal(self, other)

    def differs(self, other: Term) -> Term:
        return Not(Equal(self, other))


@dataclass(frozen=True)
class Const(Term):
    """A value of a domain."""

    domain: Domain
    value: int


def number(value: int) -> Const:
    return Const(UpTo(value), value)


TRUE, FALSE = Const(Truth(), 1), Const(Truth(), 0)


@dataclass(frozen=True)
class Param(Term):
    """Any member of an index set: an action's parameter, or bound by ForAll, Exists, Total or Each."""

    name: str
    members: IndexSet


@dataclass(frozen=True)
class Variable:
    """A part of the state: one value of `domain` for each combination of indices."""

    name: str
    says: str
    """One sentence: what it means."""
    indices: tuple[IndexSet, ...]
    domain: Domain

    def __getitem__(self, indices: Term | tuple[Term, ...]) -> Read:
        return Read(self, indices if isinstance(indices, tuple) else (indices,))


@dataclass(frozen=True)
class Read(Term):
    """The value of a variable. Indices are parameters: so which cell is read never depends on the state."""

    variable: Variable
    indices: tuple[Term, ...]


@dataclass(frozen=True)
class Equal(Term):
    left: Term
    right: Term


@dataclass(frozen=True)
class Less(Term):
    """left < right, of counts."""

    left: Term
    right: Term


@dataclass(frozen=True)
class Not(Term):
    term: Term


@dataclass(frozen=True)
class And(Term):
    """All hold."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Or(Term):
    """One holds."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Add(Term):
    """The sum of counts."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Minus(Term):
    """The difference of counts; left is not less than right."""

    left: Term
    right: Term


@dataclass(frozen=True)
class If(Term):
    condition: Term
    then: Term
    otherwise: Term


@dataclass(frozen=True)
class ForAll(Term):
    param: Param
    body: Term


@dataclass(frozen=True)
class Exists(Term):
    param: Param
    body: Term


@dataclass(frozen=True)
class Total(Term):
    """The sum of a count over an index set; of a truth value, how often it holds."""

    param: Param
    body: Term


@dataclass(frozen=True)
class After(Term):
    """The word that follows on a trigger, by the machine's table; ILLEGAL if it has none."""

    trigger: IntEnum
    word: Term


@dataclass(frozen=True)
class InState(Term):
    """Whether a word's state is one of these."""

    word: Term
    states: tuple[IntEnum, ...]


@dataclass(frozen=True)
class CounterOf(Term):
    """A counter of a word; 0 of ILLEGAL."""

    word: Term
    counter: str


def all_of(*terms: Term) -> Term:
    return And(terms)


def any_of(*terms: Term) -> Term:
    return Or(terms)


def is_legal(word: Term) -> Term:
    """Whether a word is not ILLEGAL."""
    words = words_of(word)
    return Not(Equal(word, Const(words, words.illegal)))


def domain_of(term: Term) -> Domain:
    """What a term that is not a parameter may be."""
    if isinstance(term, Read):
        return term.variable.domain
    if isinstance(term, After):
        return domain_of(term.word)
    if isinstance(term, If):
        return domain_of(term.then)
    if isinstance(term, Const):
        return term.domain
    if isinstance(term, Param):
        return OneOf(term.members)
    return Truth()


def words_of(term: Term) -> Words:
    """The words of a term that is one: a variable's, or what a step made of it."""
    domain = domain_of(term)
    if not isinstance(domain, Words):
        raise TypeError(f"{term} is no machine's word")
    return domain


# Actions, and what else a declaration consists of.


@dataclass(frozen=True)
class Assign:
    """cell := value."""

    cell: Read
    value: Term


@dataclass(frozen=True)
class Each:
    """Its effects, for every member of the parameter's set."""

    param: Param
    effects: tuple[Assign | Each, ...]


Effect = Assign | Each


@dataclass(frozen=True)
class Action:
    """Something that may happen, for any values of its parameters for which its guard holds.

    drains: whether it brings things to their end. Winding down is to take such actions, and no other.
    """

    name: str
    says: str
    """One sentence: what happens."""
    params: tuple[Param, ...]
    guard: Term
    effects: tuple[Effect, ...]
    drains: bool = False


@dataclass(frozen=True)
class Forget:
    """After every action: put `cell` back to its initial value where `when` holds, for all `params`."""

    params: tuple[Param, ...]
    cell: Read
    when: Term
    why: str
    """One sentence: why nobody can tell."""


@dataclass(frozen=True)
class Claim:
    """A property. `term` holds in every state, or for a "sometimes" in one at least."""

    name: Property | str
    """A property; for a "sometimes" a phrase."""
    says: str
    term: Term

    @property
    def id(self) -> str:
        """The name in an export: the id of a property, or the phrase."""
        return self.name.id if isinstance(self.name, Property) else self.name


@dataclass(frozen=True)
class Declaration:
    """A whole declaration.

    rest: when all is wound down. rank: a count that every draining action makes smaller; and where not all
    is at rest, such an action is possible. So winding down ends, and ends at rest: "eventually" (S9).
    """

    name: str
    bounds: str
    index_sets: tuple[IndexSet, ...]
    variables: tuple[Variable, ...]
    actions: tuple[Action, ...]
    forgets: tuple[Forget, ...]
    always: tuple[Claim, ...]
    sometimes: tuple[Claim, ...]
    rest: Term
    rank: Term
    notes: Sequence[str] = field(default=())
    """What is not modelled, for whoever reads an export."""

    def variable(self, name: str) -> Variable:
        return next(one for one in self.variables if one.name == name)
