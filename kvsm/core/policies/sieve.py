"""SIEVE (Zhang, Yang, Yue, Vigfusson and Rashmi, NSDI 2024), for batches and for blocks in use.

One FIFO queue, a bit for each block that says whether it was used, and a hand. A stored block enters at the
newest end, unused. A use sets the bit; nothing moves. The search for a victim starts at the hand and goes
towards the newest block: a used block loses its bit and stays where it is; the first unused one is evicted,
and the hand stops behind it. After the newest block the hand continues at the oldest.

Here the queue is cut at the hand: `behind` it are the blocks that it has passed, `ahead` of it the others,
each part oldest first. To pass a block is to move it from the head of `ahead` to the tail of `behind`. When
`ahead` is used up, a lap is over: all blocks are ahead again. So the hand needs no pointer that a removed
block could leave dangling, and `Choice.moved` says how far it went.

What differs from the paper:

- A block in use keeps its place. The hand passes over it, and over protected blocks.
- A batch is chosen by the same hand, one victim after the other, before any of its blocks is stored.
- In one lap of a choice the hand passes over `most_passed` blocks at most. Then it stops, and the choice
  takes the next blocks that it may, used or not. If all were used, the paper goes once around the pool.

One choice may make up to two further laps. Full laps are not listed in the event: lap 0 takes unused blocks
ahead, lap 1 unused blocks behind and used blocks ahead, lap 2 used blocks behind. So the last victim
determines the number of laps, and `moved` has only the blocks that the last lap passed over.

A lap over more blocks than `most_passed` is the last one: lap 0 if there are more blocks ahead, lap 1 if
there are more in all. If it does not find enough, the choice takes blocks from the hand on, used or not, and
`moved` is empty. So the lengths of the queues limit the number of laps that the last victim can stand for.
"""

# ruff: noqa: ARG002 (the protocol names arguments that this policy does not need)

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from kvsm.core.policies.eviction_policy import Choice
from kvsm.core.policies.policy_copies import PolicyCopy
from kvsm.core.policies.slot_queue import SlotQueue, join
from kvsm.core.policies.use_counts import UseCountingPolicy, UseCounts
from kvsm.ids import NO_IDS, IdArray

_UNUSED, _USED = range(1), range(1, 2)

_Lap = Sequence[tuple[SlotQueue, range]]
"""The queues of a lap, each with the use counts of its victims."""


class SIEVEPolicy(UseCountingPolicy):
    """Evicts the first block, from the hand on, that was not used since the hand last passed it."""

    def __init__(self, capacity: int) -> None:
        self._behind = SlotQueue(capacity)
        self._ahead = SlotQueue(capacity)
        self._uses = UseCounts(capacity, most=1)

    def admitted(self, slots: IdArray, keys: Sequence[bytes], parent: int | None = None) -> None:
        is_passed = parent is not None and parent in self._behind
        (self._behind if is_passed else self._ahead).insert(slots[::-1], parent)
        self._uses.admit(slots)

    def removed(self, slots: IdArray) -> None:
        self._drop(slots)
        self._end_lap()

    def evicted(self, choice: Choice, keys: Sequence[bytes]) -> None:
        victims, moved = choice
        laps = min(self._lap_of(int(victims[-1])), self._full_laps()) if len(victims) else 0
        self._drop(victims)
        for _ in range(laps):
            self._pass_over(self._ahead.order())
            self._end_lap()
        self._pass_over(moved)
        self._end_lap()

    def clear(self) -> None:
        self._behind.refill(NO_IDS)
        self._ahead.refill(NO_IDS)
        self._uses.clear()

    def choose(self, count: int, protected: Collection[int]) -> Choice | None:
        if not self._uses.has(count, protected):
            return None
        ahead, behind = self._ahead, self._behind
        laps: tuple[_Lap, ...]
        laps = ((ahead, _UNUSED),), ((behind, _UNUSED), (ahead, _USED)), ((behind, _USED),)
        victims: IdArray = NO_IDS
        for lap in laps[: self._full_laps() + 1]:
            found, moved = self._search(lap, count - len(victims), protected, self.most_passed)
            victims = join(victims, found)
            if len(victims) == count:
                return Choice(victims, moved)
        return Choice(*self._search(((ahead, _UNUSED), (behind, _UNUSED)), count, protected, most_passed=0))

    def snapshot(self) -> bytes:
        uses = self._uses.snapshot(self._behind, self._ahead)
        return msgspec.msgpack.encode((self._behind.snapshot(), self._ahead.snapshot(), uses))

    def freeze(self) -> PolicyCopy:
        queues = self._behind.freeze(), self._ahead.freeze()
        return PolicyCopy((*queues, self._uses.freeze(*queues)))

    def restore(self, state: bytes) -> None:
        behind, ahead, uses = msgspec.msgpack.decode(state, type=tuple[bytes, bytes, bytes])
        self._behind.restore(behind)
        self._ahead.restore(ahead)
        self._uses.restore(uses, self._behind, self._ahead)

    def _drop(self, slots: IdArray) -> None:
        self._behind.remove(slots)
        self._ahead.remove(slots)
        self._uses.forget(slots)

    def _search(
        self, lap: _Lap, count: int, protected: Collection[int], most_passed: int
    ) -> tuple[IdArray, IdArray]:
        """Return up to `count` victims of one lap, and the blocks that it passes over."""
        victims: IdArray = NO_IDS
        moved: IdArray = NO_IDS
        for queue, uses in lap:
            missing, may_pass = count - len(victims), most_passed - len(moved)
            found, passed = self._uses.search(queue, missing, uses, protected, may_pass)
            victims, moved = join(victims, found), join(moved, passed)
        return victims, moved

    def _full_laps(self) -> int:
        """Return the number of full laps that a choice may make."""
        if len(self._ahead) > self.most_passed:
            return 0
        return 1 if len(self._ahead) + len(self._behind) > self.most_passed else 2

    def _lap_of(self, victim: int) -> int:
        """Return the number of times that the hand had passed the newest block when it took this victim."""
        return (victim in self._behind) + self._uses.highest((victim,))

    def _pass_over(self, slots: IdArray) -> None:
        """Let the hand pass these blocks, which are the first ones ahead."""
        self._uses.mark_unused(slots)
        self._ahead.remove(slots)
        self._behind.append(slots)

    def _end_lap(self) -> None:
        """If the hand has passed the newest block, let it continue at the oldest, before a newer one is
        stored."""
        if not len(self._ahead):
            self._ahead, self._behind = self._behind, self._ahead
