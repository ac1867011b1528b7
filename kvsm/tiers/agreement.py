"""Checks that the two ledgers of a `DiskTier` agree, as they must in every state.

Each ledger alone has the usual properties (docs/properties.md). In addition, each copy between host and disk
must have the same state, blocks and keys in both ledgers. Then the protection of one ledger holds for both
tiers: a host slot that a disk copy reads cannot be reused, and a key is never readable on a tier that has
only a part of its block.
"""

from __future__ import annotations

from kvsm.events import Direction
from kvsm.ids import listed
from kvsm.tiers.disk_tier import DiskTier, TierCopy


def disagreements(tier: DiskTier) -> list[str]:
    """Return a line for each difference between the ledgers. Empty: they agree."""
    found = [line for copy in tier.copies.values() for line in _of_copy(tier, copy)]
    unknown = tier.disk.ledger.transfers.keys() - tier.copies.keys()
    found += [f"transfer {transfer} of the disk belongs to no copy" for transfer in sorted(unknown)]
    found += _of_leases(tier)
    return found


def _of_copy(tier: DiskTier, copy: TierCopy) -> list[str]:
    above, below = tier.host.ledger, tier.disk.ledger
    host, disk = above.transfers.get(copy.host), below.transfers.get(copy.disk)
    name = f"the copy of transfers {copy.host} (host) and {copy.disk} (disk)"
    if host is None or disk is None:
        return [f"{name} is in flight in one ledger only"]
    to_disk = copy.direction is Direction.STORE
    pairs = {
        "directions": ((host.direction is Direction.LOAD, disk.direction), (to_disk, copy.direction)),
        "states": (host.state, disk.state),
        "reports": (host.reported, disk.reported),
        "host slots": (listed(host.slots), listed(disk.device_blocks)),
    }
    if (host.epoch, disk.epoch) == (above.epoch, below.epoch):  # after a reset, slots have no keys
        read, written = (
            (above.keys_of(host.slots), disk.keys) if to_disk else (below.keys_of(disk.slots), host.keys)
        )
        pairs["keys"] = (list(read), list(written))
    return [
        f"{name} has other {what}: {one!r} and {other!r}"
        for what, (one, other) in pairs.items()
        if one != other
    ]


def _of_leases(tier: DiskTier) -> list[str]:
    """Return a line for each host slot that is free although a disk copy accesses it."""
    touched = {slot for copy in tier.disk.ledger.transfers.values() for slot in listed(copy.device_blocks)}
    loose = sorted(touched & set(tier.host.ledger.free.first(len(tier.host.ledger.free))))
    return [f"host slot {slot} is free, and a disk copy touches it" for slot in loose]
