"""The small engine with more behaviour of real engines.

- While a request decodes, rejected drafts overwrite the KV of its last tokens in the layers of a drafter. The
  next step writes the right KV again, and a finished request has no overwritten tokens
  (`KVCacheGroup.drafter`).
- A session pauses until the next part of its prompt arrives. Meanwhile it keeps its blocks.
- A request may reuse the name of a finished one whose blocks may not be freed yet.
- A step may preempt a request that it has just admitted, and give its blocks to others.
- Mamba layers: each state that a step computes at the end of a block is handed over in the next step. Its
  bytes are modelled as the cells of its block.

It also checks that no copy touches the blocks of a finished request when they may be freed (no reuse in
flight, S3).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from kvsm.check.worlds.booked_engine import BookedEngine
from kvsm.check.worlds.small_request import NULL, Cell, SmallRequest
from kvsm.check.worlds.small_workers import ComputedRange
from kvsm.core.ledger.canonical import KEPT, Seen, declared
from kvsm.core.scheduler import GroupKind, StepResults
from kvsm.errors import PropertyBroken
from kvsm.ids import to_list
from kvsm.properties import Property

REJECTED = b"rejected"
"""The KV that a rejected draft has written."""


@declared
class WiderEngine(BookedEngine):
    """A `BookedEngine` with drafters, pausing sessions, reused names and reconsidered admissions. It takes
    the same arguments."""

    paused: Annotated[
        dict[str, SmallRequest],
        Seen(lambda engine, names: [names.requests[name] for name in engine.paused]),
    ]
    """Sessions that wait for the next part of their prompt."""
    unverified: Annotated[
        dict[str, ComputedRange],
        Seen(
            lambda engine, names: [(names.requests[name], it.first) for name, it in engine.unverified.items()]
        ),
    ]
    """Request -> its last tokens, whose KV a draft has overwritten."""
    reconsiders: Annotated[bool, KEPT]
    """Whether this step preempts a request that it admits."""
    computed: Annotated[
        Collection[str],
        Seen(lambda engine, names: sorted(names.requests[name] for name in engine.computed)),
    ]
    """Requests that the last step has computed, if there are mamba layers."""

    def __init__(self, *options: Any, **more: Any) -> None:
        super().__init__(*options, **more)
        self.paused, self.unverified = {}, {}
        self.reconsiders, self.computed = False, ()

    # Reused names.

    def arrive(self, request: SmallRequest) -> SmallRequest:
        """Let a request arrive. Its name is new, or the name of a finished request."""
        earlier = self.requests.get(request.request_id)
        if earlier is not None and earlier.finished:
            del self.requests[request.request_id]
            self.preempted.discard(request.request_id)
        return super().arrive(request)

    def finish(self, request: SmallRequest, *, aborted: bool = False) -> None:
        """Finish a request. Its blocks may not be freed before those of earlier requests of its name."""
        name = request.request_id
        self.verify(request)
        if request.finished:
            super().finish(request, aborted=aborted)
            return
        self.paused.pop(name, None)
        earlier = self.sending.pop(name, None)
        super().finish(request, aborted=aborted)
        if earlier is not None:
            self.sending[name] = earlier + self.sending.get(name, [])

    def take_results(self, results: StepResults) -> None:
        """Apply the scheduler's answer, after checking which blocks it frees."""
        live = self.core.ledger.transfers
        under_copy = {
            block
            for id, copy in self.copies.items()
            if id in live
            for block in to_list(copy.job.device_blocks)
        }
        for name in results.finished_sending:
            touched = under_copy.intersection(self.sending[name])
            if touched:
                message = f"blocks of request {name} may be freed, but copies touch {sorted(touched)}"
                raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)
        super().take_results(results)

    # Sessions that pause.

    def unfinished(self) -> bool:
        return super().unfinished() or bool(self.paused)

    def holders(self) -> dict[str, SmallRequest]:
        return self.running | self.paused

    def end_part(self, request: SmallRequest) -> None:
        """A session pauses; any other request is over."""
        if request.parts:
            del self.running[request.request_id]
            self.paused[request.request_id] = request
        else:
            self.finish(request)

    def next_part(self, request: SmallRequest) -> None:
        """The next part of a paused session's prompt arrives."""
        self.verify(request)
        del self.paused[request.request_id]
        request.begin_next_part()
        self.running[request.request_id] = request

    # A step that reconsiders an admission.

    def preempt(self, request: SmallRequest) -> None:
        self.verify(request)
        super().preempt(request)

    def _admit(self, scheduled: dict[str, int], accept: int | None) -> None:
        before = dict(self.running)
        super()._admit(scheduled, accept)
        if self.has_states:
            self._hand_over_states()
        admitted = [request for name, request in self.running.items() if name not in before]
        if not self.reconsiders or not admitted:
            return
        given_up = admitted[-1]
        self.preempt(given_up)
        scheduled.pop(given_up.request_id, None)
        # Move it to the end of the queue, so that other requests get its blocks.
        self.waiting.append(self.waiting.pop(0))
        super()._admit(scheduled, accept)

    # Mamba layers.

    @property
    def has_states(self) -> bool:
        """Whether there are mamba layers."""
        return any(group.kind is GroupKind.MAMBA for group in self.groups)

    def _hand_over_states(self) -> None:
        for name in self.computed:
            request = self.running.get(name)
            if request is None or request.loading:
                continue
            tokens, states = request.num_computed_tokens - request.num_output_placeholders, []
            for index, (group, table) in enumerate(zip(self.groups, request.tables)):
                if group.kind is GroupKind.MAMBA and tokens and not tokens % group.block_tokens:
                    block = table[tokens // group.block_tokens - 1]
                    cells = request.cells[tokens - group.block_tokens : tokens]
                    state: list[Cell] = [cell + self.weights_tag for cell in cells]
                    self.device[block] = [state] * self.workers
                    self.brought.pop(block, None)
                    states.append((index, block, tokens))
            self.states[name] = states

    # Drafts.

    def _cache(self, request: SmallRequest, computed: int) -> None:
        """Enter full blocks in the prefix cache, except those that drafts may still overwrite."""
        if any(group.drafter for group in self.groups):
            computed = max(computed - self.drafts, min(computed, request.num_prompt_tokens))
        super()._cache(request, computed)

    def compute(self) -> None:
        computing = list(self.computing)
        for step in computing:
            self.verify(step.request)
        super().compute()
        for step in computing:
            self._draft(step)

    def _draft(self, step: ComputedRange) -> None:
        """Let rejected drafts overwrite the last tokens of the request, in the layers of a drafter."""
        request = step.request
        if request.finished or request.tables is not step.owned or step.last >= request.num_tokens:
            return
        first = max(request.num_prompt_tokens, step.last - self.drafts)
        if first >= step.last:
            return
        self.unverified[request.request_id] = ComputedRange(
            request, first, step.last, step.owned, self._drafted_tables(request)
        )
        for token in range(first, step.last):
            self.write(self.unverified[request.request_id], token, REJECTED)

    def _drafted_tables(self, request: SmallRequest) -> list[list[int]]:
        """The block tables that drafts may overwrite, without cached blocks, which others may share."""
        return [
            [NULL if block in self.pool.caches else block for block in table] if group.drafter else []
            for group, table in zip(self.groups, request.tables)
        ]

    def verify(self, request: SmallRequest) -> None:
        """Write the right KV of the request's tokens that drafts have overwritten."""
        drafted = self.unverified.get(request.request_id)
        if drafted is not None and drafted.request is request:
            del self.unverified[request.request_id]
            for token in range(drafted.first, drafted.last):
                self.write(drafted, token, request.cells[token])

    # Steps.

    def _advance(self, scheduled: Mapping[str, int]) -> None:
        super()._advance(scheduled)
        if self.has_states:
            self.computed = list(scheduled)
