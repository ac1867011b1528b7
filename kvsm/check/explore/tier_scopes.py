"""The world of two tiers as a model: both cores and the `DiskTier` in every state of a small world.

    explore(TiersModel(SCOPES["small"]), jobs=2)

A scope is a name, the options of a world, and what an exploration must meet to be worth its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec
from msgspec import structs

from kvsm.check.explore.model import Kind, Requirement
from kvsm.check.worlds.saving import Saver
from kvsm.check.worlds.two_tiers import TwoTierOptions, TwoTierWorld
from kvsm.check.worlds.world import Action
from kvsm.properties import Property
from kvsm.tiers import WritePolicy

SOMETIMES: Mapping[str, tuple[str, Callable[[TwoTierWorld], bool]]] = {
    "from disk": (
        "a block that the host has lost comes back from the disk",
        lambda world: world.tier.counts.from_disk > 0,
    ),
    "held": (
        "a request holds what has come from the disk",
        lambda world: bool(world.tier._fetches._matched),
    ),
    "its turn": (
        "a request waits for its turn to fetch",
        lambda world: any(
            hit.request in world.host.ledger.deferred and not world.host.ledger.index.keys() >= set(hit.keys)
            for hit in world.requests.hits.values()
        ),
    ),
    "not stored": (
        "a copy to the disk comes to nothing",
        lambda world: world.tier.counts.not_stored > 0,
    ),
    "an overtaken copy": (
        "a reset comes while a copy between host and disk is under way",
        lambda world: world.disk.ledger.draining(),
    ),
    "a restart": (
        "another process finds what was stored on disk",
        lambda world: world.life > 1 and bool(world.disk.ledger.index),
    ),
    "nothing is left": (
        "another process believes none of the slots that were sealed",
        lambda world: (
            world.life > 1
            and not world.disk.ledger.index
            and any(slot.is_sealed for slot in world.ranks[0].disk)
        ),
    ),
    "a retired place": (
        "a copy to the disk is given up, and may still be carried out",
        lambda world: world._retired_places > 0,
    ),
}
"""What an exploration can be asked to meet: in words, and whether it is so in a state."""


class TierScope(msgspec.Struct, frozen=True):
    """The options of a world, and what its exploration should meet. required: whether it must."""

    name: str
    options: TwoTierOptions
    sometimes: tuple[str, ...] = ()
    required: bool = True


class TiersModel:
    """A `Model` whose states are live worlds.

    renamed: whether worlds that differ in the numbers of host slots alone count as one state. The verdict
        must be the same.
    """

    def __init__(self, scope: TierScope, *, renamed: bool = True) -> None:
        self.scope, self.renamed = scope, renamed
        self._saver = Saver(TwoTierWorld(scope.options))
        self.save = self._saver.save

    def __reduce__(self) -> tuple[Callable[..., TiersModel], tuple[TierScope]]:
        # A worker of a cluster makes its own: the blank world of the saver has locks.
        return partial(TiersModel, renamed=self.renamed), (self.scope,)

    @property
    def name(self) -> str:
        return f"tiers, {self.scope.name}"

    @property
    def bounds(self) -> str:
        numbers = structs.asdict(self.scope.options).items()
        return ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in numbers if number)

    @property
    def requirements(self) -> Sequence[Requirement[TwoTierWorld]]:
        return (
            Requirement(
                Kind.ALWAYS, Property.CONSERVATION, "all that the world and its ledgers check", _is_sound
            ),
            Requirement(Kind.EVENTUALLY, Property.PROGRESS, "nothing is left to happen", _has_wound_down),
            *(
                Requirement(Kind.SOMETIMES, name, *SOMETIMES[name], self.scope.required)
                for name in self.scope.sometimes
            ),
        )

    def initial(self) -> Iterable[TwoTierWorld]:
        return [TwoTierWorld(self.scope.options)]

    def actions(self, state: TwoTierWorld) -> list[Action]:
        return state.actions()

    def next(self, state: TwoTierWorld, action: Action) -> TwoTierWorld | None:
        return state if state.do(action) else None

    def fingerprint(self, state: TwoTierWorld) -> bytes:
        return state.fingerprint(renamed=self.renamed)

    def wind_down(self, state: TwoTierWorld) -> Action | None:
        return state.wind_down()

    def load(self, saved: bytes) -> TwoTierWorld:
        world = self._saver.load(saved)
        world.bind()
        return world


def _is_sound(world: TwoTierWorld) -> bool:
    """Raises what is wrong."""
    world.check()
    return True


def _has_wound_down(world: TwoTierWorld) -> bool:
    return world.wind_down() is None


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
"""Two keys that displace each other on both tiers, and one thing that goes wrong, whichever."""
_MET = ("from disk", "not stored", "an overtaken copy", "a restart", "a retired place")

SCOPES: Mapping[str, TierScope] = {
    name: TierScope(name, structs.replace(_SMALLEST, **bounds), met)
    for name, bounds, met in (
        ("small", {}, _MET),
        ("disk-slots", {"disk_slots": 2}, _MET),
        (
            "restarts",
            {"failures": 0, "losses": 0, "damages": 0, "most": 2},
            ("from disk", "an overtaken copy", "a restart", "nothing is left"),
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
            ("from disk", "held", "its turn", "not stored", "an overtaken copy"),
        ),
        ("full", {"most": 2}, (*_MET, "nothing is left")),
    )
}
"""`pairs` has one prompt of two keys: a copy may hold both."""
