"""A world: real code among things that do nothing by themselves.

Each move of an engine, a worker, a device or a client is an action, and a driver chooses it. So one world is
explored (`kvsm.check.explore.explorer` takes every action in every state), walked at random
(`kvsm.check.walks.walk`), driven by Hypothesis (`kvsm.testing`), and repeated action by action after a
failure. A world checks itself, against reference books that share no code with the ledger.

An action is a tuple of a name and small numbers. It names a request, a copy or a report by its place among
those that exist now, never by an id. So a run stays a run when actions are left out.
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
"""What happens next: ("preempt", 0)."""


class World(Protocol):
    """What the checkers need. Two worlds in which the same actions happened are equal."""

    @property
    def events(self) -> Sequence[OffloadingEvent]:
        """The events of its offload core so far; none if it keeps none."""

    def actions(self) -> list[Action]:
        """All that may happen now, in an order that only earlier actions decide."""

    def draw(self, random: Random) -> Action:
        """One action that may happen now; likely ones are drawn more often. Cheaper than `actions`."""

    def do(self, action: Action) -> bool:
        """Let it happen. False, with nothing changed, if it cannot happen now.

        Raises `PropertyBroken` if a property does not hold afterwards, as far as that is cheap to see. Any
        other error is a finding too, for every call is legal (S8) here.
        """

    def check(self) -> None:
        """Check every property. Raises `PropertyBroken`."""

    def wind_down(self) -> Action | None:
        """The next action on the way to rest, where all copies have ended and all requests are finished.
        None at rest."""

    def describe(self) -> dict[str, str]:
        """What can be seen of it, for people: each thing by its name."""

    def fingerprint(self) -> bytes:
        """What matters for the future, with ids renamed. Worlds with one fingerprint have one future."""


class Finding(msgspec.Struct, frozen=True, rename={"property": "property_id"}):
    """What went wrong.

    property: what is broken; a word of its own if the model is not about kvsm's properties.
    message: what was seen.
    place: the line that raised an error, "FILE:LINE"; empty if none did, or if it does not matter.
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
    """An error that a world raised, as a finding."""
    if isinstance(error, PropertyBroken):
        return Finding(error.property, error.message, error.place)
    if isinstance(error, IllegalTransition | InvalidEvent):
        return Finding(Property.LEGAL_CALLS, f"a legal call was refused: {error}")
    if isinstance(error, KvsmError):
        return Finding(Property.LEGAL_CALLS, f"a legal call failed: {error}")
    return Finding(Property.LEGAL_CALLS, f"a legal call raised {described(error)}")
