"""The offload protocol: device blocks, slots, and the copies between them on several workers.

What is here is what may happen in which order, apart from any code: the engine that queues kernels, the
core that plans copies and hears of their ends, the workers that make them. A kernel and a copy run some
time after they were queued; a copy reads and writes at two instants, and is reported at a third. Each worker
goes at its own pace.

The life of a block, to be read from top to bottom:

1. `compute`, `run`       the engine queues kernels that write a device block; each worker runs its own
2. `plan_store`, `submit` the block is leased, a slot allocated; the copy leaves for the workers
3. `start` ... `write_slot`   on each worker; not before the kernels that write the block
4. `end_good`             the last worker's report: the slot can be read
5. `match`, `plan_load`   a request counts on it; a device block is taken for it
6. `start` ... `write_device` on each worker; not before the kernels of the block's former owner
7. `end_good`             the last report: the engine may compute with it (`attend`)

A device block has one transfer at most, so that its transfer is written down with it. What a slot's block,
a transfer and a lease do on a trigger is in `kvsm.states`, and is not said again here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from kvsm.checker.protocol.claims import always, rank, rest, sometimes
from kvsm.checker.protocol.parts import (
    DIRECTION,
    INDEXED,
    INSTANT,
    KERNEL,
    READABLE,
    UNDER_WAY,
    UNUSED,
    Parts,
    Scope,
)
from kvsm.checker.protocol.terms import (
    FALSE,
    TRUE,
    Action,
    Assign,
    Each,
    Exists,
    ForAll,
    Forget,
    If,
    InState,
    Minus,
    Protocol,
    Step,
    Term,
    all_of,
    any_of,
    is_legal,
    number,
)
from kvsm.states import MACHINES, BlockState, BlockTrigger, LeaseTrigger, Machine
from kvsm.states.transfer import TransferState, TransferTrigger


class Variant(Enum):
    """The protocol with one guard or effect wrong. Each is a bug that real systems had."""

    STORE_BEFORE_COMPUTE = "a store does not wait for the kernel that writes its block"
    LOAD_BEFORE_READER = "a load does not wait for the kernel that still reads its block"
    LOAD_UNHELD = "a load lets go of its slot when it is submitted, not when it is reported"
    RESET_FREES = "a reset frees the slot of a store in flight, and does not quarantine it"


_B, _T, _L = BlockTrigger, TransferTrigger, LeaseTrigger


def protocol(
    scope: Scope, variant: Variant | None = None, machines: Mapping[str, Machine] = MACHINES
) -> Protocol:
    """The declaration. machines: other tables than kvsm's, to see a broken one refuted."""
    parts = Parts(scope, machines)
    actions = [*_engine_actions(parts, scope), *_core_actions(parts, scope), *_plan_actions(parts, scope)]
    actions += [_submit(parts, variant), *_worker_actions(parts, variant)]
    actions += _end_actions(parts, scope, variant)
    return Protocol(
        name="offload protocol" if variant is None else f"offload protocol in which {variant.value}",
        bounds=str(scope),
        index_sets=(parts.device_set, parts.slot_set, parts.worker_set, parts.key_set),
        variables=parts.variables(),
        actions=tuple(actions),
        forgets=_forgets(parts),
        always=always(parts),
        sometimes=sometimes(parts, scope),
        rest=rest(parts),
        rank=rank(parts),
        notes=NOT_MODELLED,
    )


NOT_MODELLED = (
    "Requests: a match is a hold on one slot, and who holds a device block is not told apart.",
    "Transfers of several blocks: each copies one.",
    "A second kernel for a block before the first one ran: a stream runs them in order.",
    "Names of transfers and workers in reports: a late or doubled one is refused by the ledger.",
    "The device's own prefix cache, and what a load of an older epoch left on the device.",
)


def _engine_actions(parts: Parts, scope: Scope) -> list[Action]:
    """What the engine does with its device blocks, and the kernels that it queued."""
    d, w, k = parts.d, parts.w, parts.k
    held = parts.key[d].differs(parts.a_key.none) & ~parts.loads(d)
    can_queue = parts.idle_compute(d) & parts.room_for_kernels(scope)
    kernel, kernel_key = parts.kernel[d, w], parts.kernel_key[d]
    return [
        Action(
            "compute",
            "The engine takes a free device block, and queues kernels that will write key k into it.",
            (d, k),
            all_of(parts.key[d].equals(parts.a_key.none), parts.unleased(), can_queue),
            (Assign(parts.key[d], k), Assign(kernel_key, k), Each(w, (Assign(kernel, KERNEL["WRITES"]),))),
        ),
        Action(
            "attend",
            "The engine queues kernels that read a device block.",
            (d,),
            held & can_queue,
            (Assign(kernel_key, parts.key[d]), Each(w, (Assign(kernel, KERNEL["READS"]),))),
        ),
        Action(
            "run",
            "A queued kernel runs on one worker.",
            (d, w),
            kernel.differs(KERNEL["NONE"]),
            (
                Assign(
                    parts.content[d, w],
                    If(kernel.equals(KERNEL["WRITES"]), kernel_key, parts.content[d, w]),
                ),
                Assign(kernel, KERNEL["NONE"]),
            ),
            drains=True,
        ),
        Action(
            "free",
            "The engine frees a device block; kernels may still be queued, and a store may still read it.",
            (d,),
            held,
            (Assign(parts.key[d], parts.a_key.none),),
            drains=True,
        ),
    ]


def _core_actions(parts: Parts, scope: Scope) -> list[Action]:
    """What the core decides of slots: matches and evictions."""
    s = parts.s
    block, matches = parts.block[s], parts.matches[s]
    return [
        Action(
            "match",
            "A request counts on the block in a slot, and pins it.",
            (s,),
            InState(block, READABLE) & parts.room_for_match(scope),
            (Assign(block, Step(_B.PIN, block)), Assign(matches, matches + number(1))),
        ),
        Action(
            "release",
            "A match ends without a load.",
            (s,),
            matches.differs(number(0)),
            (Assign(block, Step(_B.UNPIN, block)), Assign(matches, Minus(matches, number(1)))),
            drains=True,
        ),
        Action(
            "evict",
            "Room is wanted: an idle block leaves its slot.",
            (s,),
            is_legal(Step(_B.EVICT, block)),
            (Assign(block, Step(_B.EVICT, block)),),
        ),
    ]


def _plan_actions(parts: Parts, scope: Scope) -> list[Action]:
    """What the core decides to copy."""
    d, s = parts.d, parts.s
    block, matches = parts.block[s], parts.matches[s]
    stored = Exists(
        parts.s2,
        InState(parts.block[parts.s2], INDEXED) & parts.slot_key[parts.s2].equals(parts.key[d]),
    )
    return [
        Action(
            "plan_store",
            "A computed device block whose key is not on the host is given a slot, and leased for reading.",
            (d, s),
            all_of(
                parts.key[d].differs(parts.a_key.none),
                parts.unleased(),
                ~stored,
                InState(block, UNUSED),
                parts.room_for_transfer(scope),
            ),
            (
                Assign(block, Step(_B.ALLOCATE, block)),
                Assign(parts.slot_key[s], parts.key[d]),
                Assign(parts.old[s], FALSE),
                Assign(parts.lease[d], Step(_L.BEGIN_READ, parts.lease[d])),
                Assign(parts.direction[d], DIRECTION["STORE"]),
                Assign(parts.transfer_slot[d], s),
            ),
        ),
        Action(
            "plan_load",
            "A match becomes a load: its pin becomes a reader; a free device block is leased for writing.",
            (d, s),
            all_of(
                matches.differs(number(0)),
                parts.key[d].equals(parts.a_key.none),
                parts.unleased(),
                parts.room_for_transfer(scope),
            ),
            (
                Assign(block, Step(_B.BEGIN_LOAD, block)),
                Assign(matches, Minus(matches, number(1))),
                Assign(parts.key[d], parts.slot_key[s]),
                Assign(parts.lease[d], Step(_L.BEGIN_WRITE, parts.lease[d])),
                Assign(parts.direction[d], DIRECTION["LOAD"]),
                Assign(parts.transfer_slot[d], s),
            ),
        ),
    ]


def _submit(parts: Parts, variant: Variant | None) -> Action:
    d, s = parts.d, parts.s
    loading: Term = parts.block[s]
    if variant is Variant.LOAD_UNHELD:
        loading = Step(_B.END_COPY_GOOD, loading)
    return Action(
        "submit",
        "A planned transfer leaves for the workers, who queue its copies.",
        (d, s),
        parts.is_planned(d) & parts.named(),
        (
            Assign(parts.transfer[d], Step(_T.SUBMIT, parts.transfer[d])),
            Assign(parts.block[s], If(parts.stores(d), Step(_B.SUBMIT_STORE, parts.block[s]), loading)),
        ),
        drains=True,
    )


def _worker_actions(parts: Parts, variant: Variant | None) -> list[Action]:
    """What a worker's copy does. The copies of an abandoned transfer go on as any others."""
    d, s, w = parts.d, parts.s, parts.w
    kernel, instant, in_flight = parts.kernel[d, w], parts.instant[d, w], parts.in_flight[d, w]
    store_may_start, load_may_start = kernel.differs(KERNEL["WRITES"]), kernel.equals(KERNEL["NONE"])
    if variant is Variant.STORE_BEFORE_COMPUTE:
        store_may_start = TRUE
    if variant is Variant.LOAD_BEFORE_READER:
        load_may_start = TRUE
    reads, writes = Assign(instant, INSTANT["READ"]), Assign(instant, INSTANT["WRITTEN"])
    return [
        Action(
            "start",
            "A copy starts: a store after the kernels that write its block, a load after all that use it.",
            (d, w),
            all_of(
                parts.is_under_way(d),
                parts.at("QUEUED"),
                If(parts.stores(d), store_may_start, load_may_start),
            ),
            (Assign(instant, INSTANT["STARTED"]),),
            drains=True,
        ),
        Action(
            "read_device",
            "A store's copy reads the device block.",
            (d, w),
            parts.stores(d) & parts.at("STARTED"),
            (Assign(in_flight, parts.content[d, w]), reads),
            drains=True,
        ),
        Action(
            "read_slot",
            "A load's copy reads the slot.",
            (d, s, w),
            all_of(parts.loads(d), parts.named(), parts.at("STARTED")),
            (Assign(in_flight, parts.slot_content[s, w]), reads),
            drains=True,
        ),
        Action(
            "write_slot",
            "A store's copy writes the slot.",
            (d, s, w),
            all_of(parts.stores(d), parts.named(), parts.at("READ")),
            (Assign(parts.slot_content[s, w], in_flight), writes),
            drains=True,
        ),
        Action(
            "write_device",
            "A load's copy writes the device block.",
            (d, w),
            parts.loads(d) & parts.at("READ"),
            (Assign(parts.content[d, w], in_flight), writes),
            drains=True,
        ),
    ]


def _end_actions(parts: Parts, scope: Scope, variant: Variant | None) -> list[Action]:
    """Reports and their consequences, and how else a transfer ends."""
    actions = [*_reports(parts, variant, _T.REPORT_GOOD, "good", parts.at("WRITTEN"))]
    if scope.failures:
        broken = parts.at("STARTED") | parts.at("WRITTEN")
        actions += _reports(parts, variant, _T.REPORT_BAD, "bad", broken)
    actions.append(_cancel(parts))
    if scope.resets:
        actions.append(_reset(parts, variant))
    if scope.losses:
        actions += _losses(parts)
    return actions


def _over(parts: Parts, bad_load: Term) -> tuple[Assign, ...]:
    """The transfer of d is no more: its lease is returned, and what a load did not bring is not held."""
    d = parts.d
    lease = parts.lease[d]
    return (
        Assign(lease, If(parts.stores(d), Step(_L.END_READ, lease), Step(_L.END_WRITE, lease))),
        Assign(parts.key[d], If(bad_load, parts.a_key.none, parts.key[d])),
        Assign(parts.direction[d], DIRECTION["NONE"]),
    )


def _reports(
    parts: Parts, variant: Variant | None, trigger: TransferTrigger, name: str, when: Term
) -> list[Action]:
    d, s, w = parts.d, parts.s, parts.w
    after = Step(trigger, parts.transfer[d])
    reported = (Assign(parts.instant[d, w], INSTANT["REPORTED"]), Assign(parts.transfer[d], after))
    completed, failed = InState(after, (TransferState.COMPLETED,)), InState(after, (TransferState.FAILED,))
    block = parts.block[s]
    ended: Term = If(completed, Step(_B.END_COPY_GOOD, block), Step(_B.END_COPY_BAD, block))
    if variant is Variant.LOAD_UNHELD:
        ended = If(parts.loads(d), block, ended)
    if variant is Variant.RESET_FREES:
        ended = If(parts.stores(d) & InState(after, (TransferState.DRAINED,)), block, ended)
    bad_load = parts.loads(d) & failed
    under_way = parts.is_under_way(d) & when
    return [
        Action(
            f"report_{name}",
            f"A worker reports its copy as {name}; others are still to come.",
            (d, w),
            under_way & InState(after, UNDER_WAY),
            reported,
            drains=True,
        ),
        Action(
            f"end_{name}",
            f"The last worker reports its copy as {name}: the transfer is over. A store's slot can be read if"
            " all were good; a failed load's key is forgotten at once.",
            (d, s, w),
            all_of(under_way, parts.named(), ~InState(after, UNDER_WAY)),
            (
                *reported,
                Assign(block, If(bad_load, Step(_B.INVALIDATE, ended), ended)),
                Assign(parts.matches[s], If(bad_load, number(0), parts.matches[s])),
                *_over(parts, parts.loads(d) & ~completed),
            ),
            drains=True,
        ),
    ]


def _cancel(parts: Parts) -> Action:
    d, s = parts.d, parts.s
    block = parts.block[s]
    return Action(
        "cancel",
        "A plan is taken back before it left: no byte was touched.",
        (d, s),
        parts.is_planned(d) & parts.named(),
        (
            Assign(parts.transfer[d], Step(_T.CANCEL, parts.transfer[d])),
            Assign(block, If(parts.stores(d), Step(_B.CANCEL, block), Step(_B.END_COPY_BAD, block))),
            *_over(parts, parts.loads(d)),
        ),
        drains=True,
    )


def _reset(parts: Parts, variant: Variant | None) -> Action:
    d, s = parts.d, parts.s
    block, transfer = parts.block[s], parts.transfer[d]
    voided: Term = Step(_B.INVALIDATE, block)
    if variant is Variant.RESET_FREES:
        voided = If(InState(block, (BlockState.STORING,)), Step(_B.END_COPY_BAD, block), voided)
    return Action(
        "reset",
        "All blocks are voided, and what is under way is abandoned. Plans were cancelled before.",
        (),
        ForAll(d, ~parts.is_planned(d)),
        (
            Each(d, (Assign(transfer, If(parts.is_live(d), Step(_T.ABANDON, transfer), transfer)),)),
            Each(s, (Assign(block, voided), Assign(parts.matches[s], number(0)), Assign(parts.old[s], TRUE))),
        ),
    )


def _losses(parts: Parts) -> list[Action]:
    d, s, w = parts.d, parts.s, parts.w
    lease, store = parts.lease[d], parts.stores(d)
    return [
        Action(
            "lose",
            "A worker will never report: the transfer is given up, and what it may still write is retired.",
            (d, s),
            parts.is_under_way(d) & parts.named(),
            (
                Assign(parts.transfer[d], Step(_T.LOSE, parts.transfer[d])),
                Assign(parts.block[s], Step(_B.LOSE, parts.block[s])),
                Assign(parts.matches[s], number(0)),
                Assign(lease, If(store, Step(_L.END_READ, lease), Step(_L.LOSE, lease))),
                Assign(parts.key[d], If(store, parts.key[d], parts.a_key.none)),
                Assign(parts.stray_slot[s], If(store, TRUE, parts.stray_slot[s])),
                Assign(parts.stray_device[d], If(store, parts.stray_device[d], TRUE)),
                Assign(parts.direction[d], DIRECTION["NONE"]),
            ),
        ),
        Action(
            "stray_slot_write",
            "A copy that was given up writes its slot after all.",
            (s, w),
            parts.stray_slot[s].equals(TRUE),
            (Assign(parts.slot_content[s, w], parts.a_key.none),),
        ),
        Action(
            "stray_device_write",
            "A copy that was given up writes its device block after all, after the kernels before it.",
            (d, w),
            parts.stray_device[d].equals(TRUE) & parts.kernel[d, w].equals(KERNEL["NONE"]),
            (Assign(parts.content[d, w], parts.a_key.none),),
        ),
    ]


def _forgets(parts: Parts) -> tuple[Forget, ...]:
    d, s, w = parts.d, parts.s, parts.w
    no_transfer = ~parts.is_live(d)
    ended = "A transfer that is over is nobody's to ask about."
    kernel = parts.kernel[d, w]
    yet_to_read = parts.at("QUEUED") | parts.at("STARTED")
    unread_device = any_of(
        kernel.equals(KERNEL["WRITES"]),
        parts.key[d].equals(parts.a_key.none) & ~(parts.stores(d) & yet_to_read),
        parts.loads(d) & (yet_to_read | parts.at("READ")),
    )
    reading = Exists(d, all_of(parts.loads(d), parts.named(), yet_to_read))
    unindexed = ~InState(parts.block[s], INDEXED)
    return (
        Forget((d,), parts.transfer_slot[d], no_transfer, ended),
        Forget((d,), parts.transfer[d], no_transfer & is_legal(parts.transfer[d]), ended),
        Forget((d, w), parts.instant[d, w], no_transfer, ended),
        Forget((d, w), parts.in_flight[d, w], ~parts.at("READ"), "What was written is no more in flight."),
        Forget(
            (d,), parts.kernel_key[d], parts.idle_compute(d), "No kernel is queued that could ask for it."
        ),
        Forget(
            (d, w),
            parts.content[d, w],
            kernel.differs(KERNEL["READS"]) & unread_device,
            "No kernel and no copy reads these bytes before others are written over them.",
        ),
        Forget(
            (s,),
            parts.block[s],
            InState(parts.block[s], UNUSED),
            "A slot that was never used and one that was can both be allocated, and nothing else.",
        ),
        Forget((s,), parts.slot_key[s], unindexed, "The index does not name the slot."),
        Forget(
            (s, w),
            parts.slot_content[s, w],
            unindexed & ~reading,
            "No match finds the slot, and no copy reads it: its bytes are written before they are read.",
        ),
        Forget(
            (s,),
            parts.old[s],
            InState(parts.block[s], (*UNUSED, BlockState.RETIRED)),
            "No block is in the slot that could be of an epoch.",
        ),
    )
