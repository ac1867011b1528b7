"""Terms rewritten for solvers: equal in meaning, with fewer quantifiers.

"For every transfer t and copy c, if c belongs to t then ..." says something about each copy and its own
transfer. The one-point rule makes it "for every copy c that has a transfer ...", with the transfer of c in
place of t. Solvers then look at copies instead of pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from itertools import count

from kvsm.check.protocol.terms import And, Equal, Exists, ForAll, Not, OneOf, Or, Param, Term, Total


def rebuilt(term: Term, change: Callable[[Term], Term]) -> Term:
    """The term with each of its parts changed; bound parameters stay."""
    binds = isinstance(term, ForAll | Exists | Total)
    changed: dict[str, object] = {}
    for one in fields(term):
        value = getattr(term, one.name)
        if isinstance(value, Term) and not (binds and isinstance(value, Param)):
            changed[one.name] = change(value)
        elif isinstance(value, tuple) and any(isinstance(part, Term) for part in value):
            changed[one.name] = tuple(map(change, value))
    return replace(term, **changed) if changed else term


class Renaming:
    """Gives each bound parameter a name of its own, so that a term can be put anywhere without a mix-up."""

    def __init__(self) -> None:
        self._numbers = count()

    def of(self, term: Term, names: Mapping[Param, Term]) -> Term:
        """The term with fresh bound parameters. names: what stands for the free ones."""
        match term:
            case Param():
                return names.get(term, term)
            case ForAll(param, body) | Exists(param, body) | Total(param, body):
                fresh = Param(f"{param.name}!{next(self._numbers)}", param.members)
                return type(term)(fresh, self.of(body, {**names, param: fresh}))
        return rebuilt(term, lambda part: self.of(part, names))


def substituted(term: Term, param: Param, value: Term) -> Term:
    """The term with a value for a parameter. All bound parameters have names of their own."""
    if term == param:
        return value
    return rebuilt(term, lambda part: substituted(part, param, value))


def mentions(term: Term, param: Param) -> bool:
    """Whether a parameter occurs in a term."""
    return term == param or any(mentions(part, param) for part in term.parts)


def alternatives(term: Term) -> Iterator[Term]:
    """At least one of these terms holds exactly where the term holds."""
    match term:
        case Or(terms):
            for one in terms:
                yield from alternatives(one)
        case Not(And(terms)):
            for one in terms:
                yield from alternatives(Not(one))
        case Not(Not(inner)):
            yield from alternatives(inner)
        case Not(Exists(param, body)):
            yield ForAll(param, Not(body))
        case _:
            yield term


def conjuncts(term: Term) -> Iterator[Term]:
    """Terms that all hold if and only if the term does."""
    match term:
        case And(terms):
            for one in terms:
                yield from conjuncts(one)
        case Not(Or(terms)):
            for one in terms:
                yield from conjuncts(Not(one))
        case Not(Not(inner)):
            yield from conjuncts(inner)
        case Not(ForAll(param, body)):
            yield Exists(param, Not(body))
        case _:
            yield term


def pointed(term: ForAll | Exists) -> tuple[list[Param], list[Term]]:
    """A quantified term by the one-point rule.

    Returns the parameters that are left, and parts: alternatives for ForAll, conjuncts for Exists.
    """
    universal = isinstance(term, ForAll)
    split = alternatives if universal else conjuncts
    params, parts, waiting = [term.param], [], list(split(term.body))
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, type(term)):
            params.append(part.param)
            waiting = [*split(part.body), *waiting]
        else:
            parts.append(part)
    for param in tuple(params):
        for part in parts:
            value = _point(part, param, universal)
            if value is not None:
                params.remove(param)
                none = OneOf(param.members).none
                given = Equal(value, none) if universal else Not(Equal(value, none))
                rest = (substituted(one, param, value) for one in parts if one is not part)
                parts = [given, *rest]
                break
    return params, parts


def _point(part: Term, param: Param, universal: bool) -> Term | None:
    """The value that a part gives to the parameter: p ≠ value as an alternative, p = value as a conjunct."""
    equal = part.term if universal and isinstance(part, Not) else part
    if (universal and not isinstance(part, Not)) or not isinstance(equal, Equal):
        return None
    for one, value in ((equal.left, equal.right), (equal.right, equal.left)):
        if one == param and not mentions(value, param):
            return value
    return None
