"""The disk tier below the host: bugs in writes to it, fetches from it, and resets."""

from __future__ import annotations

from kvsm.properties import Property
from museum.exhibit import Edit, Exhibit

_TIER = "kvsm.tiers.disk_tier:DiskTier"

TIERING = (
    Exhibit(
        id="B56",
        source="LMCache#4546",
        title="each copy that is over still counts as room in use",
        story="The disk tier counted the bytes that it had in use. Most ways in which a block leaves did not"
        " lower the count, so it only grew, until every further store was dropped in silence. In kvsm"
        " the places of copies to the disk are given back when they end; with the bug they are not.",
        breaks=Property.CONSERVATION,
        edits=(Edit(f"{_TIER}._end", "self._places += copy.places"),),
    ),
    Exhibit(
        id="B57",
        source="LMCache#4385",
        title="sessions that return from disk get the KV of others",
        story="Long sessions whose KV had gone to disk came back with KV of other requests, and answered from"
        " their conversations. No error was told. In kvsm a copy from the disk names slot and key of"
        " each block; with the bug it fills the host's slots in another order.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                f"{_TIER}._bring",
                "below = self._load(disk, asker, found, listed(record.slots))",
                "below = self._load(disk, asker, found, listed(record.slots)[::-1])",
            ),
        ),
    ),
    Exhibit(
        id="B58",
        source="lmdeploy#4917",
        title="new weights leave the cache as it was",
        story="The weights were updated in place, and the prefix cache was not invalidated. Later requests"
        " were served KV that the old weights had computed. In kvsm a reset begins an era on disk before"
        " it is answered; with the bug it does not, and the next process finds the old blocks.",
        breaks=Property.NO_STALE_DATA,
        edits=(Edit(f"{_TIER}._make_durable", "self._void(self._reset_weights)"),),
    ),
    Exhibit(
        id="B59",
        source="sglang PR 31108",
        title="a block counts as restored when a part of it is not",
        story="A block has its KV in one pool and its index in another, and each pool is read by itself. One"
        " of them came back shorter, and the whole prefix was used. In kvsm the ranks bring the parts of"
        " a block, and one that fails fails the block; with the bug the host believes that all went"
        " well.",
        breaks=Property.FAILURE_IS_NOT_SUCCESS,
        edits=(
            Edit(
                f"{_TIER}.report",
                "self.host.report(copy.host, report.worker, good, report.error, *times)",
                "self.host.report(copy.host, report.worker, True, report.error, *times)",
            ),
        ),
    ),
    Exhibit(
        id="B60",
        source="sglang PR 31885",
        title="a hit on disk is counted whose copy never began",
        story="A lookup had found blocks in storage, and then their copy was not begun, because too many were"
        " under way or the host had no room. The hit stayed counted, and the load that relied on it"
        " failed. In kvsm a copy is noted where it is sent; with the bug one from the disk is noted and"
        " not sent.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                f"{_TIER}._begin",
                "self._planned.append(msgspec.structs.replace(job, keys=tuple(keys)))",
                """
                if copy.direction is Direction.STORE:
                    self._planned.append(msgspec.structs.replace(job, keys=tuple(keys)))
                """,
            ),
        ),
    ),
    Exhibit(
        id="B61",
        source="sglang#39444",
        title="a block leaves the host while it is being written through",
        story="Blocks were written through to storage, and a prefix could be evicted from the host before all"
        " of it was there. A replay found only a part of it. In kvsm a copy to the disk holds the host's"
        " slots; with the bug they can be evicted, and the copy reads what comes after them.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                f"{_TIER}._store_some",
                "del self._places[: len(slots)]",
                """
                del self._places[: len(slots)]
                host.cancel(above.transfer)
                """,
            ),
        ),
        stop="is not live",
    ),
    Exhibit(
        id="B62",
        source="LMCache#4492",
        title="the next process reads bytes that mean something else to it",
        story="An engine was started again below a cache server that had kept its blocks. A prompt that the"
        " engine before it had cached came back fast and wrong, as if it were in another layout. In kvsm"
        " a slot names what its bytes mean; with the bug recovery does not look at it.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                "kvsm.tiers.disk.recovery:decide",
                "everywhere = np.logical_and.reduce([one.found.all(axis=1) for one in scans])",
                """
                others = [place for place, name in enumerate(CONDITIONS) if name != "same identity"]
                everywhere = np.logical_and.reduce([one.found[:, others].all(axis=1) for one in scans])
                """,
            ),
        ),
    ),
)
