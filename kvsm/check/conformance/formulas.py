"""Analyse and rewrite terms: the cells that they read, the demands of a guard, known values filled in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, cast

from kvsm.check.protocol.terms import (
    FALSE,
    TRUE,
    And,
    Assign,
    Const,
    Each,
    Effect,
    Equal,
    Exists,
    ForAll,
    Not,
    OneOf,
    Or,
    Param,
    Read,
    Term,
    Total,
)


def variables_read(term: Term) -> set[str]:
    """The names of the variables that a term reads."""
    found = {term.variable.name} if isinstance(term, Read) else set()
    for part in term.parts:
        found |= variables_read(part)
    return found


def cells_read(term: Term) -> Iterator[Read]:
    """The reads of a term whose parameters it does not bind itself, from left to right."""
    if isinstance(term, Read):
        yield term
    bound = term.param if isinstance(term, ForAll | Exists | Total) else None
    for part in term.parts:
        yield from (read for read in cells_read(part) if bound is None or bound not in read.free_params)


def cells_bound(term: Term) -> Iterator[Read]:
    """The reads of a term that have a parameter which it binds itself."""
    if isinstance(term, ForAll | Exists | Total):
        yield from (read for read in cells_read(term.body) if term.param in read.free_params)
    for part in term.parts:
        yield from cells_bound(part)


def demands(term: Term) -> tuple[Term, ...]:
    """Split a term into terms whose conjunction is equivalent to it."""
    match term:
        case And(parts):
            return tuple(one for part in parts for one in demands(part))
        case Not(Or(parts)):
            return tuple(one for part in parts for one in demands(Not(part)))
        case Not(Not(inner)):
            return demands(inner)
        case Not(ForAll(param, body)):
            return (Exists(param, Not(body)),)
        case Const(_, value) if value:
            return ()
    return (term,)


def substituted(term: Term, given: Mapping[Param, Param]) -> Term:
    """The term with other parameters in place of these."""
    if isinstance(term, Param):
        return given.get(term, term)
    changed: dict[str, Any] = {}
    for one in fields(term):
        value = getattr(term, one.name)
        if isinstance(value, Term):
            changed[one.name] = substituted(value, given)
        elif isinstance(value, tuple) and any(isinstance(part, Term) for part in value):
            changed[one.name] = tuple(substituted(part, given) for part in value)
    return cast(Term, replace(cast(Any, term), **changed)) if changed else term


def simplified(term: Term, known: Mapping[Term, Term]) -> Term:
    """Return the term with known values in place of reads, and constant parts evaluated."""
    if isinstance(term, Read):
        return known.get(term, term)
    match term:
        case Not(inner):
            inner = simplified(inner, known)
            return FALSE if inner == TRUE else TRUE if inner == FALSE else Not(inner)
        case And(parts):
            left = [one for part in parts if (one := simplified(part, known)) != TRUE]
            return FALSE if FALSE in left else And(tuple(left)) if left else TRUE
        case Or(parts):
            left = [one for part in parts if (one := simplified(part, known)) != FALSE]
            return TRUE if TRUE in left else Or(tuple(left)) if left else FALSE
        case Equal(left_side, right_side):
            sides = simplified(left_side, known), simplified(right_side, known)
            if all(isinstance(one, Const) for one in sides):
                return TRUE if sides[0] == sides[1] else FALSE
            members = [one for one in sides if isinstance(one, Param)]
            nothing = [one for one in sides if isinstance(one, Const) and isinstance(one.domain, OneOf)]
            # "None" is no member.
            return FALSE if members and nothing else Equal(*sides)
    return term


def assigned(
    effects: tuple[Effect, ...], bound: tuple[Param, ...] = ()
) -> Iterator[tuple[tuple[Param, ...], Assign]]:
    """Each assignment of the effects, with the parameters that an `Each` binds around it."""
    for effect in effects:
        if isinstance(effect, Each):
            yield from assigned(effect.effects, (*bound, effect.param))
        else:
            yield bound, effect


def indices_of(read: Read) -> tuple[Param, ...]:
    """The parameters of a read. Raises `TypeError` if an index is something else."""
    params = tuple(one for one in read.indices if isinstance(one, Param))
    if len(params) != len(read.indices):
        raise TypeError(f"{read} has an index that is no parameter")
    return params
