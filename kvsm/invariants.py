"""What must hold of a ledger after every event, as small named functions.

`check_ledger(ledger)` checks everything, in a few milliseconds at 20,000 slots. `check_rest(ledger)` checks
that nothing is left when all is over. Both return a list of `Violation`s; an empty list is the good answer.

A ledger alone cannot tell whether it is right about the past. What needs the events, and not only the state
that they led to, is checked by `kvsm.replay.witness`: it keeps a second book from the events alone. Together
they check these properties (`kvsm.properties`):

====  ====================================================================  ==============
id    what is checked                                                       by
====  ====================================================================  ==============
S1    each slot is in one list, as its state says; the index is exact      here
S2    a block that can be read was stored by every worker                   both
S3    memory that a live copy touches is not handed out                     both
S4    pins, readers and leases equal their live holders                     both
S5    a report acts on the transfer it names; a rejected one on nothing     both
S6    what a failed copy wrote or read cannot be matched                    witness
S7    what a match counts it holds until the load, or it is voided          both
S9    nothing waits for what will not come; at rest, nothing is left        here
S10   the published events, a snapshot and the fold agree                   kvsm.replay
S13   a key has one block, a device block one store in flight               both
S14   nothing of an older epoch can be matched, or stored again             both
====  ====================================================================  ==============

The others need more than a ledger and its log:

- every call is legal (S8): the tests of the core make every call;
- determinism (S11): takes two runs;
- order of copies (S12), correct bytes (S15): take the copies themselves;
- full offload (S16), flush at last step (S17), one token left (S18): take the engine's prompts and steps;
- the engine's part of two properties: a request learns what to recompute (S6), and a skipped block is offered
  again (S13).
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
from kvsm.states.block import BLOCK_WORDS, IDLE, BlockState, are_readable
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
"""What is checked of a ledger and its log: the table above."""

MOST_NAMED = 8
"""A violation names at most this many things of each kind: the first ones."""

_COPIES_SHIFT, _PINS_SHIFT = BLOCK_WORDS.shifts
_COPIES_LIMIT = BLOCK_WORDS.limits[0]
_READERS_SHIFT = LEASE_WORDS.shifts[0]


class Violation(msgspec.Struct, frozen=True, rename={"property": "property_id"}):
    """A broken property, what was found, and the first things that it is about."""

    property: Property
    message: str
    slots: tuple[int, ...] = ()
    device_blocks: tuple[int, ...] = ()
    transfers: tuple[int, ...] = ()
    requests: tuple[str, ...] = ()


def check_ledger(ledger: Ledger) -> list[Violation]:
    """Check every property that a ledger can show. Takes about 0.4 us a slot."""
    counts = HolderCounts(ledger)
    return [violation for check in CHECKS for violation in check(counts)]


def check_rest(ledger: Ledger) -> list[Violation]:
    """Check progress (S9) when all requests have been released: nothing may be left of them."""
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
    """`table[states]` says of each state whether it is one of these."""
    table = np.zeros(STATE_MASK + 1, dtype=np.bool_)
    table[list(states)] = True
    return table


_UNUSED = _table(BlockState.FREE, BlockState.EVICTED)
_INDEXED = _table(BlockState.ALLOCATED, BlockState.STORING, BlockState.STORED, BlockState.LOADING)
_UNCOUNTED = _table(BlockState.FREE, BlockState.EVICTED, BlockState.RETIRED)
_RESTING = _table(BlockState.FREE, BlockState.EVICTED, BlockState.STORED, BlockState.RETIRED)
_UNLEASED = _table(LeaseState.NONE, LeaseState.RETIRED)
# As plain ints: numpy is slow to compare with a member.
_ALLOCATED = int(BlockState.ALLOCATED)
_NOT_LEASED, _RETIRED_LEASE = int(LeaseState.NONE), int(LeaseState.RETIRED)
_READING, _WRITING = int(LeaseState.READING), int(LeaseState.WRITING)


class HolderCounts:
    """A ledger, the states of its slots, and how many transfers and matches hold each slot and device block.

    Counted from the transfers and requests, not from the words that must agree with them.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.states = ledger.blocks.view & STATE_MASK
        slots, device_blocks = ledger.config.host_blocks, ledger.config.device_blocks
        stores = [one for one in ledger.transfers.values() if one.direction is Direction.STORE]
        loads = [one for one in ledger.transfers.values() if one.direction is Direction.LOAD]
        planned = [one.slots for one in stores if one.state is TransferState.PLANNED]
        submitted = [one.slots for one in stores if one.state is not TransferState.PLANNED]
        self.copies = _count(slots, submitted + [one.slots for one in loads])
        self.planned = _count(slots, planned)
        self.pins = _count(slots, [ledger.live_pins(one) for one in ledger.requests.values()])
        outward = {name: one for name, one in ledger.requests.items() if one.target}
        copies_out = [one.slots for one in loads if one.owners[0][0] in outward]
        self.outward = _count(slots, copies_out + [ledger.live_pins(one) for one in outward.values()])
        self.readers = _count(device_blocks, [one.device_blocks for one in stores])
        self.writers = _count(device_blocks, [one.device_blocks for one in loads])


def _count(size: int, batches: Sequence[IdArray]) -> NDArray[np.int64]:
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


# The checks.


def slots_stand_in_one_list(counts: HolderCounts) -> Iterator[Violation]:
    """Conservation (S1): FREE and EVICTED slots are in the free queue, idle ones in the eviction order. A
    block is idle while nothing but copies to other tiers holds it."""
    ledger = counts.ledger
    capacity, words = ledger.config.host_blocks, ledger.blocks.view
    free, unused = _mask(ledger.free.order(), capacity), _UNUSED[counts.states]
    copied_out = np.zeros(capacity, dtype=np.int64)
    copied_out[list(ledger.copied_out)] = list(ledger.copied_out.values())
    held = counts.copies + counts.pins
    idle = (words == IDLE) | (are_readable(words) & (held == counts.outward) & (held > 0))
    inside = np.fromiter(map(ledger.policy.__contains__, range(capacity)), np.bool_, capacity)
    for mask, message in (
        (free & ~unused, "in the free queue although in use"),
        (unused & ~free, "unused, but not in the free queue"),
        (inside & ~idle, "in the eviction order although not idle"),
        (idle & ~inside, "idle, but not in the eviction order"),
        (are_readable(words) & (copied_out != counts.outward), "copies to other tiers are miscounted"),
        ((counts.states == _ALLOCATED) & (counts.planned == 0), "allocated by no planned store"),
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


def index_names_live_blocks(counts: HolderCounts) -> Iterator[Violation]:
    """Conservation (S1), no doubled store (S13): the index maps each key to its one live block."""
    ledger = counts.ledger
    named = _INDEXED[counts.states].nonzero()[0].tolist()
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
        message = f"{_slot_words(ledger, slots)}: the index does not name it by its key"
        yield Violation(Property.CONSERVATION, message, slots)
    elif len(ledger.index) != len(named):
        gone = set(ledger.index.values()) - set(named)
        message = f"the index names {len(ledger.index)} blocks, and {len(named)} are live"
        yield Violation(Property.CONSERVATION, message, tuple(sorted(gone)[:MOST_NAMED]))


def live_copies_keep_their_slots(counts: HolderCounts) -> Iterator[Violation]:
    """No reuse in flight (S3), publish after commit (S2): the state of a slot names its live transfers."""
    ledger = counts.ledger
    for transfer in ledger.transfers.values():
        allowed = _STATES_UNDER.get((transfer.direction, transfer.word & STATE_MASK))
        if allowed is None:
            continue
        slots = np.asarray(transfer.slots, dtype=np.int64)
        wrong = slots[~allowed[counts.states[slots]]][:MOST_NAMED].tolist()
        if wrong:
            store = transfer.direction is Direction.STORE
            readable = store and any(ledger.readable(slot) for slot in wrong)
            message = f"{_slot_words(ledger, wrong)}, while {_name(transfer)} touches it"
            property = Property.PUBLISH_AFTER_COMMIT if readable else Property.NO_REUSE_IN_FLIGHT
            yield Violation(property, message, tuple(wrong), transfers=(transfer.id,))


_VOIDED = (BlockState.QUARANTINED, BlockState.RETIRED)
_STATES_UNDER: dict[tuple[Direction, int], NDArray[np.bool_]] = {
    (Direction.STORE, TransferState.PLANNED): _table(BlockState.ALLOCATED),
    (Direction.STORE, TransferState.SUBMITTED): _table(BlockState.STORING),
    (Direction.STORE, TransferState.ABANDONED): _table(BlockState.QUARANTINED),
    (Direction.LOAD, TransferState.PLANNED): _table(BlockState.LOADING, *_VOIDED),
    (Direction.LOAD, TransferState.SUBMITTED): _table(BlockState.LOADING, *_VOIDED),
    (Direction.LOAD, TransferState.ABANDONED): _table(*_VOIDED),
}
"""States that a slot may be in under a live transfer. Another load may have voided what this load reads.

A transfer in another state is not live; `reports_add_up` finds it.
"""


def _name(transfer: TransferRecord) -> str:
    return f"{transfer.direction.name.lower()} {transfer.id} ({transfer.state.name})"


def leases_equal_live_copies(counts: HolderCounts) -> Iterator[Violation]:
    """Exactly the live transfers have leases; stores read, loads write (S3, S4, S13)."""
    ledger = counts.ledger
    words = ledger.leases.view
    states, readers = words & STATE_MASK, words >> _READERS_SHIFT
    read, written = counts.readers > 0, counts.writers > 0
    touched, kept = read | written, states != _RETIRED_LEASE
    is_right = states == np.where(written, _WRITING, np.where(read, _READING, _NOT_LEASED))
    miscounted = is_right & ~written & (readers != counts.readers)
    reuse, release = Property.NO_REUSE_IN_FLIGHT, Property.ONE_RELEASE_PER_HOLD
    for property, mask, message in (
        (reuse, kept & touched & ~is_right, "a live copy touches it, and its lease does not say so"),
        (release, kept & ~touched & ~is_right, "leased, and no live copy touches it"),
        (release, kept & miscounted, "its readers are not its live stores"),
        (reuse, (counts.writers > 1) | (written & read), "a load shares it"),
        (Property.STORED_ONCE, counts.readers > 1, "two stores of it are in flight"),
    ):
        blocks = _first(mask)
        if blocks:
            named = ", ".join(f"device block {one} {LEASE_WORDS.describe(int(words[one]))}" for one in blocks)
            yield Violation(property, f"{named}: {message}", device_blocks=blocks)


def copies_and_pins_equal_holders(counts: HolderCounts) -> Iterator[Violation]:
    """One release per hold (S4): a block counts its live transfers and its matches."""
    ledger = counts.ledger
    words = ledger.blocks.view
    copies = words >> _COPIES_SHIFT & _COPIES_LIMIT
    # Retired slots count no copy. A free slot under a copy is found by `live_copies_keep_their_slots`.
    for mask, message in (
        (~_UNCOUNTED[counts.states] & (copies != counts.copies), "its copies are not its transfers"),
        ((words >> _PINS_SHIFT) != counts.pins, "its pins are not its matches"),
    ):
        slots = _first(mask)
        if slots:
            held = ", ".join(
                f"{counts.copies[slot]} transfers and {counts.pins[slot]} matches" for slot in slots
            )
            found = f"{_slot_words(ledger, slots)}: {message} (hold it: {held})"
            yield Violation(Property.ONE_RELEASE_PER_HOLD, found, slots)


def requests_name_their_loads(counts: HolderCounts) -> Iterator[Violation]:
    """One release per hold (S4): a request knows its load in flight. So the load's end can reach it."""
    ledger = counts.ledger
    live: dict[str, list[int]] = {}
    for transfer in ledger.transfers.values():
        if transfer.direction is Direction.LOAD:
            live.setdefault(transfer.owners[0][0], []).append(transfer.id)
    for name, request in ledger.requests.items():
        _, (count,) = REQUEST_WORDS.decode(request.word)
        loads = live.pop(name, [])
        if loads != ([request.load] if request.load else []) or count != len(loads):
            message = f"request {name} counts {count} loads and names {request.load}; live are {loads}"
            yield _load_violation(message, loads, name)
    for name, loads in live.items():
        message = f"{_name(ledger.transfers[loads[0]])} belongs to request {name}, which was released"
        yield _load_violation(message, loads, name)


def _load_violation(message: str, loads: Sequence[int], request: str) -> Violation:
    named = tuple(loads[:MOST_NAMED])
    return Violation(Property.ONE_RELEASE_PER_HOLD, message, transfers=named, requests=(request,))


def reports_add_up(counts: HolderCounts) -> Iterator[Violation]:
    """Stale reports change nothing (S5): a transfer counts its reports, and its slots have its generation."""
    ledger = counts.ledger
    generation = ledger.generation_view
    for id, transfer in ledger.transfers.items():
        state, (pending, failed) = TRANSFER_WORDS.decode(transfer.word)
        reported = bin(transfer.reported).count("1")
        if id != transfer.id or state not in LIVE:
            message = f"{_name(transfer)} is kept as live transfer {id}"
            yield Violation(Property.STALE_REPORTS, message, transfers=(id,))
        elif pending + reported != ledger.config.workers or failed > reported:
            message = f"{_name(transfer)}: {reported} workers reported, {pending} pending, {failed} failed"
            yield Violation(Property.STALE_REPORTS, message, transfers=(id,))
        slots = np.asarray(transfer.slots, dtype=np.int64)
        born = generation[slots]
        is_wrong = born != id if transfer.direction is Direction.STORE else born > id
        wrong = slots[is_wrong][:MOST_NAMED].tolist()
        if wrong:
            message = f"slots {wrong} of {_name(transfer)} hold blocks of another generation"
            yield Violation(Property.STALE_REPORTS, message, tuple(wrong), transfers=(id,))


def matches_hold_pins(counts: HolderCounts) -> Iterator[Violation]:
    """A match holds what it counts (S7): a request has pins exactly while it is MATCHED."""
    ledger = counts.ledger
    for name, request in ledger.requests.items():
        if (request.state is RequestState.MATCHED) != (len(request.pins) > 0):
            slots = tuple(to_list(request.pins)[:MOST_NAMED])
            message = f"request {name} is {request.state.name} with {len(request.pins)} pins"
            yield Violation(Property.MATCH_HOLDS, message, slots, requests=(name,))


def waits_have_owners(counts: HolderCounts) -> Iterator[Violation]:
    """Progress (S9): a DEFERRED request waits for a live transfer, a FINISHED one for its load."""
    ledger = counts.ledger
    for name, request in ledger.requests.items():
        state, (loads,) = REQUEST_WORDS.decode(request.word)
        if (state == RequestState.DEFERRED) != (ledger.deferred.get(name) is request):
            message = (
                f"request {name} is {request.state.name}, and the list of deferred requests says otherwise"
            )
            yield Violation(Property.PROGRESS, message, requests=(name,))
        elif state == RequestState.DEFERRED and request.awaits not in ledger.transfers:
            message = f"request {name} waits for transfer {request.awaits}, which is not live"
            yield Violation(Property.PROGRESS, message, transfers=(request.awaits,), requests=(name,))
        elif state == RequestState.RELEASED or (state == RequestState.FINISHED and not loads):
            message = f"request {name} is {request.state.name} without a load, and still kept"
            yield Violation(Property.PROGRESS, message, requests=(name,))


def epochs_are_current(counts: HolderCounts) -> Iterator[Violation]:
    """No stale data (S14): exactly the transfers of older epochs are ABANDONED."""
    ledger = counts.ledger
    for transfer in ledger.transfers.values():
        if (transfer.state is TransferState.ABANDONED) == (transfer.epoch == ledger.epoch):
            message = f"{_name(transfer)} belongs to epoch {transfer.epoch}; the epoch is now {ledger.epoch}"
            yield Violation(Property.NO_STALE_DATA, message, transfers=(transfer.id,))


def cursors_are_in_order(counts: HolderCounts) -> Iterator[Violation]:
    """No lost store (S13): a request has offered what it has settled."""
    for name, request in counts.ledger.requests.items():
        settled, offered = request.settled, request.offered
        if len(settled) != len(offered) or any(map(gt, settled, offered)):
            message = f"request {name} settled {settled} of its blocks, and offered {offered}"
            yield Violation(Property.STORED_ONCE, message, requests=(name,))


def provenance_is_of_one_epoch(counts: HolderCounts) -> Iterator[Violation]:
    """No stale data (S14): what a load brought belongs to this epoch or to an older one, not to both."""
    ledger = counts.ledger
    brought, stale = ledger.provenance.brought, ledger.provenance.stale
    limit = ledger.config.device_blocks
    for blocks, message in (
        (sorted(brought.keys() & stale.keys()), "brought by a load of this epoch and by an older one"),
        (sorted(one for one in (*brought, *stale) if not 0 <= one < limit), "not in the pool"),
    ):
        if blocks:
            named = tuple(blocks[:MOST_NAMED])
            found = f"device blocks {list(named)}: {message}"
            yield Violation(Property.NO_STALE_DATA, found, device_blocks=named)


def history_is_bounded(counts: HolderCounts) -> Iterator[Violation]:
    """Conservation (S1): the history of offers keeps its limit, and has only keys that were offered."""
    times, limit = counts.ledger.offers.times, counts.ledger.config.offer_history
    if len(times) > limit:
        message = f"{len(times)} keys are in the history of offers, and {limit} may be"
        yield Violation(Property.CONSERVATION, message)
    never = [key for key, count in times.items() if count < 1]
    if never:
        message = f"key {never[0].hex()} is in the history of offers, offered 0 times"
        yield Violation(Property.CONSERVATION, message)


CHECKS: tuple[Callable[[HolderCounts], Iterator[Violation]], ...] = (
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
