"""Least recently used: one queue."""

# ruff: noqa: ARG002 (the protocol names arguments that this policy does not need)

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvsm.core.policies.eviction_policy import Choice, EvictionPolicy
from kvsm.core.policies.policy_copies import PlainCopy, PolicyCopy
from kvsm.core.policies.slot_queue import SlotQueue
from kvsm.ids import NO_IDS, IdArray


class LRUPolicy(EvictionPolicy):
    """Evicts the least recently used block; within one prefix, the last block first."""

    def __init__(self, capacity: int) -> None:
        self._queue = SlotQueue(capacity)

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, slot: int) -> bool:
        return slot in self._queue

    def admitted(self, slots: IdArray, keys: Sequence[bytes], parent: int | None = None) -> None:
        self._queue.insert(slots[::-1], parent)

    def busy(self, slots: IdArray) -> None:
        self._queue.remove(slots)

    def idle(self, slots: IdArray) -> None:
        self._queue.append(slots[::-1])

    def touched(self, slots: IdArray, parent: int | None = None) -> None:
        self._queue.insert(slots[::-1], parent)

    def removed(self, slots: IdArray) -> None:
        self._queue.remove(slots)

    def evicted(self, choice: Choice, keys: Sequence[bytes]) -> None:
        self._queue.remove(choice.victims)

    def clear(self) -> None:
        self._queue.refill(NO_IDS)

    def choose(self, count: int, protected: Collection[int]) -> Choice | None:
        victims = self._queue.first(count, protected)
        return Choice(victims, NO_IDS) if len(victims) == count else None

    def snapshot(self) -> bytes:
        return self._queue.snapshot()

    def freeze(self) -> PolicyCopy:
        return PlainCopy(self._queue.freeze())

    def restore(self, state: bytes) -> None:
        self._queue.restore(state)
