"""Whether winding down leads to rest, from every state (S9).

In each state at most one action winds down, so those actions make a graph in which every state has one way
out, or none. From any state the way ends where the property holds, or it does not: it goes round in a
circle, or stops too early, or leaves what was explored. Each state is passed once, whatever leads to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

END = -1
"""In place of the next state: nothing winds down there."""

UNEXPLORED = -2
"""In place of the next state: it was not looked at."""


_UNKNOWN, _ARRIVES, _FAILS, _LEAVES, _ON_THE_WAY = range(5)
"""What becomes of a state."""


class Winding(NamedTuple):
    """way: from the first state that does not arrive, state by state; empty if all do. circle: the place in
    it to which its last state leads back, -1 if it stops. A way that leaves what was explored is not one that
    fails: a search that was cut is undetermined anyway."""

    way: tuple[int, ...]
    circle: int


def wind_down(following: Sequence[int], holds: Sequence[int]) -> Winding:
    """following: of each state the next one, or `END`, or `UNEXPLORED`. holds: whether the property
    does, of each."""
    fates = bytearray(len(following))
    for state in range(len(following)):
        if fates[state] == _UNKNOWN and _settle(state, following, holds, fates) == _FAILS:
            return _failing(state, following)
    return Winding((), -1)


def _settle(first: int, following: Sequence[int], holds: Sequence[int], fates: bytearray) -> int:
    """Follow the way from a state, and note the same fate for all on it."""
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
    """The way from a state that does not arrive."""
    places: dict[int, int] = {}
    state = first
    while state >= 0 and state not in places:
        places[state] = len(places)
        state = following[state]
    return Winding(tuple(places), places.get(state, -1))
