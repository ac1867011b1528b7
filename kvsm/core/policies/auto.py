"""Auto: keeps the blocks that its own past says are worth their slots, and refuses stores that are not.

Each number of uses (0, 1, or 2 and more) has an LRU queue. `ReuseAges` learns from the ages at which blocks
were used again, in the pool or after they left it, what a block of a certain age and number of uses is
worth: its chance of use per unit of time in its slot. The next victim is, of the heads of the queues, the one
with the lowest worth. A block enters the pool if it is worth as much as the victim that it would replace.

So the policy becomes what the workload asks for. Where most blocks come back soon or never, a block's worth
falls with its age: that is LRU. Where sessions take turns, a block is worth more the nearer its next turn is,
so those that are here stay and others are refused. Where most blocks are never read, one that was used
outlives one that was not, and new ones are refused until they come a second time.

Time counts in uses of blocks; no clock is read. A use shortly after another one, as when a request is looked
up again or offers its blocks again at its end, is no use of its own: its age says nothing about later
requests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.core.policies.eviction_policy import Choice, EvictionPolicy
from kvsm.core.policies.policy_copies import Column, PolicyCopy, Written
from kvsm.core.policies.reuse_ages import Numbers, ReuseAges
from kvsm.core.policies.seen_keys import SeenKeys, Uses
from kvsm.core.policies.slot_queue import SlotQueue
from kvsm.ids import NO_IDS, SMALL, IdArray

_QUEUES = 3
"""Blocks with this many uses less one, or more, are in the last queue."""
_REMEMBERED, _MANY = 4, 1 << 18
"""Keys outside of the pool that are remembered per slot, up to this many in all; at least one per slot."""
_SAME_USE = 16
"""Uses of a block within the capacity divided by this are one use."""
_LEARN_EVERY, _AT_LEAST = 4, 32
"""The worths are estimated anew after as many uses as the capacity divided by this, and after this many."""
_SAMPLED = 1 << 14
"""Blocks that an estimate looks at, in the pool and outside of it."""

Floats = NDArray[np.float64]


class AutoState(msgspec.Struct, array_like=True):
    """The state that `snapshot` saves: the slots of each queue, what is known of each slot and of the seen
    keys, and the estimates. Its fields are the values of `snapshot` and the parts of `freeze`, in order."""

    never: bytes
    once: bytes
    often: bytes
    uses: bytes
    last: bytes
    prints: bytes
    seen_uses: bytes
    seen_last: bytes
    ages: bytes
    clock: int
    fresh: int


class AutoPolicy(EvictionPolicy):
    """Evicts the block with the lowest chance of use per unit of time, and refuses lower ones."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queues = [SlotQueue(capacity) for _ in range(_QUEUES)]
        self._seen = SeenKeys(max(capacity, min(_REMEMBERED * capacity, _MANY)))
        self._ages = ReuseAges(_QUEUES, capacity)
        self._same_use = capacity // _SAME_USE
        self._learn_after = max(_AT_LEAST, capacity // _LEARN_EVERY)
        self._empty()

    def _empty(self) -> None:
        self._uses, self._last = Column(self._capacity, "<u1"), Column(self._capacity, "<i8")
        """The clock at the last use of each slot's block; 0 if it holds none."""
        self._clock = 1
        """One more than the number of uses so far."""
        self._fresh = 0
        """Uses since the worths were estimated."""

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, slot: int) -> bool:
        return any(slot in queue for queue in self._queues)

    def admitted(self, slots: IdArray, keys: Sequence[bytes], parent: int | None = None) -> None:
        if not len(slots):
            return
        numbers = _numbers(slots)
        self._uses.put(numbers, self._used(self._seen.take(keys)))
        self._tick(numbers)
        self._enter(numbers, parent)

    def busy(self, slots: IdArray) -> None:
        for queue in self._queues:
            queue.remove(slots)
        numbers = _numbers(slots)
        self._uses.put(numbers, self._used(self._of(numbers)))
        self._tick(numbers)

    def idle(self, slots: IdArray) -> None:
        numbers = _numbers(slots)
        self._last.put(numbers, self._clock)
        self._enter(numbers, None)

    def touched(self, slots: IdArray, parent: int | None = None) -> None:
        if not len(slots):
            return
        self.busy(slots)
        self._enter(_numbers(slots), parent)

    def removed(self, slots: IdArray) -> None:
        for queue in self._queues:
            queue.remove(slots)
        numbers = _numbers(slots)
        self._uses.put(numbers, 0)
        self._last.put(numbers, 0)

    def evicted(self, choice: Choice, keys: Sequence[bytes]) -> None:
        self._remember(keys, self._of(_numbers(choice.victims)))
        self.removed(choice.victims)

    def clear(self) -> None:
        for queue in self._queues:
            queue.refill(NO_IDS)
        self._seen.clear()
        self._ages.clear()
        self._empty()

    def choose(self, count: int, protected: Collection[int]) -> Choice | None:
        victims = self._candidates(count, protected)[0]
        return Choice(_ids(victims), NO_IDS) if len(victims) == count else None

    def admits(
        self, keys: Sequence[bytes], runs: Sequence[int], free: int, protected: Collection[int]
    ) -> Sequence[int]:
        lacking = len(keys) - free
        if lacking <= 0:
            return runs
        uses = self._uses_next(self._seen.find(keys))
        ends = list(accumulate(runs))
        worth = self._ages.worth(uses, np.zeros(len(keys), dtype=np.int64))
        for count, end in zip(runs, ends):
            # A block is worth no more than the blocks before it, without which it cannot be hit.
            worth[end - count : end] = np.minimum.accumulate(worth[end - count : end])
        best_first = np.argsort(-worth, kind="stable")
        theirs = self._candidates(lacking, protected)[1]
        ours = worth[best_first[free : free + len(theirs)]]
        better = int(np.argmin(np.append(ours >= theirs, False)))
        stored = np.zeros(len(keys), dtype=np.int64)
        stored[best_first[: free + better]] = 1
        return [int(stored[end - count : end].sum()) for count, end in zip(runs, ends)]

    def refused(self, keys: Sequence[bytes]) -> None:
        distinct = list(dict.fromkeys(keys))
        uses = self._used(self._seen.find(distinct))
        self._remember(distinct, Uses(uses, np.full(len(distinct), self._clock)))
        self._pass(len(distinct))

    def snapshot(self) -> bytes:
        queues = [queue.snapshot() for queue in self._queues]
        columns = [column.snapshot() for column in self._columns()]
        state = (*queues, *columns, self._ages.snapshot(), self._clock, self._fresh)
        return msgspec.msgpack.encode(state)

    def freeze(self) -> PolicyCopy:
        queues = [queue.freeze() for queue in self._queues]
        columns = [column.freeze() for column in self._columns()]
        rest = [Written(one) for one in (self._ages.snapshot(), self._clock, self._fresh)]
        return PolicyCopy((*queues, *columns, *rest))

    def restore(self, state: bytes) -> None:
        saved = msgspec.msgpack.decode(state, type=AutoState)
        orders = saved.never, saved.once, saved.often
        for queue, order in zip(self._queues, orders):
            queue.restore(order)
        columns = saved.uses, saved.last, saved.prints, saved.seen_uses, saved.seen_last
        for column, values in zip(self._columns(), columns):
            column.restore(values)
        self._ages.restore(saved.ages)
        self._clock, self._fresh = saved.clock, saved.fresh

    def _columns(self) -> tuple[Column, ...]:
        return (self._uses, self._last, *self._seen.columns())

    def _of(self, slots: Numbers) -> Uses:
        return Uses(self._uses.values[slots].astype(np.int64), self._last.values[slots])

    def _uses_next(self, known: Uses) -> Numbers:
        """The number of uses of blocks that are used now. known: -1 uses if nothing is known of a block."""
        more = (known.uses < 0) | (self._clock - known.last >= self._same_use)
        uses: Numbers = np.minimum(known.uses + more, _QUEUES - 1)
        return uses

    def _used(self, known: Uses) -> Numbers:
        """Count that blocks are used now, and return their number of uses."""
        ages = self._clock - known.last
        again = (known.uses >= 0) & (ages >= self._same_use)
        self._ages.hit(known.uses[again], ages[again])
        return self._uses_next(known)

    def _tick(self, slots: Numbers) -> None:
        """Note the time of a use of these slots."""
        self._last.put(slots, self._clock)
        self._pass(len(slots))

    def _pass(self, uses: int) -> None:
        """Let time pass, and learn if it is time to."""
        self._clock += uses
        self._fresh += uses
        if self._fresh >= self._learn_after:
            self._fresh = 0
            step = -(-self._capacity // _SAMPLED)
            some = np.arange(0, self._capacity, step)
            here = self._of(some[self._last.values[some] > 0])
            gone, each = self._seen.sample(_SAMPLED)
            waiting = self._ages.waiting(here.uses, self._clock - here.last, step)
            self._ages.learn(waiting + self._ages.waiting(gone.uses, self._clock - gone.last, each))

    def _remember(self, keys: Sequence[bytes], uses: Uses) -> None:
        forgotten = self._seen.add(keys, *uses)
        self._ages.lose(forgotten.uses, self._clock - forgotten.last)

    def _enter(self, slots: Numbers, parent: int | None) -> None:
        """Put blocks at the tail of their queues, or right before their parent if it is in the same queue."""
        uses = self._uses.values[slots]
        for number, queue in enumerate(self._queues):
            some = slots[uses == number]
            if len(some):
                queue.insert(_ids(some[::-1]), parent)

    def _candidates(self, count: int, protected: Collection[int]) -> tuple[Numbers, Floats]:
        """Return up to `count` idle blocks that are not protected, in the order of eviction, and the worth of
        the best block that is evicted up to each of them.

        The queues are merged: each is taken from its head on. Of equal worth, the least recently used one.
        """
        slots = [_numbers(queue.first(count, protected)) for queue in self._queues]
        worth = [np.maximum.accumulate(self._worth_of(some)) for some in slots]
        last = [np.maximum.accumulate(self._last.values[some]) for some in slots]
        everything, each = np.concatenate(slots), np.concatenate(worth)
        order = np.lexsort((np.concatenate(last), each))[:count]
        return everything[order], each[order]

    def _worth_of(self, slots: Numbers) -> Floats:
        uses, last = self._of(slots)
        return self._ages.worth(uses, self._clock - last)


def _ids(slots: Numbers) -> IdArray:
    """Return these slots in the form for their number (`kvsm.ids`)."""
    return slots if len(slots) > SMALL else tuple(slots.tolist())


def _numbers(slots: IdArray) -> Numbers:
    return np.asarray(slots, dtype=np.int64)
