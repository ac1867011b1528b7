"""Contracts of the lease machine: one step of copies' hold on a device block, for any number of readers."""

from __future__ import annotations

from contracts.steps import Step, taken
from kvsm.states import LEASE, LeaseState, LeaseTrigger

_S, _T = LeaseState, LeaseTrigger
READERS_LIMIT = (1 << 12) - 1


def sound(state: int, readers: int) -> bool:
    """Whether the state may have this number of readers: only READING has any."""
    if state == _S.READING:
        return 1 <= readers <= READERS_LIMIT
    return readers == 0


def step(state: LeaseState, readers: int, trigger: LeaseTrigger) -> Step:
    return taken(LEASE, state, (readers,), trigger)


def a_step_keeps_it_sound(state: LeaseState, readers: int, trigger: LeaseTrigger) -> Step:
    """One release per hold (S4): readers are never negative and never above the limit, and a lease that
    ended has none.

    pre: sound(state, readers)
    post: _ is None or sound(*_)
    """
    return step(state, readers, trigger)


def a_writer_is_alone(state: LeaseState, readers: int) -> tuple[Step, Step]:
    """Order of copies (S12): a copy begins to write only a block that no copy holds, and to read only one
    that no copy writes.

    pre: sound(state, readers)
    post: _[0] == ((_S.WRITING, 0) if state == _S.NONE else None)
    post: _[1] == ((_S.READING, readers + 1) if may_read(state, readers) else None)
    """
    return step(state, readers, _T.BEGIN_WRITE), step(state, readers, _T.BEGIN_READ)


def may_read(state: int, readers: int) -> bool:
    return state == _S.NONE or (state == _S.READING and readers < READERS_LIMIT)


def a_hold_ends_once(state: LeaseState, readers: int, trigger: LeaseTrigger) -> Step:
    """No reuse in flight (S3), one release per hold (S4): a held block is free again only when its last
    reader, or its writer, has ended. A restart has another device pool.

    pre: sound(state, readers)
    pre: state == _S.READING or state == _S.WRITING
    pre: trigger != _T.RESTART
    post: _ is None or _[0] != _S.NONE or ended(state, readers, trigger)
    """
    return step(state, readers, trigger)


def ended(state: int, readers: int, trigger: int) -> bool:
    if state == _S.READING:
        return trigger == _T.END_READ and readers == 1
    return trigger == _T.END_WRITE


def every_hold_can_end(state: LeaseState, readers: int) -> tuple[Step, Step]:
    """Every call is legal (S8): a reader's end is legal exactly while there are readers, and removes one. A
    writer's end is legal exactly while there is a writer.

    pre: sound(state, readers)
    post: (_[0] is not None) == (readers > 0)
    post: _[0] is None or _[0][1] == readers - 1
    post: (_[1] is not None) == (state == _S.WRITING)
    """
    return step(state, readers, _T.END_READ), step(state, readers, _T.END_WRITE)


def retired_is_for_ever(trigger: LeaseTrigger) -> Step:
    """No reuse in flight (S3): a device block that a lost load may still write is never handed out again, as
    long as its process lives.

    pre: trigger != _T.RESTART
    post: _ is None
    """
    return step(_S.RETIRED, 0, trigger)
