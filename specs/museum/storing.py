"""Stores: bugs in which blocks an engine offers for a store, and when."""

from __future__ import annotations

from kvsm.properties import Property
from museum.exhibit import Edit, Exhibit

_CONFIRMED = "kvsm.core.scheduler.tracked:TrackedRequest.confirmed_tokens"
_ENTER = "kvsm.core.ledger.index:enter"
_CHECK = "kvsm.states.words:StateWords.check"

EVERY_PLANNED_KEY_ENTERS = Edit(
    _ENTER,
    """
    if not ledger.index.enter(keys, listed(slots)):
        raise InvalidEvent(seq, "a planned key has a block already, or is twice in the plan")
    """,
    """
    ledger.index.update(zip(keys, listed(slots)))
    for slot, key in zip(listed(slots), keys):
        ledger.key_of[slot] = key
    """,
)
DOUBLED_KEY = "a planned key has a block already, or is twice in the plan"

STORING = (
    Exhibit(
        id="B01",
        source="vllm#41289",
        title="a block that is being stored is stored again",
        story="The set that kept a block from being offered twice lived for only one step. One step later a"
        " second request hit the block in the device's prefix cache. The first request's store of it was"
        " still in flight, and the block was stored again.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                "kvsm.core.offloader.storing:_admit",
                "leased = any(words[block] for block in sources)",
                "leased, slot = False, None  # what earlier steps have in flight is forgotten",
            ),
        ),
        stop=DOUBLED_KEY,
        without_stop=(EVERY_PLANNED_KEY_ENTERS,),
    ),
    Exhibit(
        id="B02",
        source="vllm#45704",
        title="a store reads its block before the kernel has written it",
        story="The scheduler ran one step ahead of the device. Its books said that a block was computed, so"
        " it planned the store, and the copy read the block while the kernel that fills it was still"
        " queued. kvsm prevents this in two places, and the bug removes both: what a running step"
        " samples is not confirmed, and the copy stream waits for a mark of the compute stream.",
        breaks=Property.COPY_ORDER,
        edits=(
            Edit(
                _CONFIRMED,
                "computed = request.num_computed_tokens - request.num_output_placeholders",
                "computed = request.num_computed_tokens",
            ),
            Edit(
                "kvsm.copies.streams:StreamCopyEngine._issue",
                "stream.wait(transfer.after)",
                """
                if job.direction is Direction.LOAD:
                    stream.wait(transfer.after)
                """,
            ),
        ),
    ),
    Exhibit(
        id="B07",
        source="vllm#35846",
        title="an offer evicts a block that it has just found resident",
        story="An offer of four blocks found two of them on the host, and evicted the least recently used"
        " block to make room for the others. This victim was one of the two: nothing had touched or"
        " protected it.",
        breaks=Property.MATCH_HOLDS,
        edits=(
            Edit(
                "kvsm.core.offloader.storing:_partition",
                "return list(new.values()), sorted(chain.from_iterable(skipped.values())), resident",
                "return list(new.values()), sorted(chain.from_iterable(skipped.values())), {}",
            ),
        ),
    ),
    Exhibit(
        id="B10",
        source="vllm#42571",
        title="a block at two positions is stored and released twice",
        story="One device block stood at two positions of a request's block table. Both were stored, and each"
        " took and returned a reference. In the end the free list held the block twice.",
        breaks=Property.ONE_RELEASE_PER_HOLD,
        edits=(
            Edit(
                "kvsm.core.offloader.storing:_all_new",
                "if len(set(keys)) != len(keys) or not leases.distinct(device_blocks):",
                "if len(set(keys)) != len(keys):",
            ),
        ),
        stop="named twice in one batch",
        without_stop=(
            Edit(
                _CHECK,
                "if ids and ((len(ids) > 1 and len(set(ids)) != len(ids)) or min(ids) < 0):",
                "if ids and min(ids) < 0:",
            ),
        ),
    ),
    Exhibit(
        id="B11",
        source="vllm, contract of the offloading manager",
        title="a key that is offered twice takes two slots",
        story="An offer named the same key twice. Both got a slot, and the index named only the second one."
        " The first slot could never be matched or evicted again.",
        breaks=Property.CONSERVATION,
        edits=(
            Edit(
                "kvsm.core.offloader.storing:_all_new",
                "if len(set(keys)) != len(keys) or not leases.distinct(device_blocks):",
                "if not leases.distinct(device_blocks):",
            ),
        ),
        stop=DOUBLED_KEY,
        without_stop=(EVERY_PLANNED_KEY_ENTERS,),
    ),
    Exhibit(
        id="B16",
        source="vllm#57505",
        title="a store is published under the hash that its block has now",
        story="When a store ended, the hash of each block was read from the device block. By then the block"
        " had been cached under another hash, and the copied bytes were published under this hash. In"
        " kvsm a plan binds its keys; the bug reads them from the pool again.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                "kvsm.core.scheduler.scheduler:OffloadScheduler.update_connector_output",
                "core.report_all(reports, partial(self._note_reported_end, failed))",
                """
                for report in reports:
                    store = core.ledger.transfers.get(report.transfer)
                    if self.device_blocks.pool is not None and store is not None and store.keys:
                        for slot, block in zip(listed(store.slots), listed(store.device_blocks)):
                            if core.ledger.index.pop(core.ledger.key_of[slot], None) is not None:
                                core.ledger.key_of[slot] = self.device_blocks.pool.key_of(block)
                                core.ledger.index[core.ledger.key_of[slot]] = slot
                    core.report_all([report], partial(self._note_reported_end, failed))
                """,
            ),
        ),
    ),
    Exhibit(
        id="B17",
        source="vllm#54193",
        title="the last sampled token counts as computed",
        story="A generation ended exactly on a block boundary. The last token had been sampled, but no step"
        " had computed its KV. The block was stored as full, and a request that loaded it read garbage"
        " at its end.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                _CONFIRMED,
                "return min(computed, max(request.num_prompt_tokens, request.num_tokens - 1))",
                """
                all_but_last = max(request.num_prompt_tokens, request.num_tokens - 1)
                return request.num_tokens if computed >= all_but_last else computed
                """,
            ),
        ),
    ),
    Exhibit(
        id="B19",
        source="vllm#49118",
        title="a request that was never scheduled has keys but no blocks",
        story="A request was aborted while it waited. Its prompt was already hashed. At its finish the"
        " offload found keys for full blocks and looked for device blocks that did not exist.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                "kvsm.core.scheduler.tracked:TrackedRequest.full_chunks",
                "chunks = storable // tokens",
                "chunks = storable // tokens if table else hashes // stride",
            ),
            Edit(
                "kvsm.core.scheduler.tracked:TrackedRequest.full_chunks",
                "counts.append(max(0, min(chunks, hashes // stride, len(table) // blocks_per_chunk)))",
                "counts.append(max(0, min(chunks, hashes // stride)))",
            ),
            Edit(
                "kvsm.core.scheduler.scheduler:OffloadScheduler.request_finished",
                "if self.offers.is_eager(tracked) and block_ids:",
                "if self.offers.is_eager(tracked):",
            ),
        ),
    ),
    Exhibit(
        id="B23",
        source="vllm, lazy mode",
        title="the walk of the free queue resumes behind a block that has moved",
        story="A lazy store walks the engine's free queue and remembered the block at which it stopped. This"
        " block was stored, held meanwhile, and put back at the tail. The next walk began at the tail,"
        " and everything before it was evicted without being stored. In kvsm a walk begins at the head;"
        " the bug begins it behind the block that was stored last.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                "kvsm.core.scheduler.free_queue:FreeQueueWalk._walk",
                "queue = self._pool.free_queue()",
                """
                free = list(self._pool.free_queue())
                last = self._pool.cached_block(next(reversed(ledger.index), b""))
                queue = iter(free[free.index(last) + 1 if last in free else 0 :])
                """,
            ),
        ),
    ),
)
