"""Which blocks the host serves: looked up, pinned, waited for, released."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import msgspec

from kvsm import events as ev
from kvsm.errors import IllegalTransition, LimitReached
from kvsm.events import Direction
from kvsm.ids import listed, pack, to_list
from kvsm.ledger import RequestRecord
from kvsm.offloader.core import Core
from kvsm.states.block import BlockState
from kvsm.states.request import RequestState
from kvsm.states.words import STATE_MASK

# Bound once: to look a member up in its class costs more than to compare with it.
_STORED = BlockState.STORED
_DEFERRED, _MATCHED, _RUNNING = RequestState.DEFERRED, RequestState.MATCHED, RequestState.RUNNING
_UNMATCHABLE = (RequestState.LOADING, RequestState.FINISHED)
_MATCHLESS = (*_UNMATCHABLE, _DEFERRED)


class LookupResult(Enum):
    """Whether one key is on the host: vLLM's `LookupResult`."""

    MISS = "miss"
    HIT = "hit"
    HIT_PENDING = "hit pending"
    """Its store is in flight."""


class Match(msgspec.Struct, frozen=True, gc=False):
    """What the host serves of a prompt: `hits` blocks from its start, pinned for the request.

    waits_for: the transfer of the next block that is in flight; the request is DEFERRED: ask again later.
    """

    hits: int
    waits_for: int | None = None


class Matching(Core):
    def lookup(self, key: bytes) -> LookupResult:
        """Whether this key can be read now. Counts nothing and pins nothing: `match` does."""
        slot = self.ledger.index.get(key)
        if slot is None:
            return LookupResult.MISS
        return LookupResult.HIT if self.ledger.readable(slot) else LookupResult.HIT_PENDING

    def match(self, request: str, keys: Sequence[bytes]) -> Match:
        """Longest prefix of `keys` that can be read, pinned until loaded or released (S7).

        keys: those beyond what the device has, in prefix order. A second question replaces the first;
        the same answer is no event. A request that is loading or finished has no match.
        """
        entry = self.ledger.requests.get(request)
        if entry is not None and (entry.load or entry.word & STATE_MASK in _MATCHLESS):
            return Match(0, self.waits_for(request))
        slots, pending = self._readable_prefix(keys)
        if pending is not None and self.defer(request, pending):
            return Match(0, pending)
        self.pin(request, slots, keys[len(slots)] if len(slots) < len(keys) else None)
        return Match(len(slots))

    def waits_for(self, request: str) -> int | None:
        """The transfer that the request is deferred for. A preempted one whose load still runs begins to
        wait for it here, if it may: two loads of a request at once would be told apart by nobody."""
        entry = self.ledger.requests.get(request)
        if entry is None:
            return None
        if entry.word & STATE_MASK == _DEFERRED:
            return entry.awaits
        if entry.load and entry.word & STATE_MASK not in _UNMATCHABLE and self.defer(request, entry.load):
            return entry.load
        return None

    def may_match(self, request: str) -> bool:
        """Whether a match of this request could be loaded: it is not over, and no load of it runs."""
        entry = self.ledger.requests.get(request)
        return entry is None or not (entry.load or entry.word & STATE_MASK in _UNMATCHABLE)

    def pin(self, request: str, slots: Sequence[int], missed: bytes | None) -> None:
        """Let the request hold exactly these readable slots, in place of what it held. missed: the first key
        that was not served. Raises `LimitReached` if a block has as many pins as can be counted."""
        entry = self.ledger.requests.get(request) or RequestRecord(request)
        state = entry.word & STATE_MASK
        if state == _MATCHED:
            pins = entry.pins
            if to_list(pins) == list(slots) and len(self.ledger.live_pins(entry)) == len(slots):
                return
            self._emit(ev.HitReleased, request)
        elif state == _RUNNING and not slots:
            return
        try:
            self._emit(ev.HitMatched, request, pack(slots), missed)
        except IllegalTransition as refusal:
            raise LimitReached(f"request {request} cannot pin one more: {refusal}") from refusal

    def defer(self, request: str, transfer: int) -> bool:
        """Let the request wait for this transfer, holding nothing. False if it has waited long enough."""
        entry = self.ledger.requests.get(request) or RequestRecord(request)
        tick, ticks = self.ledger.tick, self.config.defer_ticks
        if not ticks or 0 <= entry.patience <= tick:
            return False
        if entry.word & STATE_MASK == _MATCHED:
            self._emit(ev.HitReleased, request)
        patience = entry.patience if entry.patience >= 0 else tick + ticks
        self._emit(ev.RequestDeferred, request, transfer, patience)
        return True

    def release(self, request: str) -> None:
        """Give back the request's match without loading it."""
        entry = self.ledger.requests.get(request)
        if entry is not None and entry.word & STATE_MASK == _MATCHED:
            self._emit(ev.HitReleased, request)

    def in_flight(self, slots: Sequence[int]) -> int | None:
        """The transfer that one of these slots is under, if any: its store, which it cannot be read before;
        or a load of it for another request, after which the device has it too."""
        ledger = self.ledger
        words = ledger.blocks.words
        busy = [slot for slot in slots if words[slot] & STATE_MASK != _STORED]
        for slot in busy:
            if not ledger.readable(slot):
                return ledger.generation[slot]
        for transfer in ledger.transfers.values() if busy else ():
            if transfer.direction is Direction.LOAD and not set(busy).isdisjoint(listed(transfer.slots)):
                return transfer.id
        return None

    def _readable_prefix(self, keys: Sequence[bytes]) -> tuple[list[int], int | None]:
        """(slots of the readable prefix, the store in flight of the first key that is not readable)."""
        ledger = self.ledger
        words = ledger.blocks.words
        slots: list[int] = []
        for slot in map(ledger.index.get, keys):
            if slot is None:
                break
            # The index names ALLOCATED to LOADING blocks; those before STORED cannot be read yet.
            if words[slot] & STATE_MASK < _STORED:
                return slots, ledger.generation[slot]
            slots.append(slot)
        return slots, None
