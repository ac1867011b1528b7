"""The request protocol: what a match promises, what becomes of it, and what the engine is told.

It stands beside the offload protocol (`offload_protocol.py`), in the same language. The offload protocol is
about bytes and copies, this one about requests. It leaves out device blocks, kernels and bytes, and a store
has one slot.

The life of a request, from top to bottom:

1. `arrive`, or the first question    the ledger has a record of it
2. `miss`, `hit`, `defer`   the answer: nothing, blocks that are pinned, or a transfer to wait for
3. `unmatch`, `begin_load`  the match is released, or its pins become the readers of a load
4. `refuse_load`            or a pinned block is gone: the load is refused, and told as failed
5. `end_good`, `end_bad`, `cancel`, `lose`   the load ends, in whatever state the request is by then
6. `tell`                   the engine hears once how the load ended
7. `preempt`, `finish`      at any time; a request whose load is in flight is released when the load ends
8. `restart`                another process goes on: all of this ends, and what can be read is left

The tables in `kvsm.states` say what a request, a slot's block and a transfer do on a trigger.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from kvsm.check.protocol.offload_state import DIRECTION, READABLE, REPORT, UNDER_WAY, UNUSED
from kvsm.check.protocol.request_claims import always, countings, rank, rest, sometimes
from kvsm.check.protocol.request_invariants import invariants
from kvsm.check.protocol.request_scope import RequestScope
from kvsm.check.protocol.request_state import NOTE, PATIENCE, RequestProtocolState
from kvsm.check.protocol.terms import (
    FALSE,
    TRUE,
    Action,
    After,
    Assign,
    Declaration,
    Each,
    Exists,
    ForAll,
    Forget,
    If,
    InState,
    Read,
    Term,
    all_of,
    is_legal,
)
from kvsm.states import MACHINES, BlockTrigger, Machine, RequestTrigger
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState, TransferTrigger

_B, _T, _R = BlockTrigger, TransferTrigger, RequestTrigger
Effects = tuple[Assign | Each, ...]


def request_protocol(scope: RequestScope, machines: Mapping[str, Machine] = MACHINES) -> Declaration:
    """The declaration.

    machines: the tables, by name. Tests give broken ones and expect a refutation.
    """
    state = RequestProtocolState(scope, machines)
    actions = [*_answers(state), *_waits(state), *_releases(state), *_ends_of_requests(state)]
    actions += [*_loads(state), *_stores(state)]
    actions += [_submit(state), *_reports(state, "good")]
    if scope.failures:
        actions += _reports(state, "bad")
    actions.append(_cancel(state))
    if scope.resets:
        actions.append(_reset(state))
    if scope.losses:
        actions.append(_lose(state))
    actions.append(_tell(state))
    if scope.restarts:
        actions.append(_restart(state))
    return Declaration(
        name="request protocol",
        bounds=str(scope),
        index_sets=(state.request_set, state.slot_set, state.hold_set, state.transfer_set, state.worker_set),
        variables=tuple(state.variables),
        actions=tuple(actions),
        forgets=_forgets(state),
        always=always(state),
        sometimes=sometimes(state, scope),
        rest=rest(state),
        rank=rank(state),
        countings=countings(state),
        invariants=invariants(state),
        about=ABOUT,
        notes=NOT_MODELLED,
    )


ABOUT = (
    "A request asks what of its prompt is in slots of the host pool. A match pins these slots. A load makes "
    "the pins readers of their slots, and the engine is told once how it ended. The request may be preempted "
    "or finished at any time."
)
NOT_MODELLED = (
    "Bytes, kernels, device blocks, and stores of several slots: they are in the offload protocol.",
    "Keys: a match may pin any block that can be read, and a request may wait for any live transfer.",
    "The order of a match: a load may leave out any of its pins. In kvsm it leaves out the last ones.",
    "Time: the bound of a wait may come at any moment.",
    "One event for all of a match, for a refused load, and for all that the engine is told: here each takes "
    "several actions, and others may come between them.",
    "What else a request has: its cursors, and the device blocks that the engine gave it.",
)


def _takes(word: Read, trigger: IntEnum) -> Assign:
    """The word takes a trigger."""
    return Assign(word, After(trigger, word))


def _where(condition: Term, cell: Read, value: Term) -> Assign:
    """The cell gets this value where the condition holds, and stays as it is elsewhere."""
    return Assign(cell, If(condition, value, cell))


# Requests.


def _answers(state: RequestProtocolState) -> list[Action]:
    """What the engine hears when it asks for a match."""
    r, s, m = state.r, state.s, state.m
    word, block = state.request[r], state.block[s]
    new = ~state.is_known(r) & InState(word, (RequestState.NEW,))
    known = Assign(state.known[r], TRUE)
    can_pin = ~state.is_held(m) & InState(block, READABLE)
    pinned: Effects = (
        _takes(block, _B.PIN),
        Assign(state.hold_slot[m], s),
        Assign(state.hold_request[m], r),
    )
    return [
        Action("arrive", "The core hears of a request.", (r,), new, (known,)),
        Action(
            "miss",
            "The host has nothing for the request. After a preemption its load may still be in flight.",
            (r,),
            (state.is_known(r) | new) & is_legal(After(_R.MISS, word)),
            (known, _takes(word, _R.MISS)),
        ),
        Action(
            "hit",
            "The request has a match: a block that can be read is pinned.",
            (r, m, s),
            state.may_ask(r) & can_pin,
            (known, _takes(word, _R.HIT), *pinned),
        ),
        Action(
            "hit_more",
            "The match has one more block.",
            (r, m, s),
            all_of(state.is_matched(r), can_pin, ~state.pins_slot(r, s)),
            pinned,
        ),
    ]


def _waits(state: RequestProtocolState) -> list[Action]:
    """A request waits for a transfer, and wakes at the latest at its bound."""
    r, t = state.r, state.t
    word, patience = state.request[r], state.patience[r]
    busy = InState(word, (RequestState.DEFERRED, RequestState.LOADING, RequestState.FINISHED))
    for_its_own = state.load[r].equals(t) & ~busy
    can_wait = all_of(state.is_live(t), ~state.is_refused(t), patience.differs(PATIENCE["SPENT"]))
    return [
        Action(
            "defer",
            "The request waits for a transfer, holding nothing. It may be its own load, after a preemption.",
            (r, t),
            can_wait & (state.may_ask(r) | for_its_own),
            (
                Assign(state.known[r], TRUE),
                _takes(word, _R.DEFER),
                Assign(state.awaits[r], t),
                Assign(patience, PATIENCE["WAITS"]),
            ),
        ),
        Action(
            "run_out",
            "A tick: the bound of the request's wait has come. It wakes if it still waits.",
            (r,),
            patience.equals(PATIENCE["WAITS"]),
            (
                Assign(patience, PATIENCE["SPENT"]),
                _where(state.is_deferred(r), word, After(_R.WAKE, word)),
            ),
        ),
    ]


def _releases(state: RequestProtocolState) -> list[Action]:
    """A match ends without a load, or loses some of its pins."""
    r, s, m, m2 = state.r, state.s, state.m, state.m2
    others = Exists(m2, state.pins(m2, r) & ~m2.equals(m))
    on_slot = state.is_intact(m) & state.hold_slot[m].equals(s)
    return [
        Action(
            "unmatch",
            "The match is released without a load: the engine asks again, or cannot place the request.",
            (r,),
            state.is_matched(r),
            (*_unpin(state), _takes(state.request[r], _R.UNMATCH)),
        ),
        Action(
            "accept_less",
            "The engine accepts less than was matched: a pin is given back.",
            (r, m, s),
            all_of(state.is_matched(r), state.pins(m, r), on_slot, others),
            (
                _takes(state.block[s], _B.UNPIN),
                Assign(state.hold_slot[m], state.a_slot.none),
                Assign(state.hold_request[m], state.a_request.none),
            ),
        ),
    ]


def _unpin(state: RequestProtocolState) -> Effects:
    """The match of r ends. Pins whose blocks are gone need nothing."""
    r, s, m = state.r, state.s, state.m
    block, pinned = state.block[s], state.pins(m, r)
    return (
        Each(s, (_where(state.pins_slot(r, s), block, After(_B.UNPIN, block)),)),
        Each(
            m,
            (
                _where(pinned, state.hold_slot[m], state.a_slot.none),
                _where(pinned, state.void[m], FALSE),
                _where(pinned, state.hold_request[m], state.a_request.none),
            ),
        ),
    )


def _ends_of_requests(state: RequestProtocolState) -> list[Action]:
    """The engine takes a request's blocks, or the request is over: legal at any time."""
    r = state.r
    word = state.request[r]
    alive = state.is_known(r) & ~state.is_over(r)
    fresh = Assign(state.patience[r], PATIENCE["NONE"])
    finished = After(_R.FINISH, word)
    return [
        Action(
            "preempt",
            "The engine takes the request's device blocks. Its match is released; its load goes on.",
            (r,),
            alive,
            (*_unpin(state), _takes(word, _R.PREEMPT), fresh),
        ),
        Action(
            "finish",
            "The request is over. It is released now, or when its load ends.",
            (r,),
            alive,
            (
                *_unpin(state),
                Assign(state.known[r], ~InState(finished, (RequestState.RELEASED,))),
                Assign(word, finished),
                fresh,
            ),
            drains=True,
        ),
    ]


# Transfers.


def _loads(state: RequestProtocolState) -> list[Action]:
    """A load is planned for a match, or the match has become void."""
    r, s, m, t = state.r, state.s, state.m, state.t
    word, block, pinned = state.request[r], state.block[s], state.pins(m, r)
    can_begin = state.is_matched(r) & state.is_unused(t)
    whole = ForAll(m, ~pinned | state.is_intact(m))
    begun: Effects = (
        _takes(word, _R.BEGIN_LOAD),
        Assign(state.load[r], t),
        Assign(state.direction[t], DIRECTION["LOAD"]),
        Assign(state.load_request[t], r),
        Assign(state.expects[t], TRUE),
    )
    return [
        Action(
            "begin_load",
            "A load is planned. The pins of the match become its readers.",
            (r, t),
            all_of(can_begin, whole, Exists(m, pinned)),
            (
                Each(s, (_where(state.pins_slot(r, s), block, After(_B.BEGIN_LOAD, block)),)),
                Each(
                    m,
                    (
                        _where(pinned, state.hold_transfer[m], t),
                        _where(pinned, state.hold_request[m], state.a_request.none),
                    ),
                ),
                *begun,
            ),
        ),
        Action(
            "refuse_load",
            "The load is refused, because a block of the match is gone. It copies nothing, and is cancelled.",
            (r, t),
            can_begin & ~whole,
            (*_unpin(state), *begun, Assign(state.refused[t], TRUE)),
        ),
        Action(
            "fail_to_load",
            "The load cannot be planned: there are too many transfers, or a device block is in use. The match"
            " is released, and the engine is to be told that the load failed.",
            (r, t),
            can_begin,
            (
                *_unpin(state),
                _takes(word, _R.UNMATCH),
                Assign(state.note[t], NOTE["FAILED"]),
                Assign(state.expects[t], TRUE),
            ),
        ),
    ]


def _stores(state: RequestProtocolState) -> list[Action]:
    """What other requests do with the slots."""
    s, m, t = state.s, state.m, state.t
    block = state.block[s]
    return [
        Action(
            "plan_store",
            "A store is planned, and gets a slot.",
            (t, m, s),
            all_of(state.is_unused(t), ~state.is_held(m), InState(block, UNUSED)),
            (
                _takes(block, _B.ALLOCATE),
                Assign(state.hold_slot[m], s),
                Assign(state.hold_transfer[m], t),
                Assign(state.direction[t], DIRECTION["STORE"]),
            ),
        ),
        Action(
            "evict",
            "The block in a slot is evicted.",
            (s,),
            is_legal(After(_B.EVICT, block)),
            (_takes(block, _B.EVICT),),
        ),
    ]


def _submit(state: RequestProtocolState) -> Action:
    s, t = state.s, state.t
    block = state.block[s]
    leaving = state.stores(t) & state.touches_slot(t, s)
    has_workers = Exists(state.w, state.report[t, state.w].equals(REPORT["NONE"]))
    return Action(
        "submit",
        "A planned transfer leaves for the workers. A refused load does not.",
        (t,),
        all_of(state.is_planned(t), ~state.is_refused(t), has_workers),
        (
            Each(s, (_where(leaving, block, After(_B.SUBMIT_STORE, block)),)),
            _takes(state.transfer[t], _T.SUBMIT),
        ),
        drains=True,
    )


def _over(state: RequestProtocolState, good: Term) -> Effects:
    """The transfer t ends. Its request is told of the end of its load, and the requests that wait for t wake.

    good: whether every worker has made its copies.
    """
    r, m, t = state.r, state.m, state.t
    word, mine, held = state.request[r], state.load[r].equals(t), state.copies(m, t)
    ended = If(mine, After(_R.END_LOAD, word), word)
    woken = state.is_deferred(r) & state.awaits[r].equals(t)
    noted = If(good, NOTE["LOADED"], NOTE["FAILED"])
    released = InState(After(_R.END_LOAD, word), (RequestState.RELEASED,))
    return (
        Each(
            r,
            (
                _where(mine, state.known[r], ~released),
                Assign(word, If(woken, After(_R.WAKE, ended), ended)),
                _where(mine, state.load[r], state.a_transfer.none),
            ),
        ),
        Each(
            m,
            (
                _where(held, state.hold_slot[m], state.a_slot.none),
                _where(held, state.hold_transfer[m], state.a_transfer.none),
            ),
        ),
        _where(state.loads(t), state.note[t], noted),
        Assign(state.direction[t], DIRECTION["NONE"]),
        Assign(state.load_request[t], state.a_request.none),
        Assign(state.refused[t], FALSE),
    )


def _voids_pins(state: RequestProtocolState, condition: Term) -> Each:
    """Where the condition holds, pins of the slots that t touches become void."""
    m, m2, t = state.m, state.m2, state.t
    same = Exists(m2, state.copies(m2, t) & state.hold_slot[m2].equals(state.hold_slot[m]))
    return Each(m, (_where(all_of(condition, state.is_pin(m), same), state.void[m], TRUE),))


def _reports(state: RequestProtocolState, name: str) -> list[Action]:
    """A worker reports a transfer as good or bad, and touches its memory no more."""
    s, t, w = state.s, state.t, state.w
    trigger = _T.REPORT_GOOD if name == "good" else _T.REPORT_BAD
    after, block = After(trigger, state.transfer[t]), state.block[s]
    completed, failed = InState(after, (TransferState.COMPLETED,)), InState(after, (TransferState.FAILED,))
    reported = (Assign(state.report[t, w], REPORT[name.upper()]), Assign(state.transfer[t], after))
    under_way = state.is_under_way(t) & state.report[t, w].equals(REPORT["NONE"])
    ended = If(completed, After(_B.END_COPY_GOOD, block), After(_B.END_COPY_BAD, block))
    bad_load = state.loads(t) & failed
    becomes = If(bad_load, After(_B.INVALIDATE, ended), ended)
    good = name == "good"
    return [
        Action(
            f"report_{name}",
            f"A worker reports its share of a transfer as {name}; other reports are still to come.",
            (t, w),
            under_way & InState(after, UNDER_WAY),
            reported,
            drains=good,
        ),
        Action(
            f"end_{name}",
            f"The last worker reports its share as {name}, and the transfer ends. A failed load voids what it"
            " read.",
            (t, w),
            under_way & ~InState(after, UNDER_WAY),
            (
                Each(s, (_where(state.touches_slot(t, s), block, becomes),)),
                _voids_pins(state, bad_load),
                *_over(state, completed),
                *reported,
            ),
            drains=good,
        ),
    ]


def _cancel(state: RequestProtocolState) -> Action:
    s, t = state.s, state.t
    block = state.block[s]
    taken_back = If(state.stores(t), After(_B.CANCEL, block), After(_B.END_COPY_BAD, block))
    return Action(
        "cancel",
        "A plan that has not left is taken back, and a refused load ends.",
        (t,),
        state.is_planned(t),
        (
            Each(s, (_where(state.touches_slot(t, s), block, taken_back),)),
            *_over(state, FALSE),
            _takes(state.transfer[t], _T.CANCEL),
        ),
        drains=True,
    )


def _reset(state: RequestProtocolState) -> Action:
    s, m, t = state.s, state.m, state.t
    return Action(
        "reset",
        "All blocks are voided, and transfers under way are abandoned. Plans were cancelled before.",
        (),
        ForAll(t, ~state.is_planned(t)),
        (
            Each(t, (_where(state.is_live(t), state.transfer[t], After(_T.ABANDON, state.transfer[t])),)),
            Each(s, (_takes(state.block[s], _B.INVALIDATE),)),
            Each(m, (_where(state.is_pin(m), state.void[m], TRUE),)),
        ),
    )


def _lose(state: RequestProtocolState) -> Action:
    s, t = state.s, state.t
    block = state.block[s]
    return Action(
        "lose",
        "A worker will never report: the transfer is given up, and its slots are retired.",
        (t,),
        state.is_under_way(t),
        (
            Each(s, (_where(state.touches_slot(t, s), block, After(_B.LOSE, block)),)),
            _voids_pins(state, TRUE),
            *_over(state, FALSE),
            _takes(state.transfer[t], _T.LOSE),
        ),
    )


def _tell(state: RequestProtocolState) -> Action:
    t = state.t
    return Action(
        "tell",
        "The engine is told how a load ended: loaded, or failed with what to compute again.",
        (t,),
        state.is_noted(t),
        (Assign(state.note[t], NOTE["NONE"]), Assign(state.expects[t], FALSE)),
        drains=True,
    )


def _restart(state: RequestProtocolState) -> Action:
    r, s, m, t = state.r, state.s, state.m, state.t
    word, transfer = state.request[r], state.transfer[t]
    ended = If(
        state.is_planned(t),
        After(_T.CANCEL, transfer),
        If(state.is_under_way(t), After(_T.LOSE, transfer), transfer),
    )
    return Action(
        "restart",
        "Another process goes on. Requests, matches and transfers end with the last one, and its engine hears"
        " of nothing. What can be read is left.",
        (),
        TRUE,
        (
            Each(s, (_takes(state.block[s], _B.RESTART),)),
            Each(
                r,
                (
                    _where(state.is_known(r), word, After(_R.RESTART, word)),
                    Assign(state.known[r], FALSE),
                    Assign(state.patience[r], PATIENCE["NONE"]),
                    Assign(state.load[r], state.a_transfer.none),
                ),
            ),
            Each(
                m,
                (
                    Assign(state.hold_slot[m], state.a_slot.none),
                    Assign(state.hold_request[m], state.a_request.none),
                    Assign(state.hold_transfer[m], state.a_transfer.none),
                    Assign(state.void[m], FALSE),
                ),
            ),
            Each(
                t,
                (
                    Assign(transfer, ended),
                    Assign(state.direction[t], DIRECTION["NONE"]),
                    Assign(state.load_request[t], state.a_request.none),
                    Assign(state.refused[t], FALSE),
                    Assign(state.note[t], NOTE["NONE"]),
                    Assign(state.expects[t], FALSE),
                ),
            ),
        ),
    )


def _forgets(state: RequestProtocolState) -> tuple[Forget, ...]:
    r, s, t, w = state.r, state.s, state.t, state.w
    word, transfer, block = state.request[r], state.transfer[t], state.block[s]
    gone = ~state.is_live(t) & ~state.is_noted(t)
    told = "The transfer has ended, and the engine was told of it."
    return (
        Forget(
            (r,),
            word,
            ~state.is_known(r) & InState(word, (RequestState.RELEASED,)),
            "The ledger has no record of a released request; one with its name is new.",
        ),
        Forget(
            (r,),
            state.awaits[r],
            ~state.is_deferred(r),
            "Only a deferred request waits for a transfer.",
        ),
        Forget((t,), transfer, gone & is_legal(transfer), told),
        Forget((t, w), state.report[t, w], gone, told),
        Forget(
            (s,),
            block,
            InState(block, UNUSED),
            "A slot that was used and a slot that never was differ only in the name of their state.",
        ),
    )
