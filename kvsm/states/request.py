"""The request: only its states that matter for offload.

`loads` is 1 while its load is in flight; it has at most one. A finished request is RELEASED, and forgotten,
only when its load has ended. So finish and abort are legal at any time (every call is legal, S8), and the
end of a load always finds its request. A store needs no request: its blocks were fixed when it was planned,
and leases hold them.

RUNNING means that the last lookup found nothing to load or to wait for. The engine may look it up again,
since it does so until it can schedule the request. MATCHED holds pins. DEFERRED waits for the transfer of the
block that the request needs next; the end of the transfer, good or bad, or a bound in ticks wakes it. LOADING
waits for its load. END_LOAD can come in any state that the request has by then: finished, preempted,
deferred.

RESTART begins the next process, which has no requests. A request that is sent again begins a new life.
"""

from __future__ import annotations

from enum import IntEnum

from kvsm.states.machine import VOID, Counter, Machine, Row
from kvsm.states.words import Codec


class RequestState(IntEnum):
    """Where a request is. The first is the initial state."""

    NEW = 0
    RUNNING = 1
    MATCHED = 2
    DEFERRED = 3
    LOADING = 4
    PREEMPTED = 5
    FINISHED = 6
    RELEASED = 7


class RequestTrigger(IntEnum):
    """What can happen to a request."""

    MISS = 0
    HIT = 1
    UNMATCH = 2
    DEFER = 3
    WAKE = 4
    BEGIN_LOAD = 5
    END_LOAD = 6
    PREEMPT = 7
    FINISH = 8
    RESTART = 9


# Also names of this module: `request.HIT` takes 2 ns to look up, `RequestTrigger.HIT` 50.
NEW, RUNNING, MATCHED, DEFERRED, LOADING, PREEMPTED, FINISHED, RELEASED = RequestState
MISS, HIT, UNMATCH, DEFER, WAKE, BEGIN_LOAD, END_LOAD, PREEMPT, FINISH, RESTART = RequestTrigger
_NONE, _ONE = {"loads": (0, 0)}, {"loads": (1, 1)}
_MAY_ASK = (NEW, RUNNING, PREEMPTED)
_ALIVE = (NEW, RUNNING, MATCHED, DEFERRED, LOADING, PREEMPTED)
_AFTER_PREEMPTION = (NEW, RUNNING, DEFERRED, PREEMPTED)

REQUEST = Machine(
    "request",
    RequestState,
    RequestTrigger,
    (Counter("loads", bits=1),),
    (
        Row(_MAY_ASK, MISS, RUNNING, "nothing on the host for it"),
        Row(_MAY_ASK, HIT, MATCHED, "blocks are pinned for it", _NONE),
        Row(_MAY_ASK, DEFER, DEFERRED, "what it needs is in flight"),
        Row((MATCHED,), UNMATCH, NEW, "asked again, or it could not be placed"),
        Row((DEFERRED,), WAKE, NEW, "that transfer ended, or the bound was reached"),
        Row((MATCHED,), BEGIN_LOAD, LOADING, "its pins become readers", _NONE, {"loads": 1}),
        Row((LOADING,), END_LOAD, RUNNING, "loaded, or told what to recompute", _ONE, {"loads": -1}),
        Row(_AFTER_PREEMPTION, END_LOAD, None, "it was preempted meanwhile", _ONE, {"loads": -1}),
        Row((NEW, PREEMPTED), PREEMPT, None, "it does not run"),
        Row((RUNNING, MATCHED, DEFERRED, LOADING), PREEMPT, PREEMPTED, "its blocks are taken"),
        Row(_ALIVE, FINISH, FINISHED, "its load is in flight", _ONE),
        Row(_ALIVE, FINISH, RELEASED, "nothing of it is left", _NONE),
        Row((FINISHED,), END_LOAD, RELEASED, "its load ended", _ONE, {"loads": -1}),
        Row((*_ALIVE, FINISHED), RESTART, RELEASED, "its engine is gone", then={"loads": VOID}),
    ),
)
REQUEST_WORDS = Codec(REQUEST)
