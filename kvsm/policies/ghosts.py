"""Keys that a policy remembers although their blocks are gone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class KeyQueue(OrderedDict[bytes, None]):
    """Distinct keys, oldest first; its owner says how many it may hold.

    An `OrderedDict` because the oldest key leaves at constant cost. In a plain dict that has lost its
    oldest keys, finding the first one left means walking over their holes.
    """

    def add(self, keys: Iterable[bytes], limit: int) -> None:
        """Put keys at the tail, then forget the oldest beyond `limit`."""
        for key in keys:
            self[key] = None
        self.trim(limit)

    def trim(self, limit: int) -> None:
        """Forget the oldest keys until no more than `limit` are left."""
        for _ in range(len(self) - limit):
            self.popitem(last=False)

    def holds_any(self, keys: Sequence[bytes]) -> bool:
        return bool(self) and not self.keys().isdisjoint(keys)

    def take(self, keys: Sequence[bytes]) -> list[bool]:
        """For each of `keys`, whether it was in the queue; those that were leave it."""
        found = [key in self for key in keys]
        for key, inside in zip(keys, found, strict=True):
            if inside:
                del self[key]
        return found
