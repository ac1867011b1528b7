"""`PlaceholderBlocks`: numbers in place of device blocks, for managers that never hear of the real ones."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice


class PlaceholderBlocks:
    """Hands out these numbers. Each stands for a block of one copy until that copy ends."""

    def __init__(self, numbers: range) -> None:
        self._fresh = iter(numbers)
        self._num_fresh = len(numbers)
        self._returned: list[int] = []

    @property
    def num_free(self) -> int:
        """How many can be taken."""
        return self._num_fresh + len(self._returned)

    def take(self, wanted: int) -> list[int] | None:
        """Take some numbers; None if fewer are free."""
        if wanted > self.num_free:
            return None
        first = max(0, len(self._returned) - wanted)
        taken = self._returned[first:]
        del self._returned[first:]
        fresh = wanted - len(taken)
        self._num_fresh -= fresh
        return taken + list(islice(self._fresh, fresh))

    def give_back(self, numbers: Iterable[int]) -> None:
        """Their copies have ended."""
        self._returned.extend(numbers)
