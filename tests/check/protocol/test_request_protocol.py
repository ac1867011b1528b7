"""The request protocol is proved within small bounds, and wrong tables, guards and effects are refuted."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from msgspec import structs
from request_mutants import MISTAKES, TINY, Mistake

from kvsm.check.explore import explorer
from kvsm.check.explore.coverage import never_taken
from kvsm.check.explore.model import Verdict
from kvsm.check.protocol.arrays import Transitions, columns_of, rows_of
from kvsm.check.protocol.cell_layout import CellLayout
from kvsm.check.protocol.explore import explore
from kvsm.check.protocol.nodes import NodeFactory, StateBatch
from kvsm.check.protocol.plain import ProtocolModel, State
from kvsm.check.protocol.request_protocol import request_protocol
from kvsm.check.protocol.request_scope import REQUEST_SCOPES, RequestScope
from kvsm.check.protocol.terms import Declaration

NARROW = RequestScope(holds=1, transfers=1)
SMALL = REQUEST_SCOPES["small"]
WORKERS = REQUEST_SCOPES["workers"]


@pytest.mark.parametrize(
    ("scope", "symmetry", "expected"),
    [
        (TINY, False, (191, 1110, 11)),
        (NARROW, True, (1113, 10341, 14)),
        (NARROW, False, (2095, 19450, 14)),
        (SMALL, True, (13742, 144845, 23)),
        (REQUEST_SCOPES["restarts"], True, (13742, 158587, 23)),
        pytest.param(SMALL, False, (86320, 919512, 23), marks=pytest.mark.slow),
    ],
)
def test_request_protocol_is_proved(
    scope: RequestScope, symmetry: bool, expected: tuple[int, int, int]
) -> None:
    """Every property holds, progress (S9) included, with symmetric states merged and apart. The counts change
    only with the protocol."""
    found = explore(request_protocol(scope), symmetry=symmetry)
    assert found.verdict is Verdict.PROVED
    assert (found.states, found.transitions, found.depth) == expected
    assert found.unreached == ()
    assert found.bounds == str(scope)


def test_invariants_hold_in_every_state() -> None:
    """What the proof for any size assumes of every state is true, as far as the explorer sees."""
    declared = request_protocol(SMALL)
    found = explore(replace(declared, always=(*declared.always, *declared.invariants)))
    assert (found.verdict, found.states) == (Verdict.PROVED, 13742)


def test_plain_python_reaches_the_same_states() -> None:
    """The explorer of models on the plain evaluation shares only the declaration with numpy."""
    declared = request_protocol(TINY)
    plain, found = explorer.explore(ProtocolModel(declared)), explore(declared, symmetry=False)
    assert (plain.verdict, plain.states, plain.transitions) == (
        found.verdict,
        found.states,
        found.transitions,
    )


@pytest.mark.parametrize("happens", list(product((False, True), repeat=3)), ids=str)
def test_each_disturbance_can_be_left_out(happens: tuple[bool, bool, bool]) -> None:
    """What must be met depends on what happens: leaving out a disturbance does not refute the protocol."""
    failures, resets, losses = happens
    scope = structs.replace(TINY, failures=failures, resets=resets, losses=losses)
    assert explore(request_protocol(scope)).verdict is Verdict.PROVED


@pytest.mark.slow
@pytest.mark.parametrize("happens", list(product((False, True), repeat=3)), ids=str)
def test_each_disturbance_can_be_left_out_with_several_requests(happens: tuple[bool, bool, bool]) -> None:
    failures, resets, losses = happens
    for requests, holds in product((1, 2), (1, 2)):
        scope = RequestScope(requests, 1, holds, 2, 1, failures, resets, losses)
        assert explore(request_protocol(scope)).verdict is Verdict.PROVED


@pytest.mark.slow
def test_two_workers_and_two_slots_are_proved() -> None:
    found = explore(request_protocol(RequestScope(slots=2, holds=3, workers=2)))
    assert (found.verdict, found.states, found.depth) == (Verdict.PROVED, 434385, 37)


def test_rows_that_the_protocol_never_takes_are_named() -> None:
    """Each with its reason. Nothing checks a row that is neither taken nor named here."""
    found = explore(request_protocol(structs.replace(WORKERS, restarts=True)))
    assert (found.verdict, found.unreached) == (Verdict.PROVED, ())
    unseen = never_taken(found.edges, ("request", "block", "transfer"))
    rows = {str(edge).partition(" (")[0] for edge in unseen}
    assert rows == {
        # A request with a load in flight has no match, and one that is loading has a load.
        "request MATCHED --FINISH--> FINISHED",
        "request LOADING --FINISH--> RELEASED",
        # The protocol forgets whether a free slot was ever used.
        "block EVICTED --ALLOCATE--> ALLOCATED",
        "block EVICTED --RESTART--> EVICTED",
        # A reset comes after plans were cancelled.
        "block ALLOCATED --INVALIDATE--> EVICTED",
        # Two loads read a slot, and a third one of it has failed before: there are two transfers.
        "block QUARANTINED --END_COPY_GOOD--> QUARANTINED",
        # What is used without a load is a matter of the policy.
        "block STORED --TOUCH--> STORED",
        "block LOADING --TOUCH--> LOADING",
    }


def all_states(declared: Declaration) -> list[State]:
    """All reachable states, by numpy, without symmetry."""
    transitions = Transitions(CellLayout(declared))
    level = [transitions.layout.initial]
    seen = dict.fromkeys(level)
    while level:
        after = dict.fromkeys(rows_of(transitions.after(columns_of(level)).columns))
        level = [state for state in after if state not in seen]
        seen.update(dict.fromkeys(level))
    return list(seen)


def test_what_is_forgotten_changes_nothing() -> None:
    """Without forgetting what a request has waited for there are more states. With it applied later, they
    are the same states. So forgetting hides no bug."""
    declared = request_protocol(structs.replace(TINY, transfers=2))
    kept = tuple(one for one in declared.forgets if one.cell.variable.name != "awaits")
    remembering = replace(declared, forgets=kept)
    assert explore(remembering, symmetry=False).verdict is Verdict.PROVED
    remembered, expected = columns_of(all_states(remembering)), all_states(declared)
    assert remembered.shape[1] > 1.2 * len(expected)
    layout = CellLayout(declared)
    nodes = NodeFactory(layout)
    for forget, binding in layout.forgets:
        forgotten = nodes.of(forget.when, binding).of(StateBatch(remembered))
        remembered[layout.place_of(forget.cell, binding)][forgotten] = forget.cell.variable.domain.initial
    assert set(rows_of(remembered)) == set(expected)


# Broken protocols.


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_broken_protocol_is_refuted(mistake: Mistake) -> None:
    """A mistake in a table, a guard or an effect breaks a property, and is found."""
    found = explore(mistake.declared)
    assert found.refutation is not None
    assert found.refutation.finding.property == mistake.breaks
