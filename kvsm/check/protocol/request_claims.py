"""What must hold in the protocol of the requests, the state at rest, and why winding down reaches it."""

from __future__ import annotations

from kvsm.check.protocol.claims import fits_transfer, indexed_is_served
from kvsm.check.protocol.offload_state import READABLE, REPORT, UNUSED, VOIDED
from kvsm.check.protocol.request_scope import RequestScope
from kvsm.check.protocol.request_state import NOTE, PATIENCE, RequestProtocolState
from kvsm.check.protocol.terms import (
    FALSE,
    TRUE,
    Claim,
    Counting,
    Equal,
    Exists,
    ForAll,
    InState,
    Term,
    Total,
    all_of,
    for_all,
    implies,
    is_legal,
)
from kvsm.properties import Property
from kvsm.states import BlockState
from kvsm.states.transfer import TransferState


def always(state: RequestProtocolState) -> tuple[Claim, ...]:
    """The properties, in the order of their numbers."""
    r, s, t = state.r, state.s, state.t
    word, transfer, block = state.request[r], state.transfer[t], state.block[s]
    return (
        Claim(
            Property.NO_REUSE_IN_FLIGHT,
            "The state of a slot fits each live transfer that reads or writes it.",
            for_all(
                implies(
                    _is_under(state),
                    fits_transfer(state.block[state.s], state.transfer[state.t], state.stores(state.t)),
                )
            ),
        ),
        Claim(
            Property.ONE_RELEASE_PER_HOLD,
            "The numbers of pins, readers and loads equal the numbers of their holders. Each pin belongs to a"
            " matched request, and each load to a known one: a released request holds nothing.",
            _held_by_number(state),
        ),
        Claim(
            Property.STALE_REPORTS,
            "A transfer waits once for each worker that has not reported.",
            all_of(*(one.claim for one in countings(state) if one.cell.variable is state.transfer)),
        ),
        Claim(
            Property.FAILURE_IS_NOT_SUCCESS,
            "The engine hears that a load is loaded only if every worker has reported it as good. It hears of"
            " the end of each load once, and of nothing else.",
            _told_truly(state),
        ),
        Claim(
            Property.MATCH_HOLDS,
            "A match pins something until its load begins. What it pins can be read, unless it was voided."
            " What its load reads stays in its slot.",
            _promises_kept(state),
        ),
        Claim(
            Property.LEGAL_CALLS,
            "Every step taken is in its machine's table.",
            all_of(for_all(is_legal(word)), for_all(is_legal(transfer)), for_all(is_legal(block))),
        ),
        Claim(
            Property.PROGRESS,
            "A request that waits will wake: it waits for a live transfer, and its wait has a bound.",
            _will_wake(state),
        ),
        Claim(
            Property.STORED_SO_SERVED,
            "A slot that the index names can be read, or a live store writes it.",
            indexed_is_served(block, Exists(t, state.stores(t) & state.touches_slot(t, s)), s),
        ),
    )


def _is_under(state: RequestProtocolState) -> Term:
    """The hold m on the slot s is the transfer t's."""
    return state.copies(state.m, state.t) & state.hold_slot[state.m].equals(state.s)


def countings(state: RequestProtocolState) -> tuple[Counting, ...]:
    """What the counters of the machines count."""
    r, s, m, t, w = state.r, state.s, state.m, state.t, state.w
    word, block, transfer, report = state.request[r], state.block[s], state.transfer[t], state.report[t, w]
    on_slot = state.hold_slot[m].equals(s)
    at_work = Exists(t, state.copies(m, t) & ~(state.stores(t) & state.is_planned(t)))
    # A retired slot counts no copies. An unused slot under a copy breaks "no reuse in flight" already.
    counted = ~InState(block, (*UNUSED, BlockState.RETIRED))
    submitted = state.is_live(t) & InState(transfer, (TransferState.PLANNED, TransferState.SUBMITTED))
    return (
        Counting("loads in flight for the request", word, "loads", t, state.load[r].equals(t), TRUE),
        Counting("transfers at work on the slot", block, "copies", m, at_work & on_slot, counted),
        Counting(
            "intact pins of the slot",
            block,
            "pins",
            m,
            all_of(state.is_pin(m), state.is_intact(m), on_slot),
            TRUE,
        ),
        Counting(
            "workers that have not reported",
            transfer,
            "pending",
            w,
            report.equals(REPORT["NONE"]),
            state.is_live(t),
        ),
        Counting(
            "workers that reported a failure", transfer, "failed", w, report.equals(REPORT["BAD"]), submitted
        ),
    )


def _held_by_number(state: RequestProtocolState) -> Term:
    """Pins, readers and loads are counted, and none is without its request."""
    r, m, t = state.r, state.m, state.t
    in_record, loads_for = state.load[r].equals(t), state.loads(t) & state.load_request[t].equals(r)
    counted = [one.claim for one in countings(state) if one.cell.variable is not state.transfer]
    return all_of(
        *counted,
        for_all(implies(state.pins(m, r), state.is_matched(r))),
        for_all(implies(in_record, loads_for & state.is_known(r))),
        for_all(implies(loads_for, in_record)),
        for_all(implies(state.loads(t), state.load_request[t].differs(state.a_request.none))),
    )


def _told_truly(state: RequestProtocolState) -> Term:
    """What is noted about the load t is true, and the engine expects just that."""
    t, w = state.t, state.w
    completed = InState(state.transfer[t], (TransferState.COMPLETED,))
    good = completed & ForAll(w, state.report[t, w].equals(REPORT["GOOD"]))
    to_come = state.loads(t) | state.is_noted(t)
    return all_of(
        for_all(implies(state.note[t].equals(NOTE["LOADED"]), good)),
        for_all(Equal(state.expects[t].differs(FALSE), to_come)),
        for_all(~(state.is_live(t) & state.is_noted(t))),
    )


def _promises_kept(state: RequestProtocolState) -> Term:
    """A match pins what it counts, and its load reads it."""
    r, s, m, t = state.r, state.s, state.m, state.t
    block, on_slot = state.block[s], state.hold_slot[m].equals(s)
    pinned = all_of(state.is_pin(m), state.is_intact(m), on_slot)
    read = all_of(state.copies(m, t), state.loads(t), on_slot)
    in_place = InState(block, (BlockState.LOADING, *VOIDED))
    return all_of(
        for_all(implies(state.is_matched(r), Exists(m, state.pins(m, r)))),
        for_all(implies(pinned, InState(block, READABLE))),
        for_all(implies(read, in_place)),
        for_all(implies(state.loads(t) & ~state.is_refused(t), Exists(m, state.copies(m, t)))),
    )


def _will_wake(state: RequestProtocolState) -> Term:
    r, t = state.r, state.t
    bounded = state.patience[r].equals(PATIENCE["WAITS"]) & state.awaits[r].differs(state.a_transfer.none)
    return all_of(
        for_all(implies(state.is_deferred(r), bounded)),
        for_all(implies(state.is_deferred(r) & state.awaits[r].equals(t), state.is_live(t))),
    )


def sometimes(state: RequestProtocolState, scope: RequestScope) -> tuple[Claim, ...]:
    """Dangerous situations: an exploration that meets none of one kind has proved little."""
    r, t = state.r, state.t
    waits_for = state.load[r].equals(t) & state.awaits[r].equals(t)
    claims = [
        Claim(
            "a finished request loads",
            "A request is over, and its load is in flight.",
            Exists(r, state.is_over(r)),
        ),
        Claim(
            "a request waits for its own load",
            "A request was preempted under its load, and waits for it.",
            Exists(r, state.is_deferred(r) & Exists(t, waits_for)),
        ),
        Claim(
            "an end is told late",
            "A load has ended, the engine does not know it yet, and no request is known any more.",
            Exists(t, state.is_noted(t)) & ForAll(r, ~state.is_known(r)),
        ),
        Claim(
            "a wait is spent",
            "A request has waited as long as it may.",
            Exists(r, state.patience[r].equals(PATIENCE["SPENT"])),
        ),
        Claim(
            "a load is good",
            "The engine is about to hear that a load is loaded.",
            Exists(t, state.note[t].equals(NOTE["LOADED"])),
        ),
    ]
    return (*claims, *_sometimes_when(state, scope))


def _sometimes_when(state: RequestProtocolState, scope: RequestScope) -> list[Claim]:
    """Situations that some scopes exclude."""
    m, m2, t = state.m, state.m2, state.t
    same_slot = state.hold_slot[m].equals(state.hold_slot[m2])
    void = state.is_pin(m) & ~state.is_intact(m)
    several, claims = scope.requests > 1 and scope.holds > 1, []
    if several:
        read = Exists(m2, same_slot & Exists(t, state.copies(m2, t) & state.loads(t)))
        says = "A load reads a slot that a match pins."
        claims.append(Claim("a pin is beside a reader", says, Exists(m, state.is_pin(m) & read)))
    if scope.resets or (several and (scope.failures or scope.losses)):
        says = "A block that a match pins was voided."
        claims.append(Claim("a match is void", says, Exists(m, void)))
    if several and (scope.resets or scope.failures):
        pinned = all_of(state.is_pin(m2), state.is_intact(m2), same_slot)
        says = "A pinned block was voided, and another match pins the next block in its slot."
        claims.append(Claim("a slot is pinned again", says, Exists(m, void & Exists(m2, pinned))))
    if scope.resets:
        abandoned = state.loads(t) & InState(state.transfer[t], (TransferState.ABANDONED,))
        says = "A reset came while a load was under way."
        claims.append(Claim("a load is abandoned", says, Exists(t, abandoned)))
    return claims


def rest(state: RequestProtocolState) -> Term:
    """Everything is wound down: no request is known, nothing is held, and the engine waits for no answer."""
    r, m, t = state.r, state.m, state.t
    return all_of(
        ForAll(t, ~state.is_live(t)),
        ForAll(t, ~state.is_noted(t) & state.expects[t].equals(FALSE)),
        ForAll(r, ~state.is_known(r)),
        ForAll(m, ~state.is_held(m)),
    )


def rank(state: RequestProtocolState) -> Term:
    """An upper bound on the draining actions left to take."""
    r, t, w = state.r, state.t, state.w
    unreported = state.is_live(t) & state.report[t, w].equals(REPORT["NONE"])
    total: Term = Total(r, state.is_known(r) & ~state.is_over(r))
    total = total + Total(t, state.is_planned(t)) + Total(t, state.is_live(t))
    return total + Total(t, Total(w, unreported)) + Total(t, state.is_live(t) | state.is_noted(t))
