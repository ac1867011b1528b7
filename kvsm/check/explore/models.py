"""The models that `kvsm check` knows, each with its scopes.

A scope is a set of bounds, and a proof holds within these bounds. A `small` scope is explored in seconds, a
`full` one in minutes. Any bound can be changed for one exploration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from kvsm.check.conformance.offload_events import events_of_path
from kvsm.check.explore.counterexample import Counterexample, Describable, retell
from kvsm.check.explore.explorer import ExplorationProgress, explore
from kvsm.check.explore.model import Exploration, Refutation
from kvsm.check.explore.rerun import RerunModel
from kvsm.check.explore.serving_pairs import PAIRS
from kvsm.check.explore.serving_scopes import SCOPES as SERVING_SCOPES
from kvsm.check.explore.serving_scopes import ServingModel, ServingScope
from kvsm.check.explore.serving_triples import TRIPLES
from kvsm.check.explore.tier_scopes import SCOPES as TIER_SCOPES
from kvsm.check.explore.tier_scopes import TierScope, TiersModel
from kvsm.check.protocol.explore import explore as explore_declaration
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
from kvsm.check.threads import SCOPES as THREAD_SCOPES
from kvsm.check.threads import ThreadScope, explore_schedules, retell_schedule
from kvsm.check.worlds.copy_world import CopyEngineWorld, CopyEngineWorldOptions
from kvsm.check.worlds.hand_over_options import HandOverWorldOptions
from kvsm.check.worlds.hand_over_world import HandOverWorld
from kvsm.check.worlds.serving_world import ServingWorld
from kvsm.check.worlds.two_tiers import TwoTierWorld
from kvsm.errors import ConfigError
from kvsm.events import OffloadingEvent
from kvsm.system.executors.executor import Executor, Heard, unheard
from kvsm.system.executors.forked import ForkedProcesses

Options = TypeVar("Options", bound=msgspec.Struct)

Bounds = dict[str, int]
"""The numbers of a scope by name. A switch is 0 or 1."""


class ExplorationLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How to explore; `explorer.explore` explains the other fields.

    symmetry: count interchangeable things as one if the model can. Without it there are more states, and the
        verdict is the same.
    heard: is told of each forked process that was lost. Its work is done again.
    """

    jobs: int = 1
    executor: Executor | None = None
    max_states: int | None = None
    max_depth: int | None = None
    max_seconds: float | None = None
    symmetry: bool = True
    progress: Callable[[ExplorationProgress], None] | None = None
    heard: Heard = unheard


class CheckedModel:
    """A model with its scopes. The simplest kind has one model for each scope, whose numbers are its bounds.

    says: one line for people.
    machines: the machines whose tables it exercises.
    takes_depth: whether `ExplorationLimits.max_depth` and `executor` are supported.
    counts: what it counts as states, for people.
    """

    name: str
    says: str
    machines: tuple[str, ...] = ()
    scopes: Mapping[str, Any]
    families: Mapping[str, Sequence[str]] = {}
    """Several scopes under one name."""
    takes_depth = True
    counts = "states"

    def versions(self) -> dict[str, tuple[Declaration, ...]]:
        """What is proved for any size; empty if nothing is.

        A version is a declaration within several bounds, the smallest first. They matter only for examples.
        """
        return {}

    def model(self, scope: Any) -> Describable:
        """The model whose path to a refutation can be retold."""
        raise NotImplementedError

    def bounds(self, scope: Any) -> Bounds:
        """The bounds of a scope."""
        return numbers_of(scope)

    def bounded(self, scope: Any, bounds: Bounds) -> Any:
        """The scope with these bounds instead of its own. Raises `ConfigError`."""
        return with_numbers(scope, bounds)

    def explore(self, scope: Any, limits: ExplorationLimits) -> Exploration:
        """Explore one scope."""
        return explore(self.model(scope), **explorer_limits(limits))

    def retell(self, scope: Any, refutation: Refutation) -> Counterexample:
        """A refutation of this scope, step by step."""
        return retell(self.model(scope), refutation)

    def events(self, scope: Any, refutation: Refutation) -> Sequence[OffloadingEvent]:
        """The events of a core on the way; none if the model has none."""
        model = self.model(scope)
        return model.events(refutation.path) if isinstance(model, RerunModel) else ()

    def events_of(self, _declared: Declaration, _path: Sequence[Move]) -> Sequence[OffloadingEvent]:
        """The events of a core that takes a path of a declaration; none if they are not known."""
        return ()


class _DeclaredChecks(CheckedModel):
    """A declared protocol, which has its own explorer."""

    takes_depth = False

    def declared(self, scope: Any) -> Declaration:
        """The declaration within the bounds of a scope."""
        raise NotImplementedError

    def model(self, scope: Any) -> ProtocolModel:
        return ProtocolModel(self.declared(scope))

    def events(self, scope: Any, refutation: Refutation) -> Sequence[OffloadingEvent]:
        return self.events_of(self.declared(scope), refutation.path)

    def explore(self, scope: Any, limits: ExplorationLimits) -> Exploration:
        given = msgspec.structs.asdict(limits)
        del given["heard"]
        if given.pop("max_depth") is not None:
            raise ConfigError("the protocol is explored without a limit of depth; give --states or --seconds")
        if given.pop("executor") is not None:
            raise ConfigError(f"{self.name} is explored by arrays on one machine, without --cluster")
        return explore_declaration(self.declared(scope), **given)


class _ProtocolChecks(_DeclaredChecks):
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


class _RequestChecks(_DeclaredChecks):
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
    scopes: Mapping[str, ServingScope] = {**SERVING_SCOPES, **PAIRS, **TRIPLES}
    families: Mapping[str, Sequence[str]] = {
        "pairs": tuple(PAIRS),
        "triples": tuple(TRIPLES),
        "every-small": (*_SMALL, *PAIRS, *TRIPLES),
    }

    def model(self, scope: ServingScope) -> RerunModel[ServingWorld]:
        """Only for retelling: to explore, `ServingModel` saves and restores its worlds instead."""
        return RerunModel(
            self.name, ServingModel(scope).bounds, lambda: ServingWorld(scope.options, keep_events=True)
        )

    def bounds(self, scope: ServingScope) -> Bounds:
        options = scope.options
        return {"requests": len(options.requests), **numbers_of(options), **numbers_of(options.budgets)}

    def bounded(self, scope: ServingScope, bounds: Bounds) -> ServingScope:
        options, left = scope.options, dict(bounds)
        requests = left.pop("requests", len(options.requests))
        if requests > len(options.requests):
            raise ConfigError(f"requests is {requests}; this scope has {len(options.requests)} to take from")
        of_budgets = {name: left.pop(name) for name in numbers_of(options.budgets) if name in left}
        return ServingScope(
            f"{scope.name}, with other bounds",
            replace(
                with_numbers(options, left),
                requests=options.requests[:requests],
                budgets=with_numbers(options.budgets, of_budgets),
            ),
            scope.sometimes,
            # A "sometimes" may need a disturbance that these bounds exclude, which would not be a fault.
            required=False,
        )

    def explore(self, scope: ServingScope, limits: ExplorationLimits) -> Exploration:
        return explore(ServingModel(scope, renamed=limits.symmetry), **explorer_limits(limits))


class _TierChecks(CheckedModel):
    name = "tiers"
    says = "the real cores of a host pool and of a disk below it, with kills and power losses"
    machines = ("block", "transfer", "lease")
    scopes: Mapping[str, TierScope] = TIER_SCOPES

    def model(self, scope: TierScope) -> RerunModel[TwoTierWorld]:
        """Only for retelling: to explore, `TiersModel` saves and restores its worlds instead."""
        return RerunModel(self.name, TiersModel(scope).bounds, lambda: TwoTierWorld(scope.options))

    def bounds(self, scope: TierScope) -> Bounds:
        return numbers_of(scope.options)

    def bounded(self, scope: TierScope, bounds: Bounds) -> TierScope:
        options = with_numbers(scope.options, bounds)
        # A "sometimes" may need what these bounds exclude, which would not be a fault.
        return TierScope(f"{scope.name}, with other bounds", options, scope.sometimes, required=False)

    def explore(self, scope: TierScope, limits: ExplorationLimits) -> Exploration:
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


def explorer_limits(limits: ExplorationLimits) -> dict[str, Any]:
    """The limits as keyword arguments of `explorer.explore`."""
    given = msgspec.structs.asdict(limits)
    del given["symmetry"], given["heard"]
    return given


def numbers_of(options: msgspec.Struct) -> Bounds:
    """The fields that are numbers or switches."""
    fields = msgspec.structs.asdict(options)
    return {name: int(value) for name, value in fields.items() if type(value) in (int, bool)}


def with_numbers(options: Options, bounds: Bounds) -> Options:
    """The options with these numbers instead of their own. Raises `ConfigError` for an unknown name."""
    known = msgspec.structs.asdict(options)
    for name in bounds:
        if name not in numbers_of(options):
            raise ConfigError(f"{name} is no bound here; there are {', '.join(numbers_of(options))}")
    return replace(options, **{name: type(known[name])(n) for name, n in bounds.items()})
