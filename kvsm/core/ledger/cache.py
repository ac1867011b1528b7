"""Events of the whole cache: blocks used without a load, and the reset."""

from __future__ import annotations

from kvsm import events as ev
from kvsm.core.ledger import index, order, transfers
from kvsm.core.ledger.state import LedgerState
from kvsm.errors import InvalidEvent
from kvsm.ids import unpack
from kvsm.states import block as block_machine
from kvsm.states import transfer as transfer_machine
from kvsm.states.transfer import TRANSFER_WORDS


def blocks_touched(ledger: LedgerState, event: ev.BlocksTouched) -> None:
    """Move blocks in the eviction order that are used without a load and are idle."""
    slots = unpack(event.slots)
    order.check_parents(ledger, event.seq, slots, event.parents)
    new = ledger.blocks.check(slots, block_machine.TOUCH, event.seq)
    order.touch(ledger, slots, new, event.parents)


def cache_reset(ledger: LedgerState, event: ev.CacheReset) -> None:
    """Make all stored blocks unmatchable: cancel plans, abandon copies in flight.

    Then the eviction order is empty, and the free slots are sorted by number, as at the start.
    """
    if event.epoch != ledger.epoch + 1:
        raise InvalidEvent(event.seq, f"epoch {event.epoch} cannot follow epoch {ledger.epoch}")
    seq, ledger.epoch = event.seq, event.epoch
    if event.weights is not None:
        ledger.weights = event.weights
    for transfer in list(ledger.transfers.values()):
        if transfer.state is transfer_machine.PLANNED:
            transfers.cancel(ledger, transfer, seq)
        else:
            transfer.word = TRANSFER_WORDS.step(transfer.word, transfer_machine.ABANDON, transfer.id, seq)
    index.invalidate_all(ledger, seq)
    ledger.provenance.age()
    for request in ledger.requests.values():
        request.settled = request.offered = ()
    ledger.policy.clear()
    if ledger.listener is not None:
        ledger.listener.cleared()
