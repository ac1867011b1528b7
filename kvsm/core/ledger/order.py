"""The eviction order has every readable block that no request uses.

Blocks enter the order, or move in it, in runs: consecutive blocks of one prompt. If the block before a run is
stored too, the policy gets its slot as the parent. So a prompt that is stored over several steps is evicted
like one that is stored at once, its last block first. If the same event stores the block before a run, the
run of that block enters first.

A copy to another tier does not count as a use. A block keeps its place in the order while only such copies
hold it. It must not be evicted before they end: callers of `EvictionPolicy.choose` protect `copied_out`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

from kvsm.core.ledger.state import LedgerState
from kvsm.errors import InvalidEvent
from kvsm.events import Parents
from kvsm.ids import IdArray, cut, listed, pack, unpack
from kvsm.states.block import FIRST_INDEXED, IDLE, LAST_INDEXED, PINNED_ONCE, holders
from kvsm.states.words import STATE_MASK, Words, pick


def leave(ledger: LedgerState, slots: IdArray, pinned: Words, target: str) -> None:
    """Take the slots that a match has pinned out of the eviction order.

    pinned: their new words.
    target: the tier to which the match copies the slots, which then stay in the order; empty: a request uses
        them.
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
    """Return slots to the order after a pin or a copy. Returns the number of slots without pin or copy.

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


def admit(
    ledger: LedgerState, slots: IdArray, keys: Sequence[bytes], parents: Parents, planned_at: int
) -> None:
    """Add the blocks of a successful store to the order. planned_at: the event that planned the store."""
    for begin, end, parent in _runs(ledger, slots, parents, planned_at):
        ledger.policy.admitted(cut(slots, begin, end), keys[begin:end], parent)


def touch(ledger: LedgerState, slots: IdArray, words: Words, parents: Parents) -> None:
    """Move slots that were used without a load, as far as they are in the order."""
    idle = pick(slots, words, IDLE)
    if not parents:
        ledger.policy.touched(_unused(ledger, slots, idle))
        return
    all_idle = set(listed(idle))
    for begin, end, parent in _runs(ledger, slots, parents, ledger.seq):
        run = cut(slots, begin, end)
        idle = unpack(pack([slot for slot in listed(run) if slot in all_idle]))
        ledger.policy.touched(_unused(ledger, run, idle), parent)


def check_parents(ledger: LedgerState, seq: int, slots: IdArray, parents: Parents) -> None:
    """Refuse values that are not `Parents`, places that do not ascend or are outside the batch, and slots
    that do not exist."""
    if not (type(parents) is tuple and _are_parents(parents, len(slots), ledger.config.host_blocks)):
        raise InvalidEvent(seq, "parents name places of the batch, ascending, and slots of the pool")


def _are_parents(pairs: tuple[object, ...], places: int, slots: int) -> bool:
    """Whether each pair has a place below `places`, ascending, and a slot below `slots` or None."""
    before = -1
    for pair in pairs:
        if type(pair) is not tuple or len(pair) != 2:
            return False
        place, slot = pair
        if type(place) is not int or not before < place < places:
            return False
        if not (slot is None or (type(slot) is int and 0 <= slot < slots)):
            return False
        before = place
    return True


def _runs(
    ledger: LedgerState, slots: IdArray, parents: Parents, planned_at: int
) -> Iterator[tuple[int, int, int | None]]:
    """Yield (begin, end, the policy's parent) for each run of a batch: the last run first, but each run after
    the run that it continues.

    planned_at: the event that named the parents. If a slot was allocated later, it has another block.
    """
    if not len(slots):
        return
    own = listed(slots)
    runs = parents if parents and parents[0][0] == 0 else ((0, own[0]), *parents)
    ends = [*(place for place, _ in runs[1:]), len(own)]
    numbers: Iterable[int] = reversed(range(len(runs)))
    if len(runs) > 1 and _continues_itself(own, runs):
        numbers = _sequence(own, [place for place, _ in runs], parents)
    for number in numbers:
        place, slot = runs[number]
        yield place, ends[number], None if slot == own[place] else _place_of(ledger, slot, planned_at)


def _continues_itself(slots: Sequence[int], runs: Parents) -> bool:
    """Whether a run of this batch continues another block of the batch."""
    batch = set(slots)
    return any(slot in batch and slot != slots[place] for place, slot in runs)


def _sequence(slots: Sequence[int], begins: Sequence[int], parents: Parents) -> Iterator[int]:
    """Yield the numbers of the runs of a batch: the last run first, but each run after the one it continues.

    begins: the place where each run begins.
    """
    place_of = {slot: place for place, slot in enumerate(slots)}
    continued = {
        bisect_left(begins, place): bisect_right(begins, place_of[slot]) - 1
        for place, slot in parents
        if slot in place_of
    }
    done = set[int]()
    for last in reversed(range(len(begins))):
        line, run = list[int](), last
        while run not in done:
            done.add(run)
            line.append(run)
            run = continued.get(run, run)
        yield from reversed(line)


def _place_of(ledger: LedgerState, parent: int | None, planned_at: int) -> int | None:
    """Return the parent if it still holds its block of event `planned_at`, else the next victim."""
    if (
        parent is not None
        and ledger.generation[parent] <= planned_at
        and FIRST_INDEXED <= ledger.blocks.words[parent] & STATE_MASK <= LAST_INDEXED
    ):
        return parent
    choice = ledger.policy.choose(1, ())
    return None if choice is None else int(choice.victims[0])


def _end_copies_out(ledger: LedgerState, slots: IdArray) -> None:
    copied_out = ledger.copied_out
    for slot in listed(slots):
        left = copied_out.get(slot, 0) - 1
        if left > 0:
            copied_out[slot] = left
        else:
            copied_out.pop(slot, None)  # It is missing if the block was invalidated meanwhile.


def _unused(ledger: LedgerState, slots: IdArray, idle: IdArray, pins: int = 0) -> IdArray:
    """Return the slots that no request uses, in the same order.

    idle: the slots without a pin or a copy.
    pins: number of pins of each slot that do not count.
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
