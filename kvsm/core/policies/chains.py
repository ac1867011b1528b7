"""`Chains`: which stored block continues which in a prompt.

A request that hits a block also hits all blocks before it. So a block whose parent is not stored cannot be
hit, and a parent is worth at least as much as each of its children. *Leaves* are stored blocks without stored
children. A policy that evicts only leaves keeps every stored block reachable.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvsm.core.policies.policy_copies import Column

Numbers = NDArray[np.int64]


class Chains:
    """The parent and the number of children of each block that is stored in a pool of `capacity` slots.

    A link to a parent has the parent's slot, and the time at which the parent was stored. When that slot gets
    another block, the link is void, so removing a block needs no search for its children. Each slot takes 24
    bytes.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        self._since = Column(self._capacity, "<i8")
        """When the block of each slot was stored; 0 for an empty slot."""
        self._parent, self._parent_since = Column(self._capacity, "<u4"), Column(self._capacity, "<i8")
        """The slot of each block's parent, and when the parent was stored; 0 if there is none."""
        self._children = Column(self._capacity, "<i4")

    def add(self, slots: Numbers, parent: int | None, now: int) -> None:
        """Add consecutive blocks of a prompt.

        parent: the slot of the block before slots[0]; None: there is none.
        now: the time; above 0, and another one in each call.
        """
        self._since.put(slots, now)
        self._parent_since.put(slots, now)
        self._parent.put(slots[1:], slots[:-1])
        self._children.put(slots[:-1], 1)
        self._children.put(slots[-1:], 0)
        before = 0 if parent is None else int(self._since.values[parent])
        self._parent_since.put(slots[:1], before)
        if parent is not None and before:
            self._parent.put(slots[:1], parent)
            self._children.add(np.array([parent]), 1)

    def add_apart(self, slots: Numbers, now: int) -> None:
        """Add blocks whose parents are unknown. now: as in `add`."""
        self._since.put(slots, now)
        for column in (self._parent_since, self._children):
            column.put(slots, 0)

    def remove(self, slots: Numbers) -> None:
        """Forget blocks that are no longer stored. Their children have no parent from now on."""
        parents = self.parents_of(slots)
        self._children.add(parents[parents >= 0], -1)
        for column in (self._since, self._parent_since, self._children):
            column.put(slots, 0)

    def parents_of(self, slots: Numbers) -> Numbers:
        """Return the slot of each block's parent; -1 if it has none that is stored."""
        parents, since = self._parent.values[slots].astype(np.int64), self._parent_since.values[slots]
        return np.where((since > 0) & (since == self._since.values[parents]), parents, -1)

    def children_of(self, slots: Numbers) -> Numbers:
        """Return how many children of each block are stored."""
        return self._children.values[slots].astype(np.int64)

    def columns(self) -> tuple[Column, ...]:
        """All columns, for a copy of the state."""
        return (self._since, self._parent, self._parent_since, self._children)

    def check(self) -> None:
        """Raise `ValueError` if restored columns name a slot that the pool does not have."""
        if self._parent.values.max(initial=0) >= self._capacity:
            raise ValueError(f"the snapshot has parents outside of the {self._capacity} slots")
