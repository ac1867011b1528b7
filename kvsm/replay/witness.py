"""The second book: what was stored, held and promised, told from the events alone.

The ledger steps words by tables and keeps lists, an index and a policy. The witness reads the same events
and keeps, by plain if and else, what each slot and device block must be: who touches it, who pinned it,
whether it may be matched and, if not, which property a match would break. It shares no state and no table
with the ledger; so a fold that forgets something, or an event that should never have been written, makes
the two disagree.

    broken = witness.follow(event)           # what is wrong with the event, given those before it
    ledger.apply(event)
    broken += witness.compare(ledger)        # what is wrong with what the ledger made of it

Both look at what the event names, about 0.15 us a slot, and at the counts: how many slots are free, idle and
indexed. So a list that was forgotten shows at once, and by which slot, in a full check: `compare_all`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvsm import events as ev
from kvsm.events import Direction, OffloadConfig, OffloadingEvent
from kvsm.ids import Ids, to_list
from kvsm.invariants import MOST_NAMED, Violation
from kvsm.ledger import Ledger
from kvsm.states.block import BLOCK_WORDS, BlockState
from kvsm.states.lease import LEASE_WORDS, LeaseState
from kvsm.states.transfer import TRANSFER_WORDS, TransferState
from kvsm.states.words import STATE_MASK

_FREE, _EVICTED = int(BlockState.FREE), int(BlockState.EVICTED)
_ALLOCATED, _STORING = int(BlockState.ALLOCATED), int(BlockState.STORING)
_STORED, _LOADING = int(BlockState.STORED), int(BlockState.LOADING)
_QUARANTINED, _RETIRED = int(BlockState.QUARANTINED), int(BlockState.RETIRED)
_COPY, _PIN = (1 << shift for shift in BLOCK_WORDS.shifts)
_STORING_ONCE = BLOCK_WORDS.encode(BlockState.STORING, (1, 0))
_READ_ONCE = LEASE_WORDS.encode(LeaseState.READING, (1,))
_READER = 1 << LEASE_WORDS.shifts[0]
_WRITING, _LEASE_RETIRED = int(LeaseState.WRITING), int(LeaseState.RETIRED)


class Copy:
    """A transfer that has been planned and has not ended. reported: bit w for worker w."""

    __slots__ = (
        "abandoned",
        "device_blocks",
        "failed",
        "keys",
        "reported",
        "request",
        "slots",
        "store",
        "submitted",
    )

    def __init__(
        self,
        store: bool,
        request: str,
        slots: Sequence[int],
        device_blocks: Sequence[int],
        keys: Sequence[bytes],
    ) -> None:
        self.store, self.request, self.keys = store, request, keys
        self.slots, self.device_blocks = slots, device_blocks
        self.submitted = self.failed = self.abandoned = False
        self.reported = 0


class Match:
    """The pins of a request, and the event that took them."""

    __slots__ = ("seq", "slots")

    def __init__(self, seq: int, slots: Sequence[int]) -> None:
        self.seq, self.slots = seq, slots


class Witness:
    """Follows the events of one life of the core, from an empty pool on; `of` starts in the middle."""

    def __init__(self, config: OffloadConfig) -> None:
        self._workers, self._all_reported = config.workers, (1 << config.workers) - 1
        self._words = [_FREE] * config.host_blocks
        """What each slot must be, as the word that says so."""
        self._leases = [0] * config.device_blocks
        self._keys = [b""] * config.host_blocks
        self._held: dict[bytes, int] = {}
        """key -> slot of the one block that holds it or is being stored."""
        self._free, self._idle = config.host_blocks, 0
        self._copies: dict[int, Copy] = {}
        self._matches: dict[str, Match] = {}
        self._spoiled: dict[int, str] = {}
        """slot -> the property that a match would break, for blocks that failed or were reset."""
        self._voided = [0] * config.host_blocks
        """Number of the event that last voided a slot's block, and with it all pins before."""
        self._last_void = 0
        self._slots: Sequence[int] = ()
        self._blocks: Sequence[int] = ()
        self._transfer = 0
        """What the last event concerns."""
        self._broken: list[Violation] = []
        self._handlers: dict[type[OffloadingEvent], Callable[[Any], None]] = {
            ev.RequestPreempted: self._unmatched,
            ev.RequestFinished: self._unmatched,
            ev.HitMatched: self._matched,
            ev.HitReleased: self._unmatched,
            ev.BlocksEvicted: self._evicted,
            ev.StorePlanned: self._store_planned,
            ev.LoadPlanned: self._load_planned,
            ev.TransfersSubmitted: self._submitted,
            ev.TransferCancelled: self._cancelled,
            ev.WorkerReported: self._reported,
            ev.ReportRejected: self._rejected,
            ev.TransferLost: self._lost,
            ev.BlocksTouched: self._touched,
            ev.CacheReset: self._reset,
        }

    @classmethod
    def of(cls, ledger: Ledger) -> Witness:
        """A witness who takes a ledger's state on trust: where a log starts in the middle of a life."""
        one = cls(ledger.config)
        one._words, one._leases = ledger.blocks.words.tolist(), ledger.leases.words.tolist()
        one._free = sum(word in (_FREE, _EVICTED) for word in one._words)
        one._idle = one._words.count(_STORED)
        one._held = dict(ledger.index)
        for key, slot in one._held.items():
            one._keys[slot] = key
        for id, transfer in ledger.transfers.items():
            slots, blocks = to_list(transfer.slots), to_list(transfer.device_blocks)
            store = transfer.direction is Direction.STORE
            copy = one._copies[id] = Copy(store, transfer.request, slots, blocks, transfer.keys)
            copy.submitted = transfer.state is not TransferState.PLANNED
            copy.abandoned = transfer.state is TransferState.ABANDONED
            copy.failed = TRANSFER_WORDS.decode(transfer.word)[1][1] > 0
            copy.reported = transfer.reported
        for name, request in ledger.requests.items():
            if len(request.pins):
                one._matches[name] = Match(request.pinned_at, to_list(ledger.live_pins(request)))
        return one

    def follow(self, event: OffloadingEvent) -> list[Violation]:
        """Take note of the next event. What it breaks, given all before it: usually nothing."""
        self._slots = self._blocks = ()
        self._transfer = 0
        handler = self._handlers.get(type(event))
        if handler is None:
            return []
        if self._broken:
            self._broken = []
        try:
            handler(event)
        except IndexError:
            self._breaks("S1", f"{event.kind} names a slot or device block that the pools do not have")
        return self._broken

    # Matches.

    def _matched(self, event: ev.HitMatched) -> None:
        self._slots = slots = _ids(event.slots)
        if not slots:
            return
        words = self._words
        found = [words[slot] for slot in slots]
        idle = found.count(_STORED)
        if idle < len(found):
            self._must_be_readable(f"request {event.request} matches", slots)
        self._idle -= idle
        for slot, word in zip(slots, found):
            words[slot] = word + _PIN
        if event.request in self._matches:
            self._breaks("S7", f"request {event.request} matches again, and holds its last match", *slots)
        self._matches[event.request] = Match(event.seq, slots)

    def _must_be_readable(self, what: str, slots: Sequence[int]) -> None:
        for slot in slots:
            if self._words[slot] & STATE_MASK not in _READABLE:
                self._breaks(self._standing(slot), f"{what} slot {slot}, {self._why(slot)}", slot)

    def _unmatched(self, event: ev.HitReleased | ev.RequestFinished | ev.RequestPreempted) -> None:
        match = self._matches.pop(event.request, None)
        if match is not None:
            self._unpin(match, match.slots)

    def _unpin(self, match: Match, slots: Sequence[int]) -> None:
        """These pins are gone; those of blocks that were voided since the match went before."""
        self._slots = match.slots
        if self._last_void > match.seq:
            slots = [slot for slot in slots if self._voided[slot] <= match.seq]
        words = self._words
        left = [words[slot] - _PIN for slot in slots]
        self._idle += left.count(_STORED)
        for slot, word in zip(slots, left):
            words[slot] = word

    # Transfers.

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        self._slots = slots = _ids(event.slots)
        words, keys, held = self._words, self._keys, self._held
        if [words[slot] for slot in slots].count(_STORED) < len(slots):
            self._evicts_held(slots)
        for slot in slots:
            words[slot] = _EVICTED
            held.pop(keys[slot], None)
        self._idle -= len(slots)
        self._free += len(slots)

    def _evicts_held(self, slots: Sequence[int]) -> None:
        for slot in slots:
            word = self._words[slot]
            if word & STATE_MASK in _TOUCHED:
                self._breaks("S3", f"slot {slot} is evicted while a copy touches it", slot)
            elif word >= _PIN:
                self._breaks("S7", f"slot {slot} is evicted while a match holds it", slot)
            elif word != _STORED:
                self._breaks("S1", f"slot {slot} is evicted, and holds no stored block", slot)

    def _store_planned(self, event: ev.StorePlanned) -> None:
        slots, blocks, held = _ids(event.slots), _ids(event.device_blocks), self._held
        self._slots, self._blocks, self._transfer = slots, blocks, event.seq
        words, leases, keys = self._words, self._leases, self._keys
        expected = len(held) + len(event.keys)
        self._may_allocate(slots, blocks)
        for slot, key in zip(slots, event.keys):
            words[slot] = _ALLOCATED
            keys[slot] = key
        for block in blocks:
            leases[block] = leases[block] + _READER if leases[block] else _READ_ONCE
        held.update(zip(event.keys, slots))
        if len(held) != expected:
            self._breaks(
                "S13", "a key of the plan is stored already, is being stored, or stands twice", *slots
            )
        if self._spoiled:
            for slot in slots:
                self._spoiled.pop(slot, None)
        self._free -= len(slots)
        self._copies[event.seq] = Copy(True, event.request, slots, blocks, event.keys)

    def _may_allocate(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        words, leases = self._words, self._leases
        found = [words[slot] for slot in slots]
        if found.count(_FREE) + found.count(_EVICTED) < len(slots):
            for slot, word in zip(slots, found):
                if word & STATE_MASK in _TOUCHED:
                    self._breaks("S3", f"slot {slot} is allocated while a copy may touch it", slot)
                elif word not in (_FREE, _EVICTED):
                    self._breaks("S1", f"slot {slot} is allocated, and holds a stored block", slot)
        if any(map(leases.__getitem__, blocks)):
            for block in blocks:
                if leases[block] & STATE_MASK == LeaseState.READING:
                    self._breaks("S13", f"device block {block} is stored again while its store is in flight")
                elif leases[block]:
                    self._breaks("S3", f"device block {block} is stored while a load may write it")

    def _load_planned(self, event: ev.LoadPlanned) -> None:
        slots, blocks = _ids(event.slots), _ids(event.device_blocks)
        match = self._matches.pop(event.request, None)
        if match is None or list(match.slots[: len(slots)]) != list(slots):
            self._breaks("S7", f"request {event.request} loads blocks that its match does not hold", *slots)
            return
        self._unpin(match, match.slots[len(slots) :])
        if event.voided:
            return
        self._blocks, self._transfer = blocks, event.seq
        if self._last_void > match.seq:
            for slot in slots:
                if self._voided[slot] > match.seq:
                    self._breaks("S7", f"slot {slot} is loaded, and was voided since its match", slot)
        words, leases = self._words, self._leases
        for slot in slots:
            words[slot] = (words[slot] & ~STATE_MASK | _LOADING) + _COPY - _PIN
        for block in blocks:
            if leases[block]:
                self._breaks("S3", f"device block {block} is loaded into while a copy may touch it")
            leases[block] = _WRITING
        self._copies[event.seq] = Copy(False, event.request, slots, blocks, ())

    def _submitted(self, event: ev.TransfersSubmitted) -> None:
        for id in event.transfers:
            copy = self._copies.get(id)
            if copy is None or copy.submitted:
                self._breaks("S5", f"transfer {id} is submitted, and no plan of it waits", transfers=(id,))
                continue
            copy.submitted = True
            self._transfer = id
            self._slots = [*self._slots, *copy.slots] if self._slots else copy.slots
            if copy.store:
                for slot in copy.slots:
                    self._words[slot] = _STORING_ONCE

    def _reported(self, event: ev.WorkerReported) -> None:
        self._transfer = id = event.transfer
        copy = self._copies.get(id)
        if (
            copy is None
            or not copy.submitted
            or event.worker >= self._workers
            or copy.reported >> event.worker & 1
        ):
            message = f"worker {event.worker} reports transfer {id}, which does not wait for it"
            self._breaks("S5", message, transfers=(id,))
            return
        copy.reported |= 1 << event.worker
        copy.failed = copy.failed or not event.good
        if copy.reported == self._all_reported:
            self._end(event.seq, copy)
            self._close(id, copy)

    def _end(self, seq: int, copy: Copy) -> None:
        """The last worker has reported: publish, or void."""
        words = self._words
        if not copy.store:
            if copy.failed and not copy.abandoned:
                self._void(copy.slots, "S6", seq)
            self._end_readers(copy.slots)
        elif copy.failed or copy.abandoned:
            # A reset has voided an abandoned one before, and its keys may be stored again by now.
            self._void(copy.slots, "S14" if copy.abandoned else "S6", seq)
            for slot in copy.slots:
                words[slot] = _EVICTED
            self._free += len(copy.slots)
        else:
            for slot in copy.slots:
                words[slot] = _STORED
            self._idle += len(copy.slots)

    def _end_readers(self, slots: Sequence[int]) -> None:
        """One load less: the last one leaves a stored block, or a free slot if the block was voided."""
        words = self._words
        left = [words[slot] - _COPY for slot in slots]
        for slot, word in zip(slots, left):
            state = word & STATE_MASK
            if state == _LOADING:
                words[slot] = word if word // _COPY % (_PIN // _COPY) else word - _LOADING + _STORED
                self._idle += words[slot] == _STORED
            elif state == _QUARANTINED:
                words[slot] = word if word >= _COPY else _EVICTED
                self._free += words[slot] == _EVICTED

    def _close(self, id: int, copy: Copy) -> None:
        """The transfer is over: its device blocks are given back."""
        leases = self._leases
        for block in copy.device_blocks:
            word = leases[block]
            if word != _LEASE_RETIRED:
                leases[block] = word - _READER if word > _READ_ONCE else 0
        del self._copies[id]
        self._slots, self._blocks = copy.slots, copy.device_blocks

    def _cancelled(self, event: ev.TransferCancelled) -> None:
        self._transfer = event.transfer
        copy = self._copies.get(event.transfer)
        if copy is None or copy.submitted:
            message = f"transfer {event.transfer} is cancelled, and no plan of it waits"
            self._breaks("S5", message, transfers=(event.transfer,))
            return
        self._undo(event.transfer, copy, event.seq)

    def _undo(self, id: int, copy: Copy, seq: int) -> None:
        if copy.store:
            self._void(copy.slots, "S2", seq)
        else:
            self._end_readers(copy.slots)
        self._close(id, copy)

    def _lost(self, event: ev.TransferLost) -> None:
        self._transfer = event.transfer
        copy = self._copies.get(event.transfer)
        if copy is None or not copy.submitted:
            message = f"transfer {event.transfer} is lost, and was not in flight"
            self._breaks("S5", message, transfers=(event.transfer,))
            return
        self._void(copy.slots, "S6", event.seq)
        for slot in copy.slots:
            self._words[slot] = _RETIRED
        for block in copy.device_blocks:
            self._leases[block] = _LEASE_RETIRED
        self._close(event.transfer, copy)

    def _rejected(self, event: ev.ReportRejected) -> None:
        """Changes nothing: what the report names must be as it was."""
        self._transfer = event.transfer
        copy = self._copies.get(event.transfer)
        if copy is not None:
            self._slots, self._blocks = copy.slots, copy.device_blocks

    # The cache as a whole.

    def _touched(self, event: ev.BlocksTouched) -> None:
        self._slots = _ids(event.slots)
        self._must_be_readable("the engine touches", self._slots)

    def _reset(self, event: ev.CacheReset) -> None:
        for id, copy in list(self._copies.items()):
            if copy.submitted:
                copy.abandoned = True
            else:
                self._undo(id, copy, event.seq)
        self._void(range(len(self._words)), "S14", event.seq)
        self._slots, self._blocks = range(len(self._words)), range(len(self._leases))

    def _void(self, slots: Iterable[int], property_id: str, seq: int) -> None:
        """What these slots hold may not be matched any more; pins on it are void."""
        words, held, keys = self._words, self._held, self._keys
        for slot in slots:
            word, state = words[slot], words[slot] & STATE_MASK
            if state in _HELD and held.get(keys[slot]) == slot:
                del held[keys[slot]]
            if state in (_STORING, _LOADING):
                words[slot] = word % _PIN - state + _QUARANTINED
            elif state in (_ALLOCATED, _STORED):
                words[slot] = _EVICTED
                self._idle -= word == _STORED
                self._free += 1
            self._spoiled[slot] = property_id
            self._voided[slot] = seq
        self._last_void = seq

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
        return broken

    def compare_all(self, ledger: Ledger) -> list[Violation]:
        """The same for all slots, device blocks, keys and transfers."""
        broken: list[Violation] = []
        if ledger.blocks.words.tolist() != self._words:
            broken += self._compare_slots(ledger, range(len(self._words)))
        if ledger.leases.words.tolist() != self._leases:
            broken += self._compare_leases(ledger, range(len(self._leases)))
        if ledger.index != self._held:
            broken += self._compare_keys(ledger)
        for id in sorted({*self._copies, *ledger.transfers}):
            broken += self._compare_transfer(ledger, id)
        return broken + self._compare_counts(ledger)

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
        if states[0] in (_FREE, _EVICTED) and states[1] in _TOUCHED:
            return Violation("S3", f"{tells}: a copy may touch it", (slot,))
        if states[1] in _READABLE and states[0] not in _READABLE:
            return Violation("S10", f"{tells}: its store ended well, and nothing took it away", (slot,))
        return Violation("S4", f"{tells}: that is who holds it", (slot,))

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
                broken.append(Violation("S4" if found else "S3", tells, device_blocks=(block,)))
        return broken[:MOST_NAMED]

    def _compare_keys(self, ledger: Ledger) -> list[Violation]:
        differing = sorted(key for key, _ in self._held.items() ^ ledger.index.items())[:MOST_NAMED]
        return [
            Violation(
                "S10",
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
            return [Violation("S5", f"transfer {id} {wrong}", transfers=(id,))]
        state = transfer.word & STATE_MASK
        expected = _ABANDONED if copy.abandoned else _SUBMITTED if copy.submitted else _PLANNED
        if transfer.reported == copy.reported and state == expected:
            return []
        message = (
            f"transfer {id} is {transfer.state.name}, reported by workers {transfer.reported:#b}; "
            f"it must be {TransferState(expected).name}, reported by {copy.reported:#b}"
        )
        return [Violation("S5", message, transfers=(id,))]

    def _compare_counts(self, ledger: Ledger) -> list[Violation]:
        return [
            Violation("S1", f"{found} slots are in {name}, and {expected} must be", _some(self._slots))
            for name, found, expected in (
                ("the free queue", len(ledger.free), self._free),
                ("the eviction order", len(ledger.policy), self._idle),
                ("the index", len(ledger.index), len(self._held)),
            )
            if found != expected
        ]

    def _standing(self, slot: int) -> str:
        """The property that a match of this slot would break."""
        return self._spoiled.get(slot, "S2")

    def _why(self, slot: int) -> str:
        return _WHY[self._standing(slot)]

    def _breaks(self, property_id: str, message: str, *slots: int, transfers: tuple[int, ...] = ()) -> None:
        self._broken.append(Violation(property_id, message, slots[:MOST_NAMED], transfers=transfers))


_READABLE = (_STORED, _LOADING)
_HELD = (_ALLOCATED, _STORING, _STORED, _LOADING)
_TOUCHED = (_ALLOCATED, _STORING, _LOADING, _QUARANTINED, _RETIRED)
_PLANNED, _SUBMITTED = int(TransferState.PLANNED), int(TransferState.SUBMITTED)
_ABANDONED = int(TransferState.ABANDONED)
_WHY = {
    "S2": "and no store has published it",
    "S6": "and a copy of it failed or was lost",
    "S14": "and it is of before the reset",
}


def _ids(ids: Ids) -> Sequence[int]:
    return ids if type(ids) is tuple else to_list(ids)


def _some(slots: Sequence[int]) -> tuple[int, ...]:
    return tuple(slots[:MOST_NAMED])


def _slots(*slots: int | None) -> tuple[int, ...]:
    return tuple(slot for slot in slots if slot is not None)
