"""The models that `kvsm check` knows, each with its scopes: what is explored, and how far.

A scope is a set of bounds, and a proof holds within them. `small` is explored in seconds, `full` in minutes.
Every bound can be changed, which makes a scope of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from kvsm.checker.counterexample import Counterexample, retell
from kvsm.checker.describing import describe_ledger
from kvsm.checker.explorer import Progress, explore
from kvsm.checker.model import Exploration, Refutation
from kvsm.checker.protocol.explore import explore_protocol
from kvsm.checker.protocol.offload import offload_protocol
from kvsm.checker.protocol.plain import ProtocolModel
from kvsm.checker.protocol.scope import SCOPES as PROTOCOL_SCOPES
from kvsm.checker.protocol.scope import ProtocolScope
from kvsm.checker.rerun import RerunModel
from kvsm.checker.serving import SCOPES as SERVING_SCOPES
from kvsm.checker.serving import ServingModel, ServingScope
from kvsm.errors import ConfigError
from kvsm.events import OffloadingEvent
from kvsm.worlds.copy_engine import CopyEngineWorld, CopyEngineWorldOptions
from kvsm.worlds.serving import ServingWorld

Options = TypeVar("Options", bound=msgspec.Struct)

Bounds = dict[str, int]
"""The numbers of a scope, by their names; a switch is 0 or 1."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How an exploration is carried out; see `explorer.explore`. symmetry: things that are alike count as
    one, where a model can tell; without it there are more states, and the verdict is the same."""

    jobs: int = 1
    max_states: int | None = None
    max_depth: int | None = None
    max_seconds: float | None = None
    symmetry: bool = True
    progress: Callable[[Progress], None] | None = None


class CheckedModel(Protocol):
    """A model with its scopes. machines: those whose tables it goes through."""

    @property
    def name(self) -> str: ...

    @property
    def says(self) -> str: ...

    @property
    def machines(self) -> tuple[str, ...]: ...

    @property
    def scopes(self) -> Mapping[str, Any]: ...

    @property
    def takes_depth(self) -> bool:
        """Whether `Limits.max_depth` can be given."""

    def bounds(self, scope: Any) -> Bounds: ...

    def bounded(self, scope: Any, bounds: Bounds) -> Any:
        """The scope with these bounds instead of its own. Raises `ConfigError`."""

    def explore(self, scope: Any, limits: Limits) -> Exploration: ...

    def retell(self, scope: Any, refutation: Refutation) -> Counterexample: ...

    def events(self, scope: Any, refutation: Refutation) -> Sequence[OffloadingEvent]:
        """What the real core did on the way; none, if it has no part in the model."""


class _Protocol:
    name = "protocol"
    says = "the tables, with copies that start, read, write and report, on streams of several workers"
    machines: tuple[str, ...] = ("block", "transfer", "lease")
    scopes: Mapping[str, ProtocolScope] = PROTOCOL_SCOPES
    takes_depth = False

    def bounds(self, scope: ProtocolScope) -> Bounds:
        return numbers_of(scope)

    def bounded(self, scope: ProtocolScope, bounds: Bounds) -> ProtocolScope:
        return with_numbers(scope, bounds)

    def explore(self, scope: ProtocolScope, limits: Limits) -> Exploration:
        given = msgspec.structs.asdict(limits)
        if given.pop("max_depth") is not None:
            raise ConfigError("the protocol is explored without a limit of depth; give --states or --seconds")
        return explore_protocol(scope, **given)

    def retell(self, scope: ProtocolScope, refutation: Refutation) -> Counterexample:
        return retell(ProtocolModel(offload_protocol(scope)), refutation)

    def events(self, _scope: ProtocolScope, _refutation: Refutation) -> Sequence[OffloadingEvent]:
        return ()


class _Copies:
    name = "copies"
    says = "the real engine of streams and events, on a device whose every step is chosen"
    machines: tuple[str, ...] = ()
    scopes: Mapping[str, CopyEngineWorldOptions] = {
        "small": CopyEngineWorldOptions(holds=0),
        "held": CopyEngineWorldOptions(copies=1, kernels=2),
        "full": CopyEngineWorldOptions(kernels=2, bad=1),
    }
    takes_depth = True

    def bounds(self, scope: CopyEngineWorldOptions) -> Bounds:
        return numbers_of(scope)

    def bounded(self, scope: CopyEngineWorldOptions, bounds: Bounds) -> CopyEngineWorldOptions:
        return with_numbers(scope, bounds)

    def explore(self, scope: CopyEngineWorldOptions, limits: Limits) -> Exploration:
        return explore(self._model(scope), **explorer_limits(limits))

    def retell(self, scope: CopyEngineWorldOptions, refutation: Refutation) -> Counterexample:
        return retell(self._model(scope), refutation)

    def events(self, _scope: CopyEngineWorldOptions, _refutation: Refutation) -> Sequence[OffloadingEvent]:
        return ()

    def _model(self, scope: CopyEngineWorldOptions) -> RerunModel[CopyEngineWorld]:
        told = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in numbers_of(scope).items())
        return RerunModel(self.name, told, lambda: CopyEngineWorld(scope), describe=CopyEngineWorld.describe)


class _Serving:
    name = "serving"
    says = "the real offloader and scheduler with a small engine, and copies that end in any order"
    machines = ("block", "transfer", "lease", "request")
    takes_depth = True

    @property
    def scopes(self) -> Mapping[str, ServingScope]:
        return SERVING_SCOPES

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
            msgspec.structs.replace(
                with_numbers(options, left),
                requests=options.requests[:requests],
                budgets=with_numbers(options.budgets, of_budgets),
            ),
            scope.sometimes,
            # Without the disturbance that one of them needs it cannot be met, and nothing is wrong.
            required=False,
        )

    def explore(self, scope: ServingScope, limits: Limits) -> Exploration:
        return explore(ServingModel(scope, renamed=limits.symmetry), **explorer_limits(limits))

    def retell(self, scope: ServingScope, refutation: Refutation) -> Counterexample:
        return retell(self._told(scope), refutation)

    def events(self, scope: ServingScope, refutation: Refutation) -> Sequence[OffloadingEvent]:
        return self._told(scope).events(refutation.path)

    def _told(self, scope: ServingScope) -> RerunModel[ServingWorld]:
        """The same, for a path that is done once."""
        return RerunModel(
            self.name,
            ServingModel(scope).bounds,
            lambda: ServingWorld(scope.options, keep_events=True),
            describe=lambda world: describe_ledger(world.engine.core.ledger),
        )


MODELS: dict[str, CheckedModel] = {one.name: one for one in (_Protocol(), _Serving(), _Copies())}


def explorer_limits(limits: Limits) -> dict[str, Any]:
    """Those that `explorer.explore` takes, by their names there."""
    given = msgspec.structs.asdict(limits)
    del given["symmetry"]
    return given


def numbers_of(options: msgspec.Struct) -> Bounds:
    """The fields that are numbers or switches."""
    fields = msgspec.structs.asdict(options)
    return {name: int(value) for name, value in fields.items() if type(value) in (int, bool)}


def with_numbers(options: Options, bounds: Bounds) -> Options:
    """The options with these instead of their own. Raises `ConfigError` for a name that is none of theirs."""
    known = msgspec.structs.asdict(options)
    for name in bounds:
        if name not in numbers_of(options):
            raise ConfigError(f"{name} is no bound here; there are {', '.join(numbers_of(options))}")
    return msgspec.structs.replace(options, **{name: type(known[name])(n) for name, n in bounds.items()})
