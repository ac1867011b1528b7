"""`follow`: apply an event, and return its changes in terms that fit every kind of event.

    changes = follow(ledger, event)     # applies the event
    for transfer in changes.ended: ...

Readers of a log follow transfers and requests by these changes, not by event kinds. So a new kind that ends a
transfer or wakes a request needs no code in them. Fields of a single kind (the error of a report, the reason
of a skip) they read from that event.

This module does not depend on kinds either: it compares the ledger before and after the event. `TRIGGERS` and
`REACHES` only say where to compare, so that most events cost two look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvsm.core.ledger.ledger import Ledger
from kvsm.core.ledger.records import TransferRecord
from kvsm.events import KINDS, LOAD, REACHES, TRIGGERS, OffloadingEvent, Reach
from kvsm.states.request import RequestTrigger
from kvsm.states.transfer import TransferTrigger


class Changes(NamedTuple):
    """What one event changed.

    planned: the transfer that it planned; None if it planned none.
    submitted: ids of the transfers that left for the workers.
    ended: the transfers that ended, each in its last state.
    requests: names of the requests whose state may have changed. No other request's state has changed.
    """

    planned: TransferRecord | None
    submitted: Sequence[int]
    ended: Sequence[TransferRecord]
    requests: Sequence[str]


_NO_CHANGES = Changes(None, (), (), ())


class _Looks(NamedTuple):
    """Where an event of a kind may change the ledger.

    everywhere: in any transfer or request. wakes: in the deferred requests.
    submits: in the transfers that it names. named: in the request that it names.
    """

    everywhere: bool
    wakes: bool
    submits: bool
    named: bool


def _looks(kind: type[OffloadingEvent]) -> _Looks | None:
    """Return where events of this kind make changes; None: they change no transfer and no request."""
    triggers, reaches = TRIGGERS[kind], REACHES[kind]
    looks = _Looks(
        everywhere=Reach.CACHE in reaches or Reach.PROCESS in reaches,
        wakes=any(trigger is RequestTrigger.WAKE for trigger in triggers),
        submits=any(trigger is TransferTrigger.SUBMIT for trigger in triggers),
        named="request" in kind.__struct_fields__,
    )
    return looks if any(looks) or Reach.PLAN in reaches else None


_LOOKS = {kind: _looks(kind) for kind in KINDS}


def follow(ledger: Ledger, event: OffloadingEvent) -> Changes:
    """Apply the next event to its ledger, and return what it changed.

    Raises `IllegalTransition` or `InvalidEvent`, with nothing changed, if the event cannot follow.
    """
    looks = _LOOKS[type(event)]
    if looks is None:
        ledger.apply(event)
        return _NO_CHANGES
    everywhere, wakes, submits, named = looks
    if everywhere:
        return _follow_everywhere(ledger, event)
    waiting = list(ledger.deferred) if wakes and ledger.deferred else ()
    ended = ledger.apply(event)
    requests: list[str] = [event.request] if named else []  # type: ignore[attr-defined]
    if ended is not None and ended.direction is LOAD:
        requests += [name for name, _ in ended.owners]
    if waiting:
        requests += [name for name in waiting if name not in ledger.deferred]
    return Changes(
        ledger.transfers.get(event.seq),
        event.transfers if submits else (),  # type: ignore[attr-defined]
        () if ended is None else (ended,),
        requests,
    )


def _follow_everywhere(ledger: Ledger, event: OffloadingEvent) -> Changes:
    transfers = list(ledger.transfers.values())
    states = {name: request.state for name, request in ledger.requests.items()}
    ledger.apply(event)
    left = ledger.requests
    return Changes(
        planned=ledger.transfers.get(event.seq),
        submitted=(),
        ended=[transfer for transfer in transfers if transfer.id not in ledger.transfers],
        requests=[
            name for name, state in states.items() if name not in left or left[name].state is not state
        ],
    )
