"""What the two ledgers of a `DiskTier` must agree about in every state.

Each ledger keeps its own properties (docs/properties.md), as it does alone. What is new is the copy between
them. If both have it in the same state, with the same blocks and keys, then what one ledger protects is
protected in both: a host slot that a disk copy reads cannot be reused, and a key is never half on one tier.
"""

from __future__ import annotations

from kvsm.events import Direction
from kvsm.ids import listed
from kvsm.tiers.disk_tier import DiskTier, TierCopy


def disagreements(tier: DiskTier) -> list[str]:
    """A line for each thing in which the ledgers differ. Empty: they agree."""
    found = [line for copy in tier.copies.values() for line in _of_copy(tier, copy)]
    strangers = tier.disk.ledger.transfers.keys() - tier.copies.keys()
    found += [f"transfer {one} of the disk belongs to no copy" for one in sorted(strangers)]
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
    if (host.epoch, disk.epoch) == (above.epoch, below.epoch):  # After a reset slots have no keys.
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
    """Host slots that a disk copy touches, and that the host may give to another block."""
    touched = {slot for copy in tier.disk.ledger.transfers.values() for slot in listed(copy.device_blocks)}
    loose = sorted(touched & set(tier.host.ledger.free.first(len(tier.host.ledger.free))))
    return [f"host slot {slot} is free, and a disk copy touches it" for slot in loose]
