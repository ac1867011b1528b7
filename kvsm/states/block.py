"""The block: what a host slot holds during one life, from allocate to evict.

The state has two counters. `copies` counts the transfers in flight that touch the slot's bytes: one store,
or any number of loads. `pins` counts the matches that hold this block for a request and have not become a
load yet.

Why these rows and no others:

- A FREE slot was never used, an EVICTED one was: readers of a log see the difference. Both can be allocated.
- A store's block becomes STORED only on END_COPY_GOOD, when *every* worker has succeeded: publish after
  commit (S2). Any failure ends in EVICTED: failure is not success (S6).
- EVICT exists only in STORED, and needs pins = 0. So a match holds what it counts (S7), and there is no
  reuse in flight (S3).
- INVALIDATE is legal in every state. A block that no copy touches is gone at once. A block that a copy
  touches is QUARANTINED: its slot is not allocated before the last copy has ended. Its pins are voided: the
  loads of their requests will be planned as voided.
- END_COPY_GOOD and END_COPY_BAD end one transfer. The next state of each block depends on its state then,
  which other triggers may have changed since the copy began.
- RETIRED means that a worker will never report. Its copy may still write, so the slot is not used as long as
  this process and its workers live.
- RESTART begins the next process, when all workers of the last one are dead. So it is legal in every state,
  and ends every copy and pin. Readable blocks stay readable. A slot that a copy may have written in part, and
  a RETIRED one, can be allocated: no live process can still write it.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvsm.states.machine import VOID, Counter, Machine, Row
from kvsm.states.words import STATE_MASK, Codec


class BlockState(IntEnum):
    """What a host slot holds. The first is the initial state."""

    FREE = 0
    ALLOCATED = 1
    STORING = 2
    STORED = 3
    LOADING = 4
    EVICTED = 5
    QUARANTINED = 6
    RETIRED = 7


class BlockTrigger(IntEnum):
    """What can happen to a block."""

    ALLOCATE = 0
    SUBMIT_STORE = 1
    CANCEL = 2
    PIN = 3
    UNPIN = 4
    BEGIN_LOAD = 5
    END_COPY_GOOD = 6
    END_COPY_BAD = 7
    EVICT = 8
    INVALIDATE = 9
    LOSE = 10
    TOUCH = 11
    RESTART = 12


# Also names of this module: `block.PIN` takes 2 ns to look up, `BlockTrigger.PIN` 50.
FREE, ALLOCATED, STORING, STORED, LOADING, EVICTED, QUARANTINED, RETIRED = BlockState
(
    ALLOCATE,
    SUBMIT_STORE,
    CANCEL,
    PIN,
    UNPIN,
    BEGIN_LOAD,
    END_COPY_GOOD,
    END_COPY_BAD,
    EVICT,
    INVALIDATE,
    LOSE,
    TOUCH,
    RESTART,
) = BlockTrigger
_MANY = (1 << 12) - 1
_LAST = {"copies": (1, 1)}
_NOT_LAST = {"copies": (2, _MANY)}
_VOIDED = {"copies": VOID, "pins": VOID}
_READABLE = (STORED, LOADING)
_GONE = (FREE, EVICTED, QUARANTINED, RETIRED)
_ENDS = (END_COPY_GOOD, END_COPY_BAD)


def _rows() -> tuple[Row, ...]:
    rows = [
        Row((FREE, EVICTED), ALLOCATE, ALLOCATED, "a store is planned"),
        Row((ALLOCATED,), SUBMIT_STORE, STORING, "the plan left for the workers", then={"copies": 1}),
        Row((ALLOCATED,), CANCEL, EVICTED, "the plan never left the scheduler"),
        Row((STORING,), END_COPY_GOOD, STORED, "every worker stored its shard", _LAST, {"copies": -1}),
        Row((STORING,), END_COPY_BAD, EVICTED, "some worker failed", _LAST, {"copies": -1}),
        Row(_READABLE, PIN, None, "a match counts on it", then={"pins": 1}),
        Row(_READABLE, UNPIN, None, "the match was released", then={"pins": -1}),
        Row(_READABLE, TOUCH, None, "used without a load: the device had it too"),
        Row(_READABLE, BEGIN_LOAD, LOADING, "the pin becomes a reader", then={"copies": 1, "pins": -1}),
        Row((STORED,), EVICT, EVICTED, "its slot is wanted", {"pins": (0, 0)}),
        Row(_GONE, INVALIDATE, None, "nothing readable to void"),
        Row((ALLOCATED, STORED), INVALIDATE, EVICTED, "no copy touches it", then={"pins": VOID}),
        Row((STORING, LOADING), INVALIDATE, QUARANTINED, "a copy still touches it", then={"pins": VOID}),
        Row((STORING, LOADING, QUARANTINED), LOSE, RETIRED, "a worker will never report", then=_VOIDED),
        Row((RETIRED,), LOSE, None, "already given up"),
        Row((FREE, EVICTED), RESTART, None, "it holds nothing"),
        Row((ALLOCATED,), RESTART, EVICTED, "its store was only planned", then=_VOIDED),
        Row((STORING,), RESTART, EVICTED, "its store may have written a part", then=_VOIDED),
        Row(_READABLE, RESTART, STORED, "a reader changes no byte", then=_VOIDED),
        Row((QUARANTINED,), RESTART, EVICTED, "it was void, and its copies are over", then=_VOIDED),
        Row((RETIRED,), RESTART, EVICTED, "nobody lives that could still write it", then=_VOIDED),
    ]
    for end in _ENDS:
        rows += [
            Row((LOADING,), end, LOADING, "other loads still read it", _NOT_LAST, {"copies": -1}),
            Row((LOADING,), end, STORED, "the last reader left", _LAST, {"copies": -1}),
            Row((QUARANTINED,), end, QUARANTINED, "other copies go on", _NOT_LAST, {"copies": -1}),
            Row((QUARANTINED,), end, EVICTED, "the last copy ended", _LAST, {"copies": -1}),
            Row((RETIRED,), end, None, "another copy of a lost slot ended"),
        ]
    return tuple(rows)


BLOCK = Machine(
    "block", BlockState, BlockTrigger, (Counter("copies", bits=12), Counter("pins", bits=15)), _rows()
)
BLOCK_WORDS = Codec(BLOCK)

IDLE = BLOCK_WORDS.encode(BlockState.STORED)
"""The word of a block that may be evicted: STORED, no pin, no copy."""

PINNED_ONCE = BLOCK_WORDS.step(IDLE, BlockTrigger.PIN, "", 0)
"""The word of a block that was idle until a match pinned it."""


def holders(word: int) -> int:
    """Return the number of pins and copies of a block with this word."""
    return sum(BLOCK_WORDS.decode(word)[1])


EVICTED_WORD = BLOCK_WORDS.encode(BlockState.EVICTED)
"""The word of an EVICTED block: it has neither pin nor copy."""

# Ranges of states, as plain ints: numpy is slow to compare with a member.
FIRST_INDEXED, LAST_INDEXED = int(ALLOCATED), int(LOADING)
FIRST_READABLE, LAST_READABLE = int(STORED), int(LOADING)


def are_indexed(words: NDArray[np.int32]) -> NDArray[np.bool_]:
    """For each block whether the index names it: ALLOCATED to LOADING."""
    states = words & STATE_MASK
    return (states >= FIRST_INDEXED) & (states <= LAST_INDEXED)


def are_readable(words: NDArray[np.int32]) -> NDArray[np.bool_]:
    """For each block whether it can be loaded: STORED or LOADING."""
    states = words & STATE_MASK
    return (states >= FIRST_READABLE) & (states <= LAST_READABLE)
