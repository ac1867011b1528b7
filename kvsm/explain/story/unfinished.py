"""List what is open where a log ends: requests, copies, waits and plans without an end, and the engine's end.

    ledger = rebuild("log").ledger
    found = unfinished_at_end(LogReader("log"), ledger, condition)
    found.finished          # False if anything is open, or if the engine did not close its log
    end_rows(found)         # the same for people

The ledger shows what is open, but not since when. `beginnings` finds that in the events: it reads the log
once more, without a fold, and only if something is open. A caller with an index fills `Beginnings` from it.
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
"""Most requests, copies, waits or plans that `end_rows` lists; the others are counted."""


class Beginning(msgspec.Struct, frozen=True):
    """The event with which a request, wait or copy began: its number and its Unix time (ns)."""

    event: int
    wall_ns: int


class Beginnings(msgspec.Struct):
    """When the things that are open where a log ends began; no entry: before the kept part of the log.

    began_ns, ended_ns: wall time of the first and the last event.
    requests: request -> its arrival.
    deferred: request -> the beginning of its wait.
    planned, submitted: transfer -> when it was planned, and when it left for the workers.
    flushed: transfer -> when the engine began to wait for it.
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

    state: name of its `RequestState`. FINISHED: the engine ended it, but its load has not ended.
    since: its arrival; None: before the kept part of the log.
    """

    request: str
    state: str
    since: Beginning | None


class UnfinishedCopy(msgspec.Struct, frozen=True):
    """A submitted transfer that at least one rank has not reported.

    requests: its owners.
    missing: the ranks that have not reported.
    abandoned: whether the cache was reset while it was in flight.
    since: its submission.
    """

    transfer: int
    direction: str
    requests: tuple[str, ...]
    missing: tuple[int, ...]
    abandoned: bool
    since: Beginning | None


class UnfinishedWait(msgspec.Struct, frozen=True):
    """A wait for a transfer.

    request: the request that waits; None: the engine itself (a flush).
    until: the tick at which the wait ends even if the transfer has not; None: there is no such limit.
    """

    request: str | None
    transfer: int
    until: int | None
    since: Beginning | None


class UnfinishedPlan(msgspec.Struct, frozen=True):
    """A transfer that was planned and never submitted. requests: its owners."""

    transfer: int
    direction: str
    requests: tuple[str, ...]
    since: Beginning | None


class Unfinished(msgspec.Struct, frozen=True, kw_only=True):
    """What is open where a log ends.

    event, tick: the number of the last event, and the tick then.
    began_ns, ended_ns: wall time of the first and the last event; 0 if no request and no transfer is open.
    engine: how the log ends.
    error: the error with which the engine closed the log; None: there was none.
    stopped_by: as in `LogCondition`.
    read_blocks, written_blocks: device blocks that stores read and loads write; None: unknown.
    retired_blocks, retired_slots: device blocks and host slots that are never used again, because a copy was
        lost.
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
        """Whether no request, copy, wait, plan or device block is open. Retired memory does not count."""
        held = self.read_blocks or self.written_blocks
        return not (self.requests or self.copies or self.waits or self.plans or held)

    @property
    def finished(self) -> bool:
        """Whether nothing is open and the engine closed its log without an error."""
        return self.nothing_open and self.engine is LogEnd.CLOSED


def unfinished_at_end(reader: LogReader, ledger: Ledger, condition: LogCondition) -> Unfinished:
    """List what is open in `ledger`, the state after the last event of the log.

    condition: from a reader that has read the whole log.

    Raises `LogError` if the log cannot be read again.
    """
    busy = ledger.requests or ledger.transfers
    return unfinished_in(ledger, condition, beginnings(reader, ledger) if busy else Beginnings())


def unfinished_in(ledger: Ledger, condition: LogCondition, since: Beginnings) -> Unfinished:
    """List what is open in `ledger`, like `unfinished_at_end`, with beginnings that the caller has.

    Oldest first; by name where the log does not have the beginning. A restored ledger has another order in
    memory than a ledger that followed the events.
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
    """Find when the open requests and transfers of `ledger` began. Reads the log up to the ledger's event."""
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
    """The beginnings found so far, while the log is read.

    `_over` has the names of requests that have ended: the next event with such a name begins a new request.
    """

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
"""The method that notes the beginning in an event, by kind; None: an event of this kind begins nothing."""


# As text.

Rows = list[tuple[str, str]]
"""(name, text) of each row. The name is empty if the row continues the one above."""


def end_rows(found: Unfinished) -> Rows:
    """Render what is open at the end of a log as rows of text. The first row is about the engine."""
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
    LogEnd.MISSING: "its end is not known: the last segments of the log are missing",
    LogEnd.BROKEN: "its end is not known: a write of the log failed",
    LogEnd.CLOSED: "it closed the log",
    LogEnd.STOPPED: "it stopped with an error",
}
"""What each end of a log says about its engine."""


def engine_end(end: LogEnd, stopped_by: str) -> str:
    """How the engine ended, according to the end of its log. stopped_by: as in `LogCondition`."""
    return told_stop(stopped_by) if stopped_by else ENGINE_ENDS[end]


def _engine(found: Unfinished) -> str:
    text = engine_end(found.engine, found.stopped_by)
    return text if found.error is None else f"{text}: {found.error}"


def _sort(name: str, good: str, bad: str, texts: list[str]) -> Rows:
    if not texts:
        return [(name, good)]
    more = len(texts) - MOST_OPEN
    shown = texts[:MOST_OPEN] + ([f"... and {more:,} more"] if more > 0 else [])
    return [(name, f"{len(texts):,} {bad}"), *(("", text) for text in shown)]


def _request(found: Unfinished, one: UnfinishedRequest) -> str:
    state = "FINISHED, and its load has not ended" if one.state == RequestState.FINISHED.name else one.state
    return f"request {one.request}: {state}, arrived {_when(found, one.since)}"


def _copy(found: Unfinished, one: UnfinishedCopy) -> str:
    ranks = f"worker{'s' if len(one.missing) > 1 else ''} {', '.join(map(str, one.missing))}"
    reset = ", abandoned by a reset" if one.abandoned else ""
    what = f"{one.direction} {one.transfer} of {render_requests(one.requests)}{reset}"
    return f"{what}: {ranks}, submitted {_when(found, one.since)}"


def _by_rank(found: Unfinished) -> str:
    """`worker 1: 94`: how many copies each rank has not reported; the rank with most comes first."""
    missing = Counter(rank for copy in found.copies for rank in copy.missing)
    counts = [f"worker {rank}: {count:,}" for rank, count in missing.most_common(MOST_OPEN)]
    return ", ".join(counts) + (", ..." if len(missing) > MOST_OPEN else "")


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
