"""A model over a world that cannot be copied: each state is rebuilt by repeating its actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from kvsm.check.worlds.requirement import Kind, Requirement
from kvsm.check.worlds.world import Action, World
from kvsm.events import OffloadingEvent
from kvsm.properties import Property

AnyWorld = TypeVar("AnyWorld", bound=World)


class ReachedWorld(Generic[AnyWorld]):
    """A world and the actions that led to its state."""

    __slots__ = ("path", "world")

    def __init__(self, world: AnyWorld, path: tuple[Action, ...]) -> None:
        self.world, self.path = world, path


class RerunModel(Generic[AnyWorld]):
    """A `Model` with two requirements: the world's own checks hold, and winding down leads to rest.

    name, bounds: for people.
    make_world: makes the same world each time.
    """

    def __init__(self, name: str, bounds: str, make_world: Callable[[], AnyWorld]) -> None:
        self.name, self.bounds, self._make_world = name, bounds, make_world
        says = "all copies end, and all comes to rest"
        self.requirements: tuple[Requirement[ReachedWorld[AnyWorld]], ...] = (
            Requirement(Kind.ALWAYS, "checks", "the world's own checks", _checks),
            Requirement(Kind.EVENTUALLY, Property.PROGRESS, says, _is_at_rest),
        )

    def initial(self) -> Iterable[ReachedWorld[AnyWorld]]:
        return [ReachedWorld(self._make_world(), ())]

    def actions(self, state: ReachedWorld[AnyWorld]) -> list[Action]:
        return state.world.actions()

    def next(self, state: ReachedWorld[AnyWorld], action: Action) -> ReachedWorld[AnyWorld] | None:
        if not state.world.do(action):
            return None
        state.path = (*state.path, action)
        return state

    def fingerprint(self, state: ReachedWorld[AnyWorld]) -> bytes:
        return state.world.fingerprint()

    def wind_down(self, state: ReachedWorld[AnyWorld]) -> Action | None:
        return state.world.wind_down()

    def save(self, state: ReachedWorld[AnyWorld]) -> tuple[Action, ...]:
        return state.path

    def load(self, saved: tuple[Action, ...]) -> ReachedWorld[AnyWorld]:
        world = self._make_world()
        for action in saved:
            world.do(action)
        return ReachedWorld(world, saved)

    def describe(self, state: ReachedWorld[AnyWorld]) -> dict[str, str]:
        return state.world.describe()

    def events(self, path: Sequence[Action]) -> Sequence[OffloadingEvent]:
        """The events of the world after these actions. The last action may raise."""
        world = self._make_world()
        for action in path[:-1]:
            world.do(action)
        with suppress(Exception):
            world.do(path[-1])
        return world.events


def _checks(state: ReachedWorld[AnyWorld]) -> bool:
    """Run the world's own checks, which raise if a property is broken."""
    state.world.check()
    return True


def _is_at_rest(state: ReachedWorld[AnyWorld]) -> bool:
    return state.world.wind_down() is None
