"""Terms of a declaration as SMT-LIB, for any number of members of each index set.

Each index set is a sort without structure. One element of it stands for "none", and quantifiers leave it
out. A machine's word is its state. What its counters count are sets (`Counting`), and a row that asks for a
count asks for the size of such a set. That the counters are these sizes is proved apart
(`counting_lemma.py`).

The same terms can be written for a few members of each set. Then every quantifier is written out, and a
solver always finds a model if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from itertools import product

from kvsm.check.proof.rewriting import Renaming, pointed
from kvsm.check.protocol.terms import (
    After,
    And,
    Const,
    Counting,
    Declaration,
    Domain,
    Equal,
    Exists,
    ForAll,
    If,
    IndexSet,
    InState,
    Labels,
    Not,
    OneOf,
    Or,
    Param,
    Read,
    Term,
    Truth,
    Words,
    words_of,
)
from kvsm.states.machine import Arc

Sizes = Mapping[IndexSet, int]
"""How many members each index set has."""
Names = Mapping[str, str]
"""Variable -> the function that holds its values in the state that a term speaks of."""
Given = Mapping[Term, str]
"""What stands for a parameter, or for the word after a step."""


def sort_of(domain: Domain) -> str:
    """The sort of a variable's values. Raises `TypeError` for counts, which have none."""
    match domain:
        case OneOf(members):
            return sort_name(members)
        case Truth():
            return "Bool"
        case Labels():
            return domain.name.capitalize()
        case Words():
            return f"{domain.machine.name.capitalize()}State"
    raise TypeError(f"{domain} has no sort")


def sort_name(members: IndexSet) -> str:
    """The sort of an index set."""
    return "".join(word.capitalize() for word in members.name.split())


def none_name(members: IndexSet) -> str:
    """The element of the sort that stands for "none"."""
    return f"no_{members.name.replace(' ', '_')}"


def member_name(members: IndexSet, number: int) -> str:
    """A member of an index set with a few members."""
    return f"{members.name.replace(' ', '_')}_{number}"


def value_name(domain: Domain, value: int) -> str:
    """A value of a variable. Raises `TypeError` for a member of an index set and for counts."""
    match domain:
        case Truth():
            return "true" if value else "false"
        case OneOf(members) if value == domain.initial:
            return none_name(members)
        case Labels():
            return f"{domain.name}_{domain.label(value)}"
        case Words():
            word = domain.words[value]
            return state_name(domain, None if word is None else word[0])
    raise TypeError(f"value {value} of {domain} has no name")


def state_name(words: Words, state: int | None) -> str:
    """A state of a machine; None is ILLEGAL."""
    name = "ILLEGAL" if state is None else words.machine.states(state).name
    return f"{words.machine.name}_{name}"


def formals(sorts: tuple[IndexSet, ...], members: str = "i") -> tuple[list[str], str]:
    """Names for indices, and their declaration: (["i0", "i1"], "(i0 Slot) (i1 Worker)")."""
    names = [f"{members}{number}" for number in range(len(sorts))]
    return names, " ".join(f"({name} {sort_name(sort)})" for name, sort in zip(names, sorts))


def joined(word: str, parts: list[str], empty: str) -> str:
    """(and ...) or (or ...) of some parts."""
    return parts[0] if len(parts) == 1 else f"({word} {' '.join(parts)})" if parts else empty


class SmtWriter:
    """Writes the terms of one declaration.

    sizes: the members of each index set; None for any number of them.
    """

    def __init__(self, declared: Declaration, sizes: Sizes | None = None) -> None:
        self.declared, self.sizes = declared, sizes
        self.now: Names = {variable.name: variable.name for variable in declared.variables}
        self._countings = {(one.cell.variable.name, one.counter): one for one in declared.countings}
        self._depth = 0
        """Quantifiers around what is being written."""
        self._named: dict[str, str] | None = None

    def prelude(self) -> str:
        """The sorts, and the variables as functions."""
        lines = []
        for members in self.declared.index_sets:
            sort, none = sort_name(members), none_name(members)
            if self.sizes is None:
                lines += [f"(declare-sort {sort} 0)", f"(declare-const {none} {sort})"]
                lines += [f"(declare-const some_{sort} {sort})", f"(assert (not (= some_{sort} {none})))"]
            else:
                lines.append(_datatype(sort, [*self.members(members), none]))
        lines += [_datatype(sort, values) for sort, values in self._kinds().items()]
        for variable in self.declared.variables:
            sorts = " ".join(sort_name(one) for one in variable.indices)
            lines.append(f"(declare-fun {variable.name} ({sorts}) {sort_of(variable.domain)})")
        return "\n".join(lines) + "\n"

    def say(self, term: Term, names: Names | None = None, given: Given | None = None) -> str:
        """The term in a state. names: the functions with its values. given: its free parameters."""
        return self._say(Renaming().of(term, {}), names or self.now, given or {})

    @contextmanager
    def naming(self, lines: list[str]) -> Iterator[None]:
        """Meanwhile each outermost quantified text gets a name, which `lines` defines.

        A text that occurs several times is then one question to the solver.
        """
        self._named, self._lines = {}, lines
        yield
        self._named = None

    def members(self, members: IndexSet) -> list[str]:
        """The members of an index set, if they are few."""
        assert self.sizes is not None
        return [member_name(members, number) for number in range(self.sizes[members])]

    def over(self, kind: type[ForAll | Exists], params: list[Param], body: Callable[[Given], str]) -> str:
        """A quantified text. body: the text, once the parameters have names."""
        word, empty = ("and", "true") if kind is ForAll else ("or", "false")
        if not params:
            return body({})
        if self.sizes is not None:
            choices = product(*(self.members(param.members) for param in params))
            return joined(word, [body(dict(zip(params, names))) for names in choices], empty)
        given: Given = {
            param: f"{param.name.partition('!')[0]}!{self._depth + place}"
            for place, param in enumerate(params)
        }
        self._depth += len(params)
        inner = body(given)
        self._depth -= len(params)
        sorts = " ".join(
            f"({name} {sort_name(param.members)})" for param, name in zip(params, given.values())
        )
        none = [f"(= {name} {none_name(param.members)})" for param, name in zip(params, given.values())]
        if kind is ForAll:
            return self._name(f"(forall ({sorts}) (or {' '.join(none)} {inner}))")
        return self._name(f"(exists ({sorts}) (and {' '.join(f'(not {one})' for one in none)} {inner}))")

    def _name(self, text: str) -> str:
        if self._named is None or self._depth:
            return text
        if text not in self._named:
            name = f"holds!{len(self._named)}!{len(self._lines)}"
            self._named[text] = name
            self._lines += [f"(declare-const {name} Bool)", f"(assert (= {name} {text}))"]
        return self._named[text]

    def _kinds(self) -> dict[str, list[str]]:
        kinds: dict[str, list[str]] = {}
        for variable in self.declared.variables:
            domain = variable.domain
            if isinstance(domain, Labels):
                kinds[sort_of(domain)] = [value_name(domain, value) for value in range(domain.size)]
            if isinstance(domain, Words):
                states = [state_name(domain, state) for state in domain.machine.states]
                kinds[sort_of(domain)] = [*states, state_name(domain, None)]
        return kinds

    def _say(self, term: Term, names: Names, given: Given) -> str:
        def of(one: Term) -> str:
            return self._say(one, names, given)

        match term:
            case Const(domain, value):
                return value_name(domain, value)
            case Param() | After() | Read() if term in given:
                return given[term]
            case Read(variable, indices):
                return f"({names[variable.name]} {' '.join(map(of, indices))})"
            case Equal(left, right):
                return f"(= {of(left)} {of(right)})"
            case Not(inner):
                return f"(not {of(inner)})"
            case And(terms):
                return joined("and", [of(one) for one in terms], "true")
            case Or(terms):
                return joined("or", [of(one) for one in terms], "false")
            case If(condition, then, otherwise):
                return f"(ite {of(condition)} {of(then)} {of(otherwise)})"
            case ForAll() | Exists():
                return self._quantified(term, names, given)
            case InState(word, states):
                said, words = of(word), words_of(word)
                return joined("or", [f"(= {said} {state_name(words, state)})" for state in states], "false")
            case After(trigger, word):
                return self._after(trigger, word, names, given)
        raise TypeError(f"{term} cannot be said to a solver")

    def _quantified(self, term: ForAll | Exists, names: Names, given: Given) -> str:
        params, parts = pointed(term)
        word, empty = ("or", "false") if isinstance(term, ForAll) else ("and", "true")

        def body(bound: Given) -> str:
            return joined(word, [self._say(part, names, {**given, **bound}) for part in parts], empty)

        return self.over(type(term), params, body)

    # Steps of words.

    def _after(self, trigger: IntEnum, word: Term, names: Names, given: Given) -> str:
        words, said = words_of(word), "word!"
        text = state_name(words, None)
        for conditions, arc in self.arcs(trigger, word, said, names, given):
            text = f"(ite {conditions} {state_name(words, arc.target)} {text})"
        return f"(let (({said} {self._say(word, names, given)})) {text})"

    def arcs(
        self, trigger: IntEnum, word: Term, said: str, names: Names, given: Given
    ) -> Iterator[tuple[str, Arc]]:
        """The rows of a trigger, each with the condition for it. said: what stands for the word.

        Raises `TypeError` if a row asks for a count and the word is no cell: what it would count is not
        known.
        """
        words = words_of(word)
        for state in words.machine.states:
            for arc in words.machine.dense[trigger][state]:
                conditions = [f"(= {said} {state_name(words, state)})"]
                asked = words.machine.rows[arc.row].when
                for counter, (low, _) in zip(words.machine.counters, arc.ranges):
                    # Near its limit a step is refused (`counting_lemma.py`). The row does not ask for that.
                    high = asked.get(counter.name, (0, counter.limit))[1]
                    for size, wanted in ((low, True), (high + 1, False)):
                        if not 0 < size <= counter.limit:
                            continue  # Any count will do.
                        if not isinstance(word, Read):
                            raise TypeError(f"{trigger.name} asks for a count of {word}, which is no cell")
                        counting = self._countings[word.variable.name, counter.name]
                        conditions.append(self._sized(counting, word, size, wanted, names, given))
                yield joined("and", conditions, "true"), arc

    def _sized(
        self, counting: Counting, cell: Read, size: int, wanted: bool, names: Names, given: Given
    ) -> str:
        """Whether the counter counts here, and counts at least `size` (wanted) or fewer."""
        at = {
            index: self._say(value, names, given) for index, value in zip(counting.cell.indices, cell.indices)
        }
        bound: Given = {**given, **at}
        at_least = self.at_least(size, counting, names, bound)
        return joined(
            "and", [self.say(counting.when, names, bound), at_least if wanted else f"(not {at_least})"], ""
        )

    def at_least(self, size: int, counting: Counting, names: Names, given: Given) -> str:
        """Whether a counter counts at least `size` members. Raises `TypeError` beyond two."""
        one, other = counting.member, Param(f"{counting.member.name}_too", counting.member.members)
        counted = counting.counts
        if size == 1:
            return self.say(Exists(one, counted), names, given)
        if size > 2:
            raise TypeError(f"a row that asks for {size} of {counting.counter} cannot be said to a solver")
        also = Renaming().of(counted, {one: other})
        return self.say(Exists(one, Exists(other, And((~one.equals(other), counted, also)))), names, given)


def _datatype(sort: str, values: list[str]) -> str:
    return f"(declare-datatypes (({sort} 0)) (({' '.join(f'({value})' for value in values)})))"
