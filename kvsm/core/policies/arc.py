"""Adaptive replacement cache (Megiddo and Modha, FAST 2003), for batches and for blocks in use.

`T1` orders the blocks that were not used since they were stored, `T2` those that were; both are LRU. `B1` and
`B2` remember the keys of blocks evicted from T1 and T2, the ghosts. When a ghost is stored again, the queue
that evicted it was too short, and the target size of T1, `p`, changes.

The same as in the paper, with c the capacity:

- a use moves a block to the tail of T2; a stored block enters T1, or T2 if its key is a ghost;
- a victim comes from T1 if |T1| > p, else from T2; from the other queue if that one is empty;
- p rises by max(1, |B2| / |B1|) at a ghost of B1, falls by max(1, |B1| / |B2|) at one of B2, in 0..c;
- |T1| + |B1| <= c, and all four together hold at most 2c; the oldest ghosts are forgotten.

What differs:

- A block in use is in no queue and returns to T2. It may not be evicted, and |T1| does not count it.
- All victims of a batch are chosen before any of its blocks is stored. The choice is made as if each victim
  were followed at once by a new block in T1, so that p is held within a batch too.
- p adapts when the store is planned (`recalled`), not when it is done. Until then the key is *returning*: a
  store that fails costs nothing, and a key that is offered again still enters T2.
- The steps of p are whole numbers, rounded down. The tie (|T1| = p at a ghost of B2) always takes from T2.
- The bound of 2c is kept as |B1| + |B2| <= c, which is the same when the pool is full.
- Before a victim, all idle blocks that continue it are evicted, from either queue (`BlockTree`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress
from operator import or_

import msgspec

from kvsm.core.policies.block_tree import BlockTree
from kvsm.core.policies.eviction_policy import Choice, EvictionPolicy, may_evict
from kvsm.core.policies.ghosts import KeyQueue
from kvsm.core.policies.policy_copies import PolicyCopy, Written
from kvsm.core.policies.slot_queue import SlotQueue, join
from kvsm.ids import NO_IDS, IdArray


class ARCState(msgspec.Struct, array_like=True):
    """The state that `snapshot` saves."""

    target: int
    t1: bytes
    t2: bytes
    b1: list[bytes]
    b2: list[bytes]
    returning: list[bytes]
    tree: bytes


class ARCPolicy(EvictionPolicy):
    """Balances recency (T1) and frequency (T2) by what its past evictions cost."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0
        self._t1 = SlotQueue(capacity)
        self._t2 = SlotQueue(capacity)
        self._b1 = KeyQueue(capacity)
        self._b2 = KeyQueue(capacity)
        self._returning = KeyQueue(capacity)
        self._tree = BlockTree(capacity)

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def __contains__(self, slot: int) -> bool:
        return slot in self._t1 or slot in self._t2

    def admitted(self, slots: IdArray, keys: Sequence[bytes], parent: int | None = None) -> None:
        if self._b1.holds_any(keys) or self._b2.holds_any(keys):
            self.recalled(keys)
        self._tree.add(slots, parent)
        back, fresh = self._returning.part(slots, keys)
        self._t1.insert(fresh[::-1], parent)
        self._t2.insert(back[::-1], parent)
        self._b1.trim(self._capacity - len(self._t1))

    def adopted(self, slots: IdArray, keys: Sequence[bytes]) -> None:
        self.admitted(slots, keys)
        self._tree.add_apart(slots)

    def busy(self, slots: IdArray) -> None:
        self._t1.remove(slots)
        self._t2.remove(slots)

    def idle(self, slots: IdArray) -> None:
        self._t2.append(slots[::-1])

    def touched(self, slots: IdArray, parent: int | None = None) -> None:
        self._t1.remove(slots)
        self._t2.insert(slots[::-1], parent)

    def removed(self, slots: IdArray) -> None:
        self.busy(slots)
        self._tree.remove(slots)

    def evicted(self, choice: Choice, keys: Sequence[bytes]) -> None:
        from_t1 = self._t1.which(choice.victims)
        from_t2 = [not is_from_t1 for is_from_t1 in from_t1]
        self.removed(choice.victims)
        self._b1.add(compress(keys, from_t1), self._capacity - len(self._t1))
        self._b2.add(compress(keys, from_t2), self._capacity - len(self._b1))

    def clear(self) -> None:
        self._target = 0
        for queue in (self._t1, self._t2):
            queue.refill(NO_IDS)
        for ghosts in (self._b1, self._b2, self._returning):
            ghosts.clear()
        self._tree.clear()

    def choose(self, count: int, protected: Collection[int]) -> Choice | None:
        share_of_t2 = min(count, max(0, self._target + 1 - len(self._t1)))
        t1 = self._t1.first(count - share_of_t2, protected)
        t2 = self._t2.first(count - len(t1), protected)
        if len(t1) + len(t2) < count:
            t1 = self._t1.first(count - len(t2), protected)
        if len(t1) + len(t2) < count:
            return None
        may_go = may_evict(self, protected)
        return Choice(self._tree.children_first(join(t1, t2), may_go), NO_IDS)

    def recall(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        if not (self._b1.holds_any(keys) or self._b2.holds_any(keys)):
            return ()
        either = map(or_, self._b1.holding(keys), self._b2.holding(keys))
        return tuple(compress(keys, either))

    def recalled(self, keys: Sequence[bytes]) -> None:
        b1, b2 = self._b1, self._b2
        returning = []
        for key in keys:
            if key in b1:
                self._target = min(self._capacity, self._target + max(1, len(b2) // len(b1)))
                b1.remove(key)
            elif key in b2:
                self._target = max(0, self._target - max(1, len(b1) // len(b2)))
                b2.remove(key)
            else:
                continue
            returning.append(key)
        self._returning.add(returning, self._capacity)

    def snapshot(self) -> bytes:
        state = ARCState(
            self._target,
            self._t1.snapshot(),
            self._t2.snapshot(),
            list(self._b1),
            list(self._b2),
            list(self._returning),
            self._tree.column.snapshot(),
        )
        return msgspec.msgpack.encode(state)

    def freeze(self) -> PolicyCopy:
        slots = self._t1.freeze(), self._t2.freeze()
        keys = self._b1.freeze(), self._b2.freeze(), self._returning.freeze()
        return PolicyCopy((Written(self._target), *slots, *keys, self._tree.column.freeze()))

    def restore(self, state: bytes) -> None:
        saved = msgspec.msgpack.decode(state, type=ARCState)
        self._target = saved.target
        self._t1.restore(saved.t1)
        self._t2.restore(saved.t2)
        self._b1.add(saved.b1, self._capacity)
        self._b2.add(saved.b2, self._capacity)
        self._returning.add(saved.returning, self._capacity)
        self._tree.restore(saved.tree)
