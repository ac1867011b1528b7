"""The transfer: one asynchronous copy of several blocks, one direction, one id, never reused.

`pending` counts the workers that have yet to report, `failed` those that reported a failure. A transfer
ends with its last worker's report, once, and is good only when every worker was (S2, S6). Which worker
has reported is the ledger's to know: a second report of one worker never reaches this machine (S5).

A reset ABANDONS what is under way: the copies go on, their memory stays quarantined, and the transfer is
DRAINED when all have reported. An aborted request abandons nothing: others may want its stores.
"""

from __future__ import annotations

from enum import IntEnum

from kvsm.states.machine import Counter, Machine, Row
from kvsm.states.words import Codec


class TransferState(IntEnum):
    PLANNED = 0
    SUBMITTED = 1
    COMPLETED = 2
    FAILED = 3
    CANCELLED = 4
    ABANDONED = 5
    DRAINED = 6
    LOST = 7


class TransferTrigger(IntEnum):
    SUBMIT = 0
    CANCEL = 1
    REPORT_GOOD = 2
    REPORT_BAD = 3
    ABANDON = 4
    LOSE = 5


_S, _T = TransferState, TransferTrigger
_MANY = (1 << 10) - 1

TRANSFER = Machine(
    "transfer",
    TransferState,
    TransferTrigger,
    (Counter("pending", bits=10), Counter("failed", bits=10)),
    (
        Row((_S.PLANNED,), _T.SUBMIT, _S.SUBMITTED, "the plan left for the workers"),
        Row((_S.PLANNED,), _T.CANCEL, _S.CANCELLED, "the plan never left the scheduler"),
        Row(
            (_S.SUBMITTED,),
            _T.REPORT_GOOD,
            _S.SUBMITTED,
            "others to come",
            {"pending": (2, _MANY)},
            {"pending": -1},
        ),
        Row(
            (_S.SUBMITTED,),
            _T.REPORT_BAD,
            _S.SUBMITTED,
            "others to come",
            {"pending": (2, _MANY)},
            {"pending": -1, "failed": 1},
        ),
        Row(
            (_S.SUBMITTED,),
            _T.REPORT_GOOD,
            _S.COMPLETED,
            "the last, and none failed",
            {"pending": (1, 1), "failed": (0, 0)},
            {"pending": -1},
        ),
        Row(
            (_S.SUBMITTED,),
            _T.REPORT_GOOD,
            _S.FAILED,
            "the last, but one failed before",
            {"pending": (1, 1), "failed": (1, _MANY)},
            {"pending": -1},
        ),
        Row(
            (_S.SUBMITTED,),
            _T.REPORT_BAD,
            _S.FAILED,
            "the last, and it failed",
            {"pending": (1, 1)},
            {"pending": -1, "failed": 1},
        ),
        Row((_S.SUBMITTED,), _T.ABANDON, _S.ABANDONED, "a reset"),
        *(
            Row((_S.ABANDONED,), report, target, why, {"pending": pending}, {"pending": -1})
            for report in (_T.REPORT_GOOD, _T.REPORT_BAD)
            for target, why, pending in (
                (_S.ABANDONED, "others to come", (2, _MANY)),
                (_S.DRAINED, "the last worker let go", (1, 1)),
            )
        ),
        Row((_S.ABANDONED,), _T.ABANDON, None, "a second reset"),
        Row((_S.SUBMITTED, _S.ABANDONED), _T.LOSE, _S.LOST, "a worker will never report"),
    ),
)
TRANSFER_WORDS = Codec(TRANSFER)

LIVE = frozenset({_S.PLANNED, _S.SUBMITTED, _S.ABANDONED})
"""States of a transfer that still holds memory."""
