"""The protocol's state: its variables, and the conditions on them that actions and properties share."""

from __future__ import annotations

from collections.abc import Mapping

from kvsm.check.protocol.scope import ProtocolScope
from kvsm.check.protocol.terms import (
    TRUE,
    Domain,
    Exists,
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
INSTANT = Labels("instant", ("QUEUED", "STARTED", "READ", "WRITTEN"))
REPORT = Labels("report", ("NONE", "GOOD", "BAD"))


class ProtocolState:
    """Index sets, variables, and terms over them.

    A transfer copies several blocks. Each of its copies is between one device block and one slot, and every
    worker makes its share of it. A match pins one slot.

    Terms are about the parameters t (transfer), c (copy), d (device block), s (slot), w (worker) and m
    (match), unless another one is given.
    """

    def __init__(self, scope: ProtocolScope, machines: Mapping[str, Machine]) -> None:
        self._scope = scope
        self.device_set = IndexSet("device block", scope.device_blocks)
        self.slot_set = IndexSet("slot", scope.slots)
        self.transfer_set = IndexSet("transfer", scope.live_transfers)
        self.copy_set = IndexSet("copy", scope.copies)
        self.match_set = IndexSet("match", scope.matches)
        self.worker_set = IndexSet("worker", scope.workers)
        self.key_set = IndexSet("key", scope.keys)
        self.a_key, self.a_slot = OneOf(self.key_set), OneOf(self.slot_set)
        self.a_device, self.a_transfer = OneOf(self.device_set), OneOf(self.transfer_set)
        self.d, self.s = Param("d", self.device_set), Param("s", self.slot_set)
        self.t, self.c = Param("t", self.transfer_set), Param("c", self.copy_set)
        self.m, self.w, self.k = (
            Param("m", self.match_set),
            Param("w", self.worker_set),
            Param("k", self.key_set),
        )
        self.d2, self.s2, self.c2 = (
            Param("d2", self.device_set),
            Param("s2", self.slot_set),
            Param("c2", self.copy_set),
        )
        self.variables: list[Variable] = []
        self._add_device_variables(machines)
        self._add_transfer_variables(machines)
        self._add_slot_variables(machines)
        self._add_log_variables()

    def _add(self, name: str, domain: Domain, indices: tuple[IndexSet, ...], says: str) -> Variable:
        self.variables.append(Variable(name, says, indices, domain))
        return self.variables[-1]

    def _add_device_variables(self, machines: Mapping[str, Machine]) -> None:
        device, worker = (self.device_set,), (self.device_set, self.worker_set)
        lease = Words(machines["lease"], (0,), (self._scope.copies,), frozenset(LeaseState))
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
        self.lease = self._add("lease", lease, device, "How copies hold the device block.")
        says = "Whether a lost copy may still write the device block."
        self.stray_device = self._add("stray_device", Truth(), device, says)

    def _add_transfer_variables(self, machines: Mapping[str, Machine]) -> None:
        transfer, copy = (self.transfer_set,), (self.copy_set,)
        workers = self._scope.workers
        words = Words(machines["transfer"], (workers, 0), (workers, workers), frozenset(LIVE))
        says = "The direction of the transfer; NONE if it is not live."
        self.direction = self._add("direction", DIRECTION, transfer, says)
        self.transfer = self._add("transfer", words, transfer, "The state of the live transfer.")
        says = "What the worker has reported of the transfer."
        self.report = self._add("report", REPORT, (self.transfer_set, self.worker_set), says)
        says = "The live transfer that the copy belongs to; none if there is no such copy."
        self.copy_transfer = self._add("copy_transfer", self.a_transfer, copy, says)
        says = "The device block that the copy reads or writes."
        self.copy_device = self._add("copy_device", self.a_device, copy, says)
        self.copy_slot = self._add("copy_slot", self.a_slot, copy, "The slot that the copy reads or writes.")
        says = "How far the worker's share of the copy has come."
        self.instant = self._add("instant", INSTANT, (self.copy_set, self.worker_set), says)
        says = "The key whose bytes the worker's share of the copy has read and not yet written."
        self.in_flight = self._add("in_flight", self.a_key, (self.copy_set, self.worker_set), says)

    def _add_slot_variables(self, machines: Mapping[str, Machine]) -> None:
        slot, worker = (self.slot_set,), (self.slot_set, self.worker_set)
        kept = frozenset(BlockState) - {BlockState.EVICTED}
        block = Words(machines["block"], (0, 0), (self._scope.copies, self._scope.matches), kept)
        self.block = self._add("block", block, slot, "The state of the slot's block.")
        says = "The key under which the index names the slot."
        self.slot_key = self._add("slot_key", self.a_key, slot, says)
        says = "The key whose bytes are in the worker's shard of the slot; none for garbage."
        self.slot_content = self._add("slot_content", self.a_key, worker, says)
        says = "Whether the slot's block dates from before the last reset."
        self.old = self._add("old", Truth(), slot, says)
        says = "Whether a lost copy may still write the slot."
        self.stray_slot = self._add("stray_slot", Truth(), slot, says)
        says = (
            "The slot that the match holds, until it is loaded or released; none if there is no such match."
        )
        self.match_slot = self._add("match_slot", self.a_slot, (self.match_set,), says)

    def _add_log_variables(self) -> None:
        """What a crash leaves of the ledger: the part of the log that was written."""
        if not self._scope.crashes:
            return
        slot = (self.slot_set,)
        says = "The key under which the slot can be read by the written part of the log; none if it cannot."
        self.logged = self._add("logged", self.a_key, slot, says)
        says = "Whether that block dates from before the last reset."
        self.logged_old = self._add("logged_old", Truth(), slot, says)

    # Device blocks.

    def idle_compute(self, d: Param) -> Term:
        """No worker has a kernel queued for the device block."""
        return ForAll(self.w, self.kernel[d, self.w].equals(KERNEL["NONE"]))

    def is_free(self, d: Param) -> Term:
        """No request holds the device block."""
        return self.key[d].equals(self.a_key.none)

    def is_loaded(self, d: Param) -> Term:
        """A live load copies into the device block."""
        return InState(self.lease[d], (LeaseState.WRITING,))

    # Transfers and their copies.

    def is_live(self, t: Param) -> Term:
        """The transfer has not ended."""
        return self.direction[t].differs(DIRECTION["NONE"])

    def is_planned(self, t: Param) -> Term:
        """The transfer has not left for the workers."""
        return self.is_live(t) & InState(self.transfer[t], (TransferState.PLANNED,))

    def is_under_way(self, t: Param) -> Term:
        """The transfer is with the workers."""
        return self.is_live(t) & InState(self.transfer[t], UNDER_WAY)

    def stores(self, t: Param) -> Term:
        """The transfer is a store."""
        return self.direction[t].equals(DIRECTION["STORE"])

    def loads(self, t: Param) -> Term:
        """The transfer is a load."""
        return self.direction[t].equals(DIRECTION["LOAD"])

    def of(self, c: Param, t: Param) -> Term:
        """The copy belongs to the transfer."""
        return self.copy_transfer[c].equals(t)

    def is_copy(self, c: Param) -> Term:
        """There is such a copy."""
        return self.copy_transfer[c].differs(self.a_transfer.none)

    def is_indexed(self, s: Param) -> Term:
        """The index names the slot."""
        return InState(self.block[s], INDEXED)

    def is_readable(self, s: Param) -> Term:
        """The slot can be loaded."""
        return InState(self.block[s], READABLE)

    def touches_slot(self, t: Param, s: Param, c: Param | None = None) -> Term:
        """A copy of the transfer reads or writes the slot. c: the parameter that is bound here."""
        c = c or self.c
        return Exists(c, self.of(c, t) & self.copy_slot[c].equals(s))

    def touches_device(self, t: Param, d: Param) -> Term:
        """A copy of the transfer reads or writes the device block."""
        return Exists(self.c, self.of(self.c, t) & self.copy_device[self.c].equals(d))

    def at(self, instant: str) -> Term:
        """The worker's share of c has come this far."""
        return self.instant[self.c, self.w].equals(INSTANT[instant])

    # The bounds of the scope.

    def room_for_kernels(self) -> Term:
        """The scope admits kernels for one more device block."""
        if self._scope.queued >= self._scope.device_blocks:
            return TRUE
        return Less(Total(self.d2, ~self.idle_compute(self.d2)), number(self._scope.queued))
