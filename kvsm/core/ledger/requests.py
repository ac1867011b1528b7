"""The events of requests: they arrive, match, wait and end."""

from __future__ import annotations

from collections.abc import Iterable

from kvsm import events as ev
from kvsm.core.ledger import order
from kvsm.core.ledger.records import RequestRecord
from kvsm.core.ledger.state import LedgerState
from kvsm.errors import InvalidEvent
from kvsm.ids import NO_IDS, IdArray, unpack
from kvsm.states import block as block_machine
from kvsm.states import request as request_machine
from kvsm.states.request import REQUEST_WORDS, RequestTrigger
from kvsm.states.words import STATE_MASK


def request_arrived(ledger: LedgerState, event: ev.RequestArrived) -> None:
    """Make a record of the request."""
    if event.request in ledger.requests:
        raise InvalidEvent(event.seq, f"request {event.request} has arrived before")
    ledger.requests[event.request] = RequestRecord(event.request, target=event.target)


def request_preempted(ledger: LedgerState, event: ev.RequestPreempted) -> None:
    """Release the pins of the request and restart its cursors; its copies continue."""
    _leave(ledger, named(ledger, event.seq, event.request), request_machine.PREEMPT, event.seq)


def request_finished(ledger: LedgerState, event: ev.RequestFinished) -> None:
    """Release the pins of the request, and forget it: now, or when its load ends."""
    _leave(ledger, named(ledger, event.seq, event.request), request_machine.FINISH, event.seq)


def _leave(ledger: LedgerState, request: RequestRecord, trigger: RequestTrigger, seq: int) -> None:
    word = REQUEST_WORDS.step(request.word, trigger, request.name, seq)
    unpin(ledger, request, ledger.live_pins(request), seq)
    request.patience, request.settled, request.offered = -1, (), ()
    settle(ledger, request, word)


def hit_matched(ledger: LedgerState, event: ev.HitMatched) -> None:
    """Pin the matched blocks. Idle ones leave the eviction order, unless they are for a copy to another
    tier."""
    request = ledger.requests.get(event.request) or RequestRecord(event.request)
    slots = unpack(event.slots)
    trigger = request_machine.HIT if len(slots) else request_machine.MISS
    word = REQUEST_WORDS.step(request.word, trigger, request.name, event.seq)
    if len(slots):
        new = ledger.blocks.check(slots, block_machine.PIN, event.seq)
        ledger.blocks.commit(slots, new)
        order.leave(ledger, slots, new, request.target)
        request.pins, request.pinned_at = slots, event.seq
    request.word = word
    ledger.requests[request.name] = request


def request_admitted(ledger: LedgerState, event: ev.RequestAdmitted) -> None:
    """Check that the request exists. `HitMatched` has already changed its state."""
    named(ledger, event.seq, event.request)


def hit_released(ledger: LedgerState, event: ev.HitReleased) -> None:
    """End the match without a load."""
    request = named(ledger, event.seq, event.request)
    word = REQUEST_WORDS.step(request.word, request_machine.UNMATCH, request.name, event.seq)
    unpin(ledger, request, ledger.live_pins(request), event.seq)
    request.word = word


def request_deferred(ledger: LedgerState, event: ev.RequestDeferred) -> None:
    """Let the request wait for the end of a transfer, or for a tick."""
    request = ledger.requests.get(event.request) or RequestRecord(event.request)
    if event.transfer not in ledger.transfers:
        raise InvalidEvent(event.seq, f"transfer {event.transfer} is not live")
    request.word = REQUEST_WORDS.step(request.word, request_machine.DEFER, request.name, event.seq)
    request.awaits, request.patience = event.transfer, event.until
    ledger.deferred[request.name] = ledger.requests[request.name] = request


def ticked(ledger: LedgerState, event: ev.Ticked) -> None:
    """Advance the tick, and wake the requests whose patience ends with it."""
    if event.tick != ledger.tick + 1:
        raise InvalidEvent(event.seq, f"tick {event.tick} cannot follow tick {ledger.tick}")
    ledger.tick = event.tick
    over = [request for request in ledger.deferred.values() if request.patience <= event.tick]
    wake(ledger, event.seq, over)


def named(ledger: LedgerState, seq: int, name: str) -> RequestRecord:
    """Return the record of this request. Raises `InvalidEvent` if there is none."""
    request = ledger.requests.get(name)
    if request is None:
        raise InvalidEvent(seq, f"request {name} has not arrived, or was released")
    return request


def unpin(ledger: LedgerState, request: RequestRecord, slots: IdArray, seq: int) -> None:
    """End the request's match. slots: its live pins, which are released; void pins need no release."""
    request.pins = NO_IDS
    if len(slots):
        new = ledger.blocks.advance(slots, block_machine.UNPIN, seq)
        order.come_back(ledger, slots, new, request.target)


def settle(ledger: LedgerState, request: RequestRecord, word: int) -> None:
    """Set the new word of a request, and forget the request if its state is RELEASED."""
    request.word = word
    state = word & STATE_MASK
    if ledger.deferred and state != request_machine.DEFERRED:
        ledger.deferred.pop(request.name, None)
    if state == request_machine.RELEASED:
        del ledger.requests[request.name]


def wake(ledger: LedgerState, seq: int, requests: Iterable[RequestRecord]) -> None:
    """Wake these DEFERRED requests."""
    for request in requests:
        word = REQUEST_WORDS.step(request.word, request_machine.WAKE, request.name, seq)
        settle(ledger, request, word)
