"""The request protocol is proved within small bounds, and wrong tables, guards and effects are refuted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from msgspec import structs

from kvsm.checker import explorer
from kvsm.checker.coverage import never_taken
from kvsm.checker.model import Verdict
from kvsm.checker.protocol.arrays import Transitions, columns_of, rows_of
from kvsm.checker.protocol.explore import explore
from kvsm.checker.protocol.layout import CellLayout
from kvsm.checker.protocol.nodes import NodeFactory, StateBatch
from kvsm.checker.protocol.plain import ProtocolModel, State
from kvsm.checker.protocol.request_scope import REQUEST_SCOPES, RequestScope
from kvsm.checker.protocol.request_state import NOTE, RequestProtocolState
from kvsm.checker.protocol.requests import request_protocol
from kvsm.checker.protocol.terms import (
    Action,
    And,
    Declaration,
    Each,
    Effect,
    Exists,
    If,
    Term,
)
from kvsm.properties import Property
from kvsm.states import (
    BLOCK,
    MACHINES,
    REQUEST,
    TRANSFER,
    BlockTrigger,
    Machine,
    RequestState,
    RequestTrigger,
)
from kvsm.states.machine import VOID, Row
from kvsm.states.transfer import TransferState, TransferTrigger

TINY = RequestScope(requests=1, holds=1, transfers=1)
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
    found = explore(request_protocol(WORKERS))
    assert (found.verdict, found.unreached) == (Verdict.PROVED, ())
    unseen = never_taken(found.edges, ("request", "block", "transfer"))
    rows = {str(edge).partition(" (")[0] for edge in unseen}
    assert rows == {
        # A request with a load in flight has no match, and one that is loading has a load.
        "request MATCHED --FINISH--> FINISHED",
        "request LOADING --FINISH--> RELEASED",
        # The protocol forgets whether a free slot was ever used.
        "block EVICTED --ALLOCATE--> ALLOCATED",
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

Change = Callable[[Action], Action]


def changed(declared: Declaration, names: str, change: Change) -> Declaration:
    """The declaration with these actions changed. names: separated by spaces."""
    actions = tuple(change(one) if one.name in names.split() else one for one in declared.actions)
    assert actions != declared.actions
    return replace(declared, actions=actions)


def without(variable: str) -> Change:
    """The action does not assign to this variable."""

    def kept(effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
        found = (replace(one, effects=kept(one.effects)) if isinstance(one, Each) else one for one in effects)
        return tuple(one for one in found if isinstance(one, Each) or one.cell.variable.name != variable)

    return lambda action: replace(action, effects=kept(action.effects))


def assigning(variable: str, change: Callable[[Term], Term]) -> Change:
    """The action assigns something else to this variable."""

    def revised(one: Effect) -> Effect:
        if isinstance(one, Each):
            return replace(one, effects=tuple(map(revised, one.effects)))
        return replace(one, value=change(one.value)) if one.cell.variable.name == variable else one

    return lambda action: replace(action, effects=tuple(map(revised, action.effects)))


def never_wakes(value: Term) -> Term:
    """The word without the wake."""
    assert isinstance(value, If)
    return value.otherwise


def told_as_loaded(value: Term) -> Term:
    """What is noted, whatever the workers say."""
    assert isinstance(value, If)
    return replace(value, then=NOTE["LOADED"])


def though_gone(value: Term) -> Term:
    """A step of the blocks that a match pins, and of the next blocks in the slots of those that are gone."""
    assert isinstance(value, If)
    state = RequestProtocolState(TINY, MACHINES)
    on_slot = state.hold_slot[state.m2].equals(state.s)
    return replace(value, condition=Exists(state.m2, state.pins(state.m2, state.r) & on_slot))


def though_void(action: Action) -> Action:
    """A load of a match, whether its blocks are gone or not."""
    assert isinstance(action.guard, And)
    matched, _whole, some = action.guard.terms
    return replace(action, guard=matched & some)


def with_rows(machine: Machine, change: Callable[[Row], Row]) -> dict[str, Machine]:
    rows = tuple(map(change, machine.rows))
    assert rows != machine.rows
    made = Machine(machine.name, machine.states, machine.triggers, machine.counters, rows)
    return {**MACHINES, machine.name: made}


def finish_forgets_a_load(row: Row) -> Row:
    return replace(row, target=RequestState.RELEASED) if row.target is RequestState.FINISHED else row


def load_ends_only_while_loading(row: Row) -> Row:
    late = row.trigger is RequestTrigger.END_LOAD and row.target is None
    return replace(row, sources=(RequestState.NEW,)) if late else row


def preemption_forgets_a_load(row: Row) -> Row:
    dropped = row.trigger is RequestTrigger.PREEMPT and row.target is RequestState.PREEMPTED
    return replace(row, then={"loads": VOID}) if dropped else row


def pinned_can_be_evicted(row: Row) -> Row:
    return replace(row, when={}) if row.trigger is BlockTrigger.EVICT else row


def failure_is_success(row: Row) -> Row:
    late = row.target is TransferState.FAILED and row.trigger is TransferTrigger.REPORT_GOOD
    return replace(row, target=TransferState.COMPLETED) if late else row


def broken_table(machine: Machine, change: Callable[[Row], Row], workers: int = 1) -> Declaration:
    return request_protocol(structs.replace(TINY, workers=workers), with_rows(machine, change))


def broken_action(names: str, *changes: Change) -> Declaration:
    declared = request_protocol(TINY)
    for change in changes:
        declared = changed(declared, names, change)
    return declared


ENDS = "end_good end_bad cancel lose"
KEEPS_PINS = without("block"), without("hold_slot"), without("hold_request")
BROKEN: dict[str, tuple[Declaration, Property]] = {
    "a failed load is told as loaded": (
        broken_action("end_bad", assigning("note", told_as_loaded)),
        Property.FAILURE_IS_NOT_SUCCESS,
    ),
    "one bad worker is forgotten": (
        broken_table(TRANSFER, failure_is_success, workers=2),
        Property.FAILURE_IS_NOT_SUCCESS,
    ),
    "a lost load is never told": (broken_action("lose", without("note")), Property.FAILURE_IS_NOT_SUCCESS),
    "an end is told again and again": (broken_action("tell", without("note")), Property.PROGRESS),
    "a finish forgets a load": (broken_table(REQUEST, finish_forgets_a_load), Property.ONE_RELEASE_PER_HOLD),
    "a preemption forgets a load": (
        broken_table(REQUEST, preemption_forgets_a_load),
        Property.ONE_RELEASE_PER_HOLD,
    ),
    "pins stay at a preemption": (broken_action("preempt", *KEEPS_PINS), Property.ONE_RELEASE_PER_HOLD),
    "pins that are gone are given back": (
        broken_action("preempt", assigning("block", though_gone)),
        Property.LEGAL_CALLS,
    ),
    "pins outlive a reset": (broken_action("reset", without("void")), Property.ONE_RELEASE_PER_HOLD),
    "a void match is loaded": (broken_action("begin_load", though_void), Property.NO_REUSE_IN_FLIGHT),
    "a pinned block is evicted": (broken_table(BLOCK, pinned_can_be_evicted), Property.ONE_RELEASE_PER_HOLD),
    "the end of a transfer wakes nobody": (
        broken_action(ENDS, assigning("request", never_wakes)),
        Property.PROGRESS,
    ),
    "a wait has no bound": (broken_action("defer", without("patience")), Property.PROGRESS),
    "a load ends only while its request waits for it": (
        broken_table(REQUEST, load_ends_only_while_loading),
        Property.LEGAL_CALLS,
    ),
}
"""Each with the property that the explorer finds broken."""


@pytest.mark.parametrize("name", BROKEN)
def test_broken_protocol_is_refuted(name: str) -> None:
    """A mistake in a table, a guard or an effect breaks a property, and is found."""
    declared, property = BROKEN[name]
    found = explore(declared)
    assert found.refutation is not None
    assert found.refutation.finding.property == property
