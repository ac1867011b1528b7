"""Contracts of the block machine: the effect of one step on a host slot, for every state, trigger and count.

`sound` is the invariant that every other contract starts from. `a_step_keeps_it_sound` proves that every step
keeps it, and the initial state satisfies it (`tests/check/proof/test_contracts.py`).
"""

from __future__ import annotations

from contracts.steps import Step, taken
from kvsm.states import BLOCK, BlockState, BlockTrigger

_S, _T = BlockState, BlockTrigger
COPIES_LIMIT, PINS_LIMIT = (1 << 12) - 1, (1 << 15) - 1


HOLDS = {
    _S.FREE: (0, 0, 0),
    _S.ALLOCATED: (0, 0, 0),
    _S.STORING: (1, 1, 0),
    _S.STORED: (0, 0, PINS_LIMIT),
    _S.LOADING: (1, COPIES_LIMIT, PINS_LIMIT),
    _S.EVICTED: (0, 0, 0),
    _S.QUARANTINED: (1, COPIES_LIMIT, 0),
    _S.RETIRED: (0, 0, 0),
}
"""State -> (fewest copies, most copies, most pins)."""


def sound(state: int, copies: int, pins: int) -> bool:
    """Whether the state may have this number of copies and pins."""
    least, most, most_pins = HOLDS[BlockState(state)]
    return least <= copies <= most and 0 <= pins <= most_pins


def readable(state: int) -> bool:
    return state == _S.STORED or state == _S.LOADING


def step(state: BlockState, copies: int, pins: int, trigger: BlockTrigger) -> Step:
    return taken(BLOCK, state, (copies, pins), trigger)


def a_step_keeps_it_sound(state: BlockState, copies: int, pins: int, trigger: BlockTrigger) -> Step:
    """One release per hold (S4): no counter is ever negative, above its limit, or positive in a state
    that has no holders.

    pre: sound(state, copies, pins)
    post: _ is None or sound(*_)
    """
    return step(state, copies, pins, trigger)


def a_copy_ends_only_by_its_end(state: BlockState, copies: int, pins: int, trigger: BlockTrigger) -> Step:
    """No reuse in flight (S3): only the end of a copy lowers the number of copies. A slot that a lost copy
    may still touch is retired and never reused. A restart ends all copies.

    pre: sound(state, copies, pins)
    pre: copies > 0 and trigger != _T.RESTART
    post: _ is None or _[1] >= copies or ends_one(trigger, copies, _) or _[0] == _S.RETIRED
    """
    return step(state, copies, pins, trigger)


def ends_one(trigger: int, copies: int, after: tuple[int, ...]) -> bool:
    return (trigger == _T.END_COPY_GOOD or trigger == _T.END_COPY_BAD) and after[1] == copies - 1


def only_what_nobody_holds_is_reused(state: BlockState, copies: int, pins: int) -> tuple[Step, Step]:
    """No reuse in flight (S3), a match holds what it counts (S7): a slot is allocated, or its block
    evicted, only without copies and pins.

    pre: sound(state, copies, pins)
    post: _[0] == ((_S.ALLOCATED, 0, 0) if state == _S.FREE or state == _S.EVICTED else None)
    post: _[1] == ((_S.EVICTED, 0, 0) if state == _S.STORED and copies == 0 and pins == 0 else None)
    post: _ == (None, None) or (copies == 0 and pins == 0)
    """
    return step(state, copies, pins, _T.ALLOCATE), step(state, copies, pins, _T.EVICT)


def only_a_good_store_makes_it_readable(
    state: BlockState, copies: int, pins: int, trigger: BlockTrigger
) -> Step:
    """Publish after commit (S2): a step makes a block readable only if it is the good end of its store.

    pre: sound(state, copies, pins)
    pre: not readable(state)
    post: _ is None or not readable(_[0]) or (state == _S.STORING and trigger == _T.END_COPY_GOOD)
    """
    return step(state, copies, pins, trigger)


def a_bad_end_makes_nothing_readable(state: BlockState, copies: int, pins: int) -> Step:
    """Failure is not success (S6): after a failed copy a block can be read only if it could be read
    before. (For a load, the same event also invalidates the block.)

    pre: sound(state, copies, pins)
    post: _ is None or not readable(_[0]) or readable(state)
    """
    return step(state, copies, pins, _T.END_COPY_BAD)


def every_live_copy_can_end(state: BlockState, copies: int, pins: int, good: bool) -> Step:
    """Every call is legal (S8), progress (S9): the end of a copy that touches the block is legal in every
    state, and lowers the count by exactly one.

    pre: sound(state, copies, pins)
    pre: copies > 0
    post: _ is not None and _[1] == copies - 1 and _[2] == pins
    """
    return step(state, copies, pins, _T.END_COPY_GOOD if good else _T.END_COPY_BAD)


def pins_and_readers_are_counted(state: BlockState, copies: int, pins: int) -> tuple[Step, Step, Step]:
    """One release per hold (S4), a match holds what it counts (S7): a pin adds one, a release takes one,
    and a load turns one pin into one reader. Each is refused exactly if the block cannot be read, there
    is no pin to take, or the counter is full.

    pre: sound(state, copies, pins)
    post: _[0] == ((state, copies, pins + 1) if readable(state) and pins < PINS_LIMIT else None)
    post: _[1] == ((state, copies, pins - 1) if readable(state) and pins > 0 else None)
    post: _[2] == ((_S.LOADING, copies + 1, pins - 1) if may_load(state, copies, pins) else None)
    """
    return (
        step(state, copies, pins, _T.PIN),
        step(state, copies, pins, _T.UNPIN),
        step(state, copies, pins, _T.BEGIN_LOAD),
    )


def may_load(state: int, copies: int, pins: int) -> bool:
    return readable(state) and pins > 0 and copies < COPIES_LIMIT


def invalidate_is_total(state: BlockState, copies: int, pins: int) -> Step:
    """Every call is legal (S8), no stale data (S14): any block can be invalidated. Then it cannot be
    read, it has no pins, and the copies that touch it are still counted.

    pre: sound(state, copies, pins)
    post: _ is not None and not readable(_[0]) and _[1] == copies and _[2] == 0
    """
    return step(state, copies, pins, _T.INVALIDATE)


def retired_is_for_ever(copies: int, pins: int, trigger: BlockTrigger) -> Step:
    """No reuse in flight (S3): a slot that a lost copy may still write is never used again, as long as its
    process lives.

    pre: sound(_S.RETIRED, copies, pins)
    pre: trigger != _T.RESTART
    post: _ is None or _ == (_S.RETIRED, 0, 0)
    """
    return step(_S.RETIRED, copies, pins, trigger)


def a_restart_leaves_what_can_be_read(state: BlockState, copies: int, pins: int) -> Step:
    """No stale data (S14), one release per hold (S4): after a restart nothing is held, and exactly the blocks
    are readable that were readable before. A block that a copy may have written in part is not.

    pre: sound(state, copies, pins)
    post: _ == (_S.STORED, 0, 0) if state in (_S.STORED, _S.LOADING) else _[0] in (_S.FREE, _S.EVICTED)
    post: _ is not None and _[1] == 0 and _[2] == 0
    """
    return step(state, copies, pins, _T.RESTART)
