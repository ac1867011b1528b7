"""A second count of the metrics that follow from whole transfers, waits and admissions.

Each oracle counts things of a `PastLog`. Of a histogram it gives all values; `agrees` counts how many of them
are in each bucket.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from math import inf, isclose
from typing import Any

from kvsm import events as ev
from kvsm.check.worlds.past_blocks import answers_of
from kvsm.check.worlds.past_log import PastLog
from kvsm.check.worlds.past_transfers import COMPLETED, PastTransfer, PastWait
from kvsm.errors import PropertyBroken
from kvsm.explain.metric_places import HistogramValue
from kvsm.explain.metric_table import (
    BY_FINISH,
    BY_PREEMPTION,
    BY_TIMEOUT,
    BY_TRANSFER,
    CUT_OFF,
    ENDS,
    OF_COPIES_OUT,
    OF_LOADS,
    OF_STORES,
)
from kvsm.explain.metrics import Metrics
from kvsm.ids import to_list
from kvsm.properties import Property

_WAYS = (OF_STORES, OF_LOADS, OF_COPIES_OUT)


def agrees(counted: Any, value: Any) -> bool:
    """Whether a metric has the counted value. For a histogram, `counted` lists all values."""
    if isinstance(value, HistogramValue):
        tops = [*value.bounds, inf]
        lows = [-inf, *value.bounds]
        counts = [sum(low < one <= top for one in counted) for low, top in zip(lows, tops)]
        return counts == [*value.counts] and isclose(sum(counted), value.sum, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(value, dict) and isinstance(counted, dict):
        return counted.keys() == value.keys() and all(agrees(counted[one], value[one]) for one in value)
    return bool(counted == value)


def _way(transfer: PastTransfer) -> str:
    if transfer.is_store:
        return OF_STORES
    return OF_COPIES_OUT if getattr(transfer.plan, "target", "") else OF_LOADS


def _by_way(past: PastLog, figure: Callable[[PastTransfer], Any]) -> dict[str, list[Any]]:
    """Direction -> the figure of each completed transfer."""
    done = [transfer for transfer in past.transfers.values() if transfer.outcome == COMPLETED]
    return {way: [figure(transfer) for transfer in done if _way(transfer) == way] for way in _WAYS}


def _ends(transfers: Collection[PastTransfer]) -> dict[str, int]:
    ends = Counter(transfer.outcome for transfer in transfers)
    return {end: ends[end] for end in ENDS}


def _transfers_ended(past: PastLog) -> dict[str, dict[str, int]]:
    transfers = past.transfers.values()
    return {way: _ends([transfer for transfer in transfers if _way(transfer) == way]) for way in _WAYS}


def _imports_ended(past: PastLog) -> dict[str, int]:
    return _ends([one for one in past.transfers.values() if getattr(one.plan, "source", "")])


def _transfers_abandoned(past: PastLog) -> dict[str, int]:
    abandoned = [transfer for transfer in past.transfers.values() if transfer.abandoned is not None]
    return {way: sum(_way(transfer) == way for transfer in abandoned) for way in _WAYS}


def _transfer_bytes(past: PastLog) -> dict[str, list[int]]:
    config = past.config

    def copied(transfer: PastTransfer) -> int:
        chunks = len(transfer.slots) * config.blocks_per_chunk
        blocks = chunks if transfer.is_store else len(to_list(transfer.plan.device_blocks))
        return blocks * config.block_bytes * config.workers

    return _by_way(past, copied)


def _seconds(transfer: PastTransfer) -> float:
    assert transfer.submitted is not None
    assert transfer.ended is not None
    return max(0, transfer.ended.wall_ns - transfer.submitted.wall_ns) / 1e9


def _steps(transfer: PastTransfer) -> int:
    assert transfer.submitted is not None
    assert transfer.ended is not None
    return transfer.ended.step - transfer.submitted.step


def _allocation_blocks(past: PastLog) -> list[int]:
    stores = [event for event in past.log if isinstance(event, ev.StorePlanned) and not event.source]
    return [len(event.keys) for event in stores]


_HOW = {
    ev.Ticked: BY_TIMEOUT,
    ev.RequestFinished: BY_FINISH,
    ev.RequestPreempted: BY_PREEMPTION,
    ev.Restarted: CUT_OFF,
}
"""The event that ended a wait -> how the wait ended. All other events end the transfer."""


def _deferrals_ended(past: PastLog) -> dict[str, int]:
    how = Counter(_HOW.get(type(wait.ended), BY_TRANSFER) for wait in past.waits if wait.ended is not None)
    return {end: how[end] for end in (BY_TRANSFER, BY_TIMEOUT, BY_FINISH, BY_PREEMPTION, CUT_OFF)}


def _own_ends(past: PastLog) -> list[PastWait]:
    """The waits that ended before their process."""
    over = [wait for wait in past.waits if wait.ended is not None]
    return [wait for wait in over if not isinstance(wait.ended, ev.Restarted)]


def _deferral_ticks(past: PastLog) -> list[int]:
    ticks = [event.seq for event in past.log if isinstance(event, ev.Ticked)]
    waits = [(wait.began.seq, wait.ended.seq) for wait in _own_ends(past) if wait.ended is not None]
    return [bisect(ticks, until) - bisect(ticks, since) for since, until in waits]


def _deferral_seconds(past: PastLog) -> list[float]:
    waits = [(wait.began.wall_ns, wait.ended.wall_ns) for wait in _own_ends(past) if wait.ended is not None]
    return [max(0, until - since) / 1e9 for since, until in waits]


def _blocks_matched(past: PastLog) -> int:
    answers = [answer for request in past.requests for answer in answers_of(request)]
    return sum(one.slots for one in answers if one.admitted is not None and not one.admitted.resumed)


PAST_ORACLES: Mapping[str, Callable[[PastLog], Any]] = {
    "blocks_matched": _blocks_matched,
    "transfers_ended": _transfers_ended,
    "imports_ended": _imports_ended,
    "transfers_abandoned": _transfers_abandoned,
    "transfer_blocks": lambda past: _by_way(past, lambda transfer: len(transfer.slots)),
    "transfer_bytes": _transfer_bytes,
    "transfer_seconds": lambda past: _by_way(past, _seconds),
    "transfer_steps": lambda past: _by_way(past, _steps),
    "allocation_blocks": _allocation_blocks,
    "deferrals_ended": _deferrals_ended,
    "deferral_ticks": _deferral_ticks,
    "deferral_seconds": _deferral_seconds,
}


def check_past_metrics(metrics: Metrics, past: PastLog) -> None:
    """Compare the metrics of a whole log with the second count. Raises `PropertyBroken`."""
    values = metrics.values()
    for name, oracle in PAST_ORACLES.items():
        if not agrees(counted := oracle(past), values[name]):
            message = f"the metric {name} says {values[name]}, but a second count gives {counted}"
            raise PropertyBroken(Property.EVENTS_ARE_STATE, message)
