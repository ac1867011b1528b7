"""The lazy store: a block is stored only when it nears eviction from the device.

The engine takes device blocks from the head of its free queue. A block there is safe (needs no store) if it
is empty, if the host has its content, or if the eviction policy refused it. A walk keeps the first `target`
blocks safe. Each walk starts at the head: between two walks the engine may take any block out of the queue or
put it back at the tail, which a cursor into the queue would miss. To make walks rare, a walk continues until
it has passed twice as many safe blocks as it needs. The next walk is due when the surplus has left the queue,
or when the host has lost a key. Every block given to a request counts as having left the queue, so a walk is
never too late.

Walks remember no positions in the queue. They remember the blocks whose content the host has, and skip these
without reading their keys. Such a block is forgotten when a request gets it, because the request may write to
it, and all are forgotten when the host has lost a key. An empty block is not remembered, because the walk is
not notified when the block gets a key.

A stored block is held: it leaves the queue, and goes to the tail when its copy ends. So on the device it
outlives the blocks that were freed between its own release and the end of its copy. Stored blocks keep their
order among themselves. Every block passes the head again before it is taken, and is stored again there if the
host has lost its content.

A store may fail, or evict keys from a small host that the device has too. Such stores would repeat forever:
an idle engine would never rest, and a waiting request would find every block held by a store; both violate
progress (S9). So stores have a budget: at first the number of blocks of the pool, then one block more for
each block that is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, cast

import msgspec

from kvsm.core.ledger.canonical import KEPT, Dropped, Names, Seen, declared, filled
from kvsm.core.offloader import Offloader, PreparedStore
from kvsm.core.plan import TransferJob
from kvsm.core.scheduler.protocols import DevicePool
from kvsm.core.scheduler.retry import RetryStamp
from kvsm.events import STORE
from kvsm.ids import listed

PIECE = 64
"""How many blocks of the queue are looked up together."""

_LOGGER = logging.getLogger("kvsm")


def _walk_due_in(state: WalkState, names: Names) -> int:
    """Return `walk_due_in`; 0, due at once, if the host has lost a key since the last walk."""
    return 0 if names.ledger.forgotten_at > state.walked_at else state.walk_due_in


def _left_out(state: WalkState, names: Names) -> list[bytes | None]:
    return [*map(state.left_out.get, names.blocks)]


@declared
class WalkState(msgspec.Struct):
    """The state that the lazy store keeps between two walks."""

    store_budget: Annotated[int, KEPT]
    """How many blocks may still be stored."""
    walk_due_in: Annotated[int, Seen(_walk_due_in)] = 0
    """How many blocks may leave the queue before the next walk is due, if the host loses no key."""
    walked_at: Annotated[int, Dropped("an event number: `walk_due_in` is compared by what follows")] = 0
    """Number of the last event when `walk_due_in` was set."""
    known_safe: Annotated[set[int], Dropped("without it a walk looks, and finds the same")] = msgspec.field(
        default_factory=set
    )
    """Blocks whose content the host has, or is getting."""
    full_at: Annotated[
        RetryStamp | None,
        Seen(lambda state, names: state.full_at and state.full_at.seen(names.ledger)),
    ] = None
    """The stamp of the last walk, if the host had too little room for it; otherwise None."""
    left_out: Annotated[dict[int, bytes], filled(_left_out)] = msgspec.field(default_factory=dict)
    """Block -> its key, which is not stored while the block has it: the pool still had this key at the last
    reset, or the eviction policy refused it. Removed when a request gets the block."""


def _keys_of(pool: DevicePool, blocks: Sequence[int]) -> list[bytes | None]:
    """Return `key_of` of each block, in one call if the pool has `keys_of`."""
    many: Callable[[Sequence[int]], list[bytes | None]] | None = getattr(pool, "keys_of", None)
    return list(map(pool.key_of, blocks)) if many is None else many(blocks)


def _pieces(queue: Iterator[int], safe: Sequence[int], enough: int) -> Iterator[list[int]]:
    """Yield pieces of the queue until `safe` has `enough` blocks. The caller adds the safe blocks to it.

    The index looks up the keys of a piece faster than one by one. Most pieces are all safe, or all new.
    """
    while (lacking := enough - len(safe)) > 0 and (blocks := list(islice(queue, max(lacking, PIECE)))):
        for begin in range(0, len(blocks), PIECE):
            yield blocks[begin : begin + PIECE]


class FreeQueueWalk:
    """Walks the free queue of a device pool, and stores blocks that near eviction.

    target: how many blocks at the head of the queue are kept safe.
    """

    def __init__(self, offloader: Offloader, pool: DevicePool, target: int) -> None:
        self._offloader, self._pool, self._target = offloader, pool, target
        self.state = WalkState(offloader.config.device_blocks)

    def taken(self, blocks: Sequence[int]) -> None:
        """Note that a request was given these blocks, which may have left the queue."""
        if blocks:
            state, most = self.state, self._offloader.config.device_blocks
            state.walk_due_in = max(0, state.walk_due_in - len(blocks))
            state.store_budget = min(state.store_budget + len(blocks), most)
            state.known_safe.difference_update(blocks)
            state.full_at = None
            if state.left_out:
                for block in blocks:
                    state.left_out.pop(block, None)

    def restart(self, held: Iterable[int] = ()) -> None:
        """Reset the state: the host has lost all its content. held: the blocks that requests hold.

        Blocks that loads write need no entry: they are known to be of an older epoch (`Provenance`).
        """
        key_of = self._pool.key_of
        stores = [one for one in self._offloader.ledger.transfers.values() if one.direction is STORE]
        read = [block for store in stores for block in listed(store.device_blocks)]
        blocks = {*self._pool.free_queue(), *held, *read}
        outdated = {block: key for block in sorted(blocks) if (key := key_of(block)) is not None}
        self.state = WalkState(self._offloader.config.device_blocks, left_out=outdated)
        if outdated:
            _LOGGER.warning(
                "the cache was reset, but the device pool still has keys of %d blocks, such as block %d. "
                "They are not stored until they are allocated again. Reset the device's prefix cache before "
                "reset_cache, so that key_of returns None",
                len(outdated),
                next(iter(outdated)),
            )

    def is_due(self) -> bool:
        """Whether a walk is due and a store is allowed."""
        ledger, state = self._offloader.ledger, self.state
        if state.walk_due_in and ledger.forgotten_at <= state.walked_at:
            return False
        return bool(state.store_budget) and state.full_at != RetryStamp.of(ledger)

    def store(self) -> TransferJob | None:
        """Walk if due, and plan a store; None if there is none. The caller takes the copy's references."""
        ledger, state = self._offloader.ledger, self.state
        if not self.is_due():
            return None
        if ledger.forgotten_at > state.walked_at:
            state.known_safe.clear()
        keys, blocks, safe = self._walk()
        if len(keys) > len(ledger.free):
            # Also offer near blocks that the host has: that touches their keys, which protects them.
            saved = self._saved()
            keys += saved.keys()
            blocks += saved.values()
        prepared = self._offloader.store((), keys, blocks)
        are_all = len(prepared.stored) == len(blocks)
        state.known_safe.update(blocks if are_all else [blocks[place] for place in prepared.stored])
        state.left_out.update({blocks[place]: keys[place] for place in prepared.refused})
        still_safe, waits = self._still_safe(safe, prepared), bool(prepared.deferred)
        state.store_budget -= len(prepared.keys)
        state.full_at = RetryStamp.after(ledger, prepared) if waits else None
        state.walk_due_in = 0 if waits else max(0, still_safe - self._target + 1)
        state.walked_at = ledger.seq
        return prepared.job

    def _still_safe(self, safe: Sequence[int], prepared: PreparedStore) -> int:
        """Return how many of these blocks, from the first one on, are safe after the store."""
        if not prepared.evicted:
            return len(safe)
        # Blocks whose keys this store has evicted are no longer safe.
        self.state.known_safe.clear()
        evicted, keys = set(prepared.evicted), _keys_of(self._pool, safe)
        return next((place for place, key in enumerate(keys) if key in evicted), len(safe))

    def _walk(self) -> tuple[list[bytes], list[int], list[int]]:
        """Walk the queue. Returns the keys to store, their blocks, and the safe blocks that were passed."""
        ledger, known, enough = self._offloader.ledger, self.state.known_safe, 2 * self._target
        find, stale = ledger.index.find, ledger.provenance.stale
        left_out = self.state.left_out
        are_plain = not stale and not left_out
        most = min(self.state.store_budget, enough)
        keys: list[bytes] = []
        blocks: list[int] = []
        safe: list[int] = []
        queue = self._pool.free_queue()
        for piece in _pieces(queue, safe, enough):
            if known.issuperset(piece):
                safe += piece[: enough - len(safe)]
                continue
            held = _keys_of(self._pool, piece)
            found = find(cast(list[bytes], held))
            if None not in found:
                piece = piece[: enough - len(safe)]
                known.update(piece)
                safe += piece
                continue
            if are_plain and None not in held and found.count(None) == len(piece) <= most - len(keys):
                keys += cast(list[bytes], held)
                blocks += piece
                continue
            for block, key, slot in zip(piece, held, found):
                if len(safe) == enough:
                    break
                if slot is not None:
                    known.add(block)
                    safe.append(block)
                elif key is None or (not are_plain and key in (stale.get(block), left_out.get(block))):
                    safe.append(block)
                elif len(keys) == most:
                    return keys, blocks, safe
                else:
                    keys.append(key)
                    blocks.append(block)
        return keys, blocks, safe

    def _saved(self) -> dict[bytes, int]:
        """Return key -> block for the blocks near the head of the queue whose keys are readable on the host.

        Blocks further behind are left out: keeping their keys too would leave no room for the next stores.
        """
        index, readable = self._offloader.ledger.index, self._offloader.ledger.readable
        first = list(islice(self._pool.free_queue(), 2 * self._target))
        named = {key: block for key, block in zip(_keys_of(self._pool, first), first) if key is not None}
        return {key: block for key, block in named.items() if key in index and readable(index[key])}
