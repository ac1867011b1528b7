"""A second count of what `kvsm whatif` reads from a log, and the limits of what it predicts for it.

The log's own result and its copies must be exactly those of the log. A simulation of the log's own
configuration is a prediction: it must serve the same lookups, and at most the blocks that the device lacks.
"""

from __future__ import annotations

from statistics import median

from kvsm.check.worlds.past_blocks import answers_of
from kvsm.check.worlds.past_log import PastLog
from kvsm.check.worlds.past_transfers import COMPLETED, DRAINED, FAILED, LOST
from kvsm.core.ledger import Ledger
from kvsm.core.log import LogEnd
from kvsm.core.log.fold import LogCondition
from kvsm.errors import LogError, PropertyBroken
from kvsm.events import RequestAdmitted
from kvsm.explain.whatif.demand import Demand, DemandReader
from kvsm.explain.whatif.simulate import Scenario, counted_lookups, recorded, simulate
from kvsm.properties import Property

_WHOLE = LogCondition(None, None, (), False, LogEnd.CLOSED, None, None)


def demand_of(past: PastLog) -> Demand | None:
    """Return the demand of a log; None: `whatif` is not validated for the engine that wrote it."""
    reader, ledger = DemandReader("the log"), Ledger(past.config)
    try:
        for event, following in zip(past.log, [*past.log[1:], None]):
            reader.take(ledger, event, following)
        return reader.result(_WHOLE)
    except LogError:
        return None


def check_whatif(past: PastLog) -> None:
    """Compare what `kvsm whatif` says of a log with a second count. Raises `PropertyBroken`."""
    demand = demand_of(past)
    if demand is None:
        return
    lookups = counted_lookups(demand)
    logged, own = recorded(lookups), simulate(demand, Scenario.of(past.config), lookups)
    said = {
        "asked": (logged.lookups, logged.asked, logged.on_device, logged.on_host),
        "copies": (demand.copies, demand.failed_copies, demand.store_steps, demand.load_steps),
        "the same asked": (own.lookups, own.asked, own.on_device, own.on_host <= own.asked - own.on_device),
    }
    asked = _asked(past)
    counted = {"asked": asked, "copies": _copies(past), "the same asked": (*asked[:3], True)}
    for name, value in said.items():
        if value != counted[name]:
            message = f"whatif says {value} for {name}, but a second count gives {counted[name]}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)


def _asked(past: PastLog) -> tuple[int, int, int, int]:
    """Of all first admissions: how many there are, and their sums of (asked, on the device, on the host)."""
    answers = [one for request in past.requests if not request.target for one in answers_of(request)]
    events = [one.admitted for one in answers if one.admitted is not None and not one.admitted.resumed]
    counts = [_counts(event) for event in events]
    known = [count for count in counts if count is not None]
    asked, on_device, on_host = (sum(count[place] for count in known) for place in range(3))
    return len(known), asked, on_device, on_host


def _counts(event: RequestAdmitted) -> tuple[int, int, int] | None:
    if event.asked is None or event.on_device is None or event.on_host is None:
        return None
    return event.asked, event.on_device, event.on_host


def _copies(past: PastLog) -> tuple[int, int, int, int]:
    """Copies that ended, those that failed, and the steps that a good (store, load) usually takes."""
    transfers = past.transfers.values()
    ended = [one for one in transfers if one.outcome in (COMPLETED, FAILED, DRAINED, LOST)]
    steps: dict[bool, list[int]] = {True: [], False: []}
    for one in ended:
        if one.outcome == COMPLETED and one.ended is not None:
            steps[one.is_store].append(one.ended.step - one.plan.step)
    stores, loads = (max(1, round(median(some))) if some else 1 for some in (steps[True], steps[False]))
    return len(ended), sum(one.outcome in (FAILED, LOST) for one in ended), stores, loads
