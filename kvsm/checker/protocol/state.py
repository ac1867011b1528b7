"""What the protocol's state consists of, and the bounds on it."""

from __future__ import annotations

from collections.abc import Mapping

from kvsm.checker.protocol.scope import ProtocolScope
from kvsm.checker.protocol.terms import (
    ForAll,
    IndexSet,
    InState,
    Labels,
    Less,
    OneOf,
    Param,
    Term,
    Total,
    Truth,
    UpTo,
    Variable,
    Words,
    number,
)
from kvsm.states import BlockState, LeaseState, Machine
from kvsm.states.transfer import LIVE, TransferState

UNDER_WAY = (TransferState.SUBMITTED, TransferState.ABANDONED)
READABLE = (BlockState.STORED, BlockState.LOADING)
INDEXED = (BlockState.ALLOCATED, BlockState.STORING, *READABLE)
UNUSED = (BlockState.FREE, BlockState.EVICTED)
VOIDED = (BlockState.QUARANTINED, BlockState.RETIRED)

KERNEL = Labels("kernel", ("NONE", "WRITES", "READS"))
DIRECTION = Labels("direction", ("NONE", "STORE", "LOAD"))
INSTANT = Labels("instant", ("QUEUED", "STARTED", "READ", "WRITTEN", "REPORTED"))


class ProtocolState:
    """Index sets, variables and the terms that actions and properties share."""

    def __init__(self, scope: ProtocolScope, machines: Mapping[str, Machine]) -> None:
        self.device_set = IndexSet("device block", scope.device_blocks)
        self.slot_set = IndexSet("slot", scope.slots)
        self.worker_set = IndexSet("worker", scope.workers)
        self.key_set = IndexSet("key", scope.keys)
        self.a_key, self.a_slot = OneOf(self.key_set), OneOf(self.slot_set)
        self.d, self.s = Param("d", self.device_set), Param("s", self.slot_set)
        self.w, self.k = Param("w", self.worker_set), Param("k", self.key_set)
        self.d2, self.s2 = Param("d2", self.device_set), Param("s2", self.slot_set)
        self._device_variables(scope, machines)
        self._slot_variables(scope, machines)

    def _device_variables(self, scope: ProtocolScope, machines: Mapping[str, Machine]) -> None:
        device, worker = (self.device_set,), (self.device_set, self.worker_set)
        lease = Words(machines["lease"], (0,), (1,), frozenset(LeaseState))
        workers = scope.workers
        transfer = Words(machines["transfer"], (workers, 0), (workers, workers), frozenset(LIVE))
        self.key = Variable(
            "key",
            "The key that the engine's books say is in the device block, or will be; none while no request"
            " holds it.",
            device,
            self.a_key,
        )
        self.kernel = Variable(
            "kernel",
            "What the kernel does that is queued on the worker for the device block.",
            worker,
            KERNEL,
        )
        self.kernel_key = Variable(
            "kernel_key", "The key that its queued kernels write, or expect to read.", device, self.a_key
        )
        self.content = Variable(
            "content",
            "Whose bytes are in the worker's shard of the device block; none is garbage.",
            worker,
            self.a_key,
        )
        self.lease = Variable("lease", "The copy's hold on the device block.", device, lease)
        self.direction = Variable(
            "direction",
            "Which way the device block's live transfer copies; NONE: it has none.",
            device,
            DIRECTION,
        )
        self.transfer_slot = Variable(
            "transfer_slot", "The slot that its live transfer reads or writes.", device, self.a_slot
        )
        self.transfer = Variable("transfer", "The state of its live transfer.", device, transfer)
        self.instant = Variable("instant", "How far the worker's copy has come.", worker, INSTANT)
        self.in_flight = Variable(
            "in_flight", "Whose bytes the worker's copy has read and not yet written.", worker, self.a_key
        )
        self.stray_device = Variable(
            "stray_device", "Whether a lost copy may still write the device block.", device, Truth()
        )

    def _slot_variables(self, scope: ProtocolScope, machines: Mapping[str, Machine]) -> None:
        slot, worker = (self.slot_set,), (self.slot_set, self.worker_set)
        kept = frozenset(BlockState) - {BlockState.EVICTED}
        block = Words(machines["block"], (0, 0), (scope.live_transfers, scope.matches), kept)
        self.block = Variable("block", "The state of the slot's block.", slot, block)
        self.slot_key = Variable("slot_key", "The key under which the index names it.", slot, self.a_key)
        self.slot_content = Variable(
            "slot_content",
            "Whose bytes are in the worker's shard of the slot; none is garbage.",
            worker,
            self.a_key,
        )
        self.matches = Variable(
            "matches",
            "How many matches hold the slot that have not loaded from it yet.",
            slot,
            UpTo(scope.matches),
        )
        self.old = Variable("old", "Whether its block is of an epoch before the last reset.", slot, Truth())
        self.stray_slot = Variable(
            "stray_slot", "Whether a lost copy may still write the slot.", slot, Truth()
        )

    def variables(self) -> tuple[Variable, ...]:
        return (
            *(
                self.key,
                self.kernel,
                self.kernel_key,
                self.content,
                self.lease,
                self.direction,
                self.transfer_slot,
            ),
            *(self.transfer, self.instant, self.in_flight, self.stray_device),
            *(self.block, self.slot_key, self.slot_content, self.matches, self.old, self.stray_slot),
        )

    # Terms. They are of the parameters d, s and w, if nothing else is given.

    def idle_compute(self, d: Param) -> Term:
        """No worker has a kernel queued for the device block."""
        return ForAll(self.w, self.kernel[d, self.w].equals(KERNEL["NONE"]))

    def is_live(self, d: Param) -> Term:
        return self.direction[d].differs(DIRECTION["NONE"])

    def is_planned(self, d: Param) -> Term:
        return self.is_live(d) & InState(self.transfer[d], (TransferState.PLANNED,))

    def is_under_way(self, d: Param) -> Term:
        return self.is_live(d) & InState(self.transfer[d], UNDER_WAY)

    def stores(self, d: Param) -> Term:
        return self.direction[d].equals(DIRECTION["STORE"])

    def loads(self, d: Param) -> Term:
        return self.direction[d].equals(DIRECTION["LOAD"])

    def at(self, instant: str) -> Term:
        return self.instant[self.d, self.w].equals(INSTANT[instant])

    def named(self) -> Term:
        """The live transfer of d is one with s."""
        return self.transfer_slot[self.d].equals(self.s)

    def room_for_transfer(self, scope: ProtocolScope) -> Term:
        return Less(Total(self.d2, self.is_live(self.d2)), number(scope.live_transfers))

    def room_for_match(self, scope: ProtocolScope) -> Term:
        return Less(Total(self.s2, self.matches[self.s2]), number(scope.matches))

    def room_for_kernels(self, scope: ProtocolScope) -> Term:
        return Less(Total(self.d2, ~self.idle_compute(self.d2)), number(scope.queued))

    def unleased(self) -> Term:
        return InState(self.lease[self.d], (LeaseState.NONE,))
