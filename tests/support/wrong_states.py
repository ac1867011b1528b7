"""States of a ledger with one wrong cell, for tests of the checks: each field of a snapshot, one at a time.

`CHANGES` is made from the fields of a snapshot and of its records. So it will also change a field that is
added later, and a check that does not compare this field is found.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import fields

from kvsm.core.ledger import Ledger, RequestRecord, TransferRecord
from kvsm.core.ledger.snapshot import SavedLedger, restore, snapshot
from kvsm.events import Direction
from kvsm.states.block import BLOCK_WORDS
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.request import DEFERRED, REQUEST_WORDS
from kvsm.states.transfer import TRANSFER_WORDS
from kvsm.states.words import STATE_MASK, Codec

Change = Callable[[SavedLedger, Random], "SavedLedger | None"]
"""Returns the state with one wrong cell; None if the state has no such cell."""

NOT_CHANGED = {
    "config": "it is compared with each head, and no event changes it but a restart",
    "seq": "an event with another number is refused",
    "kept": "it names pools of processes, and no event changes it",
    "policy": "it is the policy's own state; invariants ask it for each slot",
}
"""Fields of a snapshot without a change here, and why."""
_NOT_BELOW = ("forgotten_at",)
"""Numbers of the last event of a kind. They may be too high: then a block is only offered once more."""
_LIVE: dict[str, Callable[[Any], bool]] = {
    "transfers.owners": lambda record: record[1] == Direction.LOAD,
    "requests.pinned_at": lambda record: len(record[2]) > 0,
    "requests.awaits": lambda record: record[1] & STATE_MASK == DEFERRED,
}
"""In which records a field is read: owners of stores are for people, the others for a match or a wait."""
_WORDS = {"blocks": BLOCK_WORDS, "leases": LEASE_WORDS}
_RECORD_WORDS = {"transfers": TRANSFER_WORDS, "requests": REQUEST_WORDS}
_RECORDS = {"transfers": TransferRecord, "requests": RequestRecord}


def _changes() -> dict[str, Change]:
    made: dict[str, Change] = {}
    for name in [field.name for field in fields(SavedLedger) if field.name not in NOT_CHANGED]:
        if name in _RECORDS:
            for place, field in enumerate(fields(_RECORDS[name])):
                made[f"{name}.{field.name}"] = _field_of_record(name, place, field.name)
        elif name in _WORDS:
            made[name] = _word(name, _WORDS[name])
        else:
            made[name] = _whole(name)
    return made


def _whole(name: str) -> Change:
    def change(state: SavedLedger, random: Random) -> SavedLedger | None:
        value = getattr(state, name)
        other = (value - 1 if value else None) if name in _NOT_BELOW else other_value(value, random)
        return None if other is None else msgspec.structs.replace(state, **{name: other})

    return change


def _word(name: str, codec: Codec) -> Change:
    def change(state: SavedLedger, random: Random) -> SavedLedger | None:
        words = np.frombuffer(getattr(state, name), np.int32).copy()
        place = random.randrange(len(words))
        words[place] = _other_word(codec, int(words[place]), random)
        return msgspec.structs.replace(state, **{name: words.tobytes()})

    return change


def _other_word(codec: Codec, word: int, random: Random) -> int:
    """Return another word: another state with the same counters, or another counter."""
    state, counts = codec.decode(word)
    if counts and random.random() < 0.5:
        place = random.randrange(len(counts))
        step = -1 if counts[place] and random.random() < 0.5 else 1
        return codec.encode(state, (*counts[:place], counts[place] + step, *counts[place + 1 :]))
    return codec.encode(random.choice([one for one in codec.machine.states if int(one) != state]), counts)


def _field_of_record(name: str, place: int, field: str) -> Change:
    def change(state: SavedLedger, random: Random) -> SavedLedger | None:
        records, is_live = list(getattr(state, name)), _LIVE.get(f"{name}.{field}", bool)
        live = [number for number, record in enumerate(records) if is_live(record)]
        if not live:
            return None
        number = random.choice(live)
        record = list(records[number])
        other = (
            _other_word(_RECORD_WORDS[name], record[place], random)
            if field == "word"
            else other_value(record[place], random)
        )
        if other is None:
            return None
        record[place] = other
        records[number] = tuple(record)
        return msgspec.structs.replace(state, **{name: tuple(records)})

    return change


def other_value(value: Any, random: Random) -> Any:
    """Return a value of the same type that differs in one place; None if there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return type(value)(1 - value) if type(value) is not int else value + random.choice((1, -1))
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, bytes):
        return _other_bytes(value, random)
    if isinstance(value, tuple) and value:
        place = random.randrange(len(value))
        if isinstance(value[place], tuple) and random.random() < 0.3:
            return value[:place] + value[place + 1 :]
        other = other_value(value[place], random)
        return None if other is None else (*value[:place], other, *value[place + 1 :])
    return None


def _other_bytes(value: bytes, random: Random) -> bytes | None:
    if not value:
        return None
    place = random.randrange(len(value))
    return value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]


def put(ledger: Ledger, state: SavedLedger) -> None:
    """Give this state to a ledger of the Python body."""
    wrong = restore(msgspec.msgpack.encode(state))
    ledger.__dict__.update({name: value for name, value in vars(wrong).items() if name != "listener"})


def saved(ledger: Ledger) -> SavedLedger:
    return msgspec.msgpack.decode(snapshot(ledger), type=SavedLedger)


CHANGES = _changes()
"""The name of each field -> a change of one of its cells."""
