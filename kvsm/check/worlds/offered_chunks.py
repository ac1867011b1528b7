"""Check that each step stores every chunk that it can (no doubled or lost store, S13).

The booked engine checks after each step, for the requests that the step computes:

- each full chunk with confirmed tokens is on the host, or being stored, or was loaded, or waits;
- a chunk waits only while there is a reason: a copy touches its device blocks, the step stores other chunks,
  there are too many transfers, a reset drains, or the host is full of blocks that may not be evicted.

A chunk that has been on the host since it was full is settled: if the host evicts it, it is offered again at
the end of its request (`kvsm.check.worlds.lost_stores`).

For lazy stores: the device blocks that will be reused next are on the host, as long as the host has room,
that is a free slot, or an evictable one that does not hold a block which the device will reuse soon.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from kvsm.check.worlds.lost_stores import (
    is_of_an_older_epoch,
    refused_in_last_step,
    refused_keys,
    refused_without_owner,
)
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.core.ledger.canonical import Seen, declared
from kvsm.core.scheduler import GroupKind, StoreMode
from kvsm.core.scheduler.groups import group_suffix
from kvsm.errors import PropertyBroken
from kvsm.ids import listed
from kvsm.properties import Property

if TYPE_CHECKING:
    from kvsm.check.worlds.booked_engine import BookedEngine


@declared
class OfferedChunksBook:
    """The settled chunks of each request, tracked without the scheduler's cursors."""

    settled: Annotated[
        dict[str, set[bytes]],
        Seen(lambda book, names: [(names.requests[name], sorted(it)) for name, it in book.settled.items()]),
    ]
    """Request -> the keys of its settled chunks, which it need not offer before its end."""
    found: Annotated[
        dict[str, int],
        Seen(lambda book, names: [(names.requests[name], it) for name, it in book.found.items()]),
    ]
    """Request -> tokens that the device had when the request last asked for a match."""

    def __init__(self) -> None:
        self.settled, self.found = {}, {}

    def lost_blocks(self, request: SmallRequest) -> None:
        """The request has lost its device blocks: it must offer all of its chunks again."""
        self.settled.pop(request.request_id, None)
        self.found.pop(request.request_id, None)

    def forget(self) -> None:
        """The cache is reset: all requests must offer all of their chunks again."""
        self.settled.clear()

    def loaded(self, engine: BookedEngine, request: SmallRequest, end: int) -> None:
        """A load has brought the tokens up to `end`. The host had these chunks, so they are settled."""
        begin = self.found[request.request_id]
        brought = [key for key, first, last, _ in _chunks(engine, request, end) if begin <= first < last]
        self.settled.setdefault(request.request_id, set()).update(brought)

    def check(self, engine: BookedEngine, scheduled: Collection[str]) -> None:
        """Check the plan of this step. scheduled: the requests that the step computes.

        Raises `PropertyBroken` for a chunk that is not stored although nothing prevents it.
        """
        if engine.config.store is not StoreMode.EAGER or engine.core.config.store_threshold > 1:
            return
        waiting, requests = [], engine.holders()
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

    def _waiting(self, engine: BookedEngine, request: SmallRequest) -> list[int]:
        """The end tokens of the chunks that only a lack of room could delay. Books the settled chunks."""
        ledger, ends = engine.core.ledger, []
        settled = self.settled.setdefault(request.request_id, set())
        settled |= refused_keys(request.request_id, engine.log)
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
    """The number of tokens with certain KV: not those of steps in progress, nor the last sampled one."""
    computed = request.num_computed_tokens - request.num_output_placeholders
    return min(computed, max(request.num_prompt_tokens, request.num_tokens - 1))


def _chunks(
    engine: BookedEngine, request: SmallRequest, confirmed: int
) -> Iterator[tuple[bytes, int, int, list[int]]]:
    """The full-attention chunks before token `confirmed`: (key, first token, end token, device blocks).

    In a drafter's group the last chunk of a decoding request is left out: drafts may still rewrite it.
    """
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


def _slots_of(engine: BookedEngine, requests: Iterable[SmallRequest]) -> set[int]:
    """The slots that hold chunks of these requests, in any group. An offer may name these chunks too, and
    then it does not evict them."""
    index, groups = engine.core.ledger.index, range(len(engine.groups))
    keys = [cell + group_suffix(group) for request in requests for cell in request.cells for group in groups]
    return {index[key] for key in keys if key in index}


def _stores(engine: BookedEngine, slot: int, blocks: list[int]) -> bool:
    """Whether the store that fills this slot reads these device blocks."""
    ledger = engine.core.ledger
    return set(blocks) <= set(listed(ledger.transfers[ledger.generation[slot]].device_blocks))


def _may_store(engine: BookedEngine) -> bool:
    """Whether the step could have stored more, given room on the host."""
    ledger = engine.core.ledger
    full = len(ledger.transfers) >= engine.core.config.max_live_transfers
    return not (full or engine.plan.stores or ledger.draining() or refused_in_last_step(engine.log))


def _has_room(engine: BookedEngine, kept: Collection[int]) -> bool:
    """Whether the step could have stored more. kept: slots that may not be evicted for it."""
    ledger = engine.core.ledger
    protected = sum(slot in ledger.policy for slot in kept)
    return _may_store(engine) and len(ledger.free) + ledger.evictable() > protected


def check_head_of_queue(engine: BookedEngine) -> None:
    """Check lazy stores: no block at the head of the free queue is missing on the host while it has room.

    Bytes that were loaded before a reset are excepted: they are never stored.
    """
    ledger, pool, walk = engine.core.ledger, engine.pool, engine.scheduler.walk
    if walk is None or not walk.state.store_budget:
        return
    target = engine.config.lazy_target_blocks
    soon = {ledger.index.get(pool.caches.get(block, b"")) for block in islice(pool.queue, 2 * target)} - {
        None
    }
    if not _has_room(engine, [slot for slot in soon if slot is not None]):
        return
    refused = refused_without_owner(engine.log)
    for block in pool.queue[:target]:
        key = pool.key_of(block)
        if key is None or key in ledger.index or key in refused:
            continue
        if ledger.provenance.stale.get(block) != key:
            message = f"device block {block} is next to go, and the host lacks it and can evict others"
            raise PropertyBroken(Property.STORED_ONCE, message)
