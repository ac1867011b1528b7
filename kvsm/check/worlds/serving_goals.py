"""The requirements on the serving world, and cases that its explorations can be required to meet."""

from __future__ import annotations

from functools import partial

from kvsm import events as ev
from kvsm.check.worlds.requirement import Kind, Requirement, sometimes
from kvsm.check.worlds.serving_world import ServingWorld
from kvsm.events import Direction, SkipReason
from kvsm.properties import Property
from kvsm.states.transfer import TransferState

_NOTED = (ev.StepEnded, ev.ReportRejected, ev.StoreSkipped)
"""Events that change no state that `check_ledger` checks."""


def _is_sound(world: ServingWorld) -> bool:
    """Return True or raise. The ledger is checked only if the last action changed it."""
    if any(type(event) not in _NOTED for event in world.news):
        world.check_ledger()
    world.check_bytes()
    return not _has_wound_down(world) or world.is_at_rest()


def _has_wound_down(world: ServingWorld) -> bool:
    return world.wind_down() is None


SERVING_ALWAYS: tuple[Requirement[ServingWorld], ...] = (
    Requirement(Kind.ALWAYS, Property.CONSERVATION, "all that the world and its ledger check", _is_sound),
    Requirement(Kind.EVENTUALLY, Property.PROGRESS, "nothing is left to happen", _has_wound_down),
)

# Cases that the last action has reached.


def _has_news(kind: type[ev.OffloadingEvent], world: ServingWorld) -> bool:
    return any(type(event) is kind for event in world.news)


def _load_ended(good: bool, world: ServingWorld) -> bool:
    return any(load.good is good for results in world.engine.results for load in results.loads)


def _is_offered_again(world: ServingWorld) -> bool:
    """Whether a failed store has moved a cursor back. Reports that end a load move cursors, too."""
    kinds = {type(event) for event in world.news}
    ends_load = any(results.loads for results in world.engine.results)
    return ev.WorkerReported in kinds and ev.BlocksOffered in kinds and not ends_load


def _key_waits(world: ServingWorld) -> bool:
    skipped = [event for event in world.news if isinstance(event, ev.StoreSkipped)]
    return any(event.reason == SkipReason.KEY_IN_FLIGHT for event in skipped)


def _waits(direction: Direction, world: ServingWorld) -> bool:
    """Whether a request is deferred for a copy in this direction, but not for its own load."""
    ledger = world.engine.core.ledger
    deferred = [ledger.requests[name] for name in ledger.deferred]
    return any(
        copy.direction is direction and any(request.awaits == copy.id != request.load for request in deferred)
        for copy in ledger.transfers.values()
    )


def _ends_under_its_load(world: ServingWorld) -> bool:
    requests = world.engine.core.ledger.requests.values()
    return any(request.load and request.state.name == "FINISHED" for request in requests)


def _abandons(direction: Direction, world: ServingWorld) -> bool:
    live = world.engine.core.ledger.transfers.values()
    return any(copy.direction is direction and copy.state is TransferState.ABANDONED for copy in live)


def _restarts_warm(world: ServingWorld) -> bool:
    return _has_news(ev.Restarted, world) and bool(world.engine.core.ledger.index)


def _is_refused(world: ServingWorld) -> bool:
    skipped = [event for event in world.news if isinstance(event, ev.StoreSkipped)]
    return any(event.reason == SkipReason.NOT_ADMITTED for event in skipped)


LOADED = sometimes("a hit is loaded", "a load ends well", partial(_load_ended, True))
LOAD_FAILS = sometimes("a load fails", "a load ends badly", partial(_load_ended, False))
STORED_AGAIN = sometimes("a store is made again", "a store fails while its request runs", _is_offered_again)
EVICTED = sometimes("an eviction", "a block makes room for another", partial(_has_news, ev.BlocksEvicted))
REFUSED = sometimes("a refusal", "the policy does not admit a block", _is_refused)
KEY_WAITS = sometimes("a key waits", "a block waits for another copy of its key", _key_waits)
WAITS_FOR_STORE = sometimes(
    "waits for a store",
    "a request waits for a block that is being stored",
    partial(_waits, Direction.STORE),
)
WAITS_FOR_LOAD = sometimes(
    "waits for a load",
    "a request waits for a block that another one loads",
    partial(_waits, Direction.LOAD),
)
OVER_UNDER_LOAD = sometimes(
    "over under its load", "a request finishes while its load is in flight", _ends_under_its_load
)
PREEMPTED = sometimes("preempted", "a request loses its blocks", partial(_has_news, ev.RequestPreempted))
REPORT_REFUSED = sometimes(
    "a report is refused", "a report is repeated or too late", partial(_has_news, ev.ReportRejected)
)
RESET_UNDER_STORE = sometimes(
    "a reset under a store",
    "the cache is reset while a store is under way",
    partial(_abandons, Direction.STORE),
)
RESET_UNDER_LOAD = sometimes(
    "a reset under a load",
    "the cache is reset while a load is under way",
    partial(_abandons, Direction.LOAD),
)
TRANSFER_LOST = sometimes("a transfer is lost", "a copy is given up", partial(_has_news, ev.TransferLost))
RESTARTED = sometimes("a restart", "another process takes over, and finds stored blocks", _restarts_warm)
FLUSHED = sometimes("a flush", "the workers must wait for copies", partial(_has_news, ev.FlushRequested))
