"""A small world for the tests of the walk."""

from __future__ import annotations

from random import Random

from kvsm.check.worlds.world import Action
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadingEvent
from kvsm.properties import Property


class Counting:
    """A world of a number that goes up and down. It must not exceed `most`, and is 0 at rest."""

    events: tuple[OffloadingEvent, ...] = ()

    def __init__(self, most: int) -> None:
        self.most, self.number = most, 0
        self.kinds: list[str | int] = []

    def actions(self) -> list[Action]:
        return [("up", 0), ("down",)] if self.number else [("up", 0)]

    def draw(self, random: Random) -> Action:
        return ("up", 0) if random.random() < 0.9 else ("down",)

    def do(self, action: Action) -> bool:
        kind, *numbers = action
        if kind == "up":
            self.number += 1 + sum(int(one) for one in numbers)
        elif kind == "down" and self.number:
            self.number -= 1
        else:
            return kind == "look"
        self.kinds.append(kind)
        if self.number > self.most:
            raise PropertyBroken(Property.CONSERVATION, f"it is {self.number}, above {self.most}")
        return True

    def check(self) -> None:
        """Do nothing: there is nothing else to check."""

    def wind_down(self) -> Action | None:
        return ("down",) if self.number else None

    def describe(self) -> dict[str, str]:
        return {"number": str(self.number)}

    def fingerprint(self) -> bytes:
        return self.number.to_bytes(4, "big")
