"""Count the cases in which a check of `OffloadMachine` could have failed."""

from __future__ import annotations

from collections.abc import Iterable

from kvsm.check.worlds.check_counts import count_case
from kvsm.core.ledger import Ledger
from kvsm.events import (
    BlocksEvicted,
    CacheReset,
    HitMatched,
    LoadPlanned,
    OffloadingEvent,
    ReportRejected,
    StorePlanned,
    WorkerReported,
)
from kvsm.properties import Property


def count_ledger(ledger: Ledger) -> None:
    """Count the cases of a check of this ledger."""
    count_case(Property.CONSERVATION, "states of the ledger")
    count_case(Property.EVENTS_ARE_STATE, "states compared with a restored copy")
    if ledger.transfers:
        count_case(Property.NO_REUSE_IN_FLIGHT, "states of the ledger with a copy in flight")
        count_case(Property.ONE_RELEASE_PER_HOLD, "states of the ledger with holds")


def count_log(events: Iterable[OffloadingEvent]) -> None:
    """Count the cases of a run with these events, which has ended with nothing in flight."""
    count_case(Property.PROGRESS, "engines that came to rest")
    for event in events:
        for tried, case in _CASES.get(type(event), ()):
            count_case(tried, case)
        if isinstance(event, WorkerReported) and not event.good:
            count_case(Property.FAILURE_IS_NOT_SUCCESS, "reports of failed copies")


_CASES = {
    HitMatched: (
        (Property.MATCH_HOLDS, "matches"),
        (Property.ONE_TOKEN_LEFT, "matches"),
    ),
    LoadPlanned: ((Property.CORRECT_BYTES, "loads"),),
    StorePlanned: ((Property.STORED_ONCE, "stores"),),
    BlocksEvicted: ((Property.CORRECT_BYTES, "evictions"),),
    CacheReset: ((Property.NO_STALE_DATA, "resets"),),
    ReportRejected: ((Property.STALE_REPORTS, "reports that must change nothing"),),
}
"""Kind of event -> the properties that are checked at it, each with the name of its case."""
