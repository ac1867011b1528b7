"""Blocks on disk: bugs in the meaning of their bytes, their completeness, and checks before their use."""

from __future__ import annotations

from kvsm.properties import Property
from museum.exhibit import Edit, Exhibit

_STORE = "kvsm.tiers.disk.bounce:BounceBuffer.store"

PERSISTING = (
    Exhibit(
        id="B49",
        source="vllm#49261",
        title="blocks of other weights are served under the same model name",
        story="The directory of a persistent KV cache was named after the model and the cache's layout, but"
        " not after the revision of the weights. Another revision of the same model was started with the"
        " same directory. It used blocks that other weights had computed.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                "kvsm.tiers.disk.era:_why_over",
                """
                if era.weights != weights:
                    return f"weights: {era.weights or 'not named'}, and now {weights or 'not named'}"
                """,
                "pass",
            ),
        ),
    ),
    Exhibit(
        id="B50",
        source="vllm PR 49440",
        title="two layouts of one size share a directory",
        story="Two model runners laid out the same blocks in different ways, with the same number of bytes,"
        " and both used one directory. A check of the size could not tell them apart. What one had stored"
        " the other loaded, and the output was wrong without any error.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                "kvsm.identity:PoolIdentity.of",
                'named = {**facts, "kvsm pool format": FORMAT}',
                """
                named = {**facts, "kvsm pool format": FORMAT}
                named.pop("layout", None)
                """,
            ),
        ),
    ),
    Exhibit(
        id="B51",
        source="sglang#33268",
        title="a run with another dtype believes the stored pages",
        story="The keys of stored pages named the model and the ranks, and not the dtype of the KV cache. A"
        " second run of the model with another dtype found pages of the first one under its own keys. It"
        " read them in the wrong format. In kvsm a process takes the file's identity for its own.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                "kvsm.tiers.disk.slot_file:SlotFile._found",
                "reasons = last.identity.differences(self.identity)",
                """
                reasons: list[str] = []
                self.digest = last.identity.digest()
                """,
            ),
        ),
    ),
    Exhibit(
        id="B52",
        source="vllm#54363",
        title="a block of the right length is believed",
        story="A file that was too short was noticed when it was loaded, and removed. A file of the right"
        " length was believed, whatever it held: nothing had noted a checksum. Bytes that had changed on"
        " the disk, or were written in part, were used as KV.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                "kvsm.tiers.disk.bounce:BounceBuffer._is_payload",
                "return xxhash.xxh3_64_intdigest(self._payloads[place]) == expected.payload",
                "return True",
            ),
        ),
    ),
    Exhibit(
        id="B53",
        source="LMCache#4991",
        title="a store that failed can be found",
        story="A store to disk failed, which was a warning and nothing else. Its key could still be looked"
        " up, so later requests counted it as a hit. They loaded wrong bytes, and their answers were"
        " gibberish.",
        breaks=Property.FAILURE_IS_NOT_SUCCESS,
        edits=(
            Edit(
                _STORE,
                """
                self._table.step(slots, DiskSlotTrigger.FAIL)
                raise
                """,
                "pass",
            ),
        ),
    ),
    Exhibit(
        id="B54",
        source="LMCache PR 1101",
        title="only the first rank is asked what is there",
        story="A lookup asked the worker of rank 0 alone. The workers of other ranks could evict the same"
        " blocks before they were retrieved. In kvsm the recovery asks all ranks, because each may have lost"
        " other writes; with the bug it asks the first one.",
        breaks=Property.PUBLISH_AFTER_COMMIT,
        edits=(
            Edit(
                "kvsm.tiers.disk.recovery:decide",
                "everywhere = np.logical_and.reduce([one.found.all(axis=1) for one in scans])",
                "everywhere = first.found.all(axis=1)",
            ),
            Edit(
                "kvsm.tiers.disk.recovery:decide",
                "for one in scans[1:]:",
                "for one in scans[:0]:",
            ),
        ),
    ),
    Exhibit(
        id="B55",
        source="vllm#49176",
        title="a load that failed is tried again without end",
        story="A load from disk failed because the block's file was damaged or gone. The answer of its lookup"
        " was kept in a cache, and no failure corrected it. So each step found the same hit, began the same"
        " load and failed, until the request was aborted.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                "kvsm.tiers.disk.bounce:BounceBuffer.load",
                "self._table.step([slot], DiskSlotTrigger.DISPROVE)",
                "pass",
            ),
        ),
    ),
)
