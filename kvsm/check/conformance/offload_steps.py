"""What each kind of event means in the offload protocol: the actions that it is an instance of.

A copy is named by its transfer and its place in it, and a match by its request and its place in the hit. A
slot that holds a chunk of several device blocks is several slots of the protocol, which always take the same
actions; each is named by the slot's number and a place.

The engine's own actions `free` and `compute` are not in the log. Where a plan relies on what a device block
holds, the engine must have brought that about before. So these actions are inserted, with the demands of
their guards: a device block that a copy still reads cannot be computed with another key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvsm import events as ev
from kvsm.check.conformance.cells import Member
from kvsm.check.conformance.compiled import Row
from kvsm.check.conformance.shadow import UNSPOKEN, EventSteps, Shadow, Step
from kvsm.core.ledger import Ledger
from kvsm.events import KINDS, REACHES, OffloadingEvent, Reach
from kvsm.ids import IdArray, listed, unpack
from kvsm.states.transfer import PLANNED


class UnnamedBlock(NamedTuple):
    """A device block that the log does not number: of another engine, or for a part that nobody asked for."""

    transfer: int
    place: int


def slot_members(slots: IdArray, chunk: int) -> Sequence[Member]:
    """The protocol's slots: a place in each chunk, or the slot itself if a chunk has one place."""
    numbers = listed(slots)
    return numbers if chunk == 1 else [(slot, place) for slot in numbers for place in range(chunk)]


def load_targets(
    transfer: int, places: int, device_blocks: Sequence[int], parts: Sequence[int]
) -> list[Member]:
    """The device block of each copy of a load.

    places: how many copies it has.
    parts: the places that the device blocks stand for; empty for all.
    """
    if not parts:
        return list(device_blocks)
    targets: list[Member] = [UnnamedBlock(transfer, place) for place in range(places)]
    for place, block in zip(parts, device_blocks):
        if place < places:
            targets[place] = block
    return targets


def _prepared(shadow: Shadow, wanted: Sequence[tuple[Member, bytes | None]]) -> Iterator[Step]:
    """What the engine did so that these device blocks hold these keys; None: so that they are free."""
    holds = shadow.cells["key"].get
    other = [(block, key) for block, key in wanted if holds(block) != key]
    yield "free", [(block,) for block, _ in other if holds(block) is not None]
    yield "compute", [(block, key) for block, key in other if key is not None]


def _planned(name: str, rows: list[Row]) -> Iterator[Step]:
    """A plan of several blocks: the first one opens it."""
    yield f"plan_{name}", rows[:1]
    yield f"{name}_more", rows[1:]


def store_planned(shadow: Shadow, before: Ledger, event: ev.StorePlanned) -> Iterator[Step]:
    """The first block opens the plan, and each other one is one more."""
    chunk, transfer = before.config.blocks_per_chunk, event.seq
    slots = slot_members(unpack(event.slots), chunk)
    keys: Sequence[Any] = event.keys
    if chunk > 1:
        keys = [(key, place) for key in keys for place in range(chunk)]
    blocks: Sequence[Member] = listed(unpack(event.device_blocks))
    if event.source:
        blocks = [UnnamedBlock(transfer, place) for place in range(len(slots))]
    yield from _prepared(shadow, list(zip(blocks, keys)))
    copies = range(len(slots))
    rows: list[Row] = [
        (transfer, (transfer, place), block, slot) for place, block, slot in zip(copies, blocks, slots)
    ]
    yield from _planned("store", rows)


def _matches(shadow: Shadow, before: Ledger, request: str, begin: int = 0) -> list[Row]:
    """(slot, match) for each match that the request still has, from a place on."""
    record = before.requests.get(request)
    if record is None:
        return []
    get = shadow.cells["match_slot"].get
    matches = range(begin, len(record.pins) * before.config.blocks_per_chunk)
    return [(slot, (request, place)) for place in matches if (slot := get((request, place))) is not None]


def load_planned(shadow: Shadow, before: Ledger, event: ev.LoadPlanned) -> Iterator[Step]:
    """Matches become readers, one after the other, and the others are released."""
    chunk, transfer = before.config.blocks_per_chunk, event.seq
    slots = slot_members(unpack(event.slots), chunk)
    blocks = load_targets(
        transfer, len(slots), listed(unpack(event.device_blocks)), listed(unpack(event.parts))
    )
    yield from _prepared(shadow, [(block, None) for block in blocks])
    rows: list[Row] = [
        (transfer, (transfer, place), block, slot, (event.request, place))
        for place, (block, slot) in enumerate(zip(blocks, slots))
    ]
    yield from _planned("load", rows)
    yield "release", _matches(shadow, before, event.request, len(slots))


def hit_matched(_: Shadow, before: Ledger, event: ev.HitMatched) -> Iterator[Step]:
    """A match for each slot."""
    slots = slot_members(unpack(event.slots), before.config.blocks_per_chunk)
    yield "match", [(slot, (event.request, place)) for place, slot in enumerate(slots)]


def request_left(shadow: Shadow, before: Ledger, event: Any) -> Iterator[Step]:
    """The request's matches end without a load."""
    yield "release", _matches(shadow, before, event.request)


def blocks_evicted(_: Shadow, before: Ledger, event: ev.BlocksEvicted) -> Iterator[Step]:
    """Each of the victims is evicted."""
    yield "evict", [(slot,) for slot in slot_members(unpack(event.slots), before.config.blocks_per_chunk)]


def transfers_submitted(_: Shadow, __: Ledger, event: ev.TransfersSubmitted) -> Iterator[Step]:
    """Each of the plans leaves."""
    yield "submit", [(transfer,) for transfer in event.transfers]


def worker_reported(shadow: Shadow, before: Ledger, event: ev.WorkerReported) -> Iterator[Step]:
    """A report, and with the last one the end."""
    (pending, _) = shadow.cells["transfer"].get(event.transfer).counts
    what, how = "end" if pending == 1 else "report", "good" if event.good else "bad"
    yield f"{what}_{how}", [(event.transfer, event.worker)]
    if pending == 1:
        yield from _left_unnamed(shadow, before, event.transfer)


_NAMES_NOTHING = (ev.RejectReason.UNKNOWN, ev.RejectReason.WORKER, ev.RejectReason.DIRECTION)
"""Why reports are rejected that name no transfer and worker of the protocol."""


def report_rejected(_: Shadow, __: Ledger, event: ev.ReportRejected) -> Iterator[Step]:
    """A report that its transfer does not wait for."""
    if event.reason not in _NAMES_NOTHING:
        yield "refuse_report", [(event.transfer, event.worker)]


def transfer_cancelled(shadow: Shadow, before: Ledger, event: ev.TransferCancelled) -> Iterator[Step]:
    """The plan is taken back."""
    yield "cancel", [(event.transfer,)]
    yield from _left_unnamed(shadow, before, event.transfer)


def transfer_lost(shadow: Shadow, before: Ledger, event: ev.TransferLost) -> Iterator[Step]:
    """The transfer is given up."""
    yield "lose", [(event.transfer,)]
    yield from _left_unnamed(shadow, before, event.transfer)


def cache_reset(shadow: Shadow, before: Ledger, _: ev.CacheReset) -> Iterator[Step]:
    """All plans are taken back, and then everything is voided."""
    planned = [id for id, one in before.transfers.items() if one.state is PLANNED]
    yield "cancel", [(transfer,) for transfer in planned]
    for transfer in planned:
        yield from _left_unnamed(shadow, before, transfer)
    yield "reset", [()]


def _left_unnamed(shadow: Shadow, before: Ledger, transfer: int) -> Iterator[Step]:
    """Nobody asks for the unnamed device blocks of a transfer that has ended."""
    record = before.transfers.get(transfer)
    if record is not None and len(record.device_blocks) != len(record.slots):
        holds = shadow.cells["key"].get
        places = range(len(record.slots) * before.config.blocks_per_chunk)
        unnamed = [UnnamedBlock(transfer, place) for place in places]
        yield "free", [(block,) for block in unnamed if holds(block) is not None]


_PREPARED = ("free", "compute")
_RELEASED = EventSteps("Its matches are released.", ("release",), request_left)

STEPS: dict[type[OffloadingEvent], EventSteps] = {
    **dict.fromkeys(KINDS, UNSPOKEN),
    **{kind: _RELEASED for kind in KINDS if Reach.PINS in REACHES[kind]},
    ev.HitMatched: EventSteps("A match for each slot.", ("match",), hit_matched),
    ev.BlocksEvicted: EventSteps("Each victim is evicted.", ("evict",), blocks_evicted),
    ev.StorePlanned: EventSteps(
        "The first block opens the plan, and each other one is one more.",
        (*_PREPARED, "plan_store", "store_more"),
        store_planned,
    ),
    ev.LoadPlanned: EventSteps(
        "Matches become readers one after the other. The others are released.",
        (*_PREPARED, "plan_load", "load_more", "release"),
        load_planned,
    ),
    ev.TransfersSubmitted: EventSteps("Each plan leaves.", ("submit",), transfers_submitted),
    ev.TransferCancelled: EventSteps("The plan is taken back.", ("cancel", "free"), transfer_cancelled),
    ev.WorkerReported: EventSteps(
        "A report, and with the last one the end.",
        ("report_good", "report_bad", "end_good", "end_bad", "free"),
        worker_reported,
    ),
    ev.ReportRejected: EventSteps("It comes late or twice.", ("refuse_report",), report_rejected),
    ev.TransferLost: EventSteps("The transfer is given up.", ("lose", "free"), transfer_lost),
    ev.CacheReset: EventSteps(
        "Each plan is taken back, and then everything is voided.", ("cancel", "free", "reset"), cache_reset
    ),
    ev.Restarted: EventSteps("`write_log` and `crash` at once, on the whole state (`OffloadBooks.restart`)."),
}
"""Every kind of event. Where a kind has no row of its own, what it reaches decides."""
