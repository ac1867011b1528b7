"""`PlaceholderBlocks`: numbers in place of device blocks, for managers that do not know the device blocks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice


class PlaceholderBlocks:
    """Hands out numbers. Each stands for a device block of one copy until that copy ends."""

    def __init__(self, numbers: range) -> None:
        self._fresh = iter(numbers)
        self._num_fresh = len(numbers)
        self._returned: list[int] = []

    @property
    def num_free(self) -> int:
        """The number of placeholders that can be taken."""
        return self._num_fresh + len(self._returned)

    def take(self, wanted: int) -> list[int] | None:
        """Take `wanted` numbers; None if fewer are free."""
        if wanted > self.num_free:
            return None
        first = max(0, len(self._returned) - wanted)
        taken = self._returned[first:]
        del self._returned[first:]
        fresh = wanted - len(taken)
        self._num_fresh -= fresh
        return taken + list(islice(self._fresh, fresh))

    def give_back(self, numbers: Iterable[int]) -> None:
        """Free these numbers, when their copies have ended."""
        self._returned.extend(numbers)
