"""The ledger: all state of the offload core, and the one function that changes it.

`Ledger.apply(event)` is a fold. It checks the whole event first and raises, with nothing changed, if the
event is illegal; then it changes everything that the event means. No other code writes to a ledger, no
decision is made here, and no clock is read: so `fold(log) == live state` by construction (S10).

The life of one block, from allocate to evict, reads from top to bottom:

1. `_store_planned`   a free slot is ALLOCATED, its key enters the index (not yet readable), and the
                      device block is leased for reading;
2. `_submitted`       STORING: from here on a copy may touch the slot;
3. `_reported`        the last worker's report ends the transfer: STORED and readable, in the eviction
                      order, the lease returned;
4. `_matched`         a match pins it; it leaves the eviction order;
5. `_load_planned`    the pin becomes a reader: LOADING, the target device block leased for writing;
6. `_reported`        the last reader leaves: STORED again, youngest in the eviction order;
7. `_evicted`         the policy chose it: its key leaves the index, its slot is free again.

What holds a block: the index (key -> slot) names every block that is ALLOCATED, STORING, STORED or
LOADING, and the block's state says whether it can be read. An idle slot stands in exactly one list: the
free queue (FREE, EVICTED) or the policy's order (STORED without pin or copy).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import gt, itemgetter
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvsm import events as ev
from kvsm.errors import InvalidEvent
from kvsm.events import Direction, OffloadConfig, OffloadingEvent, Owners
from kvsm.ids import NO_IDS, IdArray, equal, listed, unpack
from kvsm.policies import Choice, make_policy
from kvsm.policies.slot_queue import SlotQueue
from kvsm.records import OfferHistory, Provenance, Request, Transfer
from kvsm.states.block import BLOCK_WORDS, IDLE, PINNED_ONCE, BlockState, BlockTrigger
from kvsm.states.lease import LEASE_WORDS, LeaseTrigger
from kvsm.states.request import REQUEST_WORDS, RequestState, RequestTrigger
from kvsm.states.transfer import TRANSFER_WORDS, TransferState, TransferTrigger
from kvsm.states.words import STATE_MASK, StateWords, pick

_FIRST_INDEXED, _LAST_INDEXED = int(BlockState.ALLOCATED), int(BlockState.LOADING)
_FIRST_READABLE, _LAST_READABLE = int(BlockState.STORED), int(BlockState.LOADING)
_EVICTED_WORD = int(BlockState.EVICTED)

# Bound once: to look a member up in its class costs more than to take the step.
_BLOCK_ALLOCATE = BlockTrigger.ALLOCATE
_BLOCK_BEGIN_LOAD = BlockTrigger.BEGIN_LOAD
_BLOCK_CANCEL = BlockTrigger.CANCEL
_BLOCK_END_COPY_BAD = BlockTrigger.END_COPY_BAD
_BLOCK_END_COPY_GOOD = BlockTrigger.END_COPY_GOOD
_BLOCK_EVICT = BlockTrigger.EVICT
_BLOCK_INVALIDATE = BlockTrigger.INVALIDATE
_BLOCK_LOSE = BlockTrigger.LOSE
_BLOCK_PIN = BlockTrigger.PIN
_BLOCK_SUBMIT_STORE = BlockTrigger.SUBMIT_STORE
_BLOCK_TOUCH = BlockTrigger.TOUCH
_BLOCK_UNPIN = BlockTrigger.UNPIN
_TRANSFER_ABANDON = TransferTrigger.ABANDON
_TRANSFER_CANCEL = TransferTrigger.CANCEL
_TRANSFER_LOSE = TransferTrigger.LOSE
_TRANSFER_REPORT_BAD = TransferTrigger.REPORT_BAD
_TRANSFER_REPORT_GOOD = TransferTrigger.REPORT_GOOD
_TRANSFER_SUBMIT = TransferTrigger.SUBMIT
_LEASE_BEGIN_READ = LeaseTrigger.BEGIN_READ
_LEASE_BEGIN_WRITE = LeaseTrigger.BEGIN_WRITE
_LEASE_END_READ = LeaseTrigger.END_READ
_LEASE_END_WRITE = LeaseTrigger.END_WRITE
_LEASE_LOSE = LeaseTrigger.LOSE
_REQUEST_BEGIN_LOAD = RequestTrigger.BEGIN_LOAD
_REQUEST_DEFER = RequestTrigger.DEFER
_REQUEST_END_LOAD = RequestTrigger.END_LOAD
_REQUEST_FINISH = RequestTrigger.FINISH
_REQUEST_HIT = RequestTrigger.HIT
_REQUEST_MISS = RequestTrigger.MISS
_REQUEST_PREEMPT = RequestTrigger.PREEMPT
_REQUEST_UNMATCH = RequestTrigger.UNMATCH
_REQUEST_WAKE = RequestTrigger.WAKE
_COMPLETED = TransferState.COMPLETED
_FAILED = TransferState.FAILED
_PLANNED = TransferState.PLANNED
_FINISHED, _RELEASED = RequestState.FINISHED, RequestState.RELEASED
_UNDER_WAY = (TransferState.SUBMITTED, TransferState.ABANDONED)


class CacheListener(Protocol):
    """Hears, in order, how the set of readable keys changes. It must not touch the ledger."""

    def stored(self, transfer: int, keys: Sequence[bytes]) -> None: ...

    def removed(self, keys: Sequence[bytes]) -> None: ...

    def cleared(self) -> None: ...


class Ledger:
    """State under one configuration, empty at first. Read anything; change it by `apply` alone."""

    def __init__(self, config: OffloadConfig, listener: CacheListener | None = None) -> None:
        self.config, self.listener = config, listener
        self.seq = self.step = self.tick = self.epoch = 0
        self.voided_at = 0
        """Number of the last event that invalidated a block: pins taken after it all hold."""
        self.ended_at = self.forgotten_at = 0
        """Numbers of the last event that ended a transfer, and of the last after which a key was gone."""
        slots = config.host_blocks
        self.blocks = StateWords(BLOCK_WORDS, slots)
        self.leases = StateWords(LEASE_WORDS, config.device_blocks)
        self.generation = array("q", bytes(8 * slots))
        self.generation_view: NDArray[np.int64] = np.frombuffer(self.generation, dtype=np.int64)
        self.key_of: list[bytes] = [b""] * slots
        """Key of the last life of each slot; current while the index names the slot."""
        self.index: dict[bytes, int] = {}
        self.free = SlotQueue(slots)
        self.free.append(np.arange(slots))
        self.policy = make_policy(config.policy, slots)
        self.transfers: dict[int, Transfer] = {}
        self._planned_word = TRANSFER_WORDS.encode(TransferState.PLANNED, (config.workers,))
        self.requests: dict[str, Request] = {}
        self.deferred: dict[str, Request] = {}
        self.provenance, self.offers = Provenance(), OfferHistory(config.offer_history)
        self._handlers: dict[type[OffloadingEvent], Callable[[Any], Transfer | None]] = {
            ev.LogOpened: self._opened,
            ev.RequestArrived: self._arrived,
            ev.RequestPreempted: self._preempted,
            ev.RequestFinished: self._finished,
            ev.HitMatched: self._matched,
            ev.HitReleased: self._released,
            ev.RequestDeferred: self._deferred,
            ev.KeysRecalled: self._recalled,
            ev.BlocksEvicted: self._evicted,
            ev.StorePlanned: self._store_planned,
            ev.StoreSkipped: self._noted,
            ev.LoadPlanned: self._load_planned,
            ev.TransfersSubmitted: self._submitted,
            ev.TransferCancelled: self._cancelled,
            ev.WorkerReported: self._reported,
            ev.ReportRejected: self._noted,
            ev.TransferLost: self._lost,
            ev.BlocksTouched: self._touched,
            ev.FlushRequested: self._flush_requested,
            ev.CacheReset: self._reset,
            ev.StepEnded: self._noted,
            ev.Ticked: self._ticked,
            ev.BlocksOffered: self._offered,
            ev.OffersCounted: self._offers_counted,
            ev.BlocksRewritten: self._rewritten,
        }

    def apply(self, event: OffloadingEvent) -> Transfer | None:
        """Fold one event. Returns the transfer that it ended, if it did.

        Raises `IllegalTransition` or `InvalidEvent`, with nothing changed, if the event cannot follow.
        """
        if event.seq != self.seq + 1:
            raise InvalidEvent(event.seq, f"expected event {self.seq + 1}")
        ended = self._handlers[type(event)](event)
        self.seq = event.seq
        self.step = event.step
        return ended

    # Questions.

    def readable(self, slot: int) -> bool:
        return _FIRST_READABLE <= self.blocks.words[slot] & STATE_MASK <= _LAST_READABLE

    def keys_of(self, slots: IdArray) -> Sequence[bytes]:
        """The keys of these slots' latest lives."""
        if len(slots) < 2:
            return [self.key_of[slot] for slot in slots]
        return cast(Sequence[bytes], itemgetter(*listed(slots))(self.key_of))

    def live_pins(self, request: Request) -> IdArray:
        """The pins that still hold: same life of the slot, and not invalidated since."""
        pins, since = request.pins, request.pinned_at
        if self.voided_at < since:
            return pins
        if type(pins) is tuple:
            words, generation = self.blocks.words, self.generation
            return tuple(
                [
                    slot
                    for slot in pins
                    if generation[slot] <= since
                    and _FIRST_READABLE <= words[slot] & STATE_MASK <= _LAST_READABLE
                ]
            )
        states = self.blocks.view[pins] & STATE_MASK
        live = (states >= _FIRST_READABLE) & (states <= _LAST_READABLE)
        live &= self.generation_view[pins] <= since
        return pins if live.all() else cast(NDArray[np.int64], pins)[live]

    def draining(self) -> bool:
        """Whether copies that a reset abandoned are still under way."""
        return any(transfer.state is TransferState.ABANDONED for transfer in self.transfers.values())

    # Requests.

    def _opened(self, event: ev.LogOpened) -> None:
        if self.seq != 0 or event.config != self.config:
            raise InvalidEvent(event.seq, "the log opens once, and with this ledger's configuration")

    def _arrived(self, event: ev.RequestArrived) -> None:
        if event.request in self.requests:
            raise InvalidEvent(event.seq, f"request {event.request} has arrived before")
        self.requests[event.request] = Request(event.request)

    def _preempted(self, event: ev.RequestPreempted) -> None:
        self._leave(self._request(event.seq, event.request), _REQUEST_PREEMPT, event.seq)

    def _finished(self, event: ev.RequestFinished) -> None:
        self._leave(self._request(event.seq, event.request), _REQUEST_FINISH, event.seq)

    def _leave(self, request: Request, trigger: RequestTrigger, seq: int) -> None:
        word = REQUEST_WORDS.step(request.word, trigger, request.name, seq)
        self._unpin(request, self.live_pins(request), seq)
        request.patience, request.settled, request.offered = -1, (), ()
        self._settle(request, word)

    def _matched(self, event: ev.HitMatched) -> None:
        request = self.requests.get(event.request) or Request(event.request)
        slots = unpack(event.slots)
        trigger = _REQUEST_HIT if len(slots) else _REQUEST_MISS
        word = REQUEST_WORDS.step(request.word, trigger, request.name, event.seq)
        if len(slots):
            new = self.blocks.check(slots, _BLOCK_PIN, event.seq)
            self.blocks.commit(slots, new)
            busy = pick(slots, new, PINNED_ONCE)
            if len(busy):
                self.policy.busy(busy)
            request.pins, request.pinned_at = slots, event.seq
        request.word = word
        self.requests[request.name] = request

    def _released(self, event: ev.HitReleased) -> None:
        request = self._request(event.seq, event.request)
        word = REQUEST_WORDS.step(request.word, _REQUEST_UNMATCH, request.name, event.seq)
        self._unpin(request, self.live_pins(request), event.seq)
        request.word = word

    def _deferred(self, event: ev.RequestDeferred) -> None:
        request = self.requests.get(event.request) or Request(event.request)
        self._transfer(event.seq, event.transfer)
        request.word = REQUEST_WORDS.step(request.word, _REQUEST_DEFER, request.name, event.seq)
        request.awaits, request.patience = event.transfer, event.until
        self.deferred[request.name] = self.requests[request.name] = request

    def _ticked(self, event: ev.Ticked) -> None:
        if event.tick != self.tick + 1:
            raise InvalidEvent(event.seq, f"tick {event.tick} cannot follow tick {self.tick}")
        self.tick = event.tick
        self._wake(
            event.seq, [request for request in self.deferred.values() if request.patience <= event.tick]
        )

    # Stores.

    def _recalled(self, event: ev.KeysRecalled) -> None:
        self.policy.recalled(event.keys)

    def _offered(self, event: ev.BlocksOffered) -> None:
        requests = [self._request(event.seq, name) for name, _, _ in event.offers]
        for request, (name, settled, offered) in zip(requests, event.offers):
            if len(settled) != len(offered) or any(map(gt, settled, offered)):
                raise InvalidEvent(event.seq, f"request {name} has settled more than it offered")
            if request.word & STATE_MASK == _FINISHED:
                raise InvalidEvent(event.seq, f"request {name} is over, and has nothing to offer")
        for request, (_, settled, offered) in zip(requests, event.offers):
            request.settled, request.offered = settled, offered

    def _offers_counted(self, event: ev.OffersCounted) -> None:
        self.offers.count(event.keys)

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        victims, moved = unpack(event.slots), unpack(event.moved)
        new = self.blocks.check(victims, _BLOCK_EVICT, event.seq)
        if len(moved):
            self.blocks.check(moved, _BLOCK_TOUCH, event.seq)
            if not set(listed(victims)).isdisjoint(listed(moved)):
                raise InvalidEvent(event.seq, "a block is evicted and moved at once")
        self.blocks.commit(victims, new)
        keys = self._unindex(victims)
        self.policy.evicted(Choice(victims, moved), keys)
        self.free.append(victims)
        if self.listener is not None:
            self.listener.removed(keys)

    def _store_planned(self, event: ev.StorePlanned) -> None:
        seq, keys = event.seq, event.keys
        slots, device_blocks = unpack(event.slots), unpack(event.device_blocks)
        if len(keys) != len(slots) or sum([count for _, count in event.owners]) not in (0, len(keys)):
            raise InvalidEvent(seq, "a store names as many slots as keys, and owners for all or for none")
        self._paired(seq, slots, device_blocks)
        new = self.blocks.check(slots, _BLOCK_ALLOCATE, seq)
        leased = self.leases.check(device_blocks, _LEASE_BEGIN_READ, seq)
        self._enter(seq, keys, slots)
        self.blocks.commit(slots, new)
        self.leases.commit(device_blocks, leased)
        self.free.remove(slots)
        if type(slots) is tuple:
            for slot in slots:
                self.generation[slot] = seq
        else:
            self.generation_view[slots] = seq
        self.provenance.rewritten(device_blocks)
        self.offers.forget(keys)
        self._plan(seq, Direction.STORE, event.owners, slots, device_blocks, keys)

    def _enter(self, seq: int, keys: tuple[bytes, ...], slots: IdArray) -> None:
        """Let the index name these slots by these keys. Refuses a key that stands in it, or twice here.

        The index grows by one a key exactly if all keys are new: that is cheaper to see afterwards, and
        a refusal, which only a wrong event earns, puts back what it was.
        """
        numbers, index, key_of = listed(slots), self.index, self.key_of
        size = len(index) + len(keys)
        index.update(zip(keys, numbers))
        if len(index) != size:
            self.index = {key_of[slot]: slot for slot in indexed_slots(self)}
            raise InvalidEvent(seq, "a planned key has a block already, or stands twice in the plan")
        for slot, key in zip(numbers, keys):
            key_of[slot] = key

    # Loads.

    def _load_planned(self, event: ev.LoadPlanned) -> None:
        seq, slots, device_blocks = event.seq, unpack(event.slots), unpack(event.device_blocks)
        request = self._request(seq, event.request)
        word = REQUEST_WORDS.step(request.word, _REQUEST_BEGIN_LOAD, request.name, seq)
        live = self.live_pins(request)
        if event.voided:
            if len(live) == len(request.pins) or len(slots):
                raise InvalidEvent(seq, "no pin of this request was voided")
            self._unpin(request, live, seq)
            request.word = REQUEST_WORDS.step(word, _REQUEST_END_LOAD, request.name, seq)
            return
        loaded = len(slots)
        promised = equal(slots, request.pins[:loaded])
        if not promised or not (live is request.pins or equal(slots, live[:loaded])):
            raise InvalidEvent(seq, f"request {request.name} loads blocks that its match does not hold")
        parts = unpack(event.parts)
        self._paired(seq, slots, device_blocks, parts)
        new = self.blocks.check(slots, _BLOCK_BEGIN_LOAD, seq)
        leased = self.leases.check(device_blocks, _LEASE_BEGIN_WRITE, seq)
        self.blocks.commit(slots, new)
        self.leases.commit(device_blocks, leased)
        self._unpin(request, live[loaded:] if loaded < len(live) else NO_IDS, seq)
        request.word, request.load = word, seq
        self.provenance.bring(device_blocks, self._keys_by_device_block(slots, parts))
        self._plan(seq, Direction.LOAD, ((request.name, loaded),), slots, device_blocks, ())

    def _keys_by_device_block(self, slots: IdArray, parts: IdArray) -> Sequence[bytes]:
        keys, chunk = self.keys_of(slots), self.config.blocks_per_chunk
        if len(parts):
            return [keys[part // chunk] for part in listed(parts)]
        return keys if chunk == 1 else [key for key in keys for _ in range(chunk)]

    def _rewritten(self, event: ev.BlocksRewritten) -> None:
        self.provenance.forget(unpack(event.device_blocks))

    # Transfers.

    def _plan(
        self,
        seq: int,
        direction: Direction,
        owners: Owners,
        slots: IdArray,
        device_blocks: IdArray,
        keys: tuple[bytes, ...],
    ) -> None:
        word = self._planned_word
        self.transfers[seq] = Transfer(seq, direction, owners, slots, device_blocks, keys, word, self.epoch)

    def _submitted(self, event: ev.TransfersSubmitted) -> None:
        seq = event.seq
        transfers = self._distinct_transfers(seq, event.transfers)
        words = [TRANSFER_WORDS.step(one.word, _TRANSFER_SUBMIT, one.id, seq) for one in transfers]
        # A planned store's slots are ALLOCATED and its own, so that the next step cannot be refused.
        for transfer, word in zip(transfers, words):
            transfer.word, transfer.since = word, self.tick
            if transfer.direction is Direction.STORE:
                self.blocks.advance(transfer.slots, _BLOCK_SUBMIT_STORE, seq)

    def _reported(self, event: ev.WorkerReported) -> Transfer | None:
        seq, transfer = event.seq, self._transfer(event.seq, event.transfer)
        if event.worker >= self.config.workers or transfer.reported >> event.worker & 1:
            raise InvalidEvent(seq, f"worker {event.worker} cannot report transfer {transfer.id} (again)")
        trigger = _TRANSFER_REPORT_GOOD if event.good else _TRANSFER_REPORT_BAD
        transfer.word = TRANSFER_WORDS.step(transfer.word, trigger, transfer.id, seq)
        transfer.reported |= 1 << event.worker
        state = transfer.word & STATE_MASK
        if state in _UNDER_WAY:
            return None
        self._end_copies(transfer, state == _COMPLETED, seq)
        if state == _FAILED and transfer.direction is Direction.LOAD:
            self._invalidate(transfer.slots, seq)
        self._end(transfer, seq)
        return transfer

    def _end_copies(self, transfer: Transfer, good: bool, seq: int) -> None:
        """The transfer touches its slots no more. The table decides what each of them becomes."""
        slots = transfer.slots
        trigger = _BLOCK_END_COPY_GOOD if good else _BLOCK_END_COPY_BAD
        new = self.blocks.advance(slots, trigger, seq)
        if transfer.direction is Direction.LOAD:
            idle = pick(slots, new, IDLE)
            if len(idle):
                self.policy.idle(idle)
            if len(idle) == len(slots):
                return
        elif good:
            self.policy.admitted(slots, transfer.keys)
            if self.listener is not None:
                self.listener.stored(transfer.id, transfer.keys)
        elif transfer.word & STATE_MASK == _FAILED:
            self._unindex(slots)
        freed = pick(slots, new, _EVICTED_WORD)
        if len(freed):
            self.free.append(freed)

    def _end(self, transfer: Transfer, seq: int) -> None:
        """The transfer is over: its leases, the request that it loads for, and who waited for it."""
        store = transfer.direction is Direction.STORE
        lease = _LEASE_END_READ if store else _LEASE_END_WRITE
        self.leases.advance(transfer.device_blocks, lease, seq)
        self._close(transfer, seq)

    def _close(self, transfer: Transfer, seq: int) -> None:
        del self.transfers[transfer.id]
        self.ended_at = seq
        if transfer.direction is Direction.LOAD:
            request = self.requests[transfer.owners[0][0]]
            request.load = 0
            if transfer.word & STATE_MASK != _COMPLETED:
                # The request computes these blocks itself before it offers them.
                self.provenance.forget(transfer.device_blocks)
            self._settle(request, REQUEST_WORDS.step(request.word, _REQUEST_END_LOAD, request.name, seq))
        if self.deferred:
            self._wake(seq, [one for one in self.deferred.values() if one.awaits == transfer.id])

    def _cancelled(self, event: ev.TransferCancelled) -> Transfer | None:
        transfer = self._transfer(event.seq, event.transfer)
        transfer.word = TRANSFER_WORDS.step(transfer.word, _TRANSFER_CANCEL, transfer.id, event.seq)
        self._undo(transfer, event.seq)
        return transfer

    def _undo(self, transfer: Transfer, seq: int) -> None:
        """A plan that no worker has seen ends: no byte was touched."""
        if transfer.direction is Direction.LOAD:
            self._end_copies(transfer, good=False, seq=seq)
        else:
            self.blocks.advance(transfer.slots, _BLOCK_CANCEL, seq)
            self._unindex(transfer.slots)
            self.free.append(transfer.slots)
        self._end(transfer, seq)

    def _lost(self, event: ev.TransferLost) -> Transfer | None:
        seq, transfer = event.seq, self._transfer(event.seq, event.transfer)
        slots = transfer.slots
        transfer.word = TRANSFER_WORDS.step(transfer.word, _TRANSFER_LOSE, transfer.id, seq)
        new = self.blocks.check(slots, _BLOCK_LOSE, seq)
        self._withdraw(slots)
        self.blocks.commit(slots, new)
        self.voided_at = seq
        # A block that the lost copy may still read can be reused: its bytes go to a retired slot.
        lease = _LEASE_END_READ if transfer.direction is Direction.STORE else _LEASE_LOSE
        self.leases.advance(transfer.device_blocks, lease, seq)
        self._close(transfer, seq)
        return transfer

    def _flush_requested(self, event: ev.FlushRequested) -> None:
        for transfer in self._distinct_transfers(event.seq, event.transfers):
            transfer.flush = True

    # The cache as a whole.

    def _touched(self, event: ev.BlocksTouched) -> None:
        slots = unpack(event.slots)
        self.policy.touched(pick(slots, self.blocks.check(slots, _BLOCK_TOUCH, event.seq), IDLE))

    def _reset(self, event: ev.CacheReset) -> None:
        if event.epoch != self.epoch + 1:
            raise InvalidEvent(event.seq, f"epoch {event.epoch} cannot follow epoch {self.epoch}")
        seq, self.epoch = event.seq, event.epoch
        for transfer in list(self.transfers.values()):
            if transfer.state is _PLANNED:
                transfer.word = TRANSFER_WORDS.step(transfer.word, _TRANSFER_CANCEL, transfer.id, seq)
                self._undo(transfer, seq)
            else:
                transfer.word = TRANSFER_WORDS.step(transfer.word, _TRANSFER_ABANDON, transfer.id, seq)
        states = self.blocks.view & STATE_MASK
        named = np.flatnonzero((states >= _FIRST_INDEXED) & (states <= _LAST_INDEXED))
        if len(named):
            self._invalidate(named, seq)
        self.provenance.age()
        for request in self.requests.values():
            request.settled = request.offered = ()
        self.policy = make_policy(self.config.policy, self.config.host_blocks)
        if self.listener is not None:
            self.listener.cleared()

    def _noted(self, event: OffloadingEvent) -> None:
        """Recorded for the reader of the log; nothing changes."""

    # Shared parts.

    def _invalidate(self, slots: IdArray, seq: int) -> None:
        """Void these blocks, whatever state each is in. Total, so that it can end any event."""
        new = self.blocks.check(slots, _BLOCK_INVALIDATE, seq)
        gone = self._withdraw(slots)
        self.blocks.commit(slots, new)
        self.voided_at = seq
        freed = gone[self.blocks.view[gone] == _EVICTED_WORD]
        if len(freed):
            self.free.append(freed)

    def _withdraw(self, slots: IdArray) -> NDArray[np.int64]:
        """Take those that the index names out of it, and those that can be read from the policy."""
        states = np.asarray(self.blocks.look(slots)) & STATE_MASK
        numbers = np.asarray(slots, dtype=np.int64)
        named = numbers[(states >= _FIRST_INDEXED) & (states <= _LAST_INDEXED)]
        readable = numbers[(states >= _FIRST_READABLE) & (states <= _LAST_READABLE)]
        self._unindex(named)
        if len(readable):
            self.policy.removed(readable)
            if self.listener is not None:
                self.listener.removed([self.key_of[slot] for slot in readable.tolist()])
        return named

    def _unindex(self, slots: IdArray) -> Sequence[bytes]:
        """Forget the keys of these slots; returns them."""
        keys = self.keys_of(slots)
        index = self.index
        for key in keys:
            del index[key]
        self.forgotten_at = self.seq + 1
        return keys

    def _unpin(self, request: Request, slots: IdArray, seq: int) -> None:
        """End the request's match: `slots` are the live pins to give back; void ones need nothing."""
        request.pins = NO_IDS
        if len(slots):
            new = self.blocks.advance(slots, _BLOCK_UNPIN, seq)
            idle = pick(slots, new, IDLE)
            if len(idle):
                self.policy.idle(idle)

    def _settle(self, request: Request, word: int) -> None:
        """Give a request its new word, and forget it if that means RELEASED."""
        request.word = word
        state = word & STATE_MASK
        if self.deferred and state != RequestState.DEFERRED:
            self.deferred.pop(request.name, None)
        if state == _RELEASED:
            del self.requests[request.name]

    def _wake(self, seq: int, requests: Iterable[Request]) -> None:
        for request in requests:
            self._settle(request, REQUEST_WORDS.step(request.word, _REQUEST_WAKE, request.name, seq))

    def _request(self, seq: int, name: str) -> Request:
        request = self.requests.get(name)
        if request is None:
            raise InvalidEvent(seq, f"request {name} has not arrived, or was released")
        return request

    def _transfer(self, seq: int, id: int) -> Transfer:
        transfer = self.transfers.get(id)
        if transfer is None:
            raise InvalidEvent(seq, f"transfer {id} is not live")
        return transfer

    def _distinct_transfers(self, seq: int, ids: Sequence[int]) -> list[Transfer]:
        if len(ids) > 1 and len(set(ids)) != len(ids):
            raise InvalidEvent(seq, "a transfer is named twice")
        return [self._transfer(seq, id) for id in ids]

    def _paired(self, seq: int, slots: IdArray, device_blocks: IdArray, parts: IdArray = NO_IDS) -> None:
        """Refuse a plan whose device blocks are not the chunks of its slots, or the named parts of them."""
        places = len(slots) * self.config.blocks_per_chunk
        if not 0 < len(device_blocks) == (len(parts) or places):
            raise InvalidEvent(seq, "a plan names a chunk of device blocks for each slot, at least one")
        if len(parts):
            named = listed(parts)
            chunk = self.config.blocks_per_chunk
            ascending = all(map(gt, named[1:], named))
            if not ascending or {part // chunk for part in named} != set(range(len(slots))):
                raise InvalidEvent(seq, "parts ascend, and name each slot of the plan and no other")


def indexed_slots(ledger: Ledger) -> list[int]:
    """Slots whose block has a key that the index names: ALLOCATED to LOADING, by slot number."""
    states = ledger.blocks.view & STATE_MASK
    return np.flatnonzero((states >= _FIRST_INDEXED) & (states <= _LAST_INDEXED)).tolist()
