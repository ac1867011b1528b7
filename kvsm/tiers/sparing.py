"""`spared`: which blocks of the disk a store must not evict.

Under every policy, the disk evicts a block last if the host has it too: the host has kept such blocks and
evicted the others. So a disk with at least as many slots as the host loses no block before the host does. A
smaller disk keeps what its policy chooses.
"""

from __future__ import annotations

from kvsm.core.offloader import Offloader

SPARED_MAX = 16_384
"""How many blocks one store spares. Beyond that the policy of the disk decides."""


def spared(host: Offloader, disk: Offloader, count: int) -> tuple[int, ...]:
    """Return the slots of the disk that a store of `count` blocks must not evict, because the host has their
    blocks too. Empty if the next victims have none of these, or if too few other blocks are evictable.

    Blocks that the search for victims skips are touched, so the next search does not meet them again. Each
    block of the host is skipped once while the other blocks are evicted.
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
