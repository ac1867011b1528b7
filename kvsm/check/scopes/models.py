"""The models that `kvsm check` knows, each with its scopes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from kvsm.check.conformance.offload_events import events_of_path
from kvsm.check.explore.checked_model import (
    Bounds,
    CheckedModel,
    ExplorationLimits,
    explorer_limits,
    numbers_of,
    with_numbers,
)
from kvsm.check.explore.counterexample import Counterexample
from kvsm.check.explore.explorer import explore
from kvsm.check.explore.live_model import WorldScope
from kvsm.check.explore.model import Exploration, Refutation
from kvsm.check.explore.rerun import RerunModel
from kvsm.check.protocol.offload_protocol import offload_protocol
from kvsm.check.protocol.plain import Move, ProtocolModel
from kvsm.check.protocol.request_protocol import request_protocol
from kvsm.check.protocol.request_scope import (
    REQUEST_EXAMPLE_SCOPES,
    REQUEST_SCOPES,
    REQUEST_VERSIONS,
    RequestScope,
)
from kvsm.check.protocol.scope import EXAMPLE_SCOPES, VERSIONS, ProtocolScope
from kvsm.check.protocol.scope import SCOPES as PROTOCOL_SCOPES
from kvsm.check.protocol.terms import Declaration
from kvsm.check.scopes.declared_model import DeclaredModel
from kvsm.check.scopes.serving_pairs import PAIRS
from kvsm.check.scopes.serving_scopes import SCOPES as SERVING_SCOPES
from kvsm.check.scopes.serving_scopes import ServingModel
from kvsm.check.scopes.serving_triples import TRIPLES
from kvsm.check.scopes.tier_scopes import SCOPES as TIER_SCOPES
from kvsm.check.scopes.tier_scopes import TiersModel
from kvsm.check.threads import SCOPES as THREAD_SCOPES
from kvsm.check.threads import ThreadScope, explore_schedules, retell_schedule
from kvsm.check.worlds.copy_world import CopyEngineWorld, CopyEngineWorldOptions
from kvsm.check.worlds.hand_over_options import HandOverWorldOptions
from kvsm.check.worlds.hand_over_world import HandOverWorld
from kvsm.check.worlds.serving_world import ServingWorld
from kvsm.check.worlds.two_tiers import TwoTierWorld
from kvsm.errors import ConfigError
from kvsm.events import OffloadingEvent
from kvsm.system.executors.forked import ForkedProcesses


class _ProtocolChecks(DeclaredModel):
    name = "protocol"
    says = "the tables, with copies that start, read, write and report, on streams of several workers"
    machines = ("block", "transfer", "lease")
    scopes: Mapping[str, ProtocolScope] = PROTOCOL_SCOPES

    def declared(self, scope: ProtocolScope) -> Declaration:
        return offload_protocol(scope)

    def events_of(self, declared: Declaration, path: Sequence[Move]) -> Sequence[OffloadingEvent]:
        return events_of_path(ProtocolModel(declared), path)

    def versions(self) -> dict[str, tuple[Declaration, ...]]:
        return {
            name: tuple(offload_protocol(replace(scope, **kind)) for scope in EXAMPLE_SCOPES)
            for name, kind in VERSIONS.items()
        }


class _RequestChecks(DeclaredModel):
    name = "requests"
    says = "the tables, with what a match promises a request, and what the engine is told of its load"
    machines = ("block", "transfer", "request")
    scopes: Mapping[str, RequestScope] = REQUEST_SCOPES

    def declared(self, scope: RequestScope) -> Declaration:
        return request_protocol(scope)

    def versions(self) -> dict[str, tuple[Declaration, ...]]:
        return {
            name: tuple(
                request_protocol(replace(scope, restarts=restarts)) for scope in REQUEST_EXAMPLE_SCOPES
            )
            for name, restarts in REQUEST_VERSIONS.items()
        }


class _CopyChecks(CheckedModel):
    name = "copies"
    says = "the real engine of streams and events, on a device whose every step is chosen"
    scopes: Mapping[str, CopyEngineWorldOptions] = {
        "small": CopyEngineWorldOptions(holds=0),
        "held": CopyEngineWorldOptions(copies=1, kernels=2),
        "full": CopyEngineWorldOptions(kernels=2, bad=1),
    }

    def model(self, scope: CopyEngineWorldOptions) -> RerunModel[CopyEngineWorld]:
        told = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in numbers_of(scope).items())
        return RerunModel(self.name, told, lambda: CopyEngineWorld(scope))


class _HandOverChecks(CheckedModel):
    name = "hand-over"
    says = "a real core hands blocks to another one, under a lease that ends at any moment"
    scopes: Mapping[str, HandOverWorldOptions] = {
        "small": HandOverWorldOptions(resets=0),
        "resets": HandOverWorldOptions(),
        "ranks": HandOverWorldOptions(workers=2, resets=0),
        "faults": HandOverWorldOptions(resets=0, failures=1, cuts=1, losses=1),
        "readers": HandOverWorldOptions(prefill_slots=2, readers=2, resets=0),
        "loads": HandOverWorldOptions(resets=0, failures=1, loads=1),
        "full": HandOverWorldOptions(workers=2, failures=1, cuts=1),
    }

    def model(self, scope: HandOverWorldOptions) -> RerunModel[HandOverWorld]:
        told = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in numbers_of(scope).items())
        return RerunModel(self.name, told, lambda: HandOverWorld(scope))


_SMALL = [name for name in SERVING_SCOPES if not name.startswith("full")]


class _ServingChecks(CheckedModel):
    name = "serving"
    says = "the real offloader and scheduler with a small engine, and copies that end in any order"
    machines = ("block", "transfer", "lease", "request")
    scopes: Mapping[str, WorldScope] = {**SERVING_SCOPES, **PAIRS, **TRIPLES}
    families: Mapping[str, Sequence[str]] = {
        "pairs": tuple(PAIRS),
        "triples": tuple(TRIPLES),
        "every-small": (*_SMALL, *PAIRS, *TRIPLES),
    }

    def model(self, scope: WorldScope) -> RerunModel[ServingWorld]:
        """Only for retelling: to explore, `ServingModel` saves and restores its worlds instead."""
        return RerunModel(
            self.name, ServingModel(scope).bounds, lambda: ServingWorld(scope.options, keep_events=True)
        )

    def bounds(self, scope: WorldScope) -> Bounds:
        options = scope.options
        return {"requests": len(options.requests), **numbers_of(options), **numbers_of(options.budgets)}

    def bounded(self, scope: WorldScope, bounds: Bounds) -> WorldScope:
        options, left = scope.options, dict(bounds)
        requests = left.pop("requests", len(options.requests))
        if requests > len(options.requests):
            raise ConfigError(f"requests is {requests}; this scope has {len(options.requests)} to take from")
        of_budgets = {name: left.pop(name) for name in numbers_of(options.budgets) if name in left}
        return WorldScope(
            f"{scope.name}, with other bounds",
            replace(
                with_numbers(options, left),
                requests=options.requests[:requests],
                budgets=with_numbers(options.budgets, of_budgets),
            ),
            scope.meets,
            # A goal may need a disturbance that these bounds exclude, which would not be a fault.
            required=False,
        )

    def explore(self, scope: WorldScope, limits: ExplorationLimits) -> Exploration:
        return explore(ServingModel(scope, renamed=limits.symmetry), **explorer_limits(limits))


class _TierChecks(CheckedModel):
    name = "tiers"
    says = "the real cores of a host pool and of a disk below it, with kills and power losses"
    machines = ("block", "transfer", "lease")
    scopes: Mapping[str, WorldScope] = TIER_SCOPES

    def model(self, scope: WorldScope) -> RerunModel[TwoTierWorld]:
        """Only for retelling: to explore, `TiersModel` saves and restores its worlds instead."""
        return RerunModel(self.name, TiersModel(scope).bounds, lambda: TwoTierWorld(scope.options))

    def bounds(self, scope: WorldScope) -> Bounds:
        return numbers_of(scope.options)

    def bounded(self, scope: WorldScope, bounds: Bounds) -> WorldScope:
        options = with_numbers(scope.options, bounds)
        # A goal may need what these bounds exclude, which would not be a fault.
        return WorldScope(f"{scope.name}, with other bounds", options, scope.meets, required=False)

    def explore(self, scope: WorldScope, limits: ExplorationLimits) -> Exploration:
        return explore(TiersModel(scope, renamed=limits.symmetry), **explorer_limits(limits))


class _ThreadChecks(CheckedModel):
    """Real threads. A state is a schedule, a transition a step of a thread."""

    name = "threads"
    says = "real threads of engines, log and submitters: every schedule with few preemptions"
    takes_depth = False
    counts = "schedules"
    scopes: Mapping[str, ThreadScope] = THREAD_SCOPES

    def bounds(self, scope: ThreadScope) -> Bounds:
        return scope.bounds

    def bounded(self, scope: ThreadScope, bounds: Bounds) -> ThreadScope:
        for name in bounds:
            if name not in scope.bounds:
                raise ConfigError(f"{name} is no bound here; there are {', '.join(scope.bounds)}")
        sizes = {name: number for name, number in bounds.items() if name in scope.scenario.sizes}
        own = {name: number for name, number in bounds.items() if name not in sizes}
        # What is notable may need what these bounds exclude, which would not be a fault.
        return replace(with_numbers(scope, own), sizes={**scope.sizes, **sizes}, required=False)

    def explore(self, scope: ThreadScope, limits: ExplorationLimits) -> Exploration:
        if limits.max_depth is not None:
            raise ConfigError("threads are explored without a limit of depth; give --states or --seconds")
        if limits.executor is not None:
            raise ConfigError("threads are explored on one machine, without --cluster")
        return explore_schedules(
            scope,
            executor=None if limits.jobs == 1 else ForkedProcesses(limits.jobs, limits.heard),
            max_states=limits.max_states,
            max_seconds=limits.max_seconds,
            progress=limits.progress,
        )

    def retell(self, scope: ThreadScope, refutation: Refutation) -> Counterexample:
        return retell_schedule(scope, refutation)

    def events(self, _scope: ThreadScope, _refutation: Refutation) -> Sequence[OffloadingEvent]:
        return ()


MODELS: dict[str, CheckedModel] = {
    one.name: one
    for one in (
        _ProtocolChecks(),
        _RequestChecks(),
        _ServingChecks(),
        _CopyChecks(),
        _HandOverChecks(),
        _TierChecks(),
        _ThreadChecks(),
    )
}
