"""An eviction policy that refuses stores whenever a world can be hurt by it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvsm.core.policies import Choice
from kvsm.core.policies.lru import LRUPolicy

REFUSING = f"{__name__}:RefusingPolicy"
"""Its name in an `OffloadConfig`."""


class RefusingPolicy(LRUPolicy):
    """LRU that answers each second offer with no, and admits one block of each run of the others.

    Each answer follows from the events: an eviction and a refusal turn it. So worlds meet both answers to the
    same offer, in small pools, too, where `auto` has learned nothing yet.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._says_no = False

    def admits(
        self,
        keys: Sequence[bytes],  # noqa: ARG002
        runs: Sequence[int],
        free: int,
        protected: Collection[int],  # noqa: ARG002
    ) -> Sequence[int]:
        if self._says_no:
            return [0] * len(runs)
        return [min(count, max(1, free)) for count in runs]

    def evicted(self, choice: Choice, keys: Sequence[bytes]) -> None:
        super().evicted(choice, keys)
        self._says_no = not self._says_no

    def refused(self, keys: Sequence[bytes]) -> None:  # noqa: ARG002
        self._says_no = not self._says_no

    def clear(self) -> None:
        super().clear()
        self._says_no = False

    def snapshot(self) -> bytes:
        return bytes((self._says_no,)) + super().snapshot()

    def restore(self, state: bytes) -> None:
        self._says_no = bool(state[0])
        super().restore(state[1:])
