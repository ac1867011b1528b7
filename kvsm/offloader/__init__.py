"""The deciding core: it reads the ledger, decides, and emits events. It never writes state.

An engine talks to it in the field's words. Per request: `match` (which prefix the host serves, pinned),
`prepare_load` (into these device blocks), `prepare_store` (of these computed blocks), `preempt`,
`finish`. Per step: `submit` the jobs, hand them to the workers, feed the workers' reports to `report`,
`tick`, `end_step`. At any time: `lookup`, `touch`, `flush`, `lose`, `reset`.

Every call is legal in every state of every request (S8): a call that has nothing to do answers so, and
emits no event. What a limit refuses raises `LimitReached`, what the engine got wrong (an id that does
not exist) raises `IllegalTransition` or `InvalidEvent`; nothing has changed then. A call for a request
that is over begins a new life under its name.

A file for what a reader looks for: `core` (how an event comes to be), `matching`, `storing`, `transfers`
(loads, reports, losses), `offloader` (requests, time, reset: the whole).
"""

from kvsm.offloader.core import EventSink
from kvsm.offloader.matching import LookupResult, Match
from kvsm.offloader.offloader import Offloader
from kvsm.offloader.storing import PreparedStore
from kvsm.offloader.transfers import Ended

__all__ = ["Ended", "EventSink", "LookupResult", "Match", "Offloader", "PreparedStore"]
