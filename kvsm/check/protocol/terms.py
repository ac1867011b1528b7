"""The language in which the protocol is declared: variables, actions and properties, as data.

One declaration (`offload_protocol.py`) is read four ways. numpy evaluates it for a million states at once
(`arrays.py`), plain Python for one state at a time (`plain.py`), and specs/protocol writes it out as Murphi
and as TLA+. The language holds only what all four can say: finite index sets, variables over them,
first-order terms.

An action happens at once: all its effects read the state before it. Afterwards the declaration's `Forget`s
are applied in order. Each resets a cell that nothing can read any more, so that states do not differ by it.

The steps of blocks, transfers and leases come from the machines' own tables (`kvsm.states`), through
`After`. A step that the table refuses gives the word ILLEGAL, which a property forbids.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property

from kvsm.properties import Property
from kvsm.states.machine import Machine, UndefinedStep

# Index sets, and what a variable may hold. Values are small ints, from 0 on.


@dataclass(frozen=True)
class IndexSet:
    """Things that differ only by their number, and are interchangeable."""

    name: str
    size: int

    @property
    def plural(self) -> str:
        """Several of them, for people."""
        if self.name.endswith("y"):
            return f"{self.name[:-1]}ies" if self.name[-2] not in "aeiou" else f"{self.name}s"
        return f"{self.name}es" if self.name.endswith("ch") else f"{self.name}s"


class _Domain:
    """The values of a variable: 0 to `size - 1`. A variable starts with `initial`."""

    initial = 0


@dataclass(frozen=True)
class Truth(_Domain):
    """0 or 1; false at first."""

    size = 2

    def label(self, value: int) -> str:
        """The value, for people."""
        return "yes" if value else "no"


@dataclass(frozen=True)
class UpTo(_Domain):
    """A count from 0 to `limit`; 0 at first."""

    limit: int

    @property
    def size(self) -> int:
        """How many values there are."""
        return self.limit + 1

    def label(self, value: int) -> str:
        """The value, for people."""
        return str(value)


@dataclass(frozen=True)
class OneOf:
    """A member of an index set, or none. None is the last value, and the value at first."""

    members: IndexSet

    @property
    def size(self) -> int:
        """How many values there are."""
        return self.members.size + 1

    @property
    def initial(self) -> int:
        return self.members.size

    @property
    def none(self) -> Const:
        """No member."""
        return Const(self, self.members.size)

    def label(self, value: int) -> str:
        """The value, for people."""
        return "none" if value == self.members.size else f"{self.members.name} {value}"


@dataclass(frozen=True)
class Labels(_Domain):
    """One of a few named values; the first at first."""

    name: str
    labels: tuple[str, ...]

    @property
    def size(self) -> int:
        """How many values there are."""
        return len(self.labels)

    def label(self, value: int) -> str:
        """The value, for people."""
        return self.labels[value]

    def __getitem__(self, label: str) -> Const:
        return Const(self, self.labels.index(label))


@dataclass(frozen=True, eq=False)
class Words(_Domain):
    """The state and counters of something that lives by a machine, as far as the limits allow.

    machine: its table.
    start: the counters at first, in the machine's initial state.
    limits: the largest value of each counter.
    kept: the states that a variable may hold after an action. Any other state counts as ILLEGAL there.

    A value is a place in `words`: first the words in kept states, then ILLEGAL, then the others.
    """

    machine: Machine
    start: tuple[int, ...]
    limits: tuple[int, ...]
    kept: frozenset[int]

    @cached_property
    def words(self) -> tuple[tuple[int, tuple[int, ...]] | None, ...]:
        """(state, counters) of everything that the table can lead to; None is ILLEGAL."""
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
        """How many values there are."""
        return self.illegal + 1

    @cached_property
    def illegal(self) -> int:
        """The value of ILLEGAL."""
        return self.words.index(None)

    @cached_property
    def next(self) -> tuple[tuple[int, ...], ...]:
        """next[trigger][value] is the value that follows: ILLEGAL if no row matches or a counter would pass
        its limit."""
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

    @cached_property
    def parts(self) -> tuple[Term, ...]:
        """The terms that it is made of, a bound parameter included."""
        values = (getattr(self, one.name) for one in fields(self))
        every = (part for value in values for part in (value if isinstance(value, tuple) else (value,)))
        return tuple(part for part in every if isinstance(part, Term))

    @cached_property
    def free_params(self) -> tuple[Param, ...]:
        """The parameters that no quantifier in it binds, in the order in which they occur first."""
        match self:
            case Param():
                return (self,)
            case ForAll(param, body) | Exists(param, body) | Total(param, body):
                return tuple(one for one in body.free_params if one != param)
        return tuple(dict.fromkeys(one for part in self.parts for one in part.free_params))

    def __and__(self, other: Term) -> Term:
        return And((self, other))

    def __or__(self, other: Term) -> Term:
        return Or((self, other))

    def __invert__(self) -> Term:
        return Not(self)

    def __add__(self, other: Term) -> Term:
        return Add((self, other))

    def equals(self, other: Term) -> Term:
        """self = other."""
        return Equal(self, other)

    def differs(self, other: Term) -> Term:
        """self ≠ other."""
        return Not(Equal(self, other))


@dataclass(frozen=True)
class Const(Term):
    """A value of a domain."""

    domain: Domain
    value: int


def number(value: int) -> Const:
    """A count."""
    return Const(UpTo(value), value)


TRUE, FALSE = Const(Truth(), 1), Const(Truth(), 0)


@dataclass(frozen=True)
class Param(Term):
    """Any member of an index set: a parameter of an action, or bound by ForAll, Exists, Total or Each."""

    name: str
    members: IndexSet


@dataclass(frozen=True)
class Variable:
    """A part of the state: one value of `domain` for each combination of indices.

    says: one sentence on what it means.
    """

    name: str
    says: str
    indices: tuple[IndexSet, ...]
    domain: Domain

    def __getitem__(self, indices: Term | tuple[Term, ...]) -> Read:
        return Read(self, indices if isinstance(indices, tuple) else (indices,))


@dataclass(frozen=True)
class Read(Term):
    """The value of a variable. Indices are parameters, so the state never decides which cell is read."""

    variable: Variable
    indices: tuple[Term, ...]


@dataclass(frozen=True)
class Equal(Term):
    """left = right."""

    left: Term
    right: Term


@dataclass(frozen=True)
class Less(Term):
    """left < right, of counts."""

    left: Term
    right: Term


@dataclass(frozen=True)
class Not(Term):
    """The term does not hold."""

    term: Term


@dataclass(frozen=True)
class And(Term):
    """All hold."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Or(Term):
    """At least one holds."""

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
    """`then` if the condition holds, otherwise `otherwise`."""

    condition: Term
    then: Term
    otherwise: Term


@dataclass(frozen=True)
class ForAll(Term):
    """The body holds for every member."""

    param: Param
    body: Term


@dataclass(frozen=True)
class Exists(Term):
    """The body holds for at least one member."""

    param: Param
    body: Term


@dataclass(frozen=True)
class Total(Term):
    """The sum of a count over an index set. A truth value counts as 1 or 0."""

    param: Param
    body: Term


@dataclass(frozen=True)
class After(Term):
    """The word after a trigger, by the machine's table; ILLEGAL if no row matches."""

    trigger: IntEnum
    word: Term


@dataclass(frozen=True)
class InState(Term):
    """Whether a word is in one of these states."""

    word: Term
    states: tuple[IntEnum, ...]


@dataclass(frozen=True)
class CounterOf(Term):
    """A counter of a word; 0 for ILLEGAL."""

    word: Term
    counter: str


def all_of(*terms: Term) -> Term:
    """All hold."""
    return And(terms)


def any_of(*terms: Term) -> Term:
    """At least one holds."""
    return Or(terms)


def implies(condition: Term, then: Term) -> Term:
    """Where the condition holds, the other term holds."""
    return Or((Not(condition), then))


def for_all(term: Term) -> Term:
    """The term holds for all values of its free parameters."""
    for param in reversed(term.free_params):
        term = ForAll(param, term)
    return term


def word_in(variable: Variable, state: IntEnum) -> Const:
    """The word of a variable in a state, with all counters at 0. Raises `ValueError` if there is none."""
    words = variable.domain
    if not isinstance(words, Words):
        raise TypeError(f"{variable.name} holds no machine's words")
    return Const(words, words.words.index((int(state), (0,) * len(words.machine.counters))))


def is_legal(word: Term) -> Term:
    """Whether a word is not ILLEGAL."""
    words = words_of(word)
    return Not(Equal(word, Const(words, words.illegal)))


def domain_of(term: Term) -> Domain:
    """The values that a term may have."""
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
    """The domain of a term that is a machine's word. Raises `TypeError` for any other term."""
    domain = domain_of(term)
    if not isinstance(domain, Words):
        raise TypeError(f"{term} is no machine's word")
    return domain


# The declaration.


@dataclass(frozen=True)
class Assign:
    """cell := value."""

    cell: Read
    value: Term


@dataclass(frozen=True)
class Each:
    """The effects, for every member of the parameter's set."""

    param: Param
    effects: tuple[Assign | Each, ...]


Effect = Assign | Each


@dataclass(frozen=True)
class Action:
    """Something that may happen, for any values of its parameters for which its guard holds.

    says: one sentence on what happens.
    drains: whether it brings things to their end. Winding down takes such actions and no others.
    """

    name: str
    says: str
    params: tuple[Param, ...]
    guard: Term
    effects: tuple[Effect, ...]
    drains: bool = False


@dataclass(frozen=True)
class Forget:
    """After every action: reset `cell` to its initial value where `when` holds, for all `params`.

    why: one sentence on why nothing can tell the difference.
    """

    params: tuple[Param, ...]
    cell: Read
    when: Term
    why: str


@dataclass(frozen=True)
class Counting:
    """What a counter of a machine's word counts: the members for which `counts` holds, where `when` holds.

    says: what is counted, for people.
    cell: a variable of words, at parameters that `counts` and `when` may use.
    """

    says: str
    cell: Read
    counter: str
    member: Param
    counts: Term
    when: Term

    @property
    def claim(self) -> Term:
        """The counter is the number of these members."""
        right: Term = CounterOf(self.cell, self.counter).equals(Total(self.member, self.counts))
        claim = ~self.when | right
        for param in self.cell.indices:
            assert isinstance(param, Param)
            claim = ForAll(param, claim)
        return claim


@dataclass(frozen=True)
class Claim:
    """A property. Its term holds in every state; the term of a "sometimes" holds in at least one state.

    id: the property's id, or the words for a "sometimes".
    says: one sentence on what holds.
    """

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
    """A whole protocol.

    always: what holds in every state.
    sometimes: what must be met, or the exploration has not seen the dangerous states.
    rest: holds when everything is wound down.
    rank: a count that every draining action makes smaller. Wherever `rest` does not hold, a draining action
        is possible. So winding down ends, and ends at rest: this proves progress (S9).
    countings: what the counters of the machines count.
    invariants: what else holds in every state. With it the claims can be proved by induction.
    about: what it is about, for readers of an export.
    notes: what is not modelled, for readers of an export.
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
    countings: tuple[Counting, ...] = ()
    invariants: tuple[Claim, ...] = ()
    about: str = ""
    notes: tuple[str, ...] = ()

    @property
    def acting(self) -> tuple[Action, ...]:
        """The actions that change something. The others lead nowhere, so nobody explores them."""
        return tuple(action for action in self.actions if action.effects)

    def variable(self, name: str) -> Variable:
        """The variable of this name."""
        return next(one for one in self.variables if one.name == name)
