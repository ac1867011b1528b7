"""Wrong versions of what makes a store or a log durable, of leases that run out, and of counts.

M150 to M153 were written with the checks that find them, so finding them says little about other bugs.
"""

from __future__ import annotations

from museum.exhibit import Edit

from kvsm.properties import Property
from mutants.mutant import Mutant

AREA = "durability, time and counts"
_DISK = "kvsm.tiers.disk.disk_engine:DiskCopyEngine"

DURABLE = (
    Mutant(
        id="M150",
        area=AREA,
        title="a store is good although a flush failed while it was written",
        story="With flushes after an interval, the end of a store does not check whether a flush has "
        "failed since the store began, so blocks that the disk has lost count as stored.",
        shows_when="A flush fails between the write of a store and its end.",
        breaks=Property.FAILURE_IS_NOT_SUCCESS,
        edits=(
            Edit(
                f"{_DISK}._end_piece",
                'lost = "" if error or transfer.error else self._lost(transfer)',
                'lost = ""',
            ),
        ),
    ),
    Mutant(
        id="M151",
        area=AREA,
        title="a segment is deleted before the newest one has a durable name",
        story="To make room, the oldest segment is deleted while the name of the newest one is only in "
        "memory. A power loss may then take both.",
        shows_when="A log within a limit of bytes grows before the sync that follows a new segment.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                "kvsm.core.log.retention:Retention._delete_oldest",
                "self.segments[-1].sync_name()  # Otherwise a power loss could lose the new name and the "
                "deleted file.",
            ),
        ),
    ),
    Mutant(
        id="M152",
        area=AREA,
        title="a look ends only one of several expired leases",
        story="Each step releases the blocks of only one of several expired hand-overs, so the others keep "
        "their share of the host pool.",
        shows_when="Two leases expire between two steps of the prefill engine.",
        breaks=Property.ONE_RELEASE_PER_HOLD,
        edits=(
            Edit(
                "kvsm.tiers.hand_over.leases:LeaseTable.expire",
                "while self._first_is_overdue():",
                "if self._first_is_overdue():",
            ),
        ),
    ),
    Mutant(
        id="M153",
        area=AREA,
        title="an eviction of several blocks is counted once",
        story="The metric of evicted blocks counts events, not blocks, so a full pool seems to keep blocks.",
        shows_when="A batch of stores evicts two blocks at once.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                "kvsm.explain.metrics:Metrics._evicted",
                "self._counts.grown[_EVICTED] += len(slots) if type(slots) is tuple else count(slots)",
                "self._counts.grown[_EVICTED] += 1",
            ),
        ),
    ),
)
