"""The state of a world of two tiers: described for people, and in a canonical form to compare.

Worlds with equal canonical forms have equal futures. Both ledgers are compared as their fields declare
(`kvsm.check.worlds.parts`). Beyond that:

- Host slots are named as in a serving world (`kvsm.check.worlds.fingerprint`). The staging blocks for copies
  to the disk, which the code calls places, are named by their order. Disk slots keep their numbers, because
  recovery assigns them in this order.
- A block holds bytes of a key from this epoch, bytes from an older epoch, or unknown bytes. No epoch comes
  back, so all older ones are equal.
- A disk slot that is not sealed counts as empty: no action makes it valid again. The same holds for a slot
  with another meaning.
- Generations are only compared with each other. So each is replaced by its position in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvsm.check.worlds.describing import describe_ledger
from kvsm.check.worlds.fingerprint import slots_in_order
from kvsm.check.worlds.parts import lru_order
from kvsm.check.worlds.tier_rank import EMPTY, CopyInFlight, DiskSlot, RankMemory, Value
from kvsm.core.ledger.canonical import FIXED, NOBODY, PART, Dropped, Fixed, Names, compared, declare
from kvsm.core.offloader import Offloader, PendingHit
from kvsm.core.plan import TransferJob
from kvsm.events import Direction
from kvsm.ids import listed, render_key
from kvsm.states.request import MATCHED
from kvsm.states.words import STATE_MASK
from kvsm.tiers import DiskTier, WritePolicy
from kvsm.tiers.disk.era import DiskEra
from kvsm.tiers.disk.formats import SlotGeneration
from kvsm.tiers.disk.health import FAILURES, HealthWatch
from kvsm.tiers.fetches import Fetches

if TYPE_CHECKING:
    from kvsm.check.worlds.two_tiers import TwoTierWorld

COMPARED = Dropped("`canonical_tiers` compares it")
TOLD = Dropped("data for people")
BOUND = Fixed("a callback: a world that is loaded sets its own")

declare(
    DiskTier,
    host=PART,
    disk=PART,
    copies=COMPARED,
    counts=TOLD,
    _void=BOUND,
    _writes=FIXED,
    _ahead=FIXED,
    _look_after=FIXED,
    _since_look=COMPARED,
    _seen_ahead=COMPARED,
    _looked_at=COMPARED,
    _written=COMPARED,
    _places=COMPARED,
    _health=PART,
    _fetches=PART,
    _waiting=COMPARED,
    _planned=COMPARED,
    _is_durable=Fixed("the era of this world can always be written"),
    _reset_weights=Dropped("`void` is called again with them if it has failed"),
)
declare(Fetches, _host=PART, _most=FIXED, _hits=COMPARED, _matched=COMPARED)
declare(
    HealthWatch,
    _name=TOLD,
    _clock=BOUND,
    _lock=Fixed("one thread explores"),
    _failures=COMPARED,
    _error=TOLD,
    _pause_s=COMPARED,
    _probe_at=COMPARED,
    _probes=COMPARED,
)


def describe_tiers(tier: DiskTier, era: DiskEra, ranks: Sequence[RankMemory]) -> dict[str, str]:
    """Describe both ledgers, the copies between them, and the written memory of each rank."""
    after = era.after
    seen = {"era": f"weights {era.weights}, after generation {after.number} of life {after.life}"}
    for name, core in (("host", tier.host), ("disk", tier.disk)):
        seen |= {f"{name}: {thing}": text for thing, text in describe_ledger(core.ledger).items()}
    if tier._waiting:
        seen["keys that wait for the disk"] = ", ".join(map(render_key, tier._waiting))
    for copy in tier.copies.values():
        seen[f"copy {copy.disk} of the disk"] = f"is transfer {copy.host} of the host"
    for number, rank in enumerate(ranks):
        memory = {"device block": rank.device, "host slot": rank.host}
        for kind, values in memory.items():
            written = [(place, value) for place, value in enumerate(values) if value is not None]
            seen |= {f"{kind} {place} of rank {number}": _value(value) for place, value in written}
        for place, (slot, flushed) in enumerate(zip(rank.disk, rank.flushed)):
            if slot != EMPTY:
                text = _slot(slot) + ("" if slot == flushed else ", not flushed")
                seen[f"disk slot {place} of rank {number}"] = text
    return seen


def _slot(slot: DiskSlot) -> str:
    sealed = "sealed" if slot.is_sealed else "not sealed"
    generation = f"generation {slot.generation.number} of life {slot.generation.life}"
    return f"{sealed}, key {render_key(slot.key)}, {generation}, {_value(slot.value)}"


def _value(value: Value) -> str:
    return "unknown bytes" if value is None else f"bytes of {render_key(value[1])}, epoch {value[0]}"


def canonical_tiers(world: TwoTierWorld, *, renamed: bool = True) -> Sequence[Any]:
    """The canonical form of all state that decides the world's future. renamed: False keeps the numbers of
    host slots."""
    tier = world.tier
    host = _host_names(world, renamed)
    disk = _names(tier.disk, range(world.options.disk_slots), host.slots)
    may_crash = world.may("crashes")
    order = _order_of_generations(world, may_crash)
    return (
        compared(tier.host.ledger, host),
        compared(tier.disk.ledger, disk),
        [
            (
                host.transfers[one.host],
                disk.transfers[one.disk],
                len(one.places),
                host.requests.get(one.holder, NOBODY),
            )
            for one in tier.copies.values()
        ],
        _fetches(tier._fetches, host),
        [(prompt, *_hit(hit, host)) for prompt, hit in world.requests.hits.items()],
        list(tier._waiting),
        world.rest.state(),
        tier._writes is WritePolicy.BACK and (tier._has_to_look(), tier._seen_ahead, sorted(tier._written)),
        [(disk.transfers[job.transfer], job.keys) for job in tier._planned],
        len(tier._places),
        _health(tier._health, world._ticks),
        [min(left, world._left["most"]) for left in world._left.values()],
        # A copy from before a reset still writes its keys to the disk.
        [_copy(one, host) for one in world._host_copies],
        [(*_copy(one, disk), one.job.keys) for one in world._disk_copies],
        [
            (where, [host.slots[place] for place in places] if where == "host" else places)
            for where, places in world._late
        ],
        world._retired_places,
        [(host.transfers[transfer], keys) for transfer, keys in world._loads.items()],
        world.era.weights,
        order[world.era.after],
        [_rank(world, rank, host, order, may_crash) for rank in world.ranks],
    )


def _copy(copy: CopyInFlight, names: Names) -> tuple[Any, ...]:
    transfer = copy.job.transfer
    return names.transfers[transfer], names.ledger.transfers[transfer].keys, copy.waits, copy.failed


def _fetches(fetches: Fetches, names: Names) -> Sequence[Any]:
    """The requests that wait for fetches, and those that hold fetched blocks. Finished ones are left out."""
    known, requests = names.requests, names.ledger.requests
    return (
        [
            (names.transfers[transfer], [_hit(hit, names) for hit in hits.values() if hit.request in known])
            for transfer, hits in fetches._hits.items()
        ],
        sorted(
            known[name]
            for name in fetches._matched
            if name in known and requests[name].word & STATE_MASK == MATCHED
        ),
    )


def _hit(hit: PendingHit, names: Names) -> tuple[Any, ...]:
    return names.requests.get(hit.request, NOBODY), hit.keys, hit.missed, hit.asked, hit.on_host


def _host_names(world: TwoTierWorld, renamed: bool) -> Names:
    """The names in the host's ledger. Places follow the device blocks, in their present order."""
    tier, ledger = world.tier, world.tier.host.ledger
    idle = lru_order(ledger)
    assert idle is not None, "a world of two tiers has the policy LRU"
    slots: Iterable[int] = range(world.options.host_slots)
    if renamed:
        slots = slots_in_order(ledger, ledger.requests, idle, world.options.host_slots)
    blocks = dict.fromkeys(range(world.options.device_blocks))
    for place in tier._places:
        blocks.update(dict.fromkeys(place))
    for copy in tier.copies.values():
        for place in copy.places:
            blocks.update(dict.fromkeys(place))
    blocks.update(dict.fromkeys(range(tier.host.config.device_blocks)))
    return _names(tier.host, slots, {block: place for place, block in enumerate(blocks)})


def _names(core: Offloader, slots: Iterable[int], blocks: Mapping[int, int]) -> Names:
    ledger = core.ledger
    return Names(
        ledger,
        {name: place for place, name in enumerate(ledger.requests)},
        {transfer: place for place, transfer in enumerate(ledger.transfers)},
        {slot: place for place, slot in enumerate(slots)},
        blocks,
    )


def _health(health: HealthWatch, now: int) -> tuple[float, ...]:
    """The number of failures; after too many of them, also when the disk is probed again."""
    if health._failures < FAILURES:
        return (health._failures,)
    return FAILURES, max(0.0, health._probe_at - now), health._pause_s, health._probes


def _order_of_generations(world: TwoTierWorld, may_crash: bool) -> dict[SlotGeneration, int]:
    """Generation -> its position among all generations that may still be compared."""
    found = {world.era.after}
    for rank in world.ranks:
        slots = [*rank.disk, *(rank.flushed if may_crash else ())]
        found.update(slot.generation for slot in slots if _may_count(slot, rank))
    jobs = [copy.job for copy in world._disk_copies] + world.tier._planned
    found.update(SlotGeneration(world.life, job.transfer) for job in jobs)
    return {one: place for place, one in enumerate(sorted(found))}


def _may_count(slot: DiskSlot, rank: RankMemory) -> bool:
    return slot.is_sealed and slot.meaning == rank.meaning


def _rank(
    world: TwoTierWorld,
    rank: RankMemory,
    names: Names,
    order: Mapping[SlotGeneration, int],
    may_crash: bool,
) -> Sequence[Any]:
    def value(held: Value) -> Any:
        return held if held is None else held[1] if held[0] == world._epoch else 0

    def slot(one: DiskSlot) -> Any:
        if not _may_count(one, rank):
            return None
        return order[one.generation], one.key, value(one.value)

    reading: list[TransferJob] = [copy.job for copy in world._host_copies]
    return (
        # Other device blocks are written before they are read.
        [
            value(rank.device[block])
            for job in reading
            if job.direction is Direction.STORE
            for block in listed(job.pairs()[0])
        ],
        [value(rank.host[place]) for place in names.slots],
        [slot(one) for one in rank.disk],
        [slot(one) for one in rank.flushed] if may_crash else None,
        [rank.disk[place].generation == found for place, found in sorted(rank.expected.items())],
        sorted(rank.expected),
    )
