"""A second, independent fold of the events: what is stored, held, promised and offered.

The ledger steps packed words through tables, and has lists, an index and a policy. The book follows the same
events with plain if and else: the state of each slot and device block, the copies that touch it, its pins,
the content that a load brought into it, and the property that a match of it would break. It shares only the
names of the states with the ledger. `Witness` compares book and ledger.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from operator import gt
from typing import Any

from kvsm import events as ev
from kvsm.core.ledger.invariants import MOST_NAMED, Violation
from kvsm.events import HintOutcome, OffloadConfig, OffloadingEvent
from kvsm.explain.verify.book_entries import (
    FILLING,
    GONE,
    IDLE,
    INDEXED,
    LOST,
    PINNED,
    PLANNED,
    READ,
    READ_ONCE,
    READABLE,
    TOUCHED,
    UNLEASED,
    UNUSED,
    WHY,
    WITHDRAWN,
    WRITTEN,
    BookedMatch,
    BookedTransfer,
    Cursors,
    LeaseEntry,
    SlotEntry,
    Told,
)
from kvsm.ids import Ids, MalformedIds, to_list
from kvsm.properties import Property
from kvsm.states.block import ALLOCATED, FREE, LOADING, QUARANTINED, STORED, STORING
from kvsm.states.lease import READING


class Book:
    """Follows the events of one core, from an empty pool on."""

    # What the last event changes, for the comparison with the ledger.
    _now_slots: Sequence[int] = ()
    _now_blocks: Sequence[int] = ()
    _now_brought: Sequence[int] = ()
    """Device blocks whose content changes."""
    _now_requests: Sequence[str] = ()
    """Requests whose cursors change."""
    _now_asks: Sequence[str] = ()
    """Requests whose match, load or wait begins or ends."""
    _now_transfer: int = 0
    _now_keys: Sequence[bytes] = ()
    """Keys that become held, or no longer are."""

    _knows_leases = False
    """Whether the process began after the snapshot, so that no lease is older."""

    def __init__(self, config: OffloadConfig) -> None:
        self._workers, self._all_reported = config.workers, (1 << config.workers) - 1
        self._slots: list[SlotEntry] = [UNUSED[0]] * config.host_blocks
        self._leases: list[LeaseEntry] = [UNLEASED] * config.device_blocks
        self._keys = [b""] * config.host_blocks
        """The key of the last block in each slot."""
        self._generations = [0] * config.host_blocks
        """The number of the event that planned the last store into each slot."""
        self._held: dict[bytes, int] = {}
        """key -> slot of the one block that is stored or being stored under it."""
        self._free, self._idle = config.host_blocks, 0
        self._transfers: dict[int, BookedTransfer] = {}
        self._matches: dict[str, BookedMatch] = {}
        self._loads: dict[str, int] = {}
        """request -> its load that has not ended."""
        self._waits: dict[str, tuple[int, int]] = {}
        """request -> the transfer that it waits for, and the tick at which the wait ends at the latest."""
        self._known: dict[str, str] = {}
        """request -> the tier of its copies, until it is over and its load has ended."""
        self._over: set[str] = set()
        """Requests that are over, but whose load has not ended."""
        self._patience: dict[str, int] = {}
        """request -> the tick at which its last wait ends at the latest, until it is preempted or over."""
        self._spoiled: dict[int, Property] = {}
        """slot -> the property that a match would break, because its block failed or was reset."""
        self._voided = [0] * config.host_blocks
        """Number of the event that last voided a slot's block and all pins on it."""
        self._last_void = self._last_end = self._last_loss = 0
        """Numbers of the last events that voided a block, ended a transfer, and removed a key."""
        self._pins_voided = 0
        """Number of the last event that may have voided a pin."""
        self._chunk = config.blocks_per_chunk
        self._step = self._tick = self._epoch = 0
        self._life, self._weights = 1, ""
        self._brought: dict[int, bytes] = {}
        """device block -> the key that a load brought into it last."""
        self._older: set[int] = set()
        """The device blocks in `_brought` whose load was planned before the last reset."""
        self._cursors: dict[str, Cursors] = {}
        self._may_go_back: set[str] = set()
        """Requests whose cursors have not moved since a store failed."""
        self._taken_on_trust: set[str] = set()
        """Those that a snapshot does not tell: perhaps no store has failed since their cursors moved."""
        self._relied_on: set[str] = set()
        """Those of them whose cursors went back."""
        self._offers: OrderedDict[bytes, int] = OrderedDict()
        """key -> number of its offers while it is not stored. The key offered longest ago is first."""
        self._remembered = config.counted_keys
        self._times: tuple[int, int, int] | None = None
        """The last measured times: of a load without blocks, of a block and of a token."""
        self._declined_hits = 0
        """The number of slow hits that were declined since the last slow hit that was loaded."""
        self._session_leases: dict[str, str] = {}
        """session -> the request that is its lease. No lease from before a snapshot is known."""
        self._first_answers: dict[str, tuple[bool, str]] = {}
        """session -> whether a lease begins or ends, and its name, in the first answer since the snapshot."""
        self.told: list[Told] = []
        """The changes of the last event that must be published to routers."""
        self._broken: list[Violation] = []

    def follow(self, event: OffloadingEvent) -> list[Violation]:
        """Follow the next event. Returns the properties that it breaks, given all events before it."""
        self._now_slots = self._now_blocks = self._now_brought = self._now_requests = self._now_keys = ()
        self._now_asks = ()
        self._now_transfer = 0
        self._step = event.step
        if self.told:
            self.told = []
        if self._broken:
            self._broken = []
        try:
            HANDLERS[type(event)](self, event)
        except IndexError:
            message = f"{event.kind} names a slot, a part or a device block that does not exist"
            self._breaks(Property.CONSERVATION, message)
        except MalformedIds as error:
            self._breaks(Property.EVENTS_ARE_STATE, f"{event.kind} is no event of kvsm: {error}")
        return self._broken

    def _changes_nothing(self, event: OffloadingEvent) -> None:
        """Ignore an event that changes nothing in the book."""

    # Matches.

    def _arrived(self, event: ev.RequestArrived) -> None:
        self._known[event.request] = event.target

    def _matched(self, event: ev.HitMatched) -> None:
        self._known.setdefault(event.request, "")
        self._now_slots = slots = _ids(event.slots)
        self._now_asks = (event.request,)
        self._must_serve(event)
        if not slots:
            return
        book = self._slots
        found = [book[slot] for slot in slots]
        idle = found.count(IDLE)
        if idle < len(found):
            self._must_be_readable(f"request {event.request} matches", slots)
        self._idle -= idle
        for slot, entry in zip(slots, found):
            state, copies, pins = entry
            book[slot] = PINNED if entry is IDLE else (state, copies, pins + 1)
        if event.request in self._matches:
            message = f"request {event.request} matches again while it holds its last match"
            self._breaks(Property.MATCH_HOLDS, message, *slots)
        self._matches[event.request] = event.seq, slots

    def _must_serve(self, event: ev.HitMatched) -> None:
        """Check that the answer ends for a reason: at a key that cannot be read, or where the keys end.

        Without `on_device`, `asked` counts only the blocks that were looked up.
        """
        if event.missed is not None:
            self._must_lack(event.request, event.missed)
        elif event.on_device is None and (event.on_host or 0) < (event.asked or 0):
            message = (
                f"request {event.request} is served {event.on_host or 0} of the {event.asked} blocks that it "
                f"asks for, and the event names no key that is missing"
            )
            self._broken.append(Violation(Property.STORED_SO_SERVED, message, requests=(event.request,)))

    def _admitted(self, event: ev.RequestAdmitted) -> None:
        """Check the answer that counts: a lookup with an equal answer has no `HitMatched` of its own.

        An admission without counts was recorded later than its lookup (`kvsm.vllm.manager_recorder`).
        """
        if event.missed is not None and event.asked is not None:
            self._must_lack(event.request, event.missed)

    def _must_lack(self, request: str, key: bytes) -> None:
        """Check that this key, which a request is not served, cannot be read."""
        slot = self._held.get(key)
        if slot is not None and self._slots[slot][0] in READABLE:
            message = (
                f"request {request} is not served key {key.hex()}, but slot {slot} holds it and can be read"
            )
            self._broken.append(Violation(Property.STORED_SO_SERVED, message, (slot,), requests=(request,)))

    def _deferred(self, event: ev.RequestDeferred) -> None:
        self._known.setdefault(event.request, "")
        self._waits[event.request] = event.transfer, event.until
        self._patience[event.request] = event.until
        self._now_asks = (event.request,)

    def _must_be_readable(self, what: str, slots: Sequence[int]) -> None:
        for slot in slots:
            if self._slots[slot][0] not in READABLE:
                self._breaks(self._unreadable_by(slot), f"{what} slot {slot}, but {self._why(slot)}", slot)

    def _finished(self, event: ev.RequestFinished) -> None:
        self._left(event)
        if event.request in self._loads:
            self._over.add(event.request)
        else:
            self._known.pop(event.request, None)

    def _left(self, event: ev.RequestFinished | ev.RequestPreempted) -> None:
        self._cursors.pop(event.request, None)
        self._patience.pop(event.request, None)
        self._may_go_back.discard(event.request)
        self._waits.pop(event.request, None)
        self._now_requests = (event.request,)
        self._unmatched(event)

    def _unmatched(self, event: ev.HitReleased | ev.RequestFinished | ev.RequestPreempted) -> None:
        self._now_asks = (event.request,)
        match = self._matches.pop(event.request, None)
        if match is not None:
            self._unpin(match, match[1])

    def _unpin(self, match: BookedMatch, slots: Sequence[int]) -> None:
        """End the pins of a match on these slots. On a block voided since, the pin has ended already."""
        self._now_slots = match[1]
        if self._last_void > match[0]:
            slots = [slot for slot in slots if self._voided[slot] <= match[0]]
        book = self._slots
        for slot in slots:
            state, copies, pins = book[slot]
            book[slot] = after = state, copies, pins - 1
            self._idle += after == IDLE

    def _hint_answered(self, event: ev.HintAnswered) -> None:
        """Check that a session has one lease, and that it is within its bounds.

        The log does not name the share of all leases. So the bound of one lease is that of the whole pool:
        half of all slots but one.
        """
        session, lease = event.session, event.lease
        if not lease:
            return
        begins = event.outcome in (HintOutcome.ACCEPTED, HintOutcome.CLIPPED)
        if not self._knows_leases:
            self._first_answers.setdefault(session, (begins, lease))
        if not begins:
            had = self._session_leases.pop(session, lease)
            if had != lease:
                message = f"lease {lease} of session {session} ends, but the session has lease {had}"
                self._breaks(Property.ONE_RELEASE_PER_HOLD, message)
            return
        if session in self._session_leases:
            message = f"session {session} gets lease {lease}, and still has {self._session_leases[session]}"
            self._breaks(Property.ONE_RELEASE_PER_HOLD, message)
        pinned = self._matches[lease][1] if lease in self._matches else ()
        most = min(event.asked, len(self._slots) // 2)
        if not len(pinned) <= event.leased <= most:
            message = f"lease {lease} pins {len(pinned)} slots and has {event.leased}; it may have {most}"
            self._breaks(Property.MATCH_HOLDS, message, *pinned)
        self._session_leases[session] = lease

    def _measured(self, event: ev.TimesMeasured) -> None:
        self._times = event.start_us, event.block_ns, event.token_ns

    def _slow_hit(self, event: ev.SlowHitFound) -> None:
        """Check that this hit is slow by the measured times, and that one in sixteen is loaded."""
        loading = [
            len(one.device_blocks)
            for one in self._transfers.values()
            if not (one.store or one.abandoned or self._known.get(one.request))
        ]
        start_us, block_ns, token_ns = self._times or (0, 0, 0)
        load_us = start_us + (sum(loading) + event.blocks) * block_ns // 1000
        compute_us = event.tokens * token_ns // 1000
        if self._times is None or load_us < compute_us:
            self._request_breaks(event.request, "has a slow hit that is not slow by the measured times")
        if (event.blocks_ahead, event.load_us, event.compute_us) != (sum(loading), load_us, compute_us):
            self._request_breaks(
                event.request, f"has a slow hit with wrong times; right are {load_us} and {compute_us} us"
            )
        if event.declined == (self._declined_hits == 15):
            message = (
                f"has a slow hit with declined={event.declined}, after {self._declined_hits} declined ones"
            )
            self._request_breaks(event.request, message)
        self._declined_hits = self._declined_hits + 1 if event.declined else 0

    # Stores.

    def _offered(self, event: ev.BlocksOffered) -> None:
        """Check that no cursor goes back or lacks a group: blocks would be forgotten, or stored again.

        After a store has failed, the settled count of each request may go back once.
        """
        for name, settled, offered in event.offers:
            had_settled, had_offered = self._cursors.get(name, (settled, offered))
            if len(settled) != len(offered) or any(map(gt, settled, offered)):
                self._request_breaks(name, f"has settled {settled} blocks by group and offered {offered}")
            elif (
                len(had_settled) != len(settled)
                or (any(map(gt, had_settled, settled)) and not self._may_settle_less(name))
                or any(map(gt, had_offered, offered))
            ):
                now = f"settled {settled} of {offered} offered"
                self._request_breaks(name, f"goes back from {had_settled} of {had_offered} blocks: {now}")
            self._cursors[name] = (settled, offered)
            self._may_go_back.discard(name)
        self._now_requests = [name for name, _, _ in event.offers]

    def _may_settle_less(self, name: str) -> bool:
        if name in self._taken_on_trust and name in self._may_go_back:
            self._relied_on.add(name)
        return name in self._may_go_back

    def _offers_counted(self, event: ev.OffersCounted) -> None:
        offers = self._offers
        for key in event.keys:
            offers[key] = offers.pop(key, 0) + 1
        while len(offers) > self._remembered:
            offers.popitem(last=False)

    def _rewritten(self, event: ev.BlocksRewritten) -> None:
        self._now_brought = blocks = _ids(event.device_blocks)
        for block in blocks:
            self._older.discard(block)
            self._brought.pop(block, None)

    def _forget_older(self, block: int) -> bytes | None:
        """Forget the content that a load of an older epoch brought into this device block.

        Returns the content's key; None: there is no such content.
        """
        if block not in self._older:
            return None
        self._older.remove(block)
        return self._brought.pop(block)

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        self._now_slots = slots = _ids(event.slots)
        book, keys, held = self._slots, self._keys, self._held
        if [book[slot] for slot in slots].count(IDLE) < len(slots):
            self._evicts_held(slots)
        self._now_keys = gone = [keys[slot] for slot in slots]
        self.told.append((True, gone))
        for slot, key in zip(slots, gone):
            book[slot] = GONE
            held.pop(key, None)
        self._idle -= len(slots)
        self._free += len(slots)
        self._last_loss = event.seq

    def _evicts_held(self, slots: Sequence[int]) -> None:
        for slot in slots:
            state, _, pins = self._slots[slot]
            if state in TOUCHED:
                self._slot_breaks(Property.NO_REUSE_IN_FLIGHT, slot, "is evicted while a copy touches it")
            elif pins:
                self._slot_breaks(Property.MATCH_HOLDS, slot, "is evicted while a match holds it")
            elif state is not STORED:
                self._slot_breaks(Property.CONSERVATION, slot, "is evicted, but holds no stored block")

    def _store_planned(self, event: ev.StorePlanned) -> None:
        slots, blocks, held = _ids(event.slots), _ids(event.device_blocks), self._held
        self._now_slots, self._now_blocks, self._now_transfer = slots, blocks, event.seq
        book, leases, keys = self._slots, self._leases, self._keys
        expected = len(held) + len(event.keys)
        self._may_allocate(slots, blocks)
        for slot, key in zip(slots, event.keys):
            book[slot] = PLANNED
            keys[slot] = key
            self._generations[slot] = event.seq
        for block in blocks:
            _, readers = leases[block]
            leases[block] = (READING, readers + 1) if readers else READ_ONCE
        self._now_keys = event.keys
        held.update(zip(event.keys, slots))
        if len(held) != expected:
            message = "a key of the plan is stored already, is being stored, or is in the plan twice"
            self._breaks(Property.STORED_ONCE, message, *slots)
        if self._spoiled:
            for slot in slots:
                self._spoiled.pop(slot, None)
        if self._older and not self._older.isdisjoint(blocks):
            self._must_be_of_this_epoch(event.keys, slots, blocks)
        self._free -= len(slots)
        self._transfers[event.seq] = BookedTransfer(True, slots, blocks, self._epoch)

    def _must_be_of_this_epoch(
        self, keys: Sequence[bytes], slots: Sequence[int], blocks: Sequence[int]
    ) -> None:
        """Check that no device block is stored whose content a load of an older epoch brought.

        If a device block is stored under another key than the load's, it was computed since the load. Only
        the last device block of a slot proves that, because chunks of two keys may begin with the same
        content.
        """
        self._now_brought = blocks
        for place, (key, slot) in enumerate(zip(keys, slots)):
            for number, block in enumerate(blocks[place * self._chunk : (place + 1) * self._chunk], 1):
                brought = self._forget_older(block)
                if brought == key or (brought is not None and number < self._chunk):
                    message = (
                        f"device block {block} is stored to slot {slot} under key {key.hex()}, but holds "
                        f"what a load of an older epoch brought"
                    )
                    self._broken.append(Violation(Property.NO_STALE_DATA, message, (slot,), (block,)))

    def _may_allocate(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        book, leases = self._slots, self._leases
        for slot in slots:
            if book[slot][0] in TOUCHED:
                self._slot_breaks(Property.NO_REUSE_IN_FLIGHT, slot, "is allocated while a copy may touch it")
            elif book[slot] not in UNUSED:
                self._slot_breaks(Property.CONSERVATION, slot, "is allocated while it holds a stored block")
        for block in blocks:
            if leases[block][0] is READING:
                self._block_breaks(
                    Property.STORED_ONCE, block, "is stored again while its store is in flight"
                )
            elif leases[block] != UNLEASED:
                self._block_breaks(Property.NO_REUSE_IN_FLIGHT, block, "is stored while a load may write it")

    # Transfers.

    def _load_planned(self, event: ev.LoadPlanned) -> None:
        slots, blocks = _ids(event.slots), _ids(event.device_blocks)
        match = self._matches.pop(event.request, None)
        if match is None or list(match[1][: len(slots)]) != list(slots):
            message = f"request {event.request} loads blocks that its match does not hold"
            self._breaks(Property.MATCH_HOLDS, message, *slots)
            return
        self._now_asks = (event.request,)
        self._unpin(match, match[1][len(slots) :])
        if event.voided:
            return
        self._now_blocks, self._now_brought, self._now_transfer = blocks, blocks, event.seq
        if self._last_void > match[0]:
            for slot in slots:
                if self._voided[slot] > match[0]:
                    self._slot_breaks(Property.MATCH_HOLDS, slot, "is loaded, but was voided since its match")
        book, leases = self._slots, self._leases
        for slot in slots:
            _, copies, pins = entry = book[slot]
            book[slot] = READ if entry is PINNED else (LOADING, copies + 1, pins - 1)
        for block in blocks:
            if leases[block] != UNLEASED:
                what = "is loaded into while a copy may touch it"
                self._block_breaks(Property.NO_REUSE_IN_FLIGHT, block, what)
            leases[block] = WRITTEN
        keys, chunk = self._keys, self._chunk
        places = _ids(event.parts) or range(len(slots) * chunk)
        self._brought.update(zip(blocks, (keys[slots[place // chunk]] for place in places)))
        self._older.difference_update(blocks)
        self._loads[event.request] = event.seq
        self._transfers[event.seq] = BookedTransfer(False, slots, blocks, self._epoch, event.request)

    def _submitted(self, event: ev.TransfersSubmitted) -> None:
        for id in event.transfers:
            transfer = self._transfers.get(id)
            if transfer is None or transfer.submitted:
                self._transfer_breaks(id, "is submitted, but is not a plan that waits")
                continue
            transfer.submitted, transfer.since = True, self._tick
            self._now_transfer = id
            self._now_slots = [*self._now_slots, *transfer.slots] if self._now_slots else transfer.slots
            if transfer.store:
                for slot in transfer.slots:
                    self._slots[slot] = FILLING

    def _flushed(self, event: ev.FlushRequested) -> None:
        for id in event.transfers:
            transfer = self._transfers.get(id)
            if transfer is not None:
                transfer.flush = True

    def _reported(self, event: ev.WorkerReported) -> None:
        self._now_transfer = id = event.transfer
        transfer = self._transfers.get(id)
        if (
            transfer is None
            or not transfer.submitted
            or event.worker >= self._workers
            or transfer.reported >> event.worker & 1
        ):
            self._transfer_breaks(id, f"does not wait for the report of worker {event.worker}")
            return
        transfer.reported |= 1 << event.worker
        transfer.failed = transfer.failed or not event.good
        if transfer.reported == self._all_reported:
            self._end_copies(event.seq, transfer)
            self._close(id, transfer, event.seq)

    def _end_copies(self, seq: int, transfer: BookedTransfer) -> None:
        """Publish or void the blocks of a transfer whose last worker has reported."""
        slots = transfer.slots
        if not transfer.store:
            if transfer.failed and not transfer.abandoned:
                self._void(slots, Property.FAILURE_IS_NOT_SUCCESS, seq)
                self._pins_voided = seq
            self._end_readers(slots)
        elif transfer.failed or transfer.abandoned:
            # A reset voided the blocks of an abandoned store already; their keys may be stored again since.
            self._void(
                slots, Property.NO_STALE_DATA if transfer.abandoned else Property.FAILURE_IS_NOT_SUCCESS, seq
            )
            for slot in slots:
                self._slots[slot] = GONE
            self._free += len(slots)
            self._may_go_back.update(self._cursors)
            self._taken_on_trust = set()
        else:
            for slot in slots:
                self._slots[slot] = IDLE
            self._idle += len(slots)
            stored = [self._keys[slot] for slot in slots]
            self.told.append((False, stored))
            if self._offers:
                for key in stored:
                    self._offers.pop(key, None)

    def _end_readers(self, slots: Sequence[int]) -> None:
        """Remove one reader from each slot. The last leaves a stored block or, if voided, a free slot."""
        book = self._slots
        for slot in slots:
            state, copies, pins = book[slot]
            if copies > 1:
                book[slot] = state, copies - 1, pins
            elif state is LOADING:
                book[slot] = (STORED, 0, pins) if pins else IDLE
                self._idle += not pins
            elif state is QUARANTINED:
                book[slot] = GONE
                self._free += 1

    def _close(self, id: int, transfer: BookedTransfer, seq: int) -> None:
        """End a transfer: release its device blocks, and wake the requests that wait for it."""
        blocks, leases = transfer.device_blocks, self._leases
        for block in blocks:
            _, readers = leases[block]
            leases[block] = (READING, readers - 1) if readers > 1 else UNLEASED
        completed = not transfer.failed and not transfer.abandoned and transfer.reported == self._all_reported
        if not transfer.store and not completed:
            self._now_brought = blocks
            for block in blocks:
                self._brought.pop(block, None)
            self._older.difference_update(blocks)
        del self._transfers[id]
        self._now_slots, self._now_blocks = transfer.slots, blocks
        self._last_end = seq
        if not transfer.store:
            self._loads.pop(transfer.request, None)
            if transfer.request in self._over:
                self._over.remove(transfer.request)
                self._known.pop(transfer.request, None)
            self._now_asks = [*self._now_asks, transfer.request]
        if self._waits:
            self._wake([name for name, (awaited, _) in self._waits.items() if awaited == id])

    def _cancelled(self, event: ev.TransferCancelled) -> None:
        self._now_transfer = event.transfer
        transfer = self._transfers.get(event.transfer)
        if transfer is None or transfer.submitted:
            self._transfer_breaks(event.transfer, "is cancelled, but is not a plan that waits")
            return
        self._undo(event.transfer, transfer, event.seq)

    def _undo(self, id: int, transfer: BookedTransfer, seq: int) -> None:
        if transfer.store:
            self._void(transfer.slots, Property.PUBLISH_AFTER_COMMIT, seq)
        else:
            self._end_readers(transfer.slots)
        self._close(id, transfer, seq)

    def _lost(self, event: ev.TransferLost) -> None:
        self._now_transfer = event.transfer
        transfer = self._transfers.get(event.transfer)
        if transfer is None or not transfer.submitted:
            self._transfer_breaks(event.transfer, "is lost, but was not in flight")
            return
        self._void(transfer.slots, Property.FAILURE_IS_NOT_SUCCESS, event.seq)
        self._pins_voided = event.seq
        for slot in transfer.slots:
            self._slots[slot] = LOST
        self._close(event.transfer, transfer, event.seq)
        if not transfer.store:
            # A lost load may still write its device blocks. Those of a lost store can be reused, because the
            # slots that it writes are retired.
            for block in transfer.device_blocks:
                self._leases[block] = WITHDRAWN

    def _rejected(self, event: ev.ReportRejected) -> None:
        """Change nothing, but let the transfer that the report names be compared: it must be unchanged."""
        self._now_transfer = event.transfer
        transfer = self._transfers.get(event.transfer)
        if transfer is not None:
            self._now_slots, self._now_blocks = transfer.slots, transfer.device_blocks

    # The cache as a whole.

    def _opened(self, event: ev.LogOpened) -> None:
        self._weights, self._knows_leases = event.weights, True

    def _touched(self, event: ev.BlocksTouched) -> None:
        self._now_slots = _ids(event.slots)
        self._must_be_readable("the engine touches", self._now_slots)

    def _reset(self, event: ev.CacheReset) -> None:
        self._epoch = event.epoch
        if event.weights is not None:
            self._weights = event.weights
        for id, transfer in list(self._transfers.items()):
            if transfer.submitted:
                transfer.abandoned = True
            else:
                self._undo(id, transfer, event.seq)
        every_slot = range(len(self._slots))
        if self._held:
            self._pins_voided = event.seq
        self._void(every_slot, Property.NO_STALE_DATA, event.seq)
        self._older.update(self._brought)
        self._now_brought = list(self._brought)
        self._now_requests = list(self._cursors)
        self._cursors.clear()
        self._may_go_back.clear()
        self._now_slots, self._now_blocks = every_slot, range(len(self._leases))

    def _restarted(self, event: ev.Restarted) -> None:
        """Keep only the readable blocks: copies, pins, requests and leases of the last process have ended."""
        slots, voided, spoiled = self._slots, self._voided, self._spoiled
        self._now_slots, self._now_blocks = range(len(slots)), range(event.config.device_blocks)
        self._now_brought, self._now_requests = list(self._brought), list(self._cursors)
        self._now_keys = gone = []
        for slot, (state, _, _) in enumerate(slots):
            if state in READABLE:
                slots[slot] = IDLE
            elif state is not FREE:
                if state in INDEXED:
                    gone.append(self._keys[slot])
                    del self._held[self._keys[slot]]
                    spoiled[slot], voided[slot] = Property.PUBLISH_AFTER_COMMIT, event.seq
                slots[slot] = GONE
        self._idle = slots.count(IDLE)
        self._free = len(slots) - self._idle
        self._leases = [UNLEASED] * event.config.device_blocks
        self._now_asks = [*self._matches, *self._loads, *self._waits]
        self._matches, self._loads, self._waits = {}, {}, {}
        self._known, self._patience, self._over = {}, {}, set()
        self._transfers, self._brought, self._cursors = {}, {}, {}
        self._older, self._may_go_back = set(), set()
        self._remembered = event.config.counted_keys
        while len(self._offers) > self._remembered:
            self._offers.popitem(last=False)
        self._last_void = self._last_end = self._last_loss = self._pins_voided = event.seq
        self._life = event.life
        self._times, self._declined_hits = None, 0
        self._session_leases, self._knows_leases = {}, True

    def _ticked(self, event: ev.Ticked) -> None:
        self._tick = event.tick
        if self._waits:
            self._wake([name for name, (_, until) in self._waits.items() if until <= event.tick])

    def _wake(self, names: Sequence[str]) -> None:
        """End the waits of these requests."""
        for name in names:
            del self._waits[name]
        self._now_asks = [*self._now_asks, *names]

    def _void(self, slots: Iterable[int], property: Property, seq: int) -> None:
        """Void the blocks in these slots: they may not be matched any more, and pins on them are void.

        property: the property that a later match of them breaks.
        """
        book, held, keys = self._slots, self._held, self._keys
        gone, removed = [*self._now_keys], []
        for slot in slots:
            state, copies, _ = entry = book[slot]
            if state in INDEXED and held.get(keys[slot]) == slot:
                del held[keys[slot]]
                gone.append(keys[slot])
                self._last_loss = seq
            if state in READABLE:
                removed.append(keys[slot])
            if state in (STORING, LOADING):
                book[slot] = QUARANTINED, copies, 0
            elif state in (ALLOCATED, STORED):
                book[slot] = GONE
                self._idle -= entry == IDLE
                self._free += 1
            self._spoiled[slot] = property
            self._voided[slot] = seq
        self._now_keys = gone
        if removed:
            self.told.append((True, removed))
        self._last_void = seq

    def _unreadable_by(self, slot: int) -> Property:
        """The property that a match of this unreadable slot would break."""
        return self._spoiled.get(slot, Property.PUBLISH_AFTER_COMMIT)

    def _why(self, slot: int) -> str:
        return WHY[self._unreadable_by(slot)]

    def _breaks(self, property: Property, message: str, *slots: int) -> None:
        self._broken.append(Violation(property, message, slots[:MOST_NAMED]))

    def _slot_breaks(self, property: Property, slot: int, what: str) -> None:
        self._breaks(property, f"slot {slot} {what}", slot)

    def _block_breaks(self, property: Property, block: int, what: str) -> None:
        self._broken.append(Violation(property, f"device block {block} {what}", device_blocks=(block,)))

    def _transfer_breaks(self, id: int, what: str) -> None:
        self._broken.append(Violation(Property.STALE_REPORTS, f"transfer {id} {what}", transfers=(id,)))

    def _request_breaks(self, name: str, what: str) -> None:
        self._broken.append(Violation(Property.STORED_ONCE, f"request {name} {what}", requests=(name,)))


def _ids(ids: Ids) -> Sequence[int]:
    return ids if type(ids) is tuple else to_list(ids)


HANDLERS: dict[type[OffloadingEvent], Callable[[Book, Any], None]] = {
    ev.LogOpened: Book._opened,
    ev.RequestArrived: Book._arrived,
    ev.RequestPreempted: Book._left,
    ev.RequestFinished: Book._finished,
    ev.HitMatched: Book._matched,
    ev.HitReleased: Book._unmatched,
    ev.RequestDeferred: Book._deferred,
    ev.KeysRecalled: Book._changes_nothing,
    ev.BlocksEvicted: Book._evicted,
    ev.StorePlanned: Book._store_planned,
    ev.StoreSkipped: Book._changes_nothing,
    ev.LoadPlanned: Book._load_planned,
    ev.TransfersSubmitted: Book._submitted,
    ev.TransferCancelled: Book._cancelled,
    ev.WorkerReported: Book._reported,
    ev.ReportRejected: Book._rejected,
    ev.TransferLost: Book._lost,
    ev.BlocksTouched: Book._touched,
    ev.FlushRequested: Book._flushed,
    ev.CacheReset: Book._reset,
    ev.StepEnded: Book._changes_nothing,
    ev.Ticked: Book._ticked,
    ev.BlocksOffered: Book._offered,
    ev.OffersCounted: Book._offers_counted,
    ev.BlocksRewritten: Book._rewritten,
    ev.Restarted: Book._restarted,
    ev.RequestAdmitted: Book._admitted,
    ev.HintAnswered: Book._hint_answered,
    ev.TimesMeasured: Book._measured,
    ev.SlowHitFound: Book._slow_hit,
}
"""The method that follows each kind of event."""
