"""The small engine with two books: which chunks its requests have offered, and how it has served them.

The book of chunks checks in each step, with the option `checks_stores`, that every chunk that can be stored
is stored (`kvsm.check.worlds.offered_chunks`). It is part of the engine's state and would multiply the states
to explore, so explored worlds use the plain `SmallEngine`. The book of service is
`kvsm.check.worlds.fair_service`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from kvsm.check.worlds.fair_service import FairService
from kvsm.check.worlds.offered_chunks import OfferedChunksBook, check_head_of_queue
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.core.ledger.canonical import PART, declared
from kvsm.core.scheduler import StepResults
from kvsm.states.request import RequestState


@declared
class BookedEngine(SmallEngine):
    """A `SmallEngine` that records offered chunks and served requests. It takes the same arguments."""

    offered: Annotated[OfferedChunksBook, PART]
    service: Annotated[FairService, PART]

    def __init__(self, *options: Any, **more: Any) -> None:
        super().__init__(*options, **more)
        self.offered, self.service = OfferedChunksBook(), FairService()

    def holders(self) -> dict[str, SmallRequest]:
        """Return the unfinished requests that have device blocks."""
        return self.running

    def is_shadowed(self, request: SmallRequest) -> bool:
        """Whether a load of an earlier request with its name is in flight: then nothing is stored."""
        entry = self.core.ledger.requests.get(request.request_id)
        return entry is not None and entry.state is RequestState.FINISHED

    def finish(self, request: SmallRequest, *, aborted: bool = False) -> None:
        if not request.finished:
            self.offered.lost_blocks(request)
            self.service.begin(request)
        super().finish(request, aborted=aborted)

    def preempt(self, request: SmallRequest) -> None:
        self.offered.lost_blocks(request)
        self.service.begin(request)
        super().preempt(request)

    def hand_on(self, count: int | None = None) -> StepResults:
        reports = self.reports if count is None else self.reports[:count]
        self.service.faults += any(not report.good for report in reports)
        return super().hand_on(count)

    def take_results(self, results: StepResults) -> None:
        """Apply the results of a step, and book the chunks that were loaded."""
        # A load may end when its request no longer waits for it.
        awaited = [load for load in results.loads if self.requests[load.request].loading]
        for load in awaited:
            if not load.good:
                self.service.note_failed(load)
        super().take_results(results)
        for load in awaited:
            if load.good and not self.requests[load.request].finished:
                self.offered.loaded(self, self.requests[load.request], load.num_computed_tokens)

    def _local(self, request: SmallRequest) -> tuple[int, list[list[int]]]:
        end, blocks = super()._local(request)
        self.offered.found[request.request_id] = end
        self.service.note_question(request)
        return end, blocks

    def _allocate(self, hits: list[list[int]], end: int, total: int) -> list[list[int]] | None:
        tables = super()._allocate(hits, end, total)
        self.service.note_answer(has_room=tables is not None)
        return tables

    def _grow(self, request: SmallRequest, end: int) -> list[list[int]] | None:
        added = super()._grow(request, end)
        if added is None:
            self.service.note_lack(request.request_id)
        return added

    def reset(self) -> bool:
        epoch = self.core.ledger.epoch
        done = super().reset()
        if self.core.ledger.epoch > epoch:
            # A reset of an empty host keeps the epoch: evicted chunks are still offered at the end.
            self.offered.forget()
        return done

    def _advance(self, scheduled: Mapping[str, int]) -> None:
        """Check the plan of the step before its tokens count as computed."""
        if self.checks_stores:
            check_head_of_queue(self)
            self.offered.check(self, scheduled)
        self.service.note_computed(self, scheduled)
        super()._advance(scheduled)
