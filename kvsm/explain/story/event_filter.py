"""Which events a person wants to see: `EventFilter`, a test of one event after another.

It needs no ledger, so it also works in the middle of a log, and on a log that cannot be folded. What an event
concerns besides its fields it cannot see. It knows the transfers of a request from the plans that it has met.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from kvsm import events as ev
from kvsm.events import OffloadingEvent
from kvsm.explain.story.concern import named_by_fields

FAILURES: dict[type[OffloadingEvent], Callable[[Any], bool]] = {
    ev.LoadPlanned: lambda event: event.voided,
    ev.WorkerReported: lambda event: not event.good,
    ev.ReportRejected: lambda _: True,
    ev.TransferLost: lambda _: True,
    ev.Restarted: lambda event: bool(event.ended),
}
"""Whether an event is a failure: a load given up, a bad copy, a rejected report, a copy that was never
reported, a process that ended without closing the log. Events of other kinds are none: a skip or an eviction
is normal."""


def is_failure(event: OffloadingEvent) -> bool:
    """Whether an event is a failure (`FAILURES`)."""
    judge = FAILURES.get(type(event))
    return judge is not None and judge(event)


class EventFilter:
    """Events for which every given condition holds.

    kinds: of one of these kinds; none: of any.
    request: about this request, or about a transfer of it. As in `kvsm.explain.story.names`, the id that
        vLLM's client sent stands for the ids that begin with it and a hyphen.
    transfer: plans this transfer, or names it.
    worker: names this worker.
    failed: is a failure (`FAILURES`).
    """

    def __init__(
        self,
        kinds: Collection[type[OffloadingEvent]] = (),
        request: str | None = None,
        transfer: int | None = None,
        worker: int | None = None,
        failed: bool = False,
    ) -> None:
        self._kinds, self._request, self._transfer = frozenset(kinds), request, transfer
        self._worker, self._failed = worker, failed
        self._of_request: set[int] = set()
        """Transfers of the request that were planned in the events so far."""

    def fits(self, event: OffloadingEvent) -> bool:
        """Whether the event is wanted. Show it every event, in order: plans tell whose a transfer is."""
        about = self._request is None or self._is_about_request(event)
        return (
            about
            and (not self._kinds or type(event) in self._kinds)
            and (self._transfer is None or self._names_transfer(event))
            and (self._worker is None or getattr(event, "worker", None) == self._worker)
            and (not self._failed or is_failure(event))
        )

    def _is_about_request(self, event: OffloadingEvent) -> bool:
        named = named_by_fields(event)
        if any(self._is_meant(name) for name in named.requests):
            if isinstance(event, ev.StorePlanned | ev.LoadPlanned):
                self._of_request.add(event.seq)
            return True
        return not self._of_request.isdisjoint(named.transfers)

    def _is_meant(self, name: str) -> bool:
        return name == self._request or name.startswith(f"{self._request}-")

    def _names_transfer(self, event: OffloadingEvent) -> bool:
        if event.seq == self._transfer:
            return isinstance(event, ev.StorePlanned | ev.LoadPlanned)
        return self._transfer in named_by_fields(event).transfers
