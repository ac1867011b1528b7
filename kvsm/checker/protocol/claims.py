"""What shall hold in the protocol: its properties, its rest, and why winding down comes to it."""

from __future__ import annotations

from kvsm.checker.protocol.parts import (
    INDEXED,
    INSTANT,
    KERNEL,
    READABLE,
    UNUSED,
    VOIDED,
    Parts,
    Scope,
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
from kvsm.states import BlockState, LeaseState
from kvsm.states.transfer import TransferState


def _holds(condition: Term, then: Term) -> Term:
    """If the one, then the other."""
    return ~condition | then


def always(parts: Parts) -> tuple[Claim, ...]:
    """By their numbers in the design."""
    return tuple(
        sorted((*_claims_of_books(parts), *_claims_of_bytes(parts)), key=lambda one: int(one.id[1:]))
    )


def _claims_of_books(parts: Parts) -> tuple[Claim, ...]:
    """What the core's own books must satisfy."""
    d, s, w, k = parts.d, parts.s, parts.w, parts.k
    block, transfer = parts.block[s], parts.transfer[d]
    named_by_key = InState(block, INDEXED) & parts.slot_key[s].equals(k)
    readable = InState(block, READABLE)
    unreported = Total(w, parts.instant[d, w].differs(INSTANT["REPORTED"]))
    return (
        Claim(
            "S1",
            "The index names at most one slot by a key.",
            ForAll(k, Less(Total(s, named_by_key), number(2))),
        ),
        Claim(
            "S3",
            "A slot that a live copy touches is in a state that says so.",
            ForAll(d, ForAll(s, _holds(parts.is_live(d) & parts.named(), _state_under_copy(parts)))),
        ),
        Claim(
            "S4",
            "Copies, pins and leases are as many as those who hold them.",
            ForAll(s, _counts_equal_holders(parts)) & ForAll(d, _lease_equals_copy(parts)),
        ),
        Claim(
            "S5",
            "A transfer waits for the workers that have not reported, for each of them once.",
            ForAll(d, _holds(parts.is_under_way(d), CounterOf(transfer, "pending").equals(unreported))),
        ),
        Claim(
            "S7",
            "What a match holds can be read.",
            ForAll(s, _holds(parts.matches[s].differs(number(0)), readable)),
        ),
        Claim(
            "S8",
            "Every step that is taken is in its machine's table.",
            ForAll(s, is_legal(block)) & ForAll(d, is_legal(transfer) & is_legal(parts.lease[d])),
        ),
        Claim(
            "S14",
            "No slot that can be read is of an epoch before the last reset.",
            ForAll(s, _holds(readable, parts.old[s].equals(FALSE))),
        ),
    )


def _claims_of_bytes(parts: Parts) -> tuple[Claim, ...]:
    """What must be in memory, on every worker."""
    d, s, w = parts.d, parts.s, parts.w
    readable = InState(parts.block[s], READABLE)
    content, kernel = parts.content[d, w], parts.kernel[d, w]
    in_use = all_of(parts.key[d].differs(parts.a_key.none), ~parts.loads(d), kernel.differs(KERNEL["WRITES"]))
    return (
        Claim(
            "S2",
            "A slot that can be read holds its key's bytes on every worker.",
            ForAll(s, ForAll(w, _holds(readable, parts.slot_content[s, w].equals(parts.slot_key[s])))),
        ),
        Claim(
            "S12",
            "A queued kernel finds the bytes that it was queued for.",
            ForAll(d, ForAll(w, _holds(kernel.equals(KERNEL["READS"]), content.equals(parts.kernel_key[d])))),
        ),
        Claim(
            "S15",
            "What the engine takes for computed or loaded is its key's bytes on every worker.",
            ForAll(d, ForAll(w, _holds(in_use, content.equals(parts.key[d])))),
        ),
    )


def _state_under_copy(parts: Parts) -> Term:
    """The states that the slot s may be in under the live transfer of d."""
    block, transfer = parts.block[parts.s], parts.transfer[parts.d]
    in_store = any_of(
        *(
            InState(transfer, (state,)) & InState(block, (under,))
            for state, under in (
                (TransferState.PLANNED, BlockState.ALLOCATED),
                (TransferState.SUBMITTED, BlockState.STORING),
                (TransferState.ABANDONED, BlockState.QUARANTINED),
            )
        )
    )
    abandoned = InState(transfer, (TransferState.ABANDONED,))
    in_load = InState(block, VOIDED) | (~abandoned & InState(block, (BlockState.LOADING,)))
    return If(parts.stores(parts.d), in_store, in_load)


def _counts_equal_holders(parts: Parts) -> Term:
    d, block = parts.d, parts.block[parts.s]
    planned_store = parts.stores(d) & parts.is_planned(d)
    touching = Total(d, all_of(parts.is_live(d), parts.named(), ~planned_store))
    # A retired slot counts no copy, and an unused one under a copy is S3's to name.
    counted = ~InState(block, (*UNUSED, BlockState.RETIRED))
    copies, pins = CounterOf(block, "copies"), CounterOf(block, "pins")
    return _holds(counted, copies.equals(touching)) & pins.equals(parts.matches[parts.s])


def _lease_equals_copy(parts: Parts) -> Term:
    d = parts.d
    lease = parts.lease[d]
    return all_of(
        Equal(InState(lease, (LeaseState.READING,)), parts.stores(d)),
        Equal(InState(lease, (LeaseState.WRITING,)), parts.loads(d)),
    )


def sometimes(parts: Parts, scope: Scope) -> tuple[Claim, ...]:
    """What an exploration must have met, or it has not looked where it is dangerous."""
    d, w = parts.d, parts.w
    all_written = ForAll(w, parts.at("WRITTEN") | parts.at("REPORTED"))
    kernel = parts.kernel[d, w]
    claims = [
        Claim("a hit is loaded", "A load has written everywhere.", Exists(d, parts.loads(d) & all_written)),
        Claim(
            "a store is ahead of its kernel",
            "A store was submitted before the kernel ran that writes its block.",
            Exists(
                d,
                all_of(parts.stores(d), parts.is_under_way(d), Exists(w, kernel.equals(KERNEL["WRITES"]))),
            ),
        ),
        Claim(
            "a load is ahead of an old reader",
            "A load was submitted before a kernel ran that reads its block's former content.",
            Exists(
                d, all_of(parts.loads(d), parts.is_under_way(d), Exists(w, kernel.equals(KERNEL["READS"])))
            ),
        ),
        Claim(
            "a freed block is stored",
            "The engine has freed a block that a store still reads.",
            Exists(d, parts.stores(d) & parts.key[d].equals(parts.a_key.none)),
        ),
    ]
    return (*claims, *_sometimes_when(parts, scope))


def _sometimes_when(parts: Parts, scope: Scope) -> list[Claim]:
    """Those that the bounds may exclude."""
    d, s = parts.d, parts.s
    block, transfer, claims = parts.block[s], parts.transfer[d], []
    if scope.live_transfers > 1 and scope.device_blocks > 1:
        two = InState(block, (BlockState.LOADING,)) & CounterOf(block, "copies").equals(number(2))
        claims.append(Claim("two loads read one slot", "A slot has two readers.", Exists(s, two)))
    if scope.resets:
        quarantined = InState(block, (BlockState.QUARANTINED,))
        abandoned = parts.is_live(d) & InState(transfer, (TransferState.ABANDONED,))
        under_copy = Exists(d, Exists(s, all_of(abandoned, parts.named(), quarantined)))
        says = "A reset has voided a slot that a copy touches."
        claims.append(Claim("a slot is quarantined under a copy", says, under_copy))
    if scope.failures and scope.workers > 1:
        failed = Exists(d, parts.loads(d) & CounterOf(transfer, "failed").differs(number(0)))
        claims.append(Claim("a load fails", "A worker reported a load as bad.", failed))
    if scope.losses and scope.slots > 1:
        lost = Exists(s, parts.stray_slot[s].equals(TRUE)) & Exists(d, parts.stray_device[d].equals(TRUE))
        claims.append(Claim("copies are lost", "A store and a load were given up.", lost))
    return claims


def rest(parts: Parts) -> Term:
    d, s = parts.d, parts.s
    quiet = all_of(parts.key[d].equals(parts.a_key.none), ~parts.is_live(d), parts.idle_compute(d))
    return ForAll(d, quiet) & ForAll(s, parts.matches[s].equals(number(0)))


def rank(parts: Parts) -> Term:
    """How many draining actions are left to take, at most."""
    d, s, w = parts.d, parts.s, parts.w
    held = parts.key[d].differs(parts.a_key.none)
    kernels = Total(w, parts.kernel[d, w].differs(KERNEL["NONE"]))
    # A copy has four instants before it, less one for each that it has passed.
    passed = (("QUEUED",), ("QUEUED", "STARTED"), ("QUEUED", "STARTED", "READ"))
    to_go = [any_of(*(parts.at(instant) for instant in instants)) for instants in passed]
    to_go.append(~parts.at("REPORTED"))
    copies = [Total(w, parts.is_live(d) & ahead) for ahead in to_go]
    of_block = held + kernels + parts.is_planned(d) + parts.is_live(d)
    for copy in copies:
        of_block = of_block + copy
    return Total(d, of_block) + Total(s, parts.matches[s])
