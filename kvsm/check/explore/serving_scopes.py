"""The serving world as a model: the real code in every state that a small engine can reach.

    explore(ServingModel(SCOPES["small"]), jobs=2)

A scope is a name, the options of a world, and what an exploration must meet to be worth its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
from msgspec import structs

from kvsm import events as ev
from kvsm.check.explore.model import Kind, Requirement
from kvsm.check.worlds.fingerprint import fingerprint
from kvsm.check.worlds.saving import Saver
from kvsm.check.worlds.serving_world import Budgets, RequestSpec, ServingOptions, ServingWorld
from kvsm.check.worlds.small_request import HASH_TOKENS
from kvsm.check.worlds.world import Action
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LastStep, StoreMode
from kvsm.events import Direction, SkipReason
from kvsm.properties import Property
from kvsm.states.transfer import TransferState


def _news(kind: type[ev.OffloadingEvent]) -> Callable[[ServingWorld], bool]:
    return lambda world: any(type(event) is kind for event in world.news)


def _load_ended(world: ServingWorld, good: bool) -> bool:
    return any(load.good is good for results in world.engine.results for load in results.loads)


def _abandons(world: ServingWorld, direction: Direction) -> bool:
    live = world.engine.core.ledger.transfers.values()
    return any(one.direction is direction and one.state is TransferState.ABANDONED for one in live)


def _waits(world: ServingWorld, direction: Direction) -> bool:
    """Whether a request is deferred for such a copy. A load must be another request's."""
    ledger = world.engine.core.ledger
    waiting = [ledger.requests[name] for name in ledger.deferred]
    return any(
        one.direction is direction and any(other.awaits == one.id != other.load for other in waiting)
        for one in ledger.transfers.values()
    )


def _skipped(world: ServingWorld, reason: str) -> bool:
    return any(isinstance(event, ev.StoreSkipped) and event.reason == reason for event in world.news)


def _is_offered_again(world: ServingWorld) -> bool:
    """A report moves a cursor if it ends a load, or a store that failed."""
    kinds = {type(event) for event in world.news}
    ends_load = any(results.loads for results in world.engine.results)
    return ev.WorkerReported in kinds and ev.BlocksOffered in kinds and not ends_load


def _ends_under_its_load(world: ServingWorld) -> bool:
    return any(
        one.load and one.state.name == "FINISHED" for one in world.engine.core.ledger.requests.values()
    )


_NOTED = (ev.StepEnded, ev.ReportRejected, ev.StoreSkipped)
"""Events that change nothing."""

SOMETIMES: Mapping[str, tuple[str, Callable[[ServingWorld], bool]]] = {
    "a hit is loaded": ("a load ends well", lambda world: _load_ended(world, True)),
    "a load fails": ("a load ends badly", lambda world: _load_ended(world, False)),
    "a store is made again": ("a store fails while its request runs", _is_offered_again),
    "an eviction": ("a block makes room for another", _news(ev.BlocksEvicted)),
    "a key waits": (
        "a block waits for another copy of its key",
        lambda world: _skipped(world, SkipReason.KEY_IN_FLIGHT),
    ),
    "waits for a store": (
        "a request waits for a block that is being stored",
        lambda world: _waits(world, Direction.STORE),
    ),
    "waits for a load": (
        "a request waits for a block that another one loads",
        lambda world: _waits(world, Direction.LOAD),
    ),
    "over under its load": ("a request ends, and its load goes on", _ends_under_its_load),
    "preempted": ("a request loses its blocks", _news(ev.RequestPreempted)),
    "a report is refused": ("a report comes twice, or too late", _news(ev.ReportRejected)),
    "a reset under a store": (
        "the cache is reset while a store is under way",
        lambda world: _abandons(world, Direction.STORE),
    ),
    "a reset under a load": (
        "the cache is reset while a load is under way",
        lambda world: _abandons(world, Direction.LOAD),
    ),
    "a transfer is lost": ("a worker is given up", _news(ev.TransferLost)),
    "a restart": (
        "another process goes on, and finds what was stored",
        lambda world: bool(_news(ev.Restarted)(world) and world.engine.core.ledger.index),
    ),
    "a flush": ("the workers are told to wait", _news(ev.FlushRequested)),
}
"""What an exploration can be asked to meet: in words, and whether the last action met it."""


class ServingScope(msgspec.Struct, frozen=True):
    """The options of a world, and what its exploration should meet. required: whether it must.

    says: what else to tell of its bounds.
    """

    name: str
    options: ServingOptions
    sometimes: tuple[str, ...] = ()
    required: bool = True
    says: str = ""


class ServingModel:
    """A `Model` whose states are live worlds.

    renamed: whether worlds that differ in the names of slots and device blocks alone count as one state. The
        verdict must be the same.
    """

    def __init__(self, scope: ServingScope, *, renamed: bool = True) -> None:
        self.scope, self.renamed = scope, renamed
        saver = Saver(ServingWorld(scope.options, keep_events=False))
        self.save, self.load = saver.save, saver.load

    def __reduce__(self) -> tuple[Callable[..., ServingModel], tuple[ServingScope]]:
        # A worker of a cluster makes its own: the blank world of the saver may have a native ledger.
        return partial(ServingModel, renamed=self.renamed), (self.scope,)

    @property
    def name(self) -> str:
        return f"serving, {self.scope.name}"

    @property
    def bounds(self) -> str:
        options = self.scope.options
        budgets = [f"{name} {n}" for name, n in structs.asdict(options.budgets).items() if n]
        return ", ".join(
            [
                f"{len(options.requests)} requests",
                f"{options.device_blocks} device blocks",
                f"{options.slots} slots",
                f"{options.workers} workers",
                *budgets,
                *([f"made of: {self.scope.says}"] if self.scope.says else []),
            ]
        )

    @property
    def requirements(self) -> Sequence[Requirement[ServingWorld]]:
        return (
            Requirement(
                Kind.ALWAYS, Property.CONSERVATION, "all that the world and its ledger check", _is_sound
            ),
            Requirement(Kind.EVENTUALLY, Property.PROGRESS, "nothing is left to happen", _has_wound_down),
            *(
                Requirement(Kind.SOMETIMES, name, *SOMETIMES[name], self.scope.required)
                for name in self.scope.sometimes
            ),
        )

    def initial(self) -> Iterable[ServingWorld]:
        return [ServingWorld(self.scope.options, keep_events=False)]

    def actions(self, state: ServingWorld) -> list[Action]:
        return state.actions()

    def next(self, state: ServingWorld, action: Action) -> ServingWorld | None:
        return state if state.do(action) else None

    def fingerprint(self, state: ServingWorld) -> bytes:
        return fingerprint(state, renamed=self.renamed)

    def wind_down(self, state: ServingWorld) -> Action | None:
        return state.wind_down()


def _is_sound(world: ServingWorld) -> bool:
    """Raises what is wrong. The ledger is checked only if the last action changed it."""
    if any(type(event) not in _NOTED for event in world.news):
        world.check_ledger()
    world.check_bytes()
    return not _has_wound_down(world) or world.is_at_rest()


def _has_wound_down(world: ServingWorld) -> bool:
    return world.wind_down() is None


_BLOCK = tuple(range(1, HASH_TOKENS + 1))
_ONE_BLOCK = (RequestSpec((*_BLOCK, 5), outputs=2), RequestSpec((*_BLOCK, 6), outputs=2))
"""Two requests that share their only full block, and decode different tokens in a second one."""
_TWO_BLOCKS = (RequestSpec((*_BLOCK, 5, 6, 7, 8, 9)), RequestSpec((*_BLOCK, 105, 6, 7, 8, 9)))
"""Two requests, each of which fills the device. The host has no room for all their blocks. They are prefilled
in chunks, and a load may be accepted in part."""
_DISPLACED = (
    RequestSpec((*_BLOCK, 5)),
    RequestSpec((9, 9, 9, 9, 9), parameters={"offload": False}),
    RequestSpec((*_BLOCK, 5)),
)
"""The second request displaces on the device what the third one will want."""

_EAGER = ServingOptions(
    requests=_ONE_BLOCK,
    # Nothing is found on the device, so that every hit is loaded from the host.
    prefix_cache=False,
    last_step=LastStep.KEEP_STEPPING,
    chunk_tokens=HASH_TOKENS,
    defer_ticks=2,
)
_CROWDED = structs.replace(_EAGER, requests=_TWO_BLOCKS)
_LAZY = structs.replace(_EAGER, requests=_DISPLACED, store=StoreMode.LAZY, prefix_cache=True, device_blocks=2)
_HYBRID = structs.replace(
    _EAGER,
    requests=_DISPLACED,
    groups=(
        KVCacheGroup(HASH_TOKENS),
        KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=HASH_TOKENS),
    ),
    prefix_cache=True,
    device_blocks=4,
)
_NO_REFERENCES = structs.replace(_EAGER, references=False, last_step=LastStep.FLUSH)
_ASYNCHRONOUS = structs.replace(_EAGER, asynchronous=True)
_LOSING = structs.replace(_EAGER, transfer_ticks=2)
_SHARED = structs.replace(
    _LOSING, requests=(_DISPLACED[0],) * 3, device_blocks=4, slots=1, workers=1, defer_ticks=0
)
"""Two requests may load one block at once. Either load may fail, be lost, or be overtaken by a reset."""
_ROUTED = structs.replace(
    _EAGER,
    requests=(_DISPLACED[0], RequestSpec((9, 9, 9, 9, 9)), _DISPLACED[0]),
    slots=1,
    workers=1,
    router=True,
)
"""The third request stores again what the second one evicted from the host."""


def _with(options: ServingOptions, **budgets: int) -> ServingOptions:
    return structs.replace(options, budgets=Budgets(**budgets))


def _small_scopes() -> Iterator[ServingScope]:
    """Each is explored in a second or two. In all of them a hit is loaded."""
    whole = structs.replace(_CROWDED, chunk_tokens=64)
    for name, options, sometimes in (
        (
            "small",
            _with(_EAGER, failures=1, resets=1),
            (
                "a load fails",
                "a store is made again",
                "a key waits",
                "waits for a store",
                "a reset under a store",
                "a reset under a load",
            ),
        ),
        (
            "aborts",
            _with(_EAGER, aborts=1, repeats=1),
            ("a key waits", "waits for a store", "over under its load", "a report is refused"),
        ),
        (
            "preemptions",
            _with(_EAGER, preemptions=1, partial=1, waits=1, most=2),
            ("a key waits", "waits for a store", "waits for a load", "over under its load", "preempted"),
        ),
        (
            "evictions",
            _with(whole, failures=1, partial=1),
            ("a load fails", "an eviction", "waits for a store"),
        ),
        (
            "lazy",
            _with(_LAZY, resets=1),
            ("a load fails", "preempted", "a reset under a store", "a reset under a load"),
        ),
        (
            "hybrid",
            _with(_HYBRID, failures=1, aborts=1),
            ("a load fails", "over under its load", "preempted"),
        ),
        (
            "no-references",
            _with(_NO_REFERENCES, preemptions=1),
            ("over under its load", "preempted", "a flush", "waits for a store", "waits for a load"),
        ),
        (
            "asynchronous",
            _with(_ASYNCHRONOUS, aborts=1),
            ("a key waits", "waits for a store", "over under its load"),
        ),
        ("router", _with(_ROUTED), ("an eviction",)),
    ):
        yield ServingScope(name, options, ("a hit is loaded", *sometimes))


def _losing_scopes() -> Iterator[ServingScope]:
    """Transfers are given up. Each is explored in a second or two."""
    for name, options, sometimes in (
        (
            "losing",
            _with(_LOSING),
            ("a load fails", "waits for a store", "a report is refused", "a transfer is lost"),
        ),
        (
            "shared",
            _with(_SHARED, failures=1, resets=1, most=1),
            ("a load fails", "a reset under a store", "a reset under a load", "a transfer is lost"),
        ),
    ):
        yield ServingScope(name, options, ("a hit is loaded", *sometimes))


def _restart_scopes() -> Iterator[ServingScope]:
    """The process is killed, and another one goes on. Each takes a second or three."""
    whole = structs.replace(_CROWDED, chunk_tokens=64)
    for name, options, sometimes in (
        (
            "restarts",
            _with(_EAGER, resets=1, crashes=1),
            ("waits for a store", "waits for a load", "a reset under a store", "a reset under a load"),
        ),
        ("restarts-evictions", _with(whole, failures=1, crashes=2, most=2), ("an eviction",)),
        (
            "any-two",
            _with(structs.replace(_EAGER, workers=1), aborts=1, preemptions=1, resets=2, crashes=1, most=2),
            ("waits for a store", "waits for a load", "over under its load", "preempted"),
        ),
        ("restarts-router", _with(_ROUTED, crashes=1), ("an eviction",)),
        (
            "restarts-losing",
            _with(structs.replace(_SHARED, requests=_SHARED.requests[:2]), crashes=1),
            ("a transfer is lost",),
        ),
    ):
        yield ServingScope(name, options, ("a hit is loaded", "a restart", *sometimes))


def _full_scopes() -> Iterator[ServingScope]:
    """Each is explored in minutes: `full` with any five of seven disturbances, the other kinds of engine with
    any two of four, all in any order."""
    four = {"failures": 1, "aborts": 1, "preemptions": 1, "resets": 1}
    any_two = {**four, "most": 2}
    for name, options in (
        ("full", _with(_CROWDED, **four, repeats=1, partial=1, waits=1, most=5)),
        ("full-last-step", _with(structs.replace(_CROWDED, last_step=LastStep.FLUSH), **any_two)),
        ("full-lazy", _with(_LAZY, **any_two)),
        ("full-hybrid", _with(_HYBRID, **any_two)),
        ("full-no-references", _with(_NO_REFERENCES, **any_two)),
        ("full-asynchronous", _with(_ASYNCHRONOUS, **any_two)),
        ("full-losing", _with(_LOSING, **any_two)),
        ("full-restarts", _with(_CROWDED, **four, crashes=2, most=2)),
    ):
        yield ServingScope(
            name, options, ("a hit is loaded", "a load fails", "over under its load", "preempted")
        )


SCOPES: Mapping[str, ServingScope] = {
    scope.name: scope for scope in (*_small_scopes(), *_losing_scopes(), *_restart_scopes(), *_full_scopes())
}
