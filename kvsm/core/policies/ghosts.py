"""`KeyQueue`: keys that a policy remembers after their blocks are evicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

from kvsm.core import native
from kvsm.core.ledger.key_index import make_index
from kvsm.core.policies.policy_copies import KeptKeys, KeysCopy
from kvsm.core.policies.slot_queue import SlotQueue, join, split
from kvsm.ids import NO_IDS, IdArray, listed


class KeyQueue:
    """Distinct keys, oldest first, `capacity` at most.

    Each key has a number, as a block has a slot. So keys use the same structures as slots: an index and a
    queue that never grow, so that no call waits for a resize, and copies in pieces.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._key_of: list[bytes] = []
        """Number -> its key, or the key that it had last."""
        self._index = make_index(self._key_of, native.runs(), capacity)
        self._order, self._unused = SlotQueue(capacity), SlotQueue(capacity)
        self._never_used = 0
        """The first number that is in neither queue."""
        self._kept = KeptKeys()
        self._copy: KeysCopy | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __iter__(self) -> Iterator[bytes]:
        """Keys, oldest first."""
        return iter(self._index.keys_of(self._order.first(len(self._order))))

    def add(self, keys: Iterable[bytes], limit: int) -> None:
        """Append the keys that are not in the queue, and forget the oldest beyond `limit`."""
        fresh = list(dict.fromkeys(keys))
        if self.holds_any(fresh):
            fresh = [key for key, is_here in zip(fresh, self.holding(fresh)) if not is_here]
        over = len(self) + len(fresh) - limit
        forgotten: IdArray = NO_IDS
        if over > 0:
            forgotten = self._order.first(min(over, len(self)))
            self._take_out(forgotten)
            fresh = fresh[over - len(forgotten) :]
        if len(forgotten) == len(fresh):
            numbers = forgotten  # the usual case once the queue is full
        else:
            self._unused.append(forgotten)
            numbers = self._free_numbers(len(fresh))
        if fresh:
            if self._copy is not None and self._copy.is_open:
                self._kept.keep(listed(numbers), self._key_of)
            key_of, index = self._key_of, self._index
            for key, number in zip(fresh, listed(numbers)):
                key_of[number] = key
                index[key] = number
            self._order.append(numbers)

    def trim(self, limit: int) -> None:
        """Forget the oldest keys until no more than `limit` are left."""
        if len(self) > limit:
            self._forget(self._order.first(len(self) - limit))

    def remove(self, key: bytes) -> None:
        """Forget a key that is in the queue."""
        self._forget((self._index[key],))

    def clear(self) -> None:
        """Forget all keys, in constant time: their memory is reused."""
        self._index.clear()
        self._order.refill(NO_IDS)
        self._unused.refill(NO_IDS)
        self._never_used = 0

    def holding(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is in the queue."""
        return [number is not None for number in self._index.find(keys)] if len(self) else [False] * len(keys)

    def holds_any(self, keys: Sequence[bytes]) -> bool:
        """Whether at least one of `keys` is in the queue."""
        return bool(len(self)) and self._index.find(keys).count(None) < len(keys)

    def part(self, slots: IdArray, keys: Sequence[bytes]) -> tuple[IdArray, IdArray]:
        """Split slots into those whose key is in the queue and the others, and remove the keys that were
        found.

        keys: keys[i] is in slots[i].
        """
        if not self.holds_any(keys):
            return NO_IDS, slots
        found = self.holding(keys)
        for key in compress(keys, found):
            self.remove(key)
        return split(slots, found)

    def freeze(self) -> KeysCopy:
        """Begin a copy of the keys in order. An earlier copy is dropped."""
        if self._copy is not None:
            self._copy.drop()
        self._kept = KeptKeys()
        self._copy = KeysCopy(self._order.freeze(), self._key_of, self._kept)
        return self._copy

    def _free_numbers(self, count: int) -> IdArray:
        """Return `count` numbers without a key. Used numbers are reused first."""
        again, new = self._unused.first(count), self._never_used
        self._unused.remove(again)
        self._never_used += count - len(again)
        self._key_of += [b""] * (self._never_used - len(self._key_of))
        return join(again, tuple(range(new, self._never_used)))

    def _forget(self, numbers: IdArray) -> None:
        self._take_out(numbers)
        self._unused.append(numbers)

    def _take_out(self, numbers: IdArray) -> None:
        """Remove the keys of these numbers. The caller reuses or releases the numbers."""
        index = self._index
        for key in index.keys_of(numbers):
            del index[key]
        self._order.remove(numbers)
