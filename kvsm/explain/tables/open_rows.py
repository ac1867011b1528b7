"""Requests and transfers whose rows may still change, and how their rows are made.

They are plain data, so an index can store them and resume from them later.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvsm.core.ledger import RequestRecord
from kvsm.events import WorkerReported
from kvsm.explain.tables.row_kinds import CopyRow, LookupRow, RequestRow, RequestStateRow, Row, TransferRow
from kvsm.states.request import RequestState
from kvsm.states.words import STATE_MASK

CUT_OFF = "cut off"
"""The outcome of a transfer that had not ended when its process did."""


class Moved(NamedTuple):
    """The event at which something changed, with its step and wall time (ns). None: not in the log."""

    event: int
    step: int | None = None
    wall_ns: int | None = None


def _columns(at: Moved | None) -> tuple[int | None, int | None, int | None]:
    return (None, None, None) if at is None else (at.event, at.step, at.wall_ns)


class RequestInProgress(msgspec.Struct):
    """A request whose row may still change: it is not over, or a store of its blocks has not ended.

    state, since, awaits: its current state, when it entered it, and the transfer that it waits for, if any.
    answer: the row of its last lookup; None: there is none, or the request was admitted with it.
    stores: number of its stores that have not ended.
    declined: its last declined hit since it was admitted: the last four columns of `LookupRow`; or None.

    The other fields are as in `RequestRow`.
    """

    request: str
    arrived: Moved
    state: int
    since: Moved
    awaits: int | None = None
    finished: Moved | None = None
    aborted: bool = False
    cut_off: bool = False
    lookups: int = 0
    preemptions: int = 0
    asked: int | None = None
    on_device: int | None = None
    on_host: int | None = None
    loads: int = 0
    failed_loads: int = 0
    loaded: int = 0
    stored: int = 0
    deferred_ns: int = 0
    loading_ns: int = 0
    held: int = 0
    hand_over: str | None = None
    session: str | None = None
    answer: LookupRow | None = None
    stores: int = 0
    declined: tuple[int, int, int, int] | None = None

    def row(self, now_ns: int) -> RequestRow:
        """The row as it is now. A current wait counts up to `now_ns`."""
        wait = self.wait_ns(now_ns)
        return RequestRow(
            self.request,
            *self.arrived,
            *_columns(self.finished),
            self.aborted,
            self.cut_off,
            RequestState(self.state).name,
            self.lookups,
            self.preemptions,
            self.asked,
            self.on_device,
            self.on_host,
            self.loads,
            self.failed_loads,
            self.loaded,
            self.stored,
            self.held,
            self.hand_over,
            self.session,
            self.deferred_ns + (wait if self.state == RequestState.DEFERRED else 0),
            self.loading_ns + (wait if self.state == RequestState.LOADING else 0),
        )

    def stay(self, ended: Moved | None) -> RequestStateRow:
        """The row of its stay in the current state. ended: when it left the state; None: it has not."""
        state = RequestState(self.state).name
        return RequestStateRow(self.request, *self.since, state, self.awaits, *_columns(ended))

    def wait_ns(self, until_ns: int | None) -> int:
        """The time since it entered its state (ns); 0: a time is not in the log, or a clock was set back."""
        if until_ns is None or self.since.wall_ns is None:
            return 0
        return max(0, until_ns - self.since.wall_ns)

    def move(self, state: int, awaits: int | None, at: Moved) -> None:
        """Enter another state, and add the time in the current one to the waits. awaits: as in this class."""
        wait = self.wait_ns(at.wall_ns)
        if self.state == RequestState.DEFERRED:
            self.deferred_ns += wait
        elif self.state == RequestState.LOADING:
            self.loading_ns += wait
        self.state, self.awaits, self.since = state, awaits, at


def awaited(record: RequestRecord) -> int | None:
    """The transfer that a request waits for; None: it does not wait."""
    state = record.word & STATE_MASK
    if state == RequestState.DEFERRED:
        return record.awaits
    return record.load if state == RequestState.LOADING else None


class Flight(msgspec.Struct):
    """A transfer that has not ended.

    planned: the event that planned it; the event's number is also the transfer's.
    requests: a JSON list.
    owners: (request, event of its arrival, number of its slots) for each owner whose row may still change.
    slots: number of host slots.
    submitted: when it was submitted; None: it was not, or the log lacks the event.
    sent: whether it was submitted.
    reported: bit w is set when worker w has reported.
    waited_for: number of flushes that named it.
    elsewhere: the other end of the copy; None: the device.
    """

    planned: Moved
    store: bool
    requests: str
    owners: tuple[tuple[str, int, int], ...]
    slots: int
    submitted: Moved | None = None
    sent: bool = False
    reported: int = 0
    waited_for: int = 0
    elsewhere: str | None = None

    @property
    def direction(self) -> str:
        """`store` or `load`."""
        return "store" if self.store else "load"

    def row(self, workers: int, outcome: str | None, ended: Moved | None) -> TransferRow:
        """The row as it is now. outcome: None: it has not ended, or the log lacks its end."""
        return TransferRow(
            *self.planned,
            self.direction,
            self.requests,
            self.slots,
            workers,
            workers - self.reported.bit_count(),
            *_columns(self.submitted),
            *_columns(ended),
            outcome,
            self.waited_for,
            self.elsewhere if self.store else None,
            None if self.store else self.elsewhere,
        )

    def copy(self, worker: int, report: WorkerReported | None) -> CopyRow:
        """The row of one rank's part. report: the rank's report; None: it has not reported."""
        submitted_ns = None if self.submitted is None else self.submitted.wall_ns
        row = self.planned.event, worker, self.direction, submitted_ns
        if report is None:
            return CopyRow(*row, None, None, None, None, None, None, None, None)
        at = report.seq, report.step, report.wall_ns
        queued, copied = (None if us is None else us * 1000 for us in (report.queued_us, report.copied_us))
        noticed = None
        if submitted_ns is not None and queued is not None and copied is not None:
            noticed = max(0, report.wall_ns - submitted_ns - queued - copied)
        return CopyRow(*row, *at, queued, copied, noticed, report.good, report.error or None)

    def silent_copies(self, workers: int) -> list[Row]:
        """The rows of the ranks that have not reported; empty if the transfer was not submitted."""
        if not self.sent:
            return []
        silent = [worker for worker in range(workers) if not self.reported >> worker & 1]
        return [self.copy(worker, None) for worker in silent]
