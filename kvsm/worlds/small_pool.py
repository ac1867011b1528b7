"""The device blocks of the small engine: references, the free queue, and what each block caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvsm.errors import PropertyBroken
from kvsm.properties import Property


class SmallPool:
    """Satisfies `DevicePool`. A block without references stands in the queue, and keeps its content there
    until it is taken."""

    def __init__(self, size: int) -> None:
        self.references = [0] * size
        self.queue = list(range(size))
        self.caches: dict[int, bytes] = {}
        """Block -> the key of its content."""
        self.cached: dict[bytes, int] = {}
        """Key -> a block of that content."""

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
        """Blocks from the head of the queue, for new content."""
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block in taken:
            self.references[block] = 1
            key = self.caches.pop(block, None)
            if key is not None and self.cached.get(key) == block:
                del self.cached[key]
        return taken

    def cache(self, block: int, key: bytes) -> None:
        """The block is full of this content, and may be found by it."""
        if block not in self.caches and key not in self.cached:
            self.caches[block], self.cached[key] = key, block

    def forget(self) -> None:
        """No block is found any more."""
        self.caches.clear()
        self.cached.clear()
