"""How keys enter the index, and how they leave it: evicted, cancelled, failed or invalidated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvsm.core import native
from kvsm.core.ledger.key_index import KeyIndex, make_index
from kvsm.core.ledger.state import LedgerState
from kvsm.errors import InvalidEvent
from kvsm.ids import IdArray, listed
from kvsm.states import block as block_machine
from kvsm.states.block import EVICTED_WORD, FIRST_INDEXED, FREE, LAST_INDEXED, are_indexed, are_readable
from kvsm.states.words import STATE_MASK


def indexed_slots(ledger: LedgerState) -> NDArray[np.int64]:
    """Return the slots that the index has, ascending: ALLOCATED to LOADING."""
    return np.flatnonzero(are_indexed(ledger.blocks.view))


def index_made_again(ledger: LedgerState) -> KeyIndex:
    """Build the index anew from the words and the keys of the slots."""
    made = make_index(ledger.key_of, isinstance(ledger, native.FoldBody))
    # A loop, because the pools of an explorer have few slots.
    for slot, word in enumerate(ledger.blocks.words):
        if FIRST_INDEXED <= word & STATE_MASK <= LAST_INDEXED:
            made[ledger.key_of[slot]] = slot
    return made


def readable_keys(ledger: LedgerState) -> list[bytes]:
    """Return the readable keys, in the order in which their stores were planned."""
    slots = np.flatnonzero(are_readable(ledger.blocks.view))
    oldest_first = slots[np.argsort(ledger.generation_view[slots], kind="stable")]
    return [ledger.key_of[slot] for slot in oldest_first.tolist()]


def enter(ledger: LedgerState, seq: int, keys: tuple[bytes, ...], slots: IdArray) -> None:
    """Enter keys into the index, each with its slot. Refuses a key that is in the index, is twice in `keys`,
    or is not of bytes."""
    if not all(isinstance(key, bytes) for key in keys):
        raise InvalidEvent(seq, "a planned key is not of bytes")
    if not ledger.index.enter(keys, listed(slots)):
        raise InvalidEvent(seq, "a planned key has a block already, or is twice in the plan")


def remove(ledger: LedgerState, slots: IdArray) -> Sequence[bytes]:
    """Remove the keys of these slots from the index. Returns them."""
    keys = ledger.keys_of(slots)
    index = ledger.index
    for key in keys:
        del index[key]
    ledger.forgotten_at = ledger.seq + 1
    return keys


def invalidate(ledger: LedgerState, slots: IdArray, seq: int) -> None:
    """Void these blocks, which is legal in every state: so a handler may call it after its other changes."""
    new = ledger.blocks.check(slots, block_machine.INVALIDATE, seq)
    removed = withdraw(ledger, slots)
    ledger.blocks.commit(slots, new)
    ledger.voided_at = seq
    freed = removed[ledger.blocks.view[removed] == EVICTED_WORD]
    if len(freed):
        ledger.free.append(freed)


def invalidate_all(ledger: LedgerState, seq: int) -> None:
    """Void every block. Then the free queue has the unused slots in the order of their numbers."""
    indexed = indexed_slots(ledger)
    if len(indexed):
        readable = np.flatnonzero(are_readable(ledger.blocks.view))
        if ledger.listener is not None and len(readable):
            ledger.listener.removed([ledger.key_of[slot] for slot in readable.tolist()])
        ledger.blocks.advance(indexed, block_machine.INVALIDATE, seq)
        ledger.index.clear()
        ledger.voided_at = ledger.forgotten_at = seq
    ledger.copied_out.clear()
    words = ledger.blocks.view
    ledger.free.refill(np.flatnonzero((words == EVICTED_WORD) | (words == int(FREE))))


def withdraw(ledger: LedgerState, slots: IdArray) -> NDArray[np.int64]:
    """Remove these slots from the index, and the readable ones from the policy. Returns the slots that the
    index had."""
    numbers: NDArray[np.int64] = np.asarray(slots)
    words = ledger.blocks.view[numbers]
    indexed, readable = numbers[are_indexed(words)], numbers[are_readable(words)]
    remove(ledger, indexed)
    if len(readable):
        ledger.policy.removed(readable)
        if ledger.copied_out:
            for slot in readable.tolist():
                ledger.copied_out.pop(slot, None)
        if ledger.listener is not None:
            ledger.listener.removed([ledger.key_of[slot] for slot in readable.tolist()])
    return indexed
