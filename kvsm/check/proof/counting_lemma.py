"""The counting lemma: each counter of a machine's word is the size of the set that it counts.

The proof speaks of sets, the tables of counters: a row that asks for copies = 1 is said to a solver as "one
copy, and no other". This is right if counter and set change alike. For each step, each word and each
counter, the row that the step takes gives the change of the counter. The conditions ask that the set of
counted members changes by as much: one member more, one less, none left, all of them, or the same members.

Where a counter starts to count, its value must follow from the word's state alone, by the table
(`known_counts`).

A counter has a limit, and a row that would pass it does not match. So near a limit an action is refused,
and the protocol loses behaviour but gains none. This is sound for actions that may be refused. A test finds
the rows that can be refused: no draining action, report, reset or loss takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvsm.check.proof.conditions import Condition, Induction, Step, Taken, member, variables_read
from kvsm.check.proof.smt import Given, SmtWriter, joined, state_name
from kvsm.check.protocol.terms import (
    TRUE,
    After,
    Const,
    Counting,
    Exists,
    ForAll,
    If,
    Param,
    Read,
    Term,
    Words,
    words_of,
)
from kvsm.states.machine import Machine

SAME, MORE, LESS, NONE, ALL, UNKNOWN = CHANGES = tuple(
    f"change_{one}" for one in ("SAME", "MORE", "LESS", "NONE", "ALL", "UNKNOWN")
)
"""How a counter changes: not at all, by one up or down, to 0, to its start, or by no row."""
_CHANGE = f"(declare-datatypes ((Change 0)) (({' '.join(f'({one})' for one in CHANGES)})))"


def known_counts(machine: Machine, counter: int, starts_full: bool) -> dict[int, int | str]:
    """State -> the counter's value, for the states in which the table leaves it only one: a number, or ALL.

    counter: its place among the machine's counters.
    starts_full: whether it starts with the number of all members, and not with 0.
    """
    start = machine.counters[counter].limit // 2 if starts_full else 0  # A number that no row names.
    found: dict[int, int | None] = {int(machine.initial): start}
    waiting = [int(machine.initial)]
    while waiting:
        state = waiting.pop()
        for trigger in machine.triggers:
            for arc in machine.dense[trigger][state]:
                (low, high), delta = arc.ranges[counter], arc.deltas[counter]
                before = low if low == high else found[state]
                if before is not None and not low <= before <= high:
                    continue
                after = 0 if delta is None else None if before is None else before + delta
                if found.get(arc.target, after) != after:
                    after = None  # Two ways lead to the state with different values.
                if arc.target not in found or found[arc.target] != after:
                    found[arc.target] = after
                    waiting.append(arc.target)
    known = {state: value for state, value in found.items() if value is not None}
    return {state: ALL if starts_full and value == start else value for state, value in known.items()}


class CountingLemma:
    """The conditions of the counting lemma for one declaration."""

    def __init__(self, induction: Induction) -> None:
        self._induction, self._writer = induction, induction.writer

    def kept(self, step: Step) -> Iterator[Condition]:
        """Each counter that one step may change."""
        taken = self._induction.taken(step)
        for counting in self._induction.declared.countings:
            read = variables_read(counting.counts) | variables_read(counting.when)
            if ({counting.cell.variable.name} | read) & set(step.assigned):
                yield from self._counted(taken, counting)

    def _counted(self, taken: Taken, counting: Counting) -> Iterator[Condition]:
        """One counter at any of its cells: a condition for each change."""
        writer, given = self._writer, dict[Term, str]()
        lines = [_CHANGE]
        for index in counting.cell.indices:
            assert isinstance(index, Param)
            given[index] = f"{index.name}!case"
            lines += member(given[index], index.members)
        with writer.naming(lines):
            change = self._change_of(taken, counting, given)
            lines += ["(declare-const change Change)", f"(assert (= change {change}))"]
            lines.append(f"(assert {writer.say(counting.when, taken.names, given)})")
        before, word = (writer.say(one, given=given) for one in (counting.when, counting.cell))
        changed = _CountedSet(writer, taken, counting, given)
        cases = [(f"(and {before} (= change {one}))", changed.by(one)) for one in CHANGES if one in change]
        if counting.when != TRUE:
            cases.append((f"(not {before})", self._begins(counting, change, word, changed)))
        for assumed, asked in cases:
            text = taken.text + "\n".join((*lines, f"(assert {assumed})", f"(assert (not {asked}))")) + "\n"
            name = f"{counting.cell.variable.name} counts its {counting.counter}"
            yield self._induction.condition(taken.step.name, name, text)

    def _begins(self, counting: Counting, change: str, word: str, changed: _CountedSet) -> str:
        """What must hold where a counter starts to count: the set has the size that the table tells."""
        words, place = words_of(counting.cell), _place(counting)
        known = known_counts(words.machine, place, words.start[place] > 0)
        asked: list[str] = []
        for state in words.machine.states:
            size = {0: NONE, ALL: ALL}.get(known.get(state, -1))
            here = f"(= {word} {state_name(words, state)})"
            asked += (
                f"(=> (and {here} (= change {one})) {changed.from_size(size, one)})"
                for one in CHANGES
                if one in change
            )
        return f"(and {' '.join(asked)})"

    def _change_of(self, taken: Taken, counting: Counting, given: Given) -> str:
        """How a step changes the counter of a cell."""
        text = SAME
        at = [given[index] for index in counting.cell.indices]
        for assign in taken.step.assigned.get(counting.cell.variable.name, []):
            here, conditions = self._induction.at(taken, assign, at)
            change = self._change_in(assign.value, counting, here)
            text = f"(ite {joined('and', conditions, '')} {change} {text})" if conditions else change
        return text

    def _change_in(self, value: Term, counting: Counting, given: Given) -> str:
        """How a counter changes if a cell gets a value."""
        match value:
            case Read():
                return SAME
            case If(condition, then, otherwise):
                said = self._writer.say(condition, given=given)
                both = (self._change_in(one, counting, given) for one in (then, otherwise))
                return f"(ite {said} {' '.join(both)})"
            case Const(_, number):
                return self._set_to(words_of(value), number, counting)
            case After(trigger, word):
                before, text = self._change_in(word, counting, given), str(UNKNOWN)
                for matches, arc in self._writer.arcs(trigger, word, "word!", self._writer.now, given):
                    delta = arc.deltas[_place(counting)]
                    change = before if delta == 0 else NONE if delta is None else _by_one(delta, before)
                    text = f"(ite {matches} {change} {text})"
                return f"(let ((word! {self._writer.say(word, given=given)})) {text})"
        raise TypeError(f"{value} is no word")

    def _set_to(self, words: Words, number: int, counting: Counting) -> str:
        word, place = words.words[number], _place(counting)
        if word is None:
            return UNKNOWN
        count = word[1][place]
        return NONE if count == 0 else ALL if count == words.start[place] else UNKNOWN


def _place(counting: Counting) -> int:
    """The place of the counter among its machine's counters."""
    counters = words_of(counting.cell).machine.counters
    return [one.name for one in counters].index(counting.counter)


def _by_one(delta: int, before: str) -> str:
    """The change by a row that counts. Two changes of one counter in one step are not followed."""
    change = {1: MORE, -1: LESS}.get(delta, UNKNOWN)
    return change if before == SAME else f"(ite (= {before} {SAME}) {change} {UNKNOWN})"


def _nothing(_member: str) -> str:
    """The empty set."""
    return "false"


class _CountedSet:
    """What must hold of the counted members, for each change of their counter."""

    def __init__(self, writer: SmtWriter, taken: Taken, counting: Counting, given: Given) -> None:
        self._writer, self._taken, self._counting, self._given = writer, taken, counting, given
        self._one = counting.member
        self._other = Param(f"{self._one.name}_other", self._one.members)

    def by(self, change: str) -> str:
        """The set changes like the counter."""
        if change in (MORE, LESS):
            return self._by_one(self._is, self._was) if change == MORE else self._by_one(self._was, self._is)
        return {
            SAME: self._all(lambda one: f"(= {self._was(one)} {self._is(one)})"),
            NONE: self._all(lambda one: f"(not {self._is(one)})"),
            ALL: self._all(self._is),
            UNKNOWN: "false",
        }[change]

    def from_size(self, size: str | None, change: str) -> str:
        """The set has the size of its counter, which was NONE or ALL before; None: not known."""
        if size == NONE and change == MORE:
            return self._by_one(self._is, _nothing)
        if change == SAME and size is not None:
            return self.by(size)
        return self.by(change if change in (NONE, ALL) else UNKNOWN)

    def _was(self, name: str) -> str:
        return self._writer.say(self._counting.counts, given={**self._given, self._one: name})

    def _is(self, name: str) -> str:
        return self._writer.say(self._counting.counts, self._taken.names, {**self._given, self._one: name})

    def _all(self, body: Callable[[str], str]) -> str:
        return self._writer.over(ForAll, [self._one], lambda bound: body(bound[self._one]))

    def _by_one(self, larger: Callable[[str], str], smaller: Callable[[str], str]) -> str:
        """The larger set has all of the smaller one, and one member more."""

        def gained(one: str) -> str:
            return f"(and {larger(one)} (not {smaller(one)}))"

        def same(one: str, other: str) -> str:
            return f"(or (= {one} {other}) (not {gained(one)}) (not {gained(other)}))"

        kept = self._all(lambda one: f"(or {larger(one)} (not {smaller(one)}))")
        some = self._writer.over(Exists, [self._one], lambda bound: gained(bound[self._one]))
        both = [self._one, self._other]
        single = self._writer.over(ForAll, both, lambda bound: same(bound[both[0]], bound[both[1]]))
        return f"(and {kept} {some} {single})"
