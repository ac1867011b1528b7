"""The offload core: it reads the ledger, decides, and emits events. It never writes state.

An engine makes these calls. For each request: `match` (pin the prefix that the host serves), `prepare_load`
(into these device blocks), `prepare_store` (of these computed blocks), `preempt`, `finish`.
In each step: `submit` the jobs, hand them to the workers, give the workers' reports to `report`, then `tick`
and `end_step`. At any time: `lookup`, `touch`, `flush`, `lose`, `reset`.

Every call is legal in every state of every request (S8). A call that has nothing to do emits no event, and
its result says so. A call that would exceed a limit raises `LimitReached`. A mistake of the engine, such as a
device block that does not exist, raises `IllegalTransition` or `InvalidEvent`. In both cases nothing has
changed. A call for a request that is over begins a new request of this name.

`Offloader` in offloader.py lists all calls. They are functions over one `EventEmitter` (emitter.py): hits
(matching.py), loads, reports and losses (transferring.py), stores (storing.py). The most frequent calls also
have a native body (kvsm/core/native/calls.c).
"""

from kvsm.core.offloader.emitter import EventSink, LogFlush
from kvsm.core.offloader.matching import LookupResult, Match, PendingHit
from kvsm.core.offloader.offloader import NativeOffloader, Offloader
from kvsm.core.offloader.storing import PreparedStore
from kvsm.core.offloader.transferring import Ended, ReportResult, expect_misuse

__all__ = [
    "Ended",
    "EventSink",
    "LogFlush",
    "LookupResult",
    "Match",
    "NativeOffloader",
    "Offloader",
    "PendingHit",
    "PreparedStore",
    "ReportResult",
    "expect_misuse",
]
