"""The offload protocol: device blocks, slots, and the copies between them on several workers.

It declares what may happen in which order, apart from any code. The engine queues kernels. The core plans
transfers of several blocks and hears of their ends. The workers make the copies. Kernels and copies run some
time after they were queued. A copy reads and writes at two instants, and a worker reports the whole transfer
at a third. Each worker goes at its own pace.

The life of a block, from top to bottom:

1. `compute`, `run`       the engine queues kernels that write a device block; each worker runs its own
2. `plan_store`, `submit` the device block is leased and a slot allocated; the transfer leaves for the workers
3. `start` ... `write_slot`   on each worker, after the kernels that write the device block
4. `end_good`             the last worker's report: the slot can be read
5. `match`, `plan_load`   a request counts on the slot; a device block is taken for it
6. `start` ... `write_device` on each worker, after the kernels of the device block's former owner
7. `end_good`             the last report: the engine may compute with the device block (`attend`)

A plan gets its blocks one after the other (`store_more`, `load_more`) until it leaves. The tables in
`kvsm.states` say what a slot's block, a transfer and a lease do on a trigger.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum

from kvsm.check.protocol.claims import always, countings, rank, rest, sometimes
from kvsm.check.protocol.crashes import crash_actions
from kvsm.check.protocol.forgets import forgets
from kvsm.check.protocol.inductive_invariants import invariants
from kvsm.check.protocol.offload_state import (
    DIRECTION,
    INDEXED,
    INSTANT,
    KERNEL,
    READABLE,
    REPORT,
    UNDER_WAY,
    UNUSED,
    ProtocolState,
)
from kvsm.check.protocol.scope import ProtocolScope
from kvsm.check.protocol.terms import (
    FALSE,
    TRUE,
    Action,
    After,
    Assign,
    Const,
    Declaration,
    Each,
    Exists,
    ForAll,
    If,
    InState,
    Param,
    Read,
    Term,
    all_of,
    is_legal,
)
from kvsm.states import MACHINES, BlockState, BlockTrigger, LeaseState, LeaseTrigger, Machine
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
    actions = [*_engine_actions(state), *_core_actions(state), *_store_plans(state, scope)]
    actions += [*_load_plans(state, scope), _submit(state, scope, variant), *_worker_actions(state, variant)]
    actions += _end_actions(state, scope, variant)
    if scope.crashes:
        actions += crash_actions(state)
    return Declaration(
        name="offload protocol" if variant is None else f"offload protocol in which {variant.value}",
        bounds=str(scope),
        index_sets=(
            state.device_set,
            state.slot_set,
            state.transfer_set,
            state.copy_set,
            state.match_set,
            state.worker_set,
            state.key_set,
        ),
        variables=tuple(state.variables),
        actions=tuple(actions),
        forgets=forgets(state, scope),
        always=always(state),
        sometimes=sometimes(state, scope),
        rest=rest(state),
        rank=rank(state),
        countings=countings(state),
        invariants=invariants(state, scope),
        about=ABOUT,
        notes=NOT_MODELLED,
    )


ABOUT = (
    "Device blocks hold keys that the engine computed or loaded; slots of the host pool hold copies of them. "
    "A transfer is a store or a load of one or several blocks, with one copy for each. Kernels and copies run"
    " on each worker at its own pace, some time after they were queued. A copy starts, reads and writes, and"
    " then its transfer is reported. Anything may happen in between."
)
NOT_MODELLED = (
    "Requests: a match holds one slot, and a device block does not say which request holds it.",
    "Chunks: a slot holds one device block.",
    "A second kernel for a block before the first one ran: a stream runs them in order.",
    "Names of transfers and workers that do not exist: the ledger refuses reports with such names.",
    "The device's own prefix cache, and data that a load of an older epoch left on the device.",
)


def _takes(word: Read, trigger: IntEnum) -> Assign:
    """The word takes a trigger."""
    return Assign(word, After(trigger, word))


def _where(condition: Term, cell: Read, value: Term) -> Assign:
    """The cell gets this value where the condition holds, and stays as it is elsewhere."""
    return Assign(cell, If(condition, value, cell))


def _engine_actions(state: ProtocolState) -> list[Action]:
    """What the engine does with its device blocks, and the kernels it queued."""
    d, w, k = state.d, state.w, state.k
    held = ~state.is_free(d) & ~state.is_loaded(d)
    can_queue = state.idle_compute(d) & state.room_for_kernels()
    kernel, kernel_key = state.kernel[d, w], state.kernel_key[d]
    return [
        Action(
            "compute",
            "The engine takes a free device block and queues kernels that will write key k into it.",
            (d, k),
            all_of(state.is_free(d), InState(state.lease[d], (LeaseState.NONE,)), can_queue),
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
                _where(kernel.equals(KERNEL["WRITES"]), state.content[d, w], kernel_key),
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
    s, m = state.s, state.m
    block, held = state.block[s], state.match_slot[m]
    return [
        Action(
            "match",
            "A request counts on the block in a slot and pins it.",
            (s, m),
            all_of(held.equals(state.a_slot.none), InState(block, READABLE)),
            (_takes(block, _B.PIN), Assign(held, s)),
        ),
        Action(
            "release",
            "A match ends without a load.",
            (s, m),
            held.equals(s),
            (_takes(block, _B.UNPIN), Assign(held, state.a_slot.none)),
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


def _opens(state: ProtocolState, direction: Const) -> tuple[Term, Assign]:
    """A transfer begins: (when it can, its direction)."""
    t, w = state.t, state.w
    unreported = ForAll(w, state.report[t, w].equals(REPORT["NONE"]))
    new = InState(state.transfer[t], (TransferState.PLANNED,)) & unreported
    return ~state.is_live(t) & new, Assign(state.direction[t], direction)


def _is_new_copy(state: ProtocolState) -> Term:
    """There is no copy c, and none of its shares has moved."""
    return ~state.is_copy(state.c) & ForAll(state.w, state.at("QUEUED"))


def _copies(state: ProtocolState) -> tuple[Assign, ...]:
    """The copy c of transfer t, between d and s."""
    t, c = state.t, state.c
    return (
        Assign(state.copy_transfer[c], t),
        Assign(state.copy_device[c], state.d),
        Assign(state.copy_slot[c], state.s),
    )


def _store_plans(state: ProtocolState, scope: ProtocolScope) -> list[Action]:
    """A store is planned, block by block."""
    t, c, d, s = state.t, state.c, state.d, state.s
    block, lease = state.block[s], state.lease[d]
    indexed = InState(state.block[state.s2], INDEXED)
    stored = Exists(state.s2, indexed & state.slot_key[state.s2].equals(state.key[d]))
    can = all_of(
        _is_new_copy(state),
        ~state.is_free(d),
        is_legal(After(_L.BEGIN_READ, lease)),
        ~stored,
        InState(block, UNUSED),
    )
    effects = (
        _takes(block, _B.ALLOCATE),
        Assign(state.slot_key[s], state.key[d]),
        Assign(state.old[s], FALSE),
        _takes(lease, _L.BEGIN_READ),
        *_copies(state),
    )
    may_open, opened = _opens(state, DIRECTION["STORE"])
    actions = [
        Action(
            "plan_store",
            "A store is planned. A computed device block whose key is not on the host gets a slot and is"
            " leased for reading.",
            (t, c, d, s),
            may_open & can,
            (*effects, opened),
        )
    ]
    if scope.several:
        more = state.is_planned(t) & state.stores(t) & can
        says = "A planned store gets one more block."
        actions.append(Action("store_more", says, (t, c, d, s), more, effects))
    return actions


def _load_plans(state: ProtocolState, scope: ProtocolScope) -> list[Action]:
    """A load is planned, block by block."""
    t, c, d, s, m = state.t, state.c, state.d, state.s, state.m
    block, lease, held = state.block[s], state.lease[d], state.match_slot[m]
    can = all_of(
        _is_new_copy(state),
        held.equals(s),
        state.is_free(d),
        is_legal(After(_L.BEGIN_WRITE, lease)),
    )
    effects = (
        _takes(block, _B.BEGIN_LOAD),
        Assign(state.key[d], state.slot_key[s]),
        _takes(lease, _L.BEGIN_WRITE),
        Assign(held, state.a_slot.none),
        *_copies(state),
    )
    may_open, opened = _opens(state, DIRECTION["LOAD"])
    says = (
        "A load is planned. A match becomes a reader of its slot, and a free device block is leased for"
        " writing."
    )
    actions = [Action("plan_load", says, (t, c, d, s, m), may_open & can, (*effects, opened))]
    if scope.several:
        more = all_of(state.is_planned(t), state.loads(t), ~state.touches_slot(t, s, state.c2), can)
        says = "A planned load gets one more block."
        actions.append(Action("load_more", says, (t, c, d, s, m), more, effects))
    return actions


def _submit(state: ProtocolState, scope: ProtocolScope, variant: Variant | None) -> Action:
    t, s = state.t, state.s
    block, store = state.block[s], state.stores(t)
    touched: Term = store
    leaving: Term = After(_B.SUBMIT_STORE, block)
    if variant is Variant.LOAD_UNHELD:
        touched, leaving = TRUE, If(store, leaving, After(_B.END_COPY_GOOD, block))
    may_leave = state.is_planned(t)
    if scope.crashes:
        # The plan is in the log before a copy can touch its slots: the log promises their old blocks no more.
        promised = state.logged[s].differs(state.a_key.none) & state.touches_slot(t, s)
        may_leave = may_leave & ~(store & Exists(s, promised))
    return Action(
        "submit",
        "A planned transfer leaves for the workers, who queue its copies.",
        (t,),
        may_leave,
        (
            Each(s, (_where(touched & state.touches_slot(t, s), block, leaving),)),
            _takes(state.transfer[t], _T.SUBMIT),
        ),
        drains=True,
    )


def _worker_actions(state: ProtocolState, variant: Variant | None) -> list[Action]:
    """What a worker's share of a copy does. Copies of an abandoned transfer go on like any others."""
    t, c, d, s, w = state.t, state.c, state.d, state.s, state.w
    kernel, instant, in_flight = state.kernel[d, w], state.instant[c, w], state.in_flight[c, w]
    store_may_start, load_may_start = kernel.differs(KERNEL["WRITES"]), kernel.equals(KERNEL["NONE"])
    if variant is Variant.STORE_BEFORE_COMPUTE:
        store_may_start = TRUE
    if variant is Variant.LOAD_BEFORE_READER:
        load_may_start = TRUE
    going_on = state.of(c, t) & state.is_under_way(t) & state.report[t, w].equals(REPORT["NONE"])
    device, slot = state.copy_device[c].equals(d), state.copy_slot[c].equals(s)
    reads, writes = Assign(instant, INSTANT["READ"]), Assign(instant, INSTANT["WRITTEN"])
    return [
        Action(
            "start",
            "A copy starts: a store after the kernels that write its device block, a load after all"
            " kernels that use it.",
            (t, c, d, w),
            all_of(
                going_on, device, state.at("QUEUED"), If(state.stores(t), store_may_start, load_may_start)
            ),
            (Assign(instant, INSTANT["STARTED"]),),
            drains=True,
        ),
        Action(
            "read_device",
            "A store's copy reads the device block.",
            (t, c, d, w),
            all_of(going_on, device, state.stores(t), state.at("STARTED")),
            (Assign(in_flight, state.content[d, w]), reads),
            drains=True,
        ),
        Action(
            "read_slot",
            "A load's copy reads the slot.",
            (t, c, s, w),
            all_of(going_on, slot, state.loads(t), state.at("STARTED")),
            (Assign(in_flight, state.slot_content[s, w]), reads),
            drains=True,
        ),
        Action(
            "write_slot",
            "A store's copy writes the slot.",
            (t, c, s, w),
            all_of(going_on, slot, state.stores(t), state.at("READ")),
            (Assign(state.slot_content[s, w], in_flight), writes),
            drains=True,
        ),
        Action(
            "write_device",
            "A load's copy writes the device block.",
            (t, c, d, w),
            all_of(going_on, device, state.loads(t), state.at("READ")),
            (Assign(state.content[d, w], in_flight), writes),
            drains=True,
        ),
    ]


def _end_actions(state: ProtocolState, scope: ProtocolScope, variant: Variant | None) -> list[Action]:
    """Reports and what follows from them; the other ends of a transfer."""
    t, c = state.t, state.c
    written = ForAll(c, ~state.of(c, t) | state.at("WRITTEN"))
    actions = [*_reports(state, variant, "good", written)]
    if scope.failures:
        actions += _reports(state, variant, "bad", TRUE)
    actions += [_refused_report(state), _cancel(state)]
    if scope.resets:
        actions.append(_reset(state, scope, variant))
    if scope.losses:
        actions += _losses(state)
    return actions


def _over(state: ProtocolState, unloaded: Term) -> tuple[Assign | Each, ...]:
    """The transfer t ends, its copies with it, and leases are returned.

    unloaded: whether a load brought no data. Then its device blocks are free again.
    """
    t, d = state.t, state.d
    lease, touched = state.lease[d], state.touches_device(t, d)
    returned = If(state.stores(t), After(_L.END_READ, lease), After(_L.END_WRITE, lease))
    return (
        Each(
            d, (_where(touched & unloaded, state.key[d], state.a_key.none), _where(touched, lease, returned))
        ),
        *_gone(state),
    )


def _gone(state: ProtocolState) -> tuple[Assign | Each, ...]:
    """The transfer t and its copies are no more."""
    t, c = state.t, state.c
    return (
        Assign(state.direction[t], DIRECTION["NONE"]),
        Each(c, (_where(state.of(c, t), state.copy_transfer[c], state.a_transfer.none),)),
    )


def _reports(state: ProtocolState, variant: Variant | None, name: str, when: Term) -> list[Action]:
    """A worker reports a transfer as good or bad, and touches its memory no more."""
    t, s, m, w = state.t, state.s, state.m, state.w
    trigger = _T.REPORT_GOOD if name == "good" else _T.REPORT_BAD
    after = After(trigger, state.transfer[t])
    reported = (Assign(state.report[t, w], REPORT[name.upper()]), Assign(state.transfer[t], after))
    completed, failed = InState(after, (TransferState.COMPLETED,)), InState(after, (TransferState.FAILED,))
    block, touched = state.block[s], state.touches_slot(t, s)
    ended: Term = If(completed, After(_B.END_COPY_GOOD, block), After(_B.END_COPY_BAD, block))
    if variant is Variant.LOAD_UNHELD:
        ended = If(state.loads(t), block, ended)
    if variant is Variant.RESET_FREES:
        ended = If(state.stores(t) & InState(after, (TransferState.DRAINED,)), block, ended)
    bad_load = state.loads(t) & failed
    under_way = all_of(state.is_under_way(t), state.report[t, w].equals(REPORT["NONE"]), when)
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
            f"The last worker reports its share as {name}, and the transfer ends. A store's slots can be read"
            " if all workers were good. A failed load's keys leave the index at once.",
            (t, w),
            under_way & ~InState(after, UNDER_WAY),
            (
                Each(m, (_where(bad_load & _is_matched(state, t), state.match_slot[m], state.a_slot.none),)),
                Each(s, (_where(touched, block, If(bad_load, After(_B.INVALIDATE, ended), ended)),)),
                *_over(state, state.loads(t) & ~completed),
                *reported,
            ),
            drains=good,
        ),
    ]


def _refused_report(state: ProtocolState) -> Action:
    t, w = state.t, state.w
    waits = state.is_under_way(t) & state.report[t, w].equals(REPORT["NONE"])
    return Action(
        "refuse_report",
        "A report comes late, or twice: the transfer does not wait for this worker. Nothing changes.",
        (t, w),
        ~waits,
        (),
    )


def _is_matched(state: ProtocolState, t: Param) -> Term:
    """The match m holds a slot that t touches."""
    c = state.c
    return Exists(c, state.of(c, t) & state.copy_slot[c].equals(state.match_slot[state.m]))


def _cancel(state: ProtocolState) -> Action:
    t, s = state.t, state.s
    block = state.block[s]
    taken_back = If(state.stores(t), After(_B.CANCEL, block), After(_B.END_COPY_BAD, block))
    return Action(
        "cancel",
        "A plan is taken back before it left, so no byte was touched.",
        (t,),
        state.is_planned(t),
        (
            Each(s, (_where(state.touches_slot(t, s), block, taken_back),)),
            *_over(state, state.loads(t)),
            _takes(state.transfer[t], _T.CANCEL),
        ),
        drains=True,
    )


def _reset(state: ProtocolState, scope: ProtocolScope, variant: Variant | None) -> Action:
    t, s, m = state.t, state.s, state.m
    block, transfer = state.block[s], state.transfer[t]
    voided: Term = After(_B.INVALIDATE, block)
    if variant is Variant.RESET_FREES:
        voided = If(InState(block, (BlockState.STORING,)), After(_B.END_COPY_BAD, block), voided)
    # A reset is answered after it is in the log.
    written: tuple[Assign, ...] = ()
    if scope.crashes:
        written = (Assign(state.logged[s], state.a_key.none), Assign(state.logged_old[s], TRUE))
    return Action(
        "reset",
        "All blocks are voided, and transfers under way are abandoned. Plans were cancelled before.",
        (),
        ForAll(t, ~state.is_planned(t)),
        (
            Each(t, (_where(state.is_live(t), transfer, After(_T.ABANDON, transfer)),)),
            Each(s, (Assign(block, voided), Assign(state.old[s], TRUE), *written)),
            Each(m, (Assign(state.match_slot[m], state.a_slot.none),)),
        ),
    )


def _losses(state: ProtocolState) -> list[Action]:
    t, d, s, m, w = state.t, state.d, state.s, state.m, state.w
    block, lease, store = state.block[s], state.lease[d], state.stores(t)
    on_slot, on_device = state.touches_slot(t, s), state.touches_device(t, d)
    lost_load = ~store & on_device
    return [
        Action(
            "lose",
            "A worker will never report: the transfer is given up, and memory that it may still write"
            " is retired.",
            (t,),
            state.is_under_way(t),
            (
                Each(m, (_where(_is_matched(state, t), state.match_slot[m], state.a_slot.none),)),
                Each(
                    s,
                    (
                        _where(on_slot & store, state.stray_slot[s], TRUE),
                        _where(on_slot, block, After(_B.LOSE, block)),
                    ),
                ),
                Each(
                    d,
                    (
                        _where(lost_load, state.key[d], state.a_key.none),
                        _where(lost_load, state.stray_device[d], TRUE),
                        _where(on_device, lease, If(store, After(_L.END_READ, lease), After(_L.LOSE, lease))),
                    ),
                ),
                _takes(state.transfer[t], _T.LOSE),
                *_gone(state),
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
