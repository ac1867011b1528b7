"""The world of one eviction policy, called as by the ledger, with batches of any size in a large pool.

Blocks are stored, used, touched, voided and evicted. Evicted keys come back, so a policy with ghosts moves
its targets. Each victim search has to protect some blocks; the ledger protects blocks that an offer has found
resident, and blocks that are being copied to another tier. Batches and searches of more than sixteen slots
are arrays, for which a policy has another code path.

- A policy orders exactly the idle blocks: conservation (S1).
- It chooses as many victims as requested, if that many may be evicted: progress (S9).
- No victim is in use: no reuse in flight (S3). None is protected: a match holds what it counts (S7).
- A policy that is asked what it admits answers for each run, and admits no more than was offered (S9).
- A question changes nothing, and a repeated question gives the same answer: determinism (S11).
- A restored policy behaves as the saved one: events are state (S10).

Which blocks a policy should prefer is not checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

import msgspec

from kvsm.check.worlds.drawn_policies import draw_policy
from kvsm.check.worlds.world import Action
from kvsm.core.offloader.admission import may_refuse
from kvsm.core.policies import Choice, make_policy
from kvsm.errors import ConfigError, PropertyBroken
from kvsm.events import OffloadingEvent
from kvsm.ids import NO_IDS, SMALL, IdArray, listed, pack, unpack
from kvsm.properties import Property

_NAMES = ("admit", "admit", "begin_use", "end_use", "end_use", "touch", "void", "evict", "evict", "save")
_OFFERS = ("offer", "offer")
"""More actions, for a policy that refuses blocks."""
_FEWEST_SLOTS, _MOST_SLOTS = 4, 1 << 12
_PROTECTING = ("evict", "offer")
"""The actions that search for victims."""
_QUARTERS = 4
"""The protected share of a search is drawn as a number of quarters below this."""


Drawn = TypeVar("Drawn")


class PolicyWorldOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a policy's world. Raises `ConfigError`. capacity: the number of slots of the pool."""

    policy: str = "lru"
    capacity: int = 20

    def __post_init__(self) -> None:
        if not _FEWEST_SLOTS <= self.capacity <= _MOST_SLOTS:
            message = f"it must be from {_FEWEST_SLOTS} to {_MOST_SLOTS}"
            raise ConfigError(f"capacity is {self.capacity}; {message}")


def draw_policy_options(random: Random) -> PolicyWorldOptions:
    """Draw a policy, and a pool of 20 to 300 slots."""
    return PolicyWorldOptions(
        policy=draw_policy(random),
        capacity=random.choice((20, 60, random.randint(100, 300))),
    )


class PolicyWorld:
    """A `World`; worlds with the same options and actions are equal.

    An action is (name, size of the batch, seed of the batch). `evict` and `offer` also have the number of
    quarters of the blocks that are protected.
    """

    events: tuple[OffloadingEvent, ...] = ()
    check_every = 50

    def __init__(self, options: PolicyWorldOptions) -> None:
        self._name, self._capacity = options.policy, options.capacity
        capacity = options.capacity
        self._policy = make_policy(options.policy, capacity)
        self._names = _NAMES + _OFFERS if may_refuse(self._policy) else _NAMES
        self._free, self._idle, self._used = list(range(capacity)), list[int](), list[int]()
        self._key_of: dict[int, bytes] = {}
        self._gone: list[bytes] = []
        """Keys that left the host, the latest last."""
        self._made = 0
        self._reached: set[str] = set()

    # What may happen.

    def actions(self) -> list[Action]:
        names = dict.fromkeys(self._names)
        return [(name, 1, 0, 0) if name in _PROTECTING else (name, 1, 0) for name in names]

    def draw(self, random: Random) -> Action:
        name, batch = random.choice(self._names), random.randrange(1000)
        most = random.choice((4, SMALL + 2, self._capacity // 2))
        size = random.randint(min(most, SMALL), most) if most > 4 else random.randint(1, most)
        if name in _PROTECTING:
            return (name, size, batch, random.randrange(_QUARTERS))
        return (name, size, batch)

    def do(self, action: Action) -> bool:
        name, *numbers = action
        if name not in self._names or len(numbers) != (3 if name in _PROTECTING else 2):
            return False
        size = int(numbers[0])
        done = size > 0 and bool(getattr(self, f"_do_{name}")(*numbers))
        some = "many" if size > SMALL else "few"
        self._reached.add(f"{self._name}: {name} of {some} blocks: {'done' if done else 'impossible'}")
        if len(self._policy) != len(self._idle):
            message = f"the policy orders {len(self._policy)} blocks, but {len(self._idle)} are idle"
            raise PropertyBroken(Property.CONSERVATION, message)
        return done

    @staticmethod
    def _batch(slots: Sequence[Drawn], size: int, which: int) -> list[Drawn]:
        return Random(which).sample(slots, min(size, len(slots)))

    def _do_admit(self, size: int, which: int) -> bool:
        """Store blocks. Up to half of their keys were on the host before."""
        slots = self._free[: min(size, len(self._free))]
        keys = self._keys(len(slots), which)
        recalled = self._policy.recall(keys)
        if not set(map(bytes, recalled)) <= set(self._gone):
            raise PropertyBroken(Property.EVENTS_ARE_STATE, f"{recalled} are recalled, but were never there")
        self._policy.recalled(recalled)
        self._enter(slots, keys)
        return bool(slots)

    def _keys(self, count: int, which: int) -> list[bytes]:
        """Return keys to store: up to half of them were on the host before, and the others are new."""
        back = self._batch(self._gone, count // 2, which)
        new = [b"key %d" % (self._made + place) for place in range(count - len(back))]
        self._made += len(new)
        return [*back, *new]

    def _enter(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        self._policy.admitted(_ids(slots), keys)
        self._gone = [key for key in self._gone if key not in set(keys)]
        self._key_of.update(zip(slots, keys))
        del self._free[: len(slots)]
        self._idle += slots

    def _do_offer(self, size: int, which: int, quarters: int) -> bool:
        """Offer two runs of new blocks. Those that the policy admits are stored, with evictions."""
        kept = [*self._idle, *self._used]
        protected = frozenset(self._batch(kept, len(kept) * quarters // _QUARTERS, which + 1))
        size = min(size, len(self._free) + len(set(self._idle) - protected))
        keys = self._keys(size, which)
        runs = [size // 2, size - size // 2]
        before = self._policy.snapshot()
        counts, again = (self._policy.admits(keys, runs, len(self._free), protected) for _ in range(2))
        if [*counts] != [*again] or self._policy.snapshot() != before:
            raise PropertyBroken(Property.DETERMINISM, "to ask what is admitted changes it, or the policy")
        if len(counts) != 2 or not all(0 <= count <= most for count, most in zip(counts, runs)):
            message = f"of runs of {runs} blocks, {counts} are admitted"
            raise PropertyBroken(Property.PROGRESS, message)
        first, second = keys[: runs[0]], keys[runs[0] :]
        stored = [*first[: counts[0]], *second[: counts[1]]]
        refused = [key for key in keys if key not in set(stored)]
        lacking = len(stored) - len(self._free)
        if lacking > 0:
            self._evict(lacking, protected)
        self._enter(self._free[: len(stored)], stored)
        self._policy.refused(refused)
        self._gone += [key for key in refused if key not in set(self._gone)]
        self._reached.add(f"{self._name}: offered, {'some' if refused else 'none'} refused")
        return bool(keys)

    def _do_begin_use(self, size: int, which: int) -> bool:
        """Pin blocks, as matches do; at most half of the idle ones, so that some victims remain."""
        batch = self._batch(self._idle, min(size, len(self._idle) // 2), which)
        self._policy.busy(_ids(batch))
        self._move(batch, self._idle, self._used)
        return bool(batch)

    def _do_end_use(self, size: int, which: int) -> bool:
        batch = self._batch(self._used, size, which)
        self._policy.idle(_ids(batch))
        self._move(batch, self._used, self._idle)
        return bool(batch)

    def _do_touch(self, size: int, which: int) -> bool:
        batch = self._batch(self._idle, size, which)
        self._policy.touched(_ids(batch))
        return bool(batch)

    def _do_void(self, size: int, which: int) -> bool:
        """Void blocks, as after bad checksums. They may be idle or in use."""
        batch = self._batch([*self._idle, *self._used], min(size, 3), which)
        self._policy.removed(_ids(batch))
        for group in (self._idle, self._used):
            self._move([slot for slot in batch if slot in group], group, self._free)
        self._leave(batch)
        return bool(batch)

    def _do_save(self, _size: int, _which: int) -> bool:
        """Replace the policy by a restored copy of its snapshot, as the next process does."""
        saved = self._policy.snapshot()
        self._policy = make_policy(self._name, self._capacity)
        self._policy.restore(saved)
        if self._policy.snapshot() != saved:
            raise PropertyBroken(Property.EVENTS_ARE_STATE, "a restored policy saves another state")
        return True

    def _do_evict(self, size: int, which: int, quarters: int) -> bool:
        """Evict blocks to make room for a batch."""
        kept = [*self._idle, *self._used]
        protected = frozenset(self._batch(kept, len(kept) * quarters // _QUARTERS, which + 1))
        return self._evict(size, protected)

    def _evict(self, size: int, protected: frozenset[int]) -> bool:
        choice = self._choose_twice(size, protected)
        may_go = set(self._idle) - protected
        if choice is None:
            if len(may_go) >= size:
                message = f"no {size} victims are found, although {len(may_go)} blocks may be evicted"
                raise PropertyBroken(Property.PROGRESS, message)
            return False
        victims, moved = listed(choice.victims), listed(choice.moved)
        if len(victims) != size or len({*victims, *moved}) != len(victims) + len(moved):
            message = f"of {size} victims, {len(victims)} are named, or one slot is named twice"
            raise PropertyBroken(Property.CONSERVATION, message)
        self._check_victims(victims, protected)
        keys = [self._key_of[slot] for slot in victims]
        self._policy.evicted(Choice(_ids(victims), _ids(moved)), keys)
        self._move(victims, self._idle, self._free)
        self._leave(victims)
        return True

    def _choose_twice(self, count: int, protected: frozenset[int]) -> Choice | None:
        before = self._policy.snapshot()
        choice, again = (self._policy.choose(count, protected) for _ in range(2))
        same = _slots_of(choice) == _slots_of(again)
        if not same or self._policy.snapshot() != before:
            raise PropertyBroken(
                Property.DETERMINISM, "to ask for victims twice changes the answer or the policy"
            )
        return choice

    def _check_victims(self, victims: Sequence[int], protected: frozenset[int]) -> None:
        wrong = [slot for slot in victims if slot not in set(self._idle)]
        if wrong:
            message = f"slots {wrong} are to be evicted, but are not idle"
            raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)
        wrong = [slot for slot in victims if slot in protected]
        if wrong:
            raise PropertyBroken(Property.MATCH_HOLDS, f"slots {wrong} are to be evicted, but are protected")

    def _move(self, slots: Sequence[int], source: list[int], target: list[int]) -> None:
        leaving = set(slots)
        source[:] = [slot for slot in source if slot not in leaving]
        target += slots

    def _leave(self, slots: Sequence[int]) -> None:
        self._gone += [self._key_of.pop(slot) for slot in slots]
        del self._gone[: -2 * self._capacity]

    # What must hold.

    def check(self) -> None:
        """Check that the policy orders exactly the idle blocks. Raises `PropertyBroken`."""
        idle = set(self._idle)
        wrong = [slot for slot in range(self._capacity) if (slot in self._policy) != (slot in idle)]
        if wrong:
            message = f"the policy is wrong about which of slots {wrong} are idle"
            raise PropertyBroken(Property.CONSERVATION, message)

    def wind_down(self) -> Action | None:
        """Return the end of all uses, then the eviction of all blocks, then None."""
        if self._used:
            return ("end_use", len(self._used), 0)
        return ("evict", len(self._idle), 0, 0) if self._idle else None

    def reached(self) -> list[str]:
        """What was done with this policy, for the corpus."""
        return sorted(self._reached)

    def describe(self) -> dict[str, str]:
        counts = {"free": self._free, "idle": self._idle, "in use": self._used}
        return {"policy": self._name, **{name: str(len(slots)) for name, slots in counts.items()}}

    def fingerprint(self) -> bytes:
        return repr((self._free, self._idle, self._used, self._policy.snapshot())).encode()


def _ids(slots: Sequence[int]) -> IdArray:
    """Return these slots as the array that the ledger passes to a policy."""
    return unpack(pack(slots)) if slots else NO_IDS


def _slots_of(choice: Choice | None) -> tuple[Sequence[int], ...] | None:
    return None if choice is None else (listed(choice.victims), listed(choice.moved))
