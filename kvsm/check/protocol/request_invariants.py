"""What else holds in every state of the request protocol, so that its claims can be proved by induction.

A claim alone often says too little about the state before an action to hold after it. "A released request
holds nothing" needs, before a request finishes: a load in flight is in the request's record. Each invariant
is needed to prove some claim or another invariant, except one. "A slot is held once" is needed to show that
the counters count: a step that changes a counter by one changes the set by one member.

Every sentence is about all requests r, holds m and m2, and transfers t.
"""

from __future__ import annotations

from kvsm.check.protocol.offload_state import REPORT
from kvsm.check.protocol.request_state import RequestProtocolState
from kvsm.check.protocol.terms import Claim, Exists, InState, all_of, for_all, implies
from kvsm.states.request import RequestState
from kvsm.states.transfer import LIVE


def invariants(state: RequestProtocolState) -> tuple[Claim, ...]:
    """All of them."""
    return (*_of_requests(state), *_of_holds(state), *_of_transfers(state))


def _of_requests(state: RequestProtocolState) -> tuple[Claim, ...]:
    """What the record of a request says."""
    r = state.r
    word = state.request[r]
    under_load = InState(word, (RequestState.LOADING, RequestState.FINISHED))
    loads = state.load[r].differs(state.a_transfer.none)
    return (
        Claim(
            "a released request has no record",
            "A request that the ledger has a record of is not released. Another one is released or new.",
            for_all(
                all_of(
                    implies(state.is_known(r), ~InState(word, (RequestState.RELEASED,))),
                    implies(~state.is_known(r), InState(word, (RequestState.NEW, RequestState.RELEASED))),
                )
            ),
        ),
        Claim(
            "a loading request has a load",
            "A request that loads, or is over and not released, has a load. A matched one has none.",
            for_all(all_of(implies(under_load, loads), implies(state.is_matched(r), ~loads))),
        ),
    )


def _of_holds(state: RequestProtocolState) -> tuple[Claim, ...]:
    """Who holds which slots."""
    m, m2, t = state.m, state.m2, state.t
    same_slot = state.hold_slot[m].equals(state.hold_slot[m2])
    one_request = state.is_pin(m) & state.hold_request[m].equals(state.hold_request[m2])
    one_transfer = state.is_copy(m) & state.hold_transfer[m].equals(state.hold_transfer[m2])
    both_intact = state.is_intact(m) & state.is_intact(m2)
    store_on_it = all_of(state.copies(m, t), state.stores(t), same_slot)
    return (
        Claim(
            "a hold has one holder",
            "A hold on a slot is a match's or a transfer's. Only a match's can be void.",
            for_all(
                all_of(
                    implies(state.is_held(m), state.is_pin(m) | state.is_copy(m)),
                    implies(state.is_pin(m), state.is_held(m) & ~state.is_copy(m)),
                    implies(state.is_copy(m), state.is_held(m)),
                    implies(~state.is_intact(m), state.is_pin(m)),
                )
            ),
        ),
        Claim(
            "transfers that hold slots are live",
            "The transfer of a hold is live, and no refused load.",
            for_all(implies(state.copies(m, t), state.is_live(t) & ~state.is_refused(t))),
        ),
        Claim(
            "a store has its slot to itself",
            "No other transfer touches the slot of a store.",
            for_all(implies(store_on_it & state.is_copy(m2), m.equals(m2))),
        ),
        Claim(
            "a slot is held once",
            "Two holds of a transfer are on different slots. So are two pins of a match, unless one is void.",
            for_all(
                all_of(
                    implies(all_of(one_request, same_slot, both_intact), m.equals(m2)),
                    implies(one_transfer & same_slot, m.equals(m2)),
                )
            ),
        ),
    )


def _of_transfers(state: RequestProtocolState) -> tuple[Claim, ...]:
    """How far the transfers are."""
    t, w = state.t, state.w
    unreported = state.report[t, w].equals(REPORT["NONE"])
    return (
        Claim(
            "a live transfer is on its way",
            "A live transfer is planned, submitted or abandoned.",
            for_all(implies(state.is_live(t), InState(state.transfer[t], tuple(sorted(LIVE))))),
        ),
        Claim(
            "a transfer under way waits for a worker",
            "Some worker has not reported a transfer that is under way.",
            for_all(implies(state.is_under_way(t), Exists(w, unreported))),
        ),
        Claim(
            "a refused load is planned",
            "A refused load has not left for the workers.",
            for_all(implies(state.is_refused(t), state.loads(t) & state.is_planned(t))),
        ),
    )
