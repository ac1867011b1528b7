"""A model whose states are live worlds, saved and loaded between the actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from kvsm.check.worlds.requirement import Requirement
from kvsm.check.worlds.saving import Saved, Saver
from kvsm.check.worlds.world import Action


class WorldScope(msgspec.Struct, frozen=True):
    """The options of a world, and the goals that its exploration should reach.

    meets: the goals.
    required: whether each goal must be reached.
    says: text that is added to the bounds in messages.
    """

    name: str
    options: Any
    meets: tuple[Requirement[Any], ...] = ()
    required: bool = True
    says: str = ""


class LiveWorld(Saved, Protocol):
    """The methods of a world that a live model calls; `kvsm.check.worlds.world.World` explains them."""

    def actions(self) -> list[Action]: ...

    def do(self, action: Action) -> bool: ...

    def wind_down(self) -> Action | None: ...

    def fingerprint(self, *, renamed: bool = True) -> bytes:
        """renamed: whether worlds that differ only in the numbering of their things count as one state."""


AnyWorld = TypeVar("AnyWorld", bound=LiveWorld)


class LiveModel(Generic[AnyWorld]):
    """A `Model` whose states are live worlds.

    renamed: passed to `LiveWorld.fingerprint`. The verdict must be the same with either value.
    """

    family: ClassVar[str]
    """The name of the model in `kvsm check`."""
    always: ClassVar[Sequence[Requirement[Any]]]
    """What must hold within any scope."""

    def __init__(self, scope: WorldScope, *, renamed: bool = True) -> None:
        self.scope, self.renamed = scope, renamed
        self._saver = Saver(self.make_world())
        self.save = self._saver.save

    def __reduce__(self) -> tuple[Callable[..., LiveModel[AnyWorld]], tuple[WorldScope]]:
        # A worker of a cluster makes its own world: the saver's may hold locks or a native ledger.
        return partial(type(self), renamed=self.renamed), (self.scope,)

    def make_world(self) -> AnyWorld:
        """A new world of this scope."""
        raise NotImplementedError

    @property
    def bounds(self) -> str:
        raise NotImplementedError

    @property
    def name(self) -> str:
        return f"{self.family}, {self.scope.name}"

    @property
    def requirements(self) -> Sequence[Requirement[AnyWorld]]:
        required = self.scope.required
        return (*self.always, *(replace(goal, required=required) for goal in self.scope.meets))

    def initial(self) -> Iterable[AnyWorld]:
        return [self.make_world()]

    def actions(self, state: AnyWorld) -> list[Action]:
        return state.actions()

    def next(self, state: AnyWorld, action: Action) -> AnyWorld | None:
        return state if state.do(action) else None

    def fingerprint(self, state: AnyWorld) -> bytes:
        return state.fingerprint(renamed=self.renamed)

    def wind_down(self, state: AnyWorld) -> Action | None:
        return state.wind_down()

    def load(self, saved: bytes) -> AnyWorld:
        return self._saver.load(saved)
