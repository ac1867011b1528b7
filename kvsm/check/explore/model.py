"""What a model is, and what an exploration reports about it.

A model has initial states, actions, the state after an action, and what must hold (`Requirement`).

A state may be a live object that `next` changes and returns. The explorer keeps the result of `save`, and
takes each action on a fresh object from `load`. An exception in `next` refutes the model, because real code
checks itself (`kvsm.check.worlds`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar

import msgspec

from kvsm.check.explore.coverage import TableEdge
from kvsm.check.worlds.requirement import Requirement
from kvsm.check.worlds.world import Finding

State = TypeVar("State")
Move = TypeVar("Move")


class Verdict(Enum):
    """The result of an exploration."""

    PROVED = "PROVED"
    """Within the bounds every reachable state was seen, and every requirement holds."""
    REFUTED = "REFUTED"
    """A requirement does not hold."""
    UNDETERMINED = "UNDETERMINED"
    """Nothing was refuted, but a limit ended the search."""


INTERRUPT = "an interrupt"
"""The limit of an exploration that Ctrl-C ended."""


class Model(Protocol[State, Move]):
    """What the explorer needs. Everything must be deterministic."""

    @property
    def name(self) -> str:
        """Its name on the command line."""

    @property
    def bounds(self) -> str:
        """What is explored, for people: "2 requests, 3 device blocks, ...". A proof holds within these."""

    @property
    def requirements(self) -> Sequence[Requirement[State]]:
        """What must hold."""

    def initial(self) -> Iterable[State]:
        """The states from which the exploration starts."""

    def actions(self, state: State) -> Iterable[Move]:
        """What may happen in this state, in a fixed order."""

    def next(self, state: State, action: Move) -> State | None:
        """The state after the action. The given state is not used again.

        None if the action does not apply; then nothing has changed.
        """

    def fingerprint(self, state: State) -> Hashable:
        """Equal for states that no requirement and no later action can distinguish.

        It should be small, and must be the same in every process.
        """

    def wind_down(self, state: State) -> Move | None:
        """The action that leads towards rest; None if there is nothing left to wind down."""

    def save(self, state: State) -> Any:
        """The state in a form that can be kept and sent; the state itself if it is immutable."""

    def load(self, saved: Any) -> State:
        """The state that `save` saved."""


class Refutation(msgspec.Struct, frozen=True):
    """A shortest path to a broken requirement.

    path: the actions, the last one included.
    start: which initial state it starts from.
    circle: for an "eventually", the place in the path where winding down enters a cycle; -1 if it does not.
    """

    finding: Finding
    path: tuple[Any, ...]
    start: int = 0
    circle: int = -1


class Exploration(msgspec.Struct, frozen=True, kw_only=True):
    """What an exploration saw.

    states: how many distinct states.
    transitions: how many actions were taken.
    depth: actions from an initial state to the farthest state.
    seconds: wall time.
    limit: what ended an undetermined search.
    reached: the "sometimes" requirements that held in some state.
    unreached: the "sometimes" requirements that held in no state.
    actions: how often each action was taken, by its name.
    edges: the edges of the machine tables that were taken; `coverage.never_taken` gives the others.
    """

    model: str
    bounds: str
    verdict: Verdict
    states: int
    transitions: int
    depth: int
    seconds: float
    limit: str = ""
    refutation: Refutation | None = None
    reached: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    actions: dict[str, int] = {}
    edges: tuple[TableEdge, ...] = ()

    @property
    def states_per_second(self) -> float:
        """States found per second of wall time."""
        return self.states / self.seconds if self.seconds else 0.0
