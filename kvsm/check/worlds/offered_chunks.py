"""What a step must store: no chunk is left out, and none waits while there is room for it (no doubled or lost
store, S13).

The wider engine asks this after each step, of the requests that the step computes:

- each full chunk, once its tokens are confirmed, is on the host or on its way there, or its load brought it,
  or it waits;
- a chunk waits only for a reason that there is now: a copy touches its device blocks, the step stores others,
  there are too many transfers, a reset drains, or the host is full of what may not be evicted.

A chunk that was on the host after it was full is dealt with: if the host loses it, it is offered again at the
end of its request (`kvsm.check.worlds.lost_stores`).

Of a lazy store it asks that what the device gives away next is on the host, as long as the host has room: a
slot that is free, or one that can be evicted and does not hold what the device gives away soon.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from kvsm.check.worlds.lost_stores import is_of_an_older_epoch
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.core.ledger.canonical import Seen, declared
from kvsm.core.scheduler import GroupKind, StoreMode
from kvsm.core.scheduler.groups import group_suffix
from kvsm.errors import PropertyBroken
from kvsm.ids import listed
from kvsm.properties import Property

if TYPE_CHECKING:
    from kvsm.check.worlds.wider_engine import WiderEngine


@declared
class OfferedChunksBook:
    """Which chunks of its requests are dealt with. It knows nothing of the scheduler's cursors."""

    settled: Annotated[
        dict[str, set[bytes]],
        Seen(lambda book, names: [(names.requests[name], sorted(it)) for name, it in book.settled.items()]),
    ]
    """Request -> keys that it need not offer before its end."""
    found: Annotated[
        dict[str, int],
        Seen(lambda book, names: [(names.requests[name], it) for name, it in book.found.items()]),
    ]
    """Request -> tokens that the device had when it was last looked at."""

    def __init__(self) -> None:
        self.settled, self.found = {}, {}

    def lost_blocks(self, request: SmallRequest) -> None:
        """The request has no device blocks any more: it offers everything again."""
        self.settled.pop(request.request_id, None)
        self.found.pop(request.request_id, None)

    def forget(self) -> None:
        """The cache is reset: all requests offer everything again."""
        self.settled.clear()

    def loaded(self, engine: WiderEngine, request: SmallRequest, end: int) -> None:
        """A load has brought the tokens of a request up to `end`. The host had these chunks just now."""
        begin = self.found[request.request_id]
        brought = [key for key, first, last, _ in _chunks(engine, request, end) if begin <= first < last]
        self.settled.setdefault(request.request_id, set()).update(brought)

    def check(self, engine: WiderEngine, scheduled: Collection[str]) -> None:
        """Check the plan of this step. scheduled: the requests that it computes.

        Raises `PropertyBroken` for a chunk that is not stored and does not wait for anything.
        """
        if engine.config.store is not StoreMode.EAGER or engine.core.config.store_threshold > 1:
            return
        waiting, requests = [], engine.running | engine.paused
        for name, request in requests.items():
            if request.loading or request.kv_transfer_params is not None or engine.is_shadowed(request):
                continue
            ends = self._waiting(engine, request)
            if name in scheduled:
                waiting += [(name, end) for end in ends]
        if waiting and _has_room(engine, _slots_of(engine, requests.values())):
            name, end = waiting[0]
            message = f"the chunk up to token {end} of request {name} is not stored, and the host has room"
            raise PropertyBroken(Property.STORED_ONCE, message)

    def _waiting(self, engine: WiderEngine, request: SmallRequest) -> list[int]:
        """Where the chunks of a request end that wait for room, and for nothing else. Notes what is dealt
        with."""
        ledger, ends = engine.core.ledger, []
        settled = self.settled.setdefault(request.request_id, set())
        for key, _, end, blocks in _chunks(engine, request, _confirmed(request)):
            if key in settled:
                continue
            slot = ledger.index.get(key)
            kept = slot is not None and (ledger.readable(slot) or _stores(engine, slot, blocks))
            if kept or is_of_an_older_epoch(engine, key, blocks):
                settled.add(key)
            elif slot is None and not any(ledger.leases.words[block] for block in blocks):
                ends.append(end)
        return ends


def _confirmed(request: SmallRequest) -> int:
    """Tokens whose KV is certain: neither those of steps under way, nor the one that was sampled last."""
    computed = request.num_computed_tokens - request.num_output_placeholders
    return min(computed, max(request.num_prompt_tokens, request.num_tokens - 1))


def _chunks(
    engine: WiderEngine, request: SmallRequest, confirmed: int
) -> Iterator[tuple[bytes, int, int, list[int]]]:
    """The chunks of full attention before this token: key, first token, end, and device blocks. A drafter may
    still rewrite the last one of a request that decodes."""
    chunk = engine.core.config.blocks_per_chunk
    for index, (group, table) in enumerate(zip(engine.groups, request.tables)):
        if group.kind is not GroupKind.FULL:
            continue
        tokens = group.block_tokens * chunk
        count = confirmed // tokens - (group.drafter and confirmed > request.num_prompt_tokens)
        for place in range(count):
            end = (place + 1) * tokens
            key = request.cells[end - 1] + group_suffix(index)
            yield key, end - tokens, end, table[place * chunk : (place + 1) * chunk]


def _slots_of(engine: WiderEngine, requests: Iterable[SmallRequest]) -> set[int]:
    """The slots that hold chunks of these requests, in any group. An offer may name them beside what waits,
    and does not evict what it names."""
    index, groups = engine.core.ledger.index, range(len(engine.groups))
    keys = [cell + group_suffix(group) for request in requests for cell in request.cells for group in groups]
    return {index[key] for key in keys if key in index}


def _stores(engine: WiderEngine, slot: int, blocks: list[int]) -> bool:
    """Whether a store of these device blocks fills the slot."""
    ledger = engine.core.ledger
    return set(blocks) <= set(listed(ledger.transfers[ledger.generation[slot]].device_blocks))


def _may_store(engine: WiderEngine) -> bool:
    """Whether the step could have stored more, if there was room on the host."""
    ledger = engine.core.ledger
    full = len(ledger.transfers) >= engine.core.config.max_live_transfers
    return not (full or engine.plan.stores or ledger.draining())


def _has_room(engine: WiderEngine, kept: Collection[int]) -> bool:
    """Whether the step could have stored more. kept: slots that are not evicted for it."""
    ledger = engine.core.ledger
    protected = sum(slot in ledger.policy for slot in kept)
    return _may_store(engine) and len(ledger.free) + ledger.evictable() > protected


def check_head_of_queue(engine: WiderEngine) -> None:
    """The walk of a lazy store leaves nothing at the head of the free queue that the host lacks, and has room
    for. What a load of an older epoch brought is not stored."""
    ledger, pool, walk = engine.core.ledger, engine.pool, engine.scheduler.walk
    if walk is None or not walk.state.store_budget:
        return
    target = engine.config.lazy_target_blocks
    soon = {ledger.index.get(pool.caches.get(block, b"")) for block in islice(pool.queue, 2 * target)} - {
        None
    }
    if not _has_room(engine, [slot for slot in soon if slot is not None]):
        return
    for block in pool.queue[:target]:
        key = pool.key_of(block)
        if key is not None and key not in ledger.index and ledger.provenance.stale.get(block) != key:
            message = f"device block {block} is next to go, and the host lacks it and can evict others"
            raise PropertyBroken(Property.STORED_ONCE, message)
