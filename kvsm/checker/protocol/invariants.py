"""Auxiliary invariants: what else holds in every state, so that the claims can be proved by induction."""

from __future__ import annotations

from kvsm.checker.protocol.state import (
    DIRECTION,
    INDEXED,
    INSTANT,
    KERNEL,
    REPORT,
    VOIDED,
    ProtocolState,
)
from kvsm.checker.protocol.terms import (
    FALSE,
    TRUE,
    Claim,
    Equal,
    Exists,
    ForAll,
    If,
    InState,
    Param,
    Term,
    all_of,
    any_of,
)
from kvsm.states import BlockState, LeaseState
from kvsm.states.transfer import LIVE, TransferState


def _all(params: tuple[Param, ...], body: Term) -> Term:
    for param in reversed(params):
        body = ForAll(param, body)
    return body


def invariants(state: ProtocolState) -> tuple[Claim, ...]:
    t, c, c2, d, s, w, m = state.t, state.c, state.c2, state.d, state.s, state.w, state.m
    t2 = Param("t2", state.transfer_set)
    w2 = Param("w2", state.worker_set)
    of, store, load = state.of(c, t), state.stores(t), state.loads(t)
    on_slot, on_device = state.copy_slot[c].equals(s), state.copy_device[c].equals(d)
    block, slot_key = state.block[s], state.slot_key[s]
    planned = state.is_planned(t)
    kernel = state.kernel[d, w]
    reported = state.report[t, w].differs(REPORT["NONE"])
    abandoned = InState(state.transfer[t], (TransferState.ABANDONED,))
    submitted = InState(state.transfer[t], (TransferState.SUBMITTED,))
    none_key = state.a_key.none

    def claim(name: str, says: str, term: Term) -> Claim:
        return Claim(name, says, term)

    return (
        claim("copies belong to live transfers", "The transfer of a copy is live.", _all((t, c), ~of | state.is_live(t))),
        claim(
            "a copy has two ends",
            "A copy is between a device block and a slot.",
            _all(
                (c,),
                ~state.is_copy(c)
                | all_of(
                    state.copy_device[c].differs(state.a_device.none),
                    state.copy_slot[c].differs(state.a_slot.none),
                ),
            ),
        ),
        claim(
            "a live transfer is on its way",
            "A live transfer is planned, submitted or abandoned.",
            _all((t,), ~state.is_live(t) | InState(state.transfer[t], tuple(sorted(LIVE)))),
        ),
        claim(
            "a store has its slots alone",
            "No other copy touches the slot of a store.",
            _all(
                (t, c, c2),
                ~all_of(of, store, state.is_copy(c2), state.copy_slot[c2].equals(state.copy_slot[c]))
                | c.equals(c2),
            ),
        ),
        claim(
            "a load has its device blocks alone",
            "No other copy touches the device block of a load.",
            _all(
                (t, c, c2),
                ~all_of(of, load, state.is_copy(c2), state.copy_device[c2].equals(state.copy_device[c]))
                | c.equals(c2),
            ),
        ),
        claim(
            "a transfer touches a slot once",
            "Two copies of one transfer have different slots and different device blocks.",
            _all(
                (t, c, c2),
                ~all_of(
                    of,
                    state.of(c2, t),
                    any_of(
                        state.copy_slot[c2].equals(state.copy_slot[c]),
                        state.copy_device[c2].equals(state.copy_device[c]),
                    ),
                )
                | c.equals(c2),
            ),
        ),
        claim(
            "of a plan nothing has run",
            "No worker has begun a copy of a planned transfer, or reported it.",
            _all((t, w), ~planned | (~reported & ForAll(c, ~of | state.at("QUEUED")))),
        ),
        claim(
            "what was reported good is written",
            "A worker that has reported a transfer as good has written all its copies.",
            _all((t, c, w), ~(of & state.report[t, w].equals(REPORT["GOOD"])) | state.at("WRITTEN")),
        ),
        claim(
            "a copy's key exists",
            "What a store writes and a load reads has a key, the same on both sides unless it was voided.",
            _all(
                (t, c, s),
                ~all_of(of, on_slot, InState(block, INDEXED)) | slot_key.differs(none_key),
            ),
        ),
        claim(
            "what the index names has a key",
            "A slot in the index has a key.",
            _all((s,), ~InState(block, INDEXED) | slot_key.differs(none_key)),
        ),
        claim(
            "a load's device block is held",
            "A device block that is loaded has the key of its slot, unless a reset voided the slot.",
            _all(
                (t, c, d, s),
                ~all_of(of, load, on_device, on_slot)
                | all_of(
                    state.key[d].differs(none_key),
                    abandoned | InState(block, VOIDED) | state.key[d].equals(slot_key),
                ),
            ),
        ),
        claim(
            "a kernel that writes brings the block's key",
            "The device block under a kernel that writes is free, or has the kernel's key.",
            _all(
                (d, w),
                kernel.differs(KERNEL["WRITES"])
                | (
                    state.kernel_key[d].differs(none_key)
                    & (state.is_free(d) | state.is_loaded(d) | state.key[d].equals(state.kernel_key[d]))
                ),
            ),
        ),
        claim(
            "a kernel that reads knows its key",
            "A queued kernel has a key.",
            _all((d, w), kernel.equals(KERNEL["NONE"]) | state.kernel_key[d].differs(none_key)),
        ),
        claim(
            "the source of a store is safe",
            "Until a store has read, its device block holds the slot's key, once no kernel still writes it.",
            _all(
                (t, c, d, s, w),
                ~all_of(
                    of,
                    store,
                    on_device,
                    on_slot,
                    state.at("QUEUED") | state.at("STARTED"),
                    ~abandoned,
                )
                | If(
                    kernel.equals(KERNEL["WRITES"]),
                    state.kernel_key[d].equals(slot_key) & state.at("QUEUED"),
                    state.content[d, w].equals(slot_key),
                ),
            ),
        ),
        claim(
            "what a store carries is its key",
            "The bytes in flight of a store are the slot's key.",
            _all(
                (t, c, s, w),
                ~all_of(of, store, on_slot, state.at("READ"), ~abandoned)
                | state.in_flight[c, w].equals(slot_key),
            ),
        ),
        claim(
            "what a store has written is its key",
            "Where a store has written, the slot holds its key.",
            _all(
                (t, c, s, w),
                ~all_of(of, store, on_slot, state.at("WRITTEN"), ~abandoned)
                | state.slot_content[s, w].equals(slot_key),
            ),
        ),
        claim(
            "what a load carries is its key",
            "The bytes in flight of a load are the device block's key.",
            _all(
                (t, c, d, w),
                ~all_of(of, load, on_device, state.at("READ"), ~abandoned)
                | state.in_flight[c, w].equals(state.key[d]),
            ),
        ),
        claim(
            "what a load has written is its key",
            "Where a load has written, the device block holds its key.",
            _all(
                (t, c, d, w),
                ~all_of(of, load, on_device, state.at("WRITTEN"), ~abandoned)
                | state.content[d, w].equals(state.key[d]),
            ),
        ),
        claim(
            "the source of a load is safe",
            "Until a load has read, its slot holds the device block's key, unless another transfer's failure or loss voided it.",
            _all(
                (t, c, d, s, w),
                ~all_of(of, load, on_device, on_slot, state.at("QUEUED") | state.at("STARTED"), ~abandoned)
                | state.slot_content[s, w].equals(state.key[d]),
            ),
        ),
        claim(
            "a load waits for the kernels before it",
            "While a kernel is queued for its device block, a load has not started.",
            _all(
                (t, c, d, w),
                ~all_of(of, load, on_device, kernel.differs(KERNEL["NONE"])) | state.at("QUEUED"),
            ),
        ),
        claim(
            "what a stray copy may write is retired",
            "A slot or device block that a lost copy may write is retired, and has no key.",
            all_of(
                _all((s,), state.stray_slot[s].equals(FALSE) | InState(block, (BlockState.RETIRED,))),
                _all(
                    (d,),
                    state.stray_device[d].equals(FALSE) | InState(state.lease[d], (LeaseState.RETIRED,)),
                ),
            ),
        ),
        claim(
            "a retired block is nobody's",
            "A retired device block has no key.",
            _all((d,), ~InState(state.lease[d], (LeaseState.RETIRED,)) | state.is_free(d)),
        ),
        claim(
            "what is stored is of this epoch",
            "A slot that is being stored is not old.",
            _all(
                (s,),
                ~InState(block, (BlockState.ALLOCATED, BlockState.STORING)) | state.old[s].equals(FALSE),
            ),
        ),
        claim(
            "blocks that are written are under a store",
            "An allocated or storing slot belongs to a store, and a loading one to a load.",
            all_of(
                _all(
                    (s,),
                    ~InState(block, (BlockState.ALLOCATED, BlockState.STORING))
                    | Exists(t, store & state.touches_slot(t, s)),
                ),
            ),
        ),
        claim(
            "leases are held by copies",
            "A device block is read exactly while a store copies it, and written while a load does.",
            all_of(
                _all(
                    (d,),
                    Equal(
                        Exists(c, Exists(t, all_of(of, store, on_device))),
                        InState(state.lease[d], (LeaseState.READING,)),
                    ),
                ),
            ),
        ),
        claim(
            "an unsubmitted store is planned",
            "A live transfer has a direction that says what it does.",
            _all((t,), ~state.is_live(t) | store | load),
        ),
    )
