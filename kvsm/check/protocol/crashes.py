"""A crash, after which only the written log and the bytes in the slots are left."""

from __future__ import annotations

from kvsm.check.protocol.offload_state import DIRECTION, KERNEL, ProtocolState
from kvsm.check.protocol.terms import FALSE, TRUE, Action, Assign, Each, If, word_in
from kvsm.states import BlockState, LeaseState


def crash_actions(state: ProtocolState) -> list[Action]:
    """The log is written now and then. What is in it, and the slots' bytes, outlive a crash."""
    t, c, d, s, w, m = state.t, state.c, state.d, state.s, state.w, state.m
    none, block, logged = state.a_key.none, state.block[s], state.logged[s]
    survives = logged.differs(none)
    kept, free = (word_in(state.block, one) for one in (BlockState.STORED, BlockState.FREE))
    gone = [Each(w, (Assign(state.kernel[d, w], KERNEL["NONE"]), Assign(state.content[d, w], none)))]
    return [
        Action(
            "write_log",
            "All events until now are written to the log.",
            (),
            TRUE,
            (
                Each(
                    s,
                    (
                        Assign(logged, If(state.is_readable(s), state.slot_key[s], none)),
                        Assign(state.logged_old[s], state.old[s]),
                    ),
                ),
            ),
        ),
        Action(
            "crash",
            "The ledger's memory, the device and all workers are gone. The written log and the slots are"
            " left, and the ledger begins again with what the log can still promise.",
            (),
            TRUE,
            (
                Each(
                    s,
                    (
                        Assign(block, If(survives, kept, free)),
                        Assign(state.slot_key[s], logged),
                        Assign(state.old[s], If(survives, state.logged_old[s], FALSE)),
                        Assign(state.stray_slot[s], FALSE),
                    ),
                ),
                Each(
                    d,
                    (
                        Assign(state.key[d], none),
                        Assign(state.kernel_key[d], none),
                        Assign(state.lease[d], word_in(state.lease, LeaseState.NONE)),
                        Assign(state.stray_device[d], FALSE),
                        *gone,
                    ),
                ),
                Each(m, (Assign(state.match_slot[m], state.a_slot.none),)),
                Each(t, (Assign(state.direction[t], DIRECTION["NONE"]),)),
                Each(c, (Assign(state.copy_transfer[c], state.a_transfer.none),)),
            ),
        ),
    ]
