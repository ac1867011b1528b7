"""What a kind of incident is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import NamedTuple

from generated_incidents.scenes import Scene


class Kind(NamedTuple):
    """A kind of incident.

    subject: two kinds with the same subject are never combined in one log: one would hide or undo the other.
    causes: the names of troubles that name the cause; any of them is right.
    needs: features of a background (`Background.features`).
    spoils: features that a background no longer has with this incident.
    disturb: draws a strength, and changes the scene.
    """

    name: str
    subject: str
    causes: tuple[str, ...]
    needs: frozenset[str]
    spoils: frozenset[str]
    disturb: Callable[[Scene], None]


Disturb = Callable[[Scene], None]


def kind(
    kinds: dict[str, Kind], *causes: str, subject: str, needs: str = "", spoils: str = ""
) -> Callable[[Disturb], Disturb]:
    """Add a function to `kinds`, under its name. needs, spoils: features, with commas between them."""

    def add(disturb: Disturb) -> Disturb:
        name = disturb.__name__
        kinds[name] = Kind(name, subject, causes, _features(needs), _features(spoils), disturb)
        return disturb

    return add


def _features(names: str) -> frozenset[str]:
    return frozenset(name.strip() for name in names.split(",") if name)


def together(kinds: Iterable[Kind]) -> bool:
    """Whether none of these kinds hides or undoes another one."""
    return all(
        one.subject != other.subject and not (one.spoils & other.needs or other.spoils & one.needs)
        for one, other in combinations(kinds, 2)
    )
