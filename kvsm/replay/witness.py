"""The witness: keeps the second book, and says where the ledger's differs from it.

    broken = witness.follow(event)           # what is wrong with the event, given those before it
    ledger.apply(event)
    broken += witness.compare(ledger)        # what is wrong with what the ledger made of it

Both look at what the event names, about 0.15 us a slot, and at the counts: how many slots are free, idle and
indexed, how many keys have been offered. So a list that was forgotten shows at once, and by which slot, in a
full check: `compare_all`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvsm.events import Direction
from kvsm.ids import to_list
from kvsm.invariants import MOST_NAMED, Violation
from kvsm.ledger import Ledger
from kvsm.properties import Property
from kvsm.replay.book import NO_CURSORS, Book, BookedMatch, BookedTransfer
from kvsm.states.block import BLOCK_WORDS, BlockState
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.transfer import TRANSFER_WORDS, TransferState
from kvsm.states.words import STATE_MASK

_STORED = int(BlockState.STORED)
_UNUSED = (int(BlockState.FREE), int(BlockState.EVICTED))
_READABLE = (_STORED, int(BlockState.LOADING))
_TOUCHED = tuple(
    int(state)
    for state in (
        BlockState.ALLOCATED,
        BlockState.STORING,
        BlockState.LOADING,
        BlockState.QUARANTINED,
        BlockState.RETIRED,
    )
)
_PLANNED, _SUBMITTED, _ABANDONED = (
    int(state) for state in (TransferState.PLANNED, TransferState.SUBMITTED, TransferState.ABANDONED)
)


class Witness(Book):
    """Follows the events of one life of the core, from an empty pool on; `of` starts in the middle."""

    @classmethod
    def of(cls, ledger: Ledger) -> Witness:
        """A witness who takes a ledger's state on trust: where a log starts in the middle of a life."""
        one = cls(ledger.config)
        one._words, one._leases = ledger.blocks.words.tolist(), ledger.leases.words.tolist()
        one._free = sum(word in _UNUSED for word in one._words)
        one._idle = one._words.count(_STORED)
        one._held = dict(ledger.index)
        for key, slot in one._held.items():
            one._keys[slot] = key
        for id, transfer in ledger.transfers.items():
            slots, blocks = to_list(transfer.slots), to_list(transfer.device_blocks)
            store = transfer.direction is Direction.STORE
            copy = one._copies[id] = BookedTransfer(store, slots, blocks)
            copy.submitted = transfer.state is not TransferState.PLANNED
            copy.abandoned = transfer.state is TransferState.ABANDONED
            copy.failed = TRANSFER_WORDS.decode(transfer.word)[1][1] > 0
            copy.reported, copy.since = transfer.reported, transfer.since
        for name, request in ledger.requests.items():
            if len(request.pins):
                one._matches[name] = BookedMatch(request.pinned_at, to_list(ledger.live_pins(request)))
            if request.offered:
                one._cursors[name] = request.settled, request.offered
        one._tick, one._times = ledger.tick, ledger.offers.times.copy()
        one._last_end, one._last_loss = ledger.ended_at, ledger.forgotten_at
        one._brought = {**ledger.provenance.brought, **ledger.provenance.stale}
        one._older = set(ledger.provenance.stale)
        return one

    # Comparing.

    def compare(self, ledger: Ledger) -> list[Violation]:
        """What the ledger made of the event that was followed last, as far as the event names it."""
        broken: list[Violation] = []
        slots, blocks = self._slots, self._blocks
        if slots:
            found, expected = ledger.blocks.words, self._words
            if [found[slot] for slot in slots] != [expected[slot] for slot in slots]:
                broken += self._compare_slots(ledger, slots)
            if (
                len(ledger.index) != len(self._held)
                or len(ledger.policy) != self._idle
                or len(ledger.free) != self._free
            ):
                broken += self._compare_counts(ledger)
        if blocks:
            found, expected = ledger.leases.words, self._leases
            if [found[block] for block in blocks] != [expected[block] for block in blocks]:
                broken += self._compare_leases(ledger, blocks)
        if self._transfer:
            broken += self._compare_transfer(ledger, self._transfer)
        if self._noted:
            broken += self._compare_provenance(ledger, self._noted)
        if self._names:
            broken += self._compare_cursors(ledger, self._names)
        if len(ledger.offers.times) != len(self._times):
            broken += self._compare_counts(ledger)
        if ledger.ended_at != self._last_end or ledger.forgotten_at < self._last_loss:
            broken += self._compare_ends(ledger)
        return broken

    def compare_all(self, ledger: Ledger) -> list[Violation]:
        """The same for all slots, device blocks, keys, transfers and requests."""
        broken: list[Violation] = []
        if ledger.blocks.words.tolist() != self._words:
            broken += self._compare_slots(ledger, range(len(self._words)))
        if ledger.leases.words.tolist() != self._leases:
            broken += self._compare_leases(ledger, range(len(self._leases)))
        if ledger.index != self._held:
            broken += self._compare_keys(ledger)
        for id in sorted({*self._copies, *ledger.transfers}):
            broken += self._compare_transfer(ledger, id)
        broken += self._compare_cursors(ledger, sorted({*self._cursors, *ledger.requests}))
        provenance = ledger.provenance
        noted = sorted({*self._brought, *provenance.brought, *provenance.stale})
        broken += self._compare_provenance(ledger, noted)
        if list(ledger.offers.times.items()) != list(self._times.items()):
            broken.append(
                Violation(Property.EVENTS_ARE_STATE, "how often keys were offered is not what the events say")
            )
        return broken + self._compare_counts(ledger) + self._compare_ends(ledger)

    def _compare_slots(self, ledger: Ledger, slots: Iterable[int]) -> list[Violation]:
        """Violations of the first slots that the two books tell differently."""
        broken = [
            self._differs(slot, ledger.blocks.words[slot], self._words[slot])
            for slot in slots
            if ledger.blocks.words[slot] != self._words[slot]
        ]
        return broken[:MOST_NAMED]

    def _differs(self, slot: int, found: int, expected: int) -> Violation:
        states = found & STATE_MASK, expected & STATE_MASK
        tells = f"slot {slot} is {BLOCK_WORDS.describe(found)}, and must be {BLOCK_WORDS.describe(expected)}"
        if states[0] in _READABLE and states[1] not in _READABLE:
            return Violation(self._standing(slot), f"{tells}: it can be matched, {self._why(slot)}", (slot,))
        if states[0] in _UNUSED and states[1] in _TOUCHED:
            return Violation(Property.NO_REUSE_IN_FLIGHT, f"{tells}: a copy may touch it", (slot,))
        if states[1] in _READABLE and states[0] not in _READABLE:
            return Violation(
                Property.EVENTS_ARE_STATE, f"{tells}: its store ended well, and nothing took it away", (slot,)
            )
        return Violation(Property.ONE_RELEASE_PER_HOLD, f"{tells}: that is who holds it", (slot,))

    def _compare_leases(self, ledger: Ledger, blocks: Iterable[int]) -> list[Violation]:
        broken: list[Violation] = []
        for block in blocks:
            found, expected = ledger.leases.words[block], self._leases[block]
            if found != expected:
                tells = (
                    f"device block {block} is {LEASE_WORDS.describe(found)}, "
                    f"and must be {LEASE_WORDS.describe(expected)}"
                )
                # Without a lease the block could be reused under the copy.
                broken.append(
                    Violation(
                        Property.ONE_RELEASE_PER_HOLD if found else Property.NO_REUSE_IN_FLIGHT,
                        tells,
                        device_blocks=(block,),
                    )
                )
        return broken[:MOST_NAMED]

    def _compare_keys(self, ledger: Ledger) -> list[Violation]:
        differing = sorted(key for key, _ in self._held.items() ^ ledger.index.items())[:MOST_NAMED]
        return [
            Violation(
                Property.EVENTS_ARE_STATE,
                f"key {key.hex()} is in slot {found}, and must be in slot {expected}",
                _slots(found, expected),
            )
            for key in dict.fromkeys(differing)
            for found, expected in ((ledger.index.get(key), self._held.get(key)),)
        ]

    def _compare_transfer(self, ledger: Ledger, id: int) -> list[Violation]:
        copy, transfer = self._copies.get(id), ledger.transfers.get(id)
        if copy is None and transfer is None:
            return []
        if copy is None or transfer is None:
            wrong = "has ended, and is still kept" if copy is None else "has not ended, and is forgotten"
            return [Violation(Property.STALE_REPORTS, f"transfer {id} {wrong}", transfers=(id,))]
        state = transfer.word & STATE_MASK
        expected = _ABANDONED if copy.abandoned else _SUBMITTED if copy.submitted else _PLANNED
        if transfer.since != copy.since:
            message = f"transfer {id} is in flight since tick {transfer.since}; it must be {copy.since}"
            return [Violation(Property.PROGRESS, message, transfers=(id,))]
        if transfer.reported == copy.reported and state == expected:
            return []
        message = (
            f"transfer {id} is {transfer.state.name}, reported by workers {transfer.reported:#b}; "
            f"it must be {TransferState(expected).name}, reported by {copy.reported:#b}"
        )
        return [Violation(Property.STALE_REPORTS, message, transfers=(id,))]

    def _compare_cursors(self, ledger: Ledger, names: Iterable[str]) -> list[Violation]:
        """A cursor that is too far on forgets blocks, one that is behind offers them again."""
        broken: list[Violation] = []
        for name in names:
            request, expected = ledger.requests.get(name), self._cursors.get(name, NO_CURSORS)
            found = NO_CURSORS if request is None else (request.settled, request.offered)
            if found != expected:
                message = (
                    f"request {name} has settled {found[0]} blocks by group, and offered {found[1]}; "
                    f"it must be {expected[0]} and {expected[1]}"
                )
                broken.append(Violation(Property.STORED_ONCE, message, requests=(name,)))
        return broken[:MOST_NAMED]

    def _compare_provenance(self, ledger: Ledger, blocks: Sequence[int]) -> list[Violation]:
        """What was brought is known by its key, and by whether a reset has come since."""
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
        return [
            Violation(property, f"{found} {what}, and {expected} must be", _some(self._slots))
            for property, what, found, expected in (
                (Property.CONSERVATION, "slots are in the free queue", len(ledger.free), self._free),
                (Property.CONSERVATION, "slots are in the eviction order", len(ledger.policy), self._idle),
                (Property.CONSERVATION, "slots are in the index", len(ledger.index), len(self._held)),
                (
                    Property.EVENTS_ARE_STATE,
                    "keys are remembered as offered",
                    len(ledger.offers.times),
                    len(self._times),
                ),
            )
            if found != expected
        ]

    def _compare_ends(self, ledger: Ledger) -> list[Violation]:
        """What waits to be offered again is looked at when a transfer has ended or a key has gone: an end
        that goes unnoticed is a block forgotten. A key may be said to be gone too often."""
        broken: list[Violation] = []
        if ledger.ended_at != self._last_end:
            message = f"the last transfer ended at event {self._last_end}, not {ledger.ended_at}"
            broken.append(Violation(Property.STORED_ONCE, message))
        if ledger.forgotten_at < self._last_loss:
            message = (
                f"a key was gone after event {self._last_loss}, and not last after {ledger.forgotten_at}"
            )
            broken.append(Violation(Property.STORED_ONCE, message))
        return broken


def _content(brought: bytes | None, stale: bytes | None) -> str:
    key = brought or stale
    if key is None:
        return "nothing that a load brought"
    return f"key {key.hex()}, brought by a load of {'an older' if brought is None else 'this'} epoch"


def _some(slots: Sequence[int]) -> tuple[int, ...]:
    return tuple(slots[:MOST_NAMED])


def _slots(*slots: int | None) -> tuple[int, ...]:
    return tuple(slot for slot in slots if slot is not None)
