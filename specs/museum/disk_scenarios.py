"""Directed scenarios of the disk tier: a few actions of the disk world."""

from __future__ import annotations

from collections.abc import Callable

from kvsm.check.worlds.disk_world import DiskWorld, DiskWorldOptions
from kvsm.check.worlds.world import Action


def acted(*actions: Action) -> Callable[[], None]:
    """Return a scenario that does these actions in a world of two ranks that flush every store."""

    def scenario() -> None:
        world = DiskWorld(DiskWorldOptions())
        for action in actions:
            assert world.do(action), action
        world.check()

    return scenario


_STORE, _STOP, _START = ("store", 0, 0), ("stop",), ("start", 0, 0)
_rots = acted(_STORE, ("rot", 0, 0), ("load", 0))

DISK_SCENARIOS: dict[str, Callable[[], None]] = {
    "B49": acted(_STORE, _STOP, ("start", 0, 1)),
    "B50": acted(_STORE, _STOP, ("start", 2, 0)),
    "B51": acted(_STORE, _STOP, ("start", 1, 0)),
    "B52": _rots,
    "B53": acted(("fail", 0, 0, 0, 0)),
    "B54": acted(("fail", 0, 0, 1, 0), _STOP, _START),
    "B55": _rots,
}
