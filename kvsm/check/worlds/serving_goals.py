"""What must hold in the serving world, and what its explorations can be asked to meet."""

from __future__ import annotations

from functools import partial

from kvsm import events as ev
from kvsm.check.worlds.requirement import Kind, Requirement, sometimes
from kvsm.check.worlds.serving_world import ServingWorld
from kvsm.events import Direction, SkipReason
from kvsm.properties import Property
from kvsm.states.transfer import TransferState

_NOTED = (ev.StepEnded, ev.ReportRejected, ev.StoreSkipped)
"""Events that change nothing."""


def _is_sound(world: ServingWorld) -> bool:
    """Raises what is wrong. The ledger is checked only if the last action changed it."""
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

# What the last action met.


def _has_news(kind: type[ev.OffloadingEvent], world: ServingWorld) -> bool:
    return any(type(event) is kind for event in world.news)


def _load_ended(good: bool, world: ServingWorld) -> bool:
    return any(load.good is good for results in world.engine.results for load in results.loads)


def _is_offered_again(world: ServingWorld) -> bool:
    """A report moves a cursor if it ends a load, or a store that failed."""
    kinds = {type(event) for event in world.news}
    ends_load = any(results.loads for results in world.engine.results)
    return ev.WorkerReported in kinds and ev.BlocksOffered in kinds and not ends_load


def _key_waits(world: ServingWorld) -> bool:
    skipped = [event for event in world.news if isinstance(event, ev.StoreSkipped)]
    return any(event.reason == SkipReason.KEY_IN_FLIGHT for event in skipped)


def _waits(direction: Direction, world: ServingWorld) -> bool:
    """Whether a request is deferred for such a copy. A load must be another request's."""
    ledger = world.engine.core.ledger
    waiting = [ledger.requests[name] for name in ledger.deferred]
    return any(
        one.direction is direction and any(other.awaits == one.id != other.load for other in waiting)
        for one in ledger.transfers.values()
    )


def _ends_under_its_load(world: ServingWorld) -> bool:
    return any(
        one.load and one.state.name == "FINISHED" for one in world.engine.core.ledger.requests.values()
    )


def _abandons(direction: Direction, world: ServingWorld) -> bool:
    live = world.engine.core.ledger.transfers.values()
    return any(one.direction is direction and one.state is TransferState.ABANDONED for one in live)


def _restarts_warm(world: ServingWorld) -> bool:
    return _has_news(ev.Restarted, world) and bool(world.engine.core.ledger.index)


LOADED = sometimes("a hit is loaded", "a load ends well", partial(_load_ended, True))
LOAD_FAILS = sometimes("a load fails", "a load ends badly", partial(_load_ended, False))
STORED_AGAIN = sometimes("a store is made again", "a store fails while its request runs", _is_offered_again)
EVICTED = sometimes("an eviction", "a block makes room for another", partial(_has_news, ev.BlocksEvicted))
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
    "over under its load", "a request ends, and its load goes on", _ends_under_its_load
)
PREEMPTED = sometimes("preempted", "a request loses its blocks", partial(_has_news, ev.RequestPreempted))
REPORT_REFUSED = sometimes(
    "a report is refused", "a report comes twice, or too late", partial(_has_news, ev.ReportRejected)
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
TRANSFER_LOST = sometimes("a transfer is lost", "a worker is given up", partial(_has_news, ev.TransferLost))
RESTARTED = sometimes("a restart", "another process goes on, and finds what was stored", _restarts_warm)
FLUSHED = sometimes("a flush", "the workers are told to wait", partial(_has_news, ev.FlushRequested))
