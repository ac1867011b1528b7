"""Cells that nothing can read any more: reset after each action, so that states do not differ by them."""

from __future__ import annotations

from kvsm.check.protocol.offload_state import INDEXED, INSTANT, KERNEL, UNUSED, ProtocolState
from kvsm.check.protocol.scope import ProtocolScope
from kvsm.check.protocol.terms import Exists, Forget, InState, Term, all_of, any_of, is_legal
from kvsm.states import BlockState


def forgets(state: ProtocolState, scope: ProtocolScope) -> tuple[Forget, ...]:
    """Return all forgets, in the order in which they are applied."""
    return (*_of_transfers(state), *_of_device_blocks(state), *_of_slots(state, scope))


def _of_transfers(state: ProtocolState) -> tuple[Forget, ...]:
    t, c, w = state.t, state.c, state.w
    dead, no_copy = ~state.is_live(t), ~state.is_copy(c)
    ended = "The transfer has ended, and nothing asks about it."
    return (
        Forget((t,), state.transfer[t], dead & is_legal(state.transfer[t]), ended),
        Forget((t, w), state.report[t, w], dead, ended),
        Forget((c,), state.copy_device[c], no_copy, ended),
        Forget((c,), state.copy_slot[c], no_copy, ended),
        Forget((c, w), state.instant[c, w], no_copy, ended),
        Forget(
            (c, w),
            state.in_flight[c, w],
            ~state.at("READ"),
            "Bytes that were written are no longer in flight.",
        ),
    )


def _of_device_blocks(state: ProtocolState) -> tuple[Forget, ...]:
    t, c, d, w = state.t, state.c, state.d, state.w
    kernel, on_device = state.kernel[d, w], state.copy_device[c].equals(d)
    of_store = Exists(t, state.of(c, t) & state.stores(t))
    of_load = Exists(t, state.of(c, t) & state.loads(t))
    unread = any_of(
        kernel.equals(KERNEL["WRITES"]),
        state.is_free(d) & ~Exists(c, all_of(of_store, on_device, _is_to_read(state))),
        Exists(c, all_of(of_load, on_device, state.instant[c, w].differs(INSTANT["WRITTEN"]))),
    )
    return (
        Forget((d,), state.kernel_key[d], state.idle_compute(d), "No kernel is queued that could read it."),
        Forget(
            (d, w),
            state.content[d, w],
            kernel.differs(KERNEL["READS"]) & unread,
            "No kernel and no copy reads these bytes before they are overwritten.",
        ),
    )


def _is_to_read(state: ProtocolState) -> Term:
    """The worker's share of c has not read yet."""
    return state.at("QUEUED") | state.at("STARTED")


def _of_slots(state: ProtocolState, scope: ProtocolScope) -> tuple[Forget, ...]:
    t, c, s, w = state.t, state.c, state.s, state.w
    of_load = Exists(t, state.of(c, t) & state.loads(t))
    reading = Exists(c, all_of(of_load, state.copy_slot[c].equals(s), _is_to_read(state)))
    unindexed = ~InState(state.block[s], INDEXED)
    unread, log = unindexed & ~reading, tuple[Forget, ...]()
    if scope.crashes:
        unpromised = state.logged[s].equals(state.a_key.none)
        unread = unread & unpromised
        log = (Forget((s,), state.logged_old[s], unpromised, "The log promises nothing of the slot."),)
    return (
        Forget(
            (s,),
            state.block[s],
            InState(state.block[s], UNUSED),
            "A slot that was used and a slot that never was differ only in the name of their state.",
        ),
        Forget((s,), state.slot_key[s], unindexed, "The index does not name the slot."),
        Forget(
            (s, w),
            state.slot_content[s, w],
            unread,
            "No match finds the slot and no copy reads it: its bytes are overwritten before they are read.",
        ),
        Forget(
            (s,),
            state.old[s],
            InState(state.block[s], (*UNUSED, BlockState.RETIRED)),
            "The slot holds no block that could date from an epoch.",
        ),
        *log,
    )
