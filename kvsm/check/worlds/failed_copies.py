"""Count the cases in which a failed copy could have passed for a good one (failure is not success, S6).

A copy that fails shows nothing if no request could get its blocks afterwards. So only these count: a request
that still waits for a load that failed, and a request that is admitted with a match up to a block whose store
failed.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvsm.check.worlds.check_counts import count_case
from kvsm.events import (
    CacheReset,
    LoadPlanned,
    OffloadingEvent,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    StorePlanned,
    TransferLost,
    WorkerReported,
)
from kvsm.properties import Property


def count_failed_load() -> None:
    """Count a load that failed while its request waited for it."""
    count_case(Property.FAILURE_IS_NOT_SUCCESS, "failed loads that a request waited for")


def count_failed_copies(events: Iterable[OffloadingEvent]) -> None:
    """Count the cases in the log of a run."""
    stores: dict[int, tuple[bytes, ...]] = {}
    loads: dict[int, str] = {}
    """Load -> the request that waits for it."""
    failed: set[bytes] = set()
    """The keys whose last store failed."""
    for event in events:
        match event:
            case StorePlanned():
                stores[event.seq] = event.keys
                failed.difference_update(event.keys)
            case LoadPlanned() if not event.voided and not event.target:
                loads[event.seq] = event.request
            case RequestFinished() | RequestPreempted():
                loads = {load: request for load, request in loads.items() if request != event.request}
            case WorkerReported(good=False) | TransferLost():
                failed.update(stores.pop(event.transfer, ()))
                if loads.pop(event.transfer, None) is not None:
                    count_failed_load()
            case CacheReset():
                stores.clear()
                loads.clear()
                failed.clear()
            case RequestAdmitted() if event.missed in failed:
                count_case(
                    Property.FAILURE_IS_NOT_SUCCESS,
                    "requests whose match ended at a block whose store failed",
                )
