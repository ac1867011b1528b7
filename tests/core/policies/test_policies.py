"""Eviction policies, each against a model of plain lists that takes one block at a time.

The models are written from the papers and know nothing of batches, packed queues or laps counted at once.
`World` drives a policy and its model through the same random life and compares every answer. Not checked
here: that the ledger calls a policy at the right moments.
"""

# ruff: noqa: ARG002 (models share one set of signatures, as policies do)

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import deque
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from block_order import post_order
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from places import ROOT

from examples import examples
from kvsm.core.policies import ADMITTING, POLICIES, Choice, EvictionPolicy, make_policy, refuse_foreign
from kvsm.core.policies.arc import ARCState
from kvsm.core.policies.lru import LRUPolicy
from kvsm.core.policies.policy_copies import PolicyCopy
from kvsm.core.policies.slot_queue import SlotQueue
from kvsm.core.policies.use_counts import UseCountingPolicy, UseCounts
from kvsm.errors import ConfigError
from kvsm.ids import NO_IDS, SMALL, IdArray
from kvsm.testing import OffloadMachine

EXAMPLES = [pytest.param(examples(120), id="fast"), pytest.param(1_000, id="slow", marks=pytest.mark.slow)]
PARTS_PROMPTS = ("arc", "s3fifo")
"""Policies that put blocks of one prompt into several queues, and evict what continues a victim first."""
NAMES = sorted(ADMITTING)
"""`auto` has tests of its own: `test_auto.py`."""


def put(queue: list[int], slot: int, parent: int | None) -> None:
    """Right before its parent, or at the end."""
    queue.insert(queue.index(parent) if parent in queue else len(queue), slot)


class LRUModel:
    """One list, oldest first. Every method takes one block; the driver feeds a batch from its end.

    most_passed: for models that pass over used blocks, how many of a queue (`UseCountingPolicy.most_passed`).
    """

    def __init__(self, capacity: int, most_passed: int) -> None:
        self.capacity = capacity
        self.most_passed = most_passed
        self.order: list[int] = []

    def admitted(self, slot: int, key: bytes, parent: int | None) -> None:
        put(self.order, slot, parent)

    def busy(self, slot: int) -> None:
        self.order.remove(slot)

    def idle(self, slot: int) -> None:
        self.order.append(slot)

    def touched(self, slot: int, parent: int | None) -> None:
        self.busy(slot)
        put(self.order, slot, parent)

    def removed(self, slot: int) -> None:
        if slot in self.order:
            self.order.remove(slot)

    def choose(self, count: int, protected: frozenset[int]) -> list[int]:
        return [slot for slot in self.order if slot not in protected][:count]

    def evicted(self, victims: list[int], keys: list[bytes], protected: frozenset[int]) -> None:
        for slot in victims:
            self.removed(slot)

    def recall(self, keys: list[bytes]) -> list[bytes]:
        return []

    def recalled(self, key: bytes) -> None:
        pass


class SLRUModel(LRUModel):
    """`order` is probation; the oldest block above the protected share goes back there at once."""

    def __init__(self, capacity: int, most_passed: int) -> None:
        super().__init__(capacity, most_passed)
        self.protected_segment: list[int] = []

    def busy(self, slot: int) -> None:
        (self.order if slot in self.order else self.protected_segment).remove(slot)

    def idle(self, slot: int) -> None:
        self.protect(slot, None)

    def touched(self, slot: int, parent: int | None) -> None:
        self.busy(slot)
        self.protect(slot, parent)

    def protect(self, slot: int, parent: int | None) -> None:
        put(self.protected_segment, slot, parent)
        if len(self.protected_segment) > self.capacity * 80 // 100:
            self.order.append(self.protected_segment.pop(0))

    def removed(self, slot: int) -> None:
        if slot in self.order + self.protected_segment:
            self.busy(slot)

    def choose(self, count: int, protected: frozenset[int]) -> list[int]:
        return [slot for slot in self.order + self.protected_segment if slot not in protected][:count]


class ARCModel(LRUModel):
    """T1, T2, B1, B2 and p as in the paper, one request at a time."""

    def __init__(self, capacity: int, most_passed: int) -> None:
        super().__init__(capacity, most_passed)
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.returning: list[bytes] = []
        self.p = 0

    def admitted(self, slot: int, key: bytes, parent: int | None) -> None:
        if key in self.returning:
            self.returning.remove(key)
            put(self.t2, slot, parent)
        else:
            put(self.t1, slot, parent)
            self.bound()

    def touched(self, slot: int, parent: int | None) -> None:
        self.busy(slot)
        put(self.t2, slot, parent)

    def bound(self) -> None:
        while len(self.t1) + len(self.b1) > self.capacity:
            self.b1.pop(0)
        while len(self.b1) + len(self.b2) > self.capacity:
            self.b2.pop(0)

    def busy(self, slot: int) -> None:
        (self.t1 if slot in self.t1 else self.t2).remove(slot)

    def idle(self, slot: int) -> None:
        self.t2.append(slot)

    def removed(self, slot: int) -> None:
        if slot in self.t1 + self.t2:
            self.busy(slot)

    def choose(self, count: int, protected: frozenset[int]) -> list[int]:
        size, from_t1 = len(self.t1), 0
        for _ in range(count):
            if size > self.p:
                from_t1 += 1  # It leaves T1 and the block it makes room for enters: the same size.
            else:
                size += 1
        t1 = [slot for slot in self.t1 if slot not in protected]
        t2 = [slot for slot in self.t2 if slot not in protected]
        from_t1 = max(min(from_t1, len(t1)), count - len(t2))
        return t1[:from_t1] + t2[: count - from_t1]

    def evicted(self, victims: list[int], keys: list[bytes], protected: frozenset[int]) -> None:
        for slot, key in zip(victims, keys, strict=True):
            (self.b1 if slot in self.t1 else self.b2).append(key)
            self.removed(slot)
            self.bound()

    def recall(self, keys: list[bytes]) -> list[bytes]:
        return [key for key in keys if key in self.b1 + self.b2]

    def recalled(self, key: bytes) -> None:
        if key in self.b1:
            self.p = min(self.capacity, self.p + max(1, len(self.b2) // len(self.b1)))
            self.b1.remove(key)
        else:
            self.p = max(0, self.p - max(1, len(self.b1) // len(self.b2)))
            self.b2.remove(key)
        self.returning = [*self.returning, key][-self.capacity :]


class S3FIFOModel(LRUModel):
    """Two lists and a clock that turns one block at a time."""

    def __init__(self, capacity: int, most_passed: int) -> None:
        super().__init__(capacity, most_passed)
        self.target = max(1, capacity // 10)
        self.small: list[int] = []
        self.main: list[int] = []
        self.uses: dict[int, int] = {}
        self.in_use: set[int] = set()
        self.ghosts: list[bytes] = []
        self.returning: list[bytes] = []
        self.lap: list[int] = []
        """The blocks of main that the last lap of a search has passed over."""

    def admitted(self, slot: int, key: bytes, parent: int | None) -> None:
        if parent in self.in_use or self.uses.get(parent):
            parent = None
        put(self.main if key in self.returning else self.small, slot, parent)
        self.returning = [one for one in self.returning if one != key]
        self.uses[slot] = 0

    def busy(self, slot: int) -> None:
        self.in_use.add(slot)

    def idle(self, slot: int) -> None:
        self.in_use.discard(slot)
        self.uses[slot] = min(3, self.uses[slot] + 1)

    def touched(self, slot: int, parent: int | None) -> None:
        self.idle(slot)

    def removed(self, slot: int) -> None:
        (self.small if slot in self.small else self.main).remove(slot)
        self.in_use.discard(slot)

    def choose(self, count: int, protected: frozenset[int]) -> list[int]:
        return self.search(count, protected)[0]

    def search(self, count: int, protected: frozenset[int]) -> tuple[list[int], list[int], dict[int, int]]:
        """Victims, main as it will be, and the counts as they will be."""
        held = self.in_use | protected
        quota = count - min(count, max(0, self.target - len(self.small)))
        victims: list[int] = []
        promoted: list[int] = []
        for slot in self.small:
            if len(victims) == quota:
                break
            if (slot in held or self.uses[slot] > 1) and len(promoted) < self.most_passed:
                promoted.append(slot)
            elif slot not in held:
                victims.append(slot)
        from_main, clock, uses = self.search_main(count - len(victims), held)
        victims += from_main
        if len(victims) < count:
            return self.last_resort(count, held)
        return victims, [*clock, *promoted], uses | dict.fromkeys(promoted, 0)

    def search_main(self, count: int, held: set[int]) -> tuple[list[int], list[int], dict[int, int]]:
        """Victims, main as it will be, and the counts as they will be. Once around main, at most, if it is
        longer than what may be passed over."""
        victims, clock, uses = list[int](), deque(self.main), dict(self.uses)
        if len(clock) > self.most_passed:
            return self.search_long_main(count, held)
        self.lap, left = [], len(clock)
        while len(victims) < count and not held.issuperset(clock):
            if not left:
                self.lap, left = [], len(clock)
            left -= 1
            slot = clock.popleft()
            if slot not in held and uses[slot] == 0:
                victims.append(slot)
            else:
                uses[slot] = max(0, uses[slot] - 1)
                clock.append(slot)
                self.lap.append(slot)
        return victims, list(clock), uses

    def search_long_main(self, count: int, held: set[int]) -> tuple[list[int], list[int], dict[int, int]]:
        """If what is not passed over is not enough, the oldest blocks go, and none is passed over."""
        victims, passed = list[int](), list[int]()
        for slot in self.main:
            if len(victims) == count:
                break
            if (slot in held or self.uses[slot]) and len(passed) < self.most_passed:
                passed.append(slot)
            elif slot not in held:
                victims.append(slot)
        if len(victims) < count:
            victims, passed = [slot for slot in self.main if slot not in held][:count], []
        self.lap = passed
        rest = [slot for slot in self.main if slot not in passed + victims]
        return victims, rest + passed, self.uses | {slot: max(0, self.uses[slot] - 1) for slot in passed}

    def last_resort(self, count: int, held: set[int]) -> tuple[list[int], list[int], dict[int, int]]:
        """All that main can give, and of small those used more than once last."""
        self.lap = []
        main = [slot for slot in self.main if slot not in held]
        passes = 0
        if len(self.main) <= self.most_passed:
            main.sort(key=lambda slot: self.uses[slot])
            passes = max((self.uses[slot] for slot in main), default=0)
        rest = sorted((slot for slot in self.small if slot not in held), key=lambda slot: self.uses[slot] > 1)
        uses = {s: max(0, n - passes) if s in self.main else n for s, n in self.uses.items()}
        return rest[: count - len(main)] + main, list(self.main), uses

    def evicted(self, victims: list[int], keys: list[bytes], protected: frozenset[int]) -> None:
        ghosts = [key for slot, key in zip(victims, keys, strict=True) if slot in self.small]
        kept = self.capacity - self.target
        self.ghosts = (self.ghosts + ghosts)[-kept:] if kept else []
        before, main = self.uses, self.main
        found, self.main, self.uses = self.search(len(victims), protected)
        if (
            found != victims
        ):  # What continues them goes first. The number of passes follows from these victims.
            promoted = [slot for slot in self.main if slot in self.small]
            passes = max([before[slot] for slot in victims if slot in main], default=0)
            passes = passes if len(main) <= self.most_passed else 0
            self.main = [*[slot for slot in main if slot not in self.lap], *self.lap, *promoted]
            lowered = {slot: max(0, before[slot] - passes - (slot in self.lap)) for slot in main}
            self.uses = before | lowered | dict.fromkeys(promoted, 0)
        self.main = [slot for slot in self.main if slot not in victims]
        self.small = [slot for slot in self.small if slot not in victims and slot not in self.main]

    def recall(self, keys: list[bytes]) -> list[bytes]:
        return [key for key in keys if key in self.ghosts]

    def recalled(self, key: bytes) -> None:
        self.ghosts.remove(key)
        self.returning = [*self.returning, key][-self.capacity :]


class SIEVEModel(LRUModel):
    """`order` is the queue, oldest first; `hand` is the block to look at next, None for the oldest."""

    def __init__(self, capacity: int, most_passed: int) -> None:
        super().__init__(capacity, most_passed)
        self.used: set[int] = set()
        self.in_use: set[int] = set()
        self.hand: int | None = None

    def admitted(self, slot: int, key: bytes, parent: int | None) -> None:
        put(self.order, slot, parent)
        if parent is not None and parent == self.hand:
            self.hand = slot

    def busy(self, slot: int) -> None:
        self.in_use.add(slot)

    def idle(self, slot: int) -> None:
        self.in_use.discard(slot)
        self.used.add(slot)

    def touched(self, slot: int, parent: int | None) -> None:
        self.idle(slot)

    def removed(self, slot: int) -> None:
        if slot == self.hand:
            newer = self.order[self.order.index(slot) + 1 :]
            self.hand = newer[0] if newer else None
        self.order.remove(slot)
        self.used.discard(slot)
        self.in_use.discard(slot)

    def choose(self, count: int, protected: frozenset[int]) -> list[int]:
        return self.search(count, protected)[0]

    def search(self, count: int, protected: frozenset[int]) -> tuple[list[int], int | None, set[int]]:
        """Victims, the hand as it will be, and the used blocks as they will be."""
        held = self.in_use | protected
        queue, used, victims = list(self.order), set(self.used), list[int]()
        place = 0 if self.hand is None else queue.index(self.hand)
        may_end, passed = len(queue) - place <= self.most_passed, 0
        while len(victims) < count and not held.issuperset(queue):
            stays = queue[place] in held or queue[place] in used
            if not stays:
                victims.append(queue.pop(place))
            elif passed < self.most_passed:
                used.discard(queue[place])
                place, passed = place + 1, passed + 1
            else:
                victims += [slot for slot in queue[place:] if slot not in held][: count - len(victims)]
                queue = [slot for slot in queue if slot not in victims]
                if len(victims) < count:
                    return self.last_resort(count, held)
            if place == len(queue):
                if len(victims) < count and not may_end:
                    return self.last_resort(count, held)
                may_end, passed, place = len(self.order) <= self.most_passed, 0, 0
        return victims, queue[place] if queue else None, used

    def last_resort(self, count: int, held: set[int]) -> tuple[list[int], int | None, set[int]]:
        """From the hand on, whatever was used. The hand stays, unless it may go beyond the newest block."""
        place = 0 if self.hand is None else self.order.index(self.hand)
        ahead, behind = self.order[place:], self.order[:place]
        victims = [slot for slot in ahead + behind if slot not in held][:count]
        used = set(self.used)
        if len(ahead) <= self.most_passed:
            used.difference_update(ahead)
            ahead, behind = behind + ahead, []
        following = [slot for slot in ahead + behind if slot not in victims]
        return victims, following[0] if following else None, used

    def evicted(self, victims: list[int], keys: list[bytes], protected: frozenset[int]) -> None:
        _, hand, used = self.search(len(victims), protected)
        self.order = [slot for slot in self.order if slot not in victims]
        self.hand, self.used = hand, used.difference(victims)


MODELS = {
    "lru": LRUModel,
    "slru": SLRUModel,
    "arc": ARCModel,
    "s3fifo": S3FIFOModel,
    "sieve": SIEVEModel,
}


def whole(copy: PolicyCopy) -> bytes:
    """Finish a copy in pieces as small as can be."""
    while not copy.go_on(1):
        pass
    return b"".join(copy.pieces())


def canonical(batch: list[int]) -> IdArray:
    """The form in which the ledger hands a batch on."""
    return tuple(batch) if len(batch) <= SMALL else np.array(batch, dtype=np.int64)


class World:
    """One policy and its model, led through the same life by steps of (name, size, seed)."""

    def __init__(self, name: str, capacity: int, form: Any = canonical) -> None:
        self.name, self.capacity, self.form = name, capacity, form
        self.policy: EvictionPolicy = make_policy(name, capacity)
        self.model = MODELS[name](capacity, UseCountingPolicy.most_passed)
        self.keys: dict[int, bytes] = {}
        self.free, self.idle, self.in_use = list(range(capacity)), list[int](), list[int]()
        self.gone: list[bytes] = []
        self.made = 0
        self.parent_of = dict[int, int | None]()
        """Of each stored block: the slot of the stored block that it continues."""
        self.history: list[list[int]] = []
        self.copied: PolicyCopy | None = None
        self.copied_state = b""

    def step(self, name: str, size: int, seed: int) -> None:
        getattr(self, name)(size, Random(seed))
        assert len(self.policy) == len(self.idle)
        assert [slot for slot in range(self.capacity) if slot in self.policy] == sorted(self.idle)
        assert list(self.policy.recall(self.gone)) == self.model.recall(self.gone)
        assert self.policy.snapshot().count(b"key ") <= 2 * self.capacity

    def feed(self, name: str, batch: list[int], *parent: int | None) -> None:
        getattr(self.policy, name)(self.form(batch), *parent)
        for slot in reversed(batch):
            getattr(self.model, name)(slot, *parent)

    def parent(self, batch: list[int], random: Random) -> int | None:
        """What a batch continues: another slot, whatever is in it, or nothing."""
        others = [slot for slot in range(self.capacity) if slot not in batch]
        return random.choice(others) if others and random.random() < 0.6 else None

    def take(self, source: list[int], size: int, random: Random) -> list[int]:
        batch = random.sample(source, min(size, len(source)))
        source[:] = [slot for slot in source if slot not in batch]
        return batch

    def admit(self, size: int, random: Random) -> None:
        """Store new keys and old ones; the policy hears of ghosts before, or finds them out itself."""
        slots = self.take(self.free, size, random)
        keys = random.sample(self.gone, random.randint(0, min(len(slots), len(self.gone))))
        while len(keys) < len(slots):
            self.made += 1
            keys.append(b"key %d" % self.made)
        random.shuffle(keys)
        if random.random() < 0.8:
            self.policy.recalled(self.policy.recall(keys))
        for key in self.model.recall(keys):
            self.model.recalled(key)
        self.gone = [key for key in self.gone if key not in keys]
        parent = self.parent(slots, random)
        self.policy.admitted(self.form(slots), keys, parent)
        self.parent_of |= dict(zip(slots, [parent if parent in self.parent_of else None, *slots]))
        for slot, key in reversed(list(zip(slots, keys, strict=True))):
            self.keys[slot] = key
            self.model.admitted(slot, key, parent)
        self.idle += slots

    def fail(self, size: int, random: Random) -> None:
        """A store of ghosts is announced and then fails."""
        keys = random.sample(self.gone, min(size, len(self.gone)))
        self.policy.recalled(self.policy.recall(keys))
        for key in self.model.recall(keys):
            self.model.recalled(key)

    def pin(self, size: int, random: Random) -> None:
        batch = self.take(self.idle, size, random)
        self.feed("busy", batch)
        self.in_use += batch

    def unpin(self, size: int, random: Random) -> None:
        batch = self.take(self.in_use, size, random)
        self.feed("idle", batch)
        self.idle += batch

    def touch(self, size: int, random: Random) -> None:
        batch = random.sample(self.idle, min(size, len(self.idle)))
        self.feed("touched", batch, self.parent(batch, random))

    def remove(self, size: int, random: Random) -> None:
        batch = self.take(random.choice([self.idle, self.in_use]), min(size, 3), random)
        self.feed("removed", batch)
        self.free += batch
        self.gone += [self.keys.pop(slot) for slot in batch]
        self.forget(batch)

    def forget(self, slots: list[int]) -> None:
        left = {slot: at for slot, at in self.parent_of.items() if slot not in slots}
        self.parent_of = {slot: at if at in left else None for slot, at in left.items()}

    def restart(self, size: int, random: Random) -> None:
        """A new policy takes the place of this one; what follows shows that nothing was lost."""
        state = self.policy.snapshot()
        self.policy = make_policy(self.name, self.capacity)
        self.policy.restore(state)
        assert self.policy.snapshot() == state
        self.copied = None

    def reset(self, size: int, random: Random) -> None:
        """All blocks are gone, and what is remembered of others."""
        self.policy.clear()
        self.model = MODELS[self.name](self.capacity, self.model.most_passed)
        self.gone += self.keys.values()
        self.keys.clear()
        self.parent_of.clear()
        self.free, self.idle, self.in_use = list(range(self.capacity)), [], []
        assert self.policy.snapshot() == make_policy(self.name, self.capacity).snapshot()

    def copy(self, size: int, random: Random) -> None:
        """A copy is begun, and perhaps finished while the policy changes."""
        if self.copied is not None:
            assert whole(self.copied) == self.copied_state
        self.copied, self.copied_state = self.policy.freeze(), self.policy.snapshot()
        self.copied.go_on(size)

    def evict(self, size: int, random: Random) -> None:
        protected = random.sample(range(self.capacity), random.randint(0, self.capacity) // 3)
        self.choose_and_evict(size, frozenset(protected))

    def choose_and_evict(self, size: int, protected: frozenset[int]) -> None:
        may_go = set(self.idle) - protected
        before = self.policy.snapshot()
        choice = self.policy.choose(size, protected)
        again = self.policy.choose(size, protected)
        assert self.policy.snapshot() == before
        if choice is None:
            assert again is None
            assert len(may_go) < size
            return
        victims, moved = (list(map(int, part)) for part in choice)
        assert again is not None
        assert [list(part) for part in again] == [victims, moved]
        assert len(set(victims)) == size
        assert may_go.issuperset(victims)
        assert len(set(victims + moved)) == len(victims) + len(moved)
        expected = self.model.choose(size, protected)
        if self.name in PARTS_PROMPTS:
            expected = post_order(self.parent_of, expected, {*self.parent_of} - may_go)
        assert victims == expected
        keys = [self.keys.pop(slot) for slot in victims]
        replayed = make_policy(self.name, self.capacity)
        replayed.restore(before)
        for policy in (self.policy, replayed):
            policy.evicted(Choice(self.form(victims), self.form(moved)), keys)
        assert replayed.snapshot() == self.policy.snapshot()
        self.model.evicted(victims, keys, protected)
        self.gone += keys
        self.idle = [slot for slot in self.idle if slot not in victims]
        self.free += victims
        self.forget(victims)
        self.history.append(victims)

    def drain(self) -> None:
        """Evict the rest one by one: the whole order, as far as it can be told from outside."""
        self.unpin(self.capacity, Random(0))
        while self.idle:
            self.choose_and_evict(1, frozenset())


OFTEN = ["evict", "pin", "unpin", "touch", "copy"]
MOVES = ["admit"] * 4 + OFTEN * 3 + ["remove", "fail", "restart", "reset"]
sizes = st.one_of(st.integers(1, 5), st.integers(SMALL - 1, SMALL + 2), st.integers(20, 60))
steps = st.lists(st.tuples(st.sampled_from(MOVES), sizes, st.integers(0, 2**32 - 1)), min_size=5, max_size=60)
worlds = st.tuples(st.sampled_from([1, 2, 9, 20, 50, 120]), steps)


def check_property(examples: int, strategy: st.SearchStrategy[Any], body: Any) -> None:
    """Run one property test with a given number of examples."""
    limits = settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    limits(given(strategy)(body))()


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", NAMES)
def test_chooses_like_its_model(name: str, examples: int) -> None:
    """The same victims in the same order as the plain model, all or nothing, never one that is in use or
    protected (S3), without changing by being asked; ghosts bounded; exact across snapshot and restore."""

    def body(case: Any) -> None:
        capacity, moves = case
        world = World(name, capacity)
        for move in moves:
            world.step(*move)
        world.drain()

    check_property(examples, worlds, body)


def full_pool(capacity: int) -> st.SearchStrategy[Any]:
    """A life that begins with a full pool, in which most blocks are used before one is evicted."""
    moves = st.sampled_from(["touch", "evict", "admit"] * 3 + ["pin", "unpin", "copy", "restart"])
    sizes = st.one_of(st.integers(1, 6), st.integers(1, capacity))
    life = st.lists(st.tuples(moves, sizes, st.integers(0, 2**32 - 1)), min_size=8, max_size=50)
    return st.tuples(st.just(capacity), life.map(lambda steps: [("admit", capacity, 0), *steps]))


full_pools = st.tuples(st.integers(0, 30), st.sampled_from([5, 12, 20, 40]).flatmap(full_pool))


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", ["s3fifo", "sieve"])
def test_chooses_like_its_model_if_few_blocks_are_passed_over(
    name: str, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In queues longer and shorter than that; and what a choice says is enough to replay it (S10)."""

    def body(case: Any) -> None:
        most_passed, (capacity, moves) = case
        monkeypatch.setattr(UseCountingPolicy, "most_passed", most_passed)
        world = World(name, capacity)
        for move in moves:
            world.step(*move)
        world.drain()

    check_property(examples, full_pools, body)


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("name", NAMES)
def test_the_form_of_a_batch_does_not_matter(name: str, examples: int) -> None:
    """Tuples and arrays of the same slots lead to the same victims and the same bytes (S11)."""

    def body(case: Any) -> None:
        capacity, moves = case
        loops = World(name, capacity, tuple)
        arrays = World(name, capacity, lambda batch: np.array(batch, dtype=np.int64))
        for move in moves:
            loops.step(*move)
            arrays.step(*move)
        assert loops.history == arrays.history
        assert loops.policy.snapshot() == arrays.policy.snapshot()

    check_property(examples // 3, worlds, body)


FEW_PASSED = [pytest.param(name, 1, id=f"{name}, few passed") for name in ("s3fifo", "sieve")]


@pytest.mark.parametrize(
    ("name", "most_passed"), [*((name, UseCountingPolicy.most_passed) for name in NAMES), *FEW_PASSED]
)
def test_keeps_its_word_in_the_whole_core(
    name: str, most_passed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the small engine: what it chooses is idle, and a restored one chooses the same (S3, S10)."""
    monkeypatch.setattr(UseCountingPolicy, "most_passed", most_passed)
    machine = type(f"{name} machine", (OffloadMachine,), {"policy": name})
    limits = settings(machine.TestCase.settings, max_examples=8, derandomize=True, database=None)
    run_state_machine_as_test(machine, settings=limits)


PAGE = (ROOT / "docs" / "policies.md").read_text()


def test_each_policy_is_documented() -> None:
    """docs/policies.md says when to choose it."""
    choices = PAGE[PAGE.index("| choose it when |") :].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", choices, re.MULTILINE) == list(POLICIES)


def test_it_is_documented_how_many_blocks_a_choice_passes_over() -> None:
    """Behind them, SIEVE and S3-FIFO take blocks that were used."""
    assert f"{UseCountingPolicy.most_passed:,} blocks of a queue" in PAGE


def test_documented_hit_rates_are_those_measured() -> None:
    """Row by row what the benchmark wrote. The page has some of its tables."""
    rows = r"^\| (?:host slots|\d).*$"
    results = (ROOT / "benchmarks" / "results" / "policies.md").read_text()
    shown = re.findall(rows, PAGE, re.MULTILINE)
    assert len(shown) > 20
    assert not {*shown} - {*re.findall(rows, results, re.MULTILINE)}


def fingerprint() -> str:
    """Digest of a long life under every policy: victims and final states."""
    digest = hashlib.sha256()
    for name in NAMES:
        world, random = World(name, 50), Random(7)
        for _ in range(150):
            world.step(random.choice(MOVES), random.randint(1, 24), random.getrandbits(32))
        digest.update(repr(world.history).encode() + world.policy.snapshot())
    return digest.hexdigest()


def test_no_hash_order_decides() -> None:
    """Another PYTHONHASHSEED, the same victims and the same bytes (S11)."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", f"import {Path(__file__).stem} as tests; print(tests.fingerprint())"]
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint()


class Pool:
    """A cache of `capacity` blocks, read one key at a time."""

    def __init__(self, name: str, capacity: int) -> None:
        self.policy = make_policy(name, capacity)
        self.free = list(range(capacity))
        self.slots: dict[bytes, int] = {}
        self.keys: dict[int, bytes] = {}

    def read(self, key: bytes) -> bool:
        """Whether it was a hit; a miss stores it."""
        if key in self.slots:
            self.policy.busy((self.slots[key],))
            self.policy.idle((self.slots[key],))
            return True
        self.policy.recalled(self.policy.recall([key]))
        if not self.free:
            choice = self.policy.choose(1, ())
            assert choice is not None
            victim = int(choice.victims[0])
            self.policy.evicted(choice, [self.keys[victim]])
            del self.slots[self.keys.pop(victim)]
            self.free.append(victim)
        slot = self.free.pop()
        self.slots[key], self.keys[slot] = slot, key
        self.policy.admitted((slot,), [key])
        return False

    def read_all(self, prefix: str, count: int) -> int:
        """How many of `count` keys hit."""
        return sum(self.read(f"{prefix} {number}".encode()) for number in range(count))


@pytest.mark.parametrize(
    ("name", "survivors"), [("lru", 0), ("slru", 40), ("arc", 40), ("s3fifo", 40), ("sieve", 40)]
)
def test_scan_resistance(name: str, survivors: int) -> None:
    """Blocks used again and again outlive a scan of ten times the pool, except under LRU."""
    pool = Pool(name, 100)
    for _ in range(4):
        pool.read_all("hot", 40)
    assert pool.read_all("scan", 1000) == 0
    assert pool.read_all("hot", 40) == survivors


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_a_ghost_comes_back_among_the_blocks_that_stay(name: str) -> None:
    """A key that was evicted unread and is stored again soon after outlives the next scan."""
    pool = Pool(name, 100)
    pool.read_all("hot", 40)
    pool.read_all("scan", 100)
    back = [f"hot {number}".encode() for number in range(40) if f"hot {number}".encode() not in pool.slots]
    assert len(back) > 10
    assert not any(pool.read(key) for key in back)
    pool.read_all("other scan", 60)
    assert pool.slots.keys() >= set(back)


def test_arc_learns_that_recency_matters() -> None:
    """Ghosts of B1 give T1 room at the cost of T2: a working set read once each round begins to hit."""
    pool = Pool("arc", 100)
    for _ in range(2):
        pool.read_all("stale", 90)
    first = pool.read_all("working set", 80)
    later = [pool.read_all("working set", 80) for _ in range(3)]
    assert first == 0
    assert later[-1] == 80


@pytest.mark.parametrize("name", ["arc", "s3fifo"])
def test_stores_that_fail_do_not_leak_memory(name: str) -> None:
    """Ghosts that are announced again and again and never stored stay bounded by the capacity."""
    policy = make_policy(name, 10)
    for number in range(500):
        key = b"key %d" % number
        policy.admitted((number % 10,), [key])
        policy.evicted(Choice((number % 10,), ()), [key])
        policy.recalled(policy.recall([key]))
        assert policy.recall([key]) == ()
    assert policy.snapshot().count(b"key ") <= 10


@pytest.mark.parametrize("name", NAMES)
def test_what_continues_a_block_goes_before_it(name: str) -> None:
    """A prompt that is stored in pieces goes as one that is stored at once, whatever is stored between
    them."""
    policy = make_policy(name, 20)
    policy.admitted((3,), [b"first"])
    policy.admitted((7,), [b"another prompt"])
    policy.admitted((1, 2), [b"second", b"third"], 3)
    policy.admitted((0,), [b"fourth"], 2)
    assert victims(policy, 5) == [0, 2, 1, 3, 7]


@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_a_prefix_goes_first(name: str) -> None:
    """Of blocks stored by one event, the one furthest from the start of the prompt is evicted first."""
    policy = make_policy(name, 8)
    policy.admitted((3, 1, 2), [b"first", b"second", b"third"])
    choice = policy.choose(3, ())
    assert choice is not None
    assert choice.victims == (2, 1, 3)


def test_s3fifo_passes_a_block_in_use_only_once() -> None:
    """A block that is in use at the head of `small` moves to `main`, and is not met again there."""
    policy = make_policy("s3fifo", 20)
    policy.admitted((0,), [b"pinned"])
    policy.busy((0,))
    policy.admitted((1,), [b"one"])
    policy.admitted((2,), [b"two"])
    first = policy.choose(1, ())
    assert first == Choice((1,), (0,))
    policy.evicted(first, [b"one"])
    policy.admitted((1,), [b"three"])
    assert policy.choose(1, ()) == Choice((2,), ())


def use(policy: EvictionPolicy, *slots: int) -> None:
    """Each of these is read once, one after the other."""
    for slot in slots:
        policy.busy((slot,))
        policy.idle((slot,))


def victims(policy: EvictionPolicy, count: int, protected: frozenset[int] = frozenset()) -> list[int]:
    """What would go, in order."""
    choice = policy.choose(count, protected)
    assert choice is not None
    return list(choice.victims)


def test_slru_protects_its_share_and_no_more() -> None:
    """80 % of the pool; the blocks beyond it, oldest first, go before one that was stored after them."""
    policy = make_policy("slru", 10)
    policy.admitted(tuple(range(8, -1, -1)), [b"key %d" % number for number in range(9)])
    use(policy, *range(9))
    policy.admitted((9,), [b"new"])
    assert victims(policy, 10) == [0, 9, 1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("count", range(1, 7))
def test_slru_takes_from_the_protected_only_what_probation_lacks(count: int) -> None:
    policy = make_policy("slru", 10)
    policy.admitted((5, 4, 3, 2, 1, 0), [b"key %d" % number for number in range(6)])
    use(policy, 2, 3, 4, 5)
    assert victims(policy, count) == [0, 1, 2, 3, 4, 5][:count]


def test_lru_gives_all_or_nothing() -> None:
    """What is protected counts for neither."""
    policy = make_policy("lru", 4)
    policy.admitted((2, 1, 0), [b"a", b"b", b"c"])
    assert policy.choose(4, frozenset()) is None
    assert policy.choose(3, frozenset({1})) is None
    assert victims(policy, 2, frozenset({1})) == [0, 2]


def arc_with_ghosts(recalled: int) -> EvictionPolicy:
    """Eight slots; blocks 0, 1 used, in T2; 2 to 5 not, in T1; `recalled` of two ghosts of B1 came back, so
    that T1 should have that many blocks."""
    policy = make_policy("arc", 8)
    policy.admitted((7, 6), [b"ghost 1", b"ghost 0"])
    policy.evicted(Choice((6, 7), NO_IDS), [b"ghost 0", b"ghost 1"])
    policy.admitted((1, 0), [b"used 1", b"used 0"])
    use(policy, 0, 1)
    policy.admitted((5, 4, 3, 2), [b"new"] * 4)
    policy.recalled([b"ghost 0", b"ghost 1"][:recalled])
    return policy


@pytest.mark.parametrize(
    ("recalled", "count", "expected"),
    [
        (0, 1, [2]),
        (0, 5, [2, 3, 4, 5, 0]),
        (0, 6, [2, 3, 4, 5, 0, 1]),
        (2, 2, [2, 3]),
        (2, 6, [2, 3, 4, 5, 0, 1]),
    ],
)
def test_arc_takes_from_t2_what_t1_lacks(recalled: int, count: int, expected: list[int]) -> None:
    assert victims(arc_with_ghosts(recalled), count) == expected


@pytest.mark.parametrize(("count", "expected"), [(1, [0]), (2, [0, 1]), (3, [2, 0, 1]), (4, [2, 3, 0, 1])])
def test_arc_takes_from_t1_what_t2_lacks(count: int, expected: list[int]) -> None:
    """T1 is shorter than it should be, so victims are T2's as long as it has any."""
    policy = make_policy("arc", 8)
    ghosts = [b"ghost %d" % number for number in range(6)]
    policy.admitted((5, 4, 3, 2, 1, 0), ghosts[::-1])
    policy.evicted(Choice((0, 1, 2, 3, 4, 5), NO_IDS), ghosts)
    policy.recalled(ghosts)
    policy.admitted((1, 0), [b"used 1", b"used 0"])
    use(policy, 0, 1)
    policy.admitted((3, 2), [b"new 1", b"new 0"])
    assert victims(policy, count) == expected
    assert victims(policy, 3, frozenset({0})) == [2, 3, 1]


def arc_state(policy: EvictionPolicy) -> ARCState:
    """What it would save."""
    return msgspec.msgpack.decode(policy.snapshot(), type=ARCState)


def test_arc_moves_its_target_by_one_for_ghosts_of_queues_of_one_length() -> None:
    """And by no key that it does not remember."""
    policy = make_policy("arc", 4)
    policy.admitted((0,), [b"used"])
    use(policy, 0)
    policy.evicted(Choice((0,), NO_IDS), [b"used"])
    policy.admitted((2, 1), [b"b", b"a"])
    policy.evicted(Choice((1, 2), NO_IDS), [b"a", b"b"])
    targets = []
    for key in (b"a", b"b", b"used"):
        policy.recalled([b"never seen", key])
        targets.append(arc_state(policy).target)
    assert targets == [1, 2, 1]


def test_arc_finds_out_itself_that_a_ghost_was_stored() -> None:
    """A key that only one queue of ghosts has enters T2, though nobody announced it."""
    policy = make_policy("arc", 4)
    policy.admitted((0,), [b"back"])
    policy.evicted(Choice((0,), NO_IDS), [b"back"])
    policy.admitted((1,), [b"back"])
    state = arc_state(policy)
    assert (state.t1, state.b1) == (b"", [])
    assert len(state.t2) > 0


def test_arc_remembers_no_more_ghosts_than_the_pool_has_blocks() -> None:
    policy = make_policy("arc", 4)
    policy.admitted((1, 0), [b"unused 1", b"unused 0"])
    policy.evicted(Choice((0, 1), NO_IDS), [b"unused 0", b"unused 1"])
    for number in range(4):
        policy.admitted((0,), [b"used %d" % number])
        use(policy, 0)
        policy.evicted(Choice((0,), NO_IDS), [b"used %d" % number])
    state = arc_state(policy)
    assert (len(state.b1), state.b2) == (2, [b"used 2", b"used 3"])


def test_s3fifo_takes_from_main_while_small_has_less_than_its_share() -> None:
    """A tenth of the pool: two blocks of twenty."""
    policy = make_policy("s3fifo", 20)
    policy.admitted((0,), [b"back"])
    policy.evicted(Choice((0,), NO_IDS), [b"back"])
    policy.recalled([b"back"])
    policy.admitted((0,), [b"back"])
    policy.admitted((1,), [b"new"])
    assert victims(policy, 1) == [0]
    policy.admitted((2,), [b"newer"])
    assert victims(policy, 1) == [1]


def test_s3fifo_restored_knows_how_many_may_go() -> None:
    """Blocks that were used as often as is counted are among them, blocks in use are not."""
    policy, restored = make_policy("s3fifo", 8), make_policy("s3fifo", 8)
    policy.admitted((2, 1, 0), [b"c", b"b", b"a"])
    use(policy, 0, 0, 0, 0)
    policy.busy((1,))
    restored.restore(policy.snapshot())
    assert len(restored) == 2
    assert sorted(victims(restored, 2)) == [0, 2]


def sieve_of(*slots: int) -> EvictionPolicy:
    """These blocks were stored one after the other."""
    policy = make_policy("sieve", 10)
    for slot in slots:
        policy.admitted((slot,), [b"key %d" % slot])
    return policy


def evict(policy: EvictionPolicy, count: int) -> Choice:
    """Carry out what the policy chooses."""
    choice = policy.choose(count, ())
    assert choice is not None
    policy.evicted(choice, [b"gone"] * count)
    return choice


def test_sieve_goes_on_where_its_hand_rests() -> None:
    """A used block stays in its place, and is not met again before the hand has been everywhere."""
    policy = sieve_of(0, 1, 2, 3, 4)
    use(policy, 0, 2)
    assert evict(policy, 1) == Choice((1,), (0,))
    assert evict(policy, 1) == Choice((3,), (2,))
    assert victims(policy, 3) == [4, 0, 2]


def test_sieve_begins_at_the_oldest_after_the_newest() -> None:
    """A block that is stored after the hand has passed the newest one waits for its turn."""
    policy = sieve_of(0, 1)
    use(policy, 0)
    assert evict(policy, 1) == Choice((1,), (0,))
    policy.admitted((2,), [b"new"])
    assert victims(policy, 2) == [0, 2]


def test_sieve_takes_used_blocks_when_all_were_used() -> None:
    """The first lap only clears the marks; blocks in use are passed over in every lap."""
    policy = sieve_of(0, 1, 2, 3)
    use(policy, 0, 1, 2, 3)
    policy.busy((1,))
    assert evict(policy, 1) == Choice((0,), ())
    assert evict(policy, 1) == Choice((2,), (1,))
    policy.idle((1,))
    assert victims(policy, 2) == [3, 1]


def test_a_victim_that_was_used_is_no_further_lap_of_sieve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hand rests where it took a used block. The next choice ends the lap, and finds who was passed."""
    monkeypatch.setattr(UseCountingPolicy, "most_passed", 2)
    policy = sieve_of(0, 1, 2, 3, 4)
    use(policy, 0, 1, 2, 3, 4)
    assert evict(policy, 1) == Choice((2,), (0, 1))
    assert evict(policy, 1) == Choice((0,), ())
    assert evict(policy, 3) == Choice((1, 3, 4), ())


@pytest.mark.parametrize(
    ("most_passed", "expected"), [(3, Choice((0,), ())), (2, Choice((2,), (0, 1))), (0, Choice((0,), ()))]
)
def test_sieve_goes_around_no_more_blocks_than_it_may_pass(
    most_passed: int, expected: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UseCountingPolicy, "most_passed", most_passed)
    policy = sieve_of(0, 1, 2)
    use(policy, 0, 1, 2)
    assert victims(policy, 1) == list(expected.victims)
    assert evict(policy, 1) == expected


def sieve_with_hand() -> EvictionPolicy:
    """The hand has passed 0, 1 and 2; 3 and 4 are ahead. All were used since then."""
    policy = sieve_of(0, 1, 2, 5, 3, 4)
    use(policy, 0, 1, 2)
    assert evict(policy, 1) == Choice((5,), (0, 1, 2))
    use(policy, 0, 1, 2, 3, 4)
    return policy


@pytest.mark.parametrize(("most_passed", "following"), [(5, 1), (4, 6)])
def test_sieve_clears_marks_only_where_its_hand_went(
    most_passed: int, following: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice around the pool if it has no more blocks than may be passed over; else not beyond its newest."""
    policy = sieve_with_hand()
    monkeypatch.setattr(UseCountingPolicy, "most_passed", most_passed)
    assert evict(policy, 3) == Choice((3, 4, 0), ())
    policy.admitted((6,), [b"new"])
    assert victims(policy, 1) == [following]


def test_a_lap_of_sieve_passes_over_so_many_blocks_on_both_sides_of_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Block 3 is in use, and not passed over any more."""
    policy = sieve_with_hand()
    policy.busy((3,))
    monkeypatch.setattr(UseCountingPolicy, "most_passed", 2)
    assert evict(policy, 2) == Choice((2, 4), (0, 1))


def s3fifo_main() -> EvictionPolicy:
    """Blocks 0 to 3 are in main, and were used twice, but 1 only once."""
    policy = make_policy("s3fifo", 40)
    keys = [b"key %d" % number for number in range(4)]
    policy.adopted((3, 2, 1, 0), keys)
    policy.evicted(Choice((0, 1, 2, 3), ()), keys[::-1])
    policy.recalled(keys)
    policy.adopted((3, 2, 1, 0), keys)
    use(policy, 0, 0, 1, 2, 2, 3, 3)
    return policy


@pytest.mark.parametrize(
    ("most_passed", "expected"),
    [(4, Choice((1,), (0,))), (3, Choice((3,), (0, 1, 2))), (0, Choice((0,), ()))],
)
def test_s3fifo_goes_around_no_more_blocks_than_it_may_pass(
    most_passed: int, expected: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UseCountingPolicy, "most_passed", most_passed)
    assert evict(s3fifo_main(), 1) == expected


def test_a_victim_that_was_used_is_no_further_pass_of_s3fifo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the blocks that were passed over count as used once less."""
    policy = s3fifo_main()
    monkeypatch.setattr(UseCountingPolicy, "most_passed", 1)
    assert evict(policy, 1) == Choice((1,), (0,))
    monkeypatch.setattr(UseCountingPolicy, "most_passed", 3)
    assert evict(policy, 1) == Choice((0,), (2, 3))


@pytest.mark.parametrize("count", [1, SMALL + 1])
@pytest.mark.parametrize("name", ["s3fifo", "sieve"])
def test_a_large_pool_of_used_blocks_is_not_passed_over_in_one_choice(name: str, count: int) -> None:
    """An event names each block that was passed over, and the scheduler waits meanwhile."""
    capacity = 3 * UseCountingPolicy.most_passed
    policy, slots = make_policy(name, capacity), np.arange(capacity)
    policy.adopted(slots, [b"key"] * capacity)
    for _ in range(3):
        policy.touched(slots)
    choice = policy.choose(count, ())
    assert choice is not None
    assert len(choice.moved) == UseCountingPolicy.most_passed


OUT_OF_TREE = """
from kvsm.core.policies import Choice, EvictionPolicy
from kvsm.core.policies.lru import LRUPolicy

class Unfinished(EvictionPolicy):
    def __init__(self, capacity):
        pass

class MostRecentlyUsed(LRUPolicy):
    def choose(self, count, protected):
        newest = [slot for slot in reversed(list(self._queue)) if slot not in protected][:count]
        return Choice(tuple(newest), ()) if len(newest) == count else None
"""


def test_a_policy_plugs_in_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`package.module:Class` names a policy outside of this package."""
    (tmp_path / "my_policy.py").write_text(OUT_OF_TREE)
    monkeypatch.syspath_prepend(tmp_path)
    policy = make_policy("my_policy:MostRecentlyUsed", 4)
    policy.admitted((0, 1, 2), [b"a", b"b", b"c"])
    assert policy.choose(1, ()) == Choice((0,), ())


@pytest.mark.parametrize("method", ["admitted(self, slots, keys)", "touched(self, slots)"])
def test_a_policy_that_takes_no_parent_is_refused(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would fail in the fold, at the first prompt that is stored in pieces."""
    module = f"deaf_{method[:5]}"
    text = f"from kvsm.core.policies.lru import LRUPolicy\n\nclass Deaf(LRUPolicy):\n    def {method}: pass\n"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"parent.*EvictionPolicy"):
        make_policy(f"{module}:Deaf", 4)


def test_a_snapshot_of_its_own_is_copied_whole() -> None:
    """A policy that inherits `freeze` from a built-in one would lose what it adds to the snapshot."""

    class WithMore(LRUPolicy):
        def snapshot(self) -> bytes:
            return b"more" + super().snapshot()

    policy = WithMore(4)
    policy.admitted((0, 1), [b"a", b"b"])
    assert whole(policy.freeze()) == policy.snapshot()


def test_a_policy_that_lacks_methods_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass of `EvictionPolicy` cannot leave out what has no default, and is told what that is."""
    (tmp_path / "my_policy.py").write_text(OUT_OF_TREE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_policy", raising=False)
    with pytest.raises(ConfigError, match=r"abstract class Unfinished .*admitted.*snapshot"):
        make_policy("my_policy:Unfinished", 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lfu", f"choose one of {', '.join(POLICIES)}, or package.module:Class"),
        ("", "choose one of"),
        ("no_such_module:Policy", "cannot be made: ModuleNotFoundError: No module named 'no_such_module'"),
        (":Policy", "cannot be made: ValueError: Empty module name"),
        ("kvsm.core.policies:NoSuchPolicy", "has no attribute 'NoSuchPolicy'"),
        ("kvsm.core.policies:Choice", "cannot be made"),
        ("builtins:bytearray", "lacks admitted, adopted, busy"),
        ("builtins:object", "cannot be made"),
    ],
)
def test_a_name_that_is_no_policy_is_refused(name: str, message: str) -> None:
    """The error names the policy asked for and says what is wrong with it."""
    with pytest.raises(ConfigError) as caught:
        make_policy(name, 8)
    assert repr(name) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(("size", "shown"), [(100, "m" * 100), (101, "m" * 100 + "..")])
def test_name_of_a_foreign_policy_is_shown_as_far_as_a_person_reads(size: int, shown: str) -> None:
    """A file may name anything. What may be allowed is told in the same words."""
    with pytest.raises(ConfigError) as caught:
        refuse_foreign("m" * size, ())
    assert str(caught.value).count(repr(shown)) == 2
    refuse_foreign("m" * size, ("m" * size,))


@pytest.mark.parametrize("most_passed", [400, 70, 0])
@pytest.mark.parametrize("count", range(SMALL, 35))
def test_search_for_many_victims_finds_what_a_search_for_each_would(count: int, most_passed: int) -> None:
    """Victims lie far apart, so that the search goes through several windows; one may end with the last.
    What is in use is no victim, however few blocks are passed over."""
    queue, uses = SlotQueue(400), UseCounts(400, most=1)
    queue.append(np.arange(400))
    uses.admit(np.arange(400))
    idle = set(range(0, 400, 12))
    uses.begin_use(tuple(slot for slot in range(400) if slot not in idle))
    victims, passed = uses.search(queue, count, range(1), frozenset({24}), most_passed)
    expected = sorted(idle - {24})[:count]
    behind = expected[-1] if len(expected) == count else 400
    assert list(victims) == expected
    assert list(passed) == [slot for slot in range(behind) if slot not in expected][:most_passed]


@pytest.mark.parametrize("count", [SMALL, SMALL + 1])
def test_search_leaves_out_what_an_earlier_search_took(count: int) -> None:
    """Blocks with a lower count are neither victims nor passed over."""
    queue, uses = SlotQueue(80), UseCounts(80, most=1)
    queue.append(np.arange(80))
    uses.admit(np.arange(80))
    uses.end_use(np.arange(1, 80, 2))
    victims, passed = uses.search(queue, count, range(1, 2), frozenset(), most_passed=0)
    assert list(victims) == list(range(1, 2 * count, 2))
    assert list(passed) == []
