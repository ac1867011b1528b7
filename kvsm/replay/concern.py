"""What an event concerns: slots, device blocks, transfers and requests, those that it does not name, too.

A report names a transfer, and concerns the slots that the transfer touches and the requests it is for; a
request's end concerns the blocks that its match pinned. So the answer needs the ledger as it was right
before the event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvsm import events as ev
from kvsm.events import OffloadingEvent, Owners
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
    if isinstance(event, ev.RequestArrived):
        return Concern(requests=(event.request,))
    if isinstance(event, ev.StoreSkipped):
        return Concern(requests=names_of(event.owners))
    if isinstance(event, ev.BlocksOffered):
        return Concern(requests=[name for name, _, _ in event.offers])
    if isinstance(event, ev.BlocksRewritten):
        return Concern(device_blocks=to_list(event.device_blocks))
    if isinstance(event, ev.HitReleased | ev.RequestFinished | ev.RequestPreempted):
        return Concern(_pins(ledger, event.request), requests=(event.request,))
    if isinstance(event, ev.HitMatched):
        return Concern(to_list(event.slots), requests=(event.request,))
    if isinstance(event, ev.StorePlanned):
        blocks, requests = to_list(event.device_blocks), names_of(event.owners)
        return Concern(to_list(event.slots), blocks, (event.seq,), requests)
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
        return _of_reset(ledger)
    return Concern()


def names_of(owners: Owners) -> list[str]:
    """The requests among the owners of a store, each once."""
    return [*dict.fromkeys(name for name, _ in owners)]


def _of_reset(ledger: Ledger) -> Concern:
    """A reset voids every block, ages what loads brought, and lets the requests offer their blocks anew."""
    found = _of_transfers(ledger, tuple(ledger.transfers))
    offering = [one.name for one in ledger.requests.values() if one.offered]
    return found._replace(
        slots=indexed_slots(ledger),
        device_blocks=[*dict.fromkeys([*found.device_blocks, *ledger.provenance.brought])],
        requests=[*dict.fromkeys([*found.requests, *offering])],
    )


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
        [*dict.fromkeys([name for one in transfers for name, _ in one.owners] + waiting)],
    )
