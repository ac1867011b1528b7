"""What can be walked through: worlds over real code, each with the small configurations that it may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import msgspec

from kvsm.errors import ConfigError
from kvsm.policies import POLICIES
from kvsm.scheduler import GroupKind, KVCacheGroup, LastStep, StoreMode
from kvsm.worlds.copy_engine import CopyEngineWorld, CopyEngineWorldOptions
from kvsm.worlds.core_options import CoreOptions, draw_options
from kvsm.worlds.core_world import CoreWorld
from kvsm.worlds.serving import Budgets, RequestSpec, ServingOptions, ServingWorld
from kvsm.worlds.small_request import HASH_TOKENS
from kvsm.worlds.world import Action, World


class WalkTarget(msgspec.Struct, frozen=True):
    """A sort of world. draw: options for one run. describe: what can be seen of a world, for people. share:
    of the runs, where all targets are walked: about in inverse proportion to what an action costs."""

    says: str
    options: type[msgspec.Struct]
    world: Callable[[Any], World]
    draw: Callable[[Random], msgspec.Struct]
    share: int


class WalkCase(msgspec.Struct, frozen=True):
    """A world that can be made again and again."""

    target: str
    options: msgspec.Struct

    def make(self) -> World:
        return TARGETS[self.target].world(self.options)


def draw_case(target: str, random: Random) -> WalkCase:
    """Of one target, or of `all`. Raises `ConfigError` if there is none of this name."""
    if target == "all":
        target = random.choice([name for name, one in TARGETS.items() for _ in range(one.share)])
    if target not in TARGETS:
        raise ConfigError(f"target {target!r}: choose one of {', '.join(TARGETS)}, or all")
    return WalkCase(target, TARGETS[target].draw(random))


def case_of(target: str, options: Mapping[str, Any]) -> WalkCase:
    """From options as they stand in a file. Raises `ConfigError`."""
    if target not in TARGETS:
        raise ConfigError(f"target {target!r}: choose one of {', '.join(TARGETS)}")
    try:
        return WalkCase(target, msgspec.convert(options, TARGETS[target].options))
    except msgspec.ValidationError as error:
        raise ConfigError(f"options of target {target}: {error}") from error


# The serving world.


class _WalkedServing(ServingWorld):
    """An engine that has nothing more to do steps no more: a walk has better worlds to go through. And it is
    looked at more often, for its own checks say less about the ledger than those of the core's world."""

    check_every = 20

    def draw(self, random: Random) -> Action:
        action = super().draw(random)
        if action == ("step",) and not self.may_step():
            raise IndexError("nothing may happen any more")
        return action


_GROUPS = (
    (KVCacheGroup(HASH_TOKENS),),
    (KVCacheGroup(HASH_TOKENS),),
    (KVCacheGroup(HASH_TOKENS), KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=HASH_TOKENS)),
)


def _draw_serving(random: Random) -> ServingOptions:
    """A few dozen requests with common beginnings, and an engine in which a few of them have room."""
    groups = random.choice(_GROUPS)
    store = random.choice((StoreMode.EAGER, StoreMode.EAGER, StoreMode.LAZY))
    # A lazy store takes single blocks from a pool that it may look into, and counts no offers.
    lazy = store is StoreMode.LAZY
    longest = random.randint(2, 4) * HASH_TOKENS
    return ServingOptions(
        requests=tuple([_draw_request(random, longest) for _ in range(random.randint(20, 100))]),
        # The longest request has room, with what it decodes and the step that is ahead.
        device_blocks=(longest // HASH_TOKENS + 3) * len(groups) + random.randint(0, 4),
        slots=random.randint(2, 6),
        workers=random.choice((1, 2, 2)),
        groups=groups,
        store=store,
        last_step=random.choice((LastStep.FLUSH, LastStep.KEEP_STEPPING)),
        references=lazy or random.random() < 0.7,
        prefix_cache=random.random() < 0.7,
        asynchronous=random.random() < 0.3,
        chunk_tokens=random.choice((3, HASH_TOKENS, 64)),
        lazy_target_blocks=random.randint(1, 4),
        policy=random.choice(tuple(POLICIES)),
        blocks_per_chunk=1 if lazy else random.choice((1, 1, 2)),
        store_threshold=1 if lazy else random.choice((1, 1, 2)),
        max_live_transfers=random.randint(2, 8),
        defer_ticks=random.choice((0, 1, 3)),
        budgets=Budgets(
            failures=random.choice((0, 20)),
            aborts=random.choice((0, 10)),
            preemptions=random.choice((0, 20)),
            resets=random.choice((0, 5)),
            repeats=random.choice((0, 50)),
            partial=random.choice((0, 20)),
            waits=random.choice((0, 50)),
        ),
    )


def _draw_request(random: Random, longest: int) -> RequestSpec:
    """Its first two blocks are those of many others."""
    length = random.randint(1, longest)
    shared = min(length, random.choice((0, HASH_TOKENS, 2 * HASH_TOKENS)))
    prompt = [*range(shared), *[random.randint(100, 102) for _ in range(length - shared)]]
    parameters = {"do_remote_decode": True} if random.random() < 0.1 else None
    return RequestSpec(tuple(prompt), random.randint(1, 4), parameters)


# The copies world.


def _draw_copies(random: Random) -> CopyEngineWorldOptions:
    return CopyEngineWorldOptions(
        device_blocks=random.randint(2, 4),
        host_blocks=random.randint(1, 3),
        transfer_blocks=random.randint(1, 2),
        copies=8,
        kernels=8,
        marks=random.randint(0, 4),
        bad=random.choice((0, 2)),
        holds=random.choice((0, 3)),
        closes=random.random() < 0.2,
    )


TARGETS: dict[str, WalkTarget] = {
    "core": WalkTarget(
        "the offload core alone, every call in every order", CoreOptions, CoreWorld, draw_options, 8
    ),
    "serving": WalkTarget(
        "the core and the scheduler with a small engine", ServingOptions, _WalkedServing, _draw_serving, 3
    ),
    "copies": WalkTarget(
        "the engine of streams and events on a simulated device",
        CopyEngineWorldOptions,
        CopyEngineWorld,
        _draw_copies,
        1,
    ),
}
