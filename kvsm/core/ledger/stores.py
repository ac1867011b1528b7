"""The events of stores: offers, evictions that make room, and plans."""

from __future__ import annotations

from operator import gt

from kvsm import events as ev
from kvsm.core.ledger import index, order, requests, transfers
from kvsm.core.ledger.state import LedgerState
from kvsm.core.policies import Choice
from kvsm.errors import InvalidEvent
from kvsm.events import STORE
from kvsm.ids import listed, unpack
from kvsm.states import block as block_machine
from kvsm.states import lease as lease_machine
from kvsm.states import request as request_machine
from kvsm.states.words import STATE_MASK


def blocks_offered(ledger: LedgerState, event: ev.BlocksOffered) -> None:
    """Set the store cursors of these requests."""
    offering = [requests.named(ledger, event.seq, name) for name, _, _ in event.offers]
    for request, (name, settled, offered) in zip(offering, event.offers):
        if len(settled) != len(offered) or any(map(gt, settled, offered)):
            raise InvalidEvent(event.seq, f"request {name} has settled more than it offered")
        if request.word & STATE_MASK == request_machine.FINISHED:
            raise InvalidEvent(event.seq, f"request {name} is over, and has nothing to offer")
    for request, (_, settled, offered) in zip(offering, event.offers):
        request.settled, request.offered = settled, offered


def offers_counted(ledger: LedgerState, event: ev.OffersCounted) -> None:
    """Count one more offer of these keys."""
    ledger.offers.count(event.keys)


def keys_recalled(ledger: LedgerState, event: ev.KeysRecalled) -> None:
    """Let the policy record ghost hits."""
    ledger.policy.recalled(event.keys)


def store_skipped(ledger: LedgerState, event: ev.StoreSkipped) -> None:
    """Let the policy record which blocks it has refused. For all other reasons nothing changes."""
    if event.reason is ev.SkipReason.NOT_ADMITTED:
        ledger.policy.refused(event.keys)


def blocks_evicted(ledger: LedgerState, event: ev.BlocksEvicted) -> None:
    """Remove the policy's victims from the index, and free their slots."""
    victims, moved = unpack(event.slots), unpack(event.moved)
    new = ledger.blocks.check(victims, block_machine.EVICT, event.seq)
    if len(moved):
        ledger.blocks.check(moved, block_machine.TOUCH, event.seq)
        if not set(listed(victims)).isdisjoint(listed(moved)):
            raise InvalidEvent(event.seq, "a block is evicted and moved at once")
    ledger.blocks.commit(victims, new)
    keys = index.remove(ledger, victims)
    ledger.policy.evicted(Choice(victims, moved), keys)
    ledger.free.append(victims)
    if ledger.listener is not None:
        ledger.listener.removed(keys)


def store_planned(ledger: LedgerState, event: ev.StorePlanned) -> None:
    """Allocate free slots for these keys, and lease the device blocks for reading.

    A store whose source is not the device names no device blocks and has no lease.
    """
    seq, keys = event.seq, event.keys
    slots, device_blocks = unpack(event.slots), unpack(event.device_blocks)
    if len(keys) != len(slots) or sum([count for _, count in event.owners]) not in (0, len(keys)):
        raise InvalidEvent(seq, "a store names as many slots as keys, and owners for all or for none")
    if not event.source:
        transfers.check_pairs(ledger, seq, slots, device_blocks)
    elif len(device_blocks) or not len(slots):
        raise InvalidEvent(seq, "a store from elsewhere names slots, at least one, and no device blocks")
    order.check_parents(ledger, seq, slots, event.parents)
    new = ledger.blocks.check(slots, block_machine.ALLOCATE, seq)
    leased = ledger.leases.check(device_blocks, lease_machine.BEGIN_READ, seq)
    index.enter(ledger, seq, keys, slots)
    ledger.blocks.commit(slots, new)
    ledger.leases.commit(device_blocks, leased)
    ledger.free.remove(slots)
    if type(slots) is tuple:
        for slot in slots:
            ledger.generation[slot] = seq
    else:
        ledger.generation_view[slots] = seq
    ledger.provenance.rewritten(device_blocks)
    transfers.plan(ledger, seq, STORE, event.owners, slots, device_blocks, keys, event.parents)
