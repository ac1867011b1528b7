"""Cache resets while copies are in flight: bugs in blocks, reports and offers."""

from __future__ import annotations

from kvsm.properties import Property
from museum.exhibit import BLOCK_ROWS, Edit, Exhibit

_RESET = "kvsm.core.scheduler.scheduler:OffloadScheduler.reset_cache"

RESETTING = (
    Exhibit(
        id="B12",
        source="vllm, contract of the offloading manager",
        title="the end of a store from before a reset publishes the one after it",
        story="A key was stored, the cache was reset, and the key was stored again. The completion of the"
        " first copy arrived, found the key, and made it readable before the second copy had written a"
        " byte. In kvsm a report names a transfer; with the bug it goes to the newest transfer of the"
        " same keys.",
        breaks=Property.STALE_REPORTS,
        edits=(
            Edit(
                "kvsm.core.offloader.transferring:_report",
                "reason = _why_reject(core, transfer, worker, direction)",
                """
                named = core.ledger.transfers.get(transfer)
                if named is not None and named.keys:
                    live = core.ledger.transfers.values()
                    transfer = [one.id for one in live if one.keys == named.keys][-1]
                reason = _why_reject(core, transfer, worker, direction)
                """,
            ),
        ),
    ),
    Exhibit(
        id="B13",
        source="vllm#41956, review",
        title="a reset frees a slot that a copy still writes",
        story="A store was writing a host slot when the cache was reset. The slot was free at once and went"
        " to a new store, and the old copy landed in it. In kvsm the slot is quarantined until the copy"
        " has ended; the bug is one changed row of the block's table.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                BLOCK_ROWS,
                'Row((STORING, LOADING), INVALIDATE, QUARANTINED, "a copy still touches it",'
                ' then={"pins": VOID}),',
                'Row((STORING, LOADING), INVALIDATE, EVICTED, "a copy still touches it",'
                ' then={"pins": VOID, "copies": VOID}),',
            ),
        ),
    ),
    Exhibit(
        id="B14",
        source="vllm#39726, review",
        title="a reset releases the references that copies rely on",
        story="A reset released all references to device blocks, including those that protect the source of a"
        " store and the target of a load. The blocks were free while the copies went on.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                _RESET,
                "done = self.offloader.reset(weights)",
                """
                done = self.offloader.reset(weights)
                pool, live = self.device_blocks.pool, self.offloader.ledger.transfers
                for transfer in live.values() if pool is not None else ():
                    pool.free_blocks(listed(transfer.device_blocks))
                """,
            ),
        ),
    ),
    Exhibit(
        id="B15",
        source="vllm#48102",
        title="a request waits for a completion that was dropped as stale",
        story="A store was in flight when the cache was reset. Its completion was dropped as stale, but the"
        " request still counted the job. Every later lookup of the request waited for a transfer that"
        " would never end.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                "kvsm.core.offloader.transferring:_why_reject",
                "planned = entry.word & STATE_MASK == PLANNED",
                """
                if entry.state.name == "ABANDONED":
                    return RejectReason.STALE
                planned = entry.word & STATE_MASK == PLANNED
                """,
            ),
        ),
    ),
    Exhibit(
        id="B24",
        source="vllm, reset of the offloading scheduler",
        title="a reset forgets the running requests",
        story="A reset cleared everything, including the books of running requests. The requests ran on, but"
        " none of their blocks was ever stored again, and their ends were ignored.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                _RESET,
                """
                for tracked in self.state.tracked.values():
                    tracked.offer_again()
                """,
                "self.state.tracked.clear()",
            ),
        ),
    ),
)
