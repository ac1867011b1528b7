"""The disk slot: what a slot of one rank's file holds, for the process that has the file open.

A slot is a header and a payload. The header says which key the payload belongs to, so the bytes on disk can
be judged without any book. This machine is what one process knows of a slot while it lives.

Why these rows and no others:

- A payload is written only in WRITING, and WRITING is entered only from EMPTY and DROPPED. So a header that
  names an old payload is gone before the payload is.
- SEAL comes after the payload and the header are written. It does not say that they are flushed: what a store
  waits for is the flush policy's matter, and the store tells that by its result.
- FAIL is legal in SEALED too: a flush that covered the slot has failed after its header was written.
- DISPROVE is a load that found other bytes than the header promises. A second load may be under way and find
  it too, so it is legal in DROPPED. In WRITING it is not: nobody reads a slot that is written.
- DROP means that nobody wants the payload any more: the slot is used again. A store drops it first.
- RECOVER exists only in EMPTY, where each process begins. Recovery has found the slot sealed in the files of
  all ranks, and it comes before the first store. What else it finds stays EMPTY: nobody reads it.

It is not one of `MACHINES`: those fold a log, and a log's head names their tables. No event of a log moves
this machine, so a change here must not make a log's snapshots useless.
"""

from __future__ import annotations

from enum import IntEnum

from kvsm.states.machine import Machine, Row


class DiskSlotState(IntEnum):
    """What a slot of the file holds. The first is the initial state."""

    EMPTY = 0
    WRITING = 1
    SEALED = 2
    DROPPED = 3


class DiskSlotTrigger(IntEnum):
    """What can happen to a slot of the file."""

    WRITE = 0
    SEAL = 1
    FAIL = 2
    DISPROVE = 3
    DROP = 4
    RECOVER = 5


EMPTY, WRITING, SEALED, DROPPED = DiskSlotState
WRITE, SEAL, FAIL, DISPROVE, DROP, RECOVER = DiskSlotTrigger

DISK_SLOT = Machine(
    "disk slot",
    DiskSlotState,
    DiskSlotTrigger,
    (),
    (
        Row((EMPTY, DROPPED), WRITE, WRITING, "a store begins, and no header names the payload"),
        Row((WRITING,), SEAL, SEALED, "payload and header are written"),
        Row((WRITING, SEALED), FAIL, DROPPED, "a write or the flush failed: the bytes are unknown"),
        Row((SEALED,), DISPROVE, DROPPED, "a load found other bytes than were stored"),
        Row((DROPPED,), DISPROVE, None, "a load that ran beside another one finds it too"),
        Row((SEALED,), DROP, DROPPED, "the payload is not wanted any more"),
        Row((EMPTY,), RECOVER, SEALED, "an earlier process has sealed it, on all ranks"),
    ),
)
