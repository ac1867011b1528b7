"""Keys that a policy remembers although their blocks are gone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import compress

from kvsm.ids import NO_IDS, IdArray
from kvsm.policies.slot_queue import split


class KeyQueue(OrderedDict[bytes, None]):
    """Distinct keys, oldest first. Its owner limits how many it holds.

    An `OrderedDict`, because there the oldest key leaves at constant cost. A plain dict walks over the holes
    that removed keys left at its head.
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
        """Whether at least one of `keys` is here."""
        return bool(self) and not self.keys().isdisjoint(keys)

    def part(self, slots: IdArray, keys: Sequence[bytes]) -> tuple[IdArray, IdArray]:
        """Split slots: first those whose key is in the queue, then the others. The keys that were found
        leave.

        keys: keys[i] is in slots[i].
        """
        if not self.holds_any(keys):
            return NO_IDS, slots
        found = [key in self for key in keys]
        for key in compress(keys, found):
            del self[key]
        return split(slots, found)
