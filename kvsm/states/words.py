"""States as words: a state and its counters in one int, and a memo of the steps between words.

A word is `state | counter << 4 | counter << ...`. The memo of a trigger maps a word to the next word. It is
filled from `Machine.step` at the first use of each word. So a step on the hot path is a dict lookup, and the
table stays the only definition.

`StateWords` keeps the words of many objects of one machine (host slots, device blocks) in one `array`, whose
memory numpy shares. A batch is checked whole before anything changes: `check` returns the next words, or
raises; `commit` writes them.
"""

from __future__ import annotations

from array import array
from collections import Counter
from enum import IntEnum
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kvsm.errors import TWICE, IllegalTransition
from kvsm.ids import NO_IDS, IdArray, listed
from kvsm.states.machine import Machine, UndefinedStep

STATE_BITS = 4
STATE_MASK = (1 << STATE_BITS) - 1

Words = list[int] | int | NDArray[np.int32]
"""Words of a batch: a list for a tuple of ids; for an array of ids, an int if all are equal, else an
array."""


class _Memo(dict[int, int]):
    """Word -> next word, for one trigger of one machine."""

    __slots__ = ("_codec", "_trigger")

    def __init__(self, codec: Codec, trigger: int) -> None:
        super().__init__()
        self._codec, self._trigger = codec, trigger

    def __missing__(self, word: int) -> int:
        state, counts = self._codec.decode(word)
        after = self._codec.encode(*self._codec.machine.step(state, counts, self._trigger))
        self[word] = after
        return after


class _Places(dict[int, tuple[int, ...]]):
    """Word -> the places of `StateWords.totals` that count a slot or device block with this word."""

    __slots__ = ("_codec",)

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self._codec = codec

    def __missing__(self, word: int) -> tuple[int, ...]:
        state, counts = self._codec.decode(word)
        held = [1 + STATE_MASK + place for place, count in enumerate(counts) if count]
        self[word] = places = (state, *held)
        return places


class Codec:
    """The words of one machine; `next[trigger][word]` is the step."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        shifts, shift = [], STATE_BITS
        for counter in machine.counters:
            shifts.append(shift)
            shift += counter.bits
        if shift > 31 or len(machine.states) > 1 << STATE_BITS:
            raise ValueError(f"machine {machine.name} does not fit in 31 bits")
        self.shifts = tuple(shifts)
        self.limits = tuple(counter.limit for counter in machine.counters)
        self.next: tuple[dict[int, int], ...] = tuple(_Memo(self, trigger) for trigger in machine.triggers)
        self.places: dict[int, tuple[int, ...]] = _Places(self)

    def encode(self, state: int, counts: tuple[int, ...] = ()) -> int:
        """Return the word of a state with these counts; missing counts are 0."""
        word = int(state)
        for count, shift in zip(counts, self.shifts):
            word |= count << shift
        return word

    def decode(self, word: int) -> tuple[int, tuple[int, ...]]:
        """(state, counts): inverse of `encode`."""
        counts = tuple((word >> shift) & limit for shift, limit in zip(self.shifts, self.limits))
        return word & STATE_MASK, counts

    def holds(self, word: int) -> bool:
        """Whether this is a valid word of the machine: a known state, and no bits outside the counters."""
        state, counts = self.decode(word)
        return state < len(self.machine.states) and word == self.encode(state, counts)

    def describe(self, word: int) -> str:
        """Return the word as text: `LOADING(copies=1, pins=0)`."""
        state, counts = self.decode(word)
        counters = zip(self.machine.counters, counts)
        named = ", ".join(f"{counter.name}={count}" for counter, count in counters)
        return f"{self.machine.states(state).name}({named})" if named else self.machine.states(state).name

    def step(self, word: int, trigger: IntEnum, name: int | str, seq: int) -> int:
        """Return the next word of one slot, lease, transfer or request. Raises `IllegalTransition`."""
        try:
            return self.next[trigger][word]
        except UndefinedStep:
            raise self.illegal(word, trigger, (name,), seq) from None

    def illegal(
        self, word: int, trigger: IntEnum, names: tuple[int | str, ...], seq: int
    ) -> IllegalTransition:
        """Make the error for names that `trigger` is illegal for; `word` is the word of the first one."""
        return IllegalTransition(self.machine.name, names, self.describe(word), trigger.name, seq)


class StateWords:
    """The states of `size` slots or device blocks, numbered from 0. All begin in the machine's initial state.

    totals: the number of ids in each state, in the first `1 << STATE_BITS` places; after these, for each
        counter of the machine, the number of ids whose counter is above 0. `commit` updates them, in both
        bodies of the fold. Code that writes words in another way calls `recount`.
    """

    __slots__ = ("_mark", "codec", "size", "totals", "view", "words")

    def __init__(self, codec: Codec, size: int) -> None:
        self.codec, self.size = codec, size
        self.words = array("i", (0,)) * size
        self.view: NDArray[np.int32] = np.frombuffer(self.words, dtype=np.int32)
        self.totals = array("q", (0,)) * (1 + STATE_MASK + len(codec.shifts))
        self.totals[0] = size
        self._mark = np.zeros(size, dtype=np.int64)

    def state(self, index: int) -> IntEnum:
        """Return the state of one slot or device block."""
        return self.codec.machine.states(self.words[index] & STATE_MASK)

    def counted(self) -> list[int]:
        """Return what `totals` must be, counted from all words."""
        totals, places = [0] * len(self.totals), self.codec.places
        for word, count in Counter(self.words).items():
            for place in places[word]:
                totals[place] += count
        return totals

    def recount(self) -> None:
        """Compute `totals` again from the words."""
        self.totals[:] = array("q", self.counted())

    def look(self, ids: IdArray) -> Words:
        """Return the current words of a batch."""
        if type(ids) is tuple:
            return [self.words[id] for id in ids]
        return self.view[ids]

    def check(self, ids: IdArray, trigger: IntEnum, seq: int) -> Words:
        """Return the words of `ids` after `trigger`. Changes nothing.

        Raises `IllegalTransition`, naming every id that does not exist, is twice in the batch, or is in a
        state without this trigger. An array is not searched for negative ids: unpacking (`kvsm.ids`) makes
        none.
        """
        new = self._next(ids, trigger, seq)
        if type(ids) is tuple:
            # Python takes a negative id as counted from the end.
            if ids and ((len(ids) > 1 and len(set(ids)) != len(ids)) or min(ids) < 0):
                raise self._refusal(ids, trigger, seq)
        elif not self.distinct(ids):
            raise self._refusal(ids, trigger, seq)
        return new

    def commit(self, ids: IdArray, new: Words) -> None:
        """Write the words that `check` returned."""
        if type(ids) is not tuple:
            self._move_many(self.view[ids], -1)
            self._move_many(np.broadcast_to(np.asarray(new), len(ids)), 1)
            self.view[ids] = new
            return
        words = self.words
        for id, word in zip(ids, new):  # type: ignore[arg-type]
            self._move(words[id], -1)
            self._move(word, 1)
            words[id] = word

    def advance(self, ids: IdArray, trigger: IntEnum, seq: int) -> Words:
        """Check and commit ids that are known to be distinct, such as the slots of a transfer."""
        new = self._next(ids, trigger, seq)
        self.commit(ids, new)
        return new

    def _move(self, word: int, more: int) -> None:
        """Add `more` to the totals that count this word."""
        totals = self.totals
        for place in self.codec.places[word]:
            totals[place] += more

    def _move_many(self, words: NDArray[Any], sign: int) -> None:
        """Add these words to the totals (sign 1), or take them off (-1)."""
        for word, count in zip(*np.unique(words, return_counts=True)):
            self._move(int(word), sign * int(count))

    def distinct(self, ids: IdArray) -> bool:
        """Whether all ids are distinct: write each id's place; a duplicate overwrites the first."""
        if type(ids) is tuple:
            return len(set(ids)) == len(ids)
        places = np.arange(len(ids))
        self._mark[ids] = places
        return bool((self._mark[ids] == places).all())

    def _next(self, ids: IdArray, trigger: IntEnum, seq: int) -> Words:
        memo = self.codec.next[trigger]
        try:
            if type(ids) is tuple:
                words = self.words
                if len(ids) == 1:
                    return [memo[words[ids[0]]]]
                return [memo[words[id]] for id in ids]
            old = self.view[ids]
            first = int(old[0])
            if (old == first).all():
                return memo[first]
            values, inverse = np.unique(old, return_inverse=True)
            return np.array([memo[word] for word in values.tolist()], dtype=np.int32)[inverse]
        except (UndefinedStep, IndexError):
            raise self._refusal(ids, trigger, seq) from None

    def _refusal(self, batch: IdArray, trigger: IntEnum, seq: int) -> IllegalTransition:
        """Return the error for a batch that was refused."""
        ids, name = tuple(listed(batch)), self.codec.machine.name
        absent = tuple(id for id in ids if not 0 <= id < self.size)
        if absent:
            return IllegalTransition(name, absent, f"none of the {self.size}", trigger.name, seq)
        doubled = tuple(sorted(id for id, times in Counter(ids).items() if times > 1))
        if doubled:
            return IllegalTransition(name, doubled, TWICE, trigger.name, seq)
        wrong = [id for id in ids if not self._allows(self.words[id], trigger)]
        return self.codec.illegal(self.words[wrong[0]], trigger, tuple(wrong), seq)

    def _allows(self, word: int, trigger: IntEnum) -> bool:
        try:
            self.codec.next[trigger][word]
        except UndefinedStep:
            return False
        return True


def pick(ids: IdArray, words: Words, wanted: int) -> IdArray:
    """Return the ids whose word is `wanted`."""
    if type(words) is list:
        if len(words) == 1:
            return ids if words[0] == wanted else NO_IDS
        wanting = words.count(wanted)
        if wanting == len(words):
            return ids
        return tuple([id for id, word in zip(ids, words) if word == wanted]) if wanting else NO_IDS
    if type(words) is int:
        return ids if words == wanted else NO_IDS
    return cast(NDArray[np.int64], cast(NDArray[np.int64], ids)[words == wanted])
