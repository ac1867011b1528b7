"""The device block pool of the small engine: references, the free queue, and the cached content of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from kvsm.core.ledger.canonical import Names, Seen, declared, filled
from kvsm.errors import PropertyBroken
from kvsm.properties import Property


def _found(pool: SmallPool, names: Names) -> list[bool]:
    """For each block whether it is the block that the key of its content leads to."""
    found = set(pool.cached.values())
    return [block in found for block in names.blocks]


@declared
class SmallPool:
    """A `DevicePool`. A block without references is in the queue, and stays cached until it is allocated."""

    references: Annotated[
        list[int], Seen(lambda pool, names: [pool.references[block] for block in names.blocks])
    ]
    queue: Annotated[list[int], filled(lambda pool, names: [names.blocks[block] for block in pool.queue])]
    caches: Annotated[dict[int, bytes], filled(lambda pool, names: [*map(pool.caches.get, names.blocks)])]
    """Block -> the key of its content."""
    cached: Annotated[dict[bytes, int], filled(_found)]
    """Key -> the block that a lookup finds."""

    def __init__(self, size: int) -> None:
        self.references, self.queue = [0] * size, list(range(size))
        self.caches, self.cached = {}, {}

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not self.references[block]:
                self.queue.remove(block)
            self.references[block] += 1

    def free_blocks(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.references[block] <= 0:
                raise PropertyBroken(
                    Property.ONE_RELEASE_PER_HOLD, f"device block {block} is released, and nobody holds it"
                )
            self.references[block] -= 1
            if not self.references[block]:
                self.queue.append(block)

    def key_of(self, block: int) -> bytes | None:
        return self.caches.get(block)

    def cached_block(self, key: bytes) -> int | None:
        return self.cached.get(key)

    def free_queue(self) -> Iterator[int]:
        return iter(self.queue)

    def take(self, count: int) -> list[int]:
        """Allocate blocks from the head of the queue. Their cached content is lost."""
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block in taken:
            self.references[block] = 1
            key = self.caches.pop(block, None)
            if key is not None and self.cached.get(key) == block:
                del self.cached[key]
        return taken

    def cache(self, block: int, key: bytes) -> None:
        """Enter a full block in the prefix cache, unless it or its key is there already."""
        if block not in self.caches and key not in self.cached:
            self.caches[block], self.cached[key] = key, block

    def forget(self) -> None:
        """Empty the prefix cache."""
        self.caches.clear()
        self.cached.clear()
