"""The disk slot: what a slot of one rank's file holds, for the process that has the file open.

A slot is a header and a payload. The header says which key the payload belongs to, so the bytes on disk can
be judged without any other record. This machine is the state of a slot within one process.

Why these rows and no others:

- A payload is written only in WRITING, and WRITING is entered only from EMPTY and DROPPED. So the header of
  an old payload is invalid before the payload is overwritten.
- SEAL comes after the payload and the header are written. It does not mean that they are flushed: the flush
  policy decides whether the store reports its result before or after the flush.
- FAIL is legal in SEALED too: a flush that covered the slot has failed after its header was written.
- DISPROVE comes from a load whose bytes do not match the header. A second load in flight may find the same,
  so it is legal in DROPPED. It is illegal in WRITING: no load reads a slot that is being written.
- DROP means that the payload is no longer needed and the slot will be reused. A store drops it first.
- RECOVER exists only in EMPTY, the first state in each process. Recovery runs before the first store, and has
  found the slot sealed in the files of all ranks. All other slots stay EMPTY and are not read.

It is not one of `MACHINES`: those fold a log, and the head of a log has the digest of their tables. No event
of a log moves this machine, so a change here must not make the snapshots of a log useless.
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
