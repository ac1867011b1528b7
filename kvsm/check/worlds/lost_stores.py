"""Check that no block is lost that could have been stored (no doubled or lost store, S13).

With its option `checks_stores` the small engine checks this at two moments:

- at the end of a request, each of its full chunks is on the host or being stored, or the log now gives a
  reason why it is not. This is not checked if the policy refused a chunk of the request, because then the
  request does not offer its chunks again;
- after a step with lazy stores, the device blocks that will be reused next are on the host, if it has room.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from kvsm import events as ev
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.core.scheduler import GroupKind
from kvsm.core.scheduler.groups import group_suffix
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadingEvent, SkipReason
from kvsm.properties import Property

if TYPE_CHECKING:
    from kvsm.check.worlds.small_engine import SmallEngine


def check_kept(
    engine: SmallEngine,
    request: SmallRequest,
    had: Set[bytes],
    decided: Sequence[OffloadingEvent],
    broken: Property,
) -> None:
    """Check that each full chunk of full attention is on the host, in flight, or skipped for a logged reason.

    had: the keys that the host had before the request ended; it may have evicted them for other chunks since.
    decided: the events of the call that ended the request.
    broken: the property to report.
    """
    if request.loading or not request.tables:
        return
    computed = request.num_computed_tokens - request.num_output_placeholders
    confirmed = min(computed, max(request.num_prompt_tokens, request.num_tokens - 1))
    skips = [event for event in decided if isinstance(event, ev.StoreSkipped)]
    skipped = {key for skip in skips if skip.reason is not SkipReason.NOT_ADMITTED for key in skip.keys}
    for index, group in enumerate(engine.groups):
        if group.kind is not GroupKind.FULL:
            continue
        tokens = group.block_tokens * engine.core.config.blocks_per_chunk
        for end in range(tokens, confirmed + 1, tokens):
            key = request.cells[end - 1] + group_suffix(index)
            blocks = request.tables[index][(end - tokens) // group.block_tokens : end // group.block_tokens]
            if is_of_an_older_epoch(engine, key, blocks):
                continue
            if key not in engine.core.ledger.index and key not in skipped and key not in had:
                message = f"request {request.request_id} is over, and its first {end} tokens are not kept"
                raise PropertyBroken(broken, message)


def refused_keys(name: str, log: Sequence[OffloadingEvent]) -> set[bytes]:
    """Return the keys that the policy refused since the request had to offer all its blocks: it arrived, was
    preempted, or the cache was reset."""
    refused = set[bytes]()
    for event in reversed(log):
        if isinstance(event, ev.CacheReset):
            break
        if isinstance(event, ev.RequestArrived | ev.RequestPreempted) and event.request == name:
            break
        if isinstance(event, ev.StoreSkipped) and event.reason is SkipReason.NOT_ADMITTED:
            owned = [owner for owner, count in event.owners for _ in range(count)]
            refused.update(key for owner, key in zip(owned, event.keys) if owner == name)
    return refused


def refused_without_owner(log: Sequence[OffloadingEvent]) -> set[bytes]:
    """Return the keys that the policy refused in lazy stores, which do not offer them again."""
    skips = [event for event in log if isinstance(event, ev.StoreSkipped) and not event.owners]
    return {key for skip in skips if skip.reason is SkipReason.NOT_ADMITTED for key in skip.keys}


def refused_in_last_step(log: Sequence[OffloadingEvent]) -> bool:
    """Whether the policy refused a block in the last step. Offers that waited for this block are not repeated
    before the next step."""
    for number, event in enumerate(reversed(log)):
        if isinstance(event, ev.StepEnded) and number:
            return False
        if isinstance(event, ev.StoreSkipped) and event.reason is SkipReason.NOT_ADMITTED:
            return True
    return False


def is_of_an_older_epoch(engine: SmallEngine, key: bytes, blocks: Sequence[int]) -> bool:
    """Whether a chunk's device blocks hold bytes that were loaded before a reset, and are never stored."""
    stale = engine.core.ledger.provenance.stale
    return stale.get(blocks[-1]) == key or not stale.keys().isdisjoint(blocks[:-1])


def check_next_to_go(engine: SmallEngine, *, rests: bool = False) -> None:
    """Check lazy stores: the host has the blocks at the head of the free queue, while it has free slots.

    Bytes that were loaded before a reset are excepted: they are never stored.

    rests: the engine is at rest, so no store may be outstanding.
    """
    ledger, pool, walk = engine.core.ledger, engine.pool, engine.scheduler.walk
    if walk is None or not len(ledger.free):
        return
    full = len(ledger.transfers) >= engine.core.config.max_live_transfers
    # A step may store only some of the blocks at the head; the next step stores more.
    has_stored = bool(engine.plan.stores)
    if not rests and (full or has_stored or not walk.state.store_budget or ledger.draining()):
        return
    refused = refused_without_owner(engine.log)
    for block in pool.queue[: engine.config.lazy_target_blocks]:
        key = pool.key_of(block)
        if key is None or key in ledger.index or key in refused:
            continue
        if ledger.provenance.stale.get(block) != key:
            message = f"device block {block} is next to go, and is not on the host, which has room"
            raise PropertyBroken(Property.STORED_ONCE, message)
