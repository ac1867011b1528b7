"""`BlockTree`: the stored blocks, with the blocks that continue each of them.

A request that hits a block also hits all blocks before it. So a block must not be evicted before a block that
continues it (its *child*): the child would stay, and no request could hit it. A policy with one queue in
prompt order keeps this rule by itself. A policy whose queues may separate a block from its children calls
`children_first` for each choice.

Adding and removing a block, and finding a child, take constant time. The children of a block are a linked
list in three arrays. Its order depends on past calls, so no decision may depend on this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from kvsm.core.policies.policy_copies import Column
from kvsm.ids import IdArray, listed, pack, unpack

_ABSENT, _ROOT, _PARENT = 0, 1, 2
"""Entries of `column`: the block is not stored; it has no stored parent; `_PARENT` plus the slot of its
parent."""


class BlockTree:
    """The parent and the children of each block in a pool of `capacity` slots. Takes 16 bytes a slot."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.clear()

    def __getstate__(self) -> tuple[int, bytes]:
        return self._capacity, self.column.snapshot()

    def __setstate__(self, state: tuple[int, bytes]) -> None:
        self._capacity, column = state
        self.clear()
        self.restore(column)

    def clear(self) -> None:
        """Forget all blocks. Takes new memory instead of clearing the old."""
        self.column = Column(self._capacity, "<u4")
        """The whole state. The other arrays are derived from it."""
        self._empty_lists()

    def _empty_lists(self) -> None:
        # Each value is a slot plus one; 0: none.
        self._first_child, self._next, self._previous = (np.zeros(self._capacity, "<u4") for _ in range(3))
        self._child_at, self._next_at = self._first_child.data, self._next.data
        self._previous_at, self._entry_at = self._previous.data, self.column.values.data

    def add(self, slots: IdArray, parent: int | None) -> None:
        """Add consecutive new blocks of a prompt.

        parent: the slot of the block before slots[0]; ignored if it is None or not stored.
        """
        self.remove(slots)
        if not len(slots):
            return
        own = listed(slots)
        is_known = parent is not None and self._entry_at[parent]
        first = parent + _PARENT if is_known and parent is not None else _ROOT
        self.column.put(_numbers(slots), [first, *[slot + _PARENT for slot in own[:-1]]])
        children = self._child_at
        for slot, child in pairwise(own):
            children[slot] = child + 1
        if first != _ROOT:
            self._link(own[0], first - _PARENT)

    def add_apart(self, slots: IdArray) -> None:
        """Add new blocks whose parents are unknown."""
        self.remove(slots)
        self.column.put(_numbers(slots), _ROOT)

    def remove(self, slots: IdArray) -> None:
        """Forget blocks. Their children have no parent from now on."""
        entries = self._entry_at
        some = [slot for slot in listed(slots) if entries[slot]]
        if not some:
            return
        gone = np.array(some, dtype=np.int64)
        parents = self.column.values[gone].astype(np.int64) - _PARENT
        self.column.put(gone, _ABSENT)
        for slot, parent in zip(some, parents.tolist()):
            if parent >= 0 and entries[parent]:
                self._unlink(slot, parent)
        children, after = self._child_at, self._next_at
        for slot in some:
            child = children[slot]
            if child and (entries[child - 1] or after[child - 1]):
                self._part(slot)
        for links in (self._first_child, self._next, self._previous):
            links[gone] = 0

    def children_first(self, victims: IdArray, may_go: Callable[[int], bool]) -> IdArray:
        """Return as many slots as `victims`: each victim after all of its descendants that may be evicted.

        victims: the slots to evict, in this order. Descendants of the first ones take the turns of the last
            ones, which then stay.
        may_go: whether a block may be evicted. If not, its descendants are not searched.
        """
        chosen, gone = list[int](), set[int]()
        wanted, children, after = listed(victims), self._child_at, self._next_at
        for victim in wanted:
            if len(chosen) == len(wanted):
                break
            child = children[victim]
            if victim not in gone and (not child or (child - 1 in gone and not after[child - 1])):
                gone.add(victim)
                chosen.append(victim)
            elif victim not in gone:
                behind = self._children_and(victim, gone, may_go)
                chosen += islice(behind, len(wanted) - len(chosen))
        return unpack(pack(chosen))

    def restore(self, state: bytes) -> None:
        """Restore `column`. Raises `ValueError` if a parent is not stored, or a block is its own ancestor."""
        self.column.restore(state)
        self._empty_lists()
        entries = self.column.values.astype(np.int64)
        children = np.flatnonzero(entries >= _PARENT)
        parents = entries[children] - _PARENT
        if parents.max(initial=0) >= self._capacity or not entries[parents].all():
            raise ValueError("the snapshot has blocks whose parent is not stored")
        _refuse_rings(children, parents, self._capacity)
        by_parent = np.argsort(parents, kind="stable")
        children, parents = children[by_parent], parents[by_parent]
        is_first = np.append(True, parents[1:] != parents[:-1])[: len(parents)]
        self._first_child[parents[is_first]] = children[is_first] + 1
        later = np.flatnonzero(~is_first)
        self._previous[children[later]] = children[later - 1] + 1
        self._next[children[later - 1]] = children[later] + 1

    def _children_and(self, victim: int, gone: set[int], may_go: Callable[[int], bool]) -> Iterator[int]:
        """Yield the descendants of a victim that may be evicted, children before parents, then the victim.

        gone: blocks that were yielded before. They are skipped; each yielded block is added.
        """
        line, children, after = [victim], self._child_at, self._next_at
        while line:
            slot = line[-1]
            child = children[slot]
            if child and not after[child - 1]:  # an only child: the quick way through a long prompt
                if child - 1 not in gone and may_go(child - 1):
                    line.append(child - 1)
                    continue
            elif left := [one for one in self._children(slot) if one not in gone and may_go(one)]:
                line += sorted(left, reverse=True)
                continue
            gone.add(line.pop())
            yield slot

    def _children(self, slot: int) -> Iterator[int]:
        child = self._child_at[slot]
        while child:
            yield child - 1
            child = self._next_at[child - 1]

    def _link(self, slot: int, parent: int) -> None:
        """Insert a block into the list of its parent."""
        after = self._child_at[parent]
        self._next_at[slot] = after
        if after:
            self._previous_at[after - 1] = slot + 1
        self._child_at[parent] = slot + 1

    def _unlink(self, slot: int, parent: int) -> None:
        """Take a child out of the list of its parent."""
        before, after = self._previous_at[slot], self._next_at[slot]
        if before:
            self._next_at[before - 1] = after
        else:
            self._child_at[parent] = after
        if after:
            self._previous_at[after - 1] = before

    def _part(self, slot: int) -> None:
        """Turn the stored children of a removed block into roots."""
        stored = [child for child in self._children(slot) if self._entry_at[child]]
        for child in stored:
            self._next_at[child] = self._previous_at[child] = 0
        self.column.put(np.array(stored, dtype=np.int64), _ROOT)


def _numbers(slots: IdArray) -> NDArray[np.int64]:
    return np.asarray(slots, dtype=np.int64)


def _refuse_rings(children: NDArray[np.int64], parents: NDArray[np.int64], capacity: int) -> None:
    """Raise `ValueError` if a block is its own ancestor."""
    ancestor = np.arange(capacity + 1)
    ancestor[:] = capacity
    ancestor[children] = parents
    for _ in range(capacity.bit_length() + 1):
        if (ancestor == capacity).all():
            return
        ancestor = ancestor[ancestor]  # twice as far up
    raise ValueError("the snapshot has blocks that are their own ancestors")
