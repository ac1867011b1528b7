"""The properties: what must hold of a ledger after every event, as small named functions.

`check_ledger(ledger)` looks at everything, in a few milliseconds at 20,000 slots; `check_rest(ledger)` at
what may be left when all is over. They give the `Violation`s that they find, each under the id of the
property that it breaks: an empty list is the good answer.

A ledger cannot tell on its own whether it is right about the past. What needs the events, and not only the
state that they led to, is checked against a second book, kept from the events alone, at every event
(`kvsm.replay.witness`). Between them, these properties are checked:

====  ====================================================================  ==============
id    what is checked                                                       by
====  ====================================================================  ==============
S1    each slot in one list, as its state says; the index names its blocks  here
S2    a block that can be read was stored, by every worker                  both
S3    memory that a live copy touches is not handed out                     both
S4    pins, readers and leases equal their live holders                     both
S5    a report acts on the transfer it names; a rejected one on nothing     both
S6    what a failed copy wrote or read cannot be matched                    witness
S7    what a match counted it holds until the load, or it is voided         both
S9    nothing waits for what will not come; at rest, nothing is left        here
S10   the events published, a snapshot, and the fold tell of one state      kvsm.replay
S13   a key has one block, a device block one store in flight               both
S14   nothing of an older epoch can be matched, or be stored again          both
====  ====================================================================  ==============

Not checked here, because a ledger and its log do not hold what it takes: S8 (every call is legal: the core's
own tests make them), S11 (takes two runs), S12 and S15 (take the bytes and the order of the copies: the
serving engine checks contents), S16, S17, S18 (take the engine's prompts and steps). Of S6, that a request
learns what to recompute, and of S13, that a skipped block is offered again, are the engine's side, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import gt

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.events import Direction
from kvsm.ids import IdArray, to_list
from kvsm.ledger import Ledger, TransferRecord
from kvsm.properties import Property
from kvsm.states.block import BLOCK_WORDS, IDLE, BlockState
from kvsm.states.lease import LEASE_WORDS, LeaseState
from kvsm.states.request import REQUEST_WORDS, RequestState
from kvsm.states.transfer import LIVE, TRANSFER_WORDS, TransferState
from kvsm.states.words import STATE_MASK

PROPERTIES = (
    Property.CONSERVATION,
    Property.PUBLISH_AFTER_COMMIT,
    Property.NO_REUSE_IN_FLIGHT,
    Property.ONE_RELEASE_PER_HOLD,
    Property.STALE_REPORTS,
    Property.FAILURE_IS_NOT_SUCCESS,
    Property.MATCH_HOLDS,
    Property.PROGRESS,
    Property.EVENTS_ARE_STATE,
    Property.STORED_ONCE,
    Property.NO_STALE_DATA,
)
"""What is checked of a ledger and its log, as the table above says."""

MOST_NAMED = 8
"""A violation names at most this many things of a sort: the first ones."""

_COPIES_SHIFT, _PINS_SHIFT = BLOCK_WORDS.shifts
_COPIES_LIMIT = BLOCK_WORDS.limits[0]
_READERS_SHIFT = LEASE_WORDS.shifts[0]


class Violation(msgspec.Struct, frozen=True, rename={"property": "property_id"}):
    """A broken property: which one, what was found, and the first of the things concerned."""

    property: Property
    message: str
    slots: tuple[int, ...] = ()
    device_blocks: tuple[int, ...] = ()
    transfers: tuple[int, ...] = ()
    requests: tuple[str, ...] = ()


def check_ledger(ledger: Ledger) -> list[Violation]:
    """Every property that a ledger shows, all of it. Costs about 0.4 us a slot."""
    holds = _Holds(ledger)
    return [violation for check in CHECKS for violation in check(holds)]


def check_rest(ledger: Ledger) -> list[Violation]:
    """S9 for a ledger whose requests have all been released: nothing of them may be left."""
    left: list[str] = []
    if ledger.requests or ledger.deferred:
        left.append(f"{len(ledger.requests)} requests ({len(ledger.deferred)} deferred)")
    if ledger.transfers:
        left.append(f"{len(ledger.transfers)} transfers")
    held = (ledger.blocks.view >> _COPIES_SHIFT != 0) | ~_RESTING[ledger.blocks.view & STATE_MASK]
    leased = ~_UNLEASED[ledger.leases.view & STATE_MASK]
    if held.any():
        left.append(f"{np.count_nonzero(held)} held slots")
    if leased.any():
        left.append(f"{np.count_nonzero(leased)} leased device blocks")
    if not left:
        return []
    message = f"at rest, still there: {', '.join(left)}"
    return [
        Violation(
            Property.PROGRESS, message, _first(held), _first(leased), tuple(ledger.transfers)[:MOST_NAMED]
        )
    ]


# What the checks share.


def _table(*states: int) -> NDArray[np.bool_]:
    """Whether a state is one of these, by its number: `table[states]` says it of an array of them."""
    table = np.zeros(STATE_MASK + 1, dtype=np.bool_)
    table[list(states)] = True
    return table


_UNUSED = _table(BlockState.FREE, BlockState.EVICTED)
_INDEXED = _table(BlockState.ALLOCATED, BlockState.STORING, BlockState.STORED, BlockState.LOADING)
_UNCOUNTED = _table(BlockState.FREE, BlockState.EVICTED, BlockState.RETIRED)
_RESTING = _table(BlockState.FREE, BlockState.EVICTED, BlockState.STORED, BlockState.RETIRED)
_UNLEASED = _table(LeaseState.NONE, LeaseState.RETIRED)
# As plain ints: numpy is slow to compare with a member.
_ALLOCATED, _PLANNED = int(BlockState.ALLOCATED), int(TransferState.PLANNED)
_NOT_LEASED, _RETIRED_LEASE = int(LeaseState.NONE), int(LeaseState.RETIRED)
_READING, _WRITING = int(LeaseState.READING), int(LeaseState.WRITING)


class _Holds:
    """A ledger, the states of its slots, and how often each slot and device block is held, counted from
    those who hold it."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.states = ledger.blocks.view & STATE_MASK
        slots, device_blocks = ledger.config.host_blocks, ledger.config.device_blocks
        stores = [one for one in ledger.transfers.values() if one.direction is Direction.STORE]
        loads = [one for one in ledger.transfers.values() if one.direction is Direction.LOAD]
        planned = [one.slots for one in stores if one.word & STATE_MASK == _PLANNED]
        submitted = [one.slots for one in stores if one.word & STATE_MASK != _PLANNED]
        self.copies = _tally(slots, submitted + [one.slots for one in loads])
        self.planned = _tally(slots, planned)
        self.pins = _tally(
            slots, [ledger.live_pins(one) for one in ledger.requests.values() if len(one.pins)]
        )
        self.readers = _tally(device_blocks, [one.device_blocks for one in stores])
        self.writers = _tally(device_blocks, [one.device_blocks for one in loads])


def _tally(size: int, batches: Sequence[IdArray]) -> NDArray[np.int64]:
    counts = np.zeros(size, dtype=np.int64)
    for batch in batches:
        np.add.at(counts, np.asarray(batch, dtype=np.int64), 1)
    return counts


def _mask(slots: NDArray[np.int64], capacity: int) -> NDArray[np.bool_]:
    mask = np.zeros(capacity, dtype=np.bool_)
    mask[slots] = True
    return mask


def _first(mask: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0][:MOST_NAMED].tolist())


def _slot_words(ledger: Ledger, slots: Sequence[int]) -> str:
    return ", ".join(f"slot {slot} {BLOCK_WORDS.describe(ledger.blocks.words[slot])}" for slot in slots)


# The full checks.


def slots_stand_in_one_list(holds: _Holds) -> Iterator[Violation]:
    """S1: free queue exactly if FREE or EVICTED; eviction order exactly if stored without pin or copy."""
    ledger = holds.ledger
    capacity, words = ledger.config.host_blocks, ledger.blocks.view
    free, unused = _mask(ledger.free.order(), capacity), _UNUSED[holds.states]
    idle, inside = (
        words == IDLE,
        np.fromiter(map(ledger.policy.__contains__, range(capacity)), np.bool_, capacity),
    )
    for mask, message in (
        (free & ~unused, "in the free queue although in use"),
        (unused & ~free, "unused, but not in the free queue"),
        (inside & ~idle, "in the eviction order although not idle"),
        (idle & ~inside, "idle, but not in the eviction order"),
        ((holds.states == _ALLOCATED) & (holds.planned == 0), "allocated by no planned store"),
    ):
        slots = _first(mask)
        if slots:
            yield Violation(Property.CONSERVATION, f"{_slot_words(ledger, slots)}: {message}", slots)
    for name, length, count in (
        ("free queue", len(ledger.free), np.count_nonzero(unused)),
        ("eviction order", len(ledger.policy), np.count_nonzero(idle)),
    ):
        if length != count:
            yield Violation(
                Property.CONSERVATION, f"the {name} counts {length} slots, and {count} have its state"
            )


def index_names_live_blocks(holds: _Holds) -> Iterator[Violation]:
    """S1, S13: the index maps a key to the one slot that holds a block of it, and knows no other key."""
    ledger = holds.ledger
    named = _INDEXED[holds.states].nonzero()[0].tolist()
    keys = [ledger.key_of[slot] for slot in named]
    if len(set(keys)) != len(keys):
        for key, times in Counter(keys).items():
            if times > 1:
                slots = tuple(slot for slot, own in zip(named, keys) if own == key)[:MOST_NAMED]
                yield Violation(Property.STORED_ONCE, f"key {key.hex()} has {times} live blocks", slots)
        return
    wrong = [slot for slot, key in zip(named, keys) if ledger.index.get(key) != slot]
    if wrong:
        slots = tuple(wrong[:MOST_NAMED])
        yield Violation(
            Property.CONSERVATION,
            f"{_slot_words(ledger, slots)}: the index does not name it by its key",
            slots,
        )
    elif len(ledger.index) != len(named):
        gone = set(ledger.index.values()) - set(named)
        message = f"the index names {len(ledger.index)} blocks, and {len(named)} are live"
        yield Violation(Property.CONSERVATION, message, tuple(sorted(gone)[:MOST_NAMED]))


def live_copies_keep_their_slots(holds: _Holds) -> Iterator[Violation]:
    """S2, S3: a slot that a live transfer touches is in a state that says so, until the transfer ends."""
    ledger = holds.ledger
    for transfer in ledger.transfers.values():
        allowed = _STATES_UNDER.get((transfer.direction, transfer.word & STATE_MASK))
        if allowed is None:
            continue
        slots = np.asarray(transfer.slots, dtype=np.int64)
        wrong = slots[~allowed[holds.states[slots]]][:MOST_NAMED].tolist()
        if wrong:
            store = transfer.direction is Direction.STORE
            readable = store and any(ledger.readable(slot) for slot in wrong)
            message = f"{_slot_words(ledger, wrong)}, while {_name(transfer)} touches it"
            yield Violation(
                Property.PUBLISH_AFTER_COMMIT if readable else Property.NO_REUSE_IN_FLIGHT,
                message,
                tuple(wrong),
                transfers=(transfer.id,),
            )


_VOIDED = (BlockState.QUARANTINED, BlockState.RETIRED)
_STATES_UNDER: dict[tuple[Direction, int], NDArray[np.bool_]] = {
    (Direction.STORE, TransferState.PLANNED): _table(BlockState.ALLOCATED),
    (Direction.STORE, TransferState.SUBMITTED): _table(BlockState.STORING),
    (Direction.STORE, TransferState.ABANDONED): _table(BlockState.QUARANTINED),
    (Direction.LOAD, TransferState.PLANNED): _table(BlockState.LOADING, *_VOIDED),
    (Direction.LOAD, TransferState.SUBMITTED): _table(BlockState.LOADING, *_VOIDED),
    (Direction.LOAD, TransferState.ABANDONED): _table(*_VOIDED),
}
"""States that a slot may be in under a live transfer. Another load may have voided what this one reads.

A transfer in another state is not live: that it is kept is for S5 to say.
"""


def _name(transfer: TransferRecord) -> str:
    return f"{transfer.direction.name.lower()} {transfer.id} ({transfer.state.name})"


def leases_equal_live_copies(holds: _Holds) -> Iterator[Violation]:
    """S3, S4, S13: device blocks are leased exactly by the live transfers: stores read, loads write."""
    ledger = holds.ledger
    words = ledger.leases.view
    states, readers = words & STATE_MASK, words >> _READERS_SHIFT
    read, written = holds.readers > 0, holds.writers > 0
    touched, kept = read | written, states != _RETIRED_LEASE
    is_right = states == np.where(written, _WRITING, np.where(read, _READING, _NOT_LEASED))
    miscounted = is_right & ~written & (readers != holds.readers)
    for property, mask, message in (
        (
            Property.NO_REUSE_IN_FLIGHT,
            kept & touched & ~is_right,
            "a live copy touches it, and its lease does not say so",
        ),
        (Property.ONE_RELEASE_PER_HOLD, kept & ~touched & ~is_right, "leased, and no live copy touches it"),
        (Property.ONE_RELEASE_PER_HOLD, kept & miscounted, "its readers are not its live stores"),
        (Property.NO_REUSE_IN_FLIGHT, (holds.writers > 1) | (written & read), "a load shares it"),
        (Property.STORED_ONCE, holds.readers > 1, "two stores of it are in flight"),
    ):
        blocks = _first(mask)
        if blocks:
            named = ", ".join(f"device block {one} {LEASE_WORDS.describe(int(words[one]))}" for one in blocks)
            yield Violation(property, f"{named}: {message}", device_blocks=blocks)


def copies_and_pins_equal_holders(holds: _Holds) -> Iterator[Violation]:
    """S4: a block's copies are the live transfers that touch it, its pins the matches that hold it."""
    ledger = holds.ledger
    words = ledger.blocks.view
    copies = words >> _COPIES_SHIFT & _COPIES_LIMIT
    # Retired slots count no copy, and a free slot under a copy is S3's to name.
    for mask, message in (
        (~_UNCOUNTED[holds.states] & (copies != holds.copies), "its copies are not its transfers"),
        ((words >> _PINS_SHIFT) != holds.pins, "its pins are not its matches"),
    ):
        slots = _first(mask)
        if slots:
            held = ", ".join(
                f"{holds.copies[slot]} transfers and {holds.pins[slot]} matches" for slot in slots
            )
            yield Violation(
                Property.ONE_RELEASE_PER_HOLD,
                f"{_slot_words(ledger, slots)}: {message} (hold it: {held})",
                slots,
            )


def requests_name_their_loads(holds: _Holds) -> Iterator[Violation]:
    """S4: a request knows its one load in flight; only so is it told the end, and released with it."""
    ledger = holds.ledger
    live: dict[str, list[int]] = {}
    for transfer in ledger.transfers.values():
        if transfer.direction is Direction.LOAD:
            live.setdefault(transfer.owners[0][0], []).append(transfer.id)
    for name, request in ledger.requests.items():
        _, (count,) = REQUEST_WORDS.decode(request.word)
        loads = live.pop(name, [])
        if loads != ([request.load] if request.load else []) or count != len(loads):
            message = f"request {name} counts {count} loads and names {request.load}; live are {loads}"
            yield Violation(
                Property.ONE_RELEASE_PER_HOLD, message, transfers=tuple(loads[:MOST_NAMED]), requests=(name,)
            )
    for name, loads in live.items():
        message = f"{_name(ledger.transfers[loads[0]])} is of request {name}, which was released"
        yield Violation(
            Property.ONE_RELEASE_PER_HOLD, message, transfers=tuple(loads[:MOST_NAMED]), requests=(name,)
        )


def reports_add_up(holds: _Holds) -> Iterator[Violation]:
    """S5: a transfer waits for the workers that have not reported; its slots are of its generation."""
    ledger = holds.ledger
    generation = ledger.generation_view
    for id, transfer in ledger.transfers.items():
        state, (pending, failed) = TRANSFER_WORDS.decode(transfer.word)
        reported = bin(transfer.reported).count("1")
        if id != transfer.id or state not in LIVE:
            yield Violation(
                Property.STALE_REPORTS, f"{_name(transfer)} is kept as live transfer {id}", transfers=(id,)
            )
        elif pending + reported != ledger.config.workers or failed > reported:
            message = f"{_name(transfer)}: {reported} workers reported, {pending} pending, {failed} failed"
            yield Violation(Property.STALE_REPORTS, message, transfers=(id,))
        slots = np.asarray(transfer.slots, dtype=np.int64)
        born = generation[slots]
        wrong = slots[born != id if transfer.direction is Direction.STORE else born > id][
            :MOST_NAMED
        ].tolist()
        if wrong:
            message = f"slots {wrong} of {_name(transfer)} hold blocks of another generation"
            yield Violation(Property.STALE_REPORTS, message, tuple(wrong), transfers=(id,))


def matches_hold_pins(holds: _Holds) -> Iterator[Violation]:
    """S7: a request is MATCHED exactly as long as it has pins."""
    ledger = holds.ledger
    for name, request in ledger.requests.items():
        if (request.state is RequestState.MATCHED) != (len(request.pins) > 0):
            slots = tuple(to_list(request.pins)[:MOST_NAMED])
            message = f"request {name} is {request.state.name} with {len(request.pins)} pins"
            yield Violation(Property.MATCH_HOLDS, message, slots, requests=(name,))


def waits_have_owners(holds: _Holds) -> Iterator[Violation]:
    """S9: who is DEFERRED waits for a live transfer; who is FINISHED is released by its load's end."""
    ledger = holds.ledger
    for name, request in ledger.requests.items():
        state, (loads,) = REQUEST_WORDS.decode(request.word)
        if (state == RequestState.DEFERRED) != (ledger.deferred.get(name) is request):
            message = f"request {name} is {request.state.name}, and the list of deferred ones says otherwise"
            yield Violation(Property.PROGRESS, message, requests=(name,))
        elif state == RequestState.DEFERRED and request.awaits not in ledger.transfers:
            message = f"request {name} waits for transfer {request.awaits}, which is not live"
            yield Violation(Property.PROGRESS, message, transfers=(request.awaits,), requests=(name,))
        elif state == RequestState.RELEASED or (state == RequestState.FINISHED and not loads):
            message = f"request {name} is {request.state.name} without a load, and still kept"
            yield Violation(Property.PROGRESS, message, requests=(name,))


def epochs_are_current(holds: _Holds) -> Iterator[Violation]:
    """S14: what a reset left behind is abandoned, and nothing else is."""
    ledger = holds.ledger
    for transfer in ledger.transfers.values():
        if (transfer.state is TransferState.ABANDONED) == (transfer.epoch == ledger.epoch):
            message = f"{_name(transfer)} is of epoch {transfer.epoch}, and now it is epoch {ledger.epoch}"
            yield Violation(Property.NO_STALE_DATA, message, transfers=(transfer.id,))


def cursors_are_in_order(holds: _Holds) -> Iterator[Violation]:
    """S13: what a request has settled it has offered: else a block would be dealt with unseen."""
    for name, request in holds.ledger.requests.items():
        settled, offered = request.settled, request.offered
        if len(settled) != len(offered) or any(map(gt, settled, offered)):
            message = f"request {name} settled {settled} of its blocks, and offered {offered}"
            yield Violation(Property.STORED_ONCE, message, requests=(name,))


def provenance_is_of_one_epoch(holds: _Holds) -> Iterator[Violation]:
    """S14: a device block holds what one load brought, of this epoch or of an older one."""
    ledger = holds.ledger
    brought, stale = ledger.provenance.brought, ledger.provenance.stale
    limit = ledger.config.device_blocks
    for blocks, message in (
        (sorted(brought.keys() & stale.keys()), "brought by a load of this epoch and of an older one"),
        (sorted(one for one in (*brought, *stale) if not 0 <= one < limit), "no device block of the pool"),
    ):
        if blocks:
            named = tuple(blocks[:MOST_NAMED])
            yield Violation(
                Property.NO_STALE_DATA, f"device blocks {list(named)}: {message}", device_blocks=named
            )


def history_is_bounded(holds: _Holds) -> Iterator[Violation]:
    """S1: the history of offers keeps to its limit (rule 10), and counts nothing that was never offered."""
    offers = holds.ledger.offers
    if len(offers.times) > holds.ledger.config.offer_history:
        limit = holds.ledger.config.offer_history
        yield Violation(
            Property.CONSERVATION,
            f"{len(offers.times)} keys are in the history of offers, and {limit} may be",
        )
    never = [key for key, times in offers.times.items() if times < 1]
    if never:
        yield Violation(
            Property.CONSERVATION, f"key {never[0].hex()} is in the history of offers, offered 0 times"
        )


CHECKS: tuple[Callable[[_Holds], Iterator[Violation]], ...] = (
    slots_stand_in_one_list,
    index_names_live_blocks,
    live_copies_keep_their_slots,
    leases_equal_live_copies,
    copies_and_pins_equal_holders,
    requests_name_their_loads,
    reports_add_up,
    matches_hold_pins,
    waits_have_owners,
    epochs_are_current,
    cursors_are_in_order,
    provenance_is_of_one_epoch,
    history_is_bounded,
)
