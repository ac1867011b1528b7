"""What each kind of event means in the request protocol: the actions that it is an instance of.

A store of several slots is several stores of the protocol, which always take the same actions; each is named
by the transfer and a place. A load has one name, at place 0. A hold of a match, and of the load that it
becomes, is named by its request and its place in the hit. A hold of a store is named as its transfer is.

What the engine is told is not in the log. It is told at once here (`tell`).
"""

from __future__ import annotations

from collections.abc import Iterator

from kvsm import events as ev
from kvsm.check.conformance.compiled import Row
from kvsm.check.conformance.shadow import UNSPOKEN, EventSteps, Shadow, Step
from kvsm.check.protocol.request_state import PATIENCE
from kvsm.core.ledger import Ledger
from kvsm.events import KINDS, Direction, OffloadingEvent
from kvsm.ids import listed, unpack
from kvsm.states.transfer import PLANNED

Piece = tuple[int, int]
"""A transfer of the protocol: the ledger's transfer and a place in it."""


def pieces_of(ledger: Ledger, transfer: int) -> list[Piece]:
    """The transfers of the protocol that a transfer of the ledger is."""
    record = ledger.transfers.get(transfer)
    if record is None or record.direction is Direction.LOAD:
        return [(transfer, 0)]
    return [(transfer, place) for place in range(len(record.slots))]


def request_arrived(_: Shadow, __: Ledger, event: ev.RequestArrived) -> Iterator[Step]:
    """The request is known."""
    yield "arrive", [(event.request,)]


def request_preempted(_: Shadow, __: Ledger, event: ev.RequestPreempted) -> Iterator[Step]:
    """The engine takes its device blocks."""
    yield "preempt", [(event.request,)]


def request_finished(_: Shadow, __: Ledger, event: ev.RequestFinished) -> Iterator[Step]:
    """It is over."""
    yield "finish", [(event.request,)]


def hit_matched(_: Shadow, __: Ledger, event: ev.HitMatched) -> Iterator[Step]:
    """A hit of several blocks, or a miss."""
    name, slots = event.request, listed(unpack(event.slots))
    rows: list[Row] = [(name, (name, place), slot) for place, slot in enumerate(slots)]
    yield "hit", rows[:1]
    yield "hit_more", rows[1:]
    if not rows:
        yield "miss", [(name,)]


def hit_released(_: Shadow, __: Ledger, event: ev.HitReleased) -> Iterator[Step]:
    """The match is released."""
    yield "unmatch", [(event.request,)]


def request_deferred(_: Shadow, __: Ledger, event: ev.RequestDeferred) -> Iterator[Step]:
    """It waits for a transfer. Its stores all end in one event, so the first one stands for them."""
    yield "defer", [(event.request, (event.transfer, 0))]


def ticked(shadow: Shadow, before: Ledger, event: ev.Ticked) -> Iterator[Step]:
    """The bounds of some waits have come."""
    waiting = shadow.cells["patience"].values
    due = [
        (name,)
        for name, patience in waiting.items()
        if patience == PATIENCE["WAITS"].value
        and (record := before.requests.get(str(name))) is not None
        and record.patience <= event.tick
    ]
    yield "run_out", due


def blocks_evicted(_: Shadow, __: Ledger, event: ev.BlocksEvicted) -> Iterator[Step]:
    """Each of the victims is evicted."""
    yield "evict", [(slot,) for slot in listed(unpack(event.slots))]


def store_planned(_: Shadow, __: Ledger, event: ev.StorePlanned) -> Iterator[Step]:
    """A store for each slot."""
    pieces = ((event.seq, place) for place in range(len(event.keys)))
    yield "plan_store", [(piece, piece, slot) for piece, slot in zip(pieces, listed(unpack(event.slots)))]


def load_planned(shadow: Shadow, before: Ledger, event: ev.LoadPlanned) -> Iterator[Step]:
    """The last pins are given back, and the others become readers. Or the load is refused, and ends."""
    name, load = event.request, (event.seq, 0)
    if event.voided:
        yield "refuse_load", [(name, load)]
        yield "cancel", [(load,)]
        yield "tell", [(load,)]
        return
    record, held = before.requests.get(name), shadow.cells["hold_slot"].get
    places = range(len(listed(unpack(event.slots))), 0 if record is None else len(record.pins))
    yield "accept_less", [(name, (name, place), held((name, place))) for place in places]
    yield "begin_load", [(name, load)]


def transfers_submitted(_: Shadow, before: Ledger, event: ev.TransfersSubmitted) -> Iterator[Step]:
    """Each of the plans leaves."""
    yield "submit", [(piece,) for transfer in event.transfers for piece in pieces_of(before, transfer)]


def worker_reported(shadow: Shadow, before: Ledger, event: ev.WorkerReported) -> Iterator[Step]:
    """A report. The last one ends the transfer, and the engine is told."""
    (pending, _) = shadow.cells["transfer"].get((event.transfer, 0)).counts
    what, how = "end" if pending == 1 else "report", "good" if event.good else "bad"
    yield f"{what}_{how}", [(piece, event.worker) for piece in pieces_of(before, event.transfer)]
    if pending == 1:
        yield _told(before, [event.transfer])


def transfer_cancelled(_: Shadow, before: Ledger, event: ev.TransferCancelled) -> Iterator[Step]:
    """The plan is taken back."""
    yield "cancel", [(piece,) for piece in pieces_of(before, event.transfer)]
    yield _told(before, [event.transfer])


def transfer_lost(_: Shadow, before: Ledger, event: ev.TransferLost) -> Iterator[Step]:
    """The transfer is given up."""
    yield "lose", [(piece,) for piece in pieces_of(before, event.transfer)]
    yield _told(before, [event.transfer])


def cache_reset(_: Shadow, before: Ledger, __: ev.CacheReset) -> Iterator[Step]:
    """All plans are taken back, and then everything is voided."""
    planned = [id for id, one in before.transfers.items() if one.state is PLANNED]
    yield "cancel", [(piece,) for transfer in planned for piece in pieces_of(before, transfer)]
    yield _told(before, planned)
    yield "reset", [()]


def _told(before: Ledger, transfers: list[int]) -> Step:
    """The engine is told how these loads ended. Of stores it hears nothing."""
    records = before.transfers
    return "tell", [
        ((id, 0),) for id in transfers if id in records and records[id].direction is Direction.LOAD
    ]


REQUEST_STEPS: dict[type[OffloadingEvent], EventSteps] = {
    **dict.fromkeys(KINDS, UNSPOKEN),
    ev.RequestArrived: EventSteps("The request is known.", ("arrive",), request_arrived),
    ev.RequestPreempted: EventSteps("Its device blocks are taken.", ("preempt",), request_preempted),
    ev.RequestFinished: EventSteps("It is over.", ("finish",), request_finished),
    ev.HitMatched: EventSteps(
        "A hit of several blocks, or a miss.", ("hit", "hit_more", "miss"), hit_matched
    ),
    ev.HitReleased: EventSteps("The match is released.", ("unmatch",), hit_released),
    ev.RequestDeferred: EventSteps("It waits for a transfer.", ("defer",), request_deferred),
    ev.BlocksEvicted: EventSteps("Each victim is evicted.", ("evict",), blocks_evicted),
    ev.StorePlanned: EventSteps("A store for each slot.", ("plan_store",), store_planned),
    ev.LoadPlanned: EventSteps(
        "The last pins are given back, and the others become readers. Or the load is refused, and ends.",
        ("accept_less", "begin_load", "refuse_load", "cancel", "tell"),
        load_planned,
    ),
    ev.TransfersSubmitted: EventSteps("Each plan leaves.", ("submit",), transfers_submitted),
    ev.TransferCancelled: EventSteps("The plan is taken back.", ("cancel", "tell"), transfer_cancelled),
    ev.WorkerReported: EventSteps(
        "A report, and with the last one the end.",
        ("report_good", "report_bad", "end_good", "end_bad", "tell"),
        worker_reported,
    ),
    ev.TransferLost: EventSteps("The transfer is given up.", ("lose", "tell"), transfer_lost),
    ev.CacheReset: EventSteps(
        "Each plan is taken back, and then everything is voided.", ("cancel", "tell", "reset"), cache_reset
    ),
    ev.Ticked: EventSteps("The bounds of some waits have come.", ("run_out",), ticked),
    ev.Restarted: EventSteps("Everything ends, and what can be read is left.", ("restart",)),
}
"""Every kind of event. A kind without a row of its own is none of the protocol's."""
