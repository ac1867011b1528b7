"""Why the small scopes of `kvsm check serving` leave some edges of the machine tables out.

`kvsm check serving --scope every-small` prints the reason of each. A slow test checks that
each edge is either taken by these scopes or named here, never both.
"""

from __future__ import annotations

from collections.abc import Mapping

_THREE_LOADS = "three requests must load one block at once; no small scope has room for that"
_IN_ONE_STEP = "in the small engine a plan leaves in the step that made it, so nothing comes between"
_WITHOUT_BLOCKS = "only a running request has blocks that can be taken"
_NO_LOAD = "the tables allow no load in flight in this state"
_TOUCHED = "the core plans no store from a device block that a copy touches"
_THREE_THINGS = "it needs a preemption, a step that admits no request, and a crash: no scope has three"

UNTAKEN: Mapping[str, str] = {
    "block QUARANTINED --END_COPY_GOOD--> QUARANTINED": _THREE_LOADS,
    "block QUARANTINED --INVALIDATE--> QUARANTINED": _THREE_LOADS,
    "block EVICTED --INVALIDATE--> EVICTED": "two loads of one block must both fail; scopes have one failure",
    "block FREE --INVALIDATE--> FREE": "what a reset or a failed load voids was planned or stored",
    "block ALLOCATED --INVALIDATE--> EVICTED": _IN_ONE_STEP,
    "block ALLOCATED --RESTART--> EVICTED": _IN_ONE_STEP,
    "transfer ABANDONED --ABANDON--> ABANDONED": "a reset abandons each transfer once",
    "lease READING --BEGIN_READ--> READING": _TOUCHED,
    "lease READING --END_READ--> READING": _TOUCHED,
    "request RUNNING --MISS--> RUNNING": "the core tells a second miss in a row to nobody",
    "request RUNNING --END_LOAD--> RUNNING": "no request runs while its load is in flight",
    "request RUNNING --FINISH--> FINISHED": "no request runs while its load is in flight",
    "request MATCHED --PREEMPT--> PREEMPTED": _WITHOUT_BLOCKS,
    "request DEFERRED --PREEMPT--> PREEMPTED": _WITHOUT_BLOCKS,
    "request PREEMPTED --PREEMPT--> PREEMPTED": _WITHOUT_BLOCKS,
    "request MATCHED --FINISH--> FINISHED": _NO_LOAD,
    "request LOADING --FINISH--> RELEASED": "a request that is LOADING has a load",
    "request PREEMPTED --RESTART--> RELEASED": _THREE_THINGS,
}
"""Edge -> why no small scope takes it. The names are `TableEdge.name`."""
