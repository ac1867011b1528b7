"""Bugs that kvsm has found in vLLM's own connectors and managers, put into kvsm at the same decisions.

docs/findings.md describes each finding, with steps to reproduce it in vLLM.
"""

from __future__ import annotations

from kvsm.properties import Property
from museum.exhibit import Edit, Exhibit

_SCHEDULER = "kvsm.core.scheduler.scheduler:OffloadScheduler"
_TIER = "kvsm.tiers.disk_tier:DiskTier"

OWN_FINDINGS = (
    Exhibit(
        id="B63",
        source="vllm, found by kvsm: two resets without a step between",
        title="a second reset before the next step fails an assertion",
        story="A reset handed all jobs in flight to the next step, which flushes them, and asserted that none"
        " were waiting there. Only a step takes them away, so a second reset without a step between failed,"
        " and the engine died. In kvsm a reset leaves nothing for the next step; with the bug it leaves the"
        " device blocks of all copies in flight.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                f"{_SCHEDULER}.reset_cache",
                "done = self.offloader.reset(weights)",
                """
                flushed = self.device_blocks.state.changed_hands
                assert not flushed, "the next step has jobs to flush already"
                for transfer in self.offloader.ledger.transfers.values():
                    flushed += listed(transfer.device_blocks)
                done = self.offloader.reset(weights)
                """,
            ),
        ),
    ),
    Exhibit(
        id="B64",
        source="vllm, found by kvsm: a reset while a request runs",
        title="the load of a preempted request is taken for a store",
        story="The step after a preemption flushed the jobs of each preempted request, and asserted that they"
        " were stores. A reset preempted a running request, which was admitted again in the same step and"
        " hit on the host. So it had a load, and the assertion ended the engine.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                f"{_SCHEDULER}._note_block_changes",
                "tracked = state.tracked.get(name)\nif tracked is not None and name not in state.preempted:",
                """
                for job in self.offloader.ledger.transfers.values():
                    assert name not in dict(job.owners) or job.direction is STORE, "it is no store"
                tracked = state.tracked.get(name)
                if tracked is not None and name not in state.preempted:
                """,
            ),
        ),
    ),
    Exhibit(
        id="B65",
        source="vllm, found by kvsm: a load beside a store",
        title="the blocks of a request that loads nothing are not noted",
        story="A connector that flushed a store when its blocks were given away did not note the blocks of a"
        " request for which it had nothing to load. Another connector loaded into them under the store, and"
        " the host kept other bytes under its keys. kvsm prevents this in two places, and the bug removes"
        " both: the engine keeps a finished request's blocks, and all blocks that are given are noted.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                "kvsm.core.scheduler.device_blocks:DeviceBlocks.keep",
                "if not blocks or not self._offloader.leased(blocks):",
                "if True:  # a store is flushed when its blocks are given away",
            ),
            Edit(
                f"{_SCHEDULER}._take_over_blocks",
                "self.device_blocks.rewrite(given)",
                """
                if end > tracked.local:
                    self.device_blocks.rewrite(given)
                """,
            ),
        ),
    ),
    Exhibit(
        id="B66",
        source="vllm, found by kvsm: a second tier and new weights",
        title="a reset with new weights does not reach the tier below the host",
        story="The weights changed, and all caches were reset. The manager emptied the host and left the"
        " second tier as it was, and the same prompt got the KV of the old weights from there. In kvsm a"
        " reset goes on to the disk; with the bug it does not.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                f"{_TIER}.reset",
                """
                self._is_durable = False
                self.disk.reset(weights)
                self._make_durable()
                """,
            ),
        ),
    ),
    Exhibit(
        id="B67",
        source="vllm, found by kvsm: a model without full attention",
        title="a model without full attention is refused",
        story="The connector looked for a group with full attention, and asserted that there was one."
        " An engine whose model has sliding windows in all layers died. In kvsm a search for a hit asks each"
        " group in turn; with the bug it makes the same assertion.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                "kvsm.core.scheduler.hits:HitSearch.longest_hit",
                "end, self.lacking = self._align(limit), None",
                """
                assert any(group.kind is FULL for group in self._groups), "no full attention"
                end, self.lacking = self._align(limit), None
                """,
            ),
        ),
    ),
    Exhibit(
        id="B68",
        source="vllm, found by kvsm: a reset stores blocks that a sliding window freed",
        title="after a reset a request offers blocks that its window gave back",
        story="A connector forgot a block that left a sliding window only if it had not offered it yet. After"
        " a reset each request offered its blocks again from the first one. Other requests had computed into"
        " some of them, and that was stored under the old keys. In kvsm the pool is asked whether a block"
        " still has the key's content; with the bug it is not asked of a block that is offered again.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                "kvsm.core.scheduler.offer_batch:OfferBatch._blocks_of",
                "if blocks[0] != self._config.null_block and self._pool.key_of(blocks[0]) == key:",
                """
                ledger = self._offloader.ledger
                offered = ledger.requests[tracked.name].offered
                again = ledger.epoch > 0 or (offered and chunk < offered[group])
                same = again or self._pool.key_of(blocks[0]) == key
                if blocks[0] != self._config.null_block and same:
                """,
            ),
        ),
    ),
    Exhibit(
        id="B69",
        source="vllm, found by kvsm: a reset that publishes no event",
        title="a reset publishes no removal",
        story="A reset emptied the host and published no removed block. It relied on the device"
        " pool's event AllBlocksCleared. That event was not published, because a request ran and the"
        " device kept its cache. So a router believed forever that the host had the blocks.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                "kvsm.core.ledger.cache:cache_reset",
                "index.invalidate_all(ledger, seq)",
                """
                listener, ledger.listener = ledger.listener, None
                index.invalidate_all(ledger, seq)
                ledger.listener = listener
                """,
            ),
        ),
    ),
    Exhibit(
        id="B70",
        source="vllm, found by kvsm: an idle engine copies without end",
        title="an idle engine copies without end",
        story="The host was smaller than what a lazy store keeps ahead. In each step it found free device"
        " blocks that the host lacked, and evicted others to store them; so it always had stores to come, and"
        " the engine stepped on without any request. kvsm prevents this in two places, and the bug removes"
        " both: such a block does not keep the engine awake, and stores have a budget that requests fill up.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                f"{_SCHEDULER}.has_pending_work",
                "return bool(transfers or self.state.ended_loads or self.device_blocks.has_sent())",
                """
                lacking = self.walk is not None and self.walk._walk()[0]
                return bool(transfers or self.state.ended_loads or self.device_blocks.has_sent() or lacking)
                """,
            ),
            Edit(
                "kvsm.core.scheduler.free_queue:FreeQueueWalk.store",
                "state.store_budget -= len(prepared.keys)",
            ),
        ),
    ),
    Exhibit(
        id="B71",
        source="vllm, found by kvsm: a hit in a lower tier is never answered",
        title="a promotion evicts what an earlier one brought for the same request",
        story="Each key that only the tier below had was promoted by itself, and only this key was protected."
        " So the promotion of one block evicted another one of the same request, and the request waited"
        " forever. In kvsm the blocks of a request come together, and are held until it loads them; with"
        " the bug each comes alone, and none is held.",
        breaks=Property.MATCH_HOLDS,
        edits=(
            Edit(
                f"{_TIER}._bring",
                """
                if resident and not self._hold(holder, resident):
                    return None
                owners, parents = ((hit.request, len(hit.keys)),), dict(hit.parents)
                job = host.import_blocks(owners, hit.keys, DISK, parents).job
                """,
                """
                first = next(key for key in hit.keys if key not in host.ledger.index)
                job = host.import_blocks(((hit.request, 1),), [first], DISK).job
                """,
            ),
            Edit(f"{_TIER}.report", "self._fetches.match(waiting)"),
        ),
    ),
    Exhibit(
        id="B72",
        source="vllm, found by kvsm: a promotion that ends in a reset",
        title="a promotion that ends in a reset is announced after it",
        story="A reset first took the promotions that had ended, which queued an event for each. Then it"
        " emptied the host, and kept the events. So a router heard of the blocks after it had heard that"
        " the cache was empty. In kvsm a copy that a reset overtakes publishes nothing; with the bug one"
        " from the tier below does.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                "kvsm.core.ledger.cache:cache_reset",
                "ledger.listener.cleared()",
                """
                for transfer in ledger.transfers.values():
                    if transfer.keys and not len(transfer.device_blocks):
                        ledger.listener.stored(transfer.id, transfer.keys)
                ledger.listener.cleared()
                """,
            ),
        ),
    ),
)
