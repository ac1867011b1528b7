"""What an event concerns: slots, device blocks, transfers and requests, those that it does not name, too.

A report names a transfer, and concerns the slots that the transfer touches and the request it is for; a
request's end concerns the blocks that its match pinned. So the answer needs the ledger as it was right
before the event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvsm import events as ev
from kvsm.events import OffloadingEvent
from kvsm.ids import to_list
from kvsm.ledger import Ledger, indexed_slots


class Concern(NamedTuple):
    """The things of each sort that an event concerns."""

    slots: Sequence[int] = ()
    device_blocks: Sequence[int] = ()
    transfers: Sequence[int] = ()
    requests: Sequence[str] = ()

    def meets(self, other: Concern) -> bool:
        """Whether the two have anything in common."""
        return any(not set(ours).isdisjoint(theirs) for ours, theirs in zip(self, other))


def concern(ledger: Ledger, event: OffloadingEvent) -> Concern:
    """What `event` concerns, in a ledger to which it has not been applied yet."""
    if isinstance(event, ev.RequestArrived | ev.StoreSkipped):
        return Concern(requests=(event.request,))
    if isinstance(event, ev.HitReleased | ev.RequestFinished | ev.RequestPreempted):
        return Concern(_pins(ledger, event.request), requests=(event.request,))
    if isinstance(event, ev.HitMatched):
        return Concern(to_list(event.slots), requests=(event.request,))
    if isinstance(event, ev.StorePlanned):
        return Concern(to_list(event.slots), to_list(event.device_blocks), (event.seq,), (event.request,))
    if isinstance(event, ev.LoadPlanned):
        pins, transfers = _pins(ledger, event.request), () if event.voided else (event.seq,)
        return Concern(pins, to_list(event.device_blocks), transfers, (event.request,))
    if isinstance(event, ev.BlocksEvicted):
        return Concern(to_list(event.slots), transfers=(event.transfer,))
    if isinstance(event, ev.BlocksTouched):
        return Concern(to_list(event.slots))
    if isinstance(event, ev.RequestDeferred):
        return Concern(transfers=(event.transfer,), requests=(event.request,))
    if isinstance(event, ev.TransfersSubmitted | ev.FlushRequested):
        return _of_transfers(ledger, event.transfers)
    if isinstance(event, ev.WorkerReported | ev.ReportRejected | ev.TransferCancelled | ev.TransferLost):
        return _of_transfers(ledger, (event.transfer,))
    if isinstance(event, ev.Ticked):
        woken = [one.name for one in ledger.deferred.values() if one.patience <= event.tick]
        return Concern(requests=woken)
    if isinstance(event, ev.CacheReset):
        return _of_transfers(ledger, tuple(ledger.transfers))._replace(slots=indexed_slots(ledger))
    return Concern()


def _pins(ledger: Ledger, name: str) -> Sequence[int]:
    request = ledger.requests.get(name)
    return () if request is None else to_list(ledger.live_pins(request))


def _of_transfers(ledger: Ledger, ids: Sequence[int]) -> Concern:
    transfers = [ledger.transfers[id] for id in ids if id in ledger.transfers]
    waiting = [one.name for one in ledger.deferred.values() if one.awaits in ids]
    return Concern(
        [slot for one in transfers for slot in to_list(one.slots)],
        [block for one in transfers for block in to_list(one.device_blocks)],
        ids,
        [*dict.fromkeys([one.request for one in transfers] + waiting)],
    )
