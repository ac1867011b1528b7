"""The lease: the hold of copies on a device block. Reading is shared, writing is exclusive.

A store reads a device block, a load writes it. A load excludes every other copy, since copies have no order
among each other (order of copies, S12). A lease begins when the transfer is planned and ends with the
transfer. So the engine's block pool can ask at any time whether a copy may still touch a block (no reuse in
flight, S3).

A lost copy may still touch memory. A device block that it writes is RETIRED, and never used again. A device
block that it only reads may be reused: the copy writes what it reads into a retired slot.

RESTART begins the next process, with a new device pool that no copy has touched.
"""

from __future__ import annotations

from enum import IntEnum

from kvsm.states.machine import VOID, Counter, Machine, Row
from kvsm.states.words import Codec


class LeaseState(IntEnum):
    """How copies hold a device block. The first is the initial state."""

    NONE = 0
    READING = 1
    WRITING = 2
    RETIRED = 3


class LeaseTrigger(IntEnum):
    """What can happen to a lease."""

    BEGIN_READ = 0
    END_READ = 1
    BEGIN_WRITE = 2
    END_WRITE = 3
    LOSE = 4
    RESTART = 5


# Also names of this module: `lease.BEGIN_READ` takes 2 ns to look up, `LeaseTrigger.BEGIN_READ` 50.
NONE, READING, WRITING, RETIRED = LeaseState
BEGIN_READ, END_READ, BEGIN_WRITE, END_WRITE, LOSE, RESTART = LeaseTrigger
_LAST = {"readers": (1, 1)}
_NOT_LAST = {"readers": (2, (1 << 12) - 1)}

LEASE = Machine(
    "lease",
    LeaseState,
    LeaseTrigger,
    (Counter("readers", bits=12),),
    (
        Row((NONE, READING), BEGIN_READ, READING, "a store is planned", then={"readers": 1}),
        Row((READING,), END_READ, READING, "other stores still read it", _NOT_LAST, {"readers": -1}),
        Row((READING,), END_READ, NONE, "the last store ended", _LAST, {"readers": -1}),
        Row((NONE,), BEGIN_WRITE, WRITING, "a load is planned"),
        Row((WRITING,), END_WRITE, NONE, "the load ended"),
        Row((WRITING,), LOSE, RETIRED, "a worker will never report: it may still write"),
        Row((NONE, READING, WRITING, RETIRED), RESTART, NONE, "another device pool", then={"readers": VOID}),
    ),
)
LEASE_WORDS = Codec(LEASE)
