"""Count the cases in which a check of `OffloadMachine` could have failed."""

from __future__ import annotations

from collections.abc import Sequence
from sys import maxsize

from kvsm.check.worlds.check_counts import count_case
from kvsm.check.worlds.failed_copies import count_failed_copies
from kvsm.check.worlds.longest_hit import Prompt
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.core.ledger import Ledger
from kvsm.events import (
    BlocksEvicted,
    CacheReset,
    HitMatched,
    HitReleased,
    LoadPlanned,
    LogOpened,
    OffloadingEvent,
    ReportRejected,
    RequestFinished,
    RequestPreempted,
    StorePlanned,
    TransferLost,
    TransfersSubmitted,
    WorkerReported,
)
from kvsm.ids import count
from kvsm.properties import Property
from kvsm.states.lease import READING, WRITING
from kvsm.states.words import STATE_MASK


def count_ledger(ledger: Ledger) -> None:
    """Count the cases of a check of this ledger."""
    count_case(Property.CONSERVATION, "states of the ledger")
    count_case(Property.EVENTS_ARE_STATE, "states compared with a restored copy")
    if ledger.transfers:
        count_case(Property.ONE_RELEASE_PER_HOLD, "states of the ledger with holds")


def count_match(engine: SmallEngine, request: SmallRequest, local: int) -> None:
    """Count a request that asks for its match behind `local` tokens of the device.

    Without any of its blocks on the host, its match is empty and holds nothing. It can cover the whole prompt
    only if the prompt ends with a block, and if the host can serve all blocks behind the device's.
    """
    if request.skip_reading_prefix_cache:
        return
    ledger, end = engine.core.ledger, request.num_tokens
    prompt = Prompt(engine.groups, request.cells, engine.core.config.blocks_per_chunk)
    keys = {prompt.key(index, token) for index in range(len(engine.groups)) for token in range(local, end)}
    count_case(
        Property.MATCH_HOLDS,
        "answers to requests with a block on the host",
        any(key is not None and key in ledger.index for key in keys),
    )
    most = (request.kv_transfer_params or {}).get("max_load_tokens", maxsize)
    is_whole = end - local <= most and not any(end % group.block_tokens for group in engine.groups)
    count_case(
        Property.ONE_TOKEN_LEFT,
        "answers to requests whose whole prompt was stored",
        is_whole
        and all(
            key is not None and key in ledger.index and ledger.readable(ledger.index[key])
            for key in prompt.keys_read(local, end)
        ),
    )


def count_allocation(engine: SmallEngine, tables: Sequence[Sequence[int]]) -> None:
    """Count an allocation of device blocks, to a request that has these block tables now.

    A block that a copy touches could have been among them only if no request has it. Without references, a
    reuse is not checked here: it shows as wrong bytes (S15).
    """
    if not engine.references:
        return
    had = {block for request in engine.running.values() for table in request.tables for block in table}
    had.update(block for table in tables for block in table)
    count_case(
        Property.NO_REUSE_IN_FLIGHT,
        "allocations while a copy touched a device block that no request had",
        any(
            word & STATE_MASK in (READING, WRITING) and block not in had
            for block, word in enumerate(engine.core.ledger.leases.words)
        ),
    )


def count_log(events: Sequence[OffloadingEvent]) -> None:
    """Count the cases of a run with these events, which has ended with nothing in flight."""
    count_case(Property.PROGRESS, "engines that came to rest")
    count_failed_copies(events)
    cases = _LogCases()
    for event in events:
        cases.take(event)


class _LogCases:
    """What a log has reached so far, as far as it decides which event is a case."""

    def __init__(self) -> None:
        self._workers = 0
        self._in_flight: dict[int, int] = {}
        """Transfer -> the number of workers that have yet to report."""
        self._loads: dict[str, int] = {}
        """Request -> its last load."""
        self._matched: set[str] = set()
        """The requests whose match holds blocks."""
        self._has_stored = False
        """Whether a block was stored since the last reset."""

    def take(self, event: OffloadingEvent) -> None:
        """Count the cases of an event, and record it."""
        if self._in_flight:
            self._count_decision(event)
        match event:
            case LogOpened():
                self._workers = event.config.workers
            case HitMatched():
                (self._matched.add if len(event.slots) else self._matched.discard)(event.request)
            case LoadPlanned():
                self._loads[event.request] = event.seq
                self._matched.discard(event.request)
                count_case(Property.CORRECT_BYTES, "loads")
            case HitReleased() | RequestFinished() | RequestPreempted():
                self._matched.discard(event.request)
            case BlocksEvicted() if self._matched:
                count_case(Property.MATCH_HOLDS, "evictions while a match held blocks", count(event.slots))
            case StorePlanned():
                self._has_stored = True
                count_case(Property.STORED_ONCE, "stores")
            case TransfersSubmitted():
                self._in_flight.update(dict.fromkeys(event.transfers, self._workers))
            case WorkerReported():
                self._in_flight[event.transfer] -= 1
                if not self._in_flight[event.transfer]:
                    del self._in_flight[event.transfer]
            case TransferLost():
                self._in_flight.pop(event.transfer, None)
            case CacheReset():
                count_case(Property.NO_STALE_DATA, "resets after a store", self._has_stored)
                self._matched.clear()
                self._has_stored = False
            case ReportRejected():
                count_case(Property.STALE_REPORTS, "reports that must change nothing")

    def _count_decision(self, event: OffloadingEvent) -> None:
        """Count an event that could have reused or released a block of the copies in flight."""
        tried = Property.NO_REUSE_IN_FLIGHT
        match event:
            case BlocksEvicted():
                count_case(tried, "evictions during a copy", count(event.slots))
            case StorePlanned():
                count_case(tried, "slots allocated during a copy", count(event.slots))
            case RequestFinished() | RequestPreempted():
                is_loading = self._loads.get(event.request) in self._in_flight
                count_case(tried, "requests that ended or were preempted during their load", is_loading)
            case CacheReset():
                count_case(tried, "resets during a copy")
