"""Wrong versions of the scheduler side: which blocks a hit needs, what is offered, and what copies hold."""

from __future__ import annotations

from museum.exhibit import Edit

from kvsm.properties import Property
from mutants.mutant import Mutant

AREA = "the scheduler side"
_DEVICE_BLOCKS = "kvsm.core.scheduler.device_blocks:DeviceBlocks"
_SCHEDULER = "kvsm.core.scheduler.scheduler:OffloadScheduler"
_OFFERS = "kvsm.core.scheduler.offers:StoreOffers"
_TRACKED = "kvsm.core.scheduler.tracked:TrackedRequest"
_WALK = "kvsm.core.scheduler.free_queue:FreeQueueWalk"
_BATCH = "kvsm.core.scheduler.offer_batch:OfferBatch"
_HITS = "kvsm.core.scheduler.hits:HitSearch"

SCHEDULING = (
    Mutant(
        id="M01",
        area=AREA,
        title="a sliding window reaches back one token too few",
        story="A hit on a sliding window does not load the block with the oldest token that the "
        "window needs, so attention reads whatever that device block held.",
        shows_when="A window of 6 tokens over blocks of 4: the hit ends at token 8 and needs token 3.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                "kvsm.core.scheduler.groups:KVCacheGroup.first_needed_token",
                "reach = self.window - 1 if self.kind is GroupKind.SLIDING_WINDOW else 1",
                "reach = self.window - 2 if self.kind is GroupKind.SLIDING_WINDOW else 1",
            ),
        ),
    ),
    Mutant(
        id="M02",
        area=AREA,
        title="a block evicted while its request runs is not offered again",
        story="At the end of a request only new chunks are offered, so what the host has evicted "
        "since is gone although the device still has it, and the next turn computes it once "
        "more.",
        shows_when="Others evict a request's first block from a small host while it decodes; then it ends.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                f"{_OFFERS}.offer_at_end",
                """
                everything = tracked.remote_decode or (
                    not tracked.refused
                    and ledger.forgotten_at > tracked.watched_from
                    and self._lost_something(tracked)
                )
                """,
                "everything = tracked.remote_decode",
            ),
        ),
    ),
    Mutant(
        id="M03",
        area=AREA,
        title="more blocks reset the watch for evictions",
        story="Each time that a request gets more blocks, the note of when it got its first ones is "
        "replaced, so an eviction between the two is missed and its block is not offered again.",
        shows_when="A session's first part is stored and evicted, its next part comes, and then it ends.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                f"{_SCHEDULER}._take_over_blocks",
                "tracked.next_offer = 0",
                "tracked.next_offer, tracked.watched_from = 0, self.offloader.ledger.seq",
            ),
        ),
    ),
    Mutant(
        id="M04",
        area=AREA,
        title="blocks that are given to a request are not awaited",
        story="An engine without references is not told to wait for the copies of blocks that it "
        "gives to another request, which then computes into a block under its store.",
        shows_when="A sliding window gives a block back while its store is in flight, and the engine, "
        "which counts no references, gives it to another request.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                f"{_DEVICE_BLOCKS}.rewrite",
                """
                if self.pool is None:
                    self.state.changed_hands += blocks
                """,
            ),
        ),
    ),
    Mutant(
        id="M05",
        area=AREA,
        title="after a lost load the request seems to have its first tokens",
        story="The engine is told that the request still has the tokens before its load, although it "
        "must give all of its blocks up, so an engine that goes by that number computes on from "
        "empty blocks.",
        shows_when="A load behind tokens that the device had is lost, in an engine with full attention only.",
        breaks=Property.FAILURE_IS_NOT_SUCCESS,
        edits=(
            Edit(
                f"{_SCHEDULER}._note_load_end",
                "kept = before if self.config.resumable and not lost else 0",
                "kept = before if self.config.resumable else 0",
            ),
        ),
    ),
    Mutant(
        id="M06",
        area=AREA,
        title="a drafter's last chunk is not offered at the end",
        story="The chunk that a drafting group holds back until the request ends is never stored, so "
        "the next turn computes it once more.",
        shows_when="A request of a model with a drafting group ends right after a block boundary.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                f"{_OFFERS}._has_more_to_offer",
                "if entry is None or entry.settled != entry.offered or self._has_drafter:",
                "if entry is None or entry.settled != entry.offered:",
            ),
        ),
    ),
    Mutant(
        id="M07",
        area=AREA,
        title="a drafter's last chunk is stored while it may change",
        story="Whether a request decodes is asked of the wrong count, so a drafting group stores a "
        "block that a rejected draft rewrites, and a later request loads wrong KV.",
        shows_when="A request with a drafting group decodes past a block boundary.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                f"{_TRACKED}.full_chunks",
                "decodes = not finished and confirmed > request.num_prompt_tokens",
                "decodes = not finished and confirmed > request.num_tokens",
            ),
        ),
    ),
    Mutant(
        id="M08",
        area=AREA,
        title="only free slots count as room for another try",
        story="A chunk that found the host full of pinned blocks is not tried again when the pins are "
        "given back, so it waits until some transfer ends.",
        shows_when="The whole pool is pinned by a match; the match is released, and no transfer is in "
        "flight.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                "kvsm.core.scheduler.retry:RetryStamp.of",
                "return cls(ledger.ended_at, len(ledger.free) + ledger.evictable())",
                "return cls(ledger.ended_at, len(ledger.free))",
            ),
        ),
    ),
    Mutant(
        id="M09",
        area=AREA,
        title="the lazy store does not hear that the host lost a key",
        story="The free queue is not walked again when the host evicts a key, so a block leaves the "
        "device that the host has no more.",
        shows_when="A small host evicts the key of a block at the head of the free queue, and no block was "
        "taken since the last walk.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                f"{_WALK}.is_due",
                "if state.walk_due_in and ledger.forgotten_at <= state.walked_at:",
                "if state.walk_due_in:",
            ),
        ),
    ),
    Mutant(
        id="M10",
        area=AREA,
        title="the lazy store counts admissions instead of blocks",
        story="A request that takes many blocks counts as one, so the next walk comes too late, and "
        "blocks leave the device without a store.",
        shows_when="The surplus of safe blocks is 4, and one request takes 5 blocks.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                f"{_WALK}.taken",
                "state.walk_due_in = max(0, state.walk_due_in - len(blocks))",
                "state.walk_due_in = max(0, state.walk_due_in - 1)",
            ),
        ),
    ),
    Mutant(
        id="M11",
        area=AREA,
        title="a lazy store holds no references",
        story="The blocks of a lazy store stay in the free queue, so the engine gives them to a "
        "request while the copy still reads them.",
        shows_when="A lazy store is in flight, and a request takes the head of the free queue.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(Edit(f"{_SCHEDULER}._store", "self._add_to_plan(job)", "state.planned.append(job)"),),
    ),
    Mutant(
        id="M12",
        area=AREA,
        title="a lost load gives its blocks back",
        story="The references of a lost load are dropped, so another request gets blocks that the "
        "copy may still write.",
        shows_when="A load is lost in an engine that counts references, and its request is aborted.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                f"{_DEVICE_BLOCKS}.release",
                "if self.pool is not None and not (load and ended.lost):",
                "if self.pool is not None:",
            ),
        ),
    ),
    Mutant(
        id="M13",
        area=AREA,
        title="a load that leaves with this plan is not awaited",
        story="An engine without references does not wait for the load of a request that is preempted "
        "in the step that admitted it, and the load writes into the next owner's blocks.",
        shows_when="A request is admitted with a load, preempted in the same step, and its blocks are "
        "given away.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                f"{_DEVICE_BLOCKS}._touching",
                "if (transfer.state is not TransferState.PLANNED or transfer.direction is Direction.LOAD)",
                "if transfer.state is not TransferState.PLANNED",
            ),
        ),
    ),
    Mutant(
        id="M14",
        area=AREA,
        title="a name that is used again replaces the kept blocks",
        story="The blocks that an earlier request of the same name keeps are forgotten, so the engine "
        "frees them when the later one's copies end, perhaps under a copy.",
        shows_when="An engine without references ends two requests of one name while both have stores in "
        "flight, and the second store ends first.",
        breaks=Property.NO_REUSE_IN_FLIGHT,
        edits=(
            Edit(
                f"{_DEVICE_BLOCKS}.keep",
                "self.state.kept.setdefault(request, []).extend(blocks)",
                "self.state.kept[request] = blocks",
            ),
        ),
    ),
    Mutant(
        id="M15",
        area=AREA,
        title="a reset takes plans back and tells nobody",
        story="A plan that a reset cancels keeps its references, and its request is never told that "
        "its load has ended: it hangs.",
        shows_when="A reset between the admission of a request with a load and the end of that step.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                f"{_SCHEDULER}.reset_cache",
                """
                ended = self.offloader.cancel(job.transfer)
                if ended is not None:
                    self._note_transfer_end(ended)
                """,
                "self.offloader.cancel(job.transfer)",
            ),
        ),
    ),
    Mutant(
        id="M16",
        area=AREA,
        title="a preemption is noted twice",
        story="A request that was preempted and admitted again in one step is preempted once more by "
        "the step's output, which drops its new blocks and its match.",
        shows_when="The engine preempts a request, admits it again, and names it as preempted in one step.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                f"{_SCHEDULER}._note_block_changes",
                "if tracked is not None and name not in state.preempted:",
                "if tracked is not None:",
            ),
        ),
    ),
    Mutant(
        id="M17",
        area=AREA,
        title="more blocks make all blocks count as computed again",
        story="When a request gets more blocks, those that its load has brought count as rewritten, "
        "so after a reset what was brought from before is stored as new.",
        shows_when="A load ends well, the cache is reset, and then the request gets more blocks and ends.",
        breaks=Property.NO_STALE_DATA,
        edits=(
            Edit(
                f"{_SCHEDULER}._take_over_blocks",
                "given += blocks[len(table) if continues else end // group.block_tokens :]",
                "given += blocks[tracked.local // group.block_tokens :]",
            ),
        ),
    ),
    Mutant(
        id="M18",
        area=AREA,
        title="a shorter hit may name blocks that are still being stored",
        story="If the engine accepts less than was matched, other blocks may serve that, and it is "
        "not checked whether they can be read: the call raises into the engine.",
        shows_when="Two groups, one with a window: the engine accepts a shorter hit, and the window's "
        "block for that end is being stored.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                f"{_SCHEDULER}._holds",
                "if any(slot is None or not ledger.readable(slot) for slot in slots):",
                "if any(slot is None for slot in slots):",
            ),
        ),
    ),
    Mutant(
        id="M19",
        area=AREA,
        title="the second group's parts are counted from the first group's slots",
        story="With several groups the place of each device block is counted as if there were one group, "
        "so the core refuses a load that begins or ends within a chunk: the call raises.",
        shows_when="Two groups in chunks of two blocks, and a hit that ends within a chunk.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                "kvsm.core.scheduler.load_targets:load_targets",
                "before = (chunks - span.first) * blocks_per_chunk",
                "before = -span.first * blocks_per_chunk",
            ),
        ),
    ),
    Mutant(
        id="M20",
        area=AREA,
        title="the last chunk of a hit is needed only if it is whole",
        story="A hit that ends within a chunk does not load that chunk, but promises its tokens.",
        shows_when="Chunks of two blocks, and a prompt whose last but one block is the first of a chunk.",
        breaks=Property.MATCH_HOLDS,
        edits=(
            Edit(
                f"{_HITS}.needed",
                "return [self._span(index, end) for index in range(len(self._groups))]",
                """
                spans = [self._span(index, end) for index in range(len(self._groups))]
                return [Span(span.first, end // size) for span, size in zip(spans, self._chunk_tokens)]
                """,
            ),
        ),
    ),
    Mutant(
        id="M21",
        area=AREA,
        title="each group is asked once where the hit ends",
        story="The first window group is not asked about the end that the second one lowers it to, so "
        "the hit needs a block that the host does not have.",
        shows_when="Two groups with windows; the host has lost an early block of the one and a late block "
        "of the other.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                f"{_HITS}.longest_hit",
                """
                if len(self._groups) == 1:
                    break
                """,
                "break",
            ),
        ),
    ),
    Mutant(
        id="M22",
        area=AREA,
        title="a chunk that was loaded in part counts as loaded",
        story="A chunk of which a load brought the first block and the request computed the second is not "
        "offered before the request ends, so if the host has lost it others compute it once more.",
        shows_when="Chunks of two blocks: all of a prompt but its last block is loaded, the host evicts its "
        "last chunk, and another request asks for it while the first one decodes.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                f"{_BATCH}._not_loaded",
                "behind = min(max(before, end // tokens), last)",
                "behind = min(max(before, -(-end // tokens)), last)",
            ),
        ),
    ),
    Mutant(
        id="M23",
        area=AREA,
        title="the cursor stops at the last chunk that waits",
        story="If two chunks of a request wait, everything before the later one counts as settled, so "
        "the first one is never offered again.",
        shows_when="The host has room for one of three chunks.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                f"{_BATCH}._advanced",
                "for place in reversed(deferred):",
                "for place in deferred:",
            ),
        ),
    ),
    Mutant(
        id="M24",
        area=AREA,
        title="while a reset drains nobody notes that a request fell back",
        story="A request that recomputes what its failed load did not bring passes the limit of its trusted "
        "tokens unseen, so nothing more of it is stored, not even at its end.",
        shows_when="A load fails by a reset, and its request recomputes the prompt while older copies drain.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                f"{_SCHEDULER}.build_connector_meta",
                """
                else:
                    self._note_fallen_back(output.scheduled)
                """,
            ),
        ),
    ),
    Mutant(
        id="M25",
        area=AREA,
        title="a finished request goes on waiting for another offer",
        story="A finished request with chunks that wait is offered again in later steps, which makes "
        "it known once more, and nobody ever finishes it.",
        shows_when="A request ends while one of its chunks waits for a full host; then a transfer ends.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                f"{_SCHEDULER}.request_finished",
                "self.offers.state.awaiting.pop(name, None)",
            ),
        ),
    ),
    Mutant(
        id="M26",
        area=AREA,
        title="an end of a load that was not told is no pending work",
        story="The engine stops stepping although it has not been told that a load is over, so the "
        "request waits forever.",
        shows_when="The only request's load is lost between two steps, and the engine asks whether to go on.",
        breaks=Property.PROGRESS,
        edits=(
            Edit(
                f"{_SCHEDULER}.has_pending_work",
                "return bool(transfers or self.state.ended_loads or self.device_blocks.has_sent())",
                "return bool(transfers or self.device_blocks.has_sent())",
            ),
        ),
    ),
    Mutant(
        id="M27",
        area=AREA,
        title="after a failed load no token ever counts as computed",
        story="The engine falls back to exactly the tokens that it can trust, and the limit is kept, "
        "so nothing more of the request is stored.",
        shows_when="A load fails, and its request recomputes the prompt.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                f"{_TRACKED}.confirmed_tokens",
                "if computed > self.trusted:",
                "if computed >= self.trusted:",
            ),
        ),
    ),
    Mutant(
        id="M28",
        area=AREA,
        title="a hit may cover the whole prompt",
        story="No token is left to compute, so the engine has no logits to sample from.",
        shows_when="A prompt of whole blocks is asked for a second time.",
        breaks=Property.ONE_TOKEN_LEFT,
        edits=(
            Edit(
                "kvsm.core.scheduler.hits:hit_limit",
                "return min(num_tokens - 1, local + max_load_tokens)",
                "return min(num_tokens, local + max_load_tokens)",
            ),
        ),
    ),
    Mutant(
        id="M29",
        area=AREA,
        title="hashes that the engine has replaced stay",
        story="When a session goes on, the next part of its prompt replaces the last output token, "
        "and the old hash of its block is still used: other content is stored under it.",
        shows_when="A session's output ends a block, and the next part replaces its last token.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                f"{_TRACKED}.make_keys",
                "return [one + suffix for one in hashes]",
                """
                keys = self.asked_keys[group]
                keys += [one + suffix for one in self.request.block_hashes[stride - 1 :: stride][len(keys) :]]
                return keys[first:last]
                """,
            ),
            Edit(f"{_TRACKED}.forget_asked_keys", "keys.clear()", "pass"),
        ),
    ),
    Mutant(
        id="M30",
        area=AREA,
        title="a window's block is taken as it stands in the table",
        story="The engine frees blocks that leave a window without saying so, and a freed block that "
        "another request has computed into is stored under the old key.",
        shows_when="A chunk waits for room, leaves its window meanwhile, and its block is given away.",
        breaks=Property.CORRECT_BYTES,
        edits=(
            Edit(
                f"{_BATCH}._blocks_of",
                "if blocks[0] != self._config.null_block and self._pool.key_of(blocks[0]) == key:",
                "if blocks[0] != self._config.null_block:",
            ),
        ),
    ),
)
