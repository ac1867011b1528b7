"""The request, as far as offload concerns it.

`transfers` counts its live transfers (stores and loads): a finished request is RELEASED, and forgotten,
only when the last of them has ended. So finish and abort are legal at any time, and a completion always
finds the request it belongs to (S4, S8).

An engine asks for a match until it can place the request, so RUNNING may ask again: it means "told that
there is nothing to wait for". MATCHED holds hit pins. DEFERRED waits for a transfer that is storing the
block it needs next; the transfer's end wakes it, good or bad, and so does a bound in ticks. LOADING waits
for its one load. END_LOAD arrives in whatever state the request is by then: aborted, preempted, waiting.
"""

from __future__ import annotations

from enum import IntEnum

from kvsm.states.machine import Counter, Machine, Row
from kvsm.states.words import Codec


class RequestState(IntEnum):
    NEW = 0
    RUNNING = 1
    MATCHED = 2
    DEFERRED = 3
    LOADING = 4
    PREEMPTED = 5
    FINISHED = 6
    RELEASED = 7


class RequestTrigger(IntEnum):
    MISS = 0
    HIT = 1
    UNMATCH = 2
    DEFER = 3
    WAKE = 4
    BEGIN_LOAD = 5
    END_LOAD = 6
    BEGIN_STORE = 7
    END_STORE = 8
    PREEMPT = 9
    FINISH = 10


_S, _T = RequestState, RequestTrigger
_MANY = (1 << 20) - 1
_ALIVE = (_S.NEW, _S.RUNNING, _S.MATCHED, _S.DEFERRED, _S.LOADING, _S.PREEMPTED)
_NONE, _SOME = {"transfers": (0, 0)}, {"transfers": (1, _MANY)}
_LAST, _NOT_LAST = {"transfers": (1, 1)}, {"transfers": (2, _MANY)}
_LESS = {"transfers": -1}
_MAY_ASK = (_S.NEW, _S.RUNNING, _S.PREEMPTED)
_NOT_LOADING = (_S.NEW, _S.RUNNING, _S.MATCHED, _S.DEFERRED, _S.PREEMPTED)

REQUEST = Machine(
    "request",
    RequestState,
    RequestTrigger,
    (Counter("transfers", bits=20),),
    (
        Row(_MAY_ASK, _T.MISS, _S.RUNNING, "nothing on the host for it"),
        Row(_MAY_ASK, _T.HIT, _S.MATCHED, "blocks are pinned for it"),
        Row(_MAY_ASK, _T.DEFER, _S.DEFERRED, "what it needs is in flight"),
        Row((_S.MATCHED,), _T.UNMATCH, _S.NEW, "asked again, or it could not be placed"),
        Row((_S.DEFERRED,), _T.WAKE, _S.NEW, "that transfer ended, or the bound was reached"),
        Row((_S.MATCHED,), _T.BEGIN_LOAD, _S.LOADING, "its pins become readers", then={"transfers": 1}),
        Row((_S.LOADING,), _T.END_LOAD, _S.RUNNING, "loaded, or told what to recompute", then=_LESS),
        Row(_NOT_LOADING, _T.END_LOAD, None, "it was preempted meanwhile", then=_LESS),
        Row(_ALIVE, _T.BEGIN_STORE, None, "a store is planned for it", then={"transfers": 1}),
        Row(_ALIVE, _T.END_STORE, None, "a store of it ended", then=_LESS),
        Row((_S.NEW, _S.PREEMPTED), _T.PREEMPT, None, "it does not run"),
        Row(
            (_S.RUNNING, _S.MATCHED, _S.DEFERRED, _S.LOADING),
            _T.PREEMPT,
            _S.PREEMPTED,
            "its blocks are taken",
        ),
        Row(_ALIVE, _T.FINISH, _S.FINISHED, "copies of it are in flight", _SOME),
        Row(_ALIVE, _T.FINISH, _S.RELEASED, "nothing of it is left", _NONE),
        Row((_S.FINISHED,), _T.BEGIN_STORE, None, "its last blocks are still wanted", then={"transfers": 1}),
        *(
            Row((_S.FINISHED,), end, target, why, left, _LESS)
            for end in (_T.END_LOAD, _T.END_STORE)
            for target, why, left in (
                (_S.FINISHED, "others to come", _NOT_LAST),
                (_S.RELEASED, "its last copy ended", _LAST),
            )
        ),
    ),
)
REQUEST_WORDS = Codec(REQUEST)
