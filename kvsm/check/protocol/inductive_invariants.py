"""What else holds in every state of the offload protocol, so that its claims can be proved by induction.

A claim alone often says too little about the state before an action to hold after it. "A slot that can be
read holds its key's bytes" needs, before a store ends: what its copies have written is the slot's key. Each
invariant below is needed: without it some claim or invariant cannot be proved (a test shows this for each).

Every sentence is about all transfers t, copies c and c2, device blocks d, slots s and workers w.
"""

from __future__ import annotations

from kvsm.check.protocol.offload_state import KERNEL, REPORT, ProtocolState
from kvsm.check.protocol.scope import ProtocolScope
from kvsm.check.protocol.terms import (
    FALSE,
    Claim,
    Exists,
    ForAll,
    If,
    InState,
    Term,
    all_of,
    for_all,
    implies,
)
from kvsm.states import BlockState, LeaseState
from kvsm.states.transfer import LIVE, TransferState


def invariants(state: ProtocolState, scope: ProtocolScope) -> tuple[Claim, ...]:
    """All of them."""
    claims = (
        *_of_links(state),
        *_of_books(state),
        *_of_progress(state),
        *_of_stores(state),
        *_of_loads(state),
        *_of_losses(state),
    )
    return (*claims, *_of_the_log(state)) if scope.crashes else claims


def _of_links(state: ProtocolState) -> tuple[Claim, ...]:
    """Which copies there are, and what they touch."""
    t, c, c2 = state.t, state.c, state.c2
    same_slot = state.copy_slot[c2].equals(state.copy_slot[c])
    same_device = state.copy_device[c2].equals(state.copy_device[c])
    return (
        Claim(
            "copies belong to live transfers",
            "The transfer of a copy is live.",
            for_all(implies(state.of(c, t), state.is_live(t))),
        ),
        Claim(
            "a copy has two ends",
            "A copy is between a device block and a slot.",
            for_all(
                implies(
                    state.is_copy(c),
                    state.copy_device[c].differs(state.a_device.none)
                    & state.copy_slot[c].differs(state.a_slot.none),
                )
            ),
        ),
        Claim(
            "a store has its slots to itself",
            "No other copy touches the slot of a store's copy.",
            for_all(
                implies(all_of(state.of(c, t), state.stores(t), state.is_copy(c2), same_slot), c.equals(c2))
            ),
        ),
        Claim(
            "a load has its device blocks to itself",
            "No other copy touches the device block of a load's copy.",
            for_all(
                implies(all_of(state.of(c, t), state.loads(t), state.is_copy(c2), same_device), c.equals(c2))
            ),
        ),
        Claim(
            "a transfer touches a block once",
            "Two copies of one transfer differ in their slots and in their device blocks.",
            for_all(implies(all_of(state.of(c, t), state.of(c2, t), same_slot | same_device), c.equals(c2))),
        ),
    )


def _of_books(state: ProtocolState) -> tuple[Claim, ...]:
    """What the core's books say of the blocks that are in use."""
    t, c, d, s = state.t, state.c, state.d, state.s
    return (
        Claim(
            "a store holds a lease",
            "The device block of a store's copy is leased for reading.",
            for_all(
                implies(
                    all_of(state.of(c, t), state.stores(t), state.copy_device[c].equals(d)),
                    InState(state.lease[d], (LeaseState.READING,)),
                )
            ),
        ),
        Claim(
            "what is being stored is new",
            "A slot that is being stored does not date from before the last reset.",
            for_all(
                implies(
                    InState(state.block[s], (BlockState.ALLOCATED, BlockState.STORING)),
                    state.old[s].equals(FALSE),
                )
            ),
        ),
    )


def _of_progress(state: ProtocolState) -> tuple[Claim, ...]:
    """How far transfers are."""
    t, c, w = state.t, state.c, state.w
    return (
        Claim(
            "a live transfer is on its way",
            "A live transfer is planned, submitted or abandoned.",
            for_all(implies(state.is_live(t), InState(state.transfer[t], tuple(sorted(LIVE))))),
        ),
        Claim(
            "no copy of a plan has started",
            "No worker has started a copy of a planned transfer.",
            for_all(implies(state.of(c, t) & state.is_planned(t), state.at("QUEUED"))),
        ),
        Claim(
            "no worker reports a plan",
            "No worker has reported a planned transfer.",
            for_all(implies(state.is_planned(t), state.report[t, w].equals(REPORT["NONE"]))),
        ),
        Claim(
            "a transfer under way waits for a worker",
            "Some worker has not reported a transfer that is under way.",
            ForAll(t, implies(state.is_under_way(t), Exists(w, state.report[t, w].equals(REPORT["NONE"])))),
        ),
        Claim(
            "what is reported good is written",
            "A worker that reported a transfer as good has written all its copies.",
            for_all(implies(state.of(c, t) & state.report[t, w].equals(REPORT["GOOD"]), state.at("WRITTEN"))),
        ),
    )


def _copies(state: ProtocolState, *conditions: Term) -> Term:
    """c copies between d and s for t, which no reset has abandoned, and some conditions hold."""
    t, c = state.t, state.c
    return all_of(
        state.of(c, t),
        ~InState(state.transfer[t], (TransferState.ABANDONED,)),
        state.copy_device[c].equals(state.d),
        state.copy_slot[c].equals(state.s),
        *conditions,
    )


def _of_stores(state: ProtocolState) -> tuple[Claim, ...]:
    """The key's bytes on their way from a device block to a slot."""
    c, d, s, w = state.c, state.d, state.s, state.w
    kernel, slot_key, store = state.kernel[d, w], state.slot_key[s], state.stores(state.t)
    return (
        Claim(
            "a kernel writes the block's key",
            "A kernel that writes has a key: the key of its device block, unless this is free or being"
            " loaded.",
            for_all(
                implies(
                    kernel.equals(KERNEL["WRITES"]),
                    state.kernel_key[d].differs(state.a_key.none)
                    & (state.is_free(d) | state.is_loaded(d) | state.key[d].equals(state.kernel_key[d])),
                )
            ),
        ),
        Claim(
            "a store finds its key",
            "Until a store has read, the device block holds the slot's key, or a queued kernel will write"
            " it.",
            for_all(
                implies(
                    _copies(state, store, state.at("QUEUED") | state.at("STARTED")),
                    If(
                        kernel.equals(KERNEL["WRITES"]),
                        state.kernel_key[d].equals(slot_key) & state.at("QUEUED"),
                        state.content[d, w].equals(slot_key),
                    ),
                )
            ),
        ),
        Claim(
            "a store carries its key",
            "What a store has read is the slot's key.",
            for_all(implies(_copies(state, store, state.at("READ")), state.in_flight[c, w].equals(slot_key))),
        ),
        Claim(
            "a store writes its key",
            "Where a store has written, the slot holds its key.",
            for_all(
                implies(_copies(state, store, state.at("WRITTEN")), state.slot_content[s, w].equals(slot_key))
            ),
        ),
    )


def _of_loads(state: ProtocolState) -> tuple[Claim, ...]:
    """The key's bytes on their way from a slot to a device block."""
    t, c, d, s, w = state.t, state.c, state.d, state.s, state.w
    key, load = state.key[d], state.loads(t)
    return (
        Claim(
            "a load finds its key",
            "Until a load has read, the slot holds the device block's key.",
            for_all(
                implies(
                    _copies(state, load, state.at("QUEUED") | state.at("STARTED")),
                    state.slot_content[s, w].equals(key),
                )
            ),
        ),
        Claim(
            "a load carries its key",
            "What a load has read is the device block's key.",
            for_all(implies(_copies(state, load, state.at("READ")), state.in_flight[c, w].equals(key))),
        ),
        Claim(
            "a load writes its key",
            "Where a load has written, the device block holds its key.",
            for_all(implies(_copies(state, load, state.at("WRITTEN")), state.content[d, w].equals(key))),
        ),
        Claim(
            "a load waits for kernels",
            "While a kernel is queued for its device block, a load has not started.",
            for_all(
                implies(
                    all_of(
                        state.of(c, t),
                        load,
                        state.copy_device[c].equals(d),
                        state.kernel[d, w].differs(KERNEL["NONE"]),
                    ),
                    state.at("QUEUED"),
                )
            ),
        ),
    )


def _of_losses(state: ProtocolState) -> tuple[Claim, ...]:
    """What a copy that was given up may still write."""
    c, d, s = state.c, state.d, state.s
    stray_slot, stray_device = state.stray_slot[s].differs(FALSE), state.stray_device[d].differs(FALSE)
    return (
        Claim(
            "a slot with a stray writer is retired",
            "A slot that a lost copy may write is retired.",
            for_all(implies(stray_slot, InState(state.block[s], (BlockState.RETIRED,)))),
        ),
        Claim(
            "nobody reads what a stray copy writes",
            "No copy touches a slot that a lost copy may write.",
            for_all(implies(stray_slot & state.is_copy(c), state.copy_slot[c].differs(s))),
        ),
        Claim(
            "a device block with a stray writer is retired",
            "A device block that a lost copy may write is retired.",
            for_all(implies(stray_device, InState(state.lease[d], (LeaseState.RETIRED,)))),
        ),
        Claim(
            "a retired device block is free",
            "No request holds a retired device block.",
            for_all(implies(InState(state.lease[d], (LeaseState.RETIRED,)), state.is_free(d))),
        ),
    )


def _of_the_log(state: ProtocolState) -> tuple[Claim, ...]:
    """What the written part of the log promises after a crash."""
    t, c, s, s2, w = state.t, state.c, state.s, state.s2, state.w
    promised = state.logged[s].differs(state.a_key.none)
    return (
        Claim(
            "the log names a key once",
            "The written log promises a key in at most one slot.",
            for_all(implies(promised & state.logged[s].equals(state.logged[s2]), s.equals(s2))),
        ),
        Claim(
            "a slot keeps what the log promises",
            "A slot holds the bytes of the key that the written log promises there.",
            for_all(implies(promised, state.slot_content[s, w].equals(state.logged[s]))),
        ),
        Claim(
            "the log promises nothing old",
            "What the written log promises does not date from before the last reset.",
            for_all(implies(promised, state.logged_old[s].equals(FALSE))),
        ),
        Claim(
            "the log is ahead of every write",
            "Where a store under way or a stray copy may write, the written log promises nothing.",
            all_of(
                for_all(
                    implies(
                        all_of(
                            state.of(c, t),
                            state.stores(t),
                            state.is_under_way(t),
                            state.copy_slot[c].equals(s),
                        ),
                        ~promised,
                    )
                ),
                for_all(implies(state.stray_slot[s].differs(FALSE), ~promised)),
            ),
        ),
    )
