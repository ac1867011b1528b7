"""The lazy store: blocks are stored only when they near eviction from the device.

The engine takes device blocks from the head of its free queue. So what stands there must be free of
content, or on the host already; the walk keeps the first `target` blocks so. It always starts at the head:
between two walks the engine may have taken any block out of the queue, or put it back at the tail, and a
cursor into the queue would not say so. What makes that cheap is to walk on until twice as many safe blocks
were met as are needed, and then not again before so many blocks have left the queue, or the host has lost
something. Every block that a request is given is counted as one that left; so `ahead` is never too large.

To store a block is to hold it: it leaves the queue, and goes to the tail when its copy ends. Stored blocks
thus outlive on the device what was freed after them and before their copy ended, and keep their order among
themselves; every block still comes by the head before it is taken, and is stored there if the host has lost
it meanwhile.

A store that fails, or that pushes off a small host what is on the device too, would be made again and again:
an idle engine would never rest, and a waiting request never find a block that no store holds (S9). So what is
stored is paid for: by the blocks of the pool once, and then by each block that is taken.
"""

from __future__ import annotations

from itertools import islice

from kvsm.offloader import Offloader
from kvsm.plan import TransferJob
from kvsm.scheduler.offer_batch import room
from kvsm.scheduler.protocols import DevicePool


class FreeQueueWalk:
    """Walks the free queue of a pool for an offload core."""

    def __init__(self, offloader: Offloader, pool: DevicePool, target: int) -> None:
        self._offloader, self._pool, self._target = offloader, pool, target
        self._ahead = 0
        """So many blocks from the head on can be taken and nothing is lost, as long as the host keeps all."""
        self._walked_at = 0
        """Number of the last event when that was so."""
        self._refused: tuple[int, int] | None = None
        """The room that there was, if it was too little for the last walk."""
        self._paid = offloader.config.device_blocks
        """So many blocks may be stored."""

    def taken(self, blocks: int) -> None:
        """So many blocks have left the queue, at most."""
        if blocks:
            self._ahead -= blocks
            self._paid = min(self._paid + blocks, self._offloader.config.device_blocks)
            self._refused = None

    def restart(self) -> None:
        """The host has lost what it had."""
        self._ahead, self._refused = 0, None
        self._paid = self._offloader.config.device_blocks

    def store(self) -> TransferJob | None:
        """What must be stored now, held by nobody yet."""
        ledger = self._offloader.ledger
        if self._ahead >= self._target and ledger.forgotten_at <= self._walked_at:
            return None
        if not self._paid or self._refused == room(ledger):
            return None
        keys, blocks, safe = self._walk()
        if len(keys) > len(ledger.free):
            # What is near eviction and on the host is offered too: so it stays, and makes no room for others.
            saved = self._saved()
            keys += saved.keys()
            blocks += saved.values()
        prepared = self._offloader.store((), keys, blocks)
        lacking = bool(prepared.deferred)
        self._paid -= len(prepared.keys)
        self._refused = room(ledger) if lacking else None
        self._ahead, self._walked_at = 0 if lacking else safe, ledger.seq
        return prepared.job

    def _walk(self) -> tuple[list[bytes], list[int], int]:
        """(keys to store, their blocks, how many others were met and are safe)."""
        ledger, most = self._offloader.ledger, min(self._paid, 2 * self._target)
        index, stale, key_of = ledger.index, ledger.provenance.stale, self._pool.key_of
        keys: list[bytes] = []
        blocks: list[int] = []
        safe = 0
        for block in self._pool.free_queue():
            key = key_of(block)
            if key is None or key in index or stale.get(block) == key:
                safe += 1
                if safe == 2 * self._target:
                    break
            elif len(keys) == most:
                break
            else:
                keys.append(key)
                blocks.append(block)
        return keys, blocks, safe

    def _saved(self) -> dict[bytes, int]:
        """key -> block of those near the head of the queue that can be read on the host. Not of all that were
        walked by: to keep what stands far behind would leave no room for what is taken next."""
        index, readable = self._offloader.ledger.index, self._offloader.ledger.readable
        first = islice(self._pool.free_queue(), 2 * self._target)
        named = {key: block for block in first if (key := self._pool.key_of(block)) is not None}
        return {key: block for key, block in named.items() if key in index and readable(index[key])}
