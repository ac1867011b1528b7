"""Whether winding down leads to rest from every state: progress (S9).

In each state at most one action winds down. These actions form a graph in which every state has at most one
successor. The way from a state arrives where the requirement holds, or it fails: it enters a cycle, stops too
early, or leaves the explored states. Each state is visited once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

END = -1
"""Stands for the next state if no action winds down."""

UNEXPLORED = -2
"""Stands for a next state that was not explored."""

_UNKNOWN, _ARRIVES, _FAILS, _LEAVES, _ON_THE_WAY = range(5)
"""The fates of a state."""


class Winding(NamedTuple):
    """The first failing way, if any.

    way: its states, from the first state that does not arrive; empty if all arrive.
    circle: the place in it to which its last state leads back; -1 if it stops.

    A way that leaves the explored states does not fail: a search that was cut short is undetermined anyway.
    """

    way: tuple[int, ...]
    circle: int


def wind_down(following: Sequence[int], holds: Sequence[int]) -> Winding:
    """Follow every state to where winding down ends.

    following: for each state the next one, or `END`, or `UNEXPLORED`.
    holds: for each state whether the requirement holds in it.
    """
    fates = bytearray(len(following))
    for state in range(len(following)):
        if fates[state] == _UNKNOWN and _settle(state, following, holds, fates) == _FAILS:
            return _failing(state, following)
    return Winding((), -1)


def _settle(first: int, following: Sequence[int], holds: Sequence[int], fates: bytearray) -> int:
    """Follow the way from a state, and record one fate for all states on it."""
    way = []
    state = first
    while True:
        if state < 0:
            fate = _LEAVES if state == UNEXPLORED else _FAILS
            break
        if fates[state] != _UNKNOWN:
            fate = _FAILS if fates[state] == _ON_THE_WAY else fates[state]
            break
        way.append(state)
        if holds[state]:
            fate = _ARRIVES
            break
        fates[state] = _ON_THE_WAY
        state = following[state]
    for passed in way:
        fates[passed] = fate
    return fate


def _failing(first: int, following: Sequence[int]) -> Winding:
    """The way from a state that does not arrive, with its cycle."""
    places: dict[int, int] = {}
    state = first
    while state >= 0 and state not in places:
        places[state] = len(places)
        state = following[state]
    return Winding(tuple(places), places.get(state, -1))
