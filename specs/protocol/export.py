"""The common part of both exports: names, sorts of terms, and the rows of a machine's table.

An export writes the declaration term by term. It writes the machines' tables row by row, without
`Words.next`, which kvsm's own exploration uses. So a mistake in either shows as a different number of states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from textwrap import wrap
from typing import Any

from kvsm.check.protocol.terms import (
    Add,
    After,
    And,
    Assign,
    Claim,
    Const,
    CounterOf,
    Declaration,
    Effect,
    Equal,
    If,
    Labels,
    Minus,
    Not,
    OneOf,
    Or,
    Param,
    Read,
    Term,
    Total,
    Truth,
    UpTo,
    Words,
)

WIDTH = 100
"""The length above which lines are broken, where that is possible."""


class Sort(Enum):
    """The kind of a term's value, for languages in which a truth value is not a number."""

    TRUTH = "truth"
    COUNT = "count"
    MEMBER = "member"
    LABEL = "label"
    WORD = "word"


def sort_of(term: Term) -> Sort:
    """The kind of a term's value."""
    if isinstance(term, Add | Minus | Total | CounterOf):
        return Sort.COUNT
    if isinstance(term, Param):
        return Sort.MEMBER
    if isinstance(term, After):
        return Sort.WORD
    if isinstance(term, If):
        return sort_of(term.then)
    domain = (
        term.domain if isinstance(term, Const) else term.variable.domain if isinstance(term, Read) else None
    )
    sorts = ((UpTo, Sort.COUNT), (OneOf, Sort.MEMBER), (Labels, Sort.LABEL), (Words, Sort.WORD))
    return next((sort for kind, sort in sorts if isinstance(domain, kind)), Sort.TRUTH)


def all_parts(term: Term) -> Iterator[Term]:
    """The term and all its parts, at any depth."""
    yield term
    for part in term.parts:
        yield from all_parts(part)


def simplified(term: Term) -> Term:
    """An equal term without `not not x`, `x = TRUE` and conjunctions of one term."""
    changed: dict[str, Any] = {}
    for attribute in fields(term) if term.parts else ():
        value = getattr(term, attribute.name)
        if isinstance(value, Term):
            changed[attribute.name] = simplified(value)
        elif isinstance(value, tuple) and any(isinstance(part, Term) for part in value):
            changed[attribute.name] = tuple(simplified(part) for part in value)
    term = replace(term, **changed) if changed else term
    match term:
        case Not(Not(inner)) | And((inner,)) | Or((inner,)):
            return inner
        case Equal(left, Const(Truth(), value)):
            return left if value else simplified(Not(left))
    return term


def terms_of(term: And | Or | Add) -> list[Term]:
    """The operands of a term; nested terms of the same kind are flattened."""
    kind = type(term)
    return [inner for part in term.terms for inner in (terms_of(part) if isinstance(part, kind) else [part])]


def assigns_of(
    effects: tuple[Effect, ...], bound: tuple[Param, ...] = ()
) -> Iterator[tuple[tuple[Param, ...], Assign]]:
    """(parameters over which the assignment is repeated, assignment) for each assignment."""
    for effect in effects:
        if isinstance(effect, Assign):
            yield bound, effect
        else:
            yield from assigns_of(effect.effects, (*bound, effect.param))


def words_in(declared: Declaration) -> list[Words]:
    """The distinct machine words among the variables' domains."""
    domains = [variable.domain for variable in declared.variables]
    return list(dict.fromkeys(domain for domain in domains if isinstance(domain, Words)))


@dataclass(frozen=True)
class TableRow:
    """A row of a machine's table within the limits of the model.

    ranges: (least, most) of the counters that the row restricts further than the limits do.
    changes: what is added to each counter; None means that it becomes zero.
    """

    sources: tuple[str, ...]
    trigger: str
    target: str | None
    why: str
    ranges: dict[str, tuple[int, int]]
    changes: dict[str, int | None]


def table_rows(words: Words) -> list[TableRow]:
    """The rows that can match within the limits, in the order of the table.

    A row does not match where its step would take a counter past its limit.
    """
    rows = []
    machine = words.machine
    for row in machine.rows:
        ranges: dict[str, tuple[int, int]] = {}
        changes: dict[str, int | None] = {}
        for counter, limit in zip(machine.counters, words.limits):
            low, high = row.when.get(counter.name, (0, limit))
            effect = row.then.get(counter.name, 0)
            if isinstance(effect, str):
                changes[counter.name] = None
            elif effect:
                changes[counter.name] = effect
                low, high = max(low, -effect), min(high, limit - effect)
            if (low, min(high, limit)) != (0, limit):
                ranges[counter.name] = (low, min(high, limit))
        if all(low <= high for low, high in ranges.values()):
            target = None if row.target is None else row.target.name
            sources = tuple(state.name for state in row.sources)
            rows.append(TableRow(sources, row.trigger.name, target, row.why, ranges, changes))
    return rows


def pascal(name: str) -> str:
    """`plan store` or `plan_store` as PlanStore."""
    return "".join(word[:1].upper() + word[1:] for word in name.replace("_", " ").split())


def file_name(declared: Declaration) -> str:
    """The base name of a protocol's files, as `offload`."""
    return declared.name.split()[0]


def in_one_word(phrase: str) -> str:
    """`a store's key` as AStoresKey."""
    return pascal(phrase.replace("'", "").replace(",", ""))


def claim_name(claim: Claim) -> str:
    """The name of a claim in a text: the id of a property, or a phrase in one word."""
    return in_one_word(claim.id)


def indented(lines: list[str], by: int = 2) -> list[str]:
    """The indented lines."""
    return [" " * by + line for line in lines]


def bulleted(bullet: str, parts: list[list[str]]) -> list[str]:
    """Each part after a bullet, with its other lines indented."""
    return [
        (f"{bullet} " if number == 0 else " " * (len(bullet) + 1)) + line
        for part in parts
        for number, line in enumerate(part)
    ]


def comment(mark: str, text: str, width: int = WIDTH) -> list[str]:
    """Text as lines of comment."""
    return [
        f"{mark} {line}".rstrip() for paragraph in text.split("\n") for line in wrap(paragraph, width) or [""]
    ]
