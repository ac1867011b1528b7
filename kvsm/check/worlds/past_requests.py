"""The requests of a log and the states that they were in, found again from its events alone.

Each request is followed through the events that name it, and through the ends of its load and of its waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvsm import events as ev
from kvsm.check.worlds.past_transfers import Log, PastTransfer, PastWait
from kvsm.events import OffloadingEvent

_HAS_BLOCKS = ("RUNNING", "MATCHED", "DEFERRED", "LOADING")
"""States of a request that can be preempted."""


class PastStay(NamedTuple):
    """The time of a request in one state.

    transfer: the transfer that it waited for; None: it waited for none.
    ended: the event with which it left the state; None: it was still in it when the log ended.
    """

    began: OffloadingEvent
    state: str
    transfer: int | None
    ended: OffloadingEvent | None


class PastRequest(msgspec.Struct):
    """A request of a log.

    arrived: the first event that named it.
    events: the events that named it, until it was over.
    target: the other tier of its copies; empty: a request of the engine.
    stays: the states that it was in, the last one without an end until it is left.
    load: its load that has not ended; 0: none.
    finished: the event with which it finished or was cut off.
    cut_off: whether its process ended before it did.
    answers: number of answers to its lookups, once `past_answers` has counted them.
    is_shadow: whether it was admitted while a finished request of the same name was loading. Then only its
        admission shows that it exists.
    """

    name: str
    arrived: OffloadingEvent
    target: str = ""
    events: list[Any] = []
    stays: list[PastStay] = []
    load: int = 0
    finished: OffloadingEvent | None = None
    cut_off: bool = False
    answers: int = 0
    is_shadow: bool = False

    @property
    def state(self) -> str:
        """Its state after the last event that was read."""
        return self.stays[-1].state

    def of_kind(self, kind: type[OffloadingEvent]) -> list[Any]:
        """The events of one kind that named it."""
        return [event for event in self.events if isinstance(event, kind)]

    def read(self, event: Any) -> None:
        """Read an event that names it."""
        self.events.append(event)
        if isinstance(event, ev.HitMatched):
            self.enter("MATCHED" if event.slots else "RUNNING", event)
        elif isinstance(event, ev.HitReleased):
            self.enter("NEW", event)
        elif isinstance(event, ev.RequestDeferred):
            self.enter("DEFERRED", event, event.transfer)
        elif isinstance(event, ev.LoadPlanned) and event.voided:
            self.enter("RUNNING", event)
        elif isinstance(event, ev.LoadPlanned):
            self.load = event.seq
            self.enter("LOADING", event, event.seq)
        elif isinstance(event, ev.RequestPreempted) and self.state in _HAS_BLOCKS:
            self.enter("PREEMPTED", event)
        elif isinstance(event, ev.RequestFinished):
            self.finished = event
            self.enter("FINISHED" if self.load else "RELEASED", event)

    def end_load(self, event: OffloadingEvent) -> None:
        """Its load has ended."""
        self.load = 0
        if self.state == "LOADING":
            self.enter("RUNNING", event)
        elif self.state == "FINISHED":
            self.enter("RELEASED", event)

    def cut(self, event: ev.Restarted) -> None:
        """Its process has ended."""
        self.cut_off = self.finished is None
        self.finished = self.finished or event
        self.enter("RELEASED", event)

    def enter(self, state: str, event: OffloadingEvent, transfer: int | None = None) -> None:
        """Enter a state, if it is another one. Of several states at one event only the last one counts."""
        last = self.stays.pop()
        if last.state == state:
            self.stays.append(last)
            return
        if last.began is not event:
            self.stays.append(last._replace(ended=event))
        self.stays.append(PastStay(event, state, transfer, None))


def past_requests(
    log: Log, transfers: Mapping[int, PastTransfer], waits: Sequence[PastWait]
) -> list[PastRequest]:
    """Return all requests of a log, in the order in which they arrived. waits: all of the log."""
    loads, woken = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
    for transfer in transfers.values():
        if isinstance(transfer.plan, ev.LoadPlanned) and transfer.ended is not None:
            loads[transfer.ended.seq].append(transfer.plan.request)
    for wait in waits:
        if wait.ended is not None:
            woken[wait.ended.seq].append(wait.began.request)
    found, known = list[PastRequest](), dict[str, PastRequest]()
    for event in log:
        names = [*loads.get(event.seq, ()), *woken.get(event.seq, ())]
        if isinstance(event, ev.Restarted):
            for request in known.values():
                request.cut(event)
            known.clear()
            continue
        # The request of a hint is over when the hint is answered.
        name = None if isinstance(event, ev.HintAnswered) else getattr(event, "request", None)
        if name is not None:
            _read_named(found, known, name, event)
            names.append(name)
        for name in loads.get(event.seq, ()):
            known[name].end_load(event)
        for name in woken.get(event.seq, ()):
            if known[name].state == "DEFERRED":
                known[name].enter("NEW", event)
        for name in names:
            if name in known and known[name].state == "RELEASED":
                del known[name]
    return found


def _read_named(
    found: list[PastRequest], known: dict[str, PastRequest], name: str, event: OffloadingEvent
) -> None:
    """Read an event that names a request. A request that is not known begins."""
    is_shadow = name in known and known[name].finished is not None
    request = known.get(name)
    if request is None or is_shadow:
        target = event.target if isinstance(event, ev.RequestArrived) else ""
        request = PastRequest(name, event, target, [], [PastStay(event, "NEW", None, None)])
        request.is_shadow = is_shadow
        found.append(request)
        if not is_shadow:
            known[name] = request
    request.read(event)
