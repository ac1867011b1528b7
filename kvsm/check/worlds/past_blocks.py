"""The blocks of a log and the answers to its lookups, found again from its events alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvsm import events as ev
from kvsm.check.worlds.past_requests import PastRequest
from kvsm.check.worlds.past_transfers import CANCELLED, COMPLETED, CUT_OFF, FAILED, LOST, Log, PastTransfer
from kvsm.events import OffloadingEvent
from kvsm.ids import to_list


class PastBlock(msgspec.Struct):
    """A block of a log: what a slot held from the plan of a store until its key was gone.

    hits: the lookups that it served.
    gone, why: the event that removed its key, and the reason in the words of the tables.
    evictor: the number of the store for which it was evicted. destroyer: the transfer that removed its key.
    evicted_for: the requests of the evicting store; None: its plan does not follow the eviction.
    wanted: the first answer afterwards that missed its key.
    """

    store: PastTransfer
    key: bytes
    slot: int
    hits: list[ev.HitMatched]
    gone: OffloadingEvent | None = None
    why: str | None = None
    evictor: int | None = None
    evicted_for: list[str] | None = None
    destroyer: PastTransfer | None = None
    wanted: ev.HitMatched | ev.RequestAdmitted | None = None

    def lives_at(self, event: int) -> bool:
        """Whether its key is on the host, or on the way there, after this event."""
        return self.store.plan.seq <= event and (self.gone is None or self.gone.seq > event)

    def is_stored_at(self, event: int) -> bool:
        """Whether it can be read after this event."""
        return self.lives_at(event) and self.store.outcome == COMPLETED and _seq(self.store.ended) <= event


def _seq(event: OffloadingEvent | None) -> int:
    assert event is not None
    return event.seq


class _LivingBlocks:
    """The living blocks while a log is read."""

    def __init__(self) -> None:
        self.blocks: list[PastBlock] = []
        self.in_slot: dict[int, PastBlock] = {}

    def gone(self, slots: Iterable[int], event: OffloadingEvent, why: str) -> list[PastBlock]:
        """The keys of the blocks in these slots are gone. Slots may be without a living block."""
        found = [self.in_slot.pop(slot) for slot in slots if slot in self.in_slot]
        for block in found:
            block.gone, block.why = event, why
        return found

    def destroyed(self, transfer: PastTransfer, event: OffloadingEvent, why: str) -> None:
        """A transfer has ended so that the keys of its slots are gone."""
        for block in self.gone(transfer.slots, event, why):
            block.destroyer = transfer


def past_blocks(
    log: Log, transfers: Mapping[int, PastTransfer], requests: Sequence[PastRequest]
) -> list[PastBlock]:
    """Return the blocks of a log, in the order of the stores' plans and of their keys."""
    pool, ended = _LivingBlocks(), defaultdict[int, list[PastTransfer]](list)
    copies = {event.seq for request in requests if request.target for event in request.events}
    for transfer in transfers.values():
        if transfer.ended is not None:
            ended[transfer.ended.seq].append(transfer)
    for event in log:
        if isinstance(event, ev.BlocksEvicted):
            for block in pool.gone(to_list(event.slots), event, "evicted"):
                block.evictor = event.transfer
                if event.transfer == event.seq + 1 and event.transfer in transfers:
                    block.evicted_for = transfers[event.transfer].requests
        elif isinstance(event, ev.StorePlanned):
            store = transfers[event.seq]
            born = [PastBlock(store, key, slot, []) for key, slot in zip(event.keys, store.slots)]
            pool.blocks += born
            pool.in_slot |= {block.slot: block for block in born}
        elif isinstance(event, ev.HitMatched) and event.seq not in copies:
            for slot in to_list(event.slots):
                pool.in_slot[slot].hits.append(event)
        elif isinstance(event, ev.CacheReset):
            pool.gone([*pool.in_slot], event, "reset")
        for transfer in ended.get(event.seq, ()):
            why = _why_gone(transfer)
            if why is not None:
                pool.destroyed(transfer, event, why)
    return pool.blocks


def _why_gone(transfer: PastTransfer) -> str | None:
    """Why the keys of an ended transfer's slots are gone; None: they are not."""
    if transfer.outcome == LOST:
        return "copy lost"
    if transfer.outcome == FAILED:
        return "store failed" if transfer.is_store else "load failed"
    if transfer.is_store and transfer.outcome == CANCELLED:
        return "store cancelled"
    return "restart" if transfer.is_store and transfer.outcome == CUT_OFF else None


class PastAnswer(msgspec.Struct):
    """An answer to a lookup. event: the one that has it. slots: how many it pins.

    admitted: the event that admitted the request with it; None: none did.
    why, cause, transfer, requests, skipped: why its missed key could not be read, as in the table `lookups`.
    """

    event: ev.HitMatched | ev.RequestAdmitted
    slots: int
    admitted: ev.RequestAdmitted | None = None
    why: str | None = None
    cause: int | None = None
    transfer: int | None = None
    requests: list[str] | None = None
    skipped: int | None = None


def past_answers(log: Log, requests: Sequence[PastRequest], blocks: Sequence[PastBlock]) -> list[PastAnswer]:
    """Return the answers of a log in their order, each with the reason for its miss. Notes who wanted a
    block that is gone."""
    found = [answer for request in requests if not request.target for answer in answers_of(request)]
    by_key, skips = defaultdict[bytes, list[PastBlock]](list), defaultdict[bytes, list[int]](list)
    for block in blocks:
        by_key[block.key].append(block)
    for event in log:
        if isinstance(event, ev.StoreSkipped):
            for key in event.keys:
                skips[key].append(event.seq)
    for answer in sorted(found, key=_place):
        missed, at = answer.event.missed, answer.event.seq
        if missed is not None:
            before = [block for block in by_key[missed] if block.store.plan.seq < at]
            skipped = [event for event in skips[missed] if event < at]
            _explain(answer, before[-1] if before else None, skipped[-1] if skipped else None)
    return sorted(found, key=_place)


def _place(answer: PastAnswer) -> int:
    return answer.event.seq


def answers_of(request: PastRequest) -> list[PastAnswer]:
    """Return the answers that one request got. Its admission uses the last one, or has one of its own."""
    answers, unused, pinned = list[PastAnswer](), None, 0
    for event in request.events:
        if isinstance(event, ev.HitMatched):
            pinned = len(to_list(event.slots))
            unused = PastAnswer(event, pinned)
            answers.append(unused)
        elif isinstance(event, ev.RequestAdmitted):
            slots = pinned if event.on_host != 0 else 0
            if unused is None or (unused.slots, unused.event.missed) != (slots, event.missed):
                unused = PastAnswer(event, slots)
                answers.append(unused)
            unused.admitted, unused = event, None
        elif isinstance(event, (ev.HitReleased, ev.LoadPlanned, ev.RequestPreempted)):
            pinned = 0
    request.answers = len(answers)
    return answers


def _explain(answer: PastAnswer, block: PastBlock | None, skipped: int | None) -> None:
    """Note why the answer's missed key could not be read. block, skipped: the last of this key before it."""
    at = answer.event.seq
    if block is None:
        answer.why, answer.cause, answer.skipped = "never stored", skipped, skipped
        if skipped is not None:
            answer.why = "offered and skipped"
    elif block.is_stored_at(at):
        pass  # It is readable by now.
    elif block.lives_at(at):
        store = block.store
        answer.why, answer.requests = "store in flight", store.requests
        answer.cause = answer.transfer = store.plan.seq
    else:
        gone = _seq(block.gone)
        answer.why, answer.cause = block.why, gone
        answer.skipped = skipped if skipped is not None and skipped > gone else None
        if block.evictor is not None:
            answer.transfer, answer.requests = block.evictor, block.evicted_for
        elif block.destroyer is not None:
            answer.transfer, answer.requests = block.destroyer.plan.seq, block.destroyer.requests
        block.wanted = block.wanted or answer.event
