"""The transfer: one asynchronous copy of several blocks in one direction. Its id is never reused.

`pending` counts the workers that have yet to report, `failed` the workers that reported a failure. A transfer
ends once, with its last worker's report. It is good only if every worker was: publish after commit (S2).
The ledger records which workers have reported, so a second report of a worker never reaches this machine.

A reset makes transfers in flight ABANDONED: the copies continue, and their memory stays quarantined. Such a
transfer is DRAINED when all workers have reported. The abort of a request abandons no transfer: other
requests may want its stores.

When another process continues a log, planned transfers are CANCELLED and those in flight are LOST: their
workers are dead.
"""

from __future__ import annotations

from enum import IntEnum

from kvsm.states.machine import Counter, Machine, Row
from kvsm.states.words import Codec


class TransferState(IntEnum):
    """How far a transfer is. The first is the initial state."""

    PLANNED = 0
    SUBMITTED = 1
    COMPLETED = 2
    FAILED = 3
    CANCELLED = 4
    ABANDONED = 5
    DRAINED = 6
    LOST = 7


class TransferTrigger(IntEnum):
    """What can happen to a transfer."""

    SUBMIT = 0
    CANCEL = 1
    REPORT_GOOD = 2
    REPORT_BAD = 3
    ABANDON = 4
    LOSE = 5


# Also names of this module: `transfer.SUBMIT` takes 2 ns to look up, `TransferTrigger.SUBMIT` 50.
PLANNED, SUBMITTED, COMPLETED, FAILED, CANCELLED, ABANDONED, DRAINED, LOST = TransferState
SUBMIT, CANCEL, REPORT_GOOD, REPORT_BAD, ABANDON, LOSE = TransferTrigger
_MANY = (1 << 10) - 1
_NOT_LAST, _LAST = {"pending": (2, _MANY)}, {"pending": (1, 1)}
_ALL_GOOD = {"pending": (1, 1), "failed": (0, 0)}
_SOME_BAD = {"pending": (1, 1), "failed": (1, _MANY)}
_REPORTED, _FAILURE = {"pending": -1}, {"pending": -1, "failed": 1}

TRANSFER = Machine(
    "transfer",
    TransferState,
    TransferTrigger,
    (Counter("pending", bits=10), Counter("failed", bits=10)),
    (
        Row((PLANNED,), SUBMIT, SUBMITTED, "the plan left for the workers"),
        Row((PLANNED,), CANCEL, CANCELLED, "the plan never left the scheduler"),
        Row((SUBMITTED,), REPORT_GOOD, SUBMITTED, "others to come", _NOT_LAST, _REPORTED),
        Row((SUBMITTED,), REPORT_BAD, SUBMITTED, "others to come", _NOT_LAST, _FAILURE),
        Row((SUBMITTED,), REPORT_GOOD, COMPLETED, "the last, and none failed", _ALL_GOOD, _REPORTED),
        Row((SUBMITTED,), REPORT_GOOD, FAILED, "the last, but one failed before", _SOME_BAD, _REPORTED),
        Row((SUBMITTED,), REPORT_BAD, FAILED, "the last, and it failed", _LAST, _FAILURE),
        Row((SUBMITTED,), ABANDON, ABANDONED, "a reset"),
        *(
            Row((ABANDONED,), report, target, why, pending, _REPORTED)
            for report in (REPORT_GOOD, REPORT_BAD)
            for target, why, pending in (
                (ABANDONED, "others to come", _NOT_LAST),
                (DRAINED, "the last worker let go", _LAST),
            )
        ),
        Row((ABANDONED,), ABANDON, None, "a second reset"),
        Row((SUBMITTED, ABANDONED), LOSE, LOST, "a worker will never report"),
    ),
)
TRANSFER_WORDS = Codec(TRANSFER)

LIVE = frozenset({PLANNED, SUBMITTED, ABANDONED})
"""States of a transfer that still holds memory."""
