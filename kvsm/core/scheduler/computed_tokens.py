"""A check of the engine: it counts no token as computed before the step of that token was decided.

`build_connector_meta` stores the blocks whose tokens the engine counts as computed. If the engine counts the
tokens of this very step too, blocks are stored that no step has computed. No error follows: a later request
loads whatever the copy found there.

At each call a request may count the tokens that it had when it got its blocks (device hits and its load), and
the tokens of the steps since then. `StepOutput.num_scheduled_tokens` says how many these are. Without it only
two calls are checked: the first after a request got its blocks, and the first after its load.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from kvsm.core.scheduler.engine_arguments import scheduled_tokens
from kvsm.core.scheduler.protocols import StepOutput
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.errors import PropertyBroken
from kvsm.properties import Property


def check_computed_tokens(
    requests: Mapping[str, TrackedRequest], output: StepOutput, loading: Container[str]
) -> None:
    """Check all requests, and note what they may count at the next call.

    loading: the requests whose load has not ended.

    Raises `PropertyBroken` if a request counts too many tokens. Then nothing has changed.
    """
    tokens = scheduled_tokens(output)
    for name, tracked in requests.items():
        request, most = tracked.request, tracked.countable
        counted = request.num_computed_tokens - request.num_output_placeholders
        if most is not None and counted > most:
            message = (
                f"request {name} counts {counted} tokens as computed, and at most {most} can be: "
                f"add a step's tokens to num_computed_tokens after build_connector_meta, not before"
            )
            raise PropertyBroken(Property.COPY_ORDER, message)
    for name, tracked in requests.items():
        # A preempted request may run again before the load of its earlier blocks has ended.
        waits = name in loading and tracked.trusted is not None
        if tracked.countable is not None and not waits:
            tracked.countable = _countable_next(name, tracked, output.scheduled, tokens)


def _countable_next(
    name: str, tracked: TrackedRequest, scheduled: Container[str], tokens: Mapping[str, int] | None
) -> int | None:
    """What the request may count at the next call. None if the engine does not say enough."""
    if tokens is None or tracked.countable is None:
        return None
    if name in tokens:
        # A count may fall, after rejected drafts and failed loads.
        return min(tracked.countable, tracked.request.num_computed_tokens) + tokens[name]
    return None if name in scheduled else tracked.countable
