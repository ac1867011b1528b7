"""Declare which fields of the ledger, the offload core and the scheduler a serving world saves and compares.

These classes do not depend on worlds, so the declarations are here. Only the scheduler's decision state
declares its own fields, in its structs. Importing this file fails if a class has other fields than are
declared.

Event numbers are only compared with each other, and each new event gets a number above all existing ones. So
a fingerprint contains not the number, but the result of each comparison that the code makes with it. Steps,
the epoch, the owners of a store and who asked for a flush are data for people: no decision reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvsm.core.kv_events import Publisher
from kvsm.core.ledger import (
    Ledger,
    NativeLedger,
    OfferHistory,
    Provenance,
    RequestRecord,
    TransferRecord,
    index_made_again,
)
from kvsm.core.ledger.canonical import (
    FIXED,
    KEPT,
    NOBODY,
    PART,
    STATE,
    Dropped,
    Fixed,
    Names,
    Remade,
    Seen,
    declare,
    declare_alike,
    each_compared,
    filled,
)
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import NativeOffloader, Offloader
from kvsm.core.policies.lru import LRUPolicy
from kvsm.core.scheduler import CheckedScheduler
from kvsm.core.scheduler.device_blocks import DeviceBlocks
from kvsm.core.scheduler.free_queue import FreeQueueWalk
from kvsm.core.scheduler.offers import NativeStoreOffers, StoreOffers
from kvsm.events import Direction
from kvsm.ids import listed
from kvsm.states.block import EVICTED_WORD, FIRST_INDEXED, LAST_INDEXED, BlockState
from kvsm.states.request import RequestState
from kvsm.states.words import STATE_MASK

_UNUSED = frozenset({int(BlockState.FREE), EVICTED_WORD})
_PEOPLE = Dropped("data for people")
_NUMBER = Dropped("an event number: only results of comparisons with it matter")

# Transfers and requests.


def _owner(transfer: TransferRecord, names: Names) -> int:
    """The request of a load. NOBODY for a store: its owners are data for people."""
    return names.requests[transfer.owners[0][0]] if transfer.direction is Direction.LOAD else NOBODY


def _ticks_waited(transfer: TransferRecord, names: Names) -> int:
    """Ticks since it was submitted, up to the bound at which it is lost; 0 without a bound."""
    most = names.ledger.config.transfer_ticks
    return min(most, names.ledger.tick - transfer.since) if most else 0


def _pins(request: RequestRecord, names: Names) -> list[int]:
    """The pinned slots; NOBODY for a pin that no longer holds."""
    if not len(request.pins):
        return []
    live = set(listed(names.ledger.live_pins(request)))
    return [names.slots[slot] if slot in live else NOBODY for slot in listed(request.pins)]


def _parents(transfer: TransferRecord, names: Names) -> list[tuple[int, int]]:
    """(place, slot of the parent block); NOBODY for a parent block that has left its slot."""
    ledger = names.ledger
    return [
        (place, NOBODY if slot is None or ledger.generation[slot] > transfer.id else names.slots[slot])
        for place, slot in transfer.parents
    ]


def _awaits(request: RequestRecord, names: Names) -> int:
    """The transfer that a DEFERRED request waits for. In other states no code reads the field."""
    deferred = request.word & STATE_MASK == RequestState.DEFERRED
    return names.transfers.get(request.awaits, NOBODY) if deferred else NOBODY


def _patience(request: RequestRecord, names: Names) -> int:
    """Ticks that the request may still wait; NOBODY if it has not begun to wait."""
    return max(0, request.patience - names.ledger.tick) if request.patience >= 0 else NOBODY


declare(
    TransferRecord,
    # Ids are only compared for equality, and the ledger keeps transfers in the order of their plans. A report
    # on an ended transfer is rejected, whatever its id.
    id=Dropped("a transfer is named by its place among the live ones"),
    direction=Dropped("`owners` is NOBODY exactly for a store"),
    owners=Seen(_owner),
    slots=Seen(lambda record, names: [names.slots[slot] for slot in listed(record.slots)]),
    device_blocks=Seen(lambda record, names: [names.blocks[block] for block in listed(record.device_blocks)]),
    keys=Dropped("the keys of its slots; after a reset no code reads them"),
    word=KEPT,
    epoch=_PEOPLE,
    since=Seen(_ticks_waited),
    reported=Seen(lambda record, names: names.of_each_worker(record.reported)),
    flush=_PEOPLE,
    parents=Seen(_parents),
)
declare(
    RequestRecord,
    name=Dropped("a request is named by its place among all requests"),
    word=KEPT,
    pins=Seen(_pins),
    pinned_at=Dropped("an event number: only whether a pin still holds matters"),
    awaits=Seen(_awaits),
    patience=Seen(_patience),
    load=Seen(lambda record, _: record.load > 0),
    settled=KEPT,
    offered=KEPT,
    target=KEPT,
)

# The ledger.


def _block_words(ledger: Ledger, names: Names) -> list[int]:
    """The word of each slot; 0 for each slot without content, because such slots are interchangeable."""
    words = ledger.blocks.words
    return [0 if words[slot] & STATE_MASK in _UNUSED else words[slot] for slot in names.slots]


def _keys(ledger: Ledger, names: Names) -> list[Any]:
    """The key of each slot; None for a slot that the index does not name."""
    words, key_of = ledger.blocks.words, ledger.key_of
    return [
        key_of[slot] if FIRST_INDEXED <= words[slot] & STATE_MASK <= LAST_INDEXED else None
        for slot in names.slots
    ]


def lru_order(ledger: Ledger) -> Iterable[int] | None:
    """The idle slots in eviction order under LRU, which has no other state.

    None under other policies: they may decide by the slot's number.
    """
    return ledger.policy._queue if type(ledger.policy) is LRUPolicy else None


def _idle(ledger: Ledger, names: Names) -> Any:
    order = lru_order(ledger)
    return ledger.policy.snapshot() if order is None else [names.slots[slot] for slot in order]


def _provenance(ledger: Ledger, names: Names) -> list[Any]:
    brought, stale = ledger.provenance.brought, ledger.provenance.stale
    if not (brought or stale):
        return []
    return [(brought.get(block), stale.get(block)) for block in names.blocks]


declare(Provenance, brought=KEPT, stale=KEPT)
declare(OfferHistory, limit=FIXED, times=KEPT)
declare(
    Ledger,
    config=FIXED,
    listener=PART,
    seq=_NUMBER,
    step=_PEOPLE,
    tick=Dropped("only the ticks left to each bound matter, and those are compared"),
    epoch=_PEOPLE,
    voided_at=_NUMBER,
    ended_at=_NUMBER,
    forgotten_at=_NUMBER,
    life=_PEOPLE,
    kept=FIXED,
    weights=KEPT,
    times=KEPT,
    declined_hits=KEPT,
    blocks=Seen(_block_words),
    leases=Seen(lambda ledger, names: [ledger.leases.words[block] for block in names.blocks]),
    generation=Dropped("event numbers: only whether a pin still holds matters"),
    generation_view=Remade(lambda ledger: np.frombuffer(ledger.generation, dtype=np.int64), "`generation`"),
    key_of=Seen(_keys),
    index=Dropped("it follows from `key_of` and `blocks`"),
    free=filled(lambda ledger, names: [names.slots[slot] for slot in ledger.free]),
    policy=Seen(_idle),
    copied_out=Dropped("it follows from the requests and transfers that have a target"),
    transfers=filled(lambda ledger, names: each_compared(ledger.transfers.values(), names)),
    planned_word=FIXED,
    requests=Seen(lambda ledger, names: each_compared(map(ledger.requests.get, names.requests), names)),
    deferred=Dropped("the requests whose word says DEFERRED"),
    provenance=Seen(_provenance),
    offers=Seen(lambda ledger, _: list(ledger.offers.times.items())),
)
declare_alike(NativeLedger, Ledger, index=Remade(index_made_again, "`key_of` and `blocks`"))

# The offload core, the scheduler side, the log and the publisher.

_WARNS = "it only decides when a warning is logged"

declare(
    Offloader,
    config=FIXED,
    publisher=PART,
    ledger=PART,
    log=PART,
    step=_PEOPLE,
    evicting=Fixed("a callback: a world that is loaded sets its own"),
    using=Fixed("a callback: a world that is loaded sets its own"),
    _clock_ns=FIXED,
    _poisoned=Dropped("an error that poisons a core ends the exploration"),
    _drivers=Fixed("one thread explores"),
    _may_change=Dropped("one thread explores, and an error that poisons a core ends the exploration"),
    _flushed_seq=Dropped("it only decides when the log is flushed"),
    _flush_within_ns=Dropped("it only decides when the log is flushed"),
    _flush_by_ns=Dropped("it only decides when the log is flushed"),
    last_keys=Dropped("only `prepare_store` reads it, and no world calls that"),
    until_look=Dropped(_WARNS),
    looked_at=Dropped(_WARNS),
    warned_of=Dropped(_WARNS),
    warned_reports=Dropped(_WARNS),
)
declare_alike(NativeOffloader, Offloader)
declare(
    CheckedScheduler,
    offloader=PART,
    config=FIXED,
    device_blocks=PART,
    offers=PART,
    walk=PART,
    state=STATE,
    _blocks_per_chunk=FIXED,
    _block_tokens=FIXED,
    _chunk_tokens=FIXED,
    _is_lazy=FIXED,
    _needs_first_key=FIXED,
    below=FIXED,  # None: a serving world has one tier
    _layout=FIXED,
    _countable=Dropped("a check of the engine's calls; no decision reads it"),
)
declare(
    StoreOffers,
    state=STATE,
    _offloader=PART,
    _config=FIXED,
    _device_blocks=PART,
    _blocks_per_chunk=FIXED,
    _has_drafter=FIXED,
    _stores_early=FIXED,
)
declare_alike(NativeStoreOffers, StoreOffers)
declare(DeviceBlocks, pool=PART, state=STATE, _offloader=PART, _null_block=FIXED)
declare(FreeQueueWalk, state=STATE, _offloader=PART, _pool=PART, _target=FIXED)
declare(Publisher, medium=FIXED, state=STATE)
declare(MemoryLog)
