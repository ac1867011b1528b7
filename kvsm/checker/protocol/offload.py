"""The offload protocol: device blocks, slots, and the copies between them on several workers.

It declares what may happen in which order, apart from any code. The engine queues kernels. The core plans
copies and hears of their ends. The workers make the copies. Kernels and copies run some time after they were
queued. A copy reads, writes and is reported at three instants. Each worker goes at its own pace.

The life of a block, from top to bottom:

1. `compute`, `run`       the engine queues kernels that write a device block; each worker runs its own
2. `plan_store`, `submit` the device block is leased and a slot allocated; the copy leaves for the workers
3. `start` ... `write_slot`   on each worker, after the kernels that write the device block
4. `end_good`             the last worker's report: the slot can be read
5. `match`, `plan_load`   a request counts on the slot; a device block is taken for it
6. `start` ... `write_device` on each worker, after the kernels of the device block's former owner
7. `end_good`             the last report: the engine may compute with the device block (`attend`)

A device block has at most one transfer, so the transfer is among the device block's variables. The tables in
`kvsm.states` say what a slot's block, a transfer and a lease do on a trigger.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum

from kvsm.checker.protocol.claims import always, rank, rest, sometimes
from kvsm.checker.protocol.scope import ProtocolScope
from kvsm.checker.protocol.state import (
    DIRECTION,
    INDEXED,
    INSTANT,
    KERNEL,
    READABLE,
    UNDER_WAY,
    UNUSED,
    ProtocolState,
)
from kvsm.checker.protocol.terms import (
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
    Minus,
    Read,
    Term,
    all_of,
    any_of,
    is_legal,
    number,
)
from kvsm.states import MACHINES, BlockState, BlockTrigger, LeaseTrigger, Machine
from kvsm.states.transfer import TransferState, TransferTrigger


class Variant(Enum):
    """The protocol with one guard or one effect wrong. Real systems had each of these bugs."""

    STORE_BEFORE_COMPUTE = "a store does not wait for the kernel that writes its block"
    LOAD_BEFORE_READER = "a load does not wait for the kernel that still reads its block"
    LOAD_UNHELD = "a load lets go of its slot when it is submitted, not when it is reported"
    RESET_FREES = "a reset frees the slot of a store in flight, and does not quarantine it"


_B, _T, _L = BlockTrigger, TransferTrigger, LeaseTrigger


def offload_protocol(
    scope: ProtocolScope, variant: Variant | None = None, machines: Mapping[str, Machine] = MACHINES
) -> Declaration:
    """The declaration.

    variant: the mistake to make; None for the correct protocol.
    machines: the tables, by name. Tests give broken ones and expect a refutation.
    """
    state = ProtocolState(scope, machines)
    actions = [*_engine_actions(state), *_core_actions(state), *_plan_actions(state)]
    actions += [_submit(state, variant), *_worker_actions(state, variant)]
    actions += _end_actions(state, scope, variant)
    return Declaration(
        name="offload protocol" if variant is None else f"offload protocol in which {variant.value}",
        bounds=str(scope),
        index_sets=(state.device_set, state.slot_set, state.worker_set, state.key_set),
        variables=tuple(state.variables),
        actions=tuple(actions),
        forgets=_forgets(state),
        always=always(state),
        sometimes=sometimes(state, scope),
        rest=rest(state),
        rank=rank(state),
        notes=NOT_MODELLED,
    )


NOT_MODELLED = (
    "Requests: a match holds one slot, and a device block does not say which request holds it.",
    "Transfers of several blocks: each copies one block.",
    "A second kernel for a block before the first one ran: a stream runs them in order.",
    "Names of transfers and workers in reports: the ledger refuses late and doubled reports.",
    "The device's own prefix cache, and data that a load of an older epoch left on the device.",
)


def _takes(word: Read, trigger: IntEnum) -> Assign:
    """The word takes a trigger."""
    return Assign(word, After(trigger, word))


def _engine_actions(state: ProtocolState) -> list[Action]:
    """What the engine does with its device blocks, and the kernels it queued."""
    d, w, k = state.d, state.w, state.k
    held = ~state.is_free(d) & ~state.loads(d)
    can_queue = state.idle_compute(d) & state.room_for_kernels()
    kernel, kernel_key = state.kernel[d, w], state.kernel_key[d]
    return [
        Action(
            "compute",
            "The engine takes a free device block and queues kernels that will write key k into it.",
            (d, k),
            all_of(state.is_free(d), state.unleased(), can_queue),
            (Assign(state.key[d], k), Assign(kernel_key, k), Each(w, (Assign(kernel, KERNEL["WRITES"]),))),
        ),
        Action(
            "attend",
            "The engine queues kernels that read a device block.",
            (d,),
            held & can_queue,
            (Assign(kernel_key, state.key[d]), Each(w, (Assign(kernel, KERNEL["READS"]),))),
        ),
        Action(
            "run",
            "A queued kernel runs on one worker.",
            (d, w),
            kernel.differs(KERNEL["NONE"]),
            (
                Assign(
                    state.content[d, w],
                    If(kernel.equals(KERNEL["WRITES"]), kernel_key, state.content[d, w]),
                ),
                Assign(kernel, KERNEL["NONE"]),
            ),
            drains=True,
        ),
        Action(
            "free",
            "The engine frees a device block. Kernels may still be queued, and a store may still read it.",
            (d,),
            held,
            (Assign(state.key[d], state.a_key.none),),
            drains=True,
        ),
    ]


def _core_actions(state: ProtocolState) -> list[Action]:
    """What the core decides about slots: matches and evictions."""
    s = state.s
    block, matches = state.block[s], state.matches[s]
    return [
        Action(
            "match",
            "A request counts on the block in a slot and pins it.",
            (s,),
            InState(block, READABLE) & state.room_for_match(),
            (_takes(block, _B.PIN), Assign(matches, matches + number(1))),
        ),
        Action(
            "release",
            "A match ends without a load.",
            (s,),
            matches.differs(number(0)),
            (_takes(block, _B.UNPIN), Assign(matches, Minus(matches, number(1)))),
            drains=True,
        ),
        Action(
            "evict",
            "A slot is wanted: an idle block is evicted.",
            (s,),
            is_legal(After(_B.EVICT, block)),
            (_takes(block, _B.EVICT),),
        ),
    ]


def _plan_actions(state: ProtocolState) -> list[Action]:
    """The copies that the core plans."""
    d, s = state.d, state.s
    block, matches = state.block[s], state.matches[s]
    stored = Exists(
        state.s2,
        InState(state.block[state.s2], INDEXED) & state.slot_key[state.s2].equals(state.key[d]),
    )
    return [
        Action(
            "plan_store",
            "A computed device block whose key is not on the host gets a slot and is leased for reading.",
            (d, s),
            all_of(
                ~state.is_free(d),
                state.unleased(),
                ~stored,
                InState(block, UNUSED),
                state.room_for_transfer(),
            ),
            (
                _takes(block, _B.ALLOCATE),
                Assign(state.slot_key[s], state.key[d]),
                Assign(state.old[s], FALSE),
                _takes(state.lease[d], _L.BEGIN_READ),
                Assign(state.direction[d], DIRECTION["STORE"]),
                Assign(state.transfer_slot[d], s),
            ),
        ),
        Action(
            "plan_load",
            "A match becomes a load: its pin becomes a reader, a free device block is leased for writing.",
            (d, s),
            all_of(
                matches.differs(number(0)),
                state.is_free(d),
                state.unleased(),
                state.room_for_transfer(),
            ),
            (
                _takes(block, _B.BEGIN_LOAD),
                Assign(matches, Minus(matches, number(1))),
                Assign(state.key[d], state.slot_key[s]),
                _takes(state.lease[d], _L.BEGIN_WRITE),
                Assign(state.direction[d], DIRECTION["LOAD"]),
                Assign(state.transfer_slot[d], s),
            ),
        ),
    ]


def _submit(state: ProtocolState, variant: Variant | None) -> Action:
    d, s = state.d, state.s
    loading: Term = state.block[s]
    if variant is Variant.LOAD_UNHELD:
        loading = After(_B.END_COPY_GOOD, loading)
    return Action(
        "submit",
        "A planned transfer leaves for the workers, who queue its copies.",
        (d, s),
        state.is_planned(d) & state.named(),
        (
            _takes(state.transfer[d], _T.SUBMIT),
            Assign(state.block[s], If(state.stores(d), After(_B.SUBMIT_STORE, state.block[s]), loading)),
        ),
        drains=True,
    )


def _worker_actions(state: ProtocolState, variant: Variant | None) -> list[Action]:
    """What a worker's copy does. The copies of an abandoned transfer go on like any others."""
    d, s, w = state.d, state.s, state.w
    kernel, instant, in_flight = state.kernel[d, w], state.instant[d, w], state.in_flight[d, w]
    store_may_start, load_may_start = kernel.differs(KERNEL["WRITES"]), kernel.equals(KERNEL["NONE"])
    if variant is Variant.STORE_BEFORE_COMPUTE:
        store_may_start = TRUE
    if variant is Variant.LOAD_BEFORE_READER:
        load_may_start = TRUE
    reads, writes = Assign(instant, INSTANT["READ"]), Assign(instant, INSTANT["WRITTEN"])
    return [
        Action(
            "start",
            "A copy starts: a store after the kernels that write its device block, a load after all"
            " kernels that use it.",
            (d, w),
            all_of(
                state.is_under_way(d),
                state.at("QUEUED"),
                If(state.stores(d), store_may_start, load_may_start),
            ),
            (Assign(instant, INSTANT["STARTED"]),),
            drains=True,
        ),
        Action(
            "read_device",
            "A store's copy reads the device block.",
            (d, w),
            state.stores(d) & state.at("STARTED"),
            (Assign(in_flight, state.content[d, w]), reads),
            drains=True,
        ),
        Action(
            "read_slot",
            "A load's copy reads the slot.",
            (d, s, w),
            all_of(state.loads(d), state.named(), state.at("STARTED")),
            (Assign(in_flight, state.slot_content[s, w]), reads),
            drains=True,
        ),
        Action(
            "write_slot",
            "A store's copy writes the slot.",
            (d, s, w),
            all_of(state.stores(d), state.named(), state.at("READ")),
            (Assign(state.slot_content[s, w], in_flight), writes),
            drains=True,
        ),
        Action(
            "write_device",
            "A load's copy writes the device block.",
            (d, w),
            state.loads(d) & state.at("READ"),
            (Assign(state.content[d, w], in_flight), writes),
            drains=True,
        ),
    ]


def _end_actions(state: ProtocolState, scope: ProtocolScope, variant: Variant | None) -> list[Action]:
    """Reports and what follows from them; the other ends of a transfer."""
    actions = [*_reports(state, variant, _T.REPORT_GOOD, "good", state.at("WRITTEN"))]
    if scope.failures:
        broken = state.at("STARTED") | state.at("WRITTEN")
        actions += _reports(state, variant, _T.REPORT_BAD, "bad", broken)
    actions.append(_cancel(state))
    if scope.resets:
        actions.append(_reset(state, variant))
    if scope.losses:
        actions += _losses(state)
    return actions


def _over(state: ProtocolState, bad_load: Term) -> tuple[Assign, ...]:
    """The transfer of d ends: the lease is returned.

    bad_load: whether a load brought no data. Then the device block is free again.
    """
    d = state.d
    lease = state.lease[d]
    return (
        Assign(lease, If(state.stores(d), After(_L.END_READ, lease), After(_L.END_WRITE, lease))),
        Assign(state.key[d], If(bad_load, state.a_key.none, state.key[d])),
        Assign(state.direction[d], DIRECTION["NONE"]),
    )


def _reports(
    state: ProtocolState, variant: Variant | None, trigger: TransferTrigger, name: str, when: Term
) -> list[Action]:
    d, s, w = state.d, state.s, state.w
    after = After(trigger, state.transfer[d])
    reported = (Assign(state.instant[d, w], INSTANT["REPORTED"]), Assign(state.transfer[d], after))
    completed, failed = InState(after, (TransferState.COMPLETED,)), InState(after, (TransferState.FAILED,))
    block = state.block[s]
    ended: Term = If(completed, After(_B.END_COPY_GOOD, block), After(_B.END_COPY_BAD, block))
    if variant is Variant.LOAD_UNHELD:
        ended = If(state.loads(d), block, ended)
    if variant is Variant.RESET_FREES:
        ended = If(state.stores(d) & InState(after, (TransferState.DRAINED,)), block, ended)
    bad_load = state.loads(d) & failed
    under_way = state.is_under_way(d) & when
    return [
        Action(
            f"report_{name}",
            f"A worker reports its copy as {name}; other reports are still to come.",
            (d, w),
            under_way & InState(after, UNDER_WAY),
            reported,
            drains=True,
        ),
        Action(
            f"end_{name}",
            f"The last worker reports its copy as {name}, and the transfer ends. A store's slot can be read"
            " if all copies were good. A failed load's key leaves the index at once.",
            (d, s, w),
            all_of(under_way, state.named(), ~InState(after, UNDER_WAY)),
            (
                *reported,
                Assign(block, If(bad_load, After(_B.INVALIDATE, ended), ended)),
                Assign(state.matches[s], If(bad_load, number(0), state.matches[s])),
                *_over(state, state.loads(d) & ~completed),
            ),
            drains=True,
        ),
    ]


def _cancel(state: ProtocolState) -> Action:
    d, s = state.d, state.s
    block = state.block[s]
    return Action(
        "cancel",
        "A plan is taken back before it left, so no byte was touched.",
        (d, s),
        state.is_planned(d) & state.named(),
        (
            _takes(state.transfer[d], _T.CANCEL),
            Assign(block, If(state.stores(d), After(_B.CANCEL, block), After(_B.END_COPY_BAD, block))),
            *_over(state, state.loads(d)),
        ),
        drains=True,
    )


def _reset(state: ProtocolState, variant: Variant | None) -> Action:
    d, s = state.d, state.s
    block, transfer = state.block[s], state.transfer[d]
    voided: Term = After(_B.INVALIDATE, block)
    if variant is Variant.RESET_FREES:
        voided = If(InState(block, (BlockState.STORING,)), After(_B.END_COPY_BAD, block), voided)
    return Action(
        "reset",
        "All blocks are voided, and transfers under way are abandoned. Plans were cancelled before.",
        (),
        ForAll(d, ~state.is_planned(d)),
        (
            Each(d, (Assign(transfer, If(state.is_live(d), After(_T.ABANDON, transfer), transfer)),)),
            Each(s, (Assign(block, voided), Assign(state.matches[s], number(0)), Assign(state.old[s], TRUE))),
        ),
    )


def _losses(state: ProtocolState) -> list[Action]:
    d, s, w = state.d, state.s, state.w
    lease, store = state.lease[d], state.stores(d)
    return [
        Action(
            "lose",
            "A worker will never report: the transfer is given up, and memory that it may still write"
            " is retired.",
            (d, s),
            state.is_under_way(d) & state.named(),
            (
                _takes(state.transfer[d], _T.LOSE),
                _takes(state.block[s], _B.LOSE),
                Assign(state.matches[s], number(0)),
                Assign(lease, If(store, After(_L.END_READ, lease), After(_L.LOSE, lease))),
                Assign(state.key[d], If(store, state.key[d], state.a_key.none)),
                Assign(state.stray_slot[s], If(store, TRUE, state.stray_slot[s])),
                Assign(state.stray_device[d], If(store, state.stray_device[d], TRUE)),
                Assign(state.direction[d], DIRECTION["NONE"]),
            ),
        ),
        Action(
            "stray_slot_write",
            "A copy that was given up still writes its slot.",
            (s, w),
            state.stray_slot[s].equals(TRUE),
            (Assign(state.slot_content[s, w], state.a_key.none),),
        ),
        Action(
            "stray_device_write",
            "A copy that was given up still writes its device block, after the kernels before it.",
            (d, w),
            state.stray_device[d].equals(TRUE) & state.kernel[d, w].equals(KERNEL["NONE"]),
            (Assign(state.content[d, w], state.a_key.none),),
        ),
    ]


def _forgets(state: ProtocolState) -> tuple[Forget, ...]:
    d, s, w = state.d, state.s, state.w
    no_transfer = ~state.is_live(d)
    ended = "The transfer has ended, and nothing asks about it."
    kernel = state.kernel[d, w]
    yet_to_read = state.at("QUEUED") | state.at("STARTED")
    unread_device = any_of(
        kernel.equals(KERNEL["WRITES"]),
        state.is_free(d) & ~(state.stores(d) & yet_to_read),
        state.loads(d) & (yet_to_read | state.at("READ")),
    )
    reading = Exists(d, all_of(state.loads(d), state.named(), yet_to_read))
    unindexed = ~InState(state.block[s], INDEXED)
    return (
        Forget((d,), state.transfer_slot[d], no_transfer, ended),
        Forget((d,), state.transfer[d], no_transfer & is_legal(state.transfer[d]), ended),
        Forget((d, w), state.instant[d, w], no_transfer, ended),
        Forget(
            (d, w),
            state.in_flight[d, w],
            ~state.at("READ"),
            "Bytes that were written are no longer in flight.",
        ),
        Forget((d,), state.kernel_key[d], state.idle_compute(d), "No kernel is queued that could read it."),
        Forget(
            (d, w),
            state.content[d, w],
            kernel.differs(KERNEL["READS"]) & unread_device,
            "No kernel and no copy reads these bytes before they are overwritten.",
        ),
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
            unindexed & ~reading,
            "No match finds the slot and no copy reads it: its bytes are overwritten before they are read.",
        ),
        Forget(
            (s,),
            state.old[s],
            InState(state.block[s], (*UNUSED, BlockState.RETIRED)),
            "The slot holds no block that could date from an epoch.",
        ),
    )
