"""A world: real code in surroundings that act only when a driver says so.

Each move of an engine, a worker, a device or a client is an action, and a driver chooses it. So the same
world can be explored (`kvsm.check.explore.explorer` takes every action in every state), walked at random
(`kvsm.check.walks.walk`), driven by Hypothesis (`kvsm.testing`), and replayed action by action after a
failure. A world checks itself against reference books that share no code with the ledger.

An action is a tuple of a name and small numbers. It names a request, a copy or a report by its position among
the existing ones, never by an id. So a run is still valid after some of its actions are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

import msgspec

from kvsm.errors import IllegalTransition, InvalidEvent, KvsmError, PropertyBroken, described
from kvsm.events import OffloadingEvent
from kvsm.properties import Property

Action = tuple[str | int, ...]
"""A name and its numbers, as ("preempt", 0)."""


class World(Protocol):
    """What the checkers need of a world. Worlds with the same options and the same actions are equal."""

    @property
    def events(self) -> Sequence[OffloadingEvent]:
        """The events of its offload core so far; empty if the world has no log."""

    def actions(self) -> list[Action]:
        """All actions that may happen now, in an order that depends on earlier actions alone."""

    def draw(self, random: Random) -> Action:
        """Draw one action that may happen now, common ones more often. Cheaper than `actions`."""

    def do(self, action: Action) -> bool:
        """Carry out the action. Returns False, with nothing changed, if it cannot happen now.

        Raises `PropertyBroken` if a cheap check finds a broken property afterwards. Any other error is a
        finding too, because all calls of a world are legal (S8).
        """

    def check(self) -> None:
        """Check every property. Raises `PropertyBroken`."""

    def wind_down(self) -> Action | None:
        """The next action on the way to rest, where all copies have ended and all requests are finished.
        None at rest."""

    def describe(self) -> dict[str, str]:
        """Describe the state for people: name of a thing -> what it holds or does."""

    def fingerprint(self) -> bytes:
        """A hash of all state that decides the future, with ids renamed. Equal hash: equal future."""


class Finding(msgspec.Struct, frozen=True, rename={"property": "property_id"}):
    """A broken property.

    property: the property; a name of the model's own if the model is not about kvsm's properties.
    message: what was observed.
    place: the line that raised an error, "FILE:LINE"; empty without an error, or if its line is irrelevant.
    """

    property: Property | str
    message: str
    place: str = ""

    def is_like(self, other: Finding) -> bool:
        """Whether both may be one defect: the same property, broken at the same place."""
        return (self.property, self.place) == (other.property, other.place)

    def __str__(self) -> str:
        return f"{self.property}: {self.message}"


def finding_of(error: Exception) -> Finding:
    """Convert an error that a world raised to a finding."""
    if isinstance(error, PropertyBroken):
        return Finding(error.property, error.message, error.place)
    if isinstance(error, IllegalTransition | InvalidEvent):
        return Finding(Property.LEGAL_CALLS, f"a legal call was refused: {error}")
    if isinstance(error, KvsmError):
        return Finding(Property.LEGAL_CALLS, f"a legal call failed: {error}")
    return Finding(Property.LEGAL_CALLS, f"a legal call raised {described(error)}")
