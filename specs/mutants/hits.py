"""Wrong versions of the hit search that serve less than is stored: nothing crashes, and no byte is wrong.

M128 to M131 were written to test the property "stored, so served" (S19), M132 to M136 after bugs of vLLM.
"""

from __future__ import annotations

from museum.exhibit import Edit

from kvsm.properties import Property
from mutants.mutant import Mutant

AREA = "the hits that are served"
_SCHEDULER = "kvsm.core.scheduler.scheduler:OffloadScheduler"
_BATCH = "kvsm.core.scheduler.offer_batch:OfferBatch"
_HITS = "kvsm.core.scheduler.hits:HitSearch"

HITS = (
    Mutant(
        id="M128",
        area=AREA,
        title="a hit behind part of a chunk stops one chunk early",
        story="If the device has the first part of a chunk, the last chunk of the hit is not served.",
        shows_when="Chunks of two blocks; the device has one block of a prompt and the host has all of it.",
        breaks=Property.STORED_SO_SERVED,
        edits=(
            Edit(
                f"{_HITS}.longest_hit",
                "limit = min([limit, *self._hashed(limit)])",
                """
                limit = min([limit, *self._hashed(limit)])
                if self._local % self._chunk_tokens[0]:
                    limit = max(self._local, limit - self._chunk_tokens[0])
                """,
            ),
        ),
    ),
    Mutant(
        id="M129",
        area=AREA,
        title="a preempted request computes its prompt again",
        story="A request that has had blocks before is not looked up, although the host has its prompt.",
        shows_when="A request is preempted after its blocks were stored, and the device has lost them.",
        breaks=Property.STORED_SO_SERVED,
        edits=(
            Edit(
                f"{_SCHEDULER}._may_load",
                "and local % self._block_tokens == 0",
                """
                and local % self._block_tokens == 0
                and not tracked.admitted
                """,
            ),
        ),
    ),
    Mutant(
        id="M130",
        area=AREA,
        title="a window reaches back one block too far",
        story="A hit on a sliding window needs the block before its window, which the engine may have freed "
        "before it could be stored.",
        shows_when="The host has evicted the block before the window at the end of a prompt.",
        breaks=Property.STORED_SO_SERVED,
        edits=(
            Edit(
                "kvsm.core.scheduler.groups:KVCacheGroup.first_needed_token",
                "reach = self.window - 1 if self.kind is GroupKind.SLIDING_WINDOW else 1",
                """
                reach = self.window - 1 if self.kind is GroupKind.SLIDING_WINDOW else 1
                reach += self.block_tokens if self.kind is GroupKind.SLIDING_WINDOW else 0
                """,
            ),
        ),
    ),
    Mutant(
        id="M131",
        area=AREA,
        title="a chunk that another request loads is no hit",
        story="A request that may not wait any longer is served no chunk that another request is loading, "
        "although two loads may read the same chunk.",
        shows_when="Two requests with one prompt arrive together, and requests may not wait.",
        breaks=Property.STORED_SO_SERVED,
        edits=(
            Edit(
                f"{_SCHEDULER}.get_num_new_matched_tokens",
                "return key in index and readable(index[key])",
                "return key in index and core.in_flight((index[key],)) is None",
            ),
        ),
    ),
    Mutant(
        id="M132",
        area=AREA,
        title="a drafter drops a block of each hit",
        story="The search drops the last block of the hit each time that it asks the group of a drafter, so "
        "several groups never agree on an end above zero. After vllm#52735.",
        shows_when="A group of full attention and one of a drafter, and the host has all of a prompt.",
        breaks=Property.STORED_SO_SERVED,
        edits=(
            Edit(
                f"{_HITS}._served",
                """
                if missing == last:
                    return end
                """,
                """
                if missing == last:
                    return end - self._alignment if group.drafter else end
                """,
            ),
        ),
    ),
    Mutant(
        id="M133",
        area=AREA,
        title="the answer to a request that has waited is dropped",
        story="A request waits for blocks in flight. When they have come it is not looked up again, and "
        "computes its prompt. After vllm#52735.",
        shows_when="A request asks for a prompt whose store is in flight, and asks again after its end.",
        breaks=Property.STORED_SO_SERVED,
        edits=(
            Edit(
                f"{_SCHEDULER}._may_load",
                "and core.may_match(tracked.name)",
                """
                and core.may_match(tracked.name)
                and getattr(core.ledger.requests.get(tracked.name), "patience", -1) < 0
                """,
            ),
        ),
    ),
    Mutant(
        id="M134",
        area=AREA,
        title="a drafter needs the block behind the hit",
        story="The group of a drafter is asked for one block more than the hit has, so a hit that ends with "
        "the last stored block is a block shorter. After vllm PR 52674.",
        shows_when="The host has a prompt up to its last full block, and another prompt goes on from there.",
        breaks=Property.STORED_SO_SERVED,
        edits=(
            Edit(
                f"{_HITS}._served",
                "first, last = self._span(index, end)",
                """
                first, last = self._span(index, end)
                if group.drafter and last < len(keys) and not has(keys[last]):
                    return end - self._alignment
                """,
            ),
        ),
    ),
    Mutant(
        id="M135",
        area=AREA,
        title="a group that serves less ends the search",
        story="If one group serves a shorter hit than the groups before it, nothing is served, although all "
        "groups would serve the shorter hit. After vllm#47890.",
        shows_when="Two groups; the host has lost the last block of a prompt in the second one.",
        breaks=Property.STORED_SO_SERVED,
        edits=(
            Edit(
                f"{_HITS}.longest_hit",
                "end = self._align(self._served(index, end, has, find_prefix))",
                """
                served = self._align(self._served(index, end, has, find_prefix))
                end = served if served == end or not index else self._local
                """,
            ),
        ),
    ),
    Mutant(
        id="M136",
        area=AREA,
        title="the cursor passes the chunk that a drafter holds back",
        story="While a request decodes, the last chunk of a drafter's group is not offered, but the cursor "
        "counts it, so it is never stored and no longer prompt hits behind it. After vllm#46971.",
        shows_when="A request decodes over the end of a chunk in a group of a drafter.",
        breaks=Property.STORED_ONCE,
        edits=(
            Edit(
                f"{_BATCH}.collect",
                "reached = _later(full, settled)",
                """
                counted = tracked.full_chunks(self._config, self._blocks_per_chunk, True)
                reached = _later(counted, settled)
                """,
            ),
        ),
    ),
)
