"""`spared`: chooses the blocks that a store to the disk must not evict.

Under every policy, the disk evicts blocks that are also on the host last. So a disk with at least as many
slots as the host loses no block before the host does. On a smaller disk, the disk's policy decides.
"""

from __future__ import annotations

from collections.abc import Collection

from kvsm.core.offloader import Offloader

SPARED_MAX = 16_384
"""Most blocks that one store spares. Beyond that, the disk's policy decides."""


def spared(host: Offloader, disk: Offloader, count: int) -> tuple[int, ...]:
    """Return the disk slots that a store of `count` blocks must not evict, because their blocks are also on
    the host. Empty if no such block is among the next victims, or if too few other blocks are evictable.

    The skipped blocks are touched (`Offloader.touch`), so that they leave the front of the eviction order and
    the next search does not skip them again. A touch can change which blocks go next: ARC takes a victim from
    T2 once T1 is short. So the search is repeated until it skips nothing more.
    """
    lacking = count - len(disk.ledger.free)
    found: list[int] = []
    while lacking > 0 and len(found) < SPARED_MAX:
        passed = _passed(host, disk, lacking, found)
        if passed is None:
            return ()
        if not passed:
            break
        found += passed
        disk.touch([*reversed(passed.values())])
    return tuple(found)


def _passed(
    host: Offloader, disk: Offloader, lacking: int, spared: Collection[int]
) -> dict[int, bytes] | None:
    """Return the blocks of the host that the disk would evict before `lacking` others, in this order, as
    slot -> key. None if fewer others are evictable."""
    above, below = host.ledger.index, disk.ledger.index
    found: dict[int, bytes] = {}
    look = lacking
    while len(spared) + len(found) < SPARED_MAX:
        victims = disk.next_victims(look, spared=[*spared, *found])
        if len(victims) < lacking:
            return None
        others = [place for place, key in enumerate(victims) if key not in above]
        enough = len(others) >= lacking
        passed = [key for key in victims[: others[lacking - 1] if enough else None] if key in above]
        if not passed and look == lacking:
            break
        found.update({below[key]: key for key in passed})
        look = lacking if enough else 2 * look
    return found
