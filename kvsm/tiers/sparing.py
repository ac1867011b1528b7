"""`spared`: which blocks of the disk do not give way to a store.

A block that the host has too gives way last, whatever the policy of the disk is. The host has kept it, and
has evicted the others. So a disk with as many slots as the host loses no block before the host does. What a
smaller disk keeps is up to its policy alone.
"""

from __future__ import annotations

from kvsm.offloader import Offloader

SPARED_MAX = 16_384
"""How many blocks one store spares. Beyond that the policy of the disk decides."""


def spared(host: Offloader, disk: Offloader, count: int) -> tuple[int, ...]:
    """Return the slots of the disk that a store of `count` blocks must not evict, because the host has their
    blocks too. Empty if the next victims have none of these, or if too few other blocks are evictable.

    The blocks that the search for victims passes over are touched. So the next search does not meet them
    again, and passes over each block of the host once while the others are evicted.
    """
    above, below = host.ledger.index, disk.ledger.index
    lacking = count - len(disk.ledger.free)
    found: dict[int, bytes] = {}
    look = lacking
    while lacking > 0 and len(found) < SPARED_MAX:
        victims = disk.next_victims(look, spared=found.keys())
        if len(victims) < lacking:
            return ()
        others = [place for place, key in enumerate(victims) if key not in above]
        enough = len(others) >= lacking
        passed = [key for key in victims[: others[lacking - 1] if enough else None] if key in above]
        if not passed and look == lacking:
            break
        found.update({below[key]: key for key in passed})
        look = lacking if enough else 2 * look
    if found:
        disk.touch([*reversed(found.values())])
    return tuple(found)
