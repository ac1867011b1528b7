"""What must hold in the protocol: its properties, the state at rest, and why winding down reaches it."""

from __future__ import annotations

from kvsm.check.protocol.offload_state import (
    INDEXED,
    KERNEL,
    READABLE,
    REPORT,
    UNUSED,
    VOIDED,
    ProtocolState,
)
from kvsm.check.protocol.scope import ProtocolScope
from kvsm.check.protocol.terms import (
    FALSE,
    TRUE,
    Claim,
    CounterOf,
    Counting,
    Exists,
    ForAll,
    If,
    InState,
    Param,
    Term,
    Total,
    all_of,
    any_of,
    for_all,
    implies,
    is_legal,
    number,
)
from kvsm.properties import Property
from kvsm.states import BlockState, LeaseState
from kvsm.states.transfer import TransferState


def always(state: ProtocolState) -> tuple[Claim, ...]:
    """The properties, in the order of their numbers."""
    claims = (*_claims_of_books(state), *_claims_of_bytes(state))
    return tuple(sorted(claims, key=lambda claim: int(claim.id[1:])))


def _claims_of_books(state: ProtocolState) -> tuple[Claim, ...]:
    """Properties of the core's own books."""
    t, d, s, s2, m, k = state.t, state.d, state.s, state.s2, state.m, state.k
    block, transfer = state.block[s], state.transfer[t]
    named, also_named = (
        InState(state.block[one], INDEXED) & state.slot_key[one].equals(k) for one in (s, s2)
    )
    readable, fits = InState(block, READABLE), fits_transfer(block, transfer, state.stores(t))
    return (
        Claim(
            Property.CONSERVATION,
            "The index names at most one slot for a key.",
            ForAll(k, ForAll(s, ForAll(s2, implies(named & also_named, s.equals(s2))))),
        ),
        Claim(
            Property.NO_REUSE_IN_FLIGHT,
            "The state of a slot fits each live transfer that touches it.",
            ForAll(t, ForAll(s, implies(state.touches_slot(t, s), fits))),
        ),
        Claim(
            Property.ONE_RELEASE_PER_HOLD,
            "The numbers of copies, pins and leases equal the numbers of their holders.",
            _held_by_number(state),
        ),
        Claim(
            Property.STALE_REPORTS,
            "A transfer waits once for each worker that has not reported.",
            all_of(*(one.claim for one in countings(state) if one.cell.variable is state.transfer)),
        ),
        Claim(
            Property.MATCH_HOLDS,
            "A slot that a match holds can be read.",
            ForAll(m, ForAll(s, implies(state.match_slot[m].equals(s), readable))),
        ),
        Claim(
            Property.LEGAL_CALLS,
            "Every step taken is in its machine's table.",
            all_of(
                ForAll(s, is_legal(block)), ForAll(t, is_legal(transfer)), ForAll(d, is_legal(state.lease[d]))
            ),
        ),
        Claim(
            Property.NO_STALE_DATA,
            "No slot that can be read dates from before the last reset.",
            ForAll(s, implies(readable, state.old[s].equals(FALSE))),
        ),
        Claim(
            Property.STORED_SO_SERVED,
            "A slot that the index names can be read, or a live store writes it.",
            indexed_is_served(block, Exists(t, state.stores(t) & state.touches_slot(t, s)), s),
        ),
    )


def _claims_of_bytes(state: ProtocolState) -> tuple[Claim, ...]:
    """Properties of the bytes in memory, on every worker."""
    d, s, w = state.d, state.s, state.w
    readable = InState(state.block[s], READABLE)
    content, kernel = state.content[d, w], state.kernel[d, w]
    in_use = all_of(~state.is_free(d), ~state.is_loaded(d), kernel.differs(KERNEL["WRITES"]))
    return (
        Claim(
            Property.PUBLISH_AFTER_COMMIT,
            "A slot that can be read holds its key's bytes on every worker.",
            ForAll(s, ForAll(w, implies(readable, state.slot_content[s, w].equals(state.slot_key[s])))),
        ),
        Claim(
            Property.COPY_ORDER,
            "A queued kernel finds the bytes that it was queued for.",
            ForAll(
                d, ForAll(w, implies(kernel.equals(KERNEL["READS"]), content.equals(state.kernel_key[d])))
            ),
        ),
        Claim(
            Property.CORRECT_BYTES,
            "A device block that counts as computed or loaded holds its key's bytes on every worker.",
            ForAll(d, ForAll(w, implies(in_use, content.equals(state.key[d])))),
        ),
    )


def indexed_is_served(block: Term, is_stored: Term, s: Param) -> Term:
    """Each indexed slot can be read, unless a store of it is live. is_stored: whether there is such a store.

    An indexed key is not stored again, so a block that no match could ever pin would keep its key from being
    served.
    """
    return ForAll(s, implies(InState(block, INDEXED), InState(block, READABLE) | is_stored))


def fits_transfer(block: Term, transfer: Term, stores: Term) -> Term:
    """A block is in a state that fits a live transfer of it. stores: whether the transfer is a store."""
    in_store = any_of(
        *(
            InState(transfer, (one,)) & InState(block, (other,))
            for one, other in (
                (TransferState.PLANNED, BlockState.ALLOCATED),
                (TransferState.SUBMITTED, BlockState.STORING),
                (TransferState.ABANDONED, BlockState.QUARANTINED),
            )
        )
    )
    abandoned = InState(transfer, (TransferState.ABANDONED,))
    in_load = InState(block, VOIDED) | (~abandoned & InState(block, (BlockState.LOADING,)))
    return If(stores, in_store, in_load)


def countings(state: ProtocolState) -> tuple[Counting, ...]:
    """What the counters of the machines count."""
    t, c, d, s, m, w = state.t, state.c, state.d, state.s, state.m, state.w
    block, transfer, lease, report = state.block[s], state.transfer[t], state.lease[d], state.report[t, w]
    at_work = Exists(t, state.of(c, t) & ~(state.stores(t) & state.is_planned(t)))
    storing = Exists(t, state.of(c, t) & state.stores(t))
    # A retired slot counts no copies. An unused slot under a copy breaks "no reuse in flight" already.
    counted = ~InState(block, (*UNUSED, BlockState.RETIRED))
    submitted = state.is_live(t) & InState(transfer, (TransferState.PLANNED, TransferState.SUBMITTED))
    return (
        Counting(
            "copies at work on the slot", block, "copies", c, at_work & state.copy_slot[c].equals(s), counted
        ),
        Counting("matches that hold the slot", block, "pins", m, state.match_slot[m].equals(s), TRUE),
        Counting(
            "copies of stores from the device block",
            lease,
            "readers",
            c,
            storing & state.copy_device[c].equals(d),
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


def _held_by_number(state: ProtocolState) -> Term:
    """Copies, pins and leases are counted, and a load's lease is its own."""
    t, c, d = state.t, state.c, state.d
    writing = InState(state.lease[d], (LeaseState.WRITING,))
    loads_into = all_of(state.of(c, t), state.loads(t), state.copy_device[c].equals(d))
    one_load = all_of(
        for_all(implies(loads_into, writing)), ForAll(d, implies(writing, Exists(c, Exists(t, loads_into))))
    )
    counted = [one.claim for one in countings(state) if one.cell.variable is not state.transfer]
    return all_of(*counted, one_load)


def sometimes(state: ProtocolState, scope: ProtocolScope) -> tuple[Claim, ...]:
    """Dangerous situations: an exploration that meets none of one kind has proved little."""
    t, c, d, w = state.t, state.c, state.d, state.w
    kernel = state.kernel[d, w]
    all_written = ForAll(c, ForAll(w, ~state.of(c, t) | state.at("WRITTEN")))
    under_kernel = {
        does: Exists(
            c,
            Exists(
                d,
                Exists(
                    w, all_of(state.of(c, t), state.copy_device[c].equals(d), kernel.equals(KERNEL[does]))
                ),
            ),
        )
        for does in ("WRITES", "READS")
    }
    claims = [
        Claim(
            "a hit is loaded",
            "A load has written on every worker.",
            Exists(t, all_of(state.loads(t), state.is_under_way(t), all_written)),
        ),
        Claim(
            "a store is ahead of its kernel",
            "A store was submitted before the kernel that writes its block ran.",
            Exists(t, all_of(state.stores(t), state.is_under_way(t), under_kernel["WRITES"])),
        ),
        Claim(
            "a load is ahead of an old reader",
            "A load was submitted before a kernel that reads its block's former content ran.",
            Exists(t, all_of(state.loads(t), state.is_under_way(t), under_kernel["READS"])),
        ),
        Claim(
            "a freed block is stored",
            "The engine has freed a block that a store still reads.",
            Exists(t, Exists(d, all_of(state.stores(t), state.touches_device(t, d), state.is_free(d)))),
        ),
    ]
    return (*claims, *_sometimes_when(state, scope))


def _sometimes_when(state: ProtocolState, scope: ProtocolScope) -> list[Claim]:
    """Situations that some scopes exclude."""
    t, d, s, c, c2 = state.t, state.d, state.s, state.c, state.c2
    block, transfer, claims = state.block[s], state.transfer[t], []
    if scope.live_transfers > 1 and scope.copies > 1 and scope.device_blocks > 1:
        two = InState(block, (BlockState.LOADING,)) & CounterOf(block, "copies").equals(number(2))
        claims.append(Claim("two loads read one slot", "A slot has two readers.", Exists(s, two)))
    if scope.resets and min(scope.live_transfers, scope.copies, scope.slots) > 1:
        readers = CounterOf(state.lease[d], "readers").equals(number(2))
        says = "A device block has two readers: a reset made the first store's slot useless."
        claims.append(Claim("two stores read one device block", says, Exists(d, readers)))
    if scope.several and min(scope.copies, scope.slots, scope.device_blocks, scope.keys) > 1:
        several = all_of(state.of(c, t), state.of(c2, t), ~c.equals(c2), state.is_under_way(t))
        for direction, of_direction in (("store", state.stores(t)), ("load", state.loads(t))):
            name = f"a {direction} has two blocks"
            says = f"A {direction} of two blocks is with the workers."
            claims.append(Claim(name, says, Exists(t, Exists(c, Exists(c2, several & of_direction)))))
    if scope.resets:
        quarantined = InState(block, (BlockState.QUARANTINED,))
        abandoned = state.is_live(t) & InState(transfer, (TransferState.ABANDONED,))
        under_copy = Exists(t, Exists(s, all_of(abandoned, state.touches_slot(t, s), quarantined)))
        says = "A reset has voided a slot that a copy touches."
        claims.append(Claim("a slot is quarantined under a copy", says, under_copy))
    if scope.failures and scope.workers > 1:
        failed = Exists(t, state.loads(t) & CounterOf(transfer, "failed").differs(number(0)))
        claims.append(Claim("a load fails", "A worker reported a load as bad.", failed))
    if scope.losses and scope.slots > 1:
        lost = Exists(s, state.stray_slot[s].equals(TRUE)) & Exists(d, state.stray_device[d].equals(TRUE))
        claims.append(Claim("copies are lost", "A store and a load were given up.", lost))
    if scope.crashes:
        behind = state.logged[s].differs(state.a_key.none) & ~state.is_indexed(s)
        says = "The written log promises a block that was evicted since."
        claims.append(Claim("the log is behind", says, Exists(s, behind)))
    return claims


def rest(state: ProtocolState) -> Term:
    """Everything is wound down: no request holds anything, and nothing is queued or under way."""
    d, t, m = state.d, state.t, state.m
    return all_of(
        ForAll(d, state.idle_compute(d)),
        ForAll(t, ~state.is_live(t)),
        ForAll(m, state.match_slot[m].equals(state.a_slot.none)),
        ForAll(d, state.is_free(d)),
    )


def rank(state: ProtocolState) -> Term:
    """An upper bound on the draining actions left to take."""
    t, c, d, m, w = state.t, state.c, state.d, state.m, state.w
    # A copy has three instants ahead at first, and one less for each that it has passed.
    passed = (("QUEUED",), ("QUEUED", "STARTED"), ("QUEUED", "STARTED", "READ"))
    to_go = [any_of(*(state.at(instant) for instant in instants)) for instants in passed]
    unreported = state.is_live(t) & state.report[t, w].equals(REPORT["NONE"])
    kernels = state.kernel[d, w].differs(KERNEL["NONE"])
    total: Term = Total(d, ~state.is_free(d)) + Total(d, Total(w, kernels))
    total = (
        total + Total(t, state.is_planned(t)) + Total(t, state.is_live(t)) + Total(t, Total(w, unreported))
    )
    for ahead in to_go:
        total = total + Total(c, Total(w, state.is_copy(c) & ahead))
    return total + Total(m, state.match_slot[m].differs(state.a_slot.none))
