"""The state of a world of two tiers, for people: each thing by its name."""

from __future__ import annotations

from collections.abc import Sequence

from kvsm.disk.era import DiskEra
from kvsm.replay.render import render_key
from kvsm.tiers import DiskTier
from kvsm.worlds.describing import describe_ledger
from kvsm.worlds.rank_memory import EMPTY, DiskSlot, RankMemory, Value


def describe_tiers(tier: DiskTier, era: DiskEra, ranks: Sequence[RankMemory]) -> dict[str, str]:
    """Both ledgers, the copies between them, and the memory of each rank as far as it was written."""
    after = era.after
    seen = {"era": f"weights {era.weights}, after generation {after.number} of life {after.life}"}
    for name, core in (("host", tier.host), ("disk", tier.disk)):
        seen |= {f"{name}: {thing}": told for thing, told in describe_ledger(core.ledger).items()}
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
                told = _slot(slot) + ("" if slot == flushed else ", not flushed")
                seen[f"disk slot {place} of rank {number}"] = told
    return seen


def _slot(slot: DiskSlot) -> str:
    sealed = "sealed" if slot.is_sealed else "not sealed"
    generation = f"generation {slot.generation.number} of life {slot.generation.life}"
    return f"{sealed}, key {render_key(slot.key)}, {generation}, {_value(slot.value)}"


def _value(value: Value) -> str:
    return (
        "bytes that mean nothing" if value is None else f"bytes of {render_key(value[1])}, epoch {value[0]}"
    )
