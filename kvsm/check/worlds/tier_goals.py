"""The requirements on the world of two tiers, and cases that its explorations can be required to meet."""

from __future__ import annotations

from kvsm.check.worlds.requirement import Kind, Requirement, sometimes
from kvsm.check.worlds.two_tiers import TwoTierWorld
from kvsm.properties import Property


def _is_sound(world: TwoTierWorld) -> bool:
    """Return True, or raise `PropertyBroken`."""
    world.check()
    return True


def _has_wound_down(world: TwoTierWorld) -> bool:
    return world.wind_down() is None


TIERS_ALWAYS: tuple[Requirement[TwoTierWorld], ...] = (
    Requirement(Kind.ALWAYS, Property.CONSERVATION, "all that the world and its ledgers check", _is_sound),
    Requirement(Kind.EVENTUALLY, Property.PROGRESS, "nothing is left to happen", _has_wound_down),
)


def _fetches(world: TwoTierWorld) -> bool:
    return world.tier.counts.from_disk > 0


def _holds_fetched_blocks(world: TwoTierWorld) -> bool:
    return bool(world.tier._fetches._matched)


def _waits_its_turn(world: TwoTierWorld) -> bool:
    return any(
        hit.request in world.host.ledger.deferred and not world.host.ledger.index.keys() >= set(hit.keys)
        for hit in world.requests.hits.values()
    )


def _store_fails(world: TwoTierWorld) -> bool:
    return world.tier.counts.not_stored > 0


def _drains(world: TwoTierWorld) -> bool:
    return world.disk.ledger.draining()


def _restarts_warm(world: TwoTierWorld) -> bool:
    return world.life > 1 and bool(world.disk.ledger.index)


def _restarts_cold(world: TwoTierWorld) -> bool:
    return (
        world.life > 1 and not world.disk.ledger.index and any(slot.is_sealed for slot in world.ranks[0].disk)
    )


def _retires(world: TwoTierWorld) -> bool:
    return world._retired_places > 0


FROM_DISK = sometimes("from disk", "a block that the host has evicted is fetched from the disk", _fetches)
HELD = sometimes("held", "a request holds blocks that were fetched from the disk", _holds_fetched_blocks)
ITS_TURN = sometimes("its turn", "a request must wait before its fetch can begin", _waits_its_turn)
NOT_STORED = sometimes("not stored", "a copy to the disk fails or is given up", _store_fails)
OVERTAKEN = sometimes(
    "an overtaken copy", "a reset happens while a copy between host and disk is in flight", _drains
)
RESTARTED = sometimes("a restart", "another process finds blocks on the disk", _restarts_warm)
NOTHING_LEFT = sometimes(
    "nothing is left", "another process trusts none of the sealed slots on the disk", _restarts_cold
)
RETIRED = sometimes(
    "a retired place", "a copy to the disk is given up, and may still be carried out", _retires
)
