"""Check an engine: it must not count tokens of a step as computed before `build_connector_meta`.

`build_connector_meta` stores the blocks whose tokens the engine counts as computed. If the engine counts the
tokens of this very step too, blocks are stored that no step has computed. No error shows this: a later
request loads whatever bytes the copy has read.

At each call a request may count the tokens that it had when it got its blocks (device hits and its load),
plus the tokens of the steps since then, which `StepOutput.num_scheduled_tokens` gives. Without it only two
calls are checked: the first after a request got its blocks, and the first after its load.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferPlan
from kvsm.core.scheduler.engine_arguments import scheduled_tokens
from kvsm.core.scheduler.groups import SchedulerConfig
from kvsm.core.scheduler.protocols import EngineRequest, StepOutput, TierBelow
from kvsm.core.scheduler.scheduler import OffloadScheduler
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.errors import PropertyBroken
from kvsm.properties import Property


class CheckedScheduler(OffloadScheduler):
    """An `OffloadScheduler` for tests of an engine.

    `build_connector_meta` raises `PropertyBroken` if a request counts too many tokens as computed. Then
    nothing has changed.

    It checks each request in each step. Not for an engine in which another connector also loads tokens.
    """

    def __init__(self, offloader: Offloader, config: SchedulerConfig, below: TierBelow | None = None) -> None:
        super().__init__(offloader, config, below)
        self._countable: dict[str, int | None] = {}
        """Request with blocks -> the most tokens it may count as computed at the next call; None: unknown."""

    def update_state_after_alloc(
        self, request: EngineRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        name = request.request_id
        self._countable.setdefault(name, self.state.tracked[name].local + num_external_tokens)

    def build_connector_meta(self, output: StepOutput) -> TransferPlan:
        self._check(output)
        return super().build_connector_meta(output)

    def request_finished(
        self, request: EngineRequest, block_ids: Sequence[Sequence[int]], *, aborted: bool = False
    ) -> tuple[bool, Mapping[str, Any] | None]:
        answer = super().request_finished(request, block_ids, aborted=aborted)
        self._countable.pop(request.request_id, None)
        return answer

    def _preempt(self, tracked: TrackedRequest) -> None:
        super()._preempt(tracked)
        self._countable.pop(tracked.name, None)

    def _check(self, output: StepOutput) -> None:
        """Check all requests, and update how many tokens they may count at the next call."""
        tokens = scheduled_tokens(output)
        known = [(name, most) for name, most in self._countable.items() if name in self.state.tracked]
        for name, most in known:
            request = self.state.tracked[name].request
            counted = request.num_computed_tokens - request.num_output_placeholders
            if most is not None and counted > most:
                raise PropertyBroken(
                    Property.COPY_ORDER,
                    f"request {name} counts {counted} tokens as computed, and at most {most} can be: "
                    f"add a step's tokens to num_computed_tokens after build_connector_meta, not before",
                )
        for name, most in known:
            tracked = self.state.tracked[name]
            # A preempted request may run again before the load of its earlier blocks has ended.
            waits = name in self.state.promises and tracked.trusted is not None
            if most is not None and not waits:
                self._countable[name] = _countable_next(tracked, most, output.scheduled, tokens)


def _countable_next(
    tracked: TrackedRequest, most: int, scheduled: Container[str], tokens: Mapping[str, int] | None
) -> int | None:
    """Return how many tokens the request may count at the next call; None if that is unknown."""
    if tokens is None:
        return None
    if tracked.name in tokens:
        # A count may fall, after rejected drafts and failed loads.
        return min(most, tracked.request.num_computed_tokens) + tokens[tracked.name]
    return None if tracked.name in scheduled else most
