"""The serving world as a model: the real code in every state that a small engine can reach.

    explore(ServingModel(SCOPES["small"]), jobs=2)

A scope is a name, the options of a world, and what an exploration must meet to be worth its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import structs

from kvsm.check.explore.budgets import FREE, Left
from kvsm.check.explore.live_model import LiveModel, WorldScope
from kvsm.check.worlds.refusing_policy import REFUSING
from kvsm.check.worlds.serving_goals import (
    EVICTED,
    FLUSHED,
    KEY_WAITS,
    LOAD_FAILS,
    LOADED,
    OVER_UNDER_LOAD,
    PREEMPTED,
    REFUSED,
    REPORT_REFUSED,
    RESET_UNDER_LOAD,
    RESET_UNDER_STORE,
    RESTARTED,
    SERVING_ALWAYS,
    STORED_AGAIN,
    TRANSFER_LOST,
    WAITS_FOR_LOAD,
    WAITS_FOR_STORE,
)
from kvsm.check.worlds.serving_world import Budgets, RequestSpec, ServingOptions, ServingWorld, spent
from kvsm.check.worlds.small_request import HASH_TOKENS
from kvsm.check.worlds.world import Action
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LastStep, StoreMode


class ServingBudgets:
    """The budgets of the serving worlds of one model.

    No code under test reads them. After the last crash, a world forgets what the log has written. After the
    last repeat, it does not matter any more which report ended a copy.
    """

    def __init__(self, model: ServingModel) -> None:
        left = self._whole = model.make_world().left
        self._renamed, self._names = model.renamed, tuple(left)
        self._places = {
            action: self._names.index(budget) for action, budget in ServingWorld.budget_of.items()
        }
        self.whole = tuple(left.values())
        self.remembered = (self._names.index("crashes"),)
        self.fading = self._names.index("repeats") if self.whole[self._names.index("repeats")] else None

    def set_left(self, state: ServingWorld, left: Left) -> None:
        state.left = dict(zip(self._names, left))

    def spends(self, action: Action) -> int:
        return self._places.get(str(action[0]), FREE)

    def spent(self, left: Left, budget: int) -> Left:
        return tuple(spent(dict(zip(self._names, left)), self._names[budget]).values())

    def fingerprint(self, state: ServingWorld) -> bytes:
        left, state.left = state.left, self._whole
        fingerprint = state.fingerprint(renamed=self._renamed)
        state.left = left
        return fingerprint

    def faded(self, state: ServingWorld, fingerprint: bytes) -> bytes:
        if self.fading is None or state.over is None:
            return fingerprint
        over, state.over = state.over, None
        fingerprint = self.fingerprint(state)
        state.over = over
        return fingerprint


class ServingModel(LiveModel[ServingWorld]):
    """The serving world. Slots and device blocks are renamed."""

    family = "serving"
    always = SERVING_ALWAYS

    def __init__(self, scope: WorldScope, *, renamed: bool = True) -> None:
        super().__init__(scope, renamed=renamed)
        self.budgets = ServingBudgets(self)

    def make_world(self) -> ServingWorld:
        return ServingWorld(self.scope.options, keep_events=False)

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
"""The second request displaces on the device the block that the third one needs."""

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


def _small_scopes() -> Iterator[WorldScope]:
    """Each is explored in a second or two. In all of them a hit is loaded."""
    whole = structs.replace(_CROWDED, chunk_tokens=64)
    for name, options, meets in (
        (
            "small",
            _with(_EAGER, failures=1, resets=1),
            (
                LOAD_FAILS,
                STORED_AGAIN,
                KEY_WAITS,
                WAITS_FOR_STORE,
                RESET_UNDER_STORE,
                RESET_UNDER_LOAD,
            ),
        ),
        (
            "aborts",
            _with(_EAGER, aborts=1, repeats=1),
            (KEY_WAITS, WAITS_FOR_STORE, OVER_UNDER_LOAD, REPORT_REFUSED),
        ),
        (
            "preemptions",
            _with(_EAGER, preemptions=1, partial=1, waits=1, most=2),
            (KEY_WAITS, WAITS_FOR_STORE, WAITS_FOR_LOAD, OVER_UNDER_LOAD, PREEMPTED),
        ),
        (
            "evictions",
            _with(whole, failures=1, partial=1),
            (LOAD_FAILS, EVICTED, WAITS_FOR_STORE),
        ),
        (
            "lazy",
            _with(_LAZY, resets=1),
            (LOAD_FAILS, PREEMPTED, RESET_UNDER_STORE, RESET_UNDER_LOAD),
        ),
        (
            "hybrid",
            _with(_HYBRID, failures=1, aborts=1),
            (LOAD_FAILS, OVER_UNDER_LOAD, PREEMPTED),
        ),
        (
            "no-references",
            _with(_NO_REFERENCES, preemptions=1),
            (OVER_UNDER_LOAD, PREEMPTED, FLUSHED, WAITS_FOR_STORE, WAITS_FOR_LOAD),
        ),
        (
            "asynchronous",
            _with(_ASYNCHRONOUS, aborts=1),
            (KEY_WAITS, WAITS_FOR_STORE, OVER_UNDER_LOAD),
        ),
        ("router", _with(_ROUTED), (EVICTED,)),
        ("refusals", _with(structs.replace(whole, policy=REFUSING), failures=1, preemptions=1), (REFUSED,)),
        ("refusals-lazy", _with(structs.replace(_LAZY, slots=1, policy=REFUSING), resets=1), (REFUSED,)),
    ):
        yield WorldScope(name, options, (LOADED, *meets))


def _losing_scopes() -> Iterator[WorldScope]:
    """Transfers are given up. Each is explored in a second or two."""
    for name, options, meets in (
        (
            "losing",
            _with(_LOSING),
            (LOAD_FAILS, WAITS_FOR_STORE, REPORT_REFUSED, TRANSFER_LOST),
        ),
        (
            "shared",
            _with(_SHARED, failures=1, resets=1, most=1),
            (LOAD_FAILS, RESET_UNDER_STORE, RESET_UNDER_LOAD, TRANSFER_LOST),
        ),
    ):
        yield WorldScope(name, options, (LOADED, *meets))


def _restart_scopes() -> Iterator[WorldScope]:
    """The process is killed, and a new one continues. Each is explored in one to three seconds."""
    whole = structs.replace(_CROWDED, chunk_tokens=64)
    for name, options, meets in (
        (
            "restarts",
            _with(_EAGER, resets=1, crashes=1),
            (WAITS_FOR_STORE, WAITS_FOR_LOAD, RESET_UNDER_STORE, RESET_UNDER_LOAD),
        ),
        ("restarts-evictions", _with(whole, failures=1, crashes=2, most=2), (EVICTED,)),
        (
            "any-two",
            _with(structs.replace(_EAGER, workers=1), aborts=1, preemptions=1, resets=2, crashes=1, most=2),
            (WAITS_FOR_STORE, WAITS_FOR_LOAD, OVER_UNDER_LOAD, PREEMPTED),
        ),
        ("restarts-router", _with(_ROUTED, crashes=1), (EVICTED,)),
        (
            "restarts-losing",
            _with(structs.replace(_SHARED, requests=_SHARED.requests[:2]), crashes=1),
            (TRANSFER_LOST,),
        ),
    ):
        yield WorldScope(name, options, (LOADED, RESTARTED, *meets))


def _full_scopes() -> Iterator[WorldScope]:
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
        yield WorldScope(name, options, (LOADED, LOAD_FAILS, OVER_UNDER_LOAD, PREEMPTED))


SCOPES: Mapping[str, WorldScope] = {
    scope.name: scope for scope in (*_small_scopes(), *_losing_scopes(), *_restart_scopes(), *_full_scopes())
}
