"""Write terms of a declaration in TLA+."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from kvsm.check.protocol.terms import (
    Add,
    After,
    And,
    Const,
    CounterOf,
    Domain,
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
    bulleted,
    indented,
    pascal,
    simplified,
    sort_of,
    terms_of,
)


def set_name(members: IndexSet) -> str:
    """The name of an index set, as `Copies`."""
    name = pascal(members.name)
    if name.endswith("y"):
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith("ch") else f"{name}s"


def machine_name(words: Words) -> str:
    """The name of a machine, with which the names of its operators begin."""
    return pascal(words.machine.name)


def value_name(domain: Domain, value: int) -> str:
    """A value of a domain that is not a member of an index set."""
    if isinstance(domain, Truth):
        return "TRUE" if value else "FALSE"
    if isinstance(domain, OneOf):
        return "None"
    if isinstance(domain, Labels):
        return f'"{domain.label(value)}"'
    if not isinstance(domain, Words):
        return str(value)
    word = domain.words[value]
    if word is None:
        return f"{machine_name(domain)}Illegal"
    state, counts = word
    fields = [f'state |-> "{domain.machine.states(state).name}"']
    fields += [f"{counter.name} |-> {count}" for counter, count in zip(domain.machine.counters, counts)]
    return f"[{', '.join(fields)}]"


@dataclass(frozen=True)
class TlaSpeaker:
    """Writes terms in TLA+.

    state: the name of the record that variables are read from.
    """

    state: str

    def lines(self, term: Term, width: int = WIDTH) -> list[str]:
        """The term on one line if it fits, otherwise one part a line."""
        term = simplified(term)
        said = self.flat(term)
        if len(said) <= width:
            return [said]
        match term:
            case Or((Not(condition), then)):
                return [*self._open(condition, width), *bulleted("=>", [self.lines(then, width - 3)])]
            case And() | Or():
                bullet = "/\\" if isinstance(term, And) else "\\/"
                return bulleted(bullet, [self.lines(part, width - 3) for part in terms_of(term)])
            case Not(And() | Or() | ForAll() | Exists() as inner):
                return bulleted("~", [_closed(self.lines(inner, width - 4))])
            case If(condition, then, otherwise):
                parts = (("IF", condition), ("THEN", then), ("ELSE", otherwise))
                return [
                    line for word, part in parts for line in bulleted(word, [self.lines(part, width - 5)])
                ]
            case ForAll() | Exists():
                said, body = self._quantified(term)
                return [said, *indented(self.lines(body, width - 2))]
            case Equal(left, right):
                return [self.operand(left), *bulleted("=", [self.lines(right, width - 2)])]
            case Less(left, right):
                return [*self._summand(left, width), f"< {self.operand(right)}"]
            case Add():
                first, *others = (self._summand(part, width - 2) for part in terms_of(term))
                return [*first, *bulleted("+", others)]
            case Total(param, body):
                return self._total_lines(param, body, width)
            case After(trigger, word):
                begin = f'{machine_name(words_of(word))}Step("{trigger.name}",'
                lines = self.lines(word, width - 2)
                return [begin, *indented([*lines[:-1], f"{lines[-1]})"])]
        return [said]

    def flat(self, term: Term) -> str:
        """The term on one line."""
        term = simplified(term)
        match term:
            case Const(domain, value):
                return value_name(domain, value)
            case Param(name):
                return name
            case Read(variable, indices):
                return self.cell(variable.name, indices)
            case Equal(left, right):
                return f"{self.operand(left)} = {self.operand(right)}"
            case Not(Equal(left, right)):
                return f"{self.operand(left)} # {self.operand(right)}"
            case Not(InState(word, states)):
                return f"{self.operand(word)}.state {_among(states, '#', 'notin')}"
            case InState(word, states):
                return f"{self.operand(word)}.state {_among(states, '=', 'in')}"
            case Not(inner):
                return f"~{self.operand(inner)}"
            case Less(left, right):
                return f"{self.operand(left)} < {self.operand(right)}"
            case Or((Not(condition), then)):
                return f"{self._joined(condition)} => {self._joined(then)}"
            case And():
                return " /\\ ".join(self._joined(part) for part in terms_of(term))
            case Or():
                return " \\/ ".join(self._joined(part) for part in terms_of(term))
            case Add():
                return " + ".join(self.count(part) for part in terms_of(term))
            case Minus(left, right):
                return f"{self.count(left)} - {self.count(right)}"
            case If(condition, then, otherwise):
                return f"IF {self.flat(condition)} THEN {self.flat(then)} ELSE {self.flat(otherwise)}"
            case ForAll() | Exists():
                said, body = self._quantified(term)
                return f"{said} {self.flat(body)}"
            case Total(param, body):
                begin, end = self._total(param, body)
                return f"{begin} {self.flat(body)}{end}"
            case After(trigger, word):
                return f'{machine_name(words_of(word))}Step("{trigger.name}", {self.flat(word)})'
            case CounterOf(word, counter):
                return f"{self.operand(word)}.{counter}"
        raise TypeError(f"no TLA+ for {term}")

    def cell(self, name: str, indices: tuple[Term, ...]) -> str:
        """A cell of the record."""
        return f"{self.state}.{name}" + "".join(f"[{self.flat(index)}]" for index in indices)

    def operand(self, term: Term) -> str:
        """The term as an operand: in parentheses, unless it is atomic."""
        said = self.flat(term)
        closed = isinstance(term, Const | Param | Read | After | Total | CounterOf)
        return said if closed else f"({said})"

    def _joined(self, term: Term) -> str:
        """The term as one side of a connective. Comparisons need no parentheses: they bind tighter."""
        return self.flat(term) if isinstance(term, Equal | Less | InState | Not) else self.operand(term)

    def count(self, term: Term) -> str:
        """The term as a number. A truth value becomes 1 or 0."""
        return f"(IF {self.flat(term)} THEN 1 ELSE 0)" if sort_of(term) is Sort.TRUTH else self.operand(term)

    def _quantified(self, term: ForAll | Exists) -> tuple[str, Term]:
        """The quantifier and its body; nested quantifiers of one kind become one."""
        sign, params, kind = "\\A" if isinstance(term, ForAll) else "\\E", [term.param], type(term)
        while isinstance(term.body, kind):
            term = term.body
            params.append(term.param)
        return f"{sign} {', '.join(member_of(param) for param in params)} :", term.body

    def _total(self, param: Param, body: Term) -> tuple[str, str]:
        """The text before and after the body."""
        if sort_of(body) is Sort.TRUTH:
            return f"Cardinality({{{member_of(param)} :", "})"
        return f"Sum([{member_of(param)} |->", "])"

    def _total_lines(self, param: Param, body: Term, width: int) -> list[str]:
        begin, end = self._total(param, body)
        lines = [begin, *indented(self.lines(body, width - 2))]
        return [*lines[:-1], lines[-1] + end]

    def _summand(self, term: Term, width: int) -> list[str]:
        return self.lines(term, width) if isinstance(term, Total) else [self.count(term)]

    def _open(self, term: Term, width: int) -> list[str]:
        """The term as one side of a connective, on several lines if that is unambiguous."""
        match term:
            case Or((Not(), _)):
                return [self.operand(term)]
            case And() | Or():
                return self.lines(term, width)
        return [self.operand(term)]


def member_of(param: Param) -> str:
    """A parameter and its set, for a quantifier."""
    return f"{param.name} \\in {set_name(param.members)}"


def quoted(names: Iterable[str]) -> str:
    """A set of strings."""
    return "{" + ", ".join(f'"{name}"' for name in names) + "}"


def _among(states: tuple[IntEnum, ...], is_one: str, is_among: str) -> str:
    if len(states) == 1:
        return f'{is_one} "{states[0].name}"'
    return f"\\{is_among} {quoted(state.name for state in states)}"


def _closed(lines: list[str]) -> list[str]:
    """The lines in parentheses."""
    opened = bulleted("(", [lines])
    return [*opened[:-1], f"{opened[-1]} )"]
