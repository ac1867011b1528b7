"""The protocol's state: its variables, and the conditions on them that actions and properties share."""

from __future__ import annotations

from collections.abc import Mapping

from kvsm.checker.protocol.scope import ProtocolScope
from kvsm.checker.protocol.terms import (
    Domain,
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
    """Index sets, variables, and terms over them.

    A variable has one value for each device block or slot, or one for each worker of each. Terms are about
    the parameters d (device block), s (slot) and w (worker), unless another one is given.
    """

    def __init__(self, scope: ProtocolScope, machines: Mapping[str, Machine]) -> None:
        self._scope = scope
        self.device_set = IndexSet("device block", scope.device_blocks)
        self.slot_set = IndexSet("slot", scope.slots)
        self.worker_set = IndexSet("worker", scope.workers)
        self.key_set = IndexSet("key", scope.keys)
        self.a_key, self.a_slot = OneOf(self.key_set), OneOf(self.slot_set)
        self.d, self.s = Param("d", self.device_set), Param("s", self.slot_set)
        self.w, self.k = Param("w", self.worker_set), Param("k", self.key_set)
        self.d2, self.s2 = Param("d2", self.device_set), Param("s2", self.slot_set)
        self.variables: list[Variable] = []
        self._add_device_variables(machines)
        self._add_slot_variables(machines)

    def _add(self, name: str, domain: Domain, indices: tuple[IndexSet, ...], says: str) -> Variable:
        self.variables.append(Variable(name, says, indices, domain))
        return self.variables[-1]

    def _add_device_variables(self, machines: Mapping[str, Machine]) -> None:
        device, worker = (self.device_set,), (self.device_set, self.worker_set)
        workers = self._scope.workers
        lease = Words(machines["lease"], (0,), (1,), frozenset(LeaseState))
        transfer = Words(machines["transfer"], (workers, 0), (workers, workers), frozenset(LIVE))
        says = (
            "The key that the device block holds or will hold, by the engine's books; none if no request "
            "holds the block."
        )
        self.key = self._add("key", self.a_key, device, says)
        says = "What the kernel queued on the worker for the device block does; NONE if none is queued."
        self.kernel = self._add("kernel", KERNEL, worker, says)
        says = "The key that its queued kernels write, or expect to read."
        self.kernel_key = self._add("kernel_key", self.a_key, device, says)
        says = "The key whose bytes are in the worker's shard of the device block; none for garbage."
        self.content = self._add("content", self.a_key, worker, says)
        self.lease = self._add("lease", lease, device, "The copy's hold on the device block.")
        says = "The direction of the device block's live transfer; NONE if it has none."
        self.direction = self._add("direction", DIRECTION, device, says)
        says = "The slot that its live transfer reads or writes."
        self.transfer_slot = self._add("transfer_slot", self.a_slot, device, says)
        self.transfer = self._add("transfer", transfer, device, "The state of its live transfer.")
        self.instant = self._add("instant", INSTANT, worker, "How far the worker's copy has come.")
        says = "The key whose bytes the worker's copy has read and not yet written."
        self.in_flight = self._add("in_flight", self.a_key, worker, says)
        says = "Whether a lost copy may still write the device block."
        self.stray_device = self._add("stray_device", Truth(), device, says)

    def _add_slot_variables(self, machines: Mapping[str, Machine]) -> None:
        slot, worker = (self.slot_set,), (self.slot_set, self.worker_set)
        kept = frozenset(BlockState) - {BlockState.EVICTED}
        limits = (self._scope.live_transfers, self._scope.matches)
        block = Words(machines["block"], (0, 0), limits, kept)
        self.block = self._add("block", block, slot, "The state of the slot's block.")
        says = "The key under which the index names the slot."
        self.slot_key = self._add("slot_key", self.a_key, slot, says)
        says = "The key whose bytes are in the worker's shard of the slot; none for garbage."
        self.slot_content = self._add("slot_content", self.a_key, worker, says)
        says = "How many matches hold the slot and have not begun to load from it."
        self.matches = self._add("matches", UpTo(self._scope.matches), slot, says)
        says = "Whether the slot's block dates from before the last reset."
        self.old = self._add("old", Truth(), slot, says)
        says = "Whether a lost copy may still write the slot."
        self.stray_slot = self._add("stray_slot", Truth(), slot, says)

    def idle_compute(self, d: Param) -> Term:
        """No worker has a kernel queued for the device block."""
        return ForAll(self.w, self.kernel[d, self.w].equals(KERNEL["NONE"]))

    def is_free(self, d: Param) -> Term:
        """No request holds the device block."""
        return self.key[d].equals(self.a_key.none)

    def is_live(self, d: Param) -> Term:
        """The device block has a transfer that has not ended."""
        return self.direction[d].differs(DIRECTION["NONE"])

    def is_planned(self, d: Param) -> Term:
        """Its transfer has not left for the workers."""
        return self.is_live(d) & InState(self.transfer[d], (TransferState.PLANNED,))

    def is_under_way(self, d: Param) -> Term:
        """Its transfer is with the workers."""
        return self.is_live(d) & InState(self.transfer[d], UNDER_WAY)

    def stores(self, d: Param) -> Term:
        """Its live transfer is a store."""
        return self.direction[d].equals(DIRECTION["STORE"])

    def loads(self, d: Param) -> Term:
        """Its live transfer is a load."""
        return self.direction[d].equals(DIRECTION["LOAD"])

    def at(self, instant: str) -> Term:
        """The worker's copy has come this far."""
        return self.instant[self.d, self.w].equals(INSTANT[instant])

    def named(self) -> Term:
        """The live transfer of d reads or writes s."""
        return self.transfer_slot[self.d].equals(self.s)

    def unleased(self) -> Term:
        """No copy holds d."""
        return InState(self.lease[self.d], (LeaseState.NONE,))

    def room_for_transfer(self) -> Term:
        """The scope admits one more live transfer."""
        return Less(Total(self.d2, self.is_live(self.d2)), number(self._scope.live_transfers))

    def room_for_match(self) -> Term:
        """The scope admits one more match."""
        return Less(Total(self.s2, self.matches[self.s2]), number(self._scope.matches))

    def room_for_kernels(self) -> Term:
        """The scope admits kernels for one more device block."""
        return Less(Total(self.d2, ~self.idle_compute(self.d2)), number(self._scope.queued))
