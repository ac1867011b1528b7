"""Request protocols with one mistake each: in a table, a guard or an effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from msgspec import structs
from protocol_mutants import with_rows

from kvsm.check.protocol.request_protocol import request_protocol
from kvsm.check.protocol.request_scope import RequestScope
from kvsm.check.protocol.request_state import NOTE, RequestProtocolState
from kvsm.check.protocol.terms import Action, And, Declaration, Each, Effect, Exists, If, Term
from kvsm.properties import Property
from kvsm.states import (
    BLOCK,
    MACHINES,
    REQUEST,
    TRANSFER,
    BlockState,
    BlockTrigger,
    Machine,
    RequestState,
    RequestTrigger,
)
from kvsm.states.machine import VOID, Row
from kvsm.states.transfer import TransferState, TransferTrigger

TINY = RequestScope(requests=1, holds=1, transfers=1)
"""A scope of one request, one hold and one transfer."""


@dataclass(frozen=True)
class Mistake:
    """A broken declaration.

    breaks: the property that the explorer reports as broken.
    step, claim: the condition of the proof for any size that fails.
    """

    name: str
    declared: Declaration
    breaks: Property
    step: str
    claim: str

    def __str__(self) -> str:
        return self.name


Change = Callable[[Action], Action]


def changed(declared: Declaration, names: str, change: Change) -> Declaration:
    """Return the declaration with these actions changed. names: separated by spaces."""
    actions = tuple(change(one) if one.name in names.split() else one for one in declared.actions)
    assert actions != declared.actions
    return replace(declared, actions=actions)


def without(variable: str) -> Change:
    """Return a change that drops an action's assignments to this variable."""

    def kept(effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
        found = (replace(one, effects=kept(one.effects)) if isinstance(one, Each) else one for one in effects)
        return tuple(one for one in found if isinstance(one, Each) or one.cell.variable.name != variable)

    return lambda action: replace(action, effects=kept(action.effects))


def assigning(variable: str, change: Callable[[Term], Term]) -> Change:
    """Return a change that revises the values that an action assigns to this variable."""

    def revised(one: Effect) -> Effect:
        if isinstance(one, Each):
            return replace(one, effects=tuple(map(revised, one.effects)))
        return replace(one, value=change(one.value)) if one.cell.variable.name == variable else one

    return lambda action: replace(action, effects=tuple(map(revised, action.effects)))


def never_wakes(value: Term) -> Term:
    """Return the assigned word without the step that wakes the request."""
    assert isinstance(value, If)
    return value.otherwise


def noted_as_loaded(value: Term) -> Term:
    """Note a load as done, although a worker reported a failure."""
    assert isinstance(value, If)
    return replace(value, then=NOTE["LOADED"])


def though_gone(value: Term) -> Term:
    """Step also the later blocks in the slots of a match's blocks that are gone."""
    assert isinstance(value, If)
    state = RequestProtocolState(TINY, MACHINES)
    on_slot = state.hold_slot[state.m2].equals(state.s)
    return replace(value, condition=Exists(state.m2, state.pins(state.m2, state.r) & on_slot))


def though_void(action: Action) -> Action:
    """Allow the load of a match even if some of its blocks are gone."""
    assert isinstance(action.guard, And)
    matched, _whole, some = action.guard.terms
    return replace(action, guard=matched & some)


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


def cancelled_plan_stays(row: Row) -> Row:
    return replace(row, target=BlockState.ALLOCATED) if row.trigger is BlockTrigger.CANCEL else row


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


S3, S4, S6 = Property.NO_REUSE_IN_FLIGHT, Property.ONE_RELEASE_PER_HOLD, Property.FAILURE_IS_NOT_SUCCESS
S7, S8, S9 = Property.MATCH_HOLDS, Property.LEGAL_CALLS, Property.PROGRESS
S19 = Property.STORED_SO_SERVED
ENDS = "end_good end_bad cancel lose"
KEEPS_PINS = without("block"), without("hold_slot"), without("hold_request")
MISTAKES = (
    Mistake(
        "a failed load is told as loaded",
        broken_action("end_bad", assigning("note", noted_as_loaded)),
        S6,
        "end_bad",
        str(S6),
    ),
    Mistake(
        "one bad worker is forgotten",
        broken_table(TRANSFER, failure_is_success, workers=2),
        S6,
        "end_good",
        str(S6),
    ),
    Mistake(
        "a lost load is never told",
        broken_action("lose", without("note")),
        S6,
        "lose",
        str(S6),
    ),
    Mistake(
        "an end is told again and again",
        broken_action("tell", without("note")),
        S9,
        "tell",
        str(S6),
    ),
    Mistake(
        "a finish forgets a load",
        broken_table(REQUEST, finish_forgets_a_load),
        S4,
        "finish",
        str(S4),
    ),
    Mistake(
        "a cancelled store keeps its slot",
        broken_table(BLOCK, cancelled_plan_stays),
        S19,
        "cancel",
        str(S19),
    ),
    Mistake(
        "a preemption forgets a load",
        broken_table(REQUEST, preemption_forgets_a_load),
        S4,
        "preempt",
        "request counts its loads",
    ),
    Mistake(
        "pins stay at a preemption",
        broken_action("preempt", *KEEPS_PINS),
        S4,
        "preempt",
        str(S4),
    ),
    Mistake(
        "pins that are gone are given back",
        broken_action("preempt", assigning("block", though_gone)),
        S8,
        "preempt",
        str(S8),
    ),
    Mistake(
        "pins outlive a reset",
        broken_action("reset", without("void")),
        S4,
        "reset",
        str(S7),
    ),
    Mistake(
        "a void match is loaded",
        broken_action("begin_load", though_void),
        S3,
        "begin_load",
        str(S3),
    ),
    Mistake(
        "a pinned block is evicted",
        broken_table(BLOCK, pinned_can_be_evicted),
        S4,
        "evict",
        str(S7),
    ),
    Mistake(
        "the end of a transfer wakes nobody",
        broken_action(ENDS, assigning("request", never_wakes)),
        S9,
        "end_good",
        str(S9),
    ),
    Mistake(
        "a wait has no bound",
        broken_action("defer", without("patience")),
        S9,
        "defer",
        str(S9),
    ),
    Mistake(
        "a load ends only while its request waits for it",
        broken_table(REQUEST, load_ends_only_while_loading),
        S8,
        "end_good",
        str(S8),
    ),
)
