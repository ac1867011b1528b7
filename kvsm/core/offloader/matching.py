"""Hits on the host: lookup, pin, deferral and release."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, NoReturn

import msgspec

from kvsm import events as ev
from kvsm.core.ledger import RequestRecord
from kvsm.core.offloader.arguments import (
    KEY_BYTES_MAX,
    checks_request,
    flag,
    integer,
    items,
    keys_of,
    one_key,
)
from kvsm.core.offloader.emitter import EventEmitter, checked_ids
from kvsm.errors import IllegalTransition, InvalidEvent, LimitReached, WrongArgument
from kvsm.events import LOAD
from kvsm.ids import IdArray, listed, pack, to_list, unpack
from kvsm.states.block import PIN, STORED
from kvsm.states.request import DEFERRED, FINISHED, LOADING, MATCHED, RUNNING
from kvsm.states.words import STATE_MASK


class LookupResult(Enum):
    """Whether one key is on the host: vLLM's `LookupResult`."""

    MISS = "miss"
    HIT = "hit"
    HIT_PENDING = "hit pending"
    """Its store is in flight."""


class Match(msgspec.Struct, frozen=True, gc=False):
    """The result of `match`.

    hits: number of keys, from the first on, whose blocks are pinned for the request.
    waits_for: the transfer that copies the next block. The request is DEFERRED: match again later. None: it
        is not deferred.
    """

    hits: int
    waits_for: int | None = None


class PendingHit(NamedTuple):
    """A hit whose blocks are not all readable yet.

    keys: all keys that the request needs from the host.
    parents: (place in `keys`, key of the preceding block); see `store`.
    missed, asked, on_device, on_host: fields of its later match; see `HitMatched`.
    """

    request: str
    keys: Sequence[bytes]
    missed: bytes | None = None
    asked: int | None = None
    on_device: int | None = None
    on_host: int | None = None
    parents: tuple[tuple[int, bytes], ...] = ()


def lookup(core: EventEmitter, key: bytes) -> LookupResult:
    """Whether this key can be read now. Emits nothing and pins nothing; `match` does."""
    if type(key) is not bytes:
        key = one_key("lookup", "key", key)
    slot = core.ledger.index.get(key)
    if slot is None:
        return LookupResult.MISS
    return LookupResult.HIT if core.ledger.readable(slot) else LookupResult.HIT_PENDING


@checks_request
def match(core: EventEmitter, request: str, keys: Sequence[bytes]) -> Match:
    """Pin the longest prefix of `keys` that can be read, until it is loaded or released (S7).

    keys: of the blocks that the device lacks, in prefix order. The event counts these blocks in `asked`. Its
        `on_device` is None: without a scheduler the core has no such number.

    A second match replaces the first; an equal one emits nothing. A request that is loading or finished gets
    no match.
    """
    if type(keys) is not list and type(keys) is not tuple:
        keys = items("match", "keys", keys)
    entry = core.ledger.requests.get(request)
    if entry is not None and (entry.load or entry.word & STATE_MASK == DEFERRED):
        return Match(0, waits_for(core, request))
    try:
        slots, pending = _readable_prefix(core, keys)
    except TypeError:  # A wrong key may be unhashable.
        slots, pending = _readable_prefix(core, keys_of("match", keys))
    if pending is not None and defer(core, request, pending):
        return Match(0, pending)
    missed = None
    if len(slots) < len(keys):
        missed = keys[len(slots)]
        if type(missed) is not bytes or len(missed) > KEY_BYTES_MAX:
            missed = one_key("match", f"keys[{len(slots)}]", missed)
    chunk = core.config.blocks_per_chunk
    _pin(core, request, slots, missed, len(keys) * chunk, None, len(slots) * chunk)
    if slots:
        core.last_keys[request] = keys[len(slots) - 1]
    return Match(len(slots))


@checks_request
def waits_for(core: EventEmitter, request: str) -> int | None:
    """Return the transfer that the request is deferred for; None if it is not deferred.

    A preempted request whose load is still in flight is deferred for that load here, if it may be: two loads
    of one request could not be distinguished.
    """
    entry = core.ledger.requests.get(request)
    if entry is None:
        return None
    if entry.word & STATE_MASK == DEFERRED:
        return entry.awaits
    if entry.load and entry.word & STATE_MASK not in (LOADING, FINISHED) and defer(core, request, entry.load):
        return entry.load
    return None


@checks_request
def may_match(core: EventEmitter, request: str) -> bool:
    """Whether a match could be loaded: the request has no load in flight. True for an unknown request."""
    entry = core.ledger.requests.get(request)
    return entry is None or not entry.load


@checks_request
def pin(
    core: EventEmitter,
    request: str,
    slots: Sequence[int] | IdArray,
    missed: bytes | None,
    asked: int | None = None,
    on_device: int | None = None,
    on_host: int | None = None,
) -> None:
    """Pin exactly these readable slots for the request, in place of its earlier pins.

    missed: the first key that was not served.
    asked, on_device, on_host: for the log; see `HitMatched`.

    Raises `LimitReached` if a block has the most pins that can be counted, or cannot be read.
    """
    figures = asked, on_device, on_host
    missed, asked, on_device, on_host = _checked_lookup("pin", missed, *figures)
    if type(slots) is not tuple or slots:
        slots = _checked_slots(core, "pin", slots)
    _pin(core, request, slots, missed, asked, on_device, on_host)


def _checked_lookup(
    call: str,
    missed: bytes | None,
    asked: int | None,
    on_device: int | None,
    on_host: int | None,
) -> tuple[bytes | None, int | None, int | None, int | None]:
    """Convert the arguments after `call`, the figures of a lookup. Raises `WrongArgument`."""
    if missed is not None and (type(missed) is not bytes or len(missed) > KEY_BYTES_MAX):
        missed = one_key(call, "missed", missed)
    if type(asked) is not int or type(on_device) is not int or type(on_host) is not int:
        asked, on_device = _count(call, "asked", asked), _count(call, "on_device", on_device)
        on_host = _count(call, "on_host", on_host)
    if (asked or 0) < 0 or (on_device or 0) < 0 or (on_host or 0) < 0:
        raise WrongArgument(call, "asked, on_device, on_host", "count blocks below 0")
    return missed, asked, on_device, on_host


def _count(call: str, argument: str, value: object) -> int | None:
    return None if value is None else integer(call, argument, value)


def _checked_slots(core: EventEmitter, call: str, slots: Sequence[int] | IdArray) -> IdArray:
    problem = "slot {} is not one of the {}"
    return checked_ids(core, call, "slots", slots, core.config.host_blocks, problem)


def _pin(
    core: EventEmitter,
    request: str,
    slots: Sequence[int] | IdArray,
    missed: bytes | None,
    asked: int | None,
    on_device: int | None,
    on_host: int | None,
) -> None:
    entry = core.ledger.requests.get(request) or RequestRecord(request)
    state = entry.word & STATE_MASK
    try:
        if state == MATCHED:
            live = core.ledger.live_pins(entry)
            if to_list(entry.pins) == list(slots) and len(live) == len(slots):
                return
            # The old pins are released first, so check before that the new pins will not be refused.
            if len(set(slots)) != len(slots):
                raise InvalidEvent(core.ledger.seq + 1, "a slot is named twice")
            held = set(listed(live))
            fresh = unpack(pack([slot for slot in slots if slot not in held]))
            core.ledger.blocks.check(fresh, PIN, core.ledger.seq + 1)
            core.emit(ev.HitReleased, request)
        elif state == RUNNING and not len(slots):
            return
        packed = pack(slots)
        core.emit(ev.HitMatched, request, packed, missed, asked, on_device, on_host)
    except IllegalTransition as refusal:
        cannot_pin(request, refusal)


def cannot_pin(request: str, refusal: IllegalTransition) -> NoReturn:
    """Raise `LimitReached`, because the ledger refuses the pins."""
    raise LimitReached(f"request {request} cannot pin one more: {refusal}") from refusal


@checks_request
def admit(
    core: EventEmitter,
    request: str,
    asked: int | None = None,
    on_device: int | None = None,
    on_host: int | None = None,
    missed: bytes | None = None,
    resumed: bool = False,
) -> None:
    """Record that the engine has allocated the blocks of a request that reads the cache (`RequestAdmitted`).

    Call it when the result of the last lookup is used, and before its load is planned or its match is
    released. It only emits an event, for the figures of a run. Unknown requests are ignored.
    """
    figures = asked, on_device, on_host
    missed, asked, on_device, on_host = _checked_lookup("admit", missed, *figures)
    if type(resumed) is not bool:
        resumed = flag("admit", "resumed", resumed)
    if request in core.ledger.requests:
        core.emit(ev.RequestAdmitted, request, asked, on_device, on_host, missed, resumed)


@checks_request
def defer(core: EventEmitter, request: str, transfer: int) -> bool:
    """Defer the request until this transfer ends, without pins. False if it has waited `defer_ticks`
    already."""
    if type(transfer) is not int:
        transfer = integer("defer", "transfer", transfer)
    if transfer not in core.ledger.transfers:
        raise InvalidEvent(core.ledger.seq + 1, f"transfer {transfer} is not live")
    entry = core.ledger.requests.get(request) or RequestRecord(request)
    if not may_defer(core, request):
        return False
    patience = entry.patience if entry.patience >= 0 else core.ledger.tick + core.config.defer_ticks
    if entry.word & STATE_MASK == MATCHED:
        core.emit(ev.HitReleased, request)
    core.emit(ev.RequestDeferred, request, transfer, patience)
    return True


def may_defer(core: EventEmitter, request: str) -> bool:
    """Whether the request may still wait: `defer_ticks` have not passed since it was deferred first."""
    entry, now, ticks = core.ledger.requests.get(request), core.ledger.tick, core.config.defer_ticks
    return ticks > 0 and (entry is None or entry.patience < 0 or entry.patience > now)


@checks_request
def release(core: EventEmitter, request: str) -> None:
    """Release the request's match without a load."""
    entry = core.ledger.requests.get(request)
    if entry is not None and entry.word & STATE_MASK == MATCHED:
        core.emit(ev.HitReleased, request)


def in_flight(core: EventEmitter, slots: Sequence[int] | IdArray) -> int | None:
    """Return a transfer on these slots that is worth waiting for; None if there is none.

    It is the store of a slot that is not readable yet, or a load for another request, after which the device
    has the block. It is no copy to another tier, which only reads its slots.
    """
    ledger = core.ledger
    try:
        busy = ledger.not_stored(slots)
    except (TypeError, IndexError):
        busy = ledger.not_stored(_checked_slots(core, "in_flight", slots))
    for slot in busy:
        if not ledger.readable(slot):
            return ledger.generation[slot]
    if not busy:
        return None
    for transfer in ledger.transfers.values():
        is_load = transfer.direction is LOAD and not ledger.requests[transfer.owners[0][0]].target
        if is_load and not set(busy).isdisjoint(listed(transfer.slots)):
            return transfer.id
    return None


def _readable_prefix(core: EventEmitter, keys: Sequence[bytes]) -> tuple[list[int], int | None]:
    """Return (slots of the readable prefix, the store in flight of the next key; None if it has none)."""
    ledger = core.ledger
    words = ledger.blocks.words
    slots: list[int] = []
    for slot in map(ledger.index.get, keys):
        if slot is None:
            break
        # The index names ALLOCATED to LOADING blocks; those before STORED cannot be read yet.
        if words[slot] & STATE_MASK < STORED:
            return slots, ledger.generation[slot]
        slots.append(slot)
    return slots, None
