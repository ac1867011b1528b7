"""The transfers and waits of a log, found again from its events alone.

The events that name a transfer are collected, and read in order with plain if and else; the ledger and its
tables are not used. Oracles of metrics and tables count these transfers.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvsm import events as ev
from kvsm.events import OffloadingEvent
from kvsm.ids import to_list

Log = Sequence[OffloadingEvent]

COMPLETED, FAILED, CANCELLED, DRAINED, LOST, CUT_OFF = (
    "completed",
    "failed",
    "cancelled",
    "drained",
    "lost",
    "cut off",
)
"""How a transfer ends."""


class PastTransfer(msgspec.Struct):
    """A transfer of a log.

    plan: the event that planned it. slots: its host slots.
    submitted: the event with which it left for the workers.
    abandoned: the first reset while it was in flight.
    reports: the ranks' reports that counted. flushes: number of flushes that named it.
    ended, outcome: the event that ended it, and how.
    """

    plan: ev.StorePlanned | ev.LoadPlanned
    slots: Sequence[int]
    submitted: OffloadingEvent | None = None
    abandoned: OffloadingEvent | None = None
    reports: dict[int, ev.WorkerReported] = {}
    flushes: int = 0
    ended: OffloadingEvent | None = None
    outcome: str | None = None

    @property
    def is_store(self) -> bool:
        """Whether it copies to the host."""
        return isinstance(self.plan, ev.StorePlanned)

    @property
    def direction(self) -> str:
        """`store` or `load`."""
        return "store" if self.is_store else "load"

    @property
    def requests(self) -> list[str]:
        """The requests that own it, each once."""
        if isinstance(self.plan, ev.LoadPlanned):
            return [self.plan.request]
        return [*dict.fromkeys(name for name, _ in self.plan.owners)]

    def read(self, event: Any, workers: int) -> None:
        """Read an event that names this transfer, or that concerns all transfers."""
        if isinstance(event, ev.TransfersSubmitted):
            self.submitted = event
        elif isinstance(event, ev.FlushRequested):
            self.flushes += 1
        elif isinstance(event, ev.WorkerReported):
            self.reports[event.worker] = event
            if len(self.reports) == workers:
                all_good = all(report.good for report in self.reports.values())
                self._end(event, DRAINED if self.abandoned else COMPLETED if all_good else FAILED)
        elif isinstance(event, ev.TransferCancelled):
            self._end(event, CANCELLED)
        elif isinstance(event, ev.TransferLost):
            self._end(event, LOST)
        elif isinstance(event, ev.Restarted):
            self._end(event, CUT_OFF)
        elif self.submitted is None:
            self._end(event, CANCELLED)  # by a reset
        else:
            self.abandoned = self.abandoned or event

    def _end(self, event: OffloadingEvent, outcome: str) -> None:
        self.ended, self.outcome = event, outcome


def past_transfers(log: Log, workers: int) -> dict[int, PastTransfer]:
    """Return the transfers of a log by number. workers: the ranks that report each of them."""
    named, of_all = defaultdict[int, list[OffloadingEvent]](list), list[OffloadingEvent]()
    for event in log:
        if isinstance(event, (ev.TransfersSubmitted, ev.FlushRequested)):
            for number in event.transfers:
                named[number].append(event)
        elif isinstance(event, (ev.WorkerReported, ev.TransferCancelled, ev.TransferLost)):
            named[event.transfer].append(event)
        elif isinstance(event, (ev.CacheReset, ev.Restarted)):
            of_all.append(event)
    numbers, found = [event.seq for event in of_all], dict[int, PastTransfer]()
    for event in log:
        if isinstance(event, ev.StorePlanned) or (isinstance(event, ev.LoadPlanned) and not event.voided):
            transfer = found[event.seq] = PastTransfer(event, to_list(event.slots), reports={})
            own, later = named[event.seq], of_all[bisect(numbers, event.seq) :]
            for mention in sorted([*own, *later], key=_number) if later else own:
                if transfer.ended is None:
                    transfer.read(mention, workers)
    return found


def _number(event: OffloadingEvent) -> int:
    return event.seq


def _tick(event: ev.Ticked) -> int:
    return event.tick


class PastWait(NamedTuple):
    """The wait of a request for a transfer. ended: the event that ended it; None: it lasts."""

    began: ev.RequestDeferred
    ended: OffloadingEvent | None


def past_waits(log: Log, transfers: Mapping[int, PastTransfer]) -> list[PastWait]:
    """Return all waits of a log: each ends with the first event that can end it."""
    ticks = [event for event in log if isinstance(event, ev.Ticked)]
    restarts = [event for event in log if isinstance(event, ev.Restarted)]
    leaves = defaultdict[str, list[OffloadingEvent]](list)
    for event in log:
        if isinstance(event, (ev.RequestPreempted, ev.RequestFinished)):
            leaves[event.request].append(event)
    found = []
    for wait in log:
        if isinstance(wait, ev.RequestDeferred):
            over = max(bisect(ticks, wait.seq, key=_number), bisect_left(ticks, wait.until, key=_tick))
            ends = [
                transfers[wait.transfer].ended,
                *ticks[over : over + 1],
                *(_first_after(wait, some) for some in (leaves[wait.request], restarts)),
            ]
            found.append(PastWait(wait, min(filter(None, ends), key=_number, default=None)))
    return found


def _first_after(event: OffloadingEvent, others: Log) -> OffloadingEvent | None:
    return next((other for other in others if other.seq > event.seq), None)
