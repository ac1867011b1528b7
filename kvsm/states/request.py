"""The request, as far as offload concerns it.

`loads` says whether a load of it is in flight, of which it has one at most: a finished request is RELEASED,
and forgotten, only when that has ended. So finish and abort are legal at any time, and a completion
always finds the request it belongs to (S4, S8). A store needs no request: what it copies was fixed when it
was planned, and leases hold it.

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
    PREEMPT = 7
    FINISH = 8


_S, _T = RequestState, RequestTrigger
_NONE, _ONE = {"loads": (0, 0)}, {"loads": (1, 1)}
_MAY_ASK = (_S.NEW, _S.RUNNING, _S.PREEMPTED)
_ALIVE = (_S.NEW, _S.RUNNING, _S.MATCHED, _S.DEFERRED, _S.LOADING, _S.PREEMPTED)
_AFTER_PREEMPTION = (_S.NEW, _S.RUNNING, _S.DEFERRED, _S.PREEMPTED)

REQUEST = Machine(
    "request",
    RequestState,
    RequestTrigger,
    (Counter("loads", bits=1),),
    (
        Row(_MAY_ASK, _T.MISS, _S.RUNNING, "nothing on the host for it"),
        Row(_MAY_ASK, _T.HIT, _S.MATCHED, "blocks are pinned for it", _NONE),
        Row(_MAY_ASK, _T.DEFER, _S.DEFERRED, "what it needs is in flight"),
        Row((_S.MATCHED,), _T.UNMATCH, _S.NEW, "asked again, or it could not be placed"),
        Row((_S.DEFERRED,), _T.WAKE, _S.NEW, "that transfer ended, or the bound was reached"),
        Row((_S.MATCHED,), _T.BEGIN_LOAD, _S.LOADING, "its pins become readers", _NONE, {"loads": 1}),
        Row((_S.LOADING,), _T.END_LOAD, _S.RUNNING, "loaded, or told what to recompute", _ONE, {"loads": -1}),
        Row(_AFTER_PREEMPTION, _T.END_LOAD, None, "it was preempted meanwhile", _ONE, {"loads": -1}),
        Row((_S.NEW, _S.PREEMPTED), _T.PREEMPT, None, "it does not run"),
        Row(
            (_S.RUNNING, _S.MATCHED, _S.DEFERRED, _S.LOADING),
            _T.PREEMPT,
            _S.PREEMPTED,
            "its blocks are taken",
        ),
        Row(_ALIVE, _T.FINISH, _S.FINISHED, "its load is in flight", _ONE),
        Row(_ALIVE, _T.FINISH, _S.RELEASED, "nothing of it is left", _NONE),
        Row((_S.FINISHED,), _T.END_LOAD, _S.RELEASED, "its load ended", _ONE, {"loads": -1}),
    ),
)
REQUEST_WORDS = Codec(REQUEST)
