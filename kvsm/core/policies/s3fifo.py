"""S3-FIFO (Yang, Zhang, Qiu, Yue and Vigfusson, SOSP 2023), for batches and for blocks in use.

Two FIFO queues and a count of uses per block, from 0 to 3. A stored block enters `small`, which is meant to
hold a tenth of the pool, or `main` if its key is a ghost. A use only counts; nothing moves. The search for
victims moves:

- in `small`, the head is evicted if it was used at most once, and its key becomes a ghost; used more than
  once, it moves to the tail of `main` and its count starts again at 0 (the paper's threshold, freq > 1);
- in `main`, the head is evicted if its count is 0; else it moves to the tail and its count falls by one.

The search is in `small` while that holds a tenth of the pool or more, else in `main`. There are as many
ghosts as `main` is meant to hold blocks; the oldest are forgotten.

What differs from the paper:

- A block in use keeps its place and its queue, because in a FIFO a use moves nothing. The search may not
  evict it and must not meet it again and again: so it moves like a block with a high count, and so does a
  protected block.
- All victims of a batch are chosen before any of its blocks is stored. How many come from `small` is settled
  once for a choice, as if each victim were followed at once by a new block in `small`.
- A choice does not consider blocks again that it moves from `small` to `main`. If there are no other victims,
  they come from the whole of `small`, the blocks used more than once last, and nothing moves.
- The search passes over `most_passed` blocks of each queue at most. Then it takes the next blocks that it
  may, however often they were used. If all were used, the paper goes through all of `small`, and around
  `main`.
- A block enters before its parent only if the parent was not used. A use does not move the parent: a block
  that enters before a used parent near the head would be evicted soon, while the parent stays.
- Before a victim, all idle blocks that continue it are evicted, from either queue (`BlockTree`). If they
  replace a victim of `main` that has another count of uses, the number of passes may change.
- A ghost leaves when its store is planned (`recalled`). Until the store is done the key is *returning*: a
  store that fails costs nothing, and a key that is offered again still enters `main`.

As in the paper, what is stored before the pool is full enters `small`, which then holds more than its tenth.
libCacheSim puts these blocks into `main` once `small` has its share. They stay there for long, used or not:
on Mooncake's conversation trace that costs 6.3 points at 50,000 slots and 2.5 at 20,000, and gains 0.6 at
5,000. With this one change a model agrees with libCacheSim to the last hit (benchmarks/policy_oracle.py).

`main` may be passed several times in one choice. Pass number n (from 0) takes blocks whose count is n and has
first lowered the counts of all by n. So the highest count among its victims says how often `main` was passed
in full, and `Choice.moved` has only the blocks of the last pass. If `main` is longer than `most_passed`,
there is one pass, whatever the counts of the victims are. If it does not find enough, the choice takes blocks
from the head of `main`, used or not, and nothing moves there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress

import msgspec

from kvsm.core.policies.block_tree import BlockTree
from kvsm.core.policies.eviction_policy import Choice, may_evict
from kvsm.core.policies.ghosts import KeyQueue
from kvsm.core.policies.policy_copies import PolicyCopy
from kvsm.core.policies.slot_queue import SlotQueue, join, split
from kvsm.core.policies.use_counts import UseCountingPolicy, UseCounts
from kvsm.ids import NO_IDS, IdArray, listed, pack, unpack

SMALL_PERCENT = 10
"""Target share of the pool for the small queue."""

MOST_USES = 3
MOST_USES_TO_LEAVE_SMALL = 1

_ONCE = range(MOST_USES_TO_LEAVE_SMALL + 1)
_OFTEN = range(MOST_USES_TO_LEAVE_SMALL + 1, MOST_USES + 1)


class S3FIFOState(msgspec.Struct, array_like=True):
    """The state that `snapshot` saves. uses: counts of the slots in small, then of the slots in main."""

    small: bytes
    main: bytes
    uses: bytes
    ghosts: list[bytes]
    returning: list[bytes]
    tree: bytes


class S3FIFOPolicy(UseCountingPolicy):
    """Evicts blocks soon that are not used twice, and the others in FIFO order with second chances."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small_target = max(1, capacity * SMALL_PERCENT // 100)
        self._ghost_limit = capacity - self._small_target
        self._small = SlotQueue(capacity)
        self._main = SlotQueue(capacity)
        self._uses = UseCounts(capacity, MOST_USES)
        self._ghosts = KeyQueue(self._ghost_limit)
        self._returning = KeyQueue(capacity)
        self._tree = BlockTree(capacity)

    def admitted(self, slots: IdArray, keys: Sequence[bytes], parent: int | None = None) -> None:
        if self._ghosts.holds_any(keys):
            self.recalled(keys)
        self._tree.add(slots, parent)
        if parent is not None and not self._uses.is_unused(parent):
            parent = None
        back, fresh = self._returning.part(slots, keys)
        self._small.insert(fresh[::-1], parent)
        self._main.insert(back[::-1], parent)
        self._uses.admit(slots)

    def adopted(self, slots: IdArray, keys: Sequence[bytes]) -> None:
        self.admitted(slots, keys)
        self._tree.add_apart(slots)

    def removed(self, slots: IdArray) -> None:
        self._small.remove(slots)
        self._main.remove(slots)
        self._uses.forget(slots)
        self._tree.remove(slots)

    def evicted(self, choice: Choice, keys: Sequence[bytes]) -> None:
        victims, moved = choice
        from_small = self._small.which(victims)
        self._ghosts.add(compress(keys, from_small), self._ghost_limit)
        full_passes = min(self._uses.highest(split(victims, from_small)[1]), self._full_passes())
        self.removed(victims)
        if full_passes:
            stay = self._main.order()
            for _ in range(full_passes):
                self._uses.lower(stay)
        if len(moved):
            promoted, again = split(moved, self._small.which(moved))
            self._uses.mark_unused(promoted)
            self._uses.lower(again)
            self._small.remove(promoted)
            self._main.append(moved)

    def clear(self) -> None:
        self._small.refill(NO_IDS)
        self._main.refill(NO_IDS)
        self._uses.clear()
        self._ghosts.clear()
        self._returning.clear()
        self._tree.clear()

    def choose(self, count: int, protected: Collection[int]) -> Choice | None:
        if not self._uses.has(count, protected):
            return None
        found, moved = self._search(count, protected)
        victims = self._tree.children_first(found, may_evict(self, protected))
        gone = set(listed(victims))
        return Choice(victims, unpack(pack([slot for slot in listed(moved) if slot not in gone])))

    def _search(self, count: int, protected: Collection[int]) -> Choice:
        """Choose victims, ignoring which block continues which."""
        uses = self._uses
        share_of_main = min(count, max(0, self._small_target - len(self._small)))
        small, promoted = uses.search(self._small, count - share_of_main, _ONCE, protected, self.most_passed)
        main, again = self._search_main(count - len(small), protected)
        if len(small) + len(main) == count:
            return Choice(join(small, main), join(again, promoted))
        missing = count - len(main)
        small, _ = uses.search(self._small, missing, _ONCE, protected, len(self._small))
        often, _ = uses.search(self._small, missing - len(small), _OFTEN, protected, len(self._small))
        return Choice(join(join(small, often), main), NO_IDS)

    def recall(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        return tuple(compress(keys, self._ghosts.holding(keys))) if self._ghosts.holds_any(keys) else ()

    def recalled(self, keys: Sequence[bytes]) -> None:
        ghosts = self.recall(keys)
        for key in dict.fromkeys(ghosts):
            self._ghosts.remove(key)
        self._returning.add(ghosts, self._capacity)

    def snapshot(self) -> bytes:
        uses = self._uses.snapshot(self._small, self._main)
        state = S3FIFOState(
            self._small.snapshot(),
            self._main.snapshot(),
            uses,
            list(self._ghosts),
            list(self._returning),
            self._tree.column.snapshot(),
        )
        return msgspec.msgpack.encode(state)

    def freeze(self) -> PolicyCopy:
        queues = self._small.freeze(), self._main.freeze()
        keys = self._ghosts.freeze(), self._returning.freeze()
        return PolicyCopy((*queues, self._uses.freeze(*queues), *keys, self._tree.column.freeze()))

    def restore(self, state: bytes) -> None:
        saved = msgspec.msgpack.decode(state, type=S3FIFOState)
        self._small.restore(saved.small)
        self._main.restore(saved.main)
        self._uses.restore(saved.uses, self._small, self._main)
        self._ghosts.add(saved.ghosts, self._ghost_limit)
        self._returning.add(saved.returning, self._capacity)
        self._tree.restore(saved.tree)

    def _search_main(self, count: int, protected: Collection[int]) -> tuple[IdArray, IdArray]:
        """Return up to `count` victims from main, in as many passes as needed, and the blocks that the last
        pass moves."""
        victims: IdArray = NO_IDS
        moved: IdArray = NO_IDS
        full_passes = self._full_passes()
        for uses in range(full_passes + 1):
            if len(victims) == count:
                break
            found, moved = self._uses.search(
                self._main, count - len(victims), range(uses, uses + 1), protected, self.most_passed
            )
            victims = join(victims, found)
        if len(victims) < count and not full_passes:
            return self._uses.search(self._main, count, range(1), protected, most_passed=0)
        return victims, moved

    def _full_passes(self) -> int:
        """Return the number of full passes over main that a choice may make."""
        return MOST_USES if len(self._main) <= self.most_passed else 0
