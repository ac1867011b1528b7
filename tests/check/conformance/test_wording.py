"""The demands of guards, in words: a mismatch quotes them."""

from __future__ import annotations

import pytest

from kvsm.check.conformance.wording import demand_text
from kvsm.check.protocol.terms import (
    Add,
    CounterOf,
    Exists,
    ForAll,
    If,
    IndexSet,
    InState,
    Less,
    Minus,
    OneOf,
    Param,
    Term,
    Total,
    Variable,
    Words,
    all_of,
    any_of,
    number,
)
from kvsm.states.transfer import TRANSFER, TransferState

BOX, BALL = IndexSet("box", 2), IndexSet("ball", 3)
IS_IN = Variable("is_in", "The box of a ball.", (BALL,), OneOf(BOX))
COPY = Variable("copy", "The transfer of a ball.", (BALL,), Words(TRANSFER, (1, 0), (1, 1), frozenset({0})))
b, x = Param("b", BOX), Param("x", BALL)
IN, OUT = IS_IN[x].equals(b), IS_IN[x].equals(IS_IN.domain.none)
PENDING = CounterOf(COPY[x], "pending")

TEXTS: list[tuple[Term, str]] = [
    (IN, "is in[x] = box 3"),
    (OUT, "is in[x] = none"),
    (~IN, "is in[x] ≠ box 3"),
    (all_of(IN, any_of(IN, OUT)), "is in[x] = box 3 and (is in[x] = box 3 or is in[x] = none)"),
    (any_of(all_of(IN, OUT), OUT), "(is in[x] = box 3 and is in[x] = none) or is in[x] = none"),
    (~all_of(IN, OUT), "not (is in[x] = box 3 and is in[x] = none)"),
    (ForAll(x, IN), "for every ball x: is in[x] = box 3"),
    (Exists(x, IN), "there is a ball x: is in[x] = box 3"),
    (Less(Total(x, IN), number(2)), "the number of balls x with is in[x] = box 3 < 2"),
    (If(IN, number(1), number(0)).equals(number(1)), "(if is in[x] = box 3 then 1 else 0) = 1"),
    (InState(COPY[x], (TransferState.PLANNED, TransferState.LOST)), "copy[x] is PLANNED or LOST"),
    (
        Less(Minus(PENDING, number(1)), Add((number(1), PENDING))),
        "pending of copy[x] - 1 < 1 + pending of copy[x]",
    ),
]


@pytest.mark.parametrize(("demand", "text"), TEXTS)
def test_a_demand_is_quoted_whole(demand: Term, text: str) -> None:
    assert demand_text(demand, {b: "box 3"}) == text
