"""An eviction policy that refuses often, to test how the rest of kvsm handles refused stores."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvsm.core.policies import Choice
from kvsm.core.policies.lru import LRUPolicy

REFUSING = f"{__name__}:RefusingPolicy"
"""The `policy` of an `OffloadConfig` that chooses it."""


class RefusingPolicy(LRUPolicy):
    """LRU that either refuses an offer, or admits one block of each run (as many as the free slots, if more).

    Each eviction and each refusal switches between the two. So worlds see both answers to the same offer,
    also in small pools, where `auto` has not learned anything yet.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._refuses_next = False

    def admits(
        self,
        keys: Sequence[bytes],  # noqa: ARG002
        runs: Sequence[int],
        free: int,
        protected: Collection[int],  # noqa: ARG002
    ) -> Sequence[int]:
        if self._refuses_next:
            return [0] * len(runs)
        return [min(count, max(1, free)) for count in runs]

    def evicted(self, choice: Choice, keys: Sequence[bytes]) -> None:
        super().evicted(choice, keys)
        self._refuses_next = not self._refuses_next

    def refused(self, keys: Sequence[bytes]) -> None:  # noqa: ARG002
        self._refuses_next = not self._refuses_next

    def clear(self) -> None:
        super().clear()
        self._refuses_next = False

    def snapshot(self) -> bytes:
        return bytes((self._refuses_next,)) + super().snapshot()

    def restore(self, state: bytes) -> None:
        self._refuses_next = bool(state[0])
        super().restore(state[1:])
