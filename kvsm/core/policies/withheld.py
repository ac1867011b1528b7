"""The eviction policy of a redacted log whose engine used a policy of another package, or `auto`.

`kvsm export --redact` withholds the name of that policy, so no reader can run its code. The state of `auto`
has hashes of keys, which cannot be renamed. A fold asks its policy only which blocks are idle; the events say
which of them were evicted.
"""

# ruff: noqa: ARG002 (the protocol names arguments that this policy does not need)

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from kvsm.core.policies.eviction_policy import Choice, EvictionPolicy
from kvsm.ids import NO_IDS, IdArray, listed, pack, unpack


class WithheldPolicy(EvictionPolicy):
    """Tracks the set of idle blocks. It would evict the lowest slots, whatever the real policy did."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._idle = set[int]()

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, slot: int) -> bool:
        return slot in self._idle

    def admitted(self, slots: IdArray, keys: Sequence[bytes], parent: int | None = None) -> None:
        self.idle(slots)

    def busy(self, slots: IdArray) -> None:
        self._idle.difference_update(listed(slots))

    def idle(self, slots: IdArray) -> None:
        self._idle.update(listed(slots))

    def touched(self, slots: IdArray, parent: int | None = None) -> None:
        """Change nothing: there is no order."""

    def removed(self, slots: IdArray) -> None:
        self.busy(slots)

    def evicted(self, choice: Choice, keys: Sequence[bytes]) -> None:
        self.busy(choice.victims)

    def clear(self) -> None:
        self._idle = set()

    def choose(self, count: int, protected: Collection[int]) -> Choice | None:
        victims = sorted(self._idle.difference(protected))[:count]
        return Choice(unpack(pack(victims)), NO_IDS) if len(victims) == count else None

    def snapshot(self) -> bytes:
        return np.array(sorted(self._idle), "<u4").tobytes()

    def restore(self, state: bytes) -> None:
        slots = np.frombuffer(state, "<u4").tolist()
        if slots and max(slots) >= self._capacity:
            raise ValueError(f"the snapshot names slots that a pool of {self._capacity} does not have")
        self._idle.update(slots)
