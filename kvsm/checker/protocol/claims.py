"""What must hold in the protocol: its properties, the state at rest, and why winding down reaches it."""

from __future__ import annotations

from kvsm.checker.protocol.scope import ProtocolScope
from kvsm.checker.protocol.state import (
    INDEXED,
    INSTANT,
    KERNEL,
    READABLE,
    UNUSED,
    VOIDED,
    ProtocolState,
)
from kvsm.checker.protocol.terms import (
    FALSE,
    TRUE,
    Claim,
    CounterOf,
    Equal,
    Exists,
    ForAll,
    If,
    InState,
    Less,
    Term,
    Total,
    all_of,
    any_of,
    is_legal,
    number,
)
from kvsm.properties import Property
from kvsm.states import BlockState, LeaseState
from kvsm.states.transfer import TransferState


def _holds(condition: Term, then: Term) -> Term:
    """The condition implies the other term."""
    return ~condition | then


def always(state: ProtocolState) -> tuple[Claim, ...]:
    """The properties, in the order of their numbers."""
    claims = (*_claims_of_books(state), *_claims_of_bytes(state))
    return tuple(sorted(claims, key=lambda claim: int(claim.id[1:])))


def _claims_of_books(state: ProtocolState) -> tuple[Claim, ...]:
    """Properties of the core's own books."""
    d, s, w, k = state.d, state.s, state.w, state.k
    block, transfer = state.block[s], state.transfer[d]
    named_by_key = InState(block, INDEXED) & state.slot_key[s].equals(k)
    readable = InState(block, READABLE)
    unreported = Total(w, state.instant[d, w].differs(INSTANT["REPORTED"]))
    return (
        Claim(
            Property.CONSERVATION,
            "The index names at most one slot for a key.",
            ForAll(k, Less(Total(s, named_by_key), number(2))),
        ),
        Claim(
            Property.NO_REUSE_IN_FLIGHT,
            "The state of a slot fits the live copy that touches it.",
            ForAll(d, ForAll(s, _holds(state.is_live(d) & state.named(), _state_under_copy(state)))),
        ),
        Claim(
            Property.ONE_RELEASE_PER_HOLD,
            "The numbers of copies, pins and leases equal the numbers of their holders.",
            ForAll(s, _counts_equal_holders(state)) & ForAll(d, _lease_equals_copy(state)),
        ),
        Claim(
            Property.STALE_REPORTS,
            "A transfer waits once for each worker that has not reported.",
            ForAll(d, _holds(state.is_under_way(d), CounterOf(transfer, "pending").equals(unreported))),
        ),
        Claim(
            Property.MATCH_HOLDS,
            "A slot that a match holds can be read.",
            ForAll(s, _holds(state.matches[s].differs(number(0)), readable)),
        ),
        Claim(
            Property.LEGAL_CALLS,
            "Every step taken is in its machine's table.",
            ForAll(s, is_legal(block)) & ForAll(d, is_legal(transfer) & is_legal(state.lease[d])),
        ),
        Claim(
            Property.NO_STALE_DATA,
            "No slot that can be read dates from before the last reset.",
            ForAll(s, _holds(readable, state.old[s].equals(FALSE))),
        ),
    )


def _claims_of_bytes(state: ProtocolState) -> tuple[Claim, ...]:
    """Properties of the bytes in memory, on every worker."""
    d, s, w = state.d, state.s, state.w
    readable = InState(state.block[s], READABLE)
    content, kernel = state.content[d, w], state.kernel[d, w]
    in_use = all_of(~state.is_free(d), ~state.loads(d), kernel.differs(KERNEL["WRITES"]))
    return (
        Claim(
            Property.PUBLISH_AFTER_COMMIT,
            "A slot that can be read holds its key's bytes on every worker.",
            ForAll(s, ForAll(w, _holds(readable, state.slot_content[s, w].equals(state.slot_key[s])))),
        ),
        Claim(
            Property.COPY_ORDER,
            "A queued kernel finds the bytes that it was queued for.",
            ForAll(d, ForAll(w, _holds(kernel.equals(KERNEL["READS"]), content.equals(state.kernel_key[d])))),
        ),
        Claim(
            Property.CORRECT_BYTES,
            "A device block that counts as computed or loaded holds its key's bytes on every worker.",
            ForAll(d, ForAll(w, _holds(in_use, content.equals(state.key[d])))),
        ),
    )


def _state_under_copy(state: ProtocolState) -> Term:
    """The slot s is in a state that fits the live transfer of d."""
    block, transfer = state.block[state.s], state.transfer[state.d]
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
    return If(state.stores(state.d), in_store, in_load)


def _counts_equal_holders(state: ProtocolState) -> Term:
    """The counters of the slot's block equal the transfers that touch it and the matches that hold it."""
    d, block = state.d, state.block[state.s]
    planned_store = state.stores(d) & state.is_planned(d)
    touching = Total(d, all_of(state.is_live(d), state.named(), ~planned_store))
    # A retired slot counts no copies. An unused slot under a copy breaks "no reuse in flight" already.
    counted = ~InState(block, (*UNUSED, BlockState.RETIRED))
    copies, pins = CounterOf(block, "copies"), CounterOf(block, "pins")
    return _holds(counted, copies.equals(touching)) & pins.equals(state.matches[state.s])


def _lease_equals_copy(state: ProtocolState) -> Term:
    """A store leases its device block for reading, a load for writing; nothing else does."""
    d = state.d
    lease = state.lease[d]
    return all_of(
        Equal(InState(lease, (LeaseState.READING,)), state.stores(d)),
        Equal(InState(lease, (LeaseState.WRITING,)), state.loads(d)),
    )


def sometimes(state: ProtocolState, scope: ProtocolScope) -> tuple[Claim, ...]:
    """Dangerous situations: an exploration that meets none of one kind has proved little."""
    d, w = state.d, state.w
    all_written = ForAll(w, state.at("WRITTEN") | state.at("REPORTED"))
    kernel = state.kernel[d, w]
    claims = [
        Claim(
            "a hit is loaded", "A load has written on every worker.", Exists(d, state.loads(d) & all_written)
        ),
        Claim(
            "a store is ahead of its kernel",
            "A store was submitted before the kernel that writes its block ran.",
            Exists(
                d,
                all_of(state.stores(d), state.is_under_way(d), Exists(w, kernel.equals(KERNEL["WRITES"]))),
            ),
        ),
        Claim(
            "a load is ahead of an old reader",
            "A load was submitted before a kernel that reads its block's former content ran.",
            Exists(
                d, all_of(state.loads(d), state.is_under_way(d), Exists(w, kernel.equals(KERNEL["READS"])))
            ),
        ),
        Claim(
            "a freed block is stored",
            "The engine has freed a block that a store still reads.",
            Exists(d, state.stores(d) & state.is_free(d)),
        ),
    ]
    return (*claims, *_sometimes_when(state, scope))


def _sometimes_when(state: ProtocolState, scope: ProtocolScope) -> list[Claim]:
    """Situations that some scopes exclude."""
    d, s = state.d, state.s
    block, transfer, claims = state.block[s], state.transfer[d], []
    if scope.live_transfers > 1 and scope.device_blocks > 1:
        two = InState(block, (BlockState.LOADING,)) & CounterOf(block, "copies").equals(number(2))
        claims.append(Claim("two loads read one slot", "A slot has two readers.", Exists(s, two)))
    if scope.resets:
        quarantined = InState(block, (BlockState.QUARANTINED,))
        abandoned = state.is_live(d) & InState(transfer, (TransferState.ABANDONED,))
        under_copy = Exists(d, Exists(s, all_of(abandoned, state.named(), quarantined)))
        says = "A reset has voided a slot that a copy touches."
        claims.append(Claim("a slot is quarantined under a copy", says, under_copy))
    if scope.failures and scope.workers > 1:
        failed = Exists(d, state.loads(d) & CounterOf(transfer, "failed").differs(number(0)))
        claims.append(Claim("a load fails", "A worker reported a load as bad.", failed))
    if scope.losses and scope.slots > 1:
        lost = Exists(s, state.stray_slot[s].equals(TRUE)) & Exists(d, state.stray_device[d].equals(TRUE))
        claims.append(Claim("copies are lost", "A store and a load were given up.", lost))
    return claims


def rest(state: ProtocolState) -> Term:
    """Everything is wound down: no request holds anything, and nothing is queued or under way."""
    d, s = state.d, state.s
    quiet = all_of(state.is_free(d), ~state.is_live(d), state.idle_compute(d))
    return ForAll(d, quiet) & ForAll(s, state.matches[s].equals(number(0)))


def rank(state: ProtocolState) -> Term:
    """An upper bound on the draining actions left to take."""
    d, s, w = state.d, state.s, state.w
    held = ~state.is_free(d)
    kernels = Total(w, state.kernel[d, w].differs(KERNEL["NONE"]))
    # A copy has four instants ahead at first, and one less for each that it has passed.
    passed = (("QUEUED",), ("QUEUED", "STARTED"), ("QUEUED", "STARTED", "READ"))
    to_go = [any_of(*(state.at(instant) for instant in instants)) for instants in passed]
    to_go.append(~state.at("REPORTED"))
    copies = [Total(w, state.is_live(d) & ahead) for ahead in to_go]
    of_block = held + kernels + state.is_planned(d) + state.is_live(d)
    for copy in copies:
        of_block = of_block + copy
    return Total(d, of_block) + Total(s, state.matches[s])
