"""Starts the core of a disk with the blocks that recovery has found."""

from __future__ import annotations

from kvsm.core.offloader import Offloader
from kvsm.tiers.disk.recovery import Recovered


def adopt_found(disk: Offloader, found: Recovered) -> int:
    """Make the blocks of earlier processes readable in a new core of a disk. Returns the number of blocks.

    disk: a core with `disk_config` that has emitted no event.
    """
    disk.adopt_blocks(list(found.slots), list(found.slots.values()), "an earlier process")
    return len(found.slots)
