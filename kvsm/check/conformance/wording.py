"""Print terms and cells for the report of a mismatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvsm.check.conformance.cells import CellKey, Member, ProtocolCells
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
    InState,
    Less,
    Minus,
    Not,
    OneOf,
    Or,
    Param,
    Read,
    Term,
    Total,
    Words,
)

Naming = Callable[[str, Member], str]
"""A member of an index set for people."""


def cell_name(cells: ProtocolCells, cell: CellKey, named: Naming) -> str:
    """`block of slot 3`."""
    indices = cells.variable.indices
    members = (cell,) if len(indices) == 1 else cell
    said = ", ".join(named(one.name, member) for one, member in zip(indices, members))
    return f"{cells.variable.name.replace('_', ' ')} of {said}"


def value_name(cells: ProtocolCells, value: object, named: Naming) -> str:
    """A value of a variable."""
    told = cells.told(value)
    domain = cells.variable.domain
    if told is not None or not isinstance(domain, OneOf):
        return str(told)
    return named(domain.members.name, value)


def demand_text(term: Term, given: Mapping[Param, str]) -> str:
    """Print a demand of a guard as a readable formula.

    given: the text to print for each parameter of the action.
    """

    def said(one: Term) -> str:
        return demand_text(one, given)

    match term:
        case Const(domain, value):
            return "none" if isinstance(domain, OneOf) else domain.label(value)
        case Param(name, _):
            return given.get(term, name)
        case Read(variable, indices):
            return f"{variable.name.replace('_', ' ')}[{', '.join(map(said, indices))}]"
        case Not(Equal(left, Const(Words() as words, value))) if value == words.illegal:
            return f"{said(left)} is legal"
        case Equal(left, right):
            return f"{said(left)} = {said(right)}"
        case Not(Equal(left, right)):
            return f"{said(left)} ≠ {said(right)}"
        case Not(inner):
            return f"not ({said(inner)})"
        case And(terms):
            return " and ".join(f"({said(one)})" if isinstance(one, Or) else said(one) for one in terms)
        case Or(terms):
            return " or ".join(f"({said(one)})" if isinstance(one, And) else said(one) for one in terms)
        case If(condition, then, otherwise):
            return f"(if {said(condition)} then {said(then)} else {said(otherwise)})"
        case ForAll(param, body):
            return f"for every {param.members.name} {param.name}: {said(body)}"
        case Exists(param, body):
            return f"there is a {param.members.name} {param.name}: {said(body)}"
    return _text_of_number(term, said)


def _text_of_number(term: Term, said: Callable[[Term], str]) -> str:
    match term:
        case InState(word, states):
            return f"{said(word)} is {' or '.join(one.name for one in states)}"
        case After(trigger, word):
            return f"{said(word)} after {trigger.name}"
        case CounterOf(word, counter):
            return f"{counter} of {said(word)}"
        case Less(left, right):
            return f"{said(left)} < {said(right)}"
        case Add(terms):
            return " + ".join(map(said, terms))
        case Minus(left, right):
            return f"{said(left)} - {said(right)}"
        case Total(param, body):
            return f"the number of {param.members.name}s {param.name} with {said(body)}"
    raise TypeError(f"{term} is no term")
