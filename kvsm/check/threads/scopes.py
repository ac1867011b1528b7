"""The scopes of `kvsm check threads`: scenarios, each with its bounds."""

from __future__ import annotations

from kvsm.check.threads.copy_scenarios import HostClosing, HostCopies, HostDying
from kvsm.check.threads.disk_scenarios import FlushedStores
from kvsm.check.threads.log_scenarios import SyncedLog
from kvsm.check.threads.rotation_scenarios import (
    DeletingLog,
    FailingRotatedLog,
    GoingOnLog,
    ReadOnceLog,
    RotatedLog,
    SlowOpening,
    SyncedOpening,
)
from kvsm.check.threads.scenario import ThreadScope
from kvsm.check.threads.submit_scenarios import ClosedTwice, SubmittedCopies
from kvsm.check.threads.verify_scenarios import KeptLoads

SCOPES: dict[str, ThreadScope] = {
    "small": ThreadScope(scenario=HostCopies, preemptions=1),
    "copies": ThreadScope(scenario=HostCopies),
    "copies-lines": ThreadScope(scenario=HostCopies, preemptions=1, lines=True),
    "store-lines": ThreadScope(
        scenario=HostCopies, preemptions=1, lines=True, sizes={"loads": 0}, required=False
    ),
    "closing": ThreadScope(scenario=HostClosing),
    "closing-lines": ThreadScope(scenario=HostClosing, preemptions=1, lines=True),
    "dying": ThreadScope(scenario=HostDying),
    "dying-lines": ThreadScope(scenario=HostDying, preemptions=1, lines=True),
    "verifying": ThreadScope(scenario=KeptLoads),
    "verifying-lines": ThreadScope(scenario=KeptLoads, preemptions=1, lines=True),
    "log": ThreadScope(scenario=SyncedLog),
    "log-goes-on": ThreadScope(scenario=SyncedLog, sizes={"goes_on": 1}),
    "log-lines": ThreadScope(scenario=SyncedLog, preemptions=1, lines=True, required=False),
    "rotated": ThreadScope(scenario=RotatedLog),
    "rotated-fails": ThreadScope(scenario=FailingRotatedLog, preemptions=1),
    "rotated-goes-on": ThreadScope(scenario=GoingOnLog, preemptions=1),
    "rotated-deletes": ThreadScope(scenario=DeletingLog, preemptions=1),
    "read-once": ThreadScope(scenario=ReadOnceLog),
    "read-once-lines": ThreadScope(scenario=ReadOnceLog, preemptions=1, lines=True),
    "opened": ThreadScope(scenario=SlowOpening),
    "opened-synced": ThreadScope(scenario=SyncedOpening, preemptions=1),
    "opened-lines": ThreadScope(scenario=SlowOpening, preemptions=1, lines=True),
    "disk": ThreadScope(scenario=FlushedStores),
    "disk-interval": ThreadScope(scenario=FlushedStores, preemptions=1, sizes={"now_and_then": 1}),
    "disk-lines": ThreadScope(scenario=FlushedStores, preemptions=1, lines=True),
    "submitters": ThreadScope(scenario=SubmittedCopies, preemptions=1, delays=True),
    "dead-submitters": ThreadScope(
        scenario=SubmittedCopies, preemptions=1, delays=True, sizes={"deaths": 1, "stores": 2}
    ),
    "closed-twice": ThreadScope(scenario=ClosedTwice, delays=True),
    "submitters-lines": ThreadScope(scenario=SubmittedCopies, preemptions=1, delays=True, lines=True),
    "full": ThreadScope(scenario=HostCopies, preemptions=1, sizes={"pieces": 3, "threads": 3}),
}
"""A `small` one takes a second, the others up to some minutes."""
