"""A model over a world that cannot be copied: each state is made again, from the actions that led to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from kvsm.checker.model import Kind, Requirement
from kvsm.events import OffloadingEvent
from kvsm.properties import Property
from kvsm.worlds.world import Action, World

AnyWorld = TypeVar("AnyWorld", bound=World)


class Told(Generic[AnyWorld]):
    """A world, and the actions that made it what it is."""

    __slots__ = ("path", "world")

    def __init__(self, world: AnyWorld, path: tuple[Action, ...]) -> None:
        self.world, self.path = world, path


class RerunModel(Generic[AnyWorld]):
    """A `Model`. make_world: the same world each time. sometimes: (id, what it says, whether it holds).
    describe: what can be seen of a world, for a counterexample.

    Every world has two properties: what it watches always holds (it says itself which one does not), and
    winding down leads to rest (S9).
    """

    def __init__(
        self,
        name: str,
        bounds: str,
        make_world: Callable[[], AnyWorld],
        sometimes: Sequence[tuple[str, str, Callable[[AnyWorld], bool]]] = (),
        describe: Callable[[AnyWorld], dict[str, str]] = lambda _world: {},
    ) -> None:
        self.name, self.bounds, self._make_world, self._describe = name, bounds, make_world, describe
        self.requirements: list[Requirement[Told[AnyWorld]]] = [
            Requirement(Kind.ALWAYS, "checks", "the world's own checks", _checks),
            Requirement(
                Kind.EVENTUALLY, Property.PROGRESS, "all copies end, and all comes to rest", self._is_at_rest
            ),
        ]
        for word, says, holds in sometimes:
            self.requirements.append(Requirement(Kind.SOMETIMES, word, says, _of_world(holds)))

    def initial(self) -> Iterable[Told[AnyWorld]]:
        return [Told(self._make_world(), ())]

    def actions(self, state: Told[AnyWorld]) -> list[Action]:
        return state.world.actions()

    def next(self, state: Told[AnyWorld], action: Action) -> Told[AnyWorld] | None:
        if not state.world.do(action):
            return None
        state.path = (*state.path, action)
        return state

    def fingerprint(self, state: Told[AnyWorld]) -> bytes:
        return state.world.fingerprint()

    def wind_down(self, state: Told[AnyWorld]) -> Action | None:
        return state.world.wind_down()

    def save(self, state: Told[AnyWorld]) -> tuple[Action, ...]:
        return state.path

    def load(self, saved: tuple[Action, ...]) -> Told[AnyWorld]:
        world = self._make_world()
        for action in saved:
            world.do(action)
        return Told(world, saved)

    def describe(self, state: Told[AnyWorld]) -> dict[str, str]:
        return self._describe(state.world)

    def events(self, path: Sequence[Action]) -> Sequence[OffloadingEvent]:
        """Those of the world after these actions, the last of which may raise."""
        world = self._make_world()
        for action in path[:-1]:
            world.do(action)
        with suppress(Exception):
            world.do(path[-1])
        return world.events

    def _is_at_rest(self, state: Told[AnyWorld]) -> bool:
        return state.world.wind_down() is None


def _checks(state: Told[AnyWorld]) -> bool:
    state.world.check()
    return True


def _of_world(holds: Callable[[AnyWorld], bool]) -> Callable[[Told[AnyWorld]], bool]:
    return lambda state: holds(state.world)
