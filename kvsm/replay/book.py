"""The second book: what was stored, held, promised and offered, told from the events alone.

The ledger steps words by tables and keeps lists, an index and a policy. The book is kept from the same
events by plain if and else: what each slot and device block must be, who touches it, who pinned it, what a
load brought into it, whether it may be matched and, if not, which property a match would break. It shares
no state and no table with the ledger; so a fold that forgets something, or an event that should never have
been written, makes the two disagree. `Witness` compares them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from operator import gt
from typing import Any

from kvsm import events as ev
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.ids import Ids, to_list
from kvsm.invariants import MOST_NAMED, Violation
from kvsm.properties import Property
from kvsm.states.block import BLOCK_WORDS, BlockState
from kvsm.states.lease import LEASE_WORDS, LeaseState
from kvsm.states.words import STATE_MASK

_FREE, _EVICTED = int(BlockState.FREE), int(BlockState.EVICTED)
_ALLOCATED, _STORING = int(BlockState.ALLOCATED), int(BlockState.STORING)
_STORED, _LOADING = int(BlockState.STORED), int(BlockState.LOADING)
_QUARANTINED, _RETIRED = int(BlockState.QUARANTINED), int(BlockState.RETIRED)
_COPY, _PIN = (1 << shift for shift in BLOCK_WORDS.shifts)
_STORING_ONCE = BLOCK_WORDS.encode(BlockState.STORING, (1, 0))
_READ_ONCE = LEASE_WORDS.encode(LeaseState.READING, (1,))
_READER = 1 << LEASE_WORDS.shifts[0]
_READING, _WRITING, _LEASE_RETIRED = (
    int(state) for state in (LeaseState.READING, LeaseState.WRITING, LeaseState.RETIRED)
)


class BookedTransfer:
    """A transfer that has been planned and has not ended. since: tick at which it was submitted. reported:
    bit w for worker w."""

    __slots__ = ("abandoned", "device_blocks", "failed", "reported", "since", "slots", "store", "submitted")

    def __init__(self, store: bool, slots: Sequence[int], device_blocks: Sequence[int]) -> None:
        self.store, self.slots, self.device_blocks = store, slots, device_blocks
        self.submitted = self.failed = self.abandoned = False
        self.since = self.reported = 0


class BookedMatch:
    """The pins of a request, and the event that took them."""

    __slots__ = ("seq", "slots")

    def __init__(self, seq: int, slots: Sequence[int]) -> None:
        self.seq, self.slots = seq, slots


Cursors = tuple[tuple[int, ...], tuple[int, ...]]
"""(settled, offered), in blocks of each KV cache group."""

NO_CURSORS: Cursors = ((), ())


class Book:
    """Follows the events of one life of the core, from an empty pool on."""

    def __init__(self, config: OffloadConfig) -> None:
        self._workers, self._all_reported = config.workers, (1 << config.workers) - 1
        self._words = [_FREE] * config.host_blocks
        """What each slot must be, as the word that says so."""
        self._leases = [0] * config.device_blocks
        self._keys = [b""] * config.host_blocks
        self._held: dict[bytes, int] = {}
        """key -> slot of the one block that holds it or is being stored."""
        self._free, self._idle = config.host_blocks, 0
        self._copies: dict[int, BookedTransfer] = {}
        self._matches: dict[str, BookedMatch] = {}
        self._spoiled: dict[int, Property] = {}
        """slot -> the property that a match would break, for blocks that failed or were reset."""
        self._voided = [0] * config.host_blocks
        """Number of the event that last voided a slot's block, and with it all pins before."""
        self._last_void = self._last_end = self._last_loss = 0
        """Numbers of the last events that voided a block, ended a transfer, and took a key away."""
        self._chunk = config.blocks_per_chunk
        self._tick = 0
        self._brought: dict[int, bytes] = {}
        """device block -> the key that a load brought into it last."""
        self._older: set[int] = set()
        """Those of them whose load was planned before the last reset."""
        self._cursors: dict[str, Cursors] = {}
        self._times: OrderedDict[bytes, int] = OrderedDict()
        """How often keys were offered that are not stored yet; the longest unoffered first."""
        self._remembered = config.offer_history
        self._slots: Sequence[int] = ()
        self._blocks: Sequence[int] = ()
        self._noted: Sequence[int] = ()
        self._names: Sequence[str] = ()
        self._transfer = 0
        """What the last event concerns. `_noted`: device blocks of whose content it tells."""
        self._broken: list[Violation] = []
        self._handlers: dict[type[OffloadingEvent], Callable[[Any], None]] = {
            ev.RequestPreempted: self._left,
            ev.RequestFinished: self._left,
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
            ev.Ticked: self._ticked,
            ev.BlocksOffered: self._offered,
            ev.OffersCounted: self._offers_counted,
            ev.BlocksRewritten: self._rewritten,
        }

    def follow(self, event: OffloadingEvent) -> list[Violation]:
        """Take note of the next event. What it breaks, given all before it: usually nothing."""
        self._slots = self._blocks = self._noted = self._names = ()
        self._transfer = 0
        handler = self._handlers.get(type(event))
        if handler is None:
            return []
        if self._broken:
            self._broken = []
        try:
            handler(event)
        except IndexError:
            self._breaks(
                Property.CONSERVATION,
                f"{event.kind} names a slot, a part or a device block that is not there",
            )
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
            self._breaks(
                Property.MATCH_HOLDS,
                f"request {event.request} matches again, and holds its last match",
                *slots,
            )
        self._matches[event.request] = BookedMatch(event.seq, slots)

    def _must_be_readable(self, what: str, slots: Sequence[int]) -> None:
        for slot in slots:
            if self._words[slot] & STATE_MASK not in _READABLE:
                self._breaks(self._standing(slot), f"{what} slot {slot}, {self._why(slot)}", slot)

    def _left(self, event: ev.RequestFinished | ev.RequestPreempted) -> None:
        self._cursors.pop(event.request, None)
        self._names = (event.request,)
        self._unmatched(event)

    def _unmatched(self, event: ev.HitReleased | ev.RequestFinished | ev.RequestPreempted) -> None:
        match = self._matches.pop(event.request, None)
        if match is not None:
            self._unpin(match, match.slots)

    def _unpin(self, match: BookedMatch, slots: Sequence[int]) -> None:
        """These pins are gone; those of blocks that were voided since the match went before."""
        self._slots = match.slots
        if self._last_void > match.seq:
            slots = [slot for slot in slots if self._voided[slot] <= match.seq]
        words = self._words
        left = [words[slot] - _PIN for slot in slots]
        self._idle += left.count(_STORED)
        for slot, word in zip(slots, left):
            words[slot] = word

    # Stores.

    def _offered(self, event: ev.BlocksOffered) -> None:
        """A cursor that went back, or left blocks out, would forget blocks or store them again."""
        cursors = self._cursors
        for name, settled, offered in event.offers:
            before = cursors.get(name)
            if len(settled) != len(offered) or any(map(gt, settled, offered)):
                message = f"request {name} has settled {settled} blocks by group, and offered {offered}"
                self._broken.append(Violation(Property.STORED_ONCE, message, requests=(name,)))
            elif before is not None and (
                len(before[0]) != len(settled)
                or any(map(gt, before[0], settled))
                or any(map(gt, before[1], offered))
            ):
                message = (
                    f"the cursors of request {name} go back: it had settled {before[0]} blocks by group "
                    f"and offered {before[1]}, and has settled {settled} and offered {offered}"
                )
                self._broken.append(Violation(Property.STORED_ONCE, message, requests=(name,)))
            cursors[name] = (settled, offered)
        self._names = [name for name, _, _ in event.offers]

    def _offers_counted(self, event: ev.OffersCounted) -> None:
        times = self._times
        for key in event.keys:
            times[key] = times.pop(key, 0) + 1
        while len(times) > self._remembered:
            times.popitem(last=False)

    def _rewritten(self, event: ev.BlocksRewritten) -> None:
        self._noted = blocks = _ids(event.device_blocks)
        for block in blocks:
            self._older.discard(block)
            self._brought.pop(block, None)

    def _forget_older(self, block: int) -> bytes | None:
        """What a load of an older epoch brought into this device block is gone. Returns its key."""
        if block not in self._older:
            return None
        self._older.remove(block)
        return self._brought.pop(block)

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
        self._last_loss = event.seq

    def _evicts_held(self, slots: Sequence[int]) -> None:
        for slot in slots:
            word = self._words[slot]
            if word & STATE_MASK in _TOUCHED:
                self._breaks(
                    Property.NO_REUSE_IN_FLIGHT, f"slot {slot} is evicted while a copy touches it", slot
                )
            elif word >= _PIN:
                self._breaks(Property.MATCH_HOLDS, f"slot {slot} is evicted while a match holds it", slot)
            elif word != _STORED:
                self._breaks(
                    Property.CONSERVATION, f"slot {slot} is evicted, and holds no stored block", slot
                )

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
                Property.STORED_ONCE,
                "a key of the plan is stored already, is being stored, or stands twice",
                *slots,
            )
        if self._spoiled:
            for slot in slots:
                self._spoiled.pop(slot, None)
        if self._older and not self._older.isdisjoint(blocks):
            self._must_be_of_this_epoch(event.keys, slots, blocks)
        if self._times:
            for key in event.keys:
                self._times.pop(key, None)
        self._free -= len(slots)
        self._copies[event.seq] = BookedTransfer(True, slots, blocks)

    def _must_be_of_this_epoch(
        self, keys: Sequence[bytes], slots: Sequence[int], blocks: Sequence[int]
    ) -> None:
        """Under another key than the one that was brought, a device block has been computed since: the last
        of its slot, that is. Others may have the same content in the chunks of two keys."""
        self._noted = blocks
        for place, (key, slot) in enumerate(zip(keys, slots)):
            for number, block in enumerate(blocks[place * self._chunk : (place + 1) * self._chunk], 1):
                brought = self._forget_older(block)
                if brought == key or (brought is not None and number < self._chunk):
                    message = (
                        f"device block {block} is stored to slot {slot} under key {key.hex()}, which a load "
                        f"of an older epoch brought into it"
                    )
                    self._broken.append(Violation(Property.NO_STALE_DATA, message, (slot,), (block,)))

    def _may_allocate(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        words, leases = self._words, self._leases
        found = [words[slot] for slot in slots]
        if found.count(_FREE) + found.count(_EVICTED) < len(slots):
            for slot, word in zip(slots, found):
                if word & STATE_MASK in _TOUCHED:
                    self._breaks(
                        Property.NO_REUSE_IN_FLIGHT,
                        f"slot {slot} is allocated while a copy may touch it",
                        slot,
                    )
                elif word not in (_FREE, _EVICTED):
                    self._breaks(
                        Property.CONSERVATION, f"slot {slot} is allocated, and holds a stored block", slot
                    )
        if any(map(leases.__getitem__, blocks)):
            for block in blocks:
                if leases[block] & STATE_MASK == _READING:
                    self._breaks(
                        Property.STORED_ONCE,
                        f"device block {block} is stored again while its store is in flight",
                    )
                elif leases[block]:
                    self._breaks(
                        Property.NO_REUSE_IN_FLIGHT,
                        f"device block {block} is stored while a load may write it",
                    )

    # Transfers.

    def _load_planned(self, event: ev.LoadPlanned) -> None:
        slots, blocks = _ids(event.slots), _ids(event.device_blocks)
        match = self._matches.pop(event.request, None)
        if match is None or list(match.slots[: len(slots)]) != list(slots):
            self._breaks(
                Property.MATCH_HOLDS,
                f"request {event.request} loads blocks that its match does not hold",
                *slots,
            )
            return
        self._unpin(match, match.slots[len(slots) :])
        if event.voided:
            return
        self._blocks, self._noted, self._transfer = blocks, blocks, event.seq
        if self._last_void > match.seq:
            for slot in slots:
                if self._voided[slot] > match.seq:
                    self._breaks(
                        Property.MATCH_HOLDS, f"slot {slot} is loaded, and was voided since its match", slot
                    )
        words, leases = self._words, self._leases
        for slot in slots:
            words[slot] = (words[slot] & ~STATE_MASK | _LOADING) + _COPY - _PIN
        for block in blocks:
            if leases[block]:
                self._breaks(
                    Property.NO_REUSE_IN_FLIGHT,
                    f"device block {block} is loaded into while a copy may touch it",
                )
            leases[block] = _WRITING
        keys, chunk = self._keys, self._chunk
        places = _ids(event.parts) or range(len(slots) * chunk)
        self._brought.update(zip(blocks, [keys[slots[place // chunk]] for place in places]))
        self._older.difference_update(blocks)
        self._copies[event.seq] = BookedTransfer(False, slots, blocks)

    def _submitted(self, event: ev.TransfersSubmitted) -> None:
        for id in event.transfers:
            copy = self._copies.get(id)
            if copy is None or copy.submitted:
                self._breaks(
                    Property.STALE_REPORTS,
                    f"transfer {id} is submitted, and no plan of it waits",
                    transfers=(id,),
                )
                continue
            copy.submitted, copy.since = True, self._tick
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
            self._breaks(Property.STALE_REPORTS, message, transfers=(id,))
            return
        copy.reported |= 1 << event.worker
        copy.failed = copy.failed or not event.good
        if copy.reported == self._all_reported:
            self._end(event.seq, copy)
            self._close(id, copy, event.seq)

    def _end(self, seq: int, copy: BookedTransfer) -> None:
        """The last worker has reported: publish, or void."""
        words = self._words
        if not copy.store:
            if copy.failed and not copy.abandoned:
                self._void(copy.slots, Property.FAILURE_IS_NOT_SUCCESS, seq)
            self._end_readers(copy.slots)
        elif copy.failed or copy.abandoned:
            # A reset has voided an abandoned one before, and its keys may be stored again by now.
            self._void(
                copy.slots, Property.NO_STALE_DATA if copy.abandoned else Property.FAILURE_IS_NOT_SUCCESS, seq
            )
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

    def _close(self, id: int, copy: BookedTransfer, seq: int) -> None:
        """The transfer is over: its device blocks are given back."""
        leases = self._leases
        for block in copy.device_blocks:
            word = leases[block]
            leases[block] = word - _READER if word > _READ_ONCE else 0
        if not copy.store and (copy.failed or copy.abandoned or copy.reported != self._all_reported):
            self._noted = copy.device_blocks
            for block in copy.device_blocks:
                self._brought.pop(block, None)
            self._older.difference_update(copy.device_blocks)
        del self._copies[id]
        self._slots, self._blocks = copy.slots, copy.device_blocks
        self._last_end = seq

    def _cancelled(self, event: ev.TransferCancelled) -> None:
        self._transfer = event.transfer
        copy = self._copies.get(event.transfer)
        if copy is None or copy.submitted:
            message = f"transfer {event.transfer} is cancelled, and no plan of it waits"
            self._breaks(Property.STALE_REPORTS, message, transfers=(event.transfer,))
            return
        self._undo(event.transfer, copy, event.seq)

    def _undo(self, id: int, copy: BookedTransfer, seq: int) -> None:
        if copy.store:
            self._void(copy.slots, Property.PUBLISH_AFTER_COMMIT, seq)
        else:
            self._end_readers(copy.slots)
        self._close(id, copy, seq)

    def _lost(self, event: ev.TransferLost) -> None:
        self._transfer = event.transfer
        copy = self._copies.get(event.transfer)
        if copy is None or not copy.submitted:
            message = f"transfer {event.transfer} is lost, and was not in flight"
            self._breaks(Property.STALE_REPORTS, message, transfers=(event.transfer,))
            return
        self._void(copy.slots, Property.FAILURE_IS_NOT_SUCCESS, event.seq)
        for slot in copy.slots:
            self._words[slot] = _RETIRED
        self._close(event.transfer, copy, event.seq)
        if not copy.store:
            # It may write them still. What a lost store reads can be reused: its bytes go to retired slots.
            for block in copy.device_blocks:
                self._leases[block] = _LEASE_RETIRED

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
        self._void(range(len(self._words)), Property.NO_STALE_DATA, event.seq)
        self._older.update(self._brought)
        self._noted = list(self._brought)
        self._names = list(self._cursors)
        self._cursors.clear()
        self._slots, self._blocks = range(len(self._words)), range(len(self._leases))

    def _ticked(self, event: ev.Ticked) -> None:
        self._tick = event.tick

    def _void(self, slots: Iterable[int], property: Property, seq: int) -> None:
        """What these slots hold may not be matched any more; pins on it are void."""
        words, held, keys = self._words, self._held, self._keys
        for slot in slots:
            word, state = words[slot], words[slot] & STATE_MASK
            if state in _HELD and held.get(keys[slot]) == slot:
                del held[keys[slot]]
                self._last_loss = seq
            if state in (_STORING, _LOADING):
                words[slot] = word % _PIN - state + _QUARANTINED
            elif state in (_ALLOCATED, _STORED):
                words[slot] = _EVICTED
                self._idle -= word == _STORED
                self._free += 1
            self._spoiled[slot] = property
            self._voided[slot] = seq
        self._last_void = seq

    def _standing(self, slot: int) -> Property:
        """The property that a match of this slot would break."""
        return self._spoiled.get(slot, Property.PUBLISH_AFTER_COMMIT)

    def _why(self, slot: int) -> str:
        return _WHY[self._standing(slot)]

    def _breaks(self, property: Property, message: str, *slots: int, transfers: tuple[int, ...] = ()) -> None:
        self._broken.append(Violation(property, message, slots[:MOST_NAMED], transfers=transfers))


_READABLE = (_STORED, _LOADING)
_HELD = (_ALLOCATED, _STORING, _STORED, _LOADING)
_TOUCHED = (_ALLOCATED, _STORING, _LOADING, _QUARANTINED, _RETIRED)
_WHY = {
    Property.PUBLISH_AFTER_COMMIT: "and no store has published it",
    Property.FAILURE_IS_NOT_SUCCESS: "and a copy of it failed or was lost",
    Property.NO_STALE_DATA: "and it is of before the reset",
}


def _ids(ids: Ids) -> Sequence[int]:
    return ids if type(ids) is tuple else to_list(ids)
