"""A world: real code among things that do nothing by themselves.

An engine, workers, a device, clients: in a world each of their moves is an action that somebody chooses. So
one and the same world is explored (every action in every state: `kvsm.checker.explorer`), walked at random
(`kvsm.checker.walk`), driven by Hypothesis (`kvsm.testing`) and told again, action for action, when it has
failed. What a world watches, it checks by itself, against books of its own that share no code with the
ledger.

An action is a tuple of its name and of small numbers. It names a request, a copy or a report by its place
among those there are, never by an id: so a run from which actions were left out is a run still.
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
    """Everything that the checkers need. Two worlds to which the same was done are equal."""

    @property
    def events(self) -> Sequence[OffloadingEvent]:
        """Of its offload core, so far; none, if it was told to keep none."""

    def actions(self) -> list[Action]:
        """All that may happen now, in an order that depends on nothing but what was done before."""

    def draw(self, random: Random) -> Action:
        """One of the things that may happen now: the likelier ones more often. Cheaper than `actions`."""

    def do(self, action: Action) -> bool:
        """Let it happen. False, with nothing changed, if it cannot happen here (any more).

        Raises `PropertyBroken` if a property does not hold afterwards, as far as it is cheap to see. Any
        other error is a finding, too: every call that is made here is a legal one (S8).
        """

    def check(self) -> None:
        """Look at everything. Raises `PropertyBroken`."""

    def wind_down(self) -> Action | None:
        """The next action on the way to rest: all copies end, all requests finish. None: it is at rest."""

    def describe(self) -> dict[str, str]:
        """What can be seen of it, for people: each thing by its name."""

    def fingerprint(self) -> bytes:
        """What matters for the future, ids renamed by rank: equal for worlds that cannot be told apart by
        what is yet to happen."""


class Finding(msgspec.Struct, frozen=True, rename={"property": "property_id"}):
    """What went wrong.

    property: what is broken; a word of its own if the model is not about kvsm's properties.
    message: what was seen.
    """

    property: Property | str
    message: str

    def __str__(self) -> str:
        return f"{self.property}: {self.message}"


def finding_of(error: Exception) -> Finding:
    """An error that a world raised, as a finding."""
    if isinstance(error, PropertyBroken):
        return Finding(error.property, error.message)
    if isinstance(error, IllegalTransition | InvalidEvent):
        return Finding(Property.LEGAL_CALLS, f"a legal call was refused: {error}")
    if isinstance(error, KvsmError):
        return Finding(Property.LEGAL_CALLS, f"a legal call failed: {error}")
    return Finding(Property.LEGAL_CALLS, f"a legal call raised {described(error)}")
