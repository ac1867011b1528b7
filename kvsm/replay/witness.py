"""The second book: what was stored, held and promised, told from the events alone.

The ledger keeps words, lists and an index, and steps them by tables. The witness reads the same events and
keeps only what the properties speak of: which slots hold bytes that may be matched (and if not, which
property a match would break), who touches which memory, who pinned what. It is a plain dict-and-loop
program that shares no state, table or index with the ledger; so a fold that forgets something, or an event
that should never have been written, makes the two disagree.

    broken = witness.follow(event)          # what is wrong with the event itself, given those before it
    ledger.apply(event)
    broken += witness.compare(ledger)       # what is wrong with what the ledger made of it

Both look only at what the event names: about 0.3 us a slot. `compare_all` looks at everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvsm import events as ev
from kvsm.events import Direction, OffloadConfig, OffloadingEvent
from kvsm.ids import Ids, to_list
from kvsm.invariants import MOST_NAMED, Violation, check_slots
from kvsm.ledger import Ledger
from kvsm.states.block import BLOCK_WORDS, BlockState
from kvsm.states.lease import LEASE_WORDS, LeaseState
from kvsm.states.transfer import TRANSFER_WORDS, TransferState
from kvsm.states.words import STATE_BITS, STATE_MASK

PUBLISHED = ""
"""Standing of a slot whose block may be matched. Any other standing is the property that a match breaks."""

_COPY = 1 << BLOCK_WORDS.shifts[0] >> STATE_BITS
_PIN = 1 << BLOCK_WORDS.shifts[1] >> STATE_BITS
"""A hold on a slot, as the counters of a word would show it."""
_WRITING, _RETIRED = -1, -2
_LEASE_RETIRED = LEASE_WORDS.encode(LeaseState.RETIRED)
_LEASE_WRITING = LEASE_WORDS.encode(LeaseState.WRITING)


class Copy:
    """A transfer that has been planned and has not ended."""

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
        self.reported: set[int] = set()


class Match:
    """The pins of a request, and the event that took them."""

    __slots__ = ("seq", "slots")

    def __init__(self, seq: int, slots: Sequence[int]) -> None:
        self.seq, self.slots = seq, slots


class Witness:
    """Follows the events of one life of the core. Attributes are read-only outside this class.

    published: key -> slot, of all blocks that may be matched. concerned: the slots of the last event.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.workers = config.workers
        self.published: dict[bytes, int] = {}
        self.concerned: Sequence[int] = ()
        self._standing = ["S2"] * config.host_blocks
        self._holds = [0] * config.host_blocks
        self._key = [b""] * config.host_blocks
        self._voided = [0] * config.host_blocks
        """Number of the event that last voided a slot's block, and with it all pins before."""
        self._retired: set[int] = set()
        self._storing: dict[int, int] = {}
        """slot -> the live store that will fill it."""
        self._in_flight: dict[bytes, int] = {}
        """key -> the live store that will publish it."""
        self._leases = [0] * config.device_blocks
        """Readers of a device block, `_WRITING` or `_RETIRED`."""
        self._copies: dict[int, Copy] = {}
        self._matches: dict[str, Match] = {}
        self._leased: Sequence[int] = ()
        self._transfer = 0
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
        for key, slot in ledger.index.items():
            one._key[slot] = key
            if ledger.readable(slot):
                one._standing[slot] = PUBLISHED
                one.published[key] = slot
        one._holds = [word >> STATE_BITS for word in ledger.blocks.words]
        one._retired = {
            slot for slot, word in enumerate(ledger.blocks.words) if word & STATE_MASK == BlockState.RETIRED
        }
        one._leases = [_lease_count(word) for word in ledger.leases.words]
        for id, transfer in ledger.transfers.items():
            store = transfer.direction is Direction.STORE
            copy = Copy(
                store,
                transfer.request,
                to_list(transfer.slots),
                to_list(transfer.device_blocks),
                transfer.keys,
            )
            copy.submitted = transfer.state is not TransferState.PLANNED
            copy.abandoned = transfer.state is TransferState.ABANDONED
            _, (_, failed) = TRANSFER_WORDS.decode(transfer.word)
            copy.failed = failed > 0
            copy.reported = {worker for worker in range(one.workers) if transfer.reported >> worker & 1}
            one._copies[id] = copy
            if store:
                one._storing.update(dict.fromkeys(copy.slots, id))
            if store and not copy.abandoned:
                one._in_flight.update(dict.fromkeys(copy.keys, id))
        for name, request in ledger.requests.items():
            if len(request.pins):
                one._matches[name] = Match(request.pinned_at, to_list(ledger.live_pins(request)))
        return one

    def follow(self, event: OffloadingEvent) -> list[Violation]:
        """Take note of the next event. What it breaks, given all before it: usually nothing."""
        self.concerned = self._leased = ()
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
        slots = _ids(event.slots)
        if not slots:
            return
        holds, standing = self._holds, self._standing
        for slot in slots:
            holds[slot] += _PIN
            if standing[slot]:
                self._breaks(
                    standing[slot], f"request {event.request} matches slot {slot}, {self._why(slot)}", slot
                )
        if event.request in self._matches:
            self._breaks("S7", f"request {event.request} matches again, and holds its last match", *slots)
        self._matches[event.request] = Match(event.seq, slots)
        self.concerned = slots

    def _unmatched(self, event: ev.HitReleased | ev.RequestFinished | ev.RequestPreempted) -> None:
        self._release(event.request)

    def _release(self, request: str, loaded: int = 0) -> None:
        """End a request's match: its pins are gone, but those of blocks that were voided went before."""
        match = self._matches.pop(request, None)
        if match is None:
            return
        holds, voided = self._holds, self._voided
        for slot in match.slots[loaded:]:
            if voided[slot] <= match.seq:
                holds[slot] -= _PIN
        self.concerned = match.slots

    # Transfers.

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        self.concerned = slots = _ids(event.slots)
        holds, standing, key, published = self._holds, self._standing, self._key, self.published
        for slot in slots:
            if holds[slot] or standing[slot]:
                self._evicts_held(slot)
            standing[slot] = "S2"
            published.pop(key[slot], None)

    def _evicts_held(self, slot: int) -> None:
        if self._holds[slot] % _PIN or slot in self._storing:
            self._breaks("S3", f"slot {slot} is evicted while a copy touches it", slot)
        elif self._holds[slot]:
            self._breaks("S7", f"slot {slot} is evicted while a match holds it", slot)
        else:
            self._breaks("S1", f"slot {slot} is evicted, and holds no stored block", slot)

    def _store_planned(self, event: ev.StorePlanned) -> None:
        self.concerned, self._leased = slots, blocks = _ids(event.slots), _ids(event.device_blocks)
        self._transfer = event.seq
        key_at, storing, holds, leases = self._key, self._storing, self._holds, self._leases
        for known, why in ((self.published, "is stored"), (self._in_flight, "is being stored")):
            if not known.keys().isdisjoint(event.keys):
                twice = next(key for key in event.keys if key in known)
                self._breaks("S13", f"key {twice.hex()} is stored again, and {why} already", *slots)
        for slot, key, block in zip(slots, event.keys, blocks):
            if holds[slot] or slot in storing or slot in self._retired:
                self._breaks("S3", f"slot {slot} is allocated while a copy may touch it", slot)
            if not self._standing[slot]:
                self._breaks("S1", f"slot {slot} is allocated, and holds a stored block", slot)
            if leases[block]:
                self._leases_held(block)
            self._standing[slot] = "S2"
            key_at[slot] = key
            storing[slot] = event.seq
            leases[block] += 1
        self._in_flight.update(dict.fromkeys(event.keys, event.seq))
        self._copies[event.seq] = Copy(True, event.request, slots, blocks, event.keys)

    def _leases_held(self, block: int) -> None:
        if self._leases[block] > 0:
            self._breaks("S13", f"device block {block} is stored again while its store is in flight")
        else:
            self._breaks("S3", f"device block {block} is copied while a load may write it")

    def _load_planned(self, event: ev.LoadPlanned) -> None:
        slots, blocks = _ids(event.slots), _ids(event.device_blocks)
        match = self._matches.get(event.request)
        if match is None or list(match.slots[: len(slots)]) != list(slots):
            self._breaks("S7", f"request {event.request} loads blocks that its match does not hold", *slots)
        self._release(event.request, loaded=len(slots))
        if event.voided:
            return
        if match is None:
            self.concerned = slots
        self._leased, self._transfer = blocks, event.seq
        for slot, block in zip(slots, blocks):
            if self._standing[slot] or (match is not None and self._voided[slot] > match.seq):
                self._breaks("S7", f"slot {slot} is loaded, {self._why(slot)}", slot)
            if self._leases[block]:
                self._breaks("S3", f"device block {block} is loaded into while a copy may touch it")
            self._holds[slot] += _COPY - _PIN
            self._leases[block] = _WRITING
        self._copies[event.seq] = Copy(False, event.request, slots, blocks, ())

    def _submitted(self, event: ev.TransfersSubmitted) -> None:
        concerned: list[int] = []
        for id in event.transfers:
            copy = self._copies.get(id)
            if copy is None or copy.submitted:
                self._breaks("S5", f"transfer {id} is submitted, and no plan of it waits", transfers=(id,))
                continue
            copy.submitted = True
            if copy.store:
                for slot in copy.slots:
                    self._holds[slot] += _COPY
            concerned += copy.slots
        self.concerned = concerned

    def _reported(self, event: ev.WorkerReported) -> None:
        self._transfer = id = event.transfer
        copy = self._copies.get(id)
        if (
            copy is None
            or not copy.submitted
            or event.worker in copy.reported
            or event.worker >= self.workers
        ):
            message = f"worker {event.worker} reports transfer {id}, which does not wait for it"
            self._breaks("S5", message, transfers=(id,))
            return
        copy.reported.add(event.worker)
        copy.failed = copy.failed or not event.good
        if len(copy.reported) == self.workers:
            self._end(event.seq, id, copy)

    def _end(self, seq: int, id: int, copy: Copy) -> None:
        """The last worker has reported: publish, or void."""
        good = not (copy.failed or copy.abandoned)
        if copy.store:
            for slot in copy.slots:
                del self._storing[slot]
            if good:
                for slot in copy.slots:
                    self._standing[slot] = PUBLISHED
                self.published.update(zip(copy.keys, copy.slots))
            elif not copy.abandoned:
                for slot in copy.slots:
                    self._standing[slot] = "S6"
        elif not good and not copy.abandoned:
            self._void(copy.slots, "S6", seq)
        for slot in copy.slots:
            if slot not in self._retired:
                self._holds[slot] -= _COPY
        self._close(id, copy)

    def _close(self, id: int, copy: Copy) -> None:
        """The transfer is over: its device blocks are given back."""
        leases = self._leases
        for block in copy.device_blocks:
            if leases[block] != _RETIRED:
                leases[block] = leases[block] - 1 if copy.store else 0
        in_flight = self._in_flight
        for key in copy.keys:
            if in_flight.get(key) == id:
                del in_flight[key]
        del self._copies[id]
        self.concerned, self._leased = copy.slots, copy.device_blocks

    def _cancelled(self, event: ev.TransferCancelled) -> None:
        self._transfer = event.transfer
        copy = self._copies.get(event.transfer)
        if copy is None or copy.submitted:
            message = f"transfer {event.transfer} is cancelled, and no plan of it waits"
            self._breaks("S5", message, transfers=(event.transfer,))
            return
        self._undo(event.transfer, copy)

    def _undo(self, id: int, copy: Copy) -> None:
        for slot in copy.slots:
            if copy.store:
                del self._storing[slot]
            else:
                self._holds[slot] -= _COPY
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
            self._storing.pop(slot, None)
            self._holds[slot] = 0
        self._retired.update(copy.slots)
        for block in copy.device_blocks:
            self._leases[block] = _RETIRED
        self._close(event.transfer, copy)

    def _rejected(self, event: ev.ReportRejected) -> None:
        """Changes nothing: what the report names must be as it was."""
        self._transfer = event.transfer
        copy = self._copies.get(event.transfer)
        if copy is not None:
            self.concerned, self._leased = copy.slots, copy.device_blocks

    # The cache as a whole.

    def _touched(self, event: ev.BlocksTouched) -> None:
        self.concerned = slots = _ids(event.slots)
        for slot in slots:
            if self._standing[slot]:
                self._breaks(self._standing[slot], f"slot {slot} is touched, {self._why(slot)}", slot)

    def _reset(self, event: ev.CacheReset) -> None:
        for id, copy in list(self._copies.items()):
            if copy.submitted:
                copy.abandoned = True
            else:
                self._undo(id, copy)
        self._in_flight.clear()
        self._void(range(len(self._standing)), "S14", event.seq)
        self.concerned, self._leased = range(len(self._standing)), range(len(self._leases))

    def _void(self, slots: Iterable[int], standing: str, seq: int) -> None:
        """What these slots hold may not be matched any more; pins on it are void."""
        holds, published = self._holds, self.published
        for slot in slots:
            if not self._standing[slot]:
                published.pop(self._key[slot], None)
            self._standing[slot] = standing
            self._voided[slot] = seq
            holds[slot] %= _PIN

    # Comparing.

    def compare(self, ledger: Ledger) -> list[Violation]:
        """What the ledger made of the event that was followed last, as far as the event names it."""
        broken: list[Violation] = []
        slots, leased = self.concerned, self._leased
        if slots:
            words, standing, holds = ledger.blocks.words, self._standing, self._holds
            if [words[slot] >> STATE_BITS for slot in slots] != [holds[slot] for slot in slots] or [
                (words[slot] & STATE_MASK) in _READABLE for slot in slots
            ] != [not standing[slot] for slot in slots]:
                broken += self._disagreements(ledger, slots)
            broken += check_slots(ledger, slots)
        if leased:
            lease_words, leases = ledger.leases.words, self._leases
            if [lease_words[one] for one in leased] != [_lease_word(leases[one]) for one in leased]:
                broken += self._lease_disagreements(ledger, leased)
        if self._transfer:
            broken += self._compare_transfer(ledger, self._transfer)
        return broken

    def compare_all(self, ledger: Ledger) -> list[Violation]:
        """The same for all slots, device blocks and transfers."""
        broken = self._disagreements(ledger, range(len(self._standing)))
        broken += self._lease_disagreements(ledger, range(len(self._leases)))
        for id in sorted({*self._copies, *ledger.transfers}):
            broken += self._compare_transfer(ledger, id)
        return broken

    def _disagreements(self, ledger: Ledger, slots: Iterable[int]) -> list[Violation]:
        """Violations of the first slots that the two books tell differently."""
        broken: list[Violation] = []
        for slot in slots:
            word, standing = ledger.blocks.words[slot], self._standing[slot]
            found, readable = BLOCK_WORDS.describe(word), word & STATE_MASK in _READABLE
            if readable and standing:
                broken.append(
                    Violation(standing, f"slot {slot} can be matched ({found}), {self._why(slot)}", (slot,))
                )
            elif not readable and not standing:
                message = f"slot {slot} cannot be matched ({found}), and its store ended well"
                broken.append(Violation("S10", message, (slot,)))
            if word >> STATE_BITS != self._holds[slot] and slot not in self._retired:
                copies, pins = self._holds[slot] % _PIN, self._holds[slot] // _PIN
                message = f"slot {slot} is {found}, and is held by {copies} copies and {pins} matches"
                broken.append(Violation("S4", message, (slot,)))
            if len(broken) >= MOST_NAMED:
                break
        return broken

    def _lease_disagreements(self, ledger: Ledger, blocks: Iterable[int]) -> list[Violation]:
        broken: list[Violation] = []
        for block in blocks:
            word, count = ledger.leases.words[block], self._leases[block]
            if word == _lease_word(count):
                continue
            stores = f"{count} stores" if count >= 0 else "a load" if count == _WRITING else "a lost copy"
            message = f"device block {block} is {LEASE_WORDS.describe(word)}, and is held by {stores}"
            # A lease that is less than what holds the block would let it be reused under the copy.
            broken.append(Violation("S3" if word == 0 else "S4", message, device_blocks=(block,)))
            if len(broken) >= MOST_NAMED:
                break
        return broken

    def _compare_transfer(self, ledger: Ledger, id: int) -> list[Violation]:
        copy, transfer = self._copies.get(id), ledger.transfers.get(id)
        if copy is None and transfer is None:
            return []
        if copy is None or transfer is None:
            wrong = "has ended, and is still kept" if copy is None else "has not ended, and is forgotten"
            return [Violation("S5", f"transfer {id} {wrong}", transfers=(id,))]
        if (
            transfer.reported != sum(1 << worker for worker in copy.reported)
            or (transfer.state is TransferState.PLANNED) is copy.submitted
            or (transfer.state is TransferState.ABANDONED) is not copy.abandoned
        ):
            message = f"transfer {id} is {transfer.state.name}, and {sorted(copy.reported)} have reported it"
            return [Violation("S5", message, transfers=(id,))]
        return []

    def _why(self, slot: int) -> str:
        """Why the block of this slot may not be matched."""
        return _WHY[self._standing[slot]]

    def _breaks(self, property_id: str, message: str, *slots: int, transfers: tuple[int, ...] = ()) -> None:
        self._broken.append(Violation(property_id, message, slots[:MOST_NAMED], transfers=transfers))


_READABLE = (int(BlockState.STORED), int(BlockState.LOADING))
_WHY = {
    PUBLISHED: "whose block was voided since the match",
    "S2": "which no store has published",
    "S6": "whose bytes a failed or lost copy left",
    "S14": "whose block was stored before the reset",
}


def _ids(ids: Ids) -> Sequence[int]:
    return ids if type(ids) is tuple else to_list(ids)


def _lease_word(count: int) -> int:
    if count > 0:
        return LeaseState.READING | count << STATE_BITS
    return 0 if count == 0 else _LEASE_WRITING if count == _WRITING else _LEASE_RETIRED


def _lease_count(word: int) -> int:
    state, (readers,) = LEASE_WORDS.decode(word)
    return {LeaseState.WRITING: _WRITING, LeaseState.RETIRED: _RETIRED}.get(LeaseState(state), readers)
