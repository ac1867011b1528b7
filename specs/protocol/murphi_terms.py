"""Write terms of a declaration in Murphi, as Rumur reads it.

Murphi's undefined value represents None. So an index set can be a scalarset, whose members Rumur may
renumber. Murphi has no sums: each Total becomes a function, and `MurphiSpeaker` collects these functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from kvsm.check.protocol.terms import (
    Add,
    After,
    And,
    Const,
    CounterOf,
    Equal,
    Exists,
    ForAll,
    If,
    IndexSet,
    InState,
    Labels,
    Less,
    Minus,
    Not,
    OneOf,
    Or,
    Param,
    Read,
    Term,
    Total,
    Truth,
    Words,
    words_of,
)
from protocol.export import (
    WIDTH,
    Sort,
    all_parts,
    bulleted,
    indented,
    pascal,
    simplified,
    sort_of,
    terms_of,
)


def set_name(members: IndexSet) -> str:
    """The type of an index set."""
    return pascal(members.name)


def words_name(words: Words) -> str:
    """The type of a machine's words."""
    return f"{pascal(words.machine.name)}Word"


def state_name(words: Words, state: str) -> str:
    """Murphi's value names are global, so a state's name includes its machine."""
    return f"{words.machine.name}_{state}".upper()


def trigger_name(words: Words, trigger: str) -> str:
    """The name of a trigger."""
    return f"{words.machine.name}_on_{trigger}".upper()


def label_name(labels: Labels, value: int) -> str:
    """The name of a label."""
    return f"{labels.name}_{labels.label(value)}".upper()


def is_none(term: Term) -> bool:
    """Whether a term is the constant None, which is no member of an index set."""
    return isinstance(term, Const) and isinstance(term.domain, OneOf)


@dataclass
class MurphiSpeaker:
    """Writes terms in Murphi.

    totals: the names of the functions used so far, by the term that each one sums.
    """

    totals: dict[Total, str] = field(default_factory=dict)

    def lines(self, term: Term, width: int = WIDTH) -> list[str]:
        """The term on one line if it fits, otherwise one part a line."""
        term = simplified(term)
        said = self.flat(term)
        if len(said) <= width:
            return [said]
        match term:
            case Or((Not(condition), then)):
                return [*self._closed(condition, width), *bulleted("->", [self._closed(then, width - 3)])]
            case InState(word, states) if len(states) > 1:
                return self.lines(Or(tuple(InState(word, (state,)) for state in states)), width)
            case And() | Or():
                bullet = "&" if isinstance(term, And) else "|"
                first, *others = (self._closed(part, width - 2) for part in terms_of(term))
                return [*first, *bulleted(bullet, others)]
            case Not(inner):
                return bulleted("!", [self._closed(inner, width - 2)])
            case If(condition, then, otherwise):
                parts = (("?", then), (":", otherwise))
                chosen = [
                    line for sign, part in parts for line in bulleted(sign, [self._closed(part, width - 2)])
                ]
                return [*self._closed(condition, width), *chosen]
            case ForAll(_, body) | Exists(_, body):
                return [self._quantifier(term), *indented(self.lines(body, width - 2)), "end"]
            case Add():
                first, *others = ([self.count(part)] for part in terms_of(term))
                return [*first, *bulleted("+", others)]
        return [said]

    def flat(self, term: Term) -> str:
        """The term on one line."""
        term = simplified(term)
        match term:
            case Const():
                return self._value(term)
            case Param(name):
                return name
            case Read(variable, indices):
                return variable.name + "".join(f"[{self.flat(index)}]" for index in indices)
            case Equal(left, right):
                return self._equal(left, right)
            case Not(Equal(left, right)) if sort_of(left) is not Sort.MEMBER:
                return self._equal(left, right, "!=")
            case Not(inner):
                return f"!{self.operand(inner)}"
            case Less(left, right):
                return f"{self.operand(left)} < {self.operand(right)}"
            case Or((Not(condition), then)):
                return f"{self.operand(condition)} -> {self.operand(then)}"
            case And():
                return " & ".join(self._joined(part) for part in terms_of(term))
            case Or():
                return " | ".join(self._joined(part) for part in terms_of(term))
            case Add():
                return " + ".join(self.count(part) for part in terms_of(term))
            case Minus(left, right):
                return f"{self.count(left)} - {self.count(right)}"
            case If(condition, then, otherwise):
                parts = (self.operand(part) for part in (condition, then, otherwise))
                return "{} ? {} : {}".format(*parts)
            case ForAll(_, body) | Exists(_, body):
                return f"{self._quantifier(term)} {self.flat(body)} end"
            case Total():
                return self._total(term)
            case InState(word, states):
                return self._in_state(word, states)
            case CounterOf(Read() as word, counter):
                return f"{self.flat(word)}.{counter}"
        raise TypeError(f"no Murphi for {term}")

    def operand(self, term: Term) -> str:
        """The term as an operand: in parentheses, unless it is atomic."""
        said = self.flat(term)
        closed = isinstance(term, Const | Param | Read | Total | CounterOf | ForAll | Exists)
        return said if closed else f"({said})"

    def _joined(self, term: Term) -> str:
        """The term as one side of a connective. Comparisons need no parentheses: they bind tighter."""
        said = self.flat(term)
        is_comparison = isinstance(term, Equal | Less | InState | Not) and not {"&", "|", "?"} & set(said)
        return said if is_comparison else self.operand(term)

    def count(self, term: Term) -> str:
        """The term as a number. A truth value becomes 1 or 0."""
        return f"({self.flat(term)} ? 1 : 0)" if sort_of(term) is Sort.TRUTH else self.operand(term)

    def _value(self, const: Const) -> str:
        match const.domain:
            case Truth():
                return "true" if const.value else "false"
            case Labels() as labels:
                return label_name(labels, const.value)
            case OneOf():
                raise TypeError("Murphi has no value for none")
            case Words() as words if const.value == words.illegal:
                return state_name(words, "ILLEGAL")
            case Words():
                raise TypeError(f"no Murphi for {const.domain.label(const.value)}")
        return str(const.value)

    def _equal(self, left: Term, right: Term, sign: str = "=") -> str:
        if sort_of(left) is Sort.WORD:
            return f"{self._state_of(left)} {sign} {self.flat(right)}"
        if sort_of(left) is not Sort.MEMBER:
            return f"{self.operand(left)} {sign} {self.operand(right)}"
        if is_none(left) or is_none(right):
            return f"isundefined({self.flat(right if is_none(left) else left)})"
        one, other = self.flat(left), self.flat(right)
        cells = [self.flat(side) for side in (left, right) if isinstance(side, Read)]
        if len(cells) < 2:
            return "".join(f"!isundefined({cell}) & " for cell in cells) + f"{one} = {other}"
        return f"isundefined({one}) ? isundefined({other}) : (!isundefined({other}) & {one} = {other})"

    def _state_of(self, word: Term) -> str:
        match word:
            case Read():
                return f"{self.flat(word)}.state"
            case After(trigger, Read() as before):
                words = words_of(word)
                return f"{words.machine.name}_after({trigger_name(words, trigger.name)}, {self.flat(before)})"
        raise TypeError(f"no Murphi for the state of {word}")

    def _in_state(self, word: Term, states: tuple[IntEnum, ...]) -> str:
        said, words = self._state_of(word), words_of(word)
        return " | ".join(f"{said} = {state_name(words, state.name)}" for state in states)

    def _quantifier(self, term: ForAll | Exists) -> str:
        sign = "forall" if isinstance(term, ForAll) else "exists"
        return f"{sign} {term.param.name}: {set_name(term.param.members)} do"

    def _total(self, total: Total) -> str:
        name = self.totals.setdefault(total, f"total_{len(self.totals) + 1}")
        return f"{name}({', '.join(param.name for param in free_params(total))})"

    def _closed(self, term: Term, width: int) -> list[str]:
        """The term as one side of a connective, in parentheses if needed."""
        said = self._joined(term)
        if len(said) <= width:
            return [said]
        lines = self.lines(term, width - 4)
        if isinstance(term, ForAll | Exists):
            return lines
        return ["(", *indented(lines), ")"]


def free_params(term: Term) -> list[Param]:
    """The parameters that the term does not bind, in the order of their names."""
    bound = {part.param for part in all_parts(term) if isinstance(part, ForAll | Exists | Total)}
    free = {part for part in all_parts(term) if isinstance(part, Param)} - bound
    return sorted(free, key=lambda param: param.name)
