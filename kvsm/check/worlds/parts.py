"""The ledger, the offload core and the scheduler as parts of a serving world.

They know nothing of worlds: what of their fields is saved and compared is declared here. The scheduler's
decision state declares it itself, in its structs. Importing this file fails if a class has other fields than
are declared.

Event numbers are compared with each other alone, and a later event has a larger number than all that there
are. So a number is not kept, but what each comparison with it comes to. Steps, the epoch, the owners of a
store and who asked for a flush are data for people.
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
from kvsm.core.scheduler.offers import StoreOffers
from kvsm.events import Direction
from kvsm.ids import listed
from kvsm.states.block import EVICTED_WORD, FIRST_INDEXED, LAST_INDEXED, BlockState
from kvsm.states.request import RequestState
from kvsm.states.words import STATE_MASK

_UNUSED = frozenset({int(BlockState.FREE), EVICTED_WORD})
_PEOPLE = Dropped("data for people")
_NUMBER = Dropped("an event number: compared where it is asked")

# Transfers and requests.


def _owner(one: TransferRecord, names: Names) -> int:
    """The request of a load. A store belongs to nobody: its owners are data for people."""
    return names.requests[one.owners[0][0]] if one.direction is Direction.LOAD else NOBODY


def _ticks_waited(one: TransferRecord, names: Names) -> int:
    """Only how many ticks are left until the transfer is lost is asked."""
    most = names.ledger.config.transfer_ticks
    return min(most, names.ledger.tick - one.since) if most else 0


def _pins(one: RequestRecord, names: Names) -> list[int]:
    """A pin that does not hold any more is nobody's."""
    if not len(one.pins):
        return []
    live = set(listed(names.ledger.live_pins(one)))
    return [names.slots[slot] if slot in live else NOBODY for slot in listed(one.pins)]


def _parents(one: TransferRecord, names: Names) -> list[tuple[int, int]]:
    """A parent whose block has gone is nobody."""
    ledger = names.ledger
    return [
        (place, NOBODY if slot is None or ledger.generation[slot] > one.id else names.slots[slot])
        for place, slot in one.parents
    ]


def _awaits(one: RequestRecord, names: Names) -> int:
    """It is asked of a DEFERRED request alone."""
    deferred = one.word & STATE_MASK == RequestState.DEFERRED
    return names.transfers.get(one.awaits, NOBODY) if deferred else NOBODY


def _patience(one: RequestRecord, names: Names) -> int:
    """How many ticks are left."""
    return max(0, one.patience - names.ledger.tick) if one.patience >= 0 else NOBODY


declare(
    TransferRecord,
    # Ids are only compared for equality, and the ledger keeps transfers in the order of their plans. A report
    # of a transfer that is over is refused, whichever transfer it was.
    id=Dropped("a transfer is named by its place among the live ones"),
    direction=Dropped("the owner of a store is nobody"),
    owners=Seen(_owner),
    slots=Seen(lambda one, names: [names.slots[slot] for slot in listed(one.slots)]),
    device_blocks=Seen(lambda one, names: [names.blocks[block] for block in listed(one.device_blocks)]),
    keys=Dropped("the keys of its slots; after a reset nobody asks for them"),
    word=KEPT,
    epoch=_PEOPLE,
    since=Seen(_ticks_waited),
    reported=Seen(lambda one, names: names.of_each_worker(one.reported)),
    flush=_PEOPLE,
    parents=Seen(_parents),
)
declare(
    RequestRecord,
    name=Dropped("a request is named by its place among all requests"),
    word=KEPT,
    pins=Seen(_pins),
    pinned_at=Dropped("an event number: only whether a pin still holds is asked"),
    awaits=Seen(_awaits),
    patience=Seen(_patience),
    load=Seen(lambda one, _: one.load > 0),
    settled=KEPT,
    offered=KEPT,
    target=KEPT,
)

# The ledger.


def _block_words(ledger: Ledger, names: Names) -> list[int]:
    """All slots without content are alike."""
    words = ledger.blocks.words
    return [0 if words[slot] & STATE_MASK in _UNUSED else words[slot] for slot in names.slots]


def _keys(ledger: Ledger, names: Names) -> list[Any]:
    """Left out: the key of a slot that the index does not name."""
    words, key_of = ledger.blocks.words, ledger.key_of
    return [
        key_of[slot] if FIRST_INDEXED <= words[slot] & STATE_MASK <= LAST_INDEXED else None
        for slot in names.slots
    ]


def lru_order(ledger: Ledger) -> Iterable[int] | None:
    """The idle slots under LRU, whose state is nothing but this order. None under other policies: they may
    look at a slot's number."""
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
    tick=Dropped("how many ticks are left is compared"),
    epoch=_PEOPLE,
    voided_at=_NUMBER,
    ended_at=_NUMBER,
    forgotten_at=_NUMBER,
    life=_PEOPLE,
    kept=FIXED,
    weights=KEPT,
    blocks=Seen(_block_words),
    leases=Seen(lambda ledger, names: [ledger.leases.words[block] for block in names.blocks]),
    generation=Dropped("event numbers: only whether a pin still holds is asked"),
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

# The offload core, the scheduler side, and what is told.

_WARNS = "it decides when people are warned, and nothing else"

declare(
    Offloader,
    config=FIXED,
    publisher=PART,
    ledger=PART,
    log=PART,
    step=_PEOPLE,
    evicting=Fixed("a world that is loaded puts in its own"),
    using=Fixed("the same"),
    _clock_ns=FIXED,
    _poisoned=Dropped("whatever poisons a core ends the exploration"),
    _drivers=Fixed("one thread explores"),
    _may_change=Dropped("one thread explores, and whatever poisons a core ends the exploration"),
    _flushed_seq=Dropped("it decides when the log is flushed, and nothing else"),
    _flush_within_ns=Dropped("an option of the same"),
    _flush_by_ns=Dropped("the same"),
    last_keys=Dropped("`prepare_store` alone reads it, and no world stores with that"),
    until_look=Dropped(_WARNS),
    looked_at=Dropped(_WARNS),
    warned_of=Dropped(_WARNS),
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
    below=FIXED,  # None: a serving world has one tier
    _layout=FIXED,
    _countable=Dropped("a check of the engine; nothing is decided by it"),
)
declare(
    StoreOffers,
    state=STATE,
    _offloader=PART,
    _config=FIXED,
    _device_blocks=PART,
    _blocks_per_chunk=FIXED,
    _has_drafter=FIXED,
)
declare(DeviceBlocks, pool=PART, state=STATE, _offloader=PART, _null_block=FIXED)
declare(FreeQueueWalk, state=STATE, _offloader=PART, _pool=PART, _target=FIXED)
declare(Publisher, medium=FIXED, state=STATE)
declare(MemoryLog)
