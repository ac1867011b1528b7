"""Keys that a policy remembers although their blocks are gone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import compress

from kvsm.ids import NO_IDS, IdArray
from kvsm.policies.slot_queue import split


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
        while len(self) > limit:
            self.popitem(last=False)

    def holds_any(self, keys: Sequence[bytes]) -> bool:
        return bool(self) and not self.keys().isdisjoint(keys)

    def part(self, slots: IdArray, keys: Sequence[bytes]) -> tuple[IdArray, IdArray]:
        """The slots whose keys (keys[i] for slots[i]) are in the queue, and the others. Those keys leave."""
        if not self.holds_any(keys):
            return NO_IDS, slots
        found = [key in self for key in keys]
        for key in compress(keys, found):
            del self[key]
        return split(slots, found)
