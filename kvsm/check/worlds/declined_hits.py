"""Which hits a scheduler with `load_only_if_faster` must decline, recomputed from its log alone.

A request may get less than the longest hit only if an event says that its load is slow, and if the last
measured times confirm it (S19). One slow hit in sixteen must be loaded nevertheless.
`kvsm.core.ledger.expected_times` decides from the ledger; here each answer is recomputed from all events. The
two share no code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvsm import events as ev
from kvsm.check.worlds.check_counts import count_case
from kvsm.check.worlds.longest_hit import (
    AskedPrompt,
    Settled,
    asked_prompt,
    cells_of,
    check_answer,
    expected_answer,
)
from kvsm.core.offloader.emitter import EventSink
from kvsm.core.scheduler import OffloadScheduler
from kvsm.core.scheduler.protocols import EngineRequest
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadingEvent
from kvsm.ids import count
from kvsm.properties import Property

_ONE_IN = 16

Log = Sequence[OffloadingEvent]


class Hit(NamedTuple):
    """A hit that could be loaded: the device blocks that the load fills, and the tokens that it brings."""

    blocks: int
    tokens: int


class Times(NamedTuple):
    """The expected times of a hit (us), and the blocks of the loads before it."""

    blocks_ahead: int
    load_us: int
    compute_us: int


def times_of(log: Log, workers: int, hit: Hit) -> Times | None:
    """Compute the expected times of a hit from the events so far; None if nothing was measured."""
    measured: ev.TimesMeasured | None = None
    loads, reports, copies_out = dict[int, int](), dict[int, set[int]](), set[str]()
    for event in log:
        if isinstance(event, ev.Restarted):
            measured = None
            loads.clear()
        elif isinstance(event, ev.TimesMeasured):
            measured = event
        elif isinstance(event, ev.RequestArrived) and event.target:
            copies_out.add(event.request)
        elif isinstance(event, ev.LoadPlanned) and not event.voided and event.request not in copies_out:
            loads[event.seq], reports[event.seq] = count(event.device_blocks), set()
        elif isinstance(event, ev.WorkerReported) and event.transfer in loads:
            reports[event.transfer].add(event.worker)
            if len(reports[event.transfer]) == workers:
                del loads[event.transfer]
        elif isinstance(event, ev.TransferCancelled | ev.TransferLost):
            loads.pop(event.transfer, None)
        elif isinstance(event, ev.CacheReset):
            loads.clear()
    if measured is None:
        return None
    ahead = sum(loads.values())
    blocks_us = (ahead + hit.blocks) * measured.block_ns // 1000
    return Times(ahead, measured.start_us + blocks_us, hit.tokens * measured.token_ns // 1000)


class BeforeSlowAnswer:
    """The state in which a request asks a scheduler with `load_only_if_faster`."""

    def __init__(
        self,
        scheduler: OffloadScheduler,
        request: EngineRequest,
        cells: Sequence[bytes],
        local: int,
        log: Log,
    ) -> None:
        """cells: as in `expected_answer`. log: all events of the core so far."""
        self._request, self._local, self._log, self._events = request, local, log, len(log)
        self._expected = expected_answer(scheduler, request, cells, local)
        self._asked = asked_prompt(scheduler, request, cells, local)
        self._hits: list[Hit] = []
        """What could be loaded: with the blocks in flight to the host, and then with readable ones only."""
        ledger, self._workers = scheduler.offloader.ledger, scheduler.offloader.config.workers
        if not isinstance(self._asked, Settled):
            chunk = scheduler.offloader.config.blocks_per_chunk
            ends = self._asked.end(ledger.index.__contains__), local + self._asked.offered(ledger)
            self._hits = [_hit(self._asked, end, chunk) for end in ends]
        self._times = [times_of(log, self._workers, hit) for hit in self._hits]

    def check(self, found: int | None) -> None:
        """Check the answer: the tokens to load, or None if the request waits. Raises `PropertyBroken`."""
        news = [event for event in self._log[self._events :] if isinstance(event, ev.SlowHitFound)]
        for event in news:
            self._check_event(event)
        for place, (hit, times) in enumerate(zip(self._hits, self._times)):
            if place and self._expected is None:
                break  # It waits for keys in flight, so what is readable now does not matter.
            if times is None or not hit.blocks or times.load_us < times.compute_us:
                continue
            verdict = self._verdict()
            count_case(Property.STORED_SO_SERVED, "slow hits")
            if verdict is None:
                self._broken("has a slow hit, and no event says whether it is declined")
            elif verdict.declined:
                check_answer(self._request, self._local, found, 0)
                return
        check_answer(self._request, self._local, found, self._expected)

    def _check_event(self, event: ev.SlowHitFound) -> None:
        hit = Hit(event.blocks, event.tokens)
        named = Times(event.blocks_ahead, event.load_us, event.compute_us)
        if (hit, named) not in list(zip(self._hits, self._times)) or named.load_us < named.compute_us:
            self._broken(f"has {hit} declined with {named}; possible are {self._hits} with {self._times}")
        in_a_row = 0
        for earlier in self._log[: self._events]:
            if isinstance(earlier, ev.Restarted):
                in_a_row = 0
            elif isinstance(earlier, ev.SlowHitFound):
                in_a_row = in_a_row + 1 if earlier.declined else 0
        if event.declined != (in_a_row + 1 < _ONE_IN):
            self._broken(f"has a slow hit after {in_a_row} declined ones, and declined is {event.declined}")

    def _verdict(self) -> ev.SlowHitFound | None:
        """The last decision on a slow hit of the request, since it last got blocks."""
        for event in reversed(self._log):
            if isinstance(event, ev.SlowHitFound) and event.request == self._request.request_id:
                return event
            ends = ev.RequestAdmitted | ev.RequestFinished | ev.RequestPreempted
            if isinstance(event, ev.Restarted):
                return None
            if isinstance(event, ends) and event.request == self._request.request_id:
                return None
        return None

    def _broken(self, what: str) -> None:
        raise PropertyBroken(Property.STORED_SO_SERVED, f"request {self._request.request_id} {what}")


class _TakenEvents:
    """Keeps the events of a core, and passes them on to its log."""

    def __init__(self, log: EventSink | None) -> None:
        self.events, self._log = list[OffloadingEvent](), log

    def append(self, event: OffloadingEvent) -> None:
        self.events.append(event)
        if self._log is not None:
            self._log.append(event)

    def flush(self) -> None:
        if self._log is not None:
            self._log.flush()


def watch_slow_answers(scheduler: OffloadScheduler) -> None:
    """Check each later answer of a new scheduler with `load_only_if_faster`. There must be no tier below the
    host."""
    ask, core = scheduler.get_num_new_matched_tokens, scheduler.offloader
    core.log = taken = _TakenEvents(core.log)

    def watched(request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        cells = cells_of(scheduler, request)
        before = BeforeSlowAnswer(scheduler, request, cells, num_computed_tokens, taken.events)
        found, loads = ask(request, num_computed_tokens)
        before.check(found)
        return found, loads

    scheduler.get_num_new_matched_tokens = watched  # type: ignore[method-assign]


def _hit(asked: AskedPrompt, end: int, chunk: int) -> Hit:
    return Hit(len(asked.keys_read(end)) * chunk, end - asked.local)
