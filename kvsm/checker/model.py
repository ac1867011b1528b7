"""What a model is: a few small functions. And what an exploration says of it.

A model has initial states, actions, the state that follows, and properties. Three sorts of property:

==========  =====================================================  ========================================
always      holds in every state                                   a state in which it does not refutes it
sometimes   holds in some state: the exploration has been there    never met, and all states seen: refuted
eventually  from every state, winding down leads to where it       a circle, or an end where it does not
            holds                                                  hold, refutes it
==========  =====================================================  ========================================

A "sometimes" is looked at after each action, so it may ask what that action did. One that is not required is
told, met or not, and refutes nothing.

A state may be a live object, which `next` changes and gives back: the explorer keeps what `save` makes of it
and gives each action a fresh one from `load`. What `next` raises is a refutation, too: real code checks
itself (`kvsm.worlds`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from kvsm.checker.coverage import TableEdge
from kvsm.properties import Property
from kvsm.worlds.world import Finding

State = TypeVar("State")
Move = TypeVar("Move")


class Verdict(Enum):
    """What an exploration came to; `kvsm check` leaves with these exit codes."""

    PROVED = 0
    """Within the bounds: every reachable state was seen, and every property holds."""
    REFUTED = 2
    UNDETERMINED = 3
    """No property was refuted, but a limit ended the search."""


class Kind(Enum):
    ALWAYS = "always"
    SOMETIMES = "sometimes"
    EVENTUALLY = "eventually"


class Requirement(msgspec.Struct, Generic[State], frozen=True):
    """What must hold.

    name: a property, or a word of its own: a "sometimes" always has one.
    holds: of a state.
    required: of a "sometimes", whether the model is refuted if it is never met.
    """

    kind: Kind
    name: Property | str
    says: str
    holds: Callable[[Any], bool]
    required: bool = True


class Model(Protocol[State, Move]):
    """See above. All of it is deterministic."""

    @property
    def name(self) -> str: ...

    @property
    def bounds(self) -> str:
        """What is explored, for people: "2 requests, 3 device blocks, ...". A proof holds for these."""

    @property
    def requirements(self) -> Sequence[Requirement[State]]: ...

    def initial(self) -> Iterable[State]: ...

    def actions(self, state: State) -> Iterable[Move]:
        """What may happen in it, in a fixed order."""

    def next(self, state: State, action: Move) -> State | None:
        """The state that follows; the one given is not used again. None: the action does not apply, and
        nothing has changed."""

    def fingerprint(self, state: State) -> Hashable:
        """Equal for states that neither the properties nor the future can tell apart; small, and the same in
        every process."""

    def wind_down(self, state: State) -> Move | None:
        """Of its actions the one that leads to rest; None where there is nothing left to wind down."""

    def save(self, state: State) -> Any:
        """A state as something that can be kept and sent; the state itself, if it is immutable."""

    def load(self, saved: Any) -> State: ...


class Refutation(msgspec.Struct, frozen=True):
    """The shortest way to a broken property: actions from the initial state `start`, the last one included.

    circle: of an "eventually", where winding down begins to go round for ever; -1 if it does not.
    """

    finding: Finding
    path: tuple[Any, ...]
    start: int = 0
    circle: int = -1


class Exploration(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen. states: distinct ones. transitions: actions taken. depth: actions from an initial
    state to the farthest. seconds: of wall time. reached: the "sometimes" that were met. unreached: those
    that were not."""

    model: str
    bounds: str
    verdict: Verdict
    states: int
    transitions: int
    depth: int
    seconds: float
    limit: str = ""
    """What ended an undetermined search."""
    refutation: Refutation | None = None
    reached: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    actions: dict[str, int] = {}
    """How often each action was taken, by its name."""
    edges: tuple[TableEdge, ...] = ()
    """Of the machine tables, those that were taken; `coverage.never_taken` names the others."""

    @property
    def states_per_second(self) -> float:
        return self.states / self.seconds if self.seconds else 0.0
