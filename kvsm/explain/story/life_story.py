"""The life story of a slot, key, request or transfer: one line per event, with causes and states.

    for line in tell("log", BlockLife(42)):
        print(line.event, line.text, line.before, line.after)

The log is folded from its beginning, and each event that concerns the thing becomes a line. The ledger's
state gives the causes: the line of an eviction names the transfer that needed the slot, and the line of a
lookup says why the key was missing, because `fates.py` has followed the missed keys since the log began.

By default a line shows the event's fields (`render.py`). `_TELLERS` has functions that say more about a kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from kvsm import events as ev
from kvsm.core.ledger import Ledger, TransferRecord
from kvsm.core.log import LogReader
from kvsm.core.log.fold import Moment, walk
from kvsm.core.log.trust import Trust
from kvsm.errors import InvalidEvent, LogError
from kvsm.events import KINDS, Direction, OffloadingEvent, Owners
from kvsm.explain.story.concern import Concern, concern, names_of
from kvsm.explain.story.render import dated, render, render_ids, render_keys, render_owners
from kvsm.explain.story.restarts import survivors, told_process
from kvsm.explain.story.things import (
    NOT_PLANNED,
    NOT_THERE,
    BlockLife,
    KeyLife,
    Life,
    RequestLife,
    TransferLife,
)
from kvsm.explain.why.fates import Fates, describe_transfer, kind_of, made_room_for
from kvsm.ids import render_key, to_list
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState


class StoryLine(msgspec.Struct, frozen=True):
    """One event in the life of a thing.

    before, after: the thing's state; equal if the event did not change it.
    after_start_ns: time since the first event of the log (ns).
    gap_steps, gap_ns: engine steps and time (ns) since the previous line; 0 in the first line.
    waited: whether the thing waited for a copy between the previous line and this one.
    """

    event: int
    step: int
    wall_ns: int
    kind: str
    text: str
    before: str
    after: str
    after_start_ns: int
    gap_steps: int
    gap_ns: int
    waited: bool

    def told(self) -> str:
        """The line for people: when, what, and the state before and after."""
        change = self.before if self.before == self.after else f"{self.before} -> {self.after}"
        began_ns = self.wall_ns - self.after_start_ns
        return dated(self.event, self.step, self.wall_ns, began_ns, f"{self.text}  [{change}]")


class Story:
    """The lines of a thing's life, oldest first; none if no event of the log concerns it.

    Pass a `LogReader` to read gaps and a torn tail from it afterwards.
    """

    def __init__(self, log: str | os.PathLike[str] | LogReader, life: Life, trust: Trust) -> None:
        """Raises `LogError` if there is no log or no such slot, or if the log exceeds what `trust` allows."""
        self._reader = log if isinstance(log, LogReader) else LogReader(log)
        self._life, self._trust = life, trust
        config = self._reader.head.config
        trust.check(config, self._reader.directory)
        if isinstance(life, BlockLife) and life.slot >= config.host_blocks:
            slots = config.host_blocks
            raise LogError(f"{self._reader.directory}: there is no slot {life.slot}; the pool has {slots}")
        self._began_ns = 0
        self._before: StoryLine | None = None
        self._last: OffloadingEvent | None = None

    def __iter__(self) -> Iterator[StoryLine]:
        """Fold the log. Raises `IllegalTransition` or `InvalidEvent` for an event that cannot follow."""
        life, reader = self._life, self._reader
        fates = Fates(_missed_by(reader, life))
        with self._trust.guarded(reader.directory):
            for moment in walk(reader, self._trust):
                self._began_ns = moment.event.wall_ns if self._last is None else self._began_ns
                self._last = moment.event
                texts = _follow(life, fates, moment)
                if texts is not None:
                    self._before = self._line(moment.event, moment.event.kind, *texts)
                    yield self._before

    def end(self) -> StoryLine | None:
        """A closing line, with an empty kind, if the thing has not ended where the log ends; else None.

        Call it after the last line.
        """
        before, last = self._before, self._last
        if before is None or last is None or not self._life.is_open(before.after):
            return None
        text = f"the log ends here, and {self._life} has not ended"
        return self._line(last, "", text, before.after, before.after)

    def _line(self, event: OffloadingEvent, kind: str, text: str, was: str, is_now: str) -> StoryLine:
        before = self._before
        return StoryLine(
            event=event.seq,
            step=event.step,
            wall_ns=event.wall_ns,
            kind=kind,
            text=text,
            before=was,
            after=is_now,
            after_start_ns=event.wall_ns - self._began_ns,
            gap_steps=0 if before is None else event.step - before.step,
            gap_ns=0 if before is None else event.wall_ns - before.wall_ns,
            waited=before is not None and self._life.waits(before.after),
        )


def tell(
    log: str | os.PathLike[str] | LogReader,
    life: Life,
    *,
    allow_policies: Collection[str] = (),
    max_slots: int | None = None,
) -> Iterator[StoryLine]:
    """Yield the lines of a `Story`. allow_policies, max_slots: as in `Trust`. Raises as `Story` does."""
    yield from Story(log, life, Trust(allow_policies, max_slots))


def _missed_by(reader: LogReader, life: Life) -> Callable[[bytes], bool]:
    """Return a test for the keys that `Fates` must follow to explain the misses in this life."""
    if isinstance(life, KeyLife):
        return life.is_named
    if not isinstance(life, RequestLife):
        return lambda _: False
    missed = {
        event.missed
        for segment in reader.segments()
        for event in segment.events()
        if isinstance(event, ev.HitMatched) and event.request == life.name and event.missed is not None
    }
    return missed.__contains__


def _follow(life: Life, fates: Fates, moment: Moment) -> tuple[str, str, str] | None:
    """Fold the event. Returns (text, state before, state after); None: it does not concern the thing."""
    ledger, event, _ = moment
    found = concern(ledger, event)
    _refuse_unknown(ledger, event, found)
    slots = life.met_by(moment, found)
    text = before = ""
    if slots is not None:
        before = life.state(ledger)
        text = _TELLERS[type(event)](_Telling(moment, life, slots, fates), event)
    fates.before(moment, found)
    ended = ledger.apply(event)
    fates.after(moment, ended)
    if slots is None:
        return None
    if ended is not None and isinstance(event, ev.WorkerReported):
        outcome = _OUTCOMES.get((ended.direction, ended.state), "what the reset left is drained")
        text += f"; the last one: {outcome}"
    return text, before, _state_after(life, ledger, ended, before)


def _refuse_unknown(ledger: Ledger, event: OffloadingEvent, found: Concern) -> None:
    """Raise `InvalidEvent` if the event names a slot beyond the pool, or a store has not one slot per key."""
    slots = ledger.config.host_blocks
    if any(slot >= slots for slot in found.slots):
        raise InvalidEvent(event.seq, f"{event.kind} names slot {max(found.slots)}; the pool has {slots}")
    if isinstance(event, ev.StorePlanned) and len(event.keys) != len(to_list(event.slots)):
        raise InvalidEvent(event.seq, "a store names as many slots as keys")


def _state_after(life: Life, ledger: Ledger, ended: TransferRecord | None, before: str) -> str:
    """The thing's state after an event, also if the event ended it: the ledger no longer has it then."""
    after = life.state(ledger)
    if after == NOT_THERE != before:
        return RequestState.RELEASED.name
    if after == NOT_PLANNED != before:
        # A reset cancels plans and a restart ends all transfers, but `Ledger.apply` returns none of them.
        planned = before == TransferState.PLANNED.name
        state = TransferState.CANCELLED if planned else TransferState.LOST
        return state.name if ended is None else ended.state.name
    return after


_OUTCOMES = {
    (Direction.STORE, TransferState.COMPLETED): "stored, and can be matched",
    (Direction.LOAD, TransferState.COMPLETED): "loaded",
    (Direction.STORE, TransferState.FAILED): "failed, and nothing is stored",
    (Direction.LOAD, TransferState.FAILED): "failed, and what it read is void",
}
"""The text for the outcome of a transfer, once its last worker has reported."""


# What an event means for the thing: one function for each kind.


class _Telling(NamedTuple):
    """The arguments of the functions in `_TELLERS`.

    slots: the thing's slots that the event concerns; of a request or transfer: always empty.
    """

    moment: Moment
    life: Life
    slots: Sequence[int]
    fates: Fates

    @property
    def ledger(self) -> Ledger:
        """The ledger before the event is applied."""
        return self.moment.ledger

    @property
    def offered_before(self) -> bool:
        """Whether the thing is a request that has offered blocks, in the ledger before the event."""
        life = self.life
        request = self.ledger.requests.get(life.name) if isinstance(life, RequestLife) else None
        return request is not None and bool(request.offered)


def _by_its_fields(_telling: _Telling, event: OffloadingEvent) -> str:
    return render(event)


def _arrived(_telling: _Telling, event: ev.RequestArrived) -> str:
    what = f"begins, for copies to or from {event.target}" if event.target else "arrives"
    return f"request {event.request} {what}"


def _matched(telling: _Telling, event: ev.HitMatched) -> str:
    matched = to_list(event.slots)
    if telling.slots:
        place = matched.index(telling.slots[0]) + 1
        return f"request {event.request} matches it (block {place} of {len(matched)})"
    hits = f"matches {render_ids('slot', matched)}" if matched else "matches nothing"
    hits += _shares(event)
    if event.missed is None:
        return f"request {event.request} {hits}"
    why = telling.fates.why(telling.ledger, event.missed)
    return f"request {event.request} {hits}; it misses key {render_key(event.missed)}: {why}"


def _admitted(_telling: _Telling, event: ev.RequestAdmitted) -> str:
    again = " again" if event.resumed else ""
    ends = "" if event.missed is None else f"; what it had ends at key {render_key(event.missed)}"
    return f"request {event.request} is admitted{again}{_shares(event)}{ends}"


def _shares(event: ev.HitMatched | ev.RequestAdmitted) -> str:
    """How many blocks of the prompt the device and the host have; empty if the log has no such counts."""
    if event.asked is None:
        return ""
    if not event.asked and isinstance(event, ev.HitMatched) and event.slots:
        return ", and asks for nothing: it holds these blocks for another engine or a session"
    counts = ((event.on_device, "the device has"), (event.on_host, "the host serves"))
    parts = [f"{holder} {blocks}" for blocks, holder in counts if blocks is not None]
    return f" (of {event.asked} block{'' if event.asked == 1 else 's'} asked, {' and '.join(parts)})"


def _hint_answered(_telling: _Telling, event: ev.HintAnswered) -> str:
    whose = f"session {event.session}" if event.session else "no session"
    if event.outcome in _ANSWERS:
        why = f": {event.why}" if event.why else ""
        kept = f"; {event.lease} keeps {event.leased} of {event.asked} blocks" if event.lease else ""
        return f"the hint of request {event.request} for {whose} is {event.outcome}{why}{kept}"
    return f"the lease {event.lease} of {whose} ends with {event.leased} blocks: {event.outcome}"


_ANSWERS = (ev.HintOutcome.ACCEPTED, ev.HintOutcome.CLIPPED, ev.HintOutcome.REFUSED)


def _preempted(telling: _Telling, event: ev.RequestPreempted) -> str:
    again = "; its blocks are offered again" if telling.offered_before else ""
    return f"request {event.request} is preempted{_gives_back(telling)}{again}"


def _finished(telling: _Telling, event: ev.RequestFinished) -> str:
    return f"request {event.request} {'is aborted' if event.aborted else 'finishes'}{_gives_back(telling)}"


def _gives_back(telling: _Telling) -> str:
    return ", and gives its match back" if telling.slots else ""


def _offered(telling: _Telling, event: ev.BlocksOffered) -> str:
    """Which blocks the request offered or settled since its last offer, for each KV cache group.

    A block is settled if it is stored, is being stored, or will not be stored.
    """
    life, told = telling.life, []
    assert isinstance(life, RequestLife)
    for name, settled, offered in event.offers:
        if name != life.name:
            continue
        request, news = telling.ledger.requests.get(name), []
        starts = (request and request.settled) or (0,) * len(settled)
        for group, (start, end, last) in enumerate(zip(starts, settled, offered)):
            of_group = f" of group {group}" if len(settled) > 1 else ""
            if end < start:
                news.append(f"the store of block {end}{of_group} failed; it is to be offered again")
                continue
            news += [f"{_blocks(start, end)}{of_group} settled"] if end > start else []
            news += [f"{_blocks(end, last)}{of_group} offered, and not settled yet"] if last > end else []
        told.append(f"request {name}: {'; '.join(news) or 'no block is offered'}")
    return "; ".join(told)


def _skipped(telling: _Telling, event: ev.StoreSkipped) -> str:
    owners: Owners = event.owners
    keys: Sequence[bytes] = event.keys
    if isinstance(telling.life, RequestLife):
        keys = telling.life.share(owners, keys)
        owners = tuple(owner for owner in owners if owner[0] == telling.life.name)
    return f"offered by {render_owners(owners)}, not stored: {render_keys(keys)} ({event.reason})"


def _reset(telling: _Telling, event: ev.CacheReset) -> str:
    again = f"; the blocks of {telling.life} are offered again" if telling.offered_before else ""
    weights = "" if event.weights is None else f" with weights {event.weights or 'of no named version'}"
    return f"reset: epoch {event.epoch} begins{weights}{again}"


def _restarted(telling: _Telling, event: ev.Restarted) -> str:
    """What the restart keeps of the thing, and of the whole pool."""
    life, ledger, news = telling.life, telling.ledger, told_process(event.life, event.ended)
    if isinstance(life, RequestLife):
        return f"{news}, which does not know {life}: its client gets no answer"
    if isinstance(life, TransferLife):
        return f"{news}, and no rank reports {describe_transfer(ledger, life.id)} any more"
    kept = [slot for slot in telling.slots if ledger.readable(slot)]
    gone = [slot for slot in telling.slots if not ledger.readable(slot)]
    told = [f"{render_keys([ledger.key_of[slot] for slot in kept])} kept"] if kept else []
    told += [_not_kept(ledger, slot) for slot in gone]
    return f"{news}: {'; '.join(told)} (of the pool: {survivors(ledger).told()})"


def _not_kept(ledger: Ledger, slot: int) -> str:
    store = describe_transfer(ledger, ledger.generation[slot])
    key = render_key(ledger.key_of[slot])
    if ledger.index.get(ledger.key_of[slot]) != slot:
        return f"what slot {slot} held was void already, and the slot can be used again"
    return f"key {key} not kept, because {store} had not ended"


def _deferred(telling: _Telling, event: ev.RequestDeferred) -> str:
    waits_for = describe_transfer(telling.ledger, event.transfer)
    return f"request {event.request} waits for {waits_for}, until tick {event.until} at most"


def _evicted(telling: _Telling, event: ev.BlocksEvicted) -> str:
    cause, victims = made_room_for(telling.moment), to_list(event.slots)
    own = [slot for slot in telling.slots if slot in victims]
    if telling.slots and not own:
        return f"passed over by the eviction that makes room for {cause}"
    keys = render_keys([telling.ledger.key_of[slot] for slot in own or victims])
    what = keys if own else f"{render_ids('slot', victims)}, {keys},"
    return f"{what} evicted to make room for {cause}"


def _store_planned(telling: _Telling, event: ev.StorePlanned) -> str:
    slots, blocks, whose = to_list(event.slots), to_list(event.device_blocks), render_owners(event.owners)
    if telling.slots:
        place, chunk = slots.index(telling.slots[0]), telling.ledger.config.blocks_per_chunk
        source = event.source or render_ids("device block", blocks[place * chunk : (place + 1) * chunk])
        key = render_key(event.keys[place])
        return f"allocated for key {key}, from {source}, by store {event.seq} of {whose}"
    if isinstance(telling.life, RequestLife) and len(event.owners) > 1:
        whose += f" ({telling.life}: {render_keys(telling.life.share(event.owners, event.keys))})"
    where = f"copied from {event.source}" if event.source else render_ids("device block", blocks)
    return (
        f"store {event.seq} of {whose} is planned: {render_keys(event.keys)}, {where} to "
        f"{render_ids('slot', slots)}"
    )


def _load_planned(telling: _Telling, event: ev.LoadPlanned) -> str:
    loaded, blocks, parts = to_list(event.slots), to_list(event.device_blocks), to_list(event.parts)
    if event.voided:
        return f"request {event.request} cannot load: a block of its match was voided"
    if not telling.slots:
        what = f"{render_ids('part', parts)} of " if parts else ""
        what += render_ids("slot", loaded)
        blocks_told = event.target or render_ids("device block", blocks)
        return f"load {event.seq} of request {event.request} is planned: {what} to {blocks_told}"
    if telling.slots[0] not in loaded:
        return f"request {event.request} loads less than it matched, and gives this block back"
    place, chunk = loaded.index(telling.slots[0]), telling.ledger.config.blocks_per_chunk
    what, targets = "it", blocks[place * chunk : (place + 1) * chunk]
    if parts:
        own = [(part % chunk, block) for part, block in zip(parts, blocks) if part // chunk == place]
        what, targets = f"{render_ids('part', [part for part, _ in own])} of it", [block for _, block in own]
    where = f"for {event.target}" if event.target else f"into {render_ids('device block', targets)}"
    return f"load {event.seq} of request {event.request} will read {what} {where}"


def _submitted(telling: _Telling, event: ev.TransfersSubmitted) -> str:
    life, ledger = telling.life, telling.ledger

    def is_its(transfer: TransferRecord) -> bool:
        if isinstance(life, TransferLife):
            return transfer.id == life.id
        if isinstance(life, RequestLife):
            waiting = ledger.deferred.get(life.name)
            awaits = 0 if waiting is None else waiting.awaits
            return transfer.id == awaits or life.name in names_of(transfer.owners)
        return not set(to_list(transfer.slots)).isdisjoint(telling.slots)

    live = [ledger.transfers[id] for id in event.transfers if id in ledger.transfers]
    own = [describe_transfer(ledger, transfer.id) for transfer in live if is_its(transfer)]
    return f"submitted: {', '.join(own)}"


def _reported(telling: _Telling, event: ev.WorkerReported) -> str:
    how = "good" if event.good else f"failed ({event.error})" if event.error else "failed"
    return f"worker {event.worker} reports {describe_transfer(telling.ledger, event.transfer)}: {how}"


def _cancelled(telling: _Telling, event: ev.TransferCancelled) -> str:
    return f"{describe_transfer(telling.ledger, event.transfer)} is cancelled"


def _report_rejected(telling: _Telling, event: ev.ReportRejected) -> str:
    text = f"a report of worker {event.worker} on transfer {event.transfer} is rejected: {event.reason}"
    if event.reason is not ev.RejectReason.WORKER:
        return text
    workers = telling.ledger.config.workers
    return f"{text}; the configuration has {workers} worker{'s' if workers > 1 else ''}"


def _lost(telling: _Telling, event: ev.TransferLost) -> str:
    transfer = telling.ledger.transfers.get(event.transfer)
    if transfer is None:
        return render(event)
    memory = "slots" if kind_of(transfer) == "store" else "slots and device blocks"
    return (
        f"{describe_transfer(telling.ledger, event.transfer)} is given up: a worker has not reported since "
        f"tick {transfer.since}; its {memory} are never used again"
    )


def _blocks(start: int, end: int) -> str:
    """Name the blocks of a request from `start` to before `end`: `block 3`, `blocks 3..5`."""
    return f"block {start}" if end - start == 1 else f"blocks {start}..{end - 1}"


def _slow_hit(_telling: _Telling, event: ev.SlowHitFound) -> str:
    ahead = f" behind {event.blocks_ahead} of other loads" if event.blocks_ahead else ""
    end = "it computes them" if event.declined else "it loads them nevertheless, to measure a load"
    return (
        f"request {event.request}: loading {event.blocks} blocks{ahead} is expected to take "
        f"{event.load_us:,} us, and computing their {event.tokens} tokens {event.compute_us:,} us: {end}"
    )


_Teller = Callable[[_Telling, Any], str]

_TELLERS: dict[type[OffloadingEvent], _Teller] = dict.fromkeys(KINDS, _by_its_fields) | {
    ev.RequestArrived: _arrived,
    ev.RequestPreempted: _preempted,
    ev.RequestFinished: _finished,
    ev.HitMatched: _matched,
    ev.RequestAdmitted: _admitted,
    ev.HintAnswered: _hint_answered,
    ev.HitReleased: lambda _, event: f"request {event.request} gives its match back",
    ev.RequestDeferred: _deferred,
    ev.KeysRecalled: lambda _, event: f"{render_keys(event.keys)}: the policy remembers evicting it",
    ev.BlocksEvicted: _evicted,
    ev.StorePlanned: _store_planned,
    ev.StoreSkipped: _skipped,
    ev.LoadPlanned: _load_planned,
    ev.TransfersSubmitted: _submitted,
    ev.TransferCancelled: _cancelled,
    ev.WorkerReported: _reported,
    ev.ReportRejected: _report_rejected,
    ev.TransferLost: _lost,
    ev.BlocksTouched: lambda *_: "used without a load: the device had it too",
    ev.FlushRequested: lambda _, event: f"the engine waits for {render_ids('transfer', event.transfers)}",
    ev.CacheReset: _reset,
    ev.Restarted: _restarted,
    ev.Ticked: lambda _, event: f"tick {event.tick}: it has waited long enough",
    ev.BlocksOffered: _offered,
    ev.OffersCounted: lambda _, event: f"{render_keys(event.keys)}: offered once more",
    ev.SlowHitFound: _slow_hit,
}
"""The function that makes the text of each kind of event; by default the event's fields are shown."""
