"""What must hold in a world: its name, what is expected, and the condition, in one value. Of three kinds:

==========  =====================================================  ========================================
kind        what it demands                                        what refutes it
==========  =====================================================  ========================================
always      it holds in every state                                a state in which it does not hold
sometimes   it holds in some reachable state                       all states were seen, and it held in none
eventually  winding down from any state leads to where it holds    a cycle, or an end where it does not hold
==========  =====================================================  ========================================

A "sometimes" is evaluated after each action, so it may ask what that action did. An optional "sometimes" is
reported and refutes nothing.

Requirements are sent to the workers of a cluster. So a condition is a function of a module, or a `partial` of
one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec

from kvsm.properties import Property

State = TypeVar("State")


class Kind(Enum):
    """The kinds of requirement, as the table above explains them."""

    ALWAYS = "always"
    SOMETIMES = "sometimes"
    EVENTUALLY = "eventually"


class Requirement(msgspec.Struct, Generic[State], frozen=True):
    """What a model must satisfy.

    name: a property of kvsm, or a word of the model's own. A "sometimes" always has its own word.
    says: one line for people.
    holds: whether it holds in a state.
    required: for a "sometimes", whether the model is refuted if it never holds.
    """

    kind: Kind
    name: Property | str
    says: str
    holds: Callable[[Any], bool]
    required: bool = True


def sometimes(name: str, says: str, holds: Callable[[State], bool]) -> Requirement[State]:
    """What some state must show: an exploration that never meets it has not seen what it is for."""
    return Requirement(Kind.SOMETIMES, name, says, holds)
