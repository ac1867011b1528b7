"""Where the offload protocol's variables are found, and how to read them from a real ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvsm import events as ev
from kvsm.check.conformance.cells import CellKey, MachineWord, MachineWords, Member
from kvsm.check.conformance.offload_steps import (
    STEPS,
    UnnamedBlock,
    load_targets,
    slot_members,
)
from kvsm.check.conformance.shadow import CannotFollow, Conformance, Keeper, LedgerBooks, Shadow
from kvsm.check.protocol.offload_protocol import offload_protocol
from kvsm.check.protocol.offload_state import DIRECTION, READABLE, REPORT
from kvsm.check.protocol.scope import ProtocolScope
from kvsm.core.ledger import Ledger
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.ids import listed, render_key, unpack
from kvsm.states import MACHINES, Machine
from kvsm.states.block import BLOCK_WORDS, BlockState
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.transfer import ABANDONED, TRANSFER_WORDS
from kvsm.states.words import Codec
from kvsm.system.printable import printable

KEEPERS: dict[str, Keeper] = {
    "key": Keeper.TOLD,
    "kernel": Keeper.ENGINE,
    "kernel_key": Keeper.ENGINE,
    "content": Keeper.MEMORY,
    "lease": Keeper.LEDGER,
    "stray_device": Keeper.MEMORY,
    "direction": Keeper.LEDGER,
    "transfer": Keeper.LEDGER,
    "report": Keeper.LEDGER,
    "copy_transfer": Keeper.LEDGER,
    "copy_device": Keeper.LEDGER,
    "copy_slot": Keeper.LEDGER,
    "instant": Keeper.MEMORY,
    "in_flight": Keeper.MEMORY,
    "block": Keeper.LEDGER,
    "slot_key": Keeper.LEDGER,
    "slot_content": Keeper.MEMORY,
    "old": Keeper.LEDGER,
    "stray_slot": Keeper.MEMORY,
    "match_slot": Keeper.LEDGER,
    "logged": Keeper.DISK,
    "logged_old": Keeper.DISK,
}
"""Every variable of the declaration."""

_QUEUED = "the engine's: the log does not tell which kernels it queues"
_COPIES = "a worker's: the log tells of a copy when it is reported"
_STRAYS = "a lost worker's: nobody hears of it"
_CRASHES = "a restart is both of them at once, on the whole state (`OffloadBooks.restart`)"

UNSEEN: dict[str, str] = {
    "attend": _QUEUED,
    "run": _QUEUED,
    "start": _COPIES,
    "read_device": _COPIES,
    "read_slot": _COPIES,
    "write_slot": _COPIES,
    "write_device": _COPIES,
    "stray_slot_write": _STRAYS,
    "stray_device_write": _STRAYS,
    "write_log": _CRASHES,
    "crash": _CRASHES,
}
"""Every action that no event records -> which component performs it."""

_UNUSED = (BlockState.FREE, BlockState.EVICTED)
_NO_EPOCH = (*_UNUSED, BlockState.RETIRED)


def offload_conformance(config: OffloadConfig, machines: Mapping[str, Machine] = MACHINES) -> Conformance:
    """Return how a log with this configuration relates to the offload protocol."""
    declared = offload_protocol(ProtocolScope(workers=config.workers, crashes=True), machines=machines)
    members: dict[str, Sequence[Member]] = {
        "worker": range(config.workers),
        "slot": slot_members(tuple(range(config.host_blocks)), config.blocks_per_chunk),
        "device block": range(config.device_blocks),
    }
    under = partial(offload_conformance, machines=machines)
    return Conformance(declared, KEEPERS, STEPS, UNSEEN, members, name_member, OffloadBooks, under)


def name_member(kind: str, member: Any) -> str:
    """A member of an index set for people: `slot 3`, `copy 2 of transfer 81`."""
    if isinstance(member, UnnamedBlock):
        return f"a device block without a number, for copy {member.place} of transfer {member.transfer}"
    if kind == "copy":
        return f"copy {member[1]} of transfer {member[0]}"
    if kind == "match":
        return f"match {member[1]} of request {printable(member[0])}"
    key, *place = member if isinstance(member, tuple) else (member,)
    said = f"{kind} {render_key(key) if isinstance(key, bytes) else key}"
    return f"{said}, place {place[0]} in the chunk" if place else said


def readable_slots(shadow: Shadow) -> list[CellKey]:
    """The slots of a shadow that can be read."""
    words = shadow.cells["block"].values
    return [slot for slot, word in words.items() if BlockState(word.state) in READABLE]


def only_stored(shadow: Shadow, slots: Sequence[CellKey]) -> None:
    """Make these slots STORED, and everything else initial."""
    words = shadow.cells["block"].words
    assert words is not None
    shadow.forget_all()
    stored = words.word(BlockState.STORED, (0, 0))
    shadow.put("block", [(slot, stored) for slot in slots])


class WordReading(dict[int, MachineWord]):
    """A word of the ledger -> the word of the protocol that means the same.

    A slot that was used and one that never was differ only in the name of their state, so the declaration
    forgets the difference.
    """

    def __init__(self, codec: Codec, words: MachineWords) -> None:
        super().__init__()
        self._codec, self._words = codec, words

    def __missing__(self, word: int) -> MachineWord:
        state, counts = self._codec.decode(word)
        if self._codec is BLOCK_WORDS and state == BlockState.EVICTED and not any(counts):
            state = BlockState.FREE
        self[word] = found = self._words.word(int(state), counts)
        return found


class OffloadBooks(LedgerBooks):
    """Reads the protocol's variables from a ledger."""

    def __init__(self, ledger: Ledger, shadow: Shadow) -> None:
        self._ledger, self._chunk = ledger, ledger.config.blocks_per_chunk
        self._initial = {name: one.initial for name, one in shadow.cells.items()}
        self._words = {
            name: WordReading(codec, words)
            for name, codec in (("block", BLOCK_WORDS), ("lease", LEASE_WORDS), ("transfer", TRANSFER_WORDS))
            if (words := shadow.cells[name].words) is not None
        }
        self._parts: dict[int, Sequence[int]] = {}
        """Load -> the parts that it copies, while it is live."""
        abandoned = (id for id, one in ledger.transfers.items() if one.state is ABANDONED)
        self._reset_at = max(abandoned, default=0)
        """No block from before the last reset has a larger generation; one from after it has."""

    def restart(self, shadow: Shadow) -> None:
        """Take `write_log` and then `crash`: a slot that can be read stays, with its key."""
        key = shadow.cells["slot_key"].get
        keys = [(slot, key(slot)) for slot in readable_slots(shadow)]
        only_stored(shadow, [slot for slot, _ in keys])
        shadow.put("slot_key", keys)

    def noted(self) -> tuple[dict[int, Sequence[int]], int]:
        return dict(self._parts), self._reset_at

    def resume(self, noted: tuple[dict[int, Sequence[int]], int]) -> None:
        parts, self._reset_at = noted
        self._parts = dict(parts)

    # What is read.

    def values(self, variable: str, cells: Sequence[CellKey]) -> list[Any]:
        match variable:
            case "block":
                reading, words = self._words["block"], self._ledger.blocks.words
                return [reading[words[slot]] for slot in self._slots(cells)]
            case "slot_key":
                return self._slot_keys(cells)
            case "old":
                return [self._is_old(slot) for slot in self._slots(cells)]
            case "lease":
                reading, words = self._words["lease"], self._ledger.leases.words
                return [reading[words[block]] for block in cells]
            case "match_slot":
                return self._matched(cells)
            case "copy_transfer" | "copy_device" | "copy_slot":
                return self._copies(variable, cells)
        return [self._of_transfer(variable, cell) for cell in cells]

    def every(self, variable: str) -> dict[CellKey, Any]:
        ledger = self._ledger
        cells: list[CellKey]
        match variable:
            case "block" | "slot_key" | "old":
                cells = list(slot_members(tuple(range(ledger.config.host_blocks)), self._chunk))
            case "lease":
                cells = list(range(ledger.config.device_blocks))
            case "match_slot":
                cells = [
                    (name, place)
                    for name, one in ledger.requests.items()
                    for place in range(len(one.pins) * self._chunk)
                ]
            case "copy_transfer" | "copy_device" | "copy_slot":
                cells = [
                    (id, place)
                    for id, one in ledger.transfers.items()
                    for place in range(len(one.slots) * self._chunk)
                ]
            case "report":
                cells = [(id, worker) for id in ledger.transfers for worker in range(ledger.config.workers)]
            case _:
                cells = list(ledger.transfers)
        (first,) = self.seen(variable, [self._initial[variable]])
        return {cell: value for cell, value in zip(cells, self.values(variable, cells)) if value != first}

    def seen(self, variable: str, values: list[Any]) -> list[Any]:
        if variable != "report":
            return values
        # The ledger keeps who has reported. How many reports were bad is in the transfer's word.
        return [value != REPORT["NONE"].value for value in values]

    def told(self, variable: str, value: Any) -> str | None:
        return ("reported" if value else "not reported") if variable == "report" else None

    def known(self, variable: str, cells: list[CellKey]) -> list[CellKey]:
        if variable != "lease":
            return cells
        return [cell for cell in cells if type(cell) is not UnnamedBlock]

    def named_by(self, event: OffloadingEvent) -> Mapping[str, Sequence[CellKey]]:
        match event:
            case ev.StepEnded() | ev.Ticked() | ev.BlocksOffered():
                return {}
            case ev.BlocksTouched():
                return {"block": slot_members(unpack(event.slots), self._chunk)}
            case ev.BlocksRewritten():
                return {"lease": listed(unpack(event.device_blocks))}
            case ev.FlushRequested():
                return {"transfer": event.transfers}
            case ev.ReportRejected() | ev.RequestDeferred():
                return {"transfer": (event.transfer,)}
        return {}

    def heard(self, event: OffloadingEvent) -> None:
        if type(event) is ev.CacheReset:
            self._reset_at = event.seq
        elif type(event) is ev.LoadPlanned and len(event.parts):
            self._parts = {id: parts for id, parts in self._parts.items() if id in self._ledger.transfers}
            self._parts[event.seq] = listed(unpack(event.parts))

    def begin(self, shadow: Shadow) -> None:
        ledger, shadows = self._ledger, shadow.cells
        for id, one in ledger.transfers.items():
            imported = bool(one.keys) and not len(one.device_blocks)
            if not imported and len(one.device_blocks) != len(one.slots) * self._chunk:
                raise CannotFollow(
                    f"here a state is taken from the head of a segment, and load {id} of parts of its slots "
                    "is in flight; the head does not tell which parts these are"
                )
        for name in shadows:
            if name not in ("report", "key"):
                shadow.put(name, self.every(name).items())
        for id, one in ledger.transfers.items():
            failed = TRANSFER_WORDS.decode(one.word)[1][1]
            for worker in range(ledger.config.workers):
                if one.reported >> worker & 1:
                    failed -= 1
                    value = REPORT["BAD" if failed >= 0 else "GOOD"].value
                    shadow.put("report", [((id, worker), value)])
        self._begin_keys(shadow)
        for cells in shadows.values():
            cells.touched.clear()

    def _begin_keys(self, shadow: Shadow) -> None:
        """Device blocks under a copy hold its key. Whatever else the engine holds, it frees when it must."""
        for id, one in self._ledger.transfers.items():
            places = range(len(one.slots) * self._chunk)
            copies = [(id, place) for place in places]
            blocks = self._copies("copy_device", copies)
            keys: Sequence[Any] = one.keys or self._ledger.keys_of(one.slots)
            if self._chunk > 1:
                keys = [(key, place) for key in keys for place in range(self._chunk)]
            shadow.put("key", zip(blocks, keys))

    # Slots.

    def _slots(self, cells: Sequence[CellKey]) -> Sequence[int]:
        return cells if self._chunk == 1 else [slot for slot, _ in cells]

    def _slot_keys(self, cells: Sequence[CellKey]) -> list[Any]:
        key_of, index = self._ledger.key_of, self._ledger.index
        keys = [key if index.get(key := key_of[slot]) == slot else None for slot in self._slots(cells)]
        if self._chunk == 1:
            return keys
        return [None if key is None else (key, place) for key, (_, place) in zip(keys, cells)]

    def _is_old(self, slot: int) -> int:
        state = self._words["block"][self._ledger.blocks.words[slot]].state
        return int(state not in _NO_EPOCH and self._ledger.generation[slot] <= self._reset_at)

    # Matches and transfers.

    def _matched(self, cells: Sequence[CellKey]) -> list[Any]:
        ledger, chunk = self._ledger, self._chunk
        found: list[Member | None] = []
        name: str | None = None
        pins: Sequence[int] = ()
        since = 0
        for request, place in cells:
            if request != name:
                name, record = request, ledger.requests.get(request)
                pins, since = ((), 0) if record is None else (listed(record.pins), record.pinned_at)
            held = False
            if place < len(pins) * chunk:
                slot = pins[place // chunk]
                held = ledger.generation[slot] <= since and ledger.readable(slot)
            found.append(None if not held else slot if chunk == 1 else (slot, place % chunk))
        return found

    def _copies(self, variable: str, cells: Sequence[CellKey]) -> list[Any]:
        found: list[Any] = []
        name: int | None = None
        values: Sequence[Any] = ()
        for transfer, place in cells:
            if transfer != name:
                name, values = transfer, self._copies_of(variable, transfer)
            found.append(values[place] if place < len(values) else None)
        return found

    def _copies_of(self, variable: str, transfer: int) -> Sequence[Any]:
        """The values of a variable for all copies of a transfer."""
        record = self._ledger.transfers.get(transfer)
        if record is None:
            return ()
        slots = slot_members(record.slots, self._chunk)
        if variable == "copy_slot":
            return slots
        if variable == "copy_transfer":
            return (transfer,) * len(slots)
        if not len(record.device_blocks):
            return [UnnamedBlock(transfer, place) for place in range(len(slots))]
        return load_targets(transfer, len(slots), listed(record.device_blocks), self._parts.get(transfer, ()))

    def _of_transfer(self, variable: str, cell: CellKey) -> Any:
        transfer, worker = cell if variable == "report" else (cell, 0)
        record = self._ledger.transfers.get(transfer)
        if record is None:
            return self.seen(variable, [self._initial[variable]])[0]
        if variable == "report":
            return bool(record.reported >> worker & 1)
        if variable == "direction":
            return DIRECTION[record.direction.name].value
        return self._words["transfer"][record.word]
