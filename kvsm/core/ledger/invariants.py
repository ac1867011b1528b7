"""Invariants of a ledger after every event, as small named functions.

`check_ledger(ledger)` checks all of them, in 12 milliseconds at 20,000 slots. `check_rest(ledger)` checks
that nothing is left once all requests have been released. Both return a list of `Violation`s, which is empty
if all is well.

A ledger does not record the past. Properties that need the events, and not only the state, are checked by
`kvsm.explain.verify.witness`, which builds a second state from the events alone. Together they check these
properties (`kvsm.properties`):

====  ====================================================================  ==============
id    what is checked                                                       by
====  ====================================================================  ==============
S1    each slot is in one list and counted, as its state says; the index   here
      is exact
S2    a block that can be read was stored by every worker                   both
S3    memory that a live copy touches is not handed out                     both
S4    pins, readers and leases equal their live holders                     both
S5    a report acts on the transfer it names; a rejected one on nothing     both
S6    what a failed copy wrote or read cannot be matched                    witness
S7    what a match counts it holds until the load, or it is voided          both
S9    nothing waits for what will not come; at rest, nothing is left        here
S10   the published events, a snapshot and the fold agree                   kvsm.explain.story
S13   a key has one block, a device block one store in flight               both
S14   nothing of an older epoch can be matched, or stored again             both
====  ====================================================================  ==============

The other properties need more than a ledger and its log:

- every call is legal (S8): the tests of the core make every call;
- determinism (S11) needs two runs;
- order of copies (S12) and correct bytes (S15) need the copies themselves;
- full offload (S16), flush at last step (S17), one token left (S18) and stored, so served (S19) need the
  engine's prompts and steps;
- the engine's part of two properties: a request learns what to recompute (S6), and a skipped block is offered
  again (S13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import gt, ne
from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.core.ledger import Ledger, TransferRecord
from kvsm.events import LOAD, STORE, Direction
from kvsm.ids import listed, to_list
from kvsm.properties import Property
from kvsm.states.block import (
    BLOCK_WORDS,
    FIRST_INDEXED,
    FIRST_READABLE,
    IDLE,
    LAST_INDEXED,
    LAST_READABLE,
    BlockState,
)
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
"""The properties that are checked for a ledger and its log: the table above."""

MOST_NAMED = 8
"""The most slots, device blocks, transfers or requests that a violation names: the first ones."""

_COPIES_SHIFT, _PINS_SHIFT = BLOCK_WORDS.shifts
_COPIES_LIMIT = BLOCK_WORDS.limits[0]
_READERS_SHIFT = LEASE_WORDS.shifts[0]
(_LOADS_SHIFT,), (_LOADS_LIMIT,) = REQUEST_WORDS.shifts, REQUEST_WORDS.limits
_PENDING_SHIFT, _FAILED_SHIFT = TRANSFER_WORDS.shifts
_PENDING_LIMIT, _FAILED_LIMIT = TRANSFER_WORDS.limits


class Violation(msgspec.Struct, frozen=True, rename={"property": "property_id"}):
    """A broken property, with a message and the first objects that break it."""

    property: Property
    message: str
    slots: tuple[int, ...] = ()
    device_blocks: tuple[int, ...] = ()
    transfers: tuple[int, ...] = ()
    requests: tuple[str, ...] = ()


def check_ledger(ledger: Ledger) -> list[Violation]:
    """Check all invariants of a ledger, in about 0.6 us per slot."""
    counts = HolderCounts(ledger)
    return [violation for check in CHECKS for violation in check(counts)]


def check_rest(ledger: Ledger) -> list[Violation]:
    """Check progress (S9) when all requests have been released: no transfer, hold or lease may be left."""
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


# Shared by the checks.


def _table(*states: int) -> NDArray[np.bool_]:
    """Return a table: state -> whether it is one of `states`."""
    table = np.zeros(STATE_MASK + 1, dtype=np.bool_)
    table[list(states)] = True
    return table


_RESTING = _table(BlockState.FREE, BlockState.EVICTED, BlockState.STORED, BlockState.RETIRED)
_UNLEASED = _table(LeaseState.NONE, LeaseState.RETIRED)
# As plain ints: a member is slow to compare, and to find in a set.
_ALLOCATED = int(BlockState.ALLOCATED)
_UNUSED = frozenset({int(BlockState.FREE), int(BlockState.EVICTED)})
_UNCOUNTED = _UNUSED | {int(BlockState.RETIRED)}
_PLANNED, _ABANDONED = int(TransferState.PLANNED), int(TransferState.ABANDONED)
_MATCHED, _DEFERRED = int(RequestState.MATCHED), int(RequestState.DEFERRED)
_FINISHED, _RELEASED = int(RequestState.FINISHED), int(RequestState.RELEASED)
_NOT_LEASED, _RETIRED_LEASE = int(LeaseState.NONE), int(LeaseState.RETIRED)
_READING, _WRITING = int(LeaseState.READING), int(LeaseState.WRITING)


class SlotFacts(NamedTuple):
    """The state of a slot in the ledger, and the number of transfers and matches that hold it."""

    word: int
    is_free: int
    """Number of times that it is in the free queue."""
    is_in_order: bool
    """Whether it is in the eviction order."""
    said_copied_out: int
    """Number of copies to other tiers that hold it, according to `copied_out`."""
    planned: int
    """Number of planned stores into it."""
    copies: int
    """Number of other transfers that touch it."""
    pins: int
    """Number of matches that hold it."""
    outward: int
    """Number of its loads and matches that are for copies to other tiers."""

    @property
    def state(self) -> int:
        return self.word & STATE_MASK

    @property
    def is_readable(self) -> bool:
        return FIRST_READABLE <= self.word & STATE_MASK <= LAST_READABLE

    @property
    def is_unused(self) -> bool:
        return self.word & STATE_MASK in _UNUSED

    @property
    def is_idle(self) -> bool:
        """Whether it is readable, and held by nothing or only by copies to other tiers."""
        return self.word == IDLE or (self.is_readable and self.copies + self.pins == self.outward > 0)


class LeaseFacts(NamedTuple):
    """The lease of a device block in the ledger, and the number of transfers that touch it."""

    word: int
    readers: int
    """Number of live stores that read it."""
    writers: int
    """Number of live loads that write it."""

    @property
    def is_touched(self) -> bool:
        """Whether a live transfer touches it."""
        return self.readers + self.writers > 0

    @property
    def is_right(self) -> bool:
        """Whether the state of its lease fits its transfers. A lost load may still write a retired block."""
        state = self.word & STATE_MASK
        if self.writers:
            return state in (_WRITING, _RETIRED_LEASE)
        return state in (_READING if self.readers else _NOT_LEASED, _RETIRED_LEASE)

    @property
    def is_miscounted(self) -> bool:
        """Whether the reader count in its word is wrong. A block that is written or retired has no count."""
        if self.writers or self.word & STATE_MASK == _RETIRED_LEASE:
            return False
        return self.word >> _READERS_SHIFT != self.readers


_Facts = TypeVar("_Facts", bound=tuple[int, ...])


class _Alike(Generic[_Facts]):
    """The facts of all slots, or of all device blocks. columns: one list for each fact, indexed by id."""

    def __init__(self, facts: Callable[..., _Facts], *columns: Sequence[int]) -> None:
        self._facts, self._columns = facts, columns
        self._different = [facts(*one) for one in set(zip(*columns))]

    def of(self, number: int) -> _Facts:
        """Return the facts of this slot or device block."""
        return self._facts(*[column[number] for column in self._columns])

    def count(self, condition: Callable[[_Facts], bool]) -> int:
        """Count the ids whose facts meet the condition."""
        found = set(filter(condition, self._different))
        return sum(map(found.__contains__, zip(*self._columns)))

    def first(self, condition: Callable[[_Facts], bool]) -> tuple[int, ...]:
        """Return the first ids whose facts meet the condition, at most `MOST_NAMED`."""
        found = set(filter(condition, self._different))
        if not found:
            return ()
        each = enumerate(zip(*self._columns))
        return tuple(islice((number for number, one in each if one in found), MOST_NAMED))


class HolderCounts:
    """A ledger, and the number of transfers and matches that hold each slot and device block.

    The numbers are counted from the transfers and requests, not from the words that must agree with them.
    Most slots have equal facts. So a check tests each distinct set of facts once, and then finds the slots
    with it.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.words = ledger, ledger.blocks.words
        slots, device_blocks = ledger.config.host_blocks, ledger.config.device_blocks
        is_free, said_copied_out, planned = [0] * slots, [0] * slots, [0] * slots
        copies, pins, outward = [0] * slots, [0] * slots, [0] * slots
        readers, writers = [0] * device_blocks, [0] * device_blocks
        _add(is_free, ledger.free)
        for slot, count in ledger.copied_out.items():
            said_copied_out[slot] = count
        for transfer in ledger.transfers.values():
            if transfer.direction is STORE:
                _add(planned if transfer.word & STATE_MASK == _PLANNED else copies, listed(transfer.slots))
                _add(readers, listed(transfer.device_blocks))
                continue
            _add(copies, listed(transfer.slots))
            _add(writers, listed(transfer.device_blocks))
            owner = ledger.requests.get(transfer.owners[0][0])
            if owner is not None and owner.target:
                _add(outward, listed(transfer.slots))
        for request in ledger.requests.values():
            if len(request.pins):
                live = listed(ledger.live_pins(request))
                _add(pins, live)
                if request.target:
                    _add(outward, live)
        is_in_order = list(map(ledger.policy.__contains__, range(slots)))
        self.slots = _Alike(
            SlotFacts, self.words, is_free, is_in_order, said_copied_out, planned, copies, pins, outward
        )
        self.leases = _Alike(LeaseFacts, ledger.leases.words, readers, writers)


def _add(counts: list[int], ids: Iterable[int]) -> None:
    for one in ids:
        counts[one] += 1


def _first(mask: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0][:MOST_NAMED].tolist())


def _slot_words(ledger: Ledger, slots: Sequence[int]) -> str:
    return ", ".join(f"slot {slot} {BLOCK_WORDS.describe(ledger.blocks.words[slot])}" for slot in slots)


# The checks.


def slots_stand_in_one_list(counts: HolderCounts) -> Iterator[Violation]:
    """Check conservation (S1): FREE and EVICTED slots are in the free queue, idle ones in the eviction order.
    A block is idle if it is held by nothing, or only by copies to other tiers."""
    ledger = counts.ledger
    wrong: tuple[tuple[Callable[[SlotFacts], bool], str], ...] = (
        (lambda slot: slot.is_free > 0 and not slot.is_unused, "in the free queue although in use"),
        (lambda slot: slot.is_unused and not slot.is_free, "unused, but not in the free queue"),
        (lambda slot: slot.is_in_order and not slot.is_idle, "in the eviction order although not idle"),
        (lambda slot: slot.is_idle and not slot.is_in_order, "idle, but not in the eviction order"),
        (
            lambda slot: slot.is_readable and slot.said_copied_out != slot.outward,
            "copies to other tiers are miscounted",
        ),
        (lambda slot: slot.state == _ALLOCATED and not slot.planned, "allocated by no planned store"),
    )
    for is_wrong, message in wrong:
        slots = counts.slots.first(is_wrong)
        if slots:
            yield Violation(Property.CONSERVATION, f"{_slot_words(ledger, slots)}: {message}", slots)
    for name, length, count in (
        ("free queue", len(ledger.free), counts.slots.count(lambda slot: slot.is_unused)),
        ("eviction order", len(ledger.policy), counts.slots.count(lambda slot: slot.is_idle)),
    ):
        if length != count:
            yield Violation(
                Property.CONSERVATION, f"the {name} counts {length} slots, and {count} have its state"
            )


def index_names_live_blocks(counts: HolderCounts) -> Iterator[Violation]:
    """Check conservation (S1), no doubled store (S13): the index maps each key to its one live block."""
    ledger = counts.ledger
    named = [
        slot for slot, word in enumerate(counts.words) if FIRST_INDEXED <= word & STATE_MASK <= LAST_INDEXED
    ]
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
    """Check no reuse in flight (S3), publish after commit (S2): each slot of a live transfer has a state that
    fits the transfer."""
    ledger = counts.ledger
    for transfer in ledger.transfers.values():
        allowed = _STATES_UNDER.get((transfer.direction, transfer.word & STATE_MASK))
        if allowed is None:
            continue
        words = counts.words
        wrong = [slot for slot in listed(transfer.slots) if words[slot] & STATE_MASK not in allowed]
        if wrong:
            del wrong[MOST_NAMED:]
            store = transfer.direction is STORE
            readable = store and any(ledger.readable(slot) for slot in wrong)
            message = f"{_slot_words(ledger, wrong)}, while {_name(transfer)} touches it"
            property = Property.PUBLISH_AFTER_COMMIT if readable else Property.NO_REUSE_IN_FLIGHT
            yield Violation(property, message, tuple(wrong), transfers=(transfer.id,))


_VOIDED = (BlockState.QUARANTINED, BlockState.RETIRED)
_STATES_UNDER: dict[tuple[Direction, int], tuple[int, ...]] = {
    (direction, int(state)): tuple(map(int, allowed))
    for direction, state, allowed in (
        (Direction.STORE, TransferState.PLANNED, (BlockState.ALLOCATED,)),
        (Direction.STORE, TransferState.SUBMITTED, (BlockState.STORING,)),
        (Direction.STORE, TransferState.ABANDONED, (BlockState.QUARANTINED,)),
        (Direction.LOAD, TransferState.PLANNED, (BlockState.LOADING, *_VOIDED)),
        (Direction.LOAD, TransferState.SUBMITTED, (BlockState.LOADING, *_VOIDED)),
        (Direction.LOAD, TransferState.ABANDONED, _VOIDED),
    )
}
"""(direction, state) of a live transfer -> allowed states of its slots. Another load may have voided the
slots of a load.

A transfer in another state is not live; `reports_add_up` finds it.
"""


def _name(transfer: TransferRecord) -> str:
    return f"{transfer.direction.name.lower()} {transfer.id} ({transfer.state.name})"


def leases_equal_live_copies(counts: HolderCounts) -> Iterator[Violation]:
    """Check that exactly the live transfers have leases; stores read, loads write (S3, S4, S13)."""
    words = counts.ledger.leases.words
    reuse, release = Property.NO_REUSE_IN_FLIGHT, Property.ONE_RELEASE_PER_HOLD
    wrong: tuple[tuple[Property, Callable[[LeaseFacts], bool], str], ...] = (
        (
            reuse,
            lambda block: not block.is_right and block.is_touched,
            "a live copy touches it, and its lease does not say so",
        ),
        (
            release,
            lambda block: not block.is_right and not block.is_touched,
            "leased, and no live copy touches it",
        ),
        (
            release,
            lambda block: block.is_right and block.is_miscounted,
            "its readers are not its live stores",
        ),
        (reuse, lambda block: block.writers > 1 or block.writers > 0 < block.readers, "a load shares it"),
        (Property.STORED_ONCE, lambda block: block.readers > 1, "two stores of it are in flight"),
    )
    for property, is_wrong, message in wrong:
        blocks = counts.leases.first(is_wrong)
        if blocks:
            named = ", ".join(f"device block {one} {LEASE_WORDS.describe(words[one])}" for one in blocks)
            yield Violation(property, f"{named}: {message}", device_blocks=blocks)


def copies_and_pins_equal_holders(counts: HolderCounts) -> Iterator[Violation]:
    """Check one release per hold (S4): a block counts its live transfers and its matches."""
    wrong: tuple[tuple[Callable[[SlotFacts], bool], str], ...] = (
        # Retired slots count no copy. A free slot under a copy is found by `live_copies_keep_their_slots`.
        (
            lambda slot: (
                slot.word >> _COPIES_SHIFT & _COPIES_LIMIT != slot.copies and slot.state not in _UNCOUNTED
            ),
            "its copies are not its transfers",
        ),
        (lambda slot: slot.word >> _PINS_SHIFT != slot.pins, "its pins are not its matches"),
    )
    for is_wrong, message in wrong:
        slots = counts.slots.first(is_wrong)
        if slots:
            holders = [counts.slots.of(slot) for slot in slots]
            held = ", ".join(f"{one.copies} transfers and {one.pins} matches" for one in holders)
            found = f"{_slot_words(counts.ledger, slots)}: {message} (hold it: {held})"
            yield Violation(Property.ONE_RELEASE_PER_HOLD, found, slots)


def requests_name_their_loads(counts: HolderCounts) -> Iterator[Violation]:
    """Check one release per hold (S4): a request has the id of its load in flight, so the load's end reaches
    it."""
    ledger = counts.ledger
    live: dict[str, list[int]] = {}
    for transfer in ledger.transfers.values():
        if transfer.direction is LOAD:
            live.setdefault(transfer.owners[0][0], []).append(transfer.id)
    for name, request in ledger.requests.items():
        count = request.word >> _LOADS_SHIFT & _LOADS_LIMIT
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
    """Check stale reports change nothing (S5): a transfer counts its reports; its slots have its
    generation."""
    ledger = counts.ledger
    generation = ledger.generation
    for id, transfer in ledger.transfers.items():
        word = transfer.word
        pending, failed = word >> _PENDING_SHIFT & _PENDING_LIMIT, word >> _FAILED_SHIFT & _FAILED_LIMIT
        reported = bin(transfer.reported).count("1")
        if id != transfer.id or word & STATE_MASK not in LIVE:
            message = f"{_name(transfer)} is kept as live transfer {id}"
            yield Violation(Property.STALE_REPORTS, message, transfers=(id,))
        elif pending + reported != ledger.config.workers or failed > reported:
            message = f"{_name(transfer)}: {reported} workers reported, {pending} pending, {failed} failed"
            yield Violation(Property.STALE_REPORTS, message, transfers=(id,))
        is_wrong = ne if transfer.direction is STORE else gt
        wrong = [slot for slot in listed(transfer.slots) if is_wrong(generation[slot], id)][:MOST_NAMED]
        if wrong:
            message = f"slots {wrong} of {_name(transfer)} hold blocks of another generation"
            yield Violation(Property.STALE_REPORTS, message, tuple(wrong), transfers=(id,))


def matches_hold_pins(counts: HolderCounts) -> Iterator[Violation]:
    """Check a match holds what it counts (S7): a request has pins exactly while it is MATCHED."""
    ledger = counts.ledger
    for name, request in ledger.requests.items():
        if (request.word & STATE_MASK == _MATCHED) != (len(request.pins) > 0):
            slots = tuple(to_list(request.pins)[:MOST_NAMED])
            message = f"request {name} is {request.state.name} with {len(request.pins)} pins"
            yield Violation(Property.MATCH_HOLDS, message, slots, requests=(name,))


def waits_have_owners(counts: HolderCounts) -> Iterator[Violation]:
    """Check progress (S9): a DEFERRED request waits for a live transfer, a FINISHED one for its load."""
    ledger = counts.ledger
    for name, request in ledger.requests.items():
        state, loads = request.word & STATE_MASK, request.word >> _LOADS_SHIFT & _LOADS_LIMIT
        if (state == _DEFERRED) != (ledger.deferred.get(name) is request):
            message = (
                f"request {name} is {request.state.name}, and the list of deferred requests says otherwise"
            )
            yield Violation(Property.PROGRESS, message, requests=(name,))
        elif state == _DEFERRED and request.awaits not in ledger.transfers:
            message = f"request {name} waits for transfer {request.awaits}, which is not live"
            yield Violation(Property.PROGRESS, message, transfers=(request.awaits,), requests=(name,))
        elif state == _RELEASED or (state == _FINISHED and not loads):
            message = f"request {name} is {request.state.name} without a load, and still kept"
            yield Violation(Property.PROGRESS, message, requests=(name,))


def epochs_are_current(counts: HolderCounts) -> Iterator[Violation]:
    """Check no stale data (S14): exactly the transfers of older epochs are ABANDONED."""
    ledger = counts.ledger
    for transfer in ledger.transfers.values():
        if (transfer.word & STATE_MASK == _ABANDONED) == (transfer.epoch == ledger.epoch):
            message = f"{_name(transfer)} belongs to epoch {transfer.epoch}; the epoch is now {ledger.epoch}"
            yield Violation(Property.NO_STALE_DATA, message, transfers=(transfer.id,))


def cursors_are_in_order(counts: HolderCounts) -> Iterator[Violation]:
    """Check no lost store (S13): a request has not settled more blocks than it has offered."""
    for name, request in counts.ledger.requests.items():
        settled, offered = request.settled, request.offered
        if len(settled) != len(offered) or any(map(gt, settled, offered)):
            message = f"request {name} settled {settled} of its blocks, and offered {offered}"
            yield Violation(Property.STORED_ONCE, message, requests=(name,))


def provenance_is_of_one_epoch(counts: HolderCounts) -> Iterator[Violation]:
    """Check no stale data (S14): a device block has bytes of a load of this epoch or an older one, not
    both."""
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
    """Check conservation (S1): the history of offers keeps its limit, and has only keys that were offered."""
    times, limit = counts.ledger.offers.times, counts.ledger.config.counted_keys
    if len(times) > limit:
        message = f"{len(times)} keys are in the history of offers, and {limit} may be"
        yield Violation(Property.CONSERVATION, message)
    never = [key for key, count in times.items() if count < 1]
    if never:
        message = f"key {never[0].hex()} is in the history of offers, offered 0 times"
        yield Violation(Property.CONSERVATION, message)


def totals_follow_from_words(counts: HolderCounts) -> Iterator[Violation]:
    """Check conservation (S1): the totals of states and holders, which gauges read, agree with the words."""
    for name, words in (("slots", counts.ledger.blocks), ("device blocks", counts.ledger.leases)):
        machine, totals = words.codec.machine, words.totals.tolist()
        what = {int(state): f"are {state.name}" for state in machine.states}
        what |= {1 + STATE_MASK + n: f"have {counter.name}" for n, counter in enumerate(machine.counters)}
        for place, count in enumerate(words.counted()):
            if totals[place] != count:
                message = f"{count} {name} {what[place]}, and the ledger counts {totals[place]}"
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
    totals_follow_from_words,
)
