"""Counts the uses of blocks, and searches for victims by these counts.

For policies in which a use moves nothing and only counts (S3-FIFO, SIEVE). A block in use keeps its place in
its queue; a search passes over it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsm.core.policies.eviction_policy import EvictionPolicy
from kvsm.core.policies.policy_copies import CountsCopy, QueueCopy
from kvsm.core.policies.slot_queue import SlotQueue
from kvsm.ids import SMALL, IdArray

# One byte per slot: its count of uses; the same plus _IN_USE while it is in use; or _ABSENT.
_IN_USE = 128
_ABSENT = 255
_FEW = 4 * SMALL
"""Number of blocks from which on arrays are faster than a loop."""


class _Step(NamedTuple):
    """A map from each byte to its next byte, as a table for a loop and as an array for numpy."""

    table: bytes
    array: NDArray[np.uint8]


class _Steps(NamedTuple):
    admit: _Step
    begin_use: _Step
    end_use: _Step
    lower: _Step
    mark_unused: _Step
    forget: _Step


@cache
def _steps(most: int) -> _Steps:
    counts = range(most + 1)
    both = [(flag + uses, flag, uses) for uses in counts for flag in (0, _IN_USE)]
    return _Steps(
        admit=_step(dict.fromkeys(range(256), 0)),
        begin_use=_step({uses: _IN_USE + uses for uses in counts}),
        end_use=_step({byte: min(uses + 1, most) for byte, _, uses in both}),
        lower=_step({byte: flag + max(uses - 1, 0) for byte, flag, uses in both}),
        mark_unused=_step({byte: flag for byte, flag, _ in both}),
        forget=_step(dict.fromkeys(range(256), _ABSENT)),
    )


def _step(changes: dict[int, int]) -> _Step:
    """Make a step. Bytes that are not in `changes` stay the same."""
    table = bytes([changes.get(byte, byte) for byte in range(256)])
    return _Step(table, np.frombuffer(table, dtype=np.uint8))


class UseCounts:
    """Counts the uses of the block in each of `capacity` slots, up to `most`, and which are in use."""

    __slots__ = ("_bytes", "_idle", "_most", "_steps", "_view")

    def __init__(self, capacity: int, most: int) -> None:
        self._bytes = bytearray([_ABSENT]) * capacity
        self._view: NDArray[np.uint8] = np.frombuffer(self._bytes, dtype=np.uint8)
        self._most, self._steps, self._idle = most, _steps(most), 0

    def __len__(self) -> int:
        """Return the number of idle blocks."""
        return self._idle

    def __contains__(self, slot: int) -> bool:
        """Whether the block is idle."""
        return self._bytes[slot] <= self._most

    def admit(self, slots: IdArray) -> None:
        """Add new blocks with a count of 0."""
        self._apply(self._steps.admit, slots)

    def begin_use(self, slots: IdArray) -> None:
        """Mark blocks as in use."""
        self._apply(self._steps.begin_use, slots)

    def end_use(self, slots: IdArray) -> None:
        """Mark blocks as idle, and count one more use of each."""
        self._apply(self._steps.end_use, slots)

    def lower(self, slots: IdArray) -> None:
        """Lower each count by one, but not below 0."""
        self._apply(self._steps.lower, slots)

    def mark_unused(self, slots: IdArray) -> None:
        """Set these counts to 0."""
        self._apply(self._steps.mark_unused, slots)

    def forget(self, slots: IdArray) -> None:
        """Forget these blocks."""
        self._apply(self._steps.forget, slots)

    def clear(self) -> None:
        """Forget all blocks."""
        self._view[:], self._idle = _ABSENT, 0

    def is_unused(self, slot: int) -> bool:
        """Whether the slot holds an idle block that was not used."""
        return self._bytes[slot] == 0

    def highest(self, slots: IdArray) -> int:
        """Return the highest count of these idle blocks; 0 if there are none."""
        if type(slots) is tuple:
            return max([self._bytes[slot] for slot in slots], default=0)
        return int(self._view[slots].max(initial=0))

    def has(self, count: int, protected: Collection[int]) -> bool:
        """Whether there are `count` idle blocks that are not protected."""
        if self._idle - len(protected) >= count:
            return True
        return self._idle - len({slot for slot in protected if slot in self}) >= count

    def search(
        self, queue: SlotQueue, count: int, uses: range, protected: Collection[int], most_passed: int
    ) -> tuple[IdArray, IdArray]:
        """Return up to `count` victims of a queue, oldest first, and the blocks that were passed over before
        the last victim.

        uses: the counts of a victim. A block with a lower count is in neither result: an earlier search of
        the same choice took it. Blocks with a higher count, in use or protected are passed over.
        most_passed: the most blocks to pass over. After these, a block with a higher count is a victim too,
        and a block that is in use or protected is in neither result.
        """
        if count > SMALL:
            return self._search_arrays(queue, count, uses, protected, most_passed)
        victims: list[int] = []
        passed: list[int] = []
        if count:
            counts, most, least, beyond = self._bytes, self._most, uses.start, uses.stop
            for looked_at, slot in enumerate(queue):
                if looked_at == _FEW:
                    return self._search_arrays(queue, count, uses, protected, most_passed)
                used = counts[slot]
                if (used >= beyond or slot in protected) and len(passed) < most_passed:
                    passed.append(slot)
                elif least <= used <= most and slot not in protected:
                    victims.append(slot)
                    if len(victims) == count:
                        break
        return tuple(victims), tuple(passed)

    def _search_arrays(
        self, queue: SlotQueue, count: int, uses: range, protected: Collection[int], most_passed: int
    ) -> tuple[IdArray, IdArray]:
        barred = np.fromiter(protected, np.int64) if protected else None
        none: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        victims, passed = [none], [none]
        for window in queue.windows(2 * count + SMALL):
            counts = self._view[window]
            held = counts > self._most
            if barred is not None:
                held |= np.isin(window, barred)
            stays = held | (counts >= uses.stop)
            stays[np.flatnonzero(stays)[most_passed:]] = False
            goes = np.flatnonzero(~stays & ~held & (counts >= uses.start))
            if len(goes) >= count:
                goes = goes[:count]
                window, stays = window[: goes[-1] + 1], stays[: goes[-1] + 1]
            victims.append(window[goes])
            passed.append(window[stays])
            count -= len(goes)
            if not count:
                break
            most_passed -= len(passed[-1])
        return np.concatenate(victims), np.concatenate(passed)

    def snapshot(self, *queues: SlotQueue) -> bytes:
        """Return the bytes of the slots in these queues, in the order of the queues."""
        return self._view[self._order(queues)].tobytes()

    def freeze(self, *queues: QueueCopy) -> CountsCopy:
        """Begin a copy of what `snapshot` returns now. queues: copies of the queues."""
        return CountsCopy(bytes(self._bytes), queues)

    def restore(self, state: bytes, *queues: SlotQueue) -> None:
        """Restore the counts that `snapshot` saved, for the same queues."""
        self._view[self._order(queues)] = np.frombuffer(state, dtype=np.uint8)
        self._idle = int(np.count_nonzero(self._view <= self._most))

    @staticmethod
    def _order(queues: Sequence[SlotQueue]) -> NDArray[np.int64]:
        return np.concatenate([queue.order() for queue in queues])

    def _apply(self, step: _Step, slots: IdArray) -> None:
        """Apply a step to the bytes of `slots`, and update the number of idle blocks."""
        most = self._most
        if type(slots) is tuple:
            counts, table = self._bytes, step.table
            for slot in slots:
                before = counts[slot]
                after = counts[slot] = table[before]
                self._idle += (after <= most) - (before <= most)
        else:
            before_all = self._view[slots]
            after_all = step.array[before_all]
            self._view[slots] = after_all
            self._idle += int(np.count_nonzero(after_all <= most)) - int(np.count_nonzero(before_all <= most))


class UseCountingPolicy(EvictionPolicy):
    """Base of the policies in which a use moves nothing and only counts. A subclass makes `_uses`."""

    most_passed: ClassVar[int] = 5_000
    """The most blocks that a choice passes over in a queue. Then it takes the next blocks that it may, used
    or not. So it never goes once around a longer queue: `evicted` derives the number of complete laps from
    the lengths of the queues, and does not count a used victim as one of a later lap.

    A log must be folded with the value with which it was written.
    """

    _uses: UseCounts

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, slot: int) -> bool:
        return slot in self._uses

    def busy(self, slots: IdArray) -> None:
        self._uses.begin_use(slots)

    def idle(self, slots: IdArray) -> None:
        self._uses.end_use(slots)

    def touched(self, slots: IdArray, parent: int | None = None) -> None:  # noqa: ARG002 (it moves nothing)
        self._uses.end_use(slots)
