"""What the scheduler side remembers between two calls, as a value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from typing import Annotated

import msgspec

from kvsm.core.ledger import Ledger
from kvsm.core.ledger.canonical import NOBODY, Names, Seen, compared, declared, filled
from kvsm.core.plan import TransferJob
from kvsm.core.scheduler.retry import RetryStamp
from kvsm.core.scheduler.tracked import TrackedRequest
from kvsm.events import Offer


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
    awaiting_reoffer: Annotated[
        dict[str, TrackedRequest],
        filled(lambda one, names: _in_order(names, one.awaiting_reoffer)),
    ]
    """Those of them whose chunks wait to be offered again, in that order."""
    reoffered_at: Annotated[
        RetryStamp,
        Seen(lambda one, names: one.reoffered_at.seen(names.ledger) if one.awaiting_reoffer else NOBODY),
    ]
    """The stamp of the last offer. It is looked at as long as something waits."""
    crowded: Annotated[
        dict[str, Sequence[int]],
        Seen(
            lambda one, names: one.names_less(names.ledger) if one.crowded and one.awaiting_reoffer else None
        ),
    ]
    """The requests of the last offer, each with its cursors then, if the offer lacked room although there is
    some: an offer evicts nothing that it names itself. Else empty."""
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

    def cursors(self, ledger: Ledger, requests: Iterable[str]) -> dict[str, Sequence[int]]:
        """From which chunk on each of these requests offers, by group. Empty: from its first."""
        known = ledger.requests
        return {name: known[name].settled if name in known else () for name in requests}

    def names_less(self, ledger: Ledger) -> bool:
        """Whether another try would name other blocks than the last offer."""
        return self.cursors(ledger, self.awaiting_reoffer) != self.crowded

    def offers_again(self, ledger: Ledger, due: Collection[str]) -> bool:
        """Whether what waits is worth another try. due: requests that offer something new in this step."""
        if self.reoffered_at != RetryStamp.of(ledger):
            return True
        return bool(self.crowded) and (bool(due) or self.names_less(ledger))

    def offered(self, ledger: Ledger, crowded: dict[str, Sequence[int]]) -> None:
        """Note an offer. crowded: the cursors of its requests before it, if some had to wait because the host
        was full."""
        self.reoffered_at = RetryStamp.of(ledger)
        self.crowded = crowded if self.reoffered_at.available_slots else {}

    def cursors_back(self, ledger: Ledger, failed: Set[bytes]) -> list[Offer]:
        """The stores of these keys have failed: the cursors of requests that offer them again.

        These are requests that still have the blocks. A request that was preempted has no cursors. After a
        reset no request has any until the last copy of the older epoch has ended.
        """
        moved: list[Offer] = []
        for name, tracked in self.tracked.items():
            entry = ledger.requests.get(name)
            if entry is None or not entry.settled:
                continue
            settled = tracked.settled_before(entry.settled, entry.offered, failed)
            if settled != entry.settled:
                moved.append((name, settled, entry.offered))
                self.awaiting_reoffer[name] = tracked
        return moved

    def cursors_behind(self, ledger: Ledger, chunk_tokens: int) -> list[Offer]:
        """The first cursors of requests whose loads have just brought all of their full chunks.

        The host had it just now, so nothing is offered before another chunk is full. Only layers that look
        back at every token get all their chunks from a load.
        """
        moved: list[Offer] = []
        for load in self.ended_loads:
            tracked, entry = self.tracked.get(load.request), ledger.requests.get(load.request)
            if load.good and tracked is not None and entry is not None and not entry.settled:
                chunks = tracked.settle_loaded(chunk_tokens)
                if chunks:
                    moved.append((load.request, (chunks,), (chunks,)))
        return moved
