"""A base class for worlds around another world."""

from __future__ import annotations

from collections.abc import Sequence

from kvsm.check.worlds.world import Action, World
from kvsm.events import OffloadingEvent


class WrappedWorld:
    """Base of a `World` around another one. A subclass adds actions in `actions`, `draw` and `do`.

    world: the inner world.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def events(self) -> Sequence[OffloadingEvent]:
        """The events of the inner world."""
        return self.world.events

    def check(self) -> None:
        """Check every property. Raises `PropertyBroken`."""
        self.world.check()

    def wind_down(self) -> Action | None:
        return self.world.wind_down()

    def describe(self) -> dict[str, str]:
        return self.world.describe()

    def fingerprint(self) -> bytes:
        return self.world.fingerprint()
