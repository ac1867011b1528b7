"""The state of the request protocol: its variables, and the conditions that actions and claims share."""

from __future__ import annotations

from collections.abc import Mapping

from kvsm.check.protocol.offload_state import DIRECTION, REPORT, UNDER_WAY
from kvsm.check.protocol.request_scope import RequestScope
from kvsm.check.protocol.terms import (
    FALSE,
    Domain,
    Exists,
    ForAll,
    IndexSet,
    InState,
    Labels,
    OneOf,
    Param,
    Term,
    Truth,
    Variable,
    Words,
    all_of,
)
from kvsm.states import BlockState, Machine
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState

PATIENCE = Labels("patience", ("NONE", "WAITS", "SPENT"))
NOTE = Labels("note", ("NONE", "LOADED", "FAILED"))


class RequestProtocolState:
    """Index sets, variables, and terms over them.

    A hold is on one slot. It is a pin of a request's match, or it belongs to a transfer: a load reads the
    slot, a store writes it.

    Parameters are named r (request), s (slot), m (hold), t (transfer) and w (worker).
    """

    def __init__(self, scope: RequestScope, machines: Mapping[str, Machine]) -> None:
        self._scope = scope
        self.request_set = IndexSet("request", scope.requests)
        self.slot_set = IndexSet("slot", scope.slots)
        self.hold_set = IndexSet("hold", scope.holds)
        self.transfer_set = IndexSet("transfer", scope.transfers)
        self.worker_set = IndexSet("worker", scope.workers)
        self.a_request, self.a_slot = OneOf(self.request_set), OneOf(self.slot_set)
        self.a_transfer = OneOf(self.transfer_set)
        self.r, self.r2 = Param("r", self.request_set), Param("r2", self.request_set)
        self.s, self.s2 = Param("s", self.slot_set), Param("s2", self.slot_set)
        self.m, self.m2 = Param("m", self.hold_set), Param("m2", self.hold_set)
        self.t, self.t2 = Param("t", self.transfer_set), Param("t2", self.transfer_set)
        self.w, self.w2 = Param("w", self.worker_set), Param("w2", self.worker_set)
        self.variables: list[Variable] = []
        self._add_request_variables(machines)
        self._add_transfer_variables(machines)
        self._add_slot_variables(machines)

    def _add(self, name: str, domain: Domain, indices: tuple[IndexSet, ...], says: str) -> Variable:
        self.variables.append(Variable(name, says, indices, domain))
        return self.variables[-1]

    def _add_request_variables(self, machines: Mapping[str, Machine]) -> None:
        request = (self.request_set,)
        kept = frozenset(RequestState) - {RequestState.RELEASED}
        words = Words(machines["request"], (0,), (1,), kept)
        says = "Whether the ledger has a record of the request."
        self.known = self._add("known", Truth(), request, says)
        says = "The state of the request; NEW if there is no record of it."
        self.request = self._add("request", words, request, says)
        says = (
            "Whether the request has waited: its wait has a bound (WAITS), and the bound was reached (SPENT)."
        )
        self.patience = self._add("patience", PATIENCE, request, says)
        says = "The transfer that the deferred request waits for."
        self.awaits = self._add("awaits", self.a_transfer, request, says)
        says = "The load of the request that is planned or in flight."
        self.load = self._add("load", self.a_transfer, request, says)

    def _add_transfer_variables(self, machines: Mapping[str, Machine]) -> None:
        transfer, workers = (self.transfer_set,), self._scope.workers
        words = Words(machines["transfer"], (workers, 0), (workers, workers), frozenset(TransferState))
        says = "The direction of the transfer; NONE if it is not live."
        self.direction = self._add("direction", DIRECTION, transfer, says)
        says = "The state of the transfer, until the engine was told of its end."
        self.transfer = self._add("transfer", words, transfer, says)
        says = "What the worker has reported of the transfer."
        self.report = self._add("report", REPORT, (self.transfer_set, self.worker_set), says)
        says = "The request that the live load is for."
        self.load_request = self._add("load_request", self.a_request, transfer, says)
        says = (
            "Whether the load is refused because its match was voided: it copies nothing, and ends at once."
        )
        self.refused = self._add("refused", Truth(), transfer, says)
        says = (
            "What the scheduler has noted about the load's end, to tell the engine; NONE if there is nothing."
        )
        self.note = self._add("note", NOTE, transfer, says)
        says = "Whether the engine waits to be told how the load ended."
        self.expects = self._add("expects", Truth(), transfer, says)

    def _add_slot_variables(self, machines: Mapping[str, Machine]) -> None:
        hold, holds = (self.hold_set,), self._scope.holds
        kept = frozenset(BlockState) - {BlockState.EVICTED}
        block = Words(machines["block"], (0, 0), (holds, holds), kept)
        self.block = self._add("block", block, (self.slot_set,), "The state of the slot's block.")
        says = "The slot that is held; none if there is no such hold."
        self.hold_slot = self._add("hold_slot", self.a_slot, hold, says)
        says = "The request whose match pins the slot; none if the hold is no pin."
        self.hold_request = self._add("hold_request", self.a_request, hold, says)
        says = "The transfer that reads or writes the slot; none if the hold is a pin."
        self.hold_transfer = self._add("hold_transfer", self.a_transfer, hold, says)
        says = "Whether the pinned block was invalidated. The slot may hold another block by now."
        self.void = self._add("void", Truth(), hold, says)

    # Requests.

    def may_ask(self, r: Param) -> Term:
        """The request can be answered: it does not wait, has no load, and its last match was released.

        A request that the ledger has no record of is a new one.
        """
        busy = InState(self.request[r], (RequestState.MATCHED, RequestState.DEFERRED))
        new = InState(self.request[r], (RequestState.NEW,))
        return (self.is_known(r) | new) & ~busy & self.load[r].equals(self.a_transfer.none)

    def is_known(self, r: Param) -> Term:
        """The ledger has a record of the request."""
        return self.known[r].differs(FALSE)

    def is_over(self, r: Param) -> Term:
        """The request has finished, and its load is still in flight."""
        return InState(self.request[r], (RequestState.FINISHED,))

    def is_matched(self, r: Param) -> Term:
        """The request has a match, which it has not loaded yet."""
        return self.is_known(r) & InState(self.request[r], (RequestState.MATCHED,))

    def is_deferred(self, r: Param) -> Term:
        """The request waits for a transfer."""
        return InState(self.request[r], (RequestState.DEFERRED,))

    # Holds.

    def is_held(self, m: Param) -> Term:
        """There is such a hold."""
        return self.hold_slot[m].differs(self.a_slot.none)

    def is_pin(self, m: Param) -> Term:
        """The hold is a pin of a match."""
        return self.hold_request[m].differs(self.a_request.none)

    def pins(self, m: Param, r: Param) -> Term:
        """The hold is a pin of the request's match."""
        return self.hold_request[m].equals(r)

    def is_intact(self, m: Param) -> Term:
        """The block that the hold pins is not gone."""
        return self.void[m].equals(FALSE)

    def is_copy(self, m: Param) -> Term:
        """A transfer reads or writes the slot of the hold."""
        return self.hold_transfer[m].differs(self.a_transfer.none)

    def copies(self, m: Param, t: Param) -> Term:
        """The hold is the transfer's."""
        return self.hold_transfer[m].equals(t)

    def pins_slot(self, r: Param, s: Param) -> Term:
        """The request's match pins the block in the slot."""
        m = self.m2
        return Exists(m, self.pins(m, r) & self.is_intact(m) & self.hold_slot[m].equals(s))

    def touches_slot(self, t: Param, s: Param) -> Term:
        """The transfer reads or writes the slot."""
        m = self.m2
        return Exists(m, self.copies(m, t) & self.hold_slot[m].equals(s))

    # Transfers.

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

    def is_refused(self, t: Param) -> Term:
        """The load is refused."""
        return self.refused[t].differs(FALSE)

    def is_noted(self, t: Param) -> Term:
        """The load has ended, and the engine is to be told."""
        return self.note[t].differs(NOTE["NONE"])

    def is_unused(self, t: Param) -> Term:
        """The transfer is none: nothing is left of an earlier one."""
        planned = InState(self.transfer[t], (TransferState.PLANNED,))
        unreported = ForAll(self.w, self.report[t, self.w].equals(REPORT["NONE"]))
        return all_of(~self.is_live(t), ~self.is_noted(t), planned, unreported)
