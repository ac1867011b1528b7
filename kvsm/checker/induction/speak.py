"""Terms of a declaration as SMT-LIB, for any number of members of each index set.

Each index set is a sort without structure. One element of it stands for "none", and quantifiers leave it out. A
machine's word is its state; what its counters count are sets, and a row that asks for a count asks for the size
of such a set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import count

from kvsm.checker.protocol.terms import (
    After,
    And,
    Const,
    Counting,
    Declaration,
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
    domain_of,
    words_of,
)


def sort_name(members: IndexSet) -> str:
    """The sort of an index set."""
    return "".join(word.capitalize() for word in members.name.split())


def none_name(members: IndexSet) -> str:
    """The element of the sort that stands for "none"."""
    return f"no_{members.name.replace(' ', '_')}"


def label_name(labels: Labels, value: int) -> str:
    return f"{labels.name}_{labels.label(value)}"


def words_sort(words: Words) -> str:
    return f"{words.machine.name.capitalize()}State"


def state_name(words: Words, state: int | None) -> str:
    name = "ILLEGAL" if state is None else words.machine.states(state).name
    return f"{words.machine.name}_{name}"


def domain_sort(domain: object) -> str:
    match domain:
        case OneOf(members):
            return sort_name(members)
        case Truth():
            return "Bool"
        case Labels() as labels:
            return labels.name.capitalize()
        case Words() as words:
            return words_sort(words)
    raise TypeError(f"no SMT sort for {domain}")


Names = Mapping[str, str]
"""Variable -> the function that has its values in the state that is spoken of."""


class Speaker:
    """Writes terms. after: speaks of the state after an action."""

    def __init__(self, declared: Declaration) -> None:
        self.declared = declared
        self._countings = {(one.cell.variable.name, one.counter): one for one in declared.countings}
        self._fresh = count()

    def say(self, term: Term, names: Names, given: Mapping[Param, str]) -> str:
        def of(one: Term) -> str:
            return self.say(one, names, given)

        match term:
            case Const(domain, value):
                return self._value(domain, value)
            case Param():
                return given[term]
            case Read(variable, indices):
                return f"({names[variable.name]} {' '.join(of(one) for one in indices)})"
            case Equal(left, right):
                return f"(= {of(left)} {of(right)})"
            case Not(inner):
                return f"(not {of(inner)})"
            case And(terms):
                return f"(and {' '.join(map(of, terms))})" if terms else "true"
            case Or(terms):
                return f"(or {' '.join(map(of, terms))})" if terms else "false"
            case If(condition, then, otherwise):
                return f"(ite {of(condition)} {of(then)} {of(otherwise)})"
            case ForAll(param, body) | Exists(param, body):
                name = f"{param.name}!{next(self._fresh)}"
                inner = self.say(body, names, {**given, param: name})
                is_member = f"(not (= {name} {none_name(param.members)}))"
                if isinstance(term, ForAll):
                    return f"(forall (({name} {sort_name(param.members)})) (=> {is_member} {inner}))"
                return f"(exists (({name} {sort_name(param.members)})) (and {is_member} {inner}))"
            case InState(word, states):
                said, words = of(word), words_of(word)
                parts = [f"(= {said} {state_name(words, state)})" for state in states]
                return parts[0] if len(parts) == 1 else f"(or {' '.join(parts)})"
            case After(trigger, word):
                return self._after(trigger, word, names, given)
        raise TypeError(f"no SMT for {term}")

    def _value(self, domain: object, value: int) -> str:
        match domain:
            case Truth():
                return "true" if value else "false"
            case OneOf(members):
                return none_name(members)
            case Labels() as labels:
                return label_name(labels, value)
            case Words() as words:
                found = words.words[value]
                return state_name(words, None if found is None else found[0])
        raise TypeError(f"no SMT for {value} of {domain}")

    def _after(self, trigger: IntEnum, word: Term, names: Names, given: Mapping[Param, str]) -> str:
        words, said = words_of(word), self.say(word, names, given)
        cell = word
        while isinstance(cell, After | If):
            cell = cell.word if isinstance(cell, After) else cell.then
        assert isinstance(cell, Read)
        text = state_name(words, None)
        for state in words.machine.states:
            for arc in reversed(words.machine.dense[trigger][state]):
                conditions = [f"(= {said} {state_name(words, state)})"]
                for counter, (low, high) in zip(words.machine.counters, arc.ranges):
                    conditions += self._sized(cell, counter.name, low, high, counter.limit, names, given)
                joined = conditions[0] if len(conditions) == 1 else f"(and {' '.join(conditions)})"
                text = f"(ite {joined} {state_name(words, arc.target)} {text})"
        return text

    def _sized(
        self, cell: Read, counter: str, low: int, high: int, limit: int, names: Names, given: Mapping[Param, str]
    ) -> list[str]:
        """That a counter is in this range. Near its limit a step is refused: that is no part of the proof."""
        wanted = []
        if low > 0:
            wanted.append(self.at_least(low, self.counted(cell, counter, names, given)))
        if high < limit - 1:
            wanted.append(f"(not {self.at_least(high + 1, self.counted(cell, counter, names, given))})")
        return wanted

    def counted(
        self, cell: Read, counter: str, names: Names, given: Mapping[Param, str]
    ) -> tuple[str, Callable[[str], str], str]:
        """(sort, member -> that it is counted, none) of what a counter of this cell counts."""
        counting = self._countings[cell.variable.name, counter]
        binding = dict(given)
        for param, index in zip(counting.cell.indices, cell.indices):
            assert isinstance(param, Param)
            binding[param] = self.say(index, names, given)
        members = counting.member.members

        def is_counted(name: str) -> str:
            said = self.say(counting.counts, names, {**binding, counting.member: name})
            return f"(and (not (= {name} {none_name(members)})) {said})"

        return sort_name(members), is_counted, none_name(members)

    def at_least(self, size: int, counted: tuple[str, Callable[[str], str], str]) -> str:
        sort, is_counted, _ = counted
        if size > 2:
            raise TypeError(f"the proof cannot count to {size}")
        one = f"x!{next(self._fresh)}"
        if size == 1:
            return f"(exists (({one} {sort})) {is_counted(one)})"
        other = f"x!{next(self._fresh)}"
        return (
            f"(exists (({one} {sort}) ({other} {sort})) "
            f"(and (not (= {one} {other})) {is_counted(one)} {is_counted(other)}))"
        )
