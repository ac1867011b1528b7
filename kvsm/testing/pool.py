"""Test a pool of device blocks against books that count the holders of each block.

Each answer of the pool is compared with the books, which share no code with it:

- an allocated block has no holder, and is allocated once (S3);
- a block that is released has a holder (S4);
- the free queue has every block without a holder once, and no other block (S1);
- a block that the pool returns for a key has the content of that key, and a block for which the pool returns
  a key has its content (S15);
- after a reset no older key matches, even for blocks that requests hold (S14).

Not checked: the order in which free blocks are allocated, and how long their content is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from kvsm.check.worlds.small_pool import SmallPool
from kvsm.core.scheduler import DevicePool
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

_KEYS = [bytes([number]) * 32 + bytes(4) for number in (1, 2, 3)]
"""Keys that no request has."""


class BlockPool(DevicePool, Protocol):
    """The methods that the small engine calls on its pool, under vLLM's names."""

    def get_new_blocks(self, count: int) -> Sequence[int]:
        """Allocate `count` free blocks, and forget their keys. The caller checks that there are enough."""

    def cache_full_blocks(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Cache the full blocks: blocks[i] has the content of keys[i], and can be found by that key."""

    def reset_prefix_cache(self) -> Any:
        """Forget the keys of all blocks."""


class WatchedPool(SmallPool):
    """Replaces the small engine's pool: passes each call to `pool`, which has `size` blocks, and tests it."""

    def __init__(self, pool: BlockPool, size: int) -> None:
        super().__init__(size)
        self._pool, self._size = pool, size
        self._contents: dict[int, set[bytes]] = {}
        """Block -> the keys that it was cached under since it was allocated, and since the last reset."""
        self._reset: dict[int, set[bytes]] = {}
        """Block -> the keys that it was cached under since it was allocated, before the last reset."""
        self._keys: dict[bytes, None] = {}
        """All keys that were ever cached."""
        self._compare("as new")

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] += 1
        self._pool.touch(blocks)
        self._compare(f"touch({list(blocks)})")

    def free_blocks(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.references[block] <= 0:
                raise PropertyBroken(
                    Property.ONE_RELEASE_PER_HOLD, f"device block {block} is released, and nobody holds it"
                )
            self.references[block] -= 1
        self._pool.free_blocks(blocks)
        self._compare(f"free_blocks({list(blocks)})")

    def key_of(self, block: int) -> bytes | None:
        return self._pool.key_of(block)

    def free_queue(self) -> Iterator[int]:
        return self._pool.free_queue()

    def take(self, count: int) -> list[int]:
        taken = list(self._pool.get_new_blocks(count))
        if len(taken) != count or len(set(taken)) != count or not set(taken) <= set(range(self._size)):
            raise PropertyBroken(
                Property.NO_REUSE_IN_FLIGHT,
                f"get_new_blocks({count}) gave {taken}: not {count} different blocks",
            )
        for block in taken:
            if self.references[block]:
                holders = self.references[block]
                raise PropertyBroken(
                    Property.NO_REUSE_IN_FLIGHT, f"device block {block} is handed out, and {holders} hold it"
                )
            self.references[block] = 1
            self._contents.pop(block, None)
            self._reset.pop(block, None)
        self._compare(f"get_new_blocks({count})")
        return taken

    def cache(self, block: int, key: bytes) -> None:
        if key in self._contents.get(block, ()):
            return
        self._contents.setdefault(block, set()).add(key)
        self._keys[key] = None
        self._pool.cache_full_blocks([block], [key])
        self._compare(f"cache_full_blocks([{block}], ...)")

    def forget(self) -> None:
        for block, keys in self._contents.items():
            self._reset.setdefault(block, set()).update(keys)
        self._contents.clear()
        self._pool.reset_prefix_cache()
        self._compare("reset_prefix_cache()")

    def try_reset(self) -> None:
        """Reset the prefix cache while blocks are held once, held twice, free, and of equal content.

        Call this at the end, when nothing is stored any more. Afterwards no request holds these blocks.
        """
        once, twice, idle, equal = blocks = self.take(4)
        for block, key in zip(blocks, (_KEYS[0], _KEYS[1], _KEYS[2], _KEYS[0])):
            self.cache(block, key)
        self.touch([twice])
        self.free_blocks([idle])
        self.forget()
        self.free_blocks([equal, twice, once])
        self.free_blocks([twice])

    def _compare(self, call: str) -> None:
        """Compare the pool's free queue and cached blocks with the books. call: for messages."""
        self.queue = list(self._pool.free_queue())
        free = [block for block, holders in enumerate(self.references) if not holders]
        if sorted(self.queue) != free:
            message = f"after {call} the free queue has device blocks {self.queue}; nobody holds {free}"
            raise PropertyBroken(Property.CONSERVATION, message)
        found = {key: self._pool.cached_block(key) for key in self._keys}
        self.cached = {key: block for key, block in found.items() if block is not None}
        for key, block in self.cached.items():
            self._check_content(call, f"cached_block(...) returns device block {block}", block, key)
        keys = [self._pool.key_of(block) for block in range(self._size)]
        many = getattr(self._pool, "keys_of", None)
        if many is not None and list(many(range(self._size))) != keys:
            raise PropertyBroken(
                Property.CORRECT_BYTES, f"after {call} keys_of returns other keys than key_of of each block"
            )
        for block, named in enumerate(keys):
            if named is not None:
                self._check_content(call, f"key_of({block}) returns a key", block, named)

    def _check_content(self, call: str, answer: str, block: int, key: bytes) -> None:
        """Check an answer of the pool according to which this block caches this key."""
        if key in self._contents.get(block, ()):
            return
        about = f"after {call} {answer}, so device block {block} should hold key {key.hex()[:12]}"
        if key in self._reset.get(block, ()):
            message = f"{about}, but its content is from before the last reset_prefix_cache()"
            raise PropertyBroken(Property.NO_STALE_DATA, message)
        raise PropertyBroken(Property.CORRECT_BYTES, f"{about}, but it holds other content")
