"""A model with its scopes: what `kvsm check` explores under one name.

A scope is a set of bounds, and a proof holds within these bounds. A `small` scope is explored in seconds, a
`full` one in minutes. Any bound can be changed for one exploration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from kvsm.check.explore.counterexample import Counterexample, Describable, retell
from kvsm.check.explore.explorer import ExplorationProgress, explore
from kvsm.check.explore.model import Exploration, Refutation
from kvsm.check.explore.rerun import RerunModel
from kvsm.errors import ConfigError
from kvsm.events import OffloadingEvent
from kvsm.system.executors.executor import Executor, Heard, unheard

Options = TypeVar("Options", bound=msgspec.Struct)

Bounds = dict[str, int]
"""The numbers of a scope by name. A switch is 0 or 1."""


class ExplorationLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How to explore; `explorer.explore` explains the other fields.

    symmetry: count interchangeable things as one if the model can. Without it there are more states, and the
        verdict is the same.
    heard: is called for each forked process that was lost. Its work is repeated.
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
    """A model with its scopes. By default the bounds of a scope are its numeric fields.

    says: one line for people.
    machines: the machines whose tables it exercises.
    takes_depth: whether `ExplorationLimits.max_depth` and `executor` are supported.
    counts: the plural noun for its states in messages.
    """

    name: str
    says: str
    machines: tuple[str, ...] = ()
    scopes: Mapping[str, Any]
    families: Mapping[str, Sequence[str]] = {}
    """A name on the command line -> the scopes that it selects."""
    takes_depth = True
    counts = "states"

    def model(self, scope: Any) -> Describable:
        """Return a model of this scope that can describe each state on the path to a refutation."""
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
        """Return the events that a core emits on the path to the refutation; none if the model emits none."""
        model = self.model(scope)
        return model.events(refutation.path) if isinstance(model, RerunModel) else ()


def explorer_limits(limits: ExplorationLimits) -> dict[str, Any]:
    """The limits as keyword arguments of `explorer.explore`."""
    given = msgspec.structs.asdict(limits)
    del given["symmetry"], given["heard"]
    return given


def numbers_of(options: msgspec.Struct) -> Bounds:
    """Return the int and bool fields by name, as ints."""
    fields = msgspec.structs.asdict(options)
    return {name: int(value) for name, value in fields.items() if type(value) in (int, bool)}


def with_numbers(options: Options, bounds: Bounds) -> Options:
    """The options with these numbers instead of their own. Raises `ConfigError` for an unknown name."""
    known = msgspec.structs.asdict(options)
    for name in bounds:
        if name not in numbers_of(options):
            raise ConfigError(f"{name} is no bound here; there are {', '.join(numbers_of(options))}")
    return replace(options, **{name: type(known[name])(n) for name, n in bounds.items()})
