"""What the scheduler side remembers between two calls, as a value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from kvsm.core.ledger.canonical import NOBODY, Names, compared, declared, filled
from kvsm.core.plan import TransferJob
from kvsm.core.scheduler.tracked import TrackedRequest


class LoadEnded(msgspec.Struct, frozen=True):
    """The load of a request is over. Told once.

    After a failure the engine computes the tokens that are missing. It gives the request other blocks for
    them in two cases: if the load was lost, and if `SchedulerConfig.resumable` is false.
    """

    request: str
    good: bool
    num_computed_tokens: int
    """How many tokens the request has now, from its first."""
    lost: bool = False
    """A copy may still write to the request's blocks. An engine without references gives them to nobody."""


class StepResults(msgspec.Struct, frozen=True):
    """What followed from the workers' reports."""

    loads: tuple[LoadEnded, ...] = ()
    finished_sending: tuple[str, ...] = ()
    """Finished requests whose blocks the engine kept, and may free now."""
    drained: bool = True
    """No copy that a reset abandoned is left."""


def _in_order(names: Names, requests: Iterable[str]) -> list[int]:
    return [names.requests[name] for name in requests]


@declared
class SchedulerState(msgspec.Struct):
    """What the scheduler side remembers between two calls, beside the ledger. Empty at first."""

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
    """What leaves with the next plan. The ledger says what each job copies."""
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
    """What the engine has not been told yet."""
    preempted: Annotated[set[str], filled(lambda one, names: sorted(_in_order(names, one.preempted)))]
    """Requests that lost their blocks since the last step, and are noted as preempted."""
