"""The world of two tiers as a model: both cores and the `DiskTier` in every state of a small world.

    explore(TiersModel(SCOPES["small"]), jobs=2)

A scope is a name, the options of a world, and what an exploration must meet to be worth its time.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from kvsm.check.explore.live_model import LiveModel, WorldScope
from kvsm.check.worlds.tier_goals import (
    FROM_DISK,
    HELD,
    ITS_TURN,
    NOT_STORED,
    NOTHING_LEFT,
    OVERTAKEN,
    RESTARTED,
    RETIRED,
    TIERS_ALWAYS,
)
from kvsm.check.worlds.two_tiers import TwoTierOptions, TwoTierWorld
from kvsm.tiers import WritePolicy


class TiersModel(LiveModel[TwoTierWorld]):
    """The world of two tiers. Host slots are renamed."""

    family = "tiers"
    always = TIERS_ALWAYS

    def make_world(self) -> TwoTierWorld:
        return TwoTierWorld(self.scope.options)

    @property
    def bounds(self) -> str:
        numbers = structs.asdict(self.scope.options).items()
        return ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in numbers if number)

    def load(self, saved: bytes) -> TwoTierWorld:
        world = super().load(saved)
        world.bind()
        return world


_SMALLEST = TwoTierOptions(
    host_slots=1,
    disk_slots=1,
    device_blocks=1,
    places=1,
    prompts=2,
    length=1,
    failures=1,
    losses=1,
    resets=1,
    crashes=1,
    damages=1,
    most=1,
    defer_ticks=1,
)
"""Two keys that displace each other on both tiers, and any one fault."""
_MET = (FROM_DISK, NOT_STORED, OVERTAKEN, RESTARTED, RETIRED)

SCOPES: Mapping[str, WorldScope] = {
    name: WorldScope(name, structs.replace(_SMALLEST, **bounds), met)
    for name, bounds, met in (
        ("small", {}, _MET),
        ("disk-slots", {"disk_slots": 2}, _MET),
        (
            "restarts",
            {"failures": 0, "losses": 0, "damages": 0, "most": 2},
            (FROM_DISK, OVERTAKEN, RESTARTED, NOTHING_LEFT),
        ),
        ("ranks", {"ranks": 2, "damages": 0}, _MET),
        (
            "pairs",
            {"host_slots": 2, "disk_slots": 2, "device_blocks": 2, "prompts": 1, "length": 2, "most": 2},
            _MET,
        ),
        ("write-back", {"writes": WritePolicy.BACK.value}, _MET),
        (
            "waiting",
            {"crashes": 0, "damages": 0, "losses": 0, "waiting": 2},
            (FROM_DISK, HELD, ITS_TURN, NOT_STORED, OVERTAKEN),
        ),
        ("full", {"most": 2}, (*_MET, NOTHING_LEFT)),
    )
}
"""`pairs` has one prompt of two keys: a copy may hold both."""
