"""Segmented LRU (Karedla, Love and Wherry, 1994): a block must be used again to be protected.

Two LRU queues. A stored block enters `probation`; a use moves it to the tail of `protected`. Idle blocks in
`protected` beyond 80 % of the pool are demoted to the tail of `probation`, oldest first. Victims come from
`probation`, and from `protected` only when `probation` is used up. So blocks that are stored once and never
read evict only each other.

libCacheSim's SLRU has four segments of a quarter each; a model with these agrees with it to the last hit
(benchmarks/policy_oracle.py).

As published, except that a block in use is in neither segment: it returns to `protected`.
"""

# ruff: noqa: ARG002 (the protocol names arguments that this policy does not need)

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from kvsm.core.policies.eviction_policy import Choice, EvictionPolicy
from kvsm.core.policies.policy_copies import PolicyCopy
from kvsm.core.policies.slot_queue import SlotQueue, join
from kvsm.ids import NO_IDS, IdArray

PROTECTED_PERCENT = 80
"""Largest share of the pool that `protected` holds."""


class SLRUPolicy(EvictionPolicy):
    """Evicts blocks that were not used since they were stored or demoted first, then the protected ones."""

    def __init__(self, capacity: int) -> None:
        self._probation = SlotQueue(capacity)
        self._protected = SlotQueue(capacity)
        self._protected_limit = capacity * PROTECTED_PERCENT // 100

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, slot: int) -> bool:
        return slot in self._probation or slot in self._protected

    def admitted(self, slots: IdArray, keys: Sequence[bytes], parent: int | None = None) -> None:
        self._probation.insert(slots[::-1], parent)

    def busy(self, slots: IdArray) -> None:
        self._probation.remove(slots)
        self._protected.remove(slots)

    def idle(self, slots: IdArray) -> None:
        self._protected.append(slots[::-1])
        self._demote()

    def touched(self, slots: IdArray, parent: int | None = None) -> None:
        self._probation.remove(slots)
        self._protected.insert(slots[::-1], parent)
        self._demote()

    def removed(self, slots: IdArray) -> None:
        self.busy(slots)

    def evicted(self, choice: Choice, keys: Sequence[bytes]) -> None:
        self.busy(choice.victims)

    def clear(self) -> None:
        self._probation.refill(NO_IDS)
        self._protected.refill(NO_IDS)

    def choose(self, count: int, protected: Collection[int]) -> Choice | None:
        victims = self._probation.first(count, protected)
        if len(victims) < count:
            victims = join(victims, self._protected.first(count - len(victims), protected))
        return Choice(victims, NO_IDS) if len(victims) == count else None

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode((self._probation.snapshot(), self._protected.snapshot()))

    def freeze(self) -> PolicyCopy:
        return PolicyCopy((self._probation.freeze(), self._protected.freeze()))

    def restore(self, state: bytes) -> None:
        probation, protected = msgspec.msgpack.decode(state, type=tuple[bytes, bytes])
        self._probation.restore(probation)
        self._protected.restore(protected)

    def _demote(self) -> None:
        excess = len(self._protected) - self._protected_limit
        if excess > 0:
            oldest = self._protected.first(excess)
            self._protected.remove(oldest)
            self._probation.append(oldest)
