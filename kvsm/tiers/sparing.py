"""`spared`: chooses the blocks that a store to the disk must not evict.

Under every policy, the disk evicts blocks that are also on the host last. So a disk with at least as many
slots as the host loses no block before the host does. On a smaller disk, the disk's policy decides.
"""

from __future__ import annotations

from kvsm.core.offloader import Offloader

SPARED_MAX = 16_384
"""Most blocks that one store spares. Beyond that, the disk's policy decides."""


def spared(host: Offloader, disk: Offloader, count: int) -> tuple[int, ...]:
    """Return the disk slots that a store of `count` blocks must not evict, because their blocks are also on
    the host. Empty if no such block is among the next victims, or if too few other blocks are evictable.

    The skipped blocks are touched (`Offloader.touch`), so that they leave the front of the eviction order and
    the next search does not skip them again.
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
