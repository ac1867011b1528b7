"""What is open where a log ends: requests, copies, waits and plans without an end; and how the engine ended.

    ledger = rebuild("log").ledger
    found = unfinished_at_end(LogReader("log"), ledger, condition)
    found.finished          # False if anything is open, or if the engine did not close its log
    end_rows(found)         # the same for people

The ledger knows what is open. The events say since when. `beginnings` reads the log once more, without a
fold, and only if something is open. A caller that has an index fills `Beginnings` from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from kvsm import events as ev
from kvsm.core.ledger import Ledger, RequestRecord, TransferRecord
from kvsm.core.log import LogEnd, LogReader, told_stop
from kvsm.core.log.fold import LogCondition
from kvsm.events import KINDS, OffloadingEvent
from kvsm.explain.story.concern import names_of
from kvsm.explain.story.render import render_requests
from kvsm.explain.story.times import after_start, duration
from kvsm.explain.why.fates import kind_of
from kvsm.states.block import BlockState
from kvsm.states.lease import LeaseState
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState
from kvsm.states.words import STATE_MASK

MOST_OPEN = 5
"""Things of one sort that `end_rows` names."""


class Beginning(msgspec.Struct, frozen=True):
    """An event that something began with: its number and its wall time (Unix time, ns)."""

    event: int
    wall_ns: int


class Beginnings(msgspec.Struct):
    """Since when open things are open. What the kept part of a log does not tell is missing.

    began_ns, ended_ns: wall time of the first and the last event.
    requests: request -> its arrival.
    deferred: request -> since when it waits.
    planned, submitted, flushed: transfer -> when it was planned, left for the workers, was waited for.
    """

    began_ns: int = 0
    ended_ns: int = 0
    requests: dict[str, Beginning] = {}
    deferred: dict[str, Beginning] = {}
    planned: dict[int, Beginning] = {}
    submitted: dict[int, Beginning] = {}
    flushed: dict[int, Beginning] = {}


class UnfinishedRequest(msgspec.Struct, frozen=True):
    """A request that never ended.

    state: where it is. FINISHED: the engine ended it, and its load has not ended.
    since: its arrival; None: the log does not tell.
    """

    request: str
    state: str
    since: Beginning | None


class UnfinishedCopy(msgspec.Struct, frozen=True):
    """A submitted transfer that some worker has not reported.

    requests: whose it is. missing: the ranks that have not reported.
    abandoned: a reset came while it was in flight.
    """

    transfer: int
    direction: str
    requests: tuple[str, ...]
    missing: tuple[int, ...]
    abandoned: bool
    since: Beginning | None


class UnfinishedWait(msgspec.Struct, frozen=True):
    """Somebody waits for a transfer.

    request: None: the engine itself waits (a flush).
    until: the tick at which the wait ends without the transfer; None: there is no such tick.
    """

    request: str | None
    transfer: int
    until: int | None
    since: Beginning | None


class UnfinishedPlan(msgspec.Struct, frozen=True):
    """A transfer that was planned and never submitted. requests: whose it is."""

    transfer: int
    direction: str
    requests: tuple[str, ...]
    since: Beginning | None


class Unfinished(msgspec.Struct, frozen=True, kw_only=True):
    """What is open where a log ends.

    event, tick: the last event, and the tick there.
    began_ns, ended_ns: wall time of the first and the last event; 0 if nothing is open.
    engine: how the log ends. error: the error that the engine closed it with.
    stopped_by: as in `LogCondition`.
    read_blocks, written_blocks: device blocks that stores read and loads write; None: not told.
    retired_blocks, retired_slots: memory that is never used again, because a copy was lost.
    """

    event: int
    tick: int
    began_ns: int
    ended_ns: int
    engine: LogEnd
    error: str | None
    stopped_by: str
    requests: tuple[UnfinishedRequest, ...]
    copies: tuple[UnfinishedCopy, ...]
    waits: tuple[UnfinishedWait, ...]
    plans: tuple[UnfinishedPlan, ...]
    read_blocks: int | None
    written_blocks: int | None
    retired_blocks: int
    retired_slots: int

    @property
    def nothing_open(self) -> bool:
        """Whether nothing waits for an end. Memory lost with a copy is no open business: it was given up."""
        held = self.read_blocks or self.written_blocks
        return not (self.requests or self.copies or self.waits or self.plans or held)

    @property
    def finished(self) -> bool:
        """Whether nothing is open and the engine closed its log without an error."""
        return self.nothing_open and self.engine is LogEnd.CLOSED


def unfinished_at_end(reader: LogReader, ledger: Ledger, condition: LogCondition) -> Unfinished:
    """What is open in `ledger`, the state after the last event of the log.

    condition: of a reader that has read all of the log.

    Raises `LogError` if the log cannot be read again.
    """
    busy = ledger.requests or ledger.transfers
    return unfinished_in(ledger, condition, beginnings(reader, ledger) if busy else Beginnings())


def unfinished_in(ledger: Ledger, condition: LogCondition, since: Beginnings) -> Unfinished:
    """The same, if it is known already since when things are open.

    In the order in which they began, by name where the log does not tell: a ledger that was restored has
    another order in memory than one that has followed the events.
    """
    leases = (ledger.leases.view & STATE_MASK).tolist()
    slots = (ledger.blocks.view & STATE_MASK).tolist()
    transfers = [ledger.transfers[id] for id in sorted(ledger.transfers)]
    requests = sorted(ledger.requests.values(), key=partial(_place, since))
    return Unfinished(
        event=ledger.seq,
        tick=ledger.tick,
        began_ns=since.began_ns,
        ended_ns=since.ended_ns,
        engine=condition.end,
        error=condition.error,
        stopped_by=condition.stopped_by,
        requests=tuple(
            UnfinishedRequest(one.name, one.state.name, since.requests.get(one.name)) for one in requests
        ),
        copies=tuple(
            UnfinishedCopy(
                one.id,
                kind_of(one),
                tuple(names_of(one.owners)),
                tuple(rank for rank in range(ledger.config.workers) if not one.reported >> rank & 1),
                one.state is TransferState.ABANDONED,
                since.submitted.get(one.id),
            )
            for one in transfers
            if one.state is not TransferState.PLANNED
        ),
        waits=tuple(_waits(requests, transfers, since)),
        plans=tuple(
            UnfinishedPlan(one.id, kind_of(one), tuple(names_of(one.owners)), since.planned.get(one.id))
            for one in transfers
            if one.state is TransferState.PLANNED
        ),
        read_blocks=leases.count(LeaseState.READING),
        written_blocks=leases.count(LeaseState.WRITING),
        retired_blocks=leases.count(LeaseState.RETIRED),
        retired_slots=slots.count(BlockState.RETIRED),
    )


def _place(since: Beginnings, request: RequestRecord) -> tuple[int, str]:
    arrival = since.requests.get(request.name)
    return 0 if arrival is None else arrival.event, request.name


def _waits(
    requests: Sequence[RequestRecord], transfers: Sequence[TransferRecord], since: Beginnings
) -> Iterator[UnfinishedWait]:
    for request in requests:
        if request.state is RequestState.DEFERRED:
            began = since.deferred.get(request.name)
            yield UnfinishedWait(request.name, request.awaits, request.patience, began)
        elif request.state is RequestState.LOADING:
            yield UnfinishedWait(request.name, request.load, None, since.planned.get(request.load))
    for one in transfers:
        if one.flush:
            yield UnfinishedWait(None, one.id, None, since.flushed.get(one.id))


# Since when.


def beginnings(reader: LogReader, ledger: Ledger) -> Beginnings:
    """Since when the things are open that `ledger` holds. Reads the log up to the ledger's event."""
    search, began = _Search(ledger), False
    found = search.found
    for segment in reader.segments():
        for event in segment.events():
            if event.seq > ledger.seq:
                return found
            if not began:
                found.began_ns, began = event.wall_ns, True
            found.ended_ns = event.wall_ns
            note = _NOTES[type(event)]
            if note is not None:
                note(search, event)
    return found


class _Search:
    """What was found so far. over: requests that have ended once; their names may be in use again."""

    def __init__(self, ledger: Ledger) -> None:
        self.found = Beginnings()
        self._requests, self._transfers = ledger.requests, ledger.transfers
        self._over: set[str] = set()

    def request(self, event: ev.RequestArrived | ev.HitMatched | ev.RequestDeferred) -> None:
        name = event.request
        if name in self._requests and (name not in self.found.requests or name in self._over):
            self.found.requests[name] = _begins(event)
            self._over.discard(name)

    def deferred(self, event: ev.RequestDeferred) -> None:
        self.request(event)
        if event.request in self._requests:
            self.found.deferred[event.request] = _begins(event)

    def finish(self, event: ev.RequestFinished) -> None:
        self._over.add(event.request)

    def restart(self, _event: ev.Restarted) -> None:
        self._over.update(self.found.requests)

    def plan(self, event: ev.StorePlanned | ev.LoadPlanned) -> None:
        if event.seq in self._transfers:
            self.found.planned[event.seq] = _begins(event)

    def submitted(self, event: ev.TransfersSubmitted) -> None:
        for id in self._transfers.keys() & set(event.transfers):
            self.found.submitted[id] = _begins(event)

    def flush(self, event: ev.FlushRequested) -> None:
        for id in self._transfers.keys() & set(event.transfers):
            self.found.flushed.setdefault(id, _begins(event))


def _begins(event: OffloadingEvent) -> Beginning:
    return Beginning(event.seq, event.wall_ns)


_NOTES: dict[type[OffloadingEvent], Callable[[_Search, Any], None] | None] = dict.fromkeys(KINDS) | {
    ev.RequestArrived: _Search.request,
    ev.HitMatched: _Search.request,
    ev.RequestDeferred: _Search.deferred,
    ev.RequestFinished: _Search.finish,
    ev.StorePlanned: _Search.plan,
    ev.LoadPlanned: _Search.plan,
    ev.TransfersSubmitted: _Search.submitted,
    ev.FlushRequested: _Search.flush,
    ev.Restarted: _Search.restart,
}
"""What each kind tells of a beginning. None: nothing."""


# In words.

Rows = list[tuple[str, str]]
"""What a row is about, and its text. A row that goes on with the one above has no name."""


def end_rows(found: Unfinished) -> Rows:
    """What is open at the end, in words. The first row is the engine's."""
    rows = [("engine", _engine(found))]
    rows += _sort("requests", "all ended", "never ended", [_request(found, one) for one in found.requests])
    not_reported = f"not reported ({_by_rank(found)})"
    rows += _sort("copies", "all reported", not_reported, [_copy(found, one) for one in found.copies])
    rows += _sort("waits", "none is open", "still open", [_wait(found, one) for one in found.waits])
    rows += _sort("plans", "all submitted", "never submitted", [_plan(found, one) for one in found.plans])
    if found.read_blocks is not None and found.written_blocks is not None:
        rows.append(("device blocks", _held(found.read_blocks, found.written_blocks)))
    if found.retired_blocks or found.retired_slots:
        lost = f"{found.retired_slots:,} slots, {found.retired_blocks:,} device blocks: a copy was lost"
        rows.append(("never used again", lost))
    return rows


ENGINE_ENDS = {
    LogEnd.NOT_REACHED: "the log was not read to its end",
    LogEnd.OPEN: "it was killed or still runs, or the end of the log is missing",
    LogEnd.BROKEN: "its end is not known: a write of the log failed",
    LogEnd.CLOSED: "it closed the log",
    LogEnd.STOPPED: "it stopped with an error",
}
"""What the end of a log tells of the engine."""


def engine_end(end: LogEnd, stopped_by: str) -> str:
    """What the end of a log tells of its engine. stopped_by: as in `LogCondition`."""
    return told_stop(stopped_by) if stopped_by else ENGINE_ENDS[end]


def _engine(found: Unfinished) -> str:
    text = engine_end(found.engine, found.stopped_by)
    return text if found.error is None else f"{text}: {found.error}"


def _sort(name: str, good: str, bad: str, told: list[str]) -> Rows:
    if not told:
        return [(name, good)]
    more = len(told) - MOST_OPEN
    shown = told[:MOST_OPEN] + ([f"... and {more:,} more"] if more > 0 else [])
    return [(name, f"{len(told):,} {bad}"), *(("", one) for one in shown)]


def _request(found: Unfinished, one: UnfinishedRequest) -> str:
    state = "FINISHED, and its load has not ended" if one.state == RequestState.FINISHED.name else one.state
    return f"request {one.request}: {state}, arrived {_when(found, one.since)}"


def _copy(found: Unfinished, one: UnfinishedCopy) -> str:
    ranks = f"worker{'s' if len(one.missing) > 1 else ''} {', '.join(map(str, one.missing))}"
    reset = ", abandoned by a reset" if one.abandoned else ""
    what = f"{one.direction} {one.transfer} of {render_requests(one.requests)}{reset}"
    return f"{what}: {ranks}, submitted {_when(found, one.since)}"


def _by_rank(found: Unfinished) -> str:
    """`worker 1: 94`: how many copies each rank has not reported, the worst first."""
    missing = Counter(rank for one in found.copies for rank in one.missing)
    told = [f"worker {rank}: {count:,}" for rank, count in missing.most_common(MOST_OPEN)]
    return ", ".join(told) + (", ..." if len(missing) > MOST_OPEN else "")


def _wait(found: Unfinished, one: UnfinishedWait) -> str:
    who = "the engine (a flush)" if one.request is None else f"request {one.request}"
    until = "" if one.until is None else f", until tick {one.until:,} at most (it is {found.tick:,})"
    return f"{who} waits for transfer {one.transfer}{until}, begun {_when(found, one.since)}"


def _plan(found: Unfinished, one: UnfinishedPlan) -> str:
    what = f"{one.direction} {one.transfer} of {render_requests(one.requests)}"
    return f"{what}: planned {_when(found, one.since)}"


def _held(read: int, written: int) -> str:
    if not read + written:
        return "none is held"
    return f"{read + written:,} still held: {read:,} read by stores, {written:,} written by loads"


def _when(found: Unfinished, since: Beginning | None) -> str:
    if since is None:
        return "before the log begins"
    after = after_start(since.wall_ns, found.began_ns)
    left = duration(found.ended_ns - since.wall_ns)
    return f"at event {since.event:,} ({after}, {left} before the end)"
