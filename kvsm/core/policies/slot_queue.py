"""A first-in-first-out queue of slots, for batches. Removing or moving a slot has constant cost.

The queue is an array of entries, and `place[slot]` is the position of the slot's valid entry. Moving a slot
to the tail writes a new entry; removing it clears its place. Dead entries are skipped at the head and removed
when the array is full, at constant amortized cost. The array grows with the slots in the queue and not with
the capacity, because the capacity may be claimed by a log of unknown origin.

A linked list is as good for single slots, but not for eight thousand at once: here every batch operation is a
few numpy calls. A policy may keep several queues; a slot is in at most one of them.

With the native body a queue is a set of bits and a linked list, in C (`kvsm/core/native/slot_queue.c`), with
the same results.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from kvsm.core import native
from kvsm.core.policies.policy_copies import QueueCopy
from kvsm.ids import NO_IDS, SMALL, IdArray, array_of

_ABSENT = -1
_LEAST_ENTRIES = 64
_GAP = 64
"""Dead entries that an insertion adds as space for later insertions."""


def join(first: IdArray, second: IdArray) -> IdArray:
    """Concatenate two batches, in the form for their length (`kvsm.ids`)."""
    if type(first) is tuple and type(second) is tuple and len(first) + len(second) <= SMALL:
        return first + second
    both = np.concatenate((np.asarray(first, dtype=np.int64), np.asarray(second, dtype=np.int64)))
    return both if len(both) > SMALL else tuple(both.tolist())


def split(slots: IdArray, inside: Sequence[bool]) -> tuple[IdArray, IdArray]:
    """Split slots into those whose entry in `inside` is true, and the others; both keep their order."""
    if type(slots) is tuple:
        outside = [not is_inside for is_inside in inside]
        return tuple(compress(slots, inside)), tuple(compress(slots, outside))
    mask = np.array(inside, dtype=np.bool_)
    return slots[mask], slots[~mask]  # type: ignore[return-value]


class SlotQueue:
    """Distinct slots from 0 to `capacity` - 1, oldest first."""

    def __new__(cls, capacity: int) -> SlotQueue:
        """Make a queue with the native or the Python body."""
        if cls is SlotQueue and native.runs():
            return NativeSlotQueue(capacity)
        return super().__new__(cls)

    def __init__(self, capacity: int) -> None:
        self._ring = array("q", (0,)) * _LEAST_ENTRIES
        self._ring_view: NDArray[np.int64] = np.frombuffer(self._ring, dtype=np.int64)
        self._place = array("q", (_ABSENT,)) * capacity
        self._place_view: NDArray[np.int64] = np.frombuffer(self._place, dtype=np.int64)
        self._head = self._tail = self._size = 0

    @property
    def capacity(self) -> int:
        """The number of slots that the queue can hold, from 0 to `capacity` - 1."""
        return len(self._place)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, slot: int) -> bool:
        return self._place[slot] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        """Slots, oldest first. The queue must not change meanwhile."""
        ring, place = self._ring, self._place
        for position in range(self._head, self._tail):
            slot = ring[position]
            if place[slot] == position:
                yield slot

    def which(self, slots: IdArray) -> list[bool]:
        """Return for each slot whether it is in the queue."""
        if type(slots) is tuple:
            place = self._place
            return [place[slot] != _ABSENT for slot in slots]
        inside: list[bool] = (self._place_view[slots] != _ABSENT).tolist()
        return inside

    def append(self, slots: IdArray) -> None:
        """Put distinct slots at the tail, in the given order. A slot that is in the queue moves there."""
        tail = self._tail
        if tail + len(slots) > len(self._ring):
            self._make_room(len(slots))
            tail = self._tail
        if type(slots) is tuple:
            ring, place = self._ring, self._place
            for slot in slots:
                if place[slot] == _ABSENT:
                    self._size += 1
                ring[tail] = slot
                place[slot] = tail
                tail += 1
            self._tail = tail
        else:
            self._size += int(np.count_nonzero(self._place_view[slots] == _ABSENT))
            self._tail = tail + len(slots)
            self._ring_view[tail : self._tail] = slots
            self._place_view[slots] = np.arange(tail, self._tail)

    def insert(self, slots: IdArray, before: int | None) -> None:
        """Put distinct slots right before the slot `before`, in the given order. A slot in the queue moves
        there.

        before: if it is None, not in the queue, or one of `slots`, the slots are appended.
        """
        if before is None or self._place[before] == _ABSENT or before in slots:
            self.append(slots)
            return
        self.remove(slots)
        count, end = len(slots), self._place[before]
        if count > end or len(self._live(end - count, end)):
            self._open_gap(before, count + _GAP)
            end = self._place[before]
        start = end - count
        self._size += count
        self._head = min(self._head, start)
        self._ring_view[start:end] = slots
        self._place_view[np.asarray(slots, dtype=np.int64)] = np.arange(start, end)

    def remove(self, slots: IdArray) -> None:
        """Remove those of `slots` that are in the queue."""
        before = self._size
        if type(slots) is tuple:
            place = self._place
            for slot in slots:
                if place[slot] != _ABSENT:
                    place[slot] = _ABSENT
                    self._size -= 1
        else:
            self._size -= int(np.count_nonzero(self._place_view[slots] != _ABSENT))
            self._place_view[slots] = _ABSENT
        if self._size != before:
            self._skip_dead(len(slots))

    def refill(self, slots: IdArray) -> None:
        """Replace the content by these slots, which ascend."""
        self._place_view[:] = _ABSENT
        self._head = self._tail = self._size = 0
        self.append(slots)

    def first(self, count: int, protected: Collection[int] = ()) -> IdArray:
        """Return up to `count` slots from the head that are not `protected`. Changes nothing."""
        if count > SMALL:
            return self._first_array(count, protected)
        found: list[int] = []
        ring, place, position, tail = self._ring, self._place, self._head, self._tail
        while len(found) < count and position < tail:
            slot = ring[position]
            if place[slot] == position and slot not in protected:
                found.append(slot)
            position += 1
        return tuple(found)

    def order(self) -> NDArray[np.int64]:
        """Return all slots, oldest first."""
        return self._live(self._head, self._tail)

    def windows(self, size: int) -> Iterator[NDArray[np.int64]]:
        """Yield the slots, oldest first, in arrays. The queue must not change meanwhile.

        size: number of entries that the first array is read from; each further array reads twice as many.
        """
        start = self._head
        while start < self._tail:
            stop = min(self._tail, start + size)
            yield self._live(start, stop)
            start, size = stop, 2 * size

    def snapshot(self) -> bytes:
        """Return the slots in order, four bytes each: equal for equal queues."""
        return self.order().astype("<u4").tobytes()

    def freeze(self) -> QueueCopy:
        """Begin a copy of what `snapshot` returns now. An earlier copy is dropped."""
        return QueueCopy(self.snapshot())

    def restore(self, state: bytes) -> None:
        """Fill an empty queue from a snapshot. Raises `ValueError` for a slot that it cannot hold."""
        slots = np.frombuffer(state, "<u4").astype(np.int64)
        if len(slots) > len(self._place) or slots.max(initial=0) >= len(self._place):
            raise ValueError(f"the snapshot names slots that a queue of {len(self._place)} does not have")
        self.append(slots)

    def _live(self, start: int, stop: int) -> NDArray[np.int64]:
        window = self._ring_view[start:stop]
        live: NDArray[np.int64] = window[self._place_view[window] == np.arange(start, stop)]
        return live

    def _first_array(self, count: int, protected: Collection[int]) -> IdArray:
        parts: list[NDArray[np.int64]] = []
        missing = count
        barred = np.fromiter(protected, np.int64) if protected else None
        for live in self.windows(2 * count + SMALL):
            if barred is not None:
                live = live[~np.isin(live, barred)]
            parts.append(live[:missing])
            missing -= len(parts[-1])
            if not missing:
                break
        return np.concatenate(parts) if parts else NO_IDS

    def _skip_dead(self, removed: int) -> None:
        """Move the head past dead entries, so that `first` does not read them again."""
        if self._size == 0:
            self._head = self._tail = 0
            return
        ring, place, head = self._ring, self._place, self._head
        if removed > SMALL:
            while True:
                stop = min(self._tail, head + 2 * removed)
                window = self._ring_view[head:stop]
                alive = self._place_view[window] == np.arange(head, stop)
                step = int(alive.argmax())
                if alive[step]:
                    self._head = head + step
                    return
                head = stop
        while place[ring[head]] != head:
            head += 1
        self._head = head

    def _open_gap(self, slot: int, count: int) -> None:
        """Insert `count` dead entries before this slot: move its entry and all later ones."""
        if self._tail + count > len(self._ring):
            self._make_room(count)
        start, stop = self._place[slot], self._tail
        moved = self._ring_view[start:stop].copy()
        live = self._live(start, stop)
        self._ring_view[start : start + count] = slot
        self._ring_view[start + count : stop + count] = moved
        self._place_view[live] += count
        self._tail += count

    def _make_room(self, count: int) -> None:
        """Remove dead entries. If more than half of the array would be used, allocate one of four times its
        need."""
        live = self.order()
        if 2 * (len(live) + count) > len(self._ring):
            self._ring = array("q", (0,)) * (4 * (len(live) + count) + _LEAST_ENTRIES)
            self._ring_view = np.frombuffer(self._ring, dtype=np.int64)
        self._head, self._tail = 0, len(live)
        self._ring_view[: self._tail] = live
        self._place_view[live] = np.arange(self._tail)


class NativeSlotQueue(native.QueueBody, SlotQueue):
    """The queue of the native body. The methods here are built on its `following`."""

    def __new__(cls, capacity: int) -> NativeSlotQueue:
        return native.QueueBody.__new__(cls, capacity)

    def __init__(self, capacity: int) -> None:
        """Do nothing: `__new__` has made the queue."""

    def __iter__(self) -> Iterator[int]:
        for window in self.windows(SMALL):
            yield from window.tolist()

    def order(self) -> NDArray[np.int64]:
        return array_of(self.following(-1, len(self)))

    def windows(self, size: int) -> Iterator[NDArray[np.int64]]:
        last = -1
        while len(window := array_of(self.following(last, size))):
            yield window
            last, size = int(window[-1]), 2 * size

    def freeze(self) -> QueueCopy:
        return QueueCopy(self.frozen_part())

    def restore(self, state: bytes) -> None:
        slots = np.frombuffer(state, "<u4").astype(np.int64)
        if len(slots) > self.capacity or slots.max(initial=0) >= self.capacity:
            raise ValueError(f"the snapshot names slots that a queue of {self.capacity} does not have")
        self.append(slots)
