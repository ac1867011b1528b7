"""Wrong books: change one thing in a good ledger or log of a world, and require that the checks object.

A check that never objects looks like a check that always holds. So kvsm's own checks are tested here: the
invariants of a ledger, the check at rest, the second book, the fold, and the agreement of two tiers. Each
entry of `WRONG` has a change, the property that it breaks, and the checks that must see it. Each property
that a ledger or a log can show has an entry; `NOT_IN_BOOKS` gives the reason for each of the others.

The good books come from a walk, so each change is tried in many states. Only copies are changed; the world
itself continues undisturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from random import Random
from typing import NamedTuple

from kvsm import events as ev
from kvsm.check.worlds.audited import AuditedCore
from kvsm.check.worlds.world import Action, World
from kvsm.check.worlds.wrapped import WrappedWorld
from kvsm.core.ledger import Ledger, RequestRecord, TransferRecord
from kvsm.core.ledger.invariants import check_ledger, check_rest
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.errors import InvalidEvent, PropertyBroken
from kvsm.events import Direction, OffloadingEvent
from kvsm.explain.verify.witness import Witness
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.states.block import BLOCK_WORDS, BlockState
from kvsm.states.lease import LEASE_WORDS, LeaseState
from kvsm.states.request import REQUEST_WORDS, RequestState
from kvsm.states.transfer import TransferState
from kvsm.states.words import StateWords
from kvsm.tiers import DiskTier, disagreements

CHANGE_BOOKS: Action = ("wrong books",)
_SHARE = 0.05
"""The share of drawn actions that try all possible changes of the current books."""

STRANGER = b"a key of nobody" + bytes(4)


class Books(NamedTuple):
    """The input of a check.

    ledger: a changed copy of a good ledger.
    witness: the second book, unchanged, after the same events as the good ledger.
    """

    ledger: Ledger
    witness: Witness


Objection = Callable[[Books], "set[Property]"]
"""Returns the properties that a check reports as broken in these books."""


def _invariants(books: Books) -> set[Property]:
    return {violation.property for violation in check_ledger(books.ledger)}


def _rest(books: Books) -> set[Property]:
    return {violation.property for violation in check_rest(books.ledger)}


def _second_book(books: Books) -> set[Property]:
    return {violation.property for violation in books.witness.compare_all(books.ledger)}


INVARIANTS, REST, SECOND_BOOK = (
    ("the invariants", _invariants),
    ("the check at rest", _rest),
    ("the second book", _second_book),
)


class WrongLedger(NamedTuple):
    """A change that makes a ledger wrong.

    seen_by: the checks that must report `property`.
    change: makes the change; returns False if this ledger has nothing to change in this way.
    """

    property: Property
    says: str
    seen_by: tuple[tuple[str, Objection], ...]
    change: Callable[[Ledger], bool]


class WrongEvent(NamedTuple):
    """An event that must not follow a good log. make: returns the event; None if it cannot be made now."""

    property: Property
    says: str
    make: Callable[..., OffloadingEvent | None]
    takes_log: bool = False
    """Whether `make` takes the log as its second argument."""


# Look-ups and changes in a ledger.


def _slots_in(ledger: Ledger, *states: BlockState) -> Iterator[tuple[int, int, int]]:
    """Yield (slot, copies, pins) of the slots in these states."""
    for slot, word in enumerate(ledger.blocks.words):
        state, (copies, pins) = BLOCK_WORDS.decode(word)
        if state in states:
            yield slot, copies, pins


def _copies(ledger: Ledger, direction: Direction, *states: TransferState) -> Iterator[TransferRecord]:
    for transfer in ledger.transfers.values():
        if (
            transfer.direction is direction
            and transfer.state in (states or tuple(TransferState))
            and len(transfer.slots)
        ):
            yield transfer


def _idle_blocks(ledger: Ledger) -> list[int]:
    return [block for block, word in enumerate(ledger.leases.words) if word == LeaseState.NONE]


def _matched(ledger: Ledger) -> Iterator[RequestRecord]:
    return (request for request in ledger.requests.values() if len(request.pins))


def _write(words: StateWords, number: int, word: int) -> None:
    """Set one state word, and recount the states."""
    words.words[number] = word
    words.recount()


def _lease(ledger: Ledger, block: int, state: LeaseState, readers: int = 0) -> None:
    _write(ledger.leases, block, LEASE_WORDS.encode(state, (readers,)))


# Wrong ledgers.


def _free_slot_is_forgotten(ledger: Ledger) -> bool:
    free = to_list(ledger.free.first(1))
    ledger.free.remove(tuple(free))
    return bool(free)


def _key_is_forgotten(ledger: Ledger) -> bool:
    slot = next((slot for slot, _, _ in _slots_in(ledger, BlockState.STORED)), None)
    return slot is not None and ledger.index.pop(ledger.key_of[slot]) == slot


def _published_early(ledger: Ledger) -> bool:
    for slot, copies, pins in _slots_in(ledger, BlockState.STORING):
        _write(ledger.blocks, slot, BLOCK_WORDS.encode(BlockState.STORED, (copies, pins)))
        return True
    return False


def _lease_is_dropped(ledger: Ledger) -> bool:
    for transfer in ledger.transfers.values():
        for block in to_list(transfer.device_blocks)[:1]:
            _lease(ledger, block, LeaseState.NONE)
            return True
    return False


def _load_and_store_share_a_block(ledger: Ledger) -> bool:
    """Let a load write a block that a store reads.

    All state words fit; only the two transfers conflict.
    """
    load = next(_copies(ledger, Direction.LOAD), None)
    store = next(
        (transfer for transfer in _copies(ledger, Direction.STORE) if len(transfer.device_blocks)), None
    )
    if load is None or store is None or not len(load.device_blocks):
        return False
    blocks, shared = to_list(load.device_blocks), to_list(store.device_blocks)[0]
    _lease(ledger, blocks[0], LeaseState.NONE)
    load.device_blocks = (shared, *blocks[1:])
    _lease(ledger, shared, LeaseState.WRITING)
    return True


def _pin_too_many(ledger: Ledger) -> bool:
    for slot, _copies, pins in _slots_in(ledger, BlockState.STORED, BlockState.LOADING):
        if pins:
            _write(ledger.blocks, slot, ledger.blocks.words[slot] + BLOCK_WORDS.encode(0, (0, 1)))
            return True
    return False


def _copy_too_many(ledger: Ledger) -> bool:
    for slot, _copies, _pins in _slots_in(ledger, BlockState.LOADING, BlockState.STORING):
        _write(ledger.blocks, slot, ledger.blocks.words[slot] + BLOCK_WORDS.encode(0, (1, 0)))
        return True
    return False


def _leased_by_nobody(ledger: Ledger) -> bool:
    for block in _idle_blocks(ledger)[:1]:
        _lease(ledger, block, LeaseState.READING, 1)
        return True
    return False


def _leased_at_rest(ledger: Ledger) -> bool:
    return not ledger.requests and not ledger.transfers and _leased_by_nobody(ledger)


def _slot_left_at_rest(ledger: Ledger) -> bool:
    slot = next((slot for slot, _, _ in _slots_in(ledger, BlockState.STORED)), None)
    if slot is None or ledger.requests or ledger.transfers:
        return False
    _write(ledger.blocks, slot, BLOCK_WORDS.encode(BlockState.LOADING, (1, 0)))
    return True


def _report_is_invented(ledger: Ledger) -> bool:
    for transfer in ledger.transfers.values():
        left = [w for w in range(ledger.config.workers) if not transfer.reported >> w & 1]
        if transfer.state is TransferState.SUBMITTED and left:
            transfer.reported |= 1 << left[0]
            return True
    return False


def _pins_are_forgotten(ledger: Ledger) -> bool:
    for request in _matched(ledger):
        request.pins = ()
        return True
    return False


def _waits_for_nothing(ledger: Ledger) -> bool:
    for request in ledger.deferred.values():
        request.awaits = ledger.seq + 1
        return True
    return False


def _deferred_unlisted(ledger: Ledger) -> bool:
    for name in list(ledger.deferred):
        del ledger.deferred[name]
        return True
    return False


def _in_flight_since_another_tick(ledger: Ledger) -> bool:
    for transfer in ledger.transfers.values():
        if transfer.state is TransferState.SUBMITTED:
            transfer.since += 1
            return True
    return False


def _settled_unseen(ledger: Ledger) -> bool:
    for request in ledger.requests.values():
        if request.offered:
            request.settled = tuple(offered + 1 for offered in request.offered)
            return True
    return False


def _two_stores_of_a_block(ledger: Ledger) -> bool:
    stores = [transfer for transfer in _copies(ledger, Direction.STORE) if len(transfer.device_blocks)]
    if len(stores) < 2:
        return False
    blocks, shared = to_list(stores[1].device_blocks), to_list(stores[0].device_blocks)[0]
    _lease(ledger, blocks[0], LeaseState.NONE)
    stores[1].device_blocks = (shared, *blocks[1:])
    _lease(ledger, shared, LeaseState.READING, 2)
    return True


def _of_an_older_epoch(ledger: Ledger) -> bool:
    for transfer in ledger.transfers.values():
        if transfer.state is not TransferState.ABANDONED:
            transfer.epoch -= 1
            return True
    return False


def _given_up_too_early(ledger: Ledger) -> bool:
    for transfer in ledger.transfers.values():
        if transfer.state is TransferState.ABANDONED:
            transfer.epoch = ledger.epoch
            return True
    return False


def _old_counts_as_new(ledger: Ledger) -> bool:
    for block, key in list(ledger.provenance.stale.items()):
        del ledger.provenance.stale[block]
        ledger.provenance.brought[block] = key
        return True
    return False


def _finished_and_kept(ledger: Ledger) -> bool:
    for request in ledger.requests.values():
        if not request.load and not len(request.pins) and request.name not in ledger.deferred:
            request.word = REQUEST_WORDS.encode(RequestState.FINISHED)
            return True
    return False


def _of_another_generation(ledger: Ledger) -> bool:
    for slot, _, _ in _slots_in(ledger, BlockState.STORED):
        ledger.generation[slot] -= 1
        return True
    return False


def _waits_until_another_tick(ledger: Ledger) -> bool:
    for request in ledger.deferred.values():
        request.patience += 1
        return True
    return False


def _forgotten_before_its_end(ledger: Ledger) -> bool:
    for name, request in ledger.requests.items():
        if not request.load and not len(request.pins) and name not in ledger.deferred and not request.offered:
            del ledger.requests[name]
            return True
    return False


BOTH = (INVARIANTS, SECOND_BOOK)
WRONG_LEDGERS = (
    WrongLedger(Property.CONSERVATION, "a free slot is in no list", BOTH, _free_slot_is_forgotten),
    WrongLedger(Property.CONSERVATION, "the index has lost a stored key", (INVARIANTS,), _key_is_forgotten),
    WrongLedger(
        Property.EVENTS_ARE_STATE, "the index has lost a stored key", (SECOND_BOOK,), _key_is_forgotten
    ),
    WrongLedger(Property.PUBLISH_AFTER_COMMIT, "a slot can be read under its store", BOTH, _published_early),
    WrongLedger(
        Property.NO_REUSE_IN_FLIGHT, "a device block under a copy is not leased", BOTH, _lease_is_dropped
    ),
    WrongLedger(
        Property.NO_REUSE_IN_FLIGHT,
        "a load writes a device block that a store reads",
        (INVARIANTS,),
        _load_and_store_share_a_block,
    ),
    WrongLedger(Property.ONE_RELEASE_PER_HOLD, "a block counts a pin too many", BOTH, _pin_too_many),
    WrongLedger(Property.ONE_RELEASE_PER_HOLD, "a block counts a copy too many", BOTH, _copy_too_many),
    WrongLedger(
        Property.ONE_RELEASE_PER_HOLD, "a device block is leased by no copy", BOTH, _leased_by_nobody
    ),
    WrongLedger(Property.STALE_REPORTS, "a worker counts as reported", BOTH, _report_is_invented),
    WrongLedger(Property.MATCH_HOLDS, "a match has forgotten its pins", (INVARIANTS,), _pins_are_forgotten),
    WrongLedger(Property.PROGRESS, "a request waits for no transfer", (INVARIANTS,), _waits_for_nothing),
    WrongLedger(Property.PROGRESS, "nobody knows that a request waits", (INVARIANTS,), _deferred_unlisted),
    WrongLedger(Property.PROGRESS, "a finished request is kept", (INVARIANTS,), _finished_and_kept),
    WrongLedger(Property.PROGRESS, "at rest a device block is leased", (REST,), _leased_at_rest),
    WrongLedger(Property.PROGRESS, "at rest a copy reads a slot", (REST,), _slot_left_at_rest),
    WrongLedger(
        Property.PROGRESS,
        "a transfer is in flight since another tick",
        (SECOND_BOOK,),
        _in_flight_since_another_tick,
    ),
    WrongLedger(Property.STORED_ONCE, "a request has settled what it never offered", BOTH, _settled_unseen),
    WrongLedger(
        Property.STORED_ONCE,
        "two stores of a device block are in flight",
        (INVARIANTS,),
        _two_stores_of_a_block,
    ),
    WrongLedger(
        Property.NO_STALE_DATA,
        "a transfer of an older epoch is not abandoned",
        (INVARIANTS,),
        _of_an_older_epoch,
    ),
    WrongLedger(
        Property.NO_STALE_DATA, "a transfer of this epoch is abandoned", (INVARIANTS,), _given_up_too_early
    ),
    WrongLedger(
        Property.NO_STALE_DATA,
        "what a load of an older epoch brought counts as new",
        (SECOND_BOOK,),
        _old_counts_as_new,
    ),
    WrongLedger(
        Property.STALE_REPORTS,
        "a stored block is of another generation",
        (SECOND_BOOK,),
        _of_another_generation,
    ),
    WrongLedger(
        Property.PROGRESS,
        "a request may wait until another tick",
        (SECOND_BOOK,),
        _waits_until_another_tick,
    ),
    WrongLedger(
        Property.PROGRESS,
        "a request is forgotten before its end",
        (SECOND_BOOK,),
        _forgotten_before_its_end,
    ),
)


# Wrong events.


def _event(ledger: Ledger, kind: type[OffloadingEvent], *fields: object) -> OffloadingEvent:
    return kind(ledger.seq + 1, ledger.step, 0, *fields)


def _store(
    ledger: Ledger, device_blocks: Sequence[int], key: bytes = STRANGER, slot: int | None = None
) -> OffloadingEvent | None:
    """Return a plan that stores a chunk from these blocks; None without a free slot or a full chunk."""
    free = to_list(ledger.free.first(1))
    if (slot is None and not free) or len(device_blocks) != ledger.config.blocks_per_chunk:
        return None
    chosen = free[0] if slot is None else slot
    return _event(ledger, ev.StorePlanned, (), (key,), (chosen,), tuple(device_blocks))


def _chunk_with(ledger: Ledger, block: int) -> list[int]:
    """Return the blocks of a chunk that begins with this one.

    The others are idle and were not loaded into.
    """
    noted = {*ledger.provenance.brought, *ledger.provenance.stale, block}
    others = [other for other in _idle_blocks(ledger) if other not in noted]
    return [block, *others[: ledger.config.blocks_per_chunk - 1]]


def _evicts(ledger: Ledger, slots: Iterator[int]) -> OffloadingEvent | None:
    slot = next(slots, None)
    return None if slot is None else _event(ledger, ev.BlocksEvicted, (slot,), (), ledger.seq + 2)


def _evicts_pinned(ledger: Ledger) -> OffloadingEvent | None:
    return _evicts(ledger, (slot for slot, _, pins in _slots_in(ledger, BlockState.STORED) if pins))


def _evicts_under_copy(ledger: Ledger) -> OffloadingEvent | None:
    return _evicts(ledger, (slot for slot, _, _ in _slots_in(ledger, BlockState.LOADING, BlockState.STORING)))


def _evicts_nothing(ledger: Ledger) -> OffloadingEvent | None:
    return _evicts(ledger, (slot for slot, _, _ in _slots_in(ledger, BlockState.FREE, BlockState.EVICTED)))


def _stores_leased(ledger: Ledger, state: LeaseState) -> OffloadingEvent | None:
    for block in range(ledger.config.device_blocks):
        if ledger.leases.state(block) is state:
            return _store(ledger, _chunk_with(ledger, block))
    return None


def _stores_into(ledger: Ledger, *states: BlockState) -> OffloadingEvent | None:
    blocks = _idle_blocks(ledger)[: ledger.config.blocks_per_chunk]
    slot = next((slot for slot, _, _ in _slots_in(ledger, *states)), None)
    return None if slot is None else _store(ledger, blocks, slot=slot)


def _stores_again(ledger: Ledger) -> OffloadingEvent | None:
    key = next(iter(ledger.index), None)
    return (
        None if key is None else _store(ledger, _idle_blocks(ledger)[: ledger.config.blocks_per_chunk], key)
    )


def _stores_old(ledger: Ledger) -> OffloadingEvent | None:
    """Store a stale device block: under its own key if chunks have one block, else first in a chunk."""
    idle = _idle_blocks(ledger)
    for block, key in ledger.provenance.stale.items():
        if block in idle and (ledger.config.blocks_per_chunk > 1 or key not in ledger.index):
            is_single = ledger.config.blocks_per_chunk == 1
            return _store(ledger, _chunk_with(ledger, block), key if is_single else STRANGER)
    return None


def _loads(
    ledger: Ledger, request: RequestRecord, slots: Sequence[int], blocks: Sequence[int]
) -> OffloadingEvent | None:
    wanted = len(slots) * ledger.config.blocks_per_chunk
    if len(blocks) < wanted:
        return None
    return _event(ledger, ev.LoadPlanned, request.name, tuple(slots), tuple(blocks[:wanted]))


def _loads_void(ledger: Ledger) -> OffloadingEvent | None:
    for matched in _matched(ledger):
        if len(ledger.live_pins(matched)) < len(matched.pins):
            return _loads(ledger, matched, to_list(matched.pins), _idle_blocks(ledger))
    return None


def _loads_unmatched(ledger: Ledger) -> OffloadingEvent | None:
    slot = next((slot for slot, _, _ in _slots_in(ledger, BlockState.STORED)), None)
    for request in ledger.requests.values():
        if slot is not None and not len(request.pins) and not request.load:
            return _loads(ledger, request, [slot], _idle_blocks(ledger))
    return None


def _loads_into_leased(ledger: Ledger) -> OffloadingEvent | None:
    leased = [block for block in range(ledger.config.device_blocks) if ledger.leases.words[block]]
    for matched in _matched(ledger):
        if leased and len(ledger.live_pins(matched)) == len(matched.pins):
            return _loads(ledger, matched, to_list(matched.pins)[:1], [leased[0], *_idle_blocks(ledger)])
    return None


def _matches_unpublished(ledger: Ledger) -> OffloadingEvent | None:
    unused = (request.name for request in ledger.requests.values() if not len(request.pins))
    name, slot = next(unused, None), next((s for s, _, _ in _slots_in(ledger, BlockState.STORING)), None)
    return None if name is None or slot is None else _event(ledger, ev.HitMatched, name, (slot,))


def _matches_twice(ledger: Ledger) -> OffloadingEvent | None:
    for matched in _matched(ledger):
        if len(ledger.live_pins(matched)) == len(matched.pins):
            return _event(ledger, ev.HitMatched, matched.name, tuple(to_list(matched.pins)))
    return None


def _served_less(ledger: Ledger, kind: type[OffloadingEvent], *fields: object) -> OffloadingEvent | None:
    """Return an event of this kind for a new request; it ends with the key of a stored block as missing."""
    slot = next((slot for slot, _, _ in _slots_in(ledger, BlockState.STORED)), None)
    return None if slot is None else _event(ledger, kind, "stranger", *fields, ledger.key_of[slot])


def _serves_less(ledger: Ledger) -> OffloadingEvent | None:
    return _served_less(ledger, ev.HitMatched, ())


def _admits_less(ledger: Ledger) -> OffloadingEvent | None:
    return _served_less(ledger, ev.RequestAdmitted, 1, 0, 0)


def _serves_less_unnamed(ledger: Ledger) -> OffloadingEvent:
    return _event(ledger, ev.HitMatched, "stranger", (), None, 1, None, 0)


def _first_submitted(ledger: Ledger) -> TransferRecord | None:
    return next(
        (transfer for transfer in ledger.transfers.values() if transfer.state is TransferState.SUBMITTED),
        None,
    )


def _reports_twice(ledger: Ledger) -> OffloadingEvent | None:
    for transfer in ledger.transfers.values():
        for worker in range(ledger.config.workers):
            if transfer.reported >> worker & 1:
                return _event(ledger, ev.WorkerReported, transfer.id, worker, True)
    return None


def _submits_twice(ledger: Ledger) -> OffloadingEvent | None:
    transfer = _first_submitted(ledger)
    return None if transfer is None else _event(ledger, ev.TransfersSubmitted, (transfer.id,))


def _cancels_submitted(ledger: Ledger) -> OffloadingEvent | None:
    transfer = _first_submitted(ledger)
    return None if transfer is None else _event(ledger, ev.TransferCancelled, transfer.id)


def _loses_planned(ledger: Ledger) -> OffloadingEvent | None:
    planned = (transfer for transfer in ledger.transfers.values() if transfer.state is TransferState.PLANNED)
    transfer = next(planned, None)
    return None if transfer is None else _event(ledger, ev.TransferLost, transfer.id)


def _matches_failed(ledger: Ledger, log: Sequence[OffloadingEvent]) -> OffloadingEvent | None:
    """Match a slot whose store has just failed."""
    last = log[-1]
    if not isinstance(last, ev.WorkerReported) or last.good or last.transfer in ledger.transfers:
        return None
    if any(isinstance(event, ev.CacheReset) for event in log[last.transfer :]):
        return None  # A reset has voided the slot already.
    planned = log[last.transfer - 1]
    name = next((request.name for request in ledger.requests.values() if not len(request.pins)), None)
    if name is None or not isinstance(planned, ev.StorePlanned):
        return None
    return _event(ledger, ev.HitMatched, name, tuple(to_list(planned.slots)))


def _cursor_goes_back(ledger: Ledger) -> OffloadingEvent | None:
    for request in ledger.requests.values():
        if any(request.offered):
            nothing = (0,) * len(request.offered)
            return _event(ledger, ev.BlocksOffered, ((request.name, nothing, nothing),))
    return None


WRONG_EVENTS = (
    WrongEvent(Property.MATCH_HOLDS, "a block is evicted that a match holds", _evicts_pinned),
    WrongEvent(Property.NO_REUSE_IN_FLIGHT, "a block is evicted under a copy", _evicts_under_copy),
    WrongEvent(Property.CONSERVATION, "a slot is evicted that holds nothing", _evicts_nothing),
    WrongEvent(
        Property.NO_REUSE_IN_FLIGHT,
        "a device block is stored that a load writes",
        lambda ledger: _stores_leased(ledger, LeaseState.WRITING),
    ),
    WrongEvent(
        Property.STORED_ONCE,
        "a device block is stored that a store reads",
        lambda ledger: _stores_leased(ledger, LeaseState.READING),
    ),
    WrongEvent(
        Property.NO_REUSE_IN_FLIGHT,
        "a slot is written that a copy touches",
        lambda ledger: _stores_into(ledger, BlockState.LOADING, BlockState.STORING, BlockState.QUARANTINED),
    ),
    WrongEvent(
        Property.CONSERVATION,
        "a slot is written that holds a stored block",
        lambda ledger: _stores_into(ledger, BlockState.STORED),
    ),
    WrongEvent(Property.STORED_ONCE, "a key is stored that the host has", _stores_again),
    WrongEvent(Property.NO_STALE_DATA, "what a load before a reset brought is stored", _stores_old),
    WrongEvent(Property.MATCH_HOLDS, "a match is loaded that was voided", _loads_void),
    WrongEvent(Property.MATCH_HOLDS, "slots are loaded that no match holds", _loads_unmatched),
    WrongEvent(Property.NO_REUSE_IN_FLIGHT, "a load writes where a copy may touch", _loads_into_leased),
    WrongEvent(Property.PUBLISH_AFTER_COMMIT, "a block is matched under its store", _matches_unpublished),
    WrongEvent(
        Property.FAILURE_IS_NOT_SUCCESS, "a block is matched whose store has failed", _matches_failed, True
    ),
    WrongEvent(Property.MATCH_HOLDS, "a request matches twice", _matches_twice),
    WrongEvent(Property.STALE_REPORTS, "a worker reports twice", _reports_twice),
    WrongEvent(Property.STALE_REPORTS, "a transfer leaves twice", _submits_twice),
    WrongEvent(Property.STALE_REPORTS, "a transfer is cancelled under way", _cancels_submitted),
    WrongEvent(Property.STALE_REPORTS, "a transfer is lost before it left", _loses_planned),
    WrongEvent(Property.STORED_ONCE, "the cursors of a request go back", _cursor_goes_back),
    WrongEvent(Property.STORED_SO_SERVED, "a match ends at a key that can be read", _serves_less),
    WrongEvent(Property.STORED_SO_SERVED, "an admission ends at a key that can be read", _admits_less),
    WrongEvent(Property.STORED_SO_SERVED, "a match ends before its keys do", _serves_less_unnamed),
)

NUMBERS = {"one event before it is missing": 2, "it comes a second time": 0, "it is of the past": -1}
"""What is wrong with an event's number -> its distance from the number of the last event."""

WRONG: tuple[WrongLedger | WrongEvent, ...] = (*WRONG_LEDGERS, *WRONG_EVENTS)

NOT_IN_BOOKS = {
    Property.LEGAL_CALLS: "a refused call is no event",
    Property.DETERMINISM: "it takes two runs",
    Property.COPY_ORDER: "it takes the copies themselves",
    Property.CORRECT_BYTES: "it takes the bytes",
    Property.FULL_OFFLOAD: "it takes the engine's requests",
    Property.LAST_STEP: "it takes the engine's steps",
    Property.ONE_TOKEN_LEFT: "it takes the engine's prompts",
}


def _expect(property: Property, says: str, who: str, said: set[Property]) -> None:
    if property not in said:
        named = ", ".join(sorted(broken.id for broken in said)) or "nothing"
        raise PropertyBroken(property, f"{says}; what {who} says: {named}")


def _check_number(ledger: Ledger, what: str, distance: int) -> None:
    """Check that the fold refuses an event out of order, or after a gap."""
    try:
        ledger.apply(ev.StepEnded(ledger.seq + distance, ledger.step, 0))
    except InvalidEvent:
        return
    raise PropertyBroken(Property.EVENTS_ARE_STATE, f"the fold takes an event although {what}")


class WrongBooksWorld(WrappedWorld):
    """A `World` that wraps another one, and now and then changes copies of its books.

    core: returns the world's current core.
    tier: returns its current disk tier; None if it has none.
    """

    def __init__(
        self,
        world: World,
        core: Callable[[], AuditedCore],
        tier: Callable[[], DiskTier | None] = lambda: None,
    ) -> None:
        super().__init__(world)
        self._core, self._tier = core, tier
        self._begin()

    def _begin(self) -> None:
        core = self._core()
        self._log, self._read = core.log, 0
        self._last: OffloadingEvent | None = None
        self._witness = Witness(core.ledger.config)
        self._follow()

    def _follow(self) -> None:
        log = self._core().log
        assert log is not None
        if log is not self._log or (self._read and log[self._read - 1 : self._read] != [self._last]):
            self._begin()
            return
        for event in log[self._read :]:
            for violation in self._witness.follow(event):
                raise PropertyBroken(
                    violation.property, f"the second book, of a good log: {violation.message}"
                )
            self._read, self._last = self._read + 1, event

    def actions(self) -> list[Action]:
        return [CHANGE_BOOKS, *self.world.actions()]

    def draw(self, random: Random) -> Action:
        return CHANGE_BOOKS if random.random() < _SHARE else self.world.draw(random)

    def do(self, action: Action) -> bool:
        if action == CHANGE_BOOKS:
            self._change_all()
            return True
        before = self._last
        done = self.world.do(action)
        self._follow()
        return done or self._last is not before

    def _change_all(self) -> None:
        ledger = self._core().ledger
        saved, copy = snapshot(ledger), None
        for wrong in WRONG_LEDGERS:
            copy = restore(saved) if copy is None else copy
            if wrong.change(copy):
                self._expect(wrong, Books(copy, self._witness))
                copy = None
        for forged in WRONG_EVENTS:
            event = forged.make(ledger, self._log) if forged.takes_log else forged.make(ledger)
            if event is not None:
                said = {violation.property for violation in deepcopy(self._witness).follow(event)}
                _expect(forged.property, forged.says, "the second book", said)
        for what, distance in NUMBERS.items():
            _check_number(restore(saved), what, distance)
        self._disagree()

    @staticmethod
    def _expect(wrong: WrongLedger, books: Books) -> None:
        for name, objects in wrong.seen_by:
            _expect(wrong.property, wrong.says, name, objects(books))

    def _disagree(self) -> bool:
        """Change a copy's report in only one of two tiers' ledgers. Returns whether there was a copy."""
        tier = self._tier()
        if tier is None:
            return False
        for copy in tier.copies.values():
            record = tier.host.ledger.transfers[copy.host]
            before = record.reported
            record.reported ^= 1
            said = disagreements(tier)
            record.reported = before
            if not said:
                message = f"a report of copy {copy.disk} is in one ledger only, and no check objects"
                raise PropertyBroken(Property.STALE_REPORTS, message)
            return True
        return False
