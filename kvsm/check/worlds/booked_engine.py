"""The small engine with a book of the chunks that its requests have offered.

With its option `checks_stores` it checks after each step that the step stores every chunk that it can
(`kvsm.check.worlds.offered_chunks`). The book belongs to the engine's state, so the explored worlds use the
plain `SmallEngine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from kvsm.check.worlds.offered_chunks import OfferedChunksBook, check_head_of_queue
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.core.ledger.canonical import PART, declared
from kvsm.core.scheduler import StepResults
from kvsm.states.request import RequestState


@declared
class BookedEngine(SmallEngine):
    """A `SmallEngine` that books offered chunks. It takes the same arguments."""

    offered: Annotated[OfferedChunksBook, PART]

    def __init__(self, *options: Any, **more: Any) -> None:
        super().__init__(*options, **more)
        self.offered = OfferedChunksBook()

    def holders(self) -> dict[str, SmallRequest]:
        """The unfinished requests that have device blocks."""
        return self.running

    def is_shadowed(self, request: SmallRequest) -> bool:
        """Whether a load of an earlier request of its name is in flight. Until its end nothing is stored."""
        entry = self.core.ledger.requests.get(request.request_id)
        return entry is not None and entry.state is RequestState.FINISHED

    def finish(self, request: SmallRequest, *, aborted: bool = False) -> None:
        if not request.finished:
            self.offered.lost_blocks(request)
        super().finish(request, aborted=aborted)

    def preempt(self, request: SmallRequest) -> None:
        self.offered.lost_blocks(request)
        super().preempt(request)

    def take_results(self, results: StepResults) -> None:
        """Apply the scheduler's answer, and book what loads have brought."""
        # A load may end after its request has stopped waiting for it.
        brought = [load for load in results.loads if load.good and self.requests[load.request].loading]
        super().take_results(results)
        for load in brought:
            if not self.requests[load.request].finished:
                self.offered.loaded(self, self.requests[load.request], load.num_computed_tokens)

    def _local(self, request: SmallRequest) -> tuple[int, list[list[int]]]:
        end, blocks = super()._local(request)
        self.offered.found[request.request_id] = end
        return end, blocks

    def reset(self) -> bool:
        epoch = self.core.ledger.epoch
        done = super().reset()
        if self.core.ledger.epoch > epoch:
            # A reset of an empty host changes nothing: evicted chunks are still offered at the end.
            self.offered.forget()
        return done

    def _advance(self, scheduled: Mapping[str, int]) -> None:
        """Check the plan of the step before its tokens count as computed."""
        if self.checks_stores:
            check_head_of_queue(self)
            self.offered.check(self, scheduled)
        super()._advance(scheduled)
