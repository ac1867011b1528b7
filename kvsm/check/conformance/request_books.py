"""The request protocol's variables in a real ledger, and who knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvsm import events as ev
from kvsm.check.conformance.cells import CellKey, Member
from kvsm.check.conformance.offload_books import WordReading, name_member
from kvsm.check.conformance.request_steps import REQUEST_STEPS, pieces_of
from kvsm.check.conformance.shadow import Conformance, Keeper, LedgerBooks, Shadow
from kvsm.check.protocol.offload_state import DIRECTION, REPORT
from kvsm.check.protocol.request_protocol import request_protocol
from kvsm.check.protocol.request_scope import RequestScope
from kvsm.check.protocol.request_state import PATIENCE
from kvsm.core.ledger import Ledger, RequestRecord, TransferRecord
from kvsm.events import Direction, OffloadConfig, OffloadingEvent
from kvsm.ids import listed, unpack
from kvsm.states import MACHINES, Machine
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.request import DEFERRED, REQUEST_WORDS
from kvsm.states.transfer import TRANSFER_WORDS
from kvsm.system.printable import printable

REQUEST_KEEPERS: dict[str, Keeper] = {
    "known": Keeper.LEDGER,
    "request": Keeper.LEDGER,
    "patience": Keeper.LEDGER,
    "awaits": Keeper.LEDGER,
    "load": Keeper.LEDGER,
    "direction": Keeper.LEDGER,
    "transfer": Keeper.LEDGER,
    "report": Keeper.LEDGER,
    "load_request": Keeper.LEDGER,
    "refused": Keeper.TOLD,
    "note": Keeper.TOLD,
    "expects": Keeper.TOLD,
    "block": Keeper.LEDGER,
    "hold_slot": Keeper.LEDGER,
    "hold_request": Keeper.LEDGER,
    "hold_transfer": Keeper.LEDGER,
    "void": Keeper.LEDGER,
}
"""Every variable of the declaration."""

REQUEST_UNSEEN: dict[str, str] = {
    "fail_to_load": "the scheduler's: the log tells the release of the match, which is `unmatch`",
}
"""Every action that no event tells, and whose it is."""

_OF_REQUEST = ("known", "request", "patience", "awaits", "load")
_OF_HOLD = ("hold_slot", "hold_request", "hold_transfer", "void")


def request_conformance(config: OffloadConfig, machines: Mapping[str, Machine] = MACHINES) -> Conformance:
    """How a log with this configuration is about the request protocol."""
    declared = request_protocol(RequestScope(workers=config.workers, restarts=True), machines=machines)
    members: dict[str, Sequence[Member]] = {
        "worker": range(config.workers),
        "slot": range(config.host_blocks),
    }
    return Conformance(
        declared,
        REQUEST_KEEPERS,
        REQUEST_STEPS,
        REQUEST_UNSEEN,
        members,
        _name_member,
        RequestBooks,
        partial(request_conformance, machines=machines),
    )


def _name_member(kind: str, member: Any) -> str:
    if kind == "transfer":
        return (
            f"transfer {member[0]}, its slot at place {member[1]}" if member[1] else f"transfer {member[0]}"
        )
    if kind == "hold":
        whose = f"request {printable(member[0])}" if isinstance(member[0], str) else f"transfer {member[0]}"
        return f"hold {member[1]} of {whose}"
    return f"request {printable(member)}" if kind == "request" else name_member(kind, member)


class RequestBooks(LedgerBooks):
    """Reads the protocol's variables from a ledger."""

    def __init__(self, ledger: Ledger, shadow: Shadow) -> None:
        self._ledger = ledger
        self._initial = {name: one.initial for name, one in shadow.cells.items()}
        self._words = {
            name: WordReading(codec, words)
            for name, codec in (
                ("block", BLOCK_WORDS),
                ("request", REQUEST_WORDS),
                ("transfer", TRANSFER_WORDS),
            )
            if (words := shadow.cells[name].words) is not None
        }

    def restart(self, shadow: Shadow) -> None:
        """Take `restart`, which demands nothing."""
        shadow.take("restart", [()])

    def values(self, variable: str, cells: Sequence[CellKey]) -> list[Any]:
        if variable == "block":
            reading, words = self._words["block"], self._ledger.blocks.words
            return [reading[words[slot]] for slot in cells]
        if variable in _OF_REQUEST:
            records = self._ledger.requests
            return [self._of_request(variable, records.get(name)) for name in cells]
        if variable in _OF_HOLD:
            return [self._of_hold(variable, *hold) for hold in cells]
        return [self._of_transfer(variable, cell) for cell in cells]

    def every(self, variable: str) -> dict[CellKey, Any]:
        ledger = self._ledger
        pieces = [piece for id in ledger.transfers for piece in pieces_of(ledger, id)]
        cells: list[CellKey] = list(pieces)
        if variable == "block":
            cells = list(range(ledger.config.host_blocks))
        elif variable in _OF_REQUEST:
            cells = list(ledger.requests)
        elif variable in _OF_HOLD:
            stores = ledger.transfers
            cells = [piece for piece in pieces if stores[piece[0]].direction is Direction.STORE]
            for name, one in ledger.requests.items():
                held = len(one.pins) or (len(ledger.transfers[one.load].slots) if one.load else 0)
                cells += [(name, place) for place in range(held)]
        elif variable == "report":
            cells = [(piece, worker) for piece in pieces for worker in range(ledger.config.workers)]
        (first,) = self.seen(variable, [self._initial[variable]])
        return {cell: value for cell, value in zip(cells, self.values(variable, cells)) if value != first}

    def seen(self, variable: str, values: list[Any]) -> list[Any]:
        return values if variable != "report" else [value != REPORT["NONE"].value for value in values]

    def told(self, variable: str, value: Any) -> str | None:
        return ("reported" if value else "not reported") if variable == "report" else None

    def known(self, _: str, cells: list[CellKey]) -> list[CellKey]:
        return cells

    def named_by(self, event: OffloadingEvent) -> Mapping[str, Sequence[CellKey]]:
        match event:
            case ev.BlocksTouched():
                return {"block": listed(unpack(event.slots))}
            case ev.FlushRequested():
                return {"transfer": [(transfer, 0) for transfer in event.transfers]}
            case ev.ReportRejected():
                return {"transfer": [(event.transfer, 0)]}
            case ev.BlocksOffered():
                return {"request": [name for name, _, _ in event.offers]}
        return {}

    def heard(self, event: OffloadingEvent) -> None:
        """The ledger keeps all that is needed."""

    def noted(self) -> None:
        return None

    def resume(self, noted: None) -> None:
        """Nothing was noted."""

    def begin(self, shadow: Shadow) -> None:
        for name, who in REQUEST_KEEPERS.items():
            if who is Keeper.LEDGER and name != "report":
                shadow.put(name, self.every(name).items())
        ledger = self._ledger
        for id, one in ledger.transfers.items():
            failed = TRANSFER_WORDS.decode(one.word)[1][1]
            for worker in range(ledger.config.workers):
                if one.reported >> worker & 1:
                    failed -= 1
                    value = REPORT["BAD" if failed >= 0 else "GOOD"].value
                    shadow.put("report", [((piece, worker), value) for piece in pieces_of(ledger, id)])
        shadow.put("expects", [(load, 1) for load in self.every("load").values()])
        for cells in shadow.cells.values():
            cells.touched.clear()

    def _of_request(self, variable: str, record: RequestRecord | None) -> Any:
        if record is None:
            return self._initial[variable]
        match variable:
            case "known":
                return 1
            case "request":
                return self._words["request"][record.word]
            case "awaits":
                return (record.awaits, 0) if record.state is DEFERRED else None
            case "load":
                return (record.load, 0) if record.load else None
        if record.patience < 0:
            return PATIENCE["NONE"].value
        return PATIENCE["WAITS" if record.patience > self._ledger.tick else "SPENT"].value

    def _of_hold(self, variable: str, whose: str | int, place: int) -> Any:
        ledger = self._ledger
        request = ledger.requests.get(whose) if isinstance(whose, str) else None
        if request is not None and len(request.pins):
            if place >= len(request.pins):
                return self._initial[variable]
            slot = int(request.pins[place])
            live = ledger.generation[slot] <= request.pinned_at and ledger.readable(slot)
            return {"hold_slot": slot, "hold_request": whose, "hold_transfer": None, "void": int(not live)}[
                variable
            ]
        id = whose if isinstance(whose, int) else request.load if request is not None else 0
        transfer: TransferRecord | None = ledger.transfers.get(id)
        if transfer is None or place >= len(transfer.slots):
            return self._initial[variable]
        piece = (id, place if isinstance(whose, int) else 0)
        slot = int(transfer.slots[place])
        return {"hold_slot": slot, "hold_request": None, "hold_transfer": piece, "void": 0}[variable]

    def _of_transfer(self, variable: str, cell: CellKey) -> Any:
        (id, _), worker = cell if variable == "report" else (cell, 0)
        record = self._ledger.transfers.get(id)
        if record is None:
            return self.seen(variable, [self._initial[variable]])[0]
        match variable:
            case "report":
                return bool(record.reported >> worker & 1)
            case "direction":
                return DIRECTION[record.direction.name].value
            case "load_request":
                return record.owners[0][0] if record.direction is Direction.LOAD else None
        return self._words["transfer"][record.word]
