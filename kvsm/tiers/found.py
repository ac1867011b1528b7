"""How the core of a disk begins: with what recovery has found in its slots."""

from __future__ import annotations

from kvsm.core.offloader import Offloader
from kvsm.tiers.disk.recovery import Recovered


def adopt_found(disk: Offloader, found: Recovered) -> int:
    """Let a new core of a disk serve what earlier processes have stored. Returns how many blocks.

    disk: made with `disk_config`, and without any event yet.
    """
    disk.adopt_blocks(list(found.slots), list(found.slots.values()), "an earlier process")
    return len(found.slots)
