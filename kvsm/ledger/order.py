"""Who stands in the eviction order: every readable block that no request uses.

A copy to another tier is no use of its block. A block keeps its place in the order while only such copies
hold it. It must not be evicted before they end: the code that asks the policy for victims protects
`copied_out`.
"""

from __future__ import annotations

from kvsm.ids import IdArray, listed, pack, unpack
from kvsm.ledger.state import LedgerState
from kvsm.states.block import IDLE, PINNED_ONCE, holders
from kvsm.states.words import Words, pick


def leave(ledger: LedgerState, slots: IdArray, pinned: Words, target: str) -> None:
    """A match has pinned these slots.

    pinned: their new words.
    target: the tier to which the match copies them; empty: a request uses them.
    """
    copied_out = ledger.copied_out
    if target:
        for slot in listed(slots):
            copied_out[slot] = copied_out.get(slot, 0) + 1
        return
    used = _unused(ledger, slots, pick(slots, pinned, PINNED_ONCE), pins=1)
    if len(used):
        ledger.policy.busy(used)


def come_back(ledger: LedgerState, slots: IdArray, released: Words, target: str) -> int:
    """A pin or a copy of these slots has ended. Returns how many of them nothing holds now.

    released: their new words.
    target: as in `leave`.
    """
    idle = pick(slots, released, IDLE)
    if target:
        _end_copies_out(ledger, slots)
        return len(idle)
    unused = _unused(ledger, slots, idle)
    if len(unused):
        ledger.policy.idle(unused)
    return len(idle)


def touch(ledger: LedgerState, slots: IdArray, words: Words) -> None:
    """These slots were used in passing. Those that stand in the order move there."""
    ledger.policy.touched(_unused(ledger, slots, pick(slots, words, IDLE)))


def _end_copies_out(ledger: LedgerState, slots: IdArray) -> None:
    copied_out = ledger.copied_out
    for slot in listed(slots):
        left = copied_out.get(slot, 0) - 1
        if left > 0:
            copied_out[slot] = left
        else:
            copied_out.pop(slot, None)  # It is not there if the block was invalidated meanwhile.


def _unused(ledger: LedgerState, slots: IdArray, idle: IdArray, pins: int = 0) -> IdArray:
    """Those of these slots that no request uses, in the same sequence.

    idle: those that nothing holds.
    pins: how many pins of each do not count.
    """
    copied_out, words = ledger.copied_out, ledger.blocks.words
    if not copied_out:
        return idle
    free = set(listed(idle))
    unused = [
        slot
        for slot in listed(slots)
        if slot in free or (slot in copied_out and holders(words[slot]) - pins == copied_out[slot])
    ]
    return unpack(pack(unused))
