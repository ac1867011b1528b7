"""Auto: learn when blocks are used again, evict those least worth their slots, refuse stores worth even less.

There are three LRU queues: for blocks with no use, with one, and with two or more. `ReuseAges` learns the
*worth* of a block from its number of uses and its age: the chance of a use per unit of time in its slot. It
learns from the ages at which blocks are used again, in the pool or after they were evicted or refused
(`SeenKeys`). The next victim is the block with the lowest worth among the leaves (`Chains`) near the heads of
the queues. A block is stored if it is worth at least as much as the victim that it would replace.

So the policy adapts to the workload. Where most blocks are used again soon or never, the worth falls with the
age: that is LRU. Where sessions take turns, the worth rises as the next turn comes near: stored blocks stay,
and new ones are refused. Where most blocks are never used again, a block that was used outlives one that was
not, and a new block is refused until its key is offered a second time. Where almost no new block comes back
(`FirstReturns`), new blocks are not stored.

The policy reads no wall clock: its own clock advances by one for each block that is stored, refused or used.
Two uses close together count as one, such as when a waiting request looks its prompt up again, or offers its
blocks again at its end: the age between them says nothing about later requests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.core.policies.chains import Chains
from kvsm.core.policies.eviction_policy import Choice, EvictionPolicy
from kvsm.core.policies.first_returns import FirstReturns
from kvsm.core.policies.policy_copies import Column, PolicyCopy, Written
from kvsm.core.policies.reuse_ages import Numbers, ReuseAges
from kvsm.core.policies.seen_keys import SeenKeys, Uses
from kvsm.core.policies.slot_queue import SlotQueue
from kvsm.ids import NO_IDS, IdArray, cut

_QUEUES = 3
"""Queue i has the blocks with i uses; the last queue also those with more."""
_REMEMBERED_PER_SLOT, _REMEMBERED_MOST = 4, 1 << 18
"""Keys to remember of blocks that are not stored: so many per slot, up to this many in all; at least one per
slot."""
_SAME_USE = 16
"""Two uses of a block count as one if the age between them is below the capacity divided by this."""
_LEARN_EVERY, _LEARN_LEAST = 4, 32
"""The worths are estimated again when the clock has advanced by the capacity divided by the first number, but
by the second one at least."""
_SAMPLED = 1 << 14
"""An estimate samples up to this many stored blocks, and as many remembered keys."""
_LOOKED_AT, _LOOKED_AT_LEAST = 4, 64
"""To choose victims, look at this many blocks of each queue per victim, and at this many more. This bounds
the time of a choice. If too few of these blocks are leaves, some victims are not leaves."""
_NOT_WORTH_A_COPY = -1.0
"""Less than the worth of any stored block."""
_LATEST = 1 << 62
"""No clock gets there."""

Floats = NDArray[np.float64]


class _Ranked(NamedTuple):
    """Idle blocks in the order of eviction, without regard to their children: slot, worth and last use."""

    slots: Numbers
    worth: Floats
    last: Numbers


class AutoState(msgspec.Struct, array_like=True):
    """The state that `snapshot` saves, and the parts of `freeze`, in order: the slots of each queue, the uses
    and last use of each slot, the columns of `Chains` and `SeenKeys`, the estimates (`ReuseAges`), the
    clock, and the counts of `FirstReturns`."""

    never: bytes
    once: bytes
    often: bytes
    uses: bytes
    last: bytes
    since: bytes
    parent: bytes
    parent_since: bytes
    children: bytes
    fingerprints: bytes
    seen_uses: bytes
    seen_last: bytes
    ages: bytes
    clock: int
    since_learned: int
    new: int
    returned: int


class AutoPolicy(EvictionPolicy):
    """Evicts the block with the lowest worth, and refuses new blocks with a lower one."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queues = [SlotQueue(capacity) for _ in range(_QUEUES)]
        self._chains = Chains(capacity)
        self._seen = SeenKeys(max(capacity, min(_REMEMBERED_PER_SLOT * capacity, _REMEMBERED_MOST)))
        self._ages = ReuseAges(_QUEUES, capacity)
        self._returns = FirstReturns(capacity)
        self._places = np.zeros(capacity, np.int64)
        """Only used within a choice: slot -> place."""
        self._same_use = capacity // _SAME_USE
        self._learn_after = max(_LEARN_LEAST, capacity // _LEARN_EVERY)
        self._empty()

    def _empty(self) -> None:
        self._uses, self._last = Column(self._capacity, "<u1"), Column(self._capacity, "<i8")
        """The uses of each slot's block, and the clock at the last one; both 0 for an empty slot."""
        self._clock = 1
        self._since_learned = 0
        """How far the clock has advanced since the worths were last estimated."""

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, slot: int) -> bool:
        return any(slot in queue for queue in self._queues)

    def admitted(self, slots: IdArray, keys: Sequence[bytes], parent: int | None = None) -> None:
        if not len(slots):
            return
        self._chains.add(_numbers(slots), parent, self._clock)
        self._store(_numbers(slots), keys, parent)

    def adopted(self, slots: IdArray, keys: Sequence[bytes]) -> None:
        self._chains.add_apart(_numbers(slots), self._clock)
        self._store(_numbers(slots), keys, None)

    def _store(self, numbers: Numbers, keys: Sequence[bytes], parent: int | None) -> None:
        """Add blocks that `_chains` has already added."""
        self._uses.put(numbers, self._count_use(self._seen.take(keys)))
        self._note_use(numbers)
        self._enter(numbers, parent)

    def busy(self, slots: IdArray) -> None:
        for queue in self._queues:
            queue.remove(slots)
        numbers = _numbers(slots)
        self._uses.put(numbers, self._count_use(self._uses_of(numbers)))
        self._note_use(numbers)

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
        self._chains.remove(numbers)
        self._uses.put(numbers, 0)
        self._last.put(numbers, 0)

    def evicted(self, choice: Choice, keys: Sequence[bytes]) -> None:
        self._remember(keys, self._uses_of(_numbers(choice.victims)))
        self.removed(choice.victims)

    def clear(self) -> None:
        for queue in self._queues:
            queue.refill(NO_IDS)
        self._chains.clear()
        self._seen.clear()
        self._ages.clear()
        self._returns.clear()
        self._empty()

    def choose(self, count: int, protected: Collection[int]) -> Choice | None:
        victims = self._candidates(count, protected)[0]
        return Choice(cut(victims, 0, count), NO_IDS) if len(victims) == count else None

    def admits(
        self, keys: Sequence[bytes], runs: Sequence[int], free: int, protected: Collection[int]
    ) -> Sequence[int]:
        lacking = len(keys) - free
        if lacking <= 0:
            return runs
        known = self._seen.find(keys)
        ends = list(accumulate(runs))
        worth = self._ages.worth(self._uses_after(known), np.zeros(len(keys), dtype=np.int64))
        if self._returns.are_rare():
            worth[known.uses < 0] = _NOT_WORTH_A_COPY
        for count, end in zip(runs, ends):
            # A block is hit only with all blocks before it, so it is worth no more than they are.
            worth[end - count : end] = np.minimum.accumulate(worth[end - count : end])
        best_first = np.argsort(-worth, kind="stable")
        evicted_worth = self._candidates(lacking, protected)[1]
        stored_worth = worth[best_first[free : free + len(evicted_worth)]]
        better = int(np.argmin(np.append(stored_worth >= evicted_worth, False)))
        stored = np.zeros(len(keys), dtype=np.int64)
        stored[best_first[: free + better]] = 1
        return [int(stored[end - count : end].sum()) for count, end in zip(runs, ends)]

    def refused(self, keys: Sequence[bytes]) -> None:
        distinct = list(dict.fromkeys(keys))
        uses = self._count_use(self._seen.find(distinct))
        self._remember(distinct, Uses(uses, np.full(len(distinct), self._clock)))
        self._advance(len(distinct))

    def snapshot(self) -> bytes:
        queues = [queue.snapshot() for queue in self._queues]
        columns = [column.snapshot() for column in self._columns()]
        return msgspec.msgpack.encode((*queues, *columns, *self._rest()))

    def freeze(self) -> PolicyCopy:
        queues = [queue.freeze() for queue in self._queues]
        columns = [column.freeze() for column in self._columns()]
        return PolicyCopy((*queues, *columns, *map(Written, self._rest())))

    def restore(self, state: bytes) -> None:
        """As `EvictionPolicy.restore`. Raises `ValueError` for a state that no events lead to and that later
        events would not bear: it may come from anyone."""
        saved = msgspec.msgpack.decode(state, type=AutoState)
        orders = saved.never, saved.once, saved.often
        for queue, order in zip(self._queues, orders):
            queue.restore(order)
        chains = saved.since, saved.parent, saved.parent_since, saved.children
        seen = saved.fingerprints, saved.seen_uses, saved.seen_last
        for column, values in zip(self._columns(), (saved.uses, saved.last, *chains, *seen)):
            column.restore(values)
        self._chains.check()
        self._ages.restore(saved.ages)
        self._returns.restore(saved.new, saved.returned)
        self._clock, self._since_learned = saved.clock, saved.since_learned
        if not 0 < self._clock < _LATEST or not 0 <= self._since_learned < _LATEST:
            raise ValueError(
                f"the snapshot has the clock {self._clock}, with {self._since_learned} uses unlearned"
            )
        for uses, last in ((self._uses, self._last), self._seen.columns()[1:]):
            if uses.values.max(initial=0) >= _QUEUES:
                raise ValueError(f"the snapshot has blocks of more than {_QUEUES - 1} uses")
            if last.values.min(initial=0) < 0 or last.values.max(initial=0) > self._clock:
                raise ValueError("the snapshot has blocks that were used before or after all uses")

    def _columns(self) -> tuple[Column, ...]:
        return (self._uses, self._last, *self._chains.columns(), *self._seen.columns())

    def _rest(self) -> tuple[bytes, int, int, int, int]:
        """Return the parts of the state after the queues and columns."""
        returns = self._returns
        return (self._ages.snapshot(), self._clock, self._since_learned, returns.new, returns.returned)

    def _uses_of(self, slots: Numbers) -> Uses:
        return Uses(self._uses.values[slots].astype(np.int64), self._last.values[slots])

    def _uses_after(self, known: Uses) -> Numbers:
        """Return the number of uses after a use now; a first store counts as none.

        known: the uses so far; -1 if nothing is known of a block.
        """
        more = (known.uses < 0) | (self._clock - known.last >= self._same_use)
        uses: Numbers = np.minimum(known.uses + more, _QUEUES - 1)
        return uses

    def _count_use(self, known: Uses) -> Numbers:
        """Count the ages at which blocks are used now, and return their number of uses after it."""
        ages = self._clock - known.last
        again = (known.uses >= 0) & (ages >= self._same_use)
        self._ages.hit(known.uses[again], ages[again])
        returned = np.count_nonzero(again & (known.uses == 0))
        self._returns.count(int(np.count_nonzero(known.uses < 0)), int(returned))
        return self._uses_after(known)

    def _note_use(self, slots: Numbers) -> None:
        """Set the last use of these slots to now, and advance the clock."""
        self._last.put(slots, self._clock)
        self._advance(len(slots))

    def _advance(self, blocks: int) -> None:
        """Advance the clock by this many blocks, and estimate the worths again if due."""
        self._clock += blocks
        self._since_learned += blocks
        if self._since_learned >= self._learn_after:
            self._since_learned = 0
            step = -(-self._capacity // _SAMPLED)
            sample = np.arange(0, self._capacity, step)
            stored = self._uses_of(sample[self._last.values[sample] > 0])
            seen, seen_step = self._seen.sample(_SAMPLED)
            waiting = self._ages.waiting(stored.uses, self._clock - stored.last, step)
            waiting += self._ages.waiting(seen.uses, self._clock - seen.last, seen_step)
            self._ages.learn(waiting)

    def _remember(self, keys: Sequence[bytes], uses: Uses) -> None:
        forgotten = self._seen.add(keys, *uses)
        self._ages.lose(forgotten.uses, self._clock - forgotten.last)

    def _enter(self, slots: Numbers, parent: int | None) -> None:
        """Insert blocks into their queues: before their parent if the queue has it, else at the tail."""
        uses = self._uses.values[slots]
        for number, queue in enumerate(self._queues):
            some = slots[uses == number]
            if len(some):
                queue.insert(cut(some[::-1], 0, len(some)), parent)

    def _candidates(self, count: int, protected: Collection[int]) -> tuple[Numbers, Floats]:
        """Return up to `count` idle blocks that are not protected, to evict in this order, and their worths.

        The worths ascend. The queues are merged from their heads on; of equal worths, the least recently used
        block comes first. A block comes after its last child.
        """
        looked_at = _LOOKED_AT * count + _LOOKED_AT_LEAST
        heads = [_numbers(queue.first(looked_at, protected)) for queue in self._queues]
        slots = np.concatenate(heads)
        worth = np.concatenate([np.maximum.accumulate(self._worth_of(some)) for some in heads])
        last = np.concatenate([np.maximum.accumulate(self._last.values[some]) for some in heads])
        order = np.lexsort((last, worth))
        ranked = _Ranked(slots[order], worth[order], last[order])
        chosen, worths = self._children_first(min(count, len(slots)), ranked)
        return ranked.slots[chosen], np.array(worths)

    def _children_first(self, count: int, ranked: _Ranked) -> tuple[list[int], list[float]]:
        """Return the places of `count` ranked blocks, each after its children if possible, and their worths.

        They are in the order of their rank, but a block waits until its last child is chosen. If all blocks
        that are left wait for children that are not ranked, the first of them is chosen.
        """
        children = self._chains.children_of(ranked.slots)
        leaves = np.flatnonzero(children == 0)[:count].tolist()
        worth, last = ranked.worth.tolist(), ranked.last.tolist()
        heap = [(worth[place], last[place], place) for place in leaves]  # It is sorted, so it is a heap.
        parents, left = self._parents_among(ranked.slots).tolist(), children.tolist()
        chosen, worths, highest, next_place = list[int](), list[float](), 0.0, 0
        gone = set[int]()
        while len(chosen) < count:
            if heap:
                highest, _, place = heappop(heap)
            else:
                while next_place in gone:
                    next_place += 1
                place, highest = next_place, max(highest, worth[next_place])
            gone.add(place)
            chosen.append(place)
            worths.append(highest)
            parent = parents[place]
            if parent >= 0 and parent not in gone:
                left[parent] -= 1
                if not left[parent]:
                    heappush(heap, (max(highest, worth[parent]), last[parent], parent))
        return chosen, worths

    def _parents_among(self, slots: Numbers) -> Numbers:
        """Return for each of these slots the place of its parent among them; -1 if it is not there."""
        self._places[slots] = np.arange(len(slots))
        parents = self._chains.parents_of(slots)
        places = self._places[parents]
        return np.where((parents >= 0) & (slots[np.minimum(places, len(slots) - 1)] == parents), places, -1)

    def _worth_of(self, slots: Numbers) -> Floats:
        uses, last = self._uses_of(slots)
        return self._ages.worth(uses, self._clock - last)


def _numbers(slots: IdArray) -> Numbers:
    return np.asarray(slots, dtype=np.int64)
