"""The state that the scheduler side keeps between two calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from kvsm.core.ledger.canonical import NOBODY, Names, compared, declared, filled
from kvsm.core.plan import TransferJob
from kvsm.core.scheduler.tracked import TrackedRequest


class LoadEnded(msgspec.Struct, frozen=True):
    """The end of a request's load. Returned to the engine once.

    After a failure the engine computes the missing tokens. It gives the request other blocks for them in two
    cases: if the load was lost, and if `SchedulerConfig.resumable` is false.
    """

    request: str
    good: bool
    num_computed_tokens: int
    """How many tokens, from the first one on, the request has now."""
    lost: bool = False
    """Whether a copy may still write to the request's blocks. Without references: never reuse them."""


class StepResults(msgspec.Struct, frozen=True):
    """The results of the workers' reports."""

    loads: tuple[LoadEnded, ...] = ()
    finished_sending: tuple[str, ...] = ()
    """Finished requests whose blocks the engine kept, and may free now."""
    drained: bool = True
    """Whether no copy from before a reset is left."""


def _in_order(names: Names, requests: Iterable[str]) -> list[int]:
    return [names.requests[name] for name in requests]


@declared
class SchedulerState(msgspec.Struct):
    """The state that the scheduler side keeps between two calls, beside the ledger. Empty at first."""

    tracked: Annotated[
        dict[str, TrackedRequest],
        filled(
            lambda one, names: [(names.requests[name], compared(r, names)) for name, r in one.tracked.items()]
        ),
    ]
    """Requests that are not finished."""
    planned: Annotated[
        list[TransferJob],
        filled(lambda one, names: [names.transfers.get(job.transfer, NOBODY) for job in one.planned]),
    ]
    """Jobs of the next plan. The ledger has the blocks that each job copies."""
    promises: Annotated[
        dict[str, tuple[int, int]],
        filled(lambda one, names: [(names.requests[name], it) for name, it in one.promises.items()]),
    ]
    """Request -> (tokens before its load, tokens after it), until the load has ended."""
    ended_loads: Annotated[
        list[LoadEnded],
        filled(
            lambda one, names: [
                (names.requests[load.request], load.good, load.num_computed_tokens, load.lost)
                for load in one.ended_loads
            ]
        ),
    ]
    """Ends of loads that were not returned to the engine yet."""
    preempted: Annotated[set[str], filled(lambda one, names: sorted(_in_order(names, one.preempted)))]
    """Requests that lost their blocks since the last step and were already noted as preempted."""
