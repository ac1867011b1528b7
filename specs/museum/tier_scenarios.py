"""Directed scenarios of the disk tier below the host: a few actions of the two-tier world."""

from __future__ import annotations

from collections.abc import Callable

from kvsm.check.walks.walk import rest
from kvsm.check.worlds.two_tiers import TwoTierOptions, TwoTierWorld
from kvsm.check.worlds.world import Action


def acted(*actions: Action, **options: int) -> Callable[[], None]:
    """Return a scenario that does these actions and then runs until idle.

    The host has room for one prompt.
    """
    made = TwoTierOptions(host_slots=2, **options)

    def scenario() -> None:
        world = TwoTierWorld(made)
        for action in actions:
            assert world.do(action), action
        world.check()
        rest(world, [])

    return scenario


_STORE: tuple[Action, ...] = (("store", 0), ("host", 0, 0, 1), ("plan",))
ON_DISK: tuple[Action, ...] = (*_STORE, ("disk", 0, 0, 1))
RETURNS: tuple[Action, ...] = (*ON_DISK, ("store", 1), ("host", 0, 0, 1), ("ask", 0))
"""A prompt is on the disk, another prompt takes its host slots, and the first prompt is requested again."""

TIER_SCENARIOS: dict[str, Callable[[], None]] = {
    "B56": acted(*ON_DISK),
    "B57": acted(*RETURNS),
    "B58": acted(*ON_DISK, ("reset", 1), ("crash", 0, 0)),
    "B59": acted(*RETURNS, ("plan",), ("disk", 0, 0, 0)),
    "B60": acted(*RETURNS),
    "B61": acted(*_STORE),
    "B62": acted(*ON_DISK, ("crash", 2, 0)),
}
