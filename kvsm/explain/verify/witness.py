"""The witness: keeps the second book, and says where the ledger's differs from it.

    broken = witness.follow(event)           # what is wrong with the event, given those before it
    ledger.apply(event)
    broken += witness.compare(ledger)        # what is wrong with what the ledger made of it

`compare` looks at what the event names, and at counts: free, idle and indexed slots, and offered keys. So a
list that the fold forgets to update shows at once. The full check, `compare_all`, then names the slot.

The ledger's packed words and the book's entries meet in one place only, `_Reading`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvsm.core.ledger import Ledger
from kvsm.core.ledger.invariants import MOST_NAMED, Violation
from kvsm.events import Direction
from kvsm.explain.verify.book import Book
from kvsm.explain.verify.book_entries import (
    IDLE,
    NO_CURSORS,
    READABLE,
    TOUCHED,
    UNLEASED,
    UNUSED,
    USUAL_LEASES,
    USUAL_SLOTS,
    BookedTransfer,
    SlotEntry,
)
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.states.block import BLOCK_WORDS, EVICTED, FREE
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.request import RequestState
from kvsm.states.transfer import ABANDONED, PLANNED, SUBMITTED, TRANSFER_WORDS, TransferState
from kvsm.states.words import STATE_MASK, Codec


class _Reading(dict[int, Any]):
    """A word of the ledger -> the entry of the book that means the same: (state, *counts)."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self._codec = codec

    def __missing__(self, word: int) -> tuple[Any, ...]:
        state, counts = self._codec.decode(word)
        entry = (self._codec.machine.states(state), *counts)
        # The book's own object if it has one: identical tuples compare several times faster than equal ones.
        self[word] = entry = next((one for one in (*USUAL_SLOTS, *USUAL_LEASES) if one == entry), entry)
        return entry

    def of(self, words: Iterable[int]) -> list[Any]:
        """The entries that mean the same as these words."""
        return list(map(self.__getitem__, words))

    def differs(self, what: str, word: int, entry: tuple[Any, ...]) -> str:
        """Both sides in words."""
        codec = self._codec
        wanted = codec.describe(codec.encode(entry[0], entry[1:]))
        return f"{what} is {codec.describe(word)}, and must be {wanted}"


_SLOTS, _LEASES = _Reading(BLOCK_WORDS), _Reading(LEASE_WORDS)


_UNUSED_STATES = FREE, EVICTED
_OF_ASKS = Property.MATCH_HOLDS, Property.ONE_RELEASE_PER_HOLD, Property.PROGRESS
_ASKS = "holds a match:", "names its load:", "waits for transfer"


class CursorsBack(NamedTuple):
    """Requests whose cursors may go back, because a store has failed since they moved.

    The one thing in the book that decides whether an event is right, and that no snapshot holds. So a witness
    that begins with one takes it on trust, and says where it did. The witness of the events before knows.

    known: it is so. trusted: it is so at the end if it was at the beginning. relied_on: whose cursors went
    back, which was right only if it was so at the beginning.
    """

    known: frozenset[str]
    trusted: frozenset[str]
    relied_on: frozenset[str]

    def behind(self, before: frozenset[str]) -> frozenset[str]:
        """At the end, given those at the beginning."""
        return self.known | (self.trusted & before)


class LeasesTold(NamedTuple):
    """What a witness that begins with a snapshot knows of the leases of sessions. No snapshot holds them.

    first: session -> whether a lease begins or ends, and its name, in its first answer; none is older if
        `is_complete`.
    held: session -> its lease at the end.
    is_complete: whether a restart has ended all leases of before.
    """

    first: dict[str, tuple[bool, str]]
    held: dict[str, str]
    is_complete: bool

    def allows(self, before: Mapping[str, str]) -> bool:
        """Whether these answers may follow, given the leases that sessions have at the beginning."""
        return all(
            session not in before or (not begins and before[session] == lease)
            for session, (begins, lease) in self.first.items()
        )

    def after(self, before: Mapping[str, str]) -> dict[str, str]:
        """The leases that sessions have at the end, given those at the beginning."""
        older = {} if self.is_complete else {one: before[one] for one in before.keys() - self.first.keys()}
        return older | self.held


class Witness(Book):
    """Follows the events of one core from an empty pool on. `of` starts in the middle."""

    @classmethod
    def of(cls, ledger: Ledger) -> Witness:
        """A witness that takes a ledger's state on trust, for a log that begins with a snapshot."""
        one = cls(ledger.config)
        one._slots, one._leases = _SLOTS.of(ledger.blocks.words), _LEASES.of(ledger.leases.words)
        one._free = sum(map(one._slots.count, UNUSED))
        one._idle = one._slots.count(IDLE)
        one._held = dict(ledger.index)
        for key, slot in one._held.items():
            one._keys[slot] = key
        for id, transfer in ledger.transfers.items():
            slots, blocks = to_list(transfer.slots), to_list(transfer.device_blocks)
            name = "" if transfer.direction is Direction.STORE else transfer.owners[0][0]
            booked = BookedTransfer(
                transfer.direction is Direction.STORE, slots, blocks, transfer.epoch, name
            )
            booked.submitted = transfer.state is not TransferState.PLANNED
            booked.abandoned = transfer.state is TransferState.ABANDONED
            booked.failed = TRANSFER_WORDS.decode(transfer.word)[1][1] > 0
            booked.reported, booked.since = transfer.reported, transfer.since
            booked.flush = transfer.flush
            for slot, key in zip(slots, transfer.keys):
                one._keys[slot] = key
            one._transfers[id] = booked
        for name, request in ledger.requests.items():
            one._known[name] = request.target
            if request.state is RequestState.FINISHED:
                one._over.add(name)
            if request.patience != -1:
                one._patience[name] = request.patience
            if len(request.pins):
                one._matches[name] = request.pinned_at, to_list(request.pins)
                for slot in {*to_list(request.pins)}.difference(to_list(ledger.live_pins(request))):
                    # Voided by some event since the match. Later matches on this slot are younger than it.
                    one._voided[slot] = max(one._voided[slot], request.pinned_at + 1)
            if request.load:
                one._loads[name] = request.load
            if request.offered:
                one._cursors[name] = request.settled, request.offered
        one._waits = {name: (request.awaits, request.patience) for name, request in ledger.deferred.items()}
        if ledger.forgotten_at:
            # The store that took a key away last may have failed.
            one._may_go_back = set(one._cursors)
            one._taken_on_trust = set(one._cursors)
        one._generations = list(ledger.generation)
        one._step, one._tick, one._epoch = ledger.step, ledger.tick, ledger.epoch
        one._life, one._weights, one._pins_voided = ledger.life, ledger.weights, ledger.voided_at
        one._offers = ledger.offers.times.copy()
        one._times, one._declined_hits = ledger.times, ledger.declined_hits
        one._last_void, one._last_end, one._last_loss = max(one._voided), ledger.ended_at, ledger.forgotten_at
        one._brought = {**ledger.provenance.brought, **ledger.provenance.stale}
        one._older = set(ledger.provenance.stale)
        return one

    def cursors_back(self) -> CursorsBack:
        """Whose cursors may go back, and did, as far as this witness knows."""
        trusted = self._may_go_back & self._taken_on_trust
        return CursorsBack(
            frozenset(self._may_go_back - trusted), frozenset(trusted), frozenset(self._relied_on)
        )

    def leases_told(self) -> LeasesTold:
        """What this witness knows of the leases of sessions."""
        return LeasesTold(self._first_answers, self._session_leases, self._knows_leases)

    def compare(self, ledger: Ledger) -> list[Violation]:
        """What is wrong with what the ledger made of the event followed last."""
        broken: list[Violation] = []
        if self._now_slots:
            broken += self._compare_named_slots(ledger, self._now_slots)
        if self._now_blocks:
            words, leases, blocks = ledger.leases.words, self._leases, self._now_blocks
            if [_LEASES[words[block]] for block in blocks] != [leases[block] for block in blocks]:
                broken += self._compare_leases(ledger, blocks)
        if self._now_transfer:
            broken += self._compare_transfer(ledger, self._now_transfer)
        if self._now_brought:
            broken += self._compare_provenance(ledger, self._now_brought)
        if self._now_requests:
            broken += self._compare_cursors(ledger, self._now_requests)
        if self._now_asks or len(ledger.deferred) != len(self._waits):
            broken += self._compare_asks(ledger, self._now_asks)
        if self._now_keys:
            keys = list(self._now_keys)
            if ledger.index.find(keys) != list(map(self._held.get, keys)):
                broken += self._compare_keys(ledger, keys)
        if len(ledger.offers.times) != len(self._offers):
            broken += self._compare_counts(ledger)
        if ledger.ended_at != self._last_end or ledger.forgotten_at < self._last_loss:
            broken += self._compare_ends(ledger)
        return broken

    def _compare_named_slots(self, ledger: Ledger, slots: Sequence[int]) -> list[Violation]:
        """The same for the slots of the event, and how many are free, idle and held."""
        words, book, policy = ledger.blocks.words, self._slots, ledger.policy
        entries = [book[slot] for slot in slots]
        one, count = entries[0], len(entries)
        if entries.count(one) == count:  # As most events leave their slots.
            unused, idle = [one[0] in _UNUSED_STATES] * count, [one == IDLE] * count
        else:
            unused, idle = [one[0] in _UNUSED_STATES for one in entries], [one == IDLE for one in entries]
        broken: list[Violation] = []
        if [_SLOTS[words[slot]] for slot in slots] != entries:
            broken += self._compare_slots(ledger, slots)
        if ledger.free.which(tuple(slots)) != unused or [slot in policy for slot in slots] != idle:
            broken += self._compare_lists(ledger, slots)
        evictable = ledger.evictable() if ledger.copied_out else len(policy)
        if evictable != self._idle or len(ledger.index) != len(self._held) or len(ledger.free) != self._free:
            broken += self._compare_counts(ledger)
        return broken

    def compare_all(self, ledger: Ledger) -> list[Violation]:
        """The same for all slots, device blocks, keys, transfers and requests."""
        broken: list[Violation] = []
        if _SLOTS.of(ledger.blocks.words) != self._slots:
            broken += self._compare_slots(ledger, range(len(self._slots)))
        if _LEASES.of(ledger.leases.words) != self._leases:
            broken += self._compare_leases(ledger, range(len(self._leases)))
        held, index = self._held, ledger.index
        if len(index) != len(held) or index.find(list(held)) != list(held.values()):
            broken += self._compare_keys(ledger, {key for key, _ in held.items() ^ index.items()})
        for id in sorted({*self._transfers, *ledger.transfers}):
            broken += self._compare_transfer(ledger, id) or self._compare_plan(ledger, id)
        broken += self._compare_cursors(ledger, sorted({*self._cursors, *ledger.requests}))
        asks = sorted({*self._matches, *self._loads, *self._waits, *ledger.requests})
        broken += self._compare_asks(ledger, asks)
        provenance = ledger.provenance
        brought = sorted({*self._brought, *provenance.brought, *provenance.stale})
        broken += self._compare_provenance(ledger, brought)
        if list(ledger.offers.times.items()) != list(self._offers.items()):
            message = "the number of offers of the keys is not what the events say"
            broken.append(Violation(Property.EVENTS_ARE_STATE, message))
        broken += self._compare_requests(ledger) + self._compare_facts(ledger)
        return broken + self._compare_counts(ledger) + self._compare_ends(ledger)

    def _compare_slots(self, ledger: Ledger, slots: Iterable[int]) -> list[Violation]:
        """Violations of the first slots on which the two books differ."""
        words = ledger.blocks.words
        broken = [
            self._differs(slot, words[slot], self._slots[slot])
            for slot in slots
            if _SLOTS[words[slot]] != self._slots[slot]
        ]
        return broken[:MOST_NAMED]

    def _differs(self, slot: int, word: int, expected: SlotEntry) -> Violation:
        """Which property is broken by a slot on which the two books differ."""
        found, tells = _SLOTS[word], _SLOTS.differs(f"slot {slot}", word, expected)
        readable, must_be_readable = found[0] in READABLE, expected[0] in READABLE
        if readable and not must_be_readable:
            property, why = self._unreadable_by(slot), f"it can be matched, but {self._why(slot)}"
        elif found in UNUSED and expected[0] in TOUCHED:
            property, why = Property.NO_REUSE_IN_FLIGHT, "a copy may touch it"
        elif must_be_readable and not readable:
            property, why = Property.EVENTS_ARE_STATE, "its store ended well, and nothing took it away"
        else:
            property, why = Property.ONE_RELEASE_PER_HOLD, "its copies and pins do not equal their holders"
        return Violation(property, f"{tells}: {why}", (slot,))

    def _compare_leases(self, ledger: Ledger, blocks: Iterable[int]) -> list[Violation]:
        broken: list[Violation] = []
        for block in blocks:
            word, expected = ledger.leases.words[block], self._leases[block]
            if _LEASES[word] != expected:
                tells = _LEASES.differs(f"device block {block}", word, expected)
                property = Property.ONE_RELEASE_PER_HOLD
                if _LEASES[word] == UNLEASED:  # It could be reused under the copy.
                    property = Property.NO_REUSE_IN_FLIGHT
                broken.append(Violation(property, tells, device_blocks=(block,)))
        return broken[:MOST_NAMED]

    def _compare_lists(self, ledger: Ledger, slots: Iterable[int]) -> list[Violation]:
        """An unused slot is in the free queue, an idle one in the eviction order; others are in neither."""
        free, order, elsewhere = ledger.free, ledger.policy, ledger.copied_out
        broken = []
        for slot in slots:
            entry = self._slots[slot]
            for name, is_in, must_be in (
                ("the free queue", slot in free, entry in UNUSED),
                ("the eviction order", slot in order, entry == IDLE),
            ):
                if is_in != must_be and slot not in elsewhere:
                    wrong = "is missing in" if must_be else "must not be in"
                    broken.append(Violation(Property.CONSERVATION, f"slot {slot} {wrong} {name}", (slot,)))
        return broken[:MOST_NAMED]

    def _compare_keys(self, ledger: Ledger, keys: Iterable[bytes]) -> list[Violation]:
        broken = []
        for key in sorted(keys):
            found, expected = ledger.index.get(key), self._held.get(key)
            if found != expected:
                message = f"key {key.hex()} is in slot {found}, and must be in slot {expected}"
                slots = tuple(slot for slot in (found, expected) if slot is not None)
                broken.append(Violation(Property.EVENTS_ARE_STATE, message, slots))
        return broken[:MOST_NAMED]

    def _compare_transfer(self, ledger: Ledger, id: int) -> list[Violation]:
        booked, transfer = self._transfers.get(id), ledger.transfers.get(id)
        if booked is None and transfer is None:
            return []
        if booked is None or transfer is None:
            wrong = "has ended, but is still kept" if booked is None else "has not ended, but is forgotten"
            return [Violation(Property.STALE_REPORTS, f"transfer {id} {wrong}", transfers=(id,))]
        if transfer.since != booked.since:
            message = f"transfer {id} is in flight since tick {transfer.since}; it must be {booked.since}"
            return [Violation(Property.PROGRESS, message, transfers=(id,))]
        if (transfer.epoch == ledger.epoch) is booked.abandoned:
            message = f"transfer {id} is of epoch {transfer.epoch}; the epoch is now {ledger.epoch}"
            return [Violation(Property.NO_STALE_DATA, message, transfers=(id,))]
        expected = ABANDONED if booked.abandoned else SUBMITTED if booked.submitted else PLANNED
        if transfer.reported == booked.reported and transfer.word & STATE_MASK == expected:
            return []
        message = (
            f"transfer {id} is {transfer.state.name}, reported by workers {transfer.reported:#b}; "
            f"it must be {expected.name}, reported by {booked.reported:#b}"
        )
        return [Violation(Property.STALE_REPORTS, message, transfers=(id,))]

    def _compare_plan(self, ledger: Ledger, id: int) -> list[Violation]:
        """Compare the plan, and whether the engine waits for it. Owners of stores are only for people."""
        booked, transfer = self._transfers.get(id), ledger.transfers.get(id)
        if booked is None or transfer is None:
            return []
        keys = tuple([self._keys[slot] for slot in booked.slots]) if booked.store else ()
        load = () if booked.store else ((booked.request, len(booked.slots)),)
        owners = () if transfer.direction is Direction.STORE else transfer.owners
        # Of the reports of an abandoned transfer, only their number matters.
        failed = booked.failed if booked.abandoned else TRANSFER_WORDS.decode(transfer.word)[1][1] > 0
        return [
            Violation(property, f"transfer {id} has {what} {found}; it must be {expected}", transfers=(id,))
            for property, what, found, expected in (
                (Property.EVENTS_ARE_STATE, "id", transfer.id, id),
                (Property.EVENTS_ARE_STATE, "owners", owners, load),
                (Property.EVENTS_ARE_STATE, "slots", to_list(transfer.slots), list(booked.slots)),
                (Property.EVENTS_ARE_STATE, "keys", transfer.keys, keys),
                (
                    Property.NO_REUSE_IN_FLIGHT,
                    "device blocks",
                    to_list(transfer.device_blocks),
                    list(booked.device_blocks),
                ),
                (Property.NO_STALE_DATA, "epoch", transfer.epoch, booked.epoch),
                (Property.FAILURE_IS_NOT_SUCCESS, "a failed report:", failed, booked.failed),
                (Property.EVENTS_ARE_STATE, "an engine that waits for it:", transfer.flush, booked.flush),
            )
            if found != expected
        ]

    def _compare_requests(self, ledger: Ledger) -> list[Violation]:
        """Compare which requests exist, which slots their matches pin, and how long they may wait."""
        broken = []
        for name in sorted({*self._known, *ledger.requests}):
            request = ledger.requests.get(name)
            if request is None or name not in self._known:
                wrong = "is forgotten before its end" if request is None else "is kept after its end"
                broken.append(Violation(Property.PROGRESS, f"request {name} {wrong}", requests=(name,)))
                continue
            match = self._matches.get(name)
            pins = None if not len(request.pins) else (request.pinned_at, to_list(request.pins))
            for property, what, found, expected in (
                (Property.EVENTS_ARE_STATE, "name", request.name, name),
                (Property.EVENTS_ARE_STATE, "target", request.target, self._known[name]),
                (Property.MATCH_HOLDS, "pins", pins, match and (match[0], list(match[1]))),
                (Property.PROGRESS, "last tick of a wait", request.patience, self._patience.get(name, -1)),
            ):
                if found != expected:
                    message = f"request {name} has {what} {found}; it must be {expected}"
                    broken.append(Violation(property, message, requests=(name,)))
        return broken[:MOST_NAMED]

    def _compare_facts(self, ledger: Ledger) -> list[Violation]:
        """Compare the counters of the ledger, and the generation of each slot's block."""
        broken = [
            Violation(property, f"the {what} is {found}; it must be {expected}")
            for property, what, found, expected in (
                (Property.EVENTS_ARE_STATE, "step", ledger.step, self._step),
                (Property.PROGRESS, "tick", ledger.tick, self._tick),
                (Property.NO_STALE_DATA, "epoch", ledger.epoch, self._epoch),
                (Property.NO_STALE_DATA, "version of the weights", ledger.weights, self._weights),
                (Property.EVENTS_ARE_STATE, "number of the process", ledger.life, self._life),
                (Property.STORED_SO_SERVED, "last measured times", ledger.times, self._times),
                (
                    Property.STORED_SO_SERVED,
                    "hits declined in a row",
                    ledger.declined_hits,
                    self._declined_hits,
                ),
                (Property.MATCH_HOLDS, "last event that voided a pin", ledger.voided_at, self._pins_voided),
            )
            if found != expected
        ]
        wrong = [
            slot for slot, (one, two) in enumerate(zip(ledger.generation, self._generations)) if one != two
        ]
        for slot in wrong[:MOST_NAMED]:
            found, expected = ledger.generation[slot], self._generations[slot]
            message = f"the block in slot {slot} is of event {found}; it must be of event {expected}"
            broken.append(Violation(Property.STALE_REPORTS, message, (slot,)))
        return broken

    def _compare_cursors(self, ledger: Ledger, names: Iterable[str]) -> list[Violation]:
        """A cursor that is ahead forgets blocks. One that is behind offers them again."""
        broken: list[Violation] = []
        for name in names:
            request, expected = ledger.requests.get(name), self._cursors.get(name, NO_CURSORS)
            found = NO_CURSORS if request is None else (request.settled, request.offered)
            if found != expected:
                message = (
                    f"request {name} has settled {found[0]} blocks by group and offered {found[1]}; "
                    f"it must be {expected[0]} and {expected[1]}"
                )
                broken.append(Violation(Property.STORED_ONCE, message, requests=(name,)))
        return broken[:MOST_NAMED]

    def _compare_asks(self, ledger: Ledger, names: Iterable[str]) -> list[Violation]:
        """Compare what requests hold and wait for: matches, loads and transfers."""
        broken = []
        for name in names:
            request, wait = ledger.requests.get(name), self._waits.get(name, (0, 0))
            found = (False, 0, 0)
            if request is not None:
                found = len(request.pins) > 0, request.load, request.awaits if name in ledger.deferred else 0
            expected = name in self._matches, self._loads.get(name, 0), wait[0]
            if found == expected:
                continue
            for property, what, one, other in zip(_OF_ASKS, _ASKS, found, expected):
                if one != other:
                    message = f"request {name} {what} {one}; it must be {other}"
                    broken.append(Violation(property, message, requests=(name,)))
        if len(ledger.deferred) != len(self._waits):
            message = f"{len(ledger.deferred)} requests wait for a transfer; there must be {len(self._waits)}"
            broken.append(Violation(Property.PROGRESS, message))
        return broken[:MOST_NAMED]

    def _compare_provenance(self, ledger: Ledger, blocks: Sequence[int]) -> list[Violation]:
        """Compare the keys that loads brought, and whether a reset has come since."""
        brought, stale = ledger.provenance.brought, ledger.provenance.stale
        of_this_epoch = self._older.isdisjoint(blocks) and stale.keys().isdisjoint(blocks)
        if of_this_epoch and [*map(brought.get, blocks)] == [*map(self._brought.get, blocks)]:
            return []
        broken: list[Violation] = []
        for block in blocks:
            key = self._brought.get(block)
            expected = (None, key) if block in self._older else (key, None)
            found = brought.get(block), stale.get(block)
            if found != expected:
                message = f"device block {block} holds {_content(*found)}; it must hold {_content(*expected)}"
                broken.append(Violation(Property.NO_STALE_DATA, message, device_blocks=(block,)))
        return broken[:MOST_NAMED]

    def _compare_counts(self, ledger: Ledger) -> list[Violation]:
        lists, history = Property.CONSERVATION, Property.EVENTS_ARE_STATE
        slots = tuple(self._now_slots[:MOST_NAMED])
        return [
            Violation(property, f"{found} {what}; there must be {expected}", slots)
            for property, what, found, expected in (
                (lists, "slots are in the free queue", len(ledger.free), self._free),
                (lists, "blocks may be evicted", ledger.evictable(), self._idle),
                (lists, "slots are in the index", len(ledger.index), len(self._held)),
                (history, "keys are remembered as offered", len(ledger.offers.times), len(self._offers)),
            )
            if found != expected
        ]

    def _compare_ends(self, ledger: Ledger) -> list[Violation]:
        """Skipped blocks are offered again after a transfer has ended or a key was removed. So a ledger that
        misses that event forgets a block. It may note a removed key too often."""
        broken: list[Violation] = []
        if ledger.ended_at != self._last_end:
            message = f"the last transfer ended at event {self._last_end}, not {ledger.ended_at}"
            broken.append(Violation(Property.STORED_ONCE, message))
        if ledger.forgotten_at < self._last_loss:
            message = f"the last key was removed at event {self._last_loss}, not {ledger.forgotten_at}"
            broken.append(Violation(Property.STORED_ONCE, message))
        return broken


def _content(brought: bytes | None, stale: bytes | None) -> str:
    key = brought or stale
    if key is None:
        return "nothing that a load brought"
    return f"key {key.hex()}, brought by a load of {'an older' if brought is None else 'this'} epoch"
