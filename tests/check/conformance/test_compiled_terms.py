"""Terms that no declared protocol has, compiled and compared with their evaluation in plain Python.

The declarations use only some forms of the language. A guard that is compiled wrongly accepts wrong logs.
"""

from __future__ import annotations

from itertools import product

import pytest
from test_conformance_terms import cells_of, load, saved

from kvsm.check.conformance.compiled import compile_action
from kvsm.check.protocol.plain import ProtocolModel
from kvsm.check.protocol.terms import (
    FALSE,
    TRUE,
    Action,
    Assign,
    Const,
    Declaration,
    Each,
    Effect,
    Exists,
    ForAll,
    Forget,
    If,
    IndexSet,
    InState,
    OneOf,
    Param,
    Term,
    Total,
    Truth,
    Variable,
    Words,
    all_of,
    any_of,
    for_all,
    number,
)
from kvsm.states.transfer import TRANSFER, TransferState

BOX, BALL = IndexSet("box", 2), IndexSet("ball", 2)
INSIDE = Variable("inside", "The box of a ball.", (BALL,), OneOf(BOX))
TIED = Variable("tied", "The ball to which a ball is tied.", (BALL,), OneOf(BALL))
RED = Variable("red", "Whether a ball is red.", (BALL,), Truth())
OPEN = Variable("open", "Whether a box is open.", (BOX,), Truth())
b, x, y = Param("b", BOX), Param("x", BALL), Param("y", BALL)

GUARDS = {
    "a demand on the box alone": Exists(x, all_of(OPEN[b], INSIDE[x].equals(b), RED[x])),
    "two places": Exists(x, all_of(INSIDE[x].equals(b), TIED[x].equals(TIED.domain.none))),
    "through another ball, which is named last": Exists(
        x, Exists(y, all_of(TIED[x].equals(y), INSIDE[y].equals(b), RED[y]))
    ),
    "through another ball, which is named first": Exists(
        x, all_of(Exists(y, all_of(INSIDE[y].equals(b), TIED[x].equals(y))), RED[x])
    ),
    "one of two ways": Exists(x, all_of(any_of(INSIDE[x].equals(b), RED[x]), ~TIED[x].equals(x))),
    "all balls": ForAll(x, any_of(INSIDE[x].differs(b), all_of(OPEN[b], RED[x]))),
    "initial values": Exists(x, all_of(RED[x].equals(FALSE), INSIDE[x].differs(b))),
    "a count": Total(x, INSIDE[x].equals(b)).equals(number(1)),
}
EFFECTS: dict[str, Effect] = {
    "every ball in the box": Each(x, (Assign(RED[x], If(INSIDE[x].equals(b), TRUE, RED[x])),)),
    "all balls if the box is open": Each(
        x, (Assign(INSIDE[x], If(all_of(OPEN[b], RED[x]), INSIDE.domain.none, INSIDE[x])),)
    ),
    "one of two reasons": Each(
        x, (Assign(RED[x], If(INSIDE[x].equals(b), FALSE, If(TIED[x].equals(x), TRUE, RED[x]))),)
    ),
    "to the initial value": Each(x, (Assign(TIED[x], TIED.domain.none),)),
}
WORDS = Words(TRANSFER, (1, 0), (1, 1), frozenset(TransferState))
COPY = Variable("copy", "The transfer of a ball.", (BALL,), WORDS)
MOVE = Variable("move", "The transfer of a ball to a box.", (BALL, BOX), WORDS)
NEAR = Variable("near", "Whether a ball is near a box.", (BALL, BOX), Truth())
NEXT = Variable("next", "The box after a box, for a ball.", (BALL, BOX), OneOf(BOX))

c, z = Param("c", BOX), Param("z", BALL)
EMPTIED = Forget((c,), OPEN[c], ForAll(x, INSIDE[x].differs(c)), "An empty box is closed.")
UNTIED = Forget((z,), TIED[z], Exists(c, OPEN[c] & ~RED[z] & INSIDE[z].differs(c)), "It is drawn into c.")
SETTLED = all_of(
    for_all(~(EMPTIED.when & OPEN[c])), for_all(~(UNTIED.when & TIED[z].differs(TIED.domain.none)))
)
"""Nothing is left that should be forgotten, as after every action."""


def toy(
    guard: Term,
    *effects: Effect,
    forgets: tuple[Forget, ...] = (),
    variables: tuple[Variable, ...] = (INSIDE, TIED, RED, OPEN),
) -> Declaration:
    action = Action("act", "", (b,), guard, effects)
    return Declaration("toy", "", (BOX, BALL), variables, (action,), forgets, (), (), TRUE, number(0))


def compare(declared: Declaration, each: int = 1) -> int:
    """Take the action in each `each`-th state, both ways. Returns how often it is possible."""
    model = ProtocolModel(declared)
    cells, possible = cells_of(model), 0
    members = {one.name: range(one.size) for one in declared.index_sets}
    action = compile_action(declared, declared.actions[0], cells, members)
    states = [*product(*(range(cell.variable.domain.size) for cell in model.layout.cells))]
    for state in states[::each]:
        for one in model.layout.instances:
            load(model, cells, state)
            refused = action.take([one.values])
            after = model.next(state, one.move)
            assert (refused is None) == (after is not None), (one.move, model.describe(state))
            if after is not None:
                found = saved(cells)
                load(model, cells, after)
                assert found == saved(cells), (one.move, model.describe(state))
                possible += 1
    return possible


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_holds_where_the_declared_one_does(name: str) -> None:
    assert compare(toy(GUARDS[name], Assign(OPEN[b], TRUE))) > 100


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_and_what_is_then_forgotten_are_the_declared_ones(name: str) -> None:
    assert compare(toy(TRUE, EFFECTS[name]), 5) > 100
    assert compare(toy(SETTLED, EFFECTS[name], forgets=(EMPTIED, UNTIED)), 5) > 10


def test_a_word_is_compared_if_its_variable_is_the_first_one() -> None:
    """The words of a machine are those of the first variable that has them."""
    after = Exists(x, COPY[x].equals(Const(COPY.domain, 1)))
    assert compare(toy(after, Assign(OPEN[b], TRUE), variables=(COPY, OPEN))) > 10


# What cannot be compiled is refused, and not compiled to something else.


def refused(declared: Declaration, without: str = "", *, bounded: bool = True) -> str:
    cells = cells_of(ProtocolModel(declared))
    cells.pop(without, None)
    members = {one.name: range(one.size) for one in declared.index_sets if bounded or one is BOX}
    with pytest.raises(TypeError) as caught:
        compile_action(declared, declared.actions[0], cells, members)
    return str(caught.value)


def test_an_effect_by_what_the_log_does_not_tell_is_refused() -> None:
    told = refused(toy(TRUE, Assign(OPEN[b], Exists(x, RED[x]))), "red")
    assert told.endswith("by what is not told")


def test_a_forget_by_what_the_log_does_not_tell_is_refused() -> None:
    told = refused(toy(TRUE, Assign(OPEN[b], TRUE), forgets=(EMPTIED,)), "inside")
    assert told == "open is forgotten by what is not told"


def test_members_without_a_bound_that_have_the_initial_value_are_not_searched() -> None:
    """The cells hold only what differs from the initial value, so the search would miss them."""
    initial = Exists(x, RED[x].equals(FALSE))
    assert refused(toy(initial, Assign(OPEN[b], TRUE)), bounded=False).startswith("nothing leads to")


@pytest.mark.parametrize(
    "demand",
    [
        InState(MOVE[x, b], (TransferState.SUBMITTED,)),
        NEAR[x, b].equals(TRUE),
        NEXT[x, b].equals(b),
    ],
    ids=lambda one: type(one).__name__,
)
def test_members_without_a_bound_are_not_searched_among_cells_of_several_members(demand: Term) -> None:
    declared = toy(Exists(x, demand), Assign(OPEN[b], TRUE), variables=(OPEN, MOVE, NEAR, NEXT))
    assert refused(declared, bounded=False).startswith("nothing leads to")
