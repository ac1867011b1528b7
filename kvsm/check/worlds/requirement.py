"""A requirement on a model: a condition on its states, and how often the condition must hold.

==========  ==========================================================  =====================================
kind        the condition must hold                                     it is refuted by
==========  ==========================================================  =====================================
always      in every state                                              a state in which it does not hold
sometimes   in some reachable state                                     an exploration of all states that
                                                                        meets no such state
eventually  in a state that winding down from any state leads to        a cycle, or an end in which it does
                                                                        not hold
==========  ==========================================================  =====================================

A "sometimes" is evaluated after each action, so its condition may refer to what that action did. If it is not
required, a "sometimes" that never holds is reported but refutes nothing.

Requirements are sent to the workers of a cluster. So a condition is a module-level function, or a `partial`
of one.
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
    """A condition on the states of a model, and how often it must hold.

    name: a property of kvsm, or a name of the model's own. A "sometimes" always has its own name.
    says: what the condition means, in one line for people.
    holds: the condition: whether it holds in a state.
    required: for a "sometimes": whether the model is refuted if the condition never holds.
    """

    kind: Kind
    name: Property | str
    says: str
    holds: Callable[[Any], bool]
    required: bool = True


def sometimes(name: str, says: str, holds: Callable[[State], bool]) -> Requirement[State]:
    """A required "sometimes". An exploration in which it never holds has missed the case that it is for."""
    return Requirement(Kind.SOMETIMES, name, says, holds)
