"""One pass over a log: each event becomes rows of the tables in `row_kinds.py`.

`Extractor.follow` applies an event to the ledger and notes what it means. A row is written when none of its
values can change any more. `write_unfinished` writes interim rows for open requests, transfers and blocks. So
a live log can be read at any time, and reading can resume later.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from kvsm import events as ev
from kvsm.core.ledger import Changes, Ledger, TransferRecord, follow
from kvsm.errors import InvalidEvent
from kvsm.events import LOAD, STORE, OffloadingEvent, Owners
from kvsm.explain.story.restarts import Survivors, survivors
from kvsm.explain.tables.block_lives import BlockLives, LifeEnd, SavedLives
from kvsm.explain.tables.open_rows import CUT_OFF, Flight, Moved, RequestInProgress, awaited
from kvsm.explain.tables.row_kinds import (
    SAMPLE_EVENTS,
    EventRow,
    Gone,
    LookupRow,
    OccupancyRow,
    RejectionRow,
    ResetRow,
    RestartRow,
    SkipRow,
)
from kvsm.explain.tables.sqlite_tables import TableWriter
from kvsm.ids import count
from kvsm.states.block import BlockState
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState
from kvsm.states.words import STATE_MASK


class SavedExtractor(msgspec.Struct):
    """The state of an `Extractor` as data, without its ledger."""

    lives: SavedLives
    requests: list[RequestInProgress]
    over: list[RequestInProgress]
    flights: list[Flight]
    last: EventRow
    interim: list[int]


class Extractor:
    """Turns events into rows.

    tables: the writer that receives the rows. The caller calls its `flush` now and then.
    saved, ledger: to extend existing tables: the result of `save`, and the ledger at that moment; else None.

    Raises `ValueError` if `saved` and `ledger` do not belong together.
    """

    def __init__(
        self, tables: TableWriter, saved: SavedExtractor | None = None, ledger: Ledger | None = None
    ) -> None:
        self._tables, self._ledger = tables, ledger
        self._lives = BlockLives(tables, None if saved is None else saved.lives)
        self._requests: dict[str, RequestInProgress] = {}
        """Requests that the ledger holds, without copies to another tier."""
        self._over: dict[tuple[str, int], RequestInProgress] = {}
        """Released requests with stores still live, by name and number of the event of arrival."""
        self._copies: set[str] = set()
        """Copies to another tier. The ledger holds them as requests; here only their transfers get rows."""
        self._flights: dict[int, Flight] = {}
        self._last = EventRow(0, 0, 0, "")
        self._survivors: Survivors | None = None
        """What the restart being followed leaves of the pool. None during any other event."""
        self._interim: list[int] = []
        """The runs of blocks with an interim row. `go_on` deletes these rows."""
        if saved is not None and ledger is not None:
            self._requests = {one.request: one for one in saved.requests}
            self._over = {(one.request, one.arrived.event): one for one in saved.over}
            self._flights = {one.planned.event: one for one in saved.flights}
            self._last, self._interim = saved.last, saved.interim
            self._copies = _copies_in(ledger)
            same_requests = self._requests.keys() | self._copies == ledger.requests.keys()
            same_transfers = self._flights.keys() == ledger.transfers.keys()
            same_event = self._last.event == ledger.seq
            if not (same_requests and same_transfers and same_event and self._lives.fits(ledger)):
                raise ValueError("the saved extractor is not of this ledger")

    def save(self) -> SavedExtractor:
        """Return the extractor's state as data. The rows must have been flushed."""
        return SavedExtractor(
            self._lives.save(),
            list(self._requests.values()),
            list(self._over.values()),
            list(self._flights.values()),
            self._last,
            self._interim,
        )

    @property
    def ledger(self) -> Ledger:
        """The ledger after the last event."""
        assert self._ledger is not None
        return self._ledger

    def follow(self, ledger: Ledger, event: OffloadingEvent) -> None:
        """Apply the next event to its ledger, and note what it means.

        ledger: the same object for each event, but a new one at the start of the log and after a gap.

        Raises `IllegalTransition` or `InvalidEvent`, with nothing noted, if the ledger refuses the event.
        """
        if ledger is not self._ledger:
            self._begin(ledger)
        kind = type(event)
        self._survivors = survivors(ledger) if kind is ev.Restarted else None
        changes = follow(ledger, event)
        if kind is not ev.StorePlanned:
            self._lives.store_follows(None)
        take_facts = FACTS.get(kind)
        if take_facts is not None:
            take_facts(self, event)
        if changes.requests or changes.ended or changes.submitted:
            self._take_changes(event, changes)
        self._last = EventRow(event.seq, event.step, event.wall_ns, kind.__name__)
        self._tables.add_event(self._last)
        if not event.seq % SAMPLE_EVENTS:
            self._tables.add("occupancy", occupancy(self.ledger, self._last))

    def _take_changes(self, event: OffloadingEvent, changes: Changes) -> None:
        """Note the changes that events of several kinds make: submissions, ends, states of requests."""
        for transfer in changes.submitted:
            flight = self._flights[transfer]
            flight.sent, flight.submitted = True, _at(event)
        for record in changes.ended:
            self._end(record, event)
        for name in changes.requests:
            self._settle(name, event)

    def write_unfinished(self) -> None:
        """Write interim rows for open requests, transfers and blocks. Call `go_on` before the next event."""
        if self._ledger is None:
            return
        workers, add = self._ledger.config.workers, self._tables.add
        for request in chain(self._requests.values(), self._over.values()):
            add("requests", request.row(self._last.wall_ns))
        for request in self._requests.values():
            add("request_states", request.stay(None))
        for flight in self._flights.values():
            add("transfers", flight.row(workers, None, None))
            for copy in flight.silent_copies(workers):
                add("copies", copy)
        for run in self._lives.living(self._ledger):
            self._interim.append(run.life)
            add("block_runs", run)
        if self._last.event % SAMPLE_EVENTS:
            add("occupancy", occupancy(self.ledger, self._last))
        self._tables.flush()

    def go_on(self) -> None:
        """Delete the interim rows of `write_unfinished` that no later row would replace."""
        lives = [(life,) for life in self._interim]
        self._tables.connection.executemany("DELETE FROM block_runs WHERE life = ?", lives)
        self._interim = []
        if self._last.event % SAMPLE_EVENTS:
            self._tables.connection.execute("DELETE FROM occupancy WHERE event = ?", (self._last.event,))

    # The start of the log, and the first event after a gap.

    def _begin(self, ledger: Ledger) -> None:
        before, self._ledger = self._ledger, ledger
        if before is not None and before.config != ledger.config:
            raise InvalidEvent(ledger.seq + 1, "the log goes on behind a gap with another configuration")
        self._lives.begin(ledger, before)
        gap = Moved(ledger.seq)
        for name in [name for name in self._requests if name not in ledger.requests]:
            request = self._requests[name]
            request.finished = request.finished or gap
            self._move(request, int(RequestState.RELEASED), None, gap)
        self._copies = _copies_in(ledger)
        for name, record in ledger.requests.items():
            if name in self._copies:
                continue
            state = record.word & STATE_MASK
            awaits = awaited(record)
            known = self._requests.get(name)
            if known is None:
                self._requests[name] = RequestInProgress(name, gap, state, gap, awaits)
            elif known.state != state:
                self._move(known, state, awaits, gap)
        for transfer in [one for one in self._flights if one not in ledger.transfers]:
            self._land(self._flights.pop(transfer), None, gap)
        for transfer, found in ledger.transfers.items():
            if transfer not in self._flights:
                self._flights[transfer] = self._found_in_flight(found)

    def _found_in_flight(self, record: TransferRecord) -> Flight:
        """Return the flight of a transfer whose plan was not read: it stands before the log, or in a gap."""
        store = record.direction is STORE
        flight = self._flight(Moved(record.id), store, record.owners, len(record.slots))
        flight.sent = record.state is not TransferState.PLANNED
        flight.reported = record.reported
        flight.elsewhere = "elsewhere" if store and not len(record.device_blocks) else None
        return flight

    # Requests.

    def _request(self, event: Any) -> RequestInProgress:
        """Return the event's request. A request that is not known yet is added."""
        name: str = event.request
        request = self._requests.get(name)
        if request is None:
            at = _at(event)
            request = self._requests[name] = RequestInProgress(name, at, int(RequestState.NEW), at)
        return request

    def _settle(self, name: str, event: OffloadingEvent) -> None:
        """Note the state that the request now has in the ledger. Ignore copies to another tier."""
        request, record = self._requests.get(name), self.ledger.requests.get(name)
        if request is None:
            return
        state = int(RequestState.RELEASED) if record is None else record.word & STATE_MASK
        if state != request.state:
            awaits = None if record is None else awaited(record)
            self._move(request, state, awaits, _at(event))

    def _move(self, request: RequestInProgress, state: int, awaits: int | None, at: Moved) -> None:
        """End the request's stay in its state, and begin its stay in `state`, unless that is RELEASED."""
        name = request.request
        if request.since.event != at.event:
            self._tables.add("request_states", request.stay(at))
        request.move(state, awaits, at)
        if state == RequestState.RELEASED:
            del self._requests[name]
            if request.stores:
                self._over[name, request.arrived.event] = request
            else:
                self._tables.add("requests", request.row(0))

    def _arrived(self, event: ev.RequestArrived) -> None:
        if event.target:
            self._copies.add(event.request)
        else:
            self._request(event)

    def _preempted(self, event: ev.RequestPreempted) -> None:
        self._request(event).preemptions += 1

    def _finished(self, event: ev.RequestFinished) -> None:
        if event.request in self._copies:
            self._copies.remove(event.request)
            return
        request = self._request(event)
        request.finished, request.aborted = _at(event), event.aborted
        request.hand_over = event.hand_over or None

    def _matched(self, event: ev.HitMatched) -> None:
        if event.request in self._copies:
            return
        request = self._request(event)
        if event.slots and event.asked == 0:
            # The request holds these blocks for another engine or a session, and has no prompt of its own.
            request.held = count(event.slots)
        self._lives.matched(event)
        self._answer(request, event, count(event.slots), admitted=None, resumed=False)

    def _hint_answered(self, event: ev.HintAnswered) -> None:
        lease = self._requests.get(event.lease)
        if lease is not None:
            lease.session = event.session

    def _admitted(self, event: ev.RequestAdmitted) -> None:
        request = self._request(event)
        is_later = request.state == RequestState.FINISHED
        if is_later:
            # While an earlier request of this name loads, only admissions of the later one are logged.
            at = _at(event)
            request = RequestInProgress(event.request, at, int(RequestState.RELEASED), at, finished=at)
        if not event.resumed:
            request.asked, request.on_device, request.on_host = event.asked, event.on_device, event.on_host
        self._use_answer(request, event)
        if is_later and not event.resumed:
            self._tables.add("requests", request.row(0))

    def _use_answer(self, request: RequestInProgress, event: ev.RequestAdmitted) -> None:
        """Write the row of the lookup answer that the request was admitted with, logged before or not."""
        slots = len(self.ledger.requests[event.request].pins) if event.on_host != 0 else 0
        answer, request.answer = request.answer, None
        missed = None if event.missed is None else event.missed.hex()
        if answer is None or (answer.hit_slots, answer.missed) != (slots, missed):
            # The request was admitted with a later answer than the last logged one.
            self._answer(request, event, slots, admitted=event.seq, resumed=event.resumed)
            request.answer = request.declined = None
            return
        used = msgspec.structs.replace(
            answer,
            asked=event.asked,
            on_device=event.on_device,
            on_host=event.on_host,
            admitted=event.seq,
            resumed=event.resumed,
        )
        self._tables.add("lookups", used)
        request.declined = None

    def _slow_hit(self, event: ev.SlowHitFound) -> None:
        if event.declined:
            declined = event.seq, event.tokens, event.load_us, event.compute_us
            self._request(event).declined = declined

    def _answer(
        self,
        request: RequestInProgress,
        event: ev.HitMatched | ev.RequestAdmitted,
        slots: int,
        *,
        admitted: int | None,
        resumed: bool,
    ) -> None:
        """Add a row for the answer to a lookup."""
        request.lookups += 1
        declined = request.declined if slots == 0 and event.missed is None else None
        request.answer = LookupRow(
            event.seq,
            event.step,
            event.wall_ns,
            event.request,
            event.asked,
            event.on_device,
            event.on_host,
            slots,
            admitted,
            resumed,
            None if event.missed is None else event.missed.hex(),
            *self._lives.missed(self.ledger, event),
            *(declined or ()),
        )
        self._tables.add("lookups", request.answer)

    # Blocks.

    def _evicted(self, event: ev.BlocksEvicted) -> None:
        self._lives.evicted(self.ledger, event)

    def _skipped(self, event: ev.StoreSkipped) -> None:
        self._lives.skipped(event)
        names, reason = _names(event.owners), event.reason.value
        row = SkipRow(event.seq, event.step, event.wall_ns, names, len(event.keys), reason)
        self._tables.add("skips", row)

    # Transfers.

    def _flight(self, planned: Moved, store: bool, owners: Owners, slots: int) -> Flight:
        known = [(name, self._requests[name], blocks) for name, blocks in owners if name in self._requests]
        shares = tuple([(name, request.arrived.event, blocks) for name, request, blocks in known])
        for _, request, _ in known if store else ():
            request.stores += 1
        return Flight(planned, store, _names(owners), shares, slots)

    def _store_planned(self, event: ev.StorePlanned) -> None:
        flight = self._flight(_at(event), True, event.owners, count(event.slots))
        flight.elsewhere = event.source or None
        self._flights[event.seq] = flight
        self._lives.planned(event, flight.requests)

    def _load_planned(self, event: ev.LoadPlanned) -> None:
        if not event.voided:
            slots = count(event.slots)
            flight = self._flight(_at(event), False, ((event.request, slots),), slots)
            flight.elsewhere = event.target or None
            self._flights[event.seq] = flight
        if event.request in self._copies:
            return
        request = self._request(event)
        request.loads += 1
        request.failed_loads += event.voided

    def _flushed(self, event: ev.FlushRequested) -> None:
        for transfer in event.transfers:
            self._flights[transfer].waited_for += 1

    def _reported(self, event: ev.WorkerReported) -> None:
        flight = self._flights[event.transfer]
        flight.reported |= 1 << event.worker
        self._tables.add("copies", flight.copy(event.worker, event))

    def _end(self, record: TransferRecord, event: OffloadingEvent) -> None:
        """Note the end of a transfer, and what it means for the blocks: stored, or gone."""
        flight = self._flights.pop(record.id, None)
        if flight is None:
            return  # A restart has cut the transfer off.
        why = _GONE.get((record.state, record.direction))
        if why is not None:
            end = LifeEnd(event.seq, event.wall_ns, why, record.id, flight.requests)
            self._lives.gone(self.ledger, record.slots, end)
        elif record.state is TransferState.COMPLETED and flight.store:
            self._lives.stored(record.id, event.seq, event.wall_ns)
        self._land(flight, record.state.name.lower(), _at(event))

    def _land(self, flight: Flight, outcome: str | None, at: Moved) -> None:
        """Write the rows of a transfer that has ended. outcome: None if the log does not show it."""
        workers = self.ledger.config.workers
        for copy in flight.silent_copies(workers):
            self._tables.add("copies", copy)
        self._tables.add("transfers", flight.row(workers, outcome, at))
        completed, failed = outcome == "completed", outcome not in ("completed", CUT_OFF, None)
        for name, arrived, slots in flight.owners:
            request = self._requests.get(name)
            if request is None or request.arrived.event != arrived:
                request = self._over.get((name, arrived))
            if request is None:
                continue
            if not flight.store:
                request.loaded += slots if completed else 0
                request.failed_loads += failed
                continue
            request.stored += slots if completed else 0
            request.stores -= 1
            if not request.stores and request.state == RequestState.RELEASED:
                del self._over[name, arrived]
                self._tables.add("requests", request.row(0))

    def _rejected(self, event: ev.ReportRejected) -> None:
        row = RejectionRow(
            event.seq,
            event.step,
            event.wall_ns,
            event.transfer,
            event.worker,
            event.good,
            event.reason.value,
        )
        self._tables.add("rejections", row)

    # The pool.

    def _reset(self, event: ev.CacheReset) -> None:
        ledger = self.ledger
        keys = self._lives.all_gone(ledger, LifeEnd(event.seq, event.wall_ns, Gone.RESET))
        cancelled = [transfer for transfer in self._flights if transfer not in ledger.transfers]
        abandoned = [one for one in ledger.transfers.values() if one.epoch == event.epoch - 1]
        ended = len(cancelled), len(abandoned)
        row = ResetRow(event.seq, event.step, event.wall_ns, event.epoch, keys, *ended, event.weights)
        self._tables.add("resets", row)

    def _restarted(self, event: ev.Restarted) -> None:
        """Cut off all requests and transfers that the last process left open."""
        self._copies.clear()
        ended_ns = self._last.wall_ns or event.wall_ns
        at, left = Moved(event.seq, event.step, ended_ns), self._survivors
        assert left is not None
        row = RestartRow(
            event.seq,
            event.step,
            event.wall_ns,
            event.life,
            event.ended or None,
            left.kept,
            left.storing,
            left.planned,
            left.freed,
            len(self._flights),
            len(self._requests),
        )
        self._tables.add("restarts", row)
        self._lives.cut_off(self.ledger, event.seq, ended_ns)
        for transfer in list(self._flights):
            self._land(self._flights.pop(transfer), CUT_OFF, at)
        for request in list(self._requests.values()):
            request.cut_off = request.finished is None
            request.finished = request.finished or at
            self._move(request, int(RequestState.RELEASED), None, at)


def occupancy(ledger: Ledger, last: EventRow) -> OccupancyRow:
    """Return the row of the pool's occupancy after the event `last`."""
    free, idle = len(ledger.free), ledger.evictable()
    transfers = ledger.transfers.values()
    loads = sum([one.direction is LOAD for one in transfers])
    held = _held(ledger)
    return OccupancyRow(
        last.event,
        last.step,
        last.wall_ns,
        free,
        idle,
        ledger.config.host_blocks - free - idle - sum(held),
        *held,
        len(transfers) - loads,
        loads,
        len(ledger.requests),
        len(ledger.deferred),
    )


def _held(ledger: Ledger) -> tuple[int, int, int]:
    """Return the number of slots that are (being stored, quarantined, retired)."""
    counts = np.bincount(ledger.blocks.view & STATE_MASK, minlength=len(BlockState)).tolist()
    storing = counts[BlockState.ALLOCATED] + counts[BlockState.STORING]
    return storing, counts[BlockState.QUARANTINED], counts[BlockState.RETIRED]


def _copies_in(ledger: Ledger) -> set[str]:
    """Return the names of the ledger's requests that are copies to another tier."""
    return {name for name, request in ledger.requests.items() if request.target}


def _at(event: OffloadingEvent) -> Moved:
    return Moved(event.seq, event.step, event.wall_ns)


def _names(owners: Owners) -> str:
    """Return the requests among the owners, each once, as a JSON list."""
    return msgspec.json.encode(list(dict.fromkeys([name for name, _ in owners]))).decode()


_GONE = {
    (TransferState.FAILED, STORE): Gone.STORE_FAILED,
    (TransferState.FAILED, LOAD): Gone.LOAD_FAILED,
    (TransferState.CANCELLED, STORE): Gone.CANCELLED,
    (TransferState.LOST, STORE): Gone.LOST,
    (TransferState.LOST, LOAD): Gone.LOST,
}
"""End of a transfer -> why the keys of its slots are gone. After any other end the keys remain."""

FACTS: dict[type[OffloadingEvent], Callable[[Extractor, Any], object]] = {
    ev.RequestArrived: Extractor._arrived,
    ev.RequestPreempted: Extractor._preempted,
    ev.RequestFinished: Extractor._finished,
    ev.HitMatched: Extractor._matched,
    ev.RequestAdmitted: Extractor._admitted,
    ev.HintAnswered: Extractor._hint_answered,
    ev.RequestDeferred: Extractor._request,
    ev.SlowHitFound: Extractor._slow_hit,
    ev.BlocksEvicted: Extractor._evicted,
    ev.StorePlanned: Extractor._store_planned,
    ev.StoreSkipped: Extractor._skipped,
    ev.LoadPlanned: Extractor._load_planned,
    ev.WorkerReported: Extractor._reported,
    ev.ReportRejected: Extractor._rejected,
    ev.FlushRequested: Extractor._flushed,
    ev.CacheReset: Extractor._reset,
    ev.Restarted: Extractor._restarted,
}
"""The method that notes what is specific to a kind of event. It runs after the ledger has applied the event,
and before `_take_changes`. Every event also gets a row in the table `events`."""
