"""The built-in targets of `kvsm conform`, and how each kind of target is run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from random import Random
from typing import Any, NamedTuple, Protocol

import msgspec

from kvsm.check.walks import failures
from kvsm.check.walks.failures import SavedFailure
from kvsm.check.walks.fuzz_target import FuzzTarget
from kvsm.check.walks.own_code import find_own, is_path
from kvsm.check.walks.walk import RunMaker, WalkFailure, WorldRuns, random_of
from kvsm.cli.fuzz_targets import target_of
from kvsm.cli.vllm_fuzz import Choices
from kvsm.errors import ConfigError, described
from kvsm.properties import Property
from kvsm.system.stopping import IsOver

MEMORY_TIER = {"type": "MemoryTier", "module_path": "kvsm.check.vllm_fuzz.memory_tier"}


class BuiltIn(NamedTuple):
    """A built-in target.

    says: what it is.
    machines: import paths of the machines that make its runs, in turn; none for a connector.
    connector: its name for vLLM; empty for a machine.
    config: the connector's kv_connector_extra_config.
    """

    says: str
    machines: tuple[str, ...] = ()
    connector: str = ""
    config: dict[str, Any] = {}  # noqa: RUF012 (never changed)


_VLLM, _KVSM = "kvsm.testing.vllm_machines", "kvsm.testing.kvsm_machines"

BUILT_IN = {
    "vllm:SimpleCPUOffloadConnector": BuiltIn(
        "vLLM's SimpleCPUOffloadConnector", connector="SimpleCPUOffloadConnector"
    ),
    "vllm:SimpleCPUOffloadConnector-lazy": BuiltIn(
        "vLLM's SimpleCPUOffloadConnector with lazy_offload",
        connector="SimpleCPUOffloadConnector",
        config={"lazy_offload": True},
    ),
    "vllm:OffloadingConnector": BuiltIn("vLLM's OffloadingConnector", connector="OffloadingConnector"),
    "vllm:OffloadingConnector-tiers": BuiltIn(
        "vLLM's OffloadingConnector with TieringOffloadingSpec and a lower tier in memory",
        connector="OffloadingConnector",
        config={"spec_name": "TieringOffloadingSpec", "secondary_tiers": [MEMORY_TIER]},
    ),
    "vllm:CPUOffloadingManager": BuiltIn(
        "vLLM's CPUOffloadingManager with the LRU policy", (f"{_VLLM}:CpuManagerLru",)
    ),
    "vllm:CPUOffloadingManager-arc": BuiltIn(
        "vLLM's CPUOffloadingManager with the ARC policy", (f"{_VLLM}:CpuManagerArc",)
    ),
    "vllm:TieringOffloadingManager": BuiltIn(
        "vLLM's TieringOffloadingManager over its example tier; every second run has no evictions, and "
        "resets only when nothing is in flight",
        (f"{_VLLM}:TieringManager", f"{_VLLM}:TieringManagerWithRoom"),
    ),
    "vllm:fs": BuiltIn(
        "vLLM's `fs` secondary tier; two of three runs allow a miss to be repeated to later requests, and "
        "one of these leaves all files intact",
        (
            f"{_VLLM}:FileSystemTier",
            f"{_VLLM}:FileSystemTierWithLastingMisses",
            f"{_VLLM}:FileSystemTierWithIntactFiles",
        ),
    ),
    "vllm:kvcr": BuiltIn(
        "vLLM's `kvcr` secondary tier with a local pool, and no other engine to ask",
        ("kvsm.testing.kvcr_machine:KvcrTier",),
    ),
    "kvsm:KvsmConnector": BuiltIn("kvsm's connector for vLLM", connector="KvsmConnector"),
    "kvsm:MemoryTier": BuiltIn("kvsm's tier in memory, for tests", (f"{_VLLM}:KvsmMemoryTier",)),
    "kvsm:OffloadScheduler": BuiltIn(
        "kvsm's scheduler and core with a small engine", (f"{_KVSM}:SchedulerMachine",)
    ),
    "kvsm:HostCopyEngine": BuiltIn("kvsm's copy engine with threads", (f"{_KVSM}:HostCopyMachine",)),
    "kvsm:FileCopyEngine": BuiltIn("kvsm's copy engine over a file", (f"{_KVSM}:FileCopyMachine",)),
    "kvsm:StreamCopyEngine": BuiltIn(
        "kvsm's copy engine of streams and events, on a simulated device", (f"{_KVSM}:StreamCopyMachine",)
    ),
}
"""Short name -> the target."""


class Walked(Protocol):
    """A target that can be walked. Run N is of the variant `variants[N % len(variants)]`."""

    variants: tuple[str, ...]
    not_applicable: dict[Property, str]

    def runs(self, seed: int, variant: int) -> RunMaker: ...
    def unreduced(self, seed: int, variant: int, failure: WalkFailure) -> SavedFailure: ...
    def reduced(self, variant: int, failure: SavedFailure, is_over: IsOver) -> SavedFailure: ...
    def told(self, variant: int, failure: SavedFailure) -> str: ...
    def save(self, variant: int, failure: SavedFailure, directory: Path) -> None: ...


def walked_of(name: str, config: Mapping[str, Any]) -> Walked:
    """Return the target of this name. Imports and runs the target's code.

    Raises `ConfigError` if there is no such target, or if its code is missing or of the wrong kind.
    """
    if (built_in := BUILT_IN.get(name)) is not None:
        if not built_in.connector:
            _refuse_config(name, config)
            return WalkedMachines(built_in.machines)
        return WalkedConnector(built_in.connector, {**built_in.config, **config})
    if not is_path(name):
        raise ConfigError(f"there is no target {name!r}; see kvsm conform --list, or give module:Class")
    thing = find_own(name)
    if _is_connector(thing):
        return WalkedConnector(name, config)
    _refuse_config(name, config)
    return WalkedMachines((name,))


def _refuse_config(name: str, config: Mapping[str, Any]) -> None:
    if config:
        raise ConfigError(f"--config is for connectors, and {name} is none")


def _is_connector(thing: Any) -> bool:
    return isinstance(thing, type) and "KVConnectorBase_V1" in [one.__name__ for one in thing.__mro__]


class WalkedMachines:
    """Runs machines of Hypothesis, or worlds, in turn. They are given by their import paths."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        try:
            self._targets: list[FuzzTarget] = [target_of(path) for path in paths]
        except ImportError as error:
            raise ConfigError(str(error)) from error
        self.variants = tuple("" if len(paths) == 1 else path.partition(":")[2] for path in paths)
        self.not_applicable = _not_applicable(find_own(paths[0]))

    def runs(self, seed: int, variant: int) -> RunMaker:
        return self._targets[variant].runs(seed)

    def unreduced(self, seed: int, variant: int, failure: WalkFailure) -> SavedFailure:
        return self._targets[variant].unreduced(seed, failure, ())

    def reduced(self, variant: int, failure: SavedFailure, is_over: IsOver) -> SavedFailure:
        return self._targets[variant].reduced(failure, is_over)

    def told(self, variant: int, failure: SavedFailure) -> str:
        return self._targets[variant].told(failure)

    def save(self, variant: int, failure: SavedFailure, directory: Path) -> None:
        self._targets[variant].save(failure, directory)


class WalkedConnector:
    """Runs a connector under vLLM's scheduler. Every second run has no resets, so that their defects hide no
    others."""

    variants: tuple[str, ...] = ("", "without resets")

    def __init__(self, connector: str, config: Mapping[str, Any]) -> None:
        choices = Choices(connector, dict(config), (), ())
        choices.case(Random(0)).make()
        choices = choices.fitted()
        self._choices = (choices, msgspec.structs.replace(choices, without=("reset",)))
        drawn = {Property.FAILURE_IS_NOT_SUCCESS: "fail", Property.STALE_REPORTS: "double"}
        self.not_applicable = {
            **_OF_CONNECTORS,
            **{
                missing: f"the connector cannot report it, so no run has the fault `{fault}`"
                for missing, fault in drawn.items()
                if fault not in choices.faults
            },
        }

    def runs(self, seed: int, variant: int) -> RunMaker:
        return WorldRuns(lambda random: self._choices[variant].case(random).make(), seed)

    def unreduced(self, seed: int, variant: int, failure: WalkFailure) -> SavedFailure:
        case = self._choices[variant].case(random_of(seed, failure.run))
        return failures.unreduced(case, seed, failure)

    def reduced(self, _variant: int, failure: SavedFailure, is_over: IsOver) -> SavedFailure:
        return failures.reduced(failure, is_over)

    def told(self, _variant: int, failure: SavedFailure) -> str:
        return failures.told(failure)

    def save(self, _variant: int, failure: SavedFailure, directory: Path) -> None:
        failures.save(failure, directory)


_SCHEDULERS = {
    Property.FULL_OFFLOAD: "a scheduler decides it",
    Property.LAST_STEP: "a scheduler decides it",
    Property.ONE_TOKEN_LEFT: "a scheduler decides it",
}
_OF_CONNECTORS = {
    Property.CONSERVATION: "the connector's state is not visible; lost host blocks break one release per "
    "hold (S4)",
    Property.PUBLISH_AFTER_COMMIT: "a block that is served too early shows as wrong bytes (S15)",
    Property.NO_REUSE_IN_FLIGHT: "a block that is reused too early shows as unordered copies or as wrong "
    "bytes (S15)",
    Property.MATCH_HOLDS: "a hit that is evicted before its load shows as wrong bytes (S15)",
    Property.DETERMINISM: "no log of the connector is compared",
    Property.STORED_ONCE: "vLLM does not require it: storing a block twice only costs time",
    Property.FULL_OFFLOAD: "only kvsm promises it; `kvsm:OffloadScheduler` checks it",
    Property.LAST_STEP: "work that is left undone breaks progress (S9)",
    Property.ONE_TOKEN_LEFT: "vLLM's scheduler asserts it; a failed assertion is an error (S8)",
}
_OF_KINDS: dict[str, dict[Property, str]] = {
    "ManagerMachine": {
        **_SCHEDULERS,
        Property.ONE_RELEASE_PER_HOLD: "a manager only counts readers; a reader that is not released shows "
        "as a lost block (S1)",
        Property.STALE_REPORTS: "vLLM reports the end of each copy once",
        Property.MATCH_HOLDS: "vLLM does not require it (`hits_hold`)",
        Property.DETERMINISM: "no log is compared",
        Property.COPY_ORDER: "a manager makes no copies",
    },
    "SecondaryTierMachine": {
        **_SCHEDULERS,
        Property.STALE_REPORTS: "a tier receives no reports",
        Property.STORED_ONCE: "vLLM does not require it; a store that is lost breaks stored, so served (S19)",
        Property.MATCH_HOLDS: "a tier does not promise that a hit stays until its load",
        Property.DETERMINISM: "no log is compared",
        Property.COPY_ORDER: "vLLM pins the chunks of a job",
    },
    "PrefixTreeMachine": {
        **_SCHEDULERS,
        Property.STALE_REPORTS: "a tree receives no reports",
        Property.FAILURE_IS_NOT_SUCCESS: "the machine makes no copy fail",
        Property.DETERMINISM: "no log is compared",
        Property.COPY_ORDER: "a copy in the wrong order shows as wrong bytes (S15)",
        Property.STORED_ONCE: "a block that is computed twice is freed; if it is not, conservation (S1) "
        "breaks",
    },
    "CopyEngineMachine": {
        **_SCHEDULERS,
        Property.CONSERVATION: "a copy engine has no pool to count",
        Property.PUBLISH_AFTER_COMMIT: "a copy engine knows no keys",
        Property.NO_REUSE_IN_FLIGHT: "the caller must not reuse blocks of a copy in flight",
        Property.ONE_RELEASE_PER_HOLD: "a copy engine holds nothing; a copy that ends twice breaks progress "
        "(S9)",
        Property.STALE_REPORTS: "a copy engine receives no reports",
        Property.MATCH_HOLDS: "a copy engine knows no matches",
        Property.EVENTS_ARE_STATE: "a copy engine publishes no events",
        Property.DETERMINISM: "no log is compared",
        Property.STORED_ONCE: "a copy engine knows no keys",
        Property.NO_STALE_DATA: "a copy engine knows no keys",
        Property.STORED_SO_SERVED: "a copy engine knows no keys",
    },
    "OffloadMachine": {
        Property.DETERMINISM: "it is only checked that the policy uses no clock and no random numbers; two "
        "logs are not compared",
        Property.COPY_ORDER: "the copies are simulated; `kvsm:StreamCopyEngine` checks it",
    },
}
"""Base class of a machine -> the properties that it cannot check, and why."""


def _not_applicable(machine: Any) -> dict[Property, str]:
    names = [one.__name__ for one in getattr(machine, "__mro__", ())]
    found = next((dict(reasons) for kind, reasons in _OF_KINDS.items() if kind in names), {})
    if getattr(machine, "hits_hold", False):
        found.pop(Property.MATCH_HOLDS, None)
    if getattr(machine, "publishes_events", True) is False:
        found[Property.EVENTS_ARE_STATE] = "it publishes no KV events"
    if "SecondaryTierMachine" in names:
        if machine.capacity is None:
            found[Property.CONSERVATION] = "the tier has no capacity: it keeps all chunks"
        if not machine.restarts:
            found[Property.NO_STALE_DATA] = (
                "the machine does not restart the tier, and vLLM does not reset it"
            )
    return found


def versions_of(name: str) -> dict[str, str]:
    """Return the versions of Python and of the packages that the target's code runs with."""
    found = {"python": python_version(), "kvsm": version("kvsm")}
    root = "" if name in BUILT_IN else name.partition(":")[0].partition(".")[0]
    for package in dict.fromkeys(("hypothesis", "torch", "vllm", "sglang", "lmcache", "kvcr", "nixl", root)):
        if package in sys.modules and package not in found and (known := _version(package)):
            found[package] = known
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        try:
            return str(getattr(import_module(package), "__version__", ""))
        except Exception as error:  # whatever a package raises, its version is unknown
            return f"unknown: {described(error)}"
