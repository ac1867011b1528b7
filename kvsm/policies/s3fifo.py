"""S3-FIFO (Yang, Zhang, Qiu, Yue and Vigfusson, SOSP 2023), for batches and for blocks in use.

Two FIFO queues and a count of uses per block, from 0 to 3. A stored block enters `small`, which is meant
to hold a tenth of the pool, or `main` if its key is a ghost. A use only counts; nothing moves. The search
for victims moves:

- in `small`, the head goes if it was used at most once, and its key becomes a ghost; used more than once,
  it moves to the tail of `main` and its count starts again at 0 (the paper's threshold, freq > 1);
- in `main`, the head goes if its count is 0; else it moves to the tail and its count falls by one.

The search is in `small` while that holds a tenth of the pool or more, else in `main`. There are as many
ghosts as `main` is meant to hold blocks; the oldest are forgotten.

What differs from the paper:

- A block in use keeps its place and its queue, since in a FIFO a use moves nothing. The search may not
  take it and must not meet it again and again: it moves on like one whose count asks for it, and so does
  a protected block. `Choice.moved` may therefore name blocks in use.
- All victims of a batch are chosen before any of its blocks is stored. How many come from `small` is
  settled once for a choice, as if each victim were followed at once by a new block in `small`.
- What one choice moves from `small` to `main` it does not weigh again; only if everything else is used
  up do victims come from the whole of `small`, those used more than once last, and nothing moves there.
- A ghost leaves when its store is planned (`recalled`). Until that is done the key is *returning*: a
  store that fails costs nothing, and asked for again it still enters `main`.

`main` may be passed several times in one choice. Pass number n (from 0) takes blocks whose count is n and
has first lowered the counts of all by n; so the highest count among its victims says how often `main` was
passed in full, and `evicted` needs to be told only what the last pass moved.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.ids import NO_IDS, SMALL, IdArray
from kvsm.policies.base import Choice
from kvsm.policies.ghosts import KeyQueue
from kvsm.policies.slot_queue import SlotQueue, join, split

SMALL_PERCENT = 10
"""Share of the pool that the small queue is meant to hold."""

MOST_USES = 3
MOST_USES_TO_LEAVE_SMALL = 1

# One byte per slot: its count of uses; the same plus _IN_USE while it is in use; or _ABSENT.
_IN_USE = 128
_ABSENT = 255


def _table(*steps: tuple[int, int]) -> bytes:
    """A step for every byte, as `bytes.translate` takes it; bytes that no step names stay."""
    table = bytearray(range(256))
    for before, after in steps:
        table[before] = after
    return bytes(table)


_COUNTS = range(MOST_USES + 1)
_TO_BUSY = _table(*((n, _IN_USE + n) for n in _COUNTS))
_TO_IDLE = _table(*((flag + n, min(n + 1, MOST_USES)) for n in _COUNTS for flag in (0, _IN_USE)))
_TO_ONE_LESS = _table(*((flag + n, flag + max(n - 1, 0)) for n in _COUNTS for flag in (0, _IN_USE)))
_TO_ZERO = _table(*((flag + n, flag) for n in _COUNTS for flag in (0, _IN_USE)))
_TO_NEW = bytes(256)
_TO_ABSENT = bytes([_ABSENT]) * 256
_ARRAYS = {
    table: np.frombuffer(table, dtype=np.uint8)
    for table in (_TO_BUSY, _TO_IDLE, _TO_ONE_LESS, _TO_ZERO, _TO_NEW, _TO_ABSENT)
}


class _State(msgspec.Struct, array_like=True):
    """What `snapshot` saves; `uses` of the slots in small, then of those in main."""

    small: bytes
    main: bytes
    uses: bytes
    ghosts: list[bytes]
    returning: list[bytes]


class S3FIFOPolicy:
    """Lets go quickly of what is not used twice, and in turn of the rest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small_target = max(1, capacity * SMALL_PERCENT // 100)
        self._ghost_limit = capacity - self._small_target
        self._small = SlotQueue(capacity)
        self._main = SlotQueue(capacity)
        self._uses = bytearray([_ABSENT]) * capacity
        self._uses_view: NDArray[np.uint8] = np.frombuffer(self._uses, dtype=np.uint8)
        self._idle = 0
        self._ghosts = KeyQueue()
        self._returning = KeyQueue()

    def __len__(self) -> int:
        return self._idle

    def __contains__(self, slot: int) -> bool:
        return self._uses[slot] <= MOST_USES

    def admitted(self, slots: IdArray, keys: Sequence[bytes]) -> None:
        if self._ghosts.holds_any(keys):
            self.recalled(keys)
        back, fresh = self._returning.part(slots, keys)
        self._small.append(fresh[::-1])
        self._main.append(back[::-1])
        self._step(slots, _TO_NEW)

    def busy(self, slots: IdArray) -> None:
        self._step(slots, _TO_BUSY)

    def idle(self, slots: IdArray) -> None:
        self._step(slots, _TO_IDLE)

    def touched(self, slots: IdArray) -> None:
        self._step(slots, _TO_IDLE)

    def removed(self, slots: IdArray) -> None:
        self._small.remove(slots)
        self._main.remove(slots)
        self._step(slots, _TO_ABSENT)

    def evicted(self, choice: Choice, keys: Sequence[bytes]) -> None:
        victims, moved = choice
        from_small = self._small.which(victims)
        self._ghosts.add(compress(keys, from_small), self._ghost_limit)
        full_passes = self._most_uses(split(victims, from_small)[1])
        self.removed(victims)
        if full_passes:
            stay = self._main.order()
            for _ in range(full_passes):
                self._step(stay, _TO_ONE_LESS)
        if len(moved):
            promoted, again = split(moved, self._small.which(moved))
            self._step(promoted, _TO_ZERO)
            self._step(again, _TO_ONE_LESS)
            self._small.remove(promoted)
            self._main.append(moved)

    def choose(self, count: int, protected: Collection[int]) -> Choice | None:
        if not self._has(count, protected):
            return None
        share_of_main = min(count, max(0, self._small_target - len(self._small)))
        small, promoted = self._search(
            self._small, count - share_of_main, 0, MOST_USES_TO_LEAVE_SMALL, protected
        )
        main, again = self._search_main(count - len(small), protected)
        if len(small) + len(main) == count:
            return Choice(join(small, main), join(again, promoted))
        missing = count - len(main)
        small, _ = self._search(self._small, missing, 0, MOST_USES_TO_LEAVE_SMALL, protected)
        used, _ = self._search(
            self._small, missing - len(small), MOST_USES_TO_LEAVE_SMALL + 1, MOST_USES, protected
        )
        return Choice(join(join(small, used), main), NO_IDS)

    def recall(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        return tuple(key for key in keys if key in self._ghosts) if self._ghosts.holds_any(keys) else ()

    def recalled(self, keys: Sequence[bytes]) -> None:
        ghosts = self.recall(keys)
        for key in ghosts:
            self._ghosts.pop(key, None)
        self._returning.add(ghosts, self._capacity)

    def snapshot(self) -> bytes:
        uses = self._uses_view[np.concatenate((self._small.order(), self._main.order()))].tobytes()
        state = _State(
            self._small.snapshot(), self._main.snapshot(), uses, list(self._ghosts), list(self._returning)
        )
        return msgspec.msgpack.encode(state)

    def restore(self, state: bytes) -> None:
        saved = msgspec.msgpack.decode(state, type=_State)
        self._small.restore(saved.small)
        self._main.restore(saved.main)
        uses = np.frombuffer(saved.uses, dtype=np.uint8)
        self._uses_view[np.concatenate((self._small.order(), self._main.order()))] = uses
        self._idle = int(np.count_nonzero(uses <= MOST_USES))
        self._ghosts.add(saved.ghosts, self._ghost_limit)
        self._returning.add(saved.returning, self._capacity)

    def _step(self, slots: IdArray, table: bytes) -> None:
        """Step the bytes of `slots` by a table, and keep count of the idle blocks."""
        if type(slots) is tuple:
            uses = self._uses
            for slot in slots:
                before = uses[slot]
                after = uses[slot] = table[before]
                self._idle += (after <= MOST_USES) - (before <= MOST_USES)
        else:
            before_all = self._uses_view[slots]
            after_all = _ARRAYS[table][before_all]
            self._uses_view[slots] = after_all
            self._idle += int(np.count_nonzero(after_all <= MOST_USES))
            self._idle -= int(np.count_nonzero(before_all <= MOST_USES))

    def _most_uses(self, slots: IdArray) -> int:
        if type(slots) is tuple:
            return max((self._uses[slot] for slot in slots), default=0)
        return int(self._uses_view[slots].max(initial=0))

    def _has(self, count: int, protected: Collection[int]) -> bool:
        """Whether there are `count` idle blocks that are not protected."""
        if self._idle - len(protected) >= count:
            return True
        return self._idle - len({slot for slot in protected if slot in self}) >= count

    def _search_main(self, count: int, protected: Collection[int]) -> tuple[IdArray, IdArray]:
        """Up to `count` victims from main, in as many passes as it takes, and what the last one moves."""
        victims: IdArray = NO_IDS
        moved: IdArray = NO_IDS
        for number in _COUNTS:
            if len(victims) == count:
                break
            more, moved = self._search(self._main, count - len(victims), number, number, protected)
            victims = join(victims, more)
        return victims, moved

    def _search(
        self, queue: SlotQueue, count: int, least: int, most: int, protected: Collection[int]
    ) -> tuple[IdArray, IdArray]:
        """Up to `count` blocks that may go, their count of uses from `least` to `most`; and those that
        were passed on the way and stay. Blocks used less than `least` are victims of an earlier pass.
        """
        if count > SMALL:
            return self._search_arrays(queue, count, least, most, protected)
        victims: list[int] = []
        passed: list[int] = []
        if count:
            all_uses = self._uses
            for slot in queue:
                uses = all_uses[slot]
                if uses > most or slot in protected:
                    passed.append(slot)
                elif uses >= least:
                    victims.append(slot)
                    if len(victims) == count:
                        break
        return tuple(victims), tuple(passed)

    def _search_arrays(
        self, queue: SlotQueue, count: int, least: int, most: int, protected: Collection[int]
    ) -> tuple[IdArray, IdArray]:
        barred = np.fromiter(protected, np.int64, len(protected)) if protected else None
        none: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        victims, passed = [none], [none]
        for window in queue.windows(2 * count + SMALL):
            uses = self._uses_view[window]
            stays = uses > most
            if barred is not None:
                stays |= np.isin(window, barred)
            goes = np.flatnonzero(~stays & (uses >= least))
            if len(goes) >= count:
                goes = goes[:count]
                window, stays = window[: goes[-1] + 1], stays[: goes[-1] + 1]
            victims.append(window[goes])
            passed.append(window[stays])
            count -= len(goes)
            if not count:
                break
        return np.concatenate(victims), np.concatenate(passed)
