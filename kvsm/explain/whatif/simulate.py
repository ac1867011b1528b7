"""The demand of a log, given to a host pool of another size, policy or store threshold.

    simulate(demand, Scenario(host_blocks=4000, policy="arc", store_threshold=1))

The eviction policy is kvsm's own code. Around it stands a pool in which a slot is free, filled or under a
copy, and which follows the rules of `kvsm.core.offloader.storing` and `kvsm.core.scheduler.offer_batch`:

- a lookup serves the prefix of its blocks that the pool has, and holds it until the load has ended;
- an offer touches what the pool has, and stores the rest, as far as there is room;
- what found no room is offered again when a copy has ended;
- a request that ends offers all its blocks again, if the pool has evicted any since it was admitted;
- a block is stored with its `store_threshold`-th offer.

What is taken from the log, and would not be quite the same: when requests come and go, what the device has,
and how many steps a copy takes. Copies do not fail. A lookup that meets a block in flight waits for it.

At a restart everything under way ends: a store leaves nothing, and what was stored stays. The log's sizes and
options are those with which it began. A restart with others is not validated.

Left out: after a reset the core does not store again what a load had brought before it. Here it is stored, so
a log with many resets is predicted up to 1.4 points too well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.core.ledger import OfferHistory
from kvsm.core.policies import make_policy
from kvsm.events import OffloadConfig
from kvsm.explain.story.window import Window
from kvsm.explain.whatif.demand import (
    CutOff,
    Demand,
    Emptied,
    Finished,
    Lookup,
    Offers,
    Operation,
    Preempted,
)
from kvsm.ids import SMALL, IdArray

Numbers = NDArray[np.int64]

EVERYTHING = Window()


class Scenario(msgspec.Struct, frozen=True):
    """A configuration to try. Its fields are fields of `OffloadConfig`."""

    host_blocks: int
    policy: str
    store_threshold: int

    @classmethod
    def of(cls, config: OffloadConfig) -> Scenario:
        """The configuration of a log."""
        return cls(config.host_blocks, config.policy, config.store_threshold)


class Served(msgspec.Struct):
    """What lookups asked for, in device blocks, and who had it.

    stored, evicted: host slots that were filled, and emptied to make room. 0 in what a log itself says.
    """

    lookups: int
    asked: int
    on_device: int
    on_host: int
    stored: int = 0
    evicted: int = 0

    @property
    def host_share(self) -> float:
        """The share of the blocks that the host served."""
        return self.on_host / self.asked if self.asked else 0.0

    @property
    def found_share(self) -> float:
        """The share of the blocks that the device had or the host served: these were not computed again."""
        return (self.on_device + self.on_host) / self.asked if self.asked else 0.0


def counted_lookups(demand: Demand, window: Window = EVERYTHING) -> list[Lookup]:
    """The lookups used at the first admission of each request, as in all figures of a run. `simulate` serves
    a resumed request like any other, but does not count it.

    window: events outside of it do not count.
    """
    lookups = [one for one in demand.operations if isinstance(one, Lookup)]
    return [one for one in lookups if not one.resumed and one.seq in window]


def recorded(lookups: Sequence[Lookup]) -> Served:
    """What the log itself says of these lookups."""
    return _served(lookups, {one.seq: one.on_host for one in lookups})


def _served(lookups: Sequence[Lookup], on_host: Mapping[int, int]) -> Served:
    return Served(
        len(lookups),
        sum(one.asked for one in lookups),
        sum(one.on_device for one in lookups),
        sum(on_host[one.seq] for one in lookups),
    )


def simulate(demand: Demand, scenario: Scenario, lookups: Sequence[Lookup]) -> Served:
    """What the host would have served.

    lookups: those that are counted (`counted_lookups`). All operations before them warm the pool.

    Raises `ConfigError` for a policy that cannot be made.
    """
    pool, on_host = _Pool(demand, scenario), {}
    for one in demand.operations:
        pool.go_to(one.step)
        if isinstance(one, Lookup):
            on_host[one.seq] = pool.lookup(one)
        else:
            _STEPS[type(one)](pool, one)
    served = _served(lookups, on_host)
    served.stored, served.evicted = pool.stored, pool.evicted
    return served


class _Cursor:
    """How far a request has offered its chunks. admitted_at: evictions before it was admitted."""

    __slots__ = ("admitted_at", "chain", "offered", "settled")

    def __init__(self, chain: Sequence[int]) -> None:
        self.chain: Numbers = np.array(chain, dtype=np.int64)
        self.settled = self.offered = self.admitted_at = 0


_Runs = Sequence[tuple[int, int]]
"""(place, key): in a batch of blocks, the one at this place continues the block of this key; -1: it begins a
prompt."""


class _Copy(NamedTuple):
    """A copy under way. number: decides between copies that end in the same step."""

    ends: int
    number: int
    is_store: bool
    slots: Numbers
    epoch: int
    runs: _Runs = ()


class _Pool:
    """A host pool under one scenario."""

    def __init__(self, demand: Demand, scenario: Scenario) -> None:
        self._demand, self._scenario = demand, scenario
        # The last place stands for UNKNOWN, which is -1, and stays empty.
        self._slot_of: Numbers = np.full(len(demand.keys) + 1, -1, dtype=np.int64)
        self._cursors: dict[int, _Cursor] = {}
        self._copies: list[_Copy] = []
        self._step = self._started = self._epoch = 0
        self._waiting: dict[int, None] = {}
        """Lives with offered chunks that found no room."""
        self._changed = False
        """Whether a copy has ended since they were offered."""
        self.stored = self.evicted = 0
        config = msgspec.structs.replace(demand.config, host_blocks=scenario.host_blocks)
        self._offers = OfferHistory(config.counted_keys)
        self._empty()
        self._fill(demand.initial[-scenario.host_blocks :])

    def _empty(self) -> None:
        size = self._scenario.host_blocks
        self._policy = make_policy(self._scenario.policy, size)
        self._slot_of[:] = -1
        self._key_in: Numbers = np.full(size, -1, dtype=np.int64)
        self._readable = np.zeros(size, dtype=np.bool_)
        self._holds: Numbers = np.zeros(size, dtype=np.int64)
        self._free = list(range(size - 1, -1, -1))

    def _fill(self, keys: Sequence[int]) -> None:
        """Put keys into the empty pool, the oldest first: the log begins with a pool that is not empty."""
        if keys:
            filled = self._take(np.array(keys, dtype=np.int64))
            self._readable[filled] = True
            for slot, key in zip(filled.tolist(), keys):
                self._policy.admitted((slot,), (self._demand.keys[key],))

    # The operations.

    def lookup(self, one: Lookup) -> int:
        """Serve the prefix that the pool has. Returns how many device blocks of the request it covers."""
        cursor = self._cursor(one.life)
        found = self._slot_of[cursor.chain[one.first : one.end]]
        lacking = np.flatnonzero(found < 0)
        hits = found[: lacking[0]] if len(lacking) else found
        cursor.admitted_at = self.evicted
        if not len(hits):
            return 0
        held = hits[self._readable[hits]]
        self._hold(held)
        self._begin(held, is_store=False)
        chunk = self._demand.config.blocks_per_chunk
        return max(0, (one.first + len(hits)) * chunk - one.on_device)

    def offer(self, one: Offers) -> None:
        """Requests offer what they have computed."""
        self._offer([(life, self._cursor(life), upto) for life, upto in one.offers])

    def preempt(self, one: Preempted) -> None:
        """The request will offer everything again."""
        cursor = self._cursor(one.life)
        cursor.settled = cursor.offered = 0
        self._waiting.pop(one.life, None)

    def finish(self, one: Finished) -> None:
        """The request offers for the last time: everything, if the pool has evicted since it was admitted."""
        cursor = self._cursor(one.life)
        if one.chunks:
            if self.evicted > cursor.admitted_at:
                cursor.settled = 0
            self._offer([(one.life, cursor, one.chunks)])
        self._waiting.pop(one.life, None)
        del self._cursors[one.life]

    def reset(self, _one: Emptied) -> None:
        """Nothing that was stored can be served."""
        self._empty()
        self._epoch += 1
        self._waiting.clear()
        for cursor in self._cursors.values():
            cursor.settled = cursor.offered = 0

    def restart(self, _one: CutOff) -> None:
        """Everybody of the last process is gone: its copies leave nothing, and its holds end."""
        for copy in self._copies:
            if copy.epoch != self._epoch:
                continue
            if copy.is_store:
                self._slot_of[self._key_in[copy.slots]] = -1
                self._free.extend(copy.slots.tolist())
            else:
                self._let_go(copy.slots)
        self._copies.clear()
        self._cursors.clear()
        self._waiting.clear()
        self._changed = False

    def go_to(self, step: int) -> None:
        """Let the copies end that are over before this step, and offer again what found no room."""
        while self._copies and self._copies[0].ends <= step:
            self._end(heappop(self._copies))
        if self._changed and self._waiting:
            waiting = [(life, self._cursor(life)) for life in self._waiting]
            self._changed = False
            self._offer([(life, cursor, cursor.offered) for life, cursor in waiting])
        self._step = step

    # Copies and holds.

    def _begin(self, slots: Numbers, runs: _Runs = (), *, is_store: bool) -> None:
        steps = self._demand.store_steps if is_store else self._demand.load_steps
        self._started += 1
        heappush(self._copies, _Copy(self._step + steps, self._started, is_store, slots, self._epoch, runs))

    def _end(self, copy: _Copy) -> None:
        self._changed = True
        if copy.epoch != self._epoch:
            return
        if copy.is_store:
            self._readable[copy.slots] = True
            for run, parent in self._each_run(copy.slots, copy.runs):
                self._policy.admitted(_ids(run), self._keys_in(run), parent)
            self._offers.forget(self._key_in[copy.slots].tolist())
        else:
            self._let_go(copy.slots)

    def _hold(self, slots: Numbers) -> None:
        idle = slots[self._holds[slots] == 0]
        self._holds[slots] += 1
        if len(idle):
            self._policy.busy(_ids(idle))

    def _let_go(self, slots: Numbers) -> None:
        self._holds[slots] -= 1
        idle = slots[self._holds[slots] == 0]
        if len(idle):
            self._policy.idle(_ids(idle))

    # Stores.

    def _cursor(self, life: int) -> _Cursor:
        cursor = self._cursors.get(life)
        if cursor is None:
            cursor = self._cursors[life] = _Cursor(self._demand.chains[life])
        return cursor

    def _offer(self, offers: Sequence[tuple[int, _Cursor, int]]) -> None:
        parts: list[Numbers] = []
        begins: dict[int, int] = {}
        for _, cursor, upto in offers:
            upto = max(upto, cursor.offered)
            part = cursor.chain[cursor.settled : upto]
            part = part[part >= 0]
            if len(part):
                before = int(cursor.chain[cursor.settled - 1]) if cursor.settled else -1
                begins.setdefault(int(part[0]), before)
            parts.append(self._often_enough(part, cursor, upto))
            cursor.offered = upto
        left = self._store(_distinct(np.concatenate(parts) if len(parts) > 1 else parts[0]), begins)
        for life, cursor, _ in offers:
            cursor.settled = cursor.offered
            self._waiting.pop(life, None)
            if len(left):
                places = np.flatnonzero(np.isin(cursor.chain[: cursor.offered], left))
                if len(places):
                    cursor.settled = int(places[0])
                    self._waiting[life] = None

    def _often_enough(self, part: Numbers, cursor: _Cursor, upto: int) -> Numbers:
        """The keys that `store_threshold` lets be stored. A request counts each of its keys once."""
        threshold = self._scenario.store_threshold
        if threshold <= 1:
            return part
        fresh = cursor.chain[cursor.offered : upto]
        fresh = fresh[fresh >= 0]
        self._offers.count(fresh[self._slot_of[fresh] < 0].tolist())
        times = self._offers.times
        enough = [times.get(key, 0) >= threshold for key in part.tolist()]
        kept: Numbers = part[np.array(enough, dtype=np.bool_) | (self._slot_of[part] >= 0)]
        return kept

    def _store(self, keys: Numbers, begins: Mapping[int, int]) -> Numbers:
        """Touch the keys that the pool has and store the others. Returns those without room.

        begins: of the keys, those with which a request's part of the offer begins -> the key before them, or
        -1.
        """
        slots = self._slot_of[keys]
        places = np.flatnonzero(slots >= 0)
        places = places[self._readable[slots[places]]]
        resident = slots[places]
        for run, parent in self._each_run(resident, self._runs(keys, places, begins)):
            idle = run[self._holds[run] == 0]
            if len(idle):
                self._policy.touched(_ids(idle), parent)
        places = np.flatnonzero(slots < 0)
        if not len(places):
            return keys[places]
        room = self._make_room(keys[places], resident)
        wanted, left = places[:room], places[room:]
        if room:
            self.stored += room
            runs = self._runs(keys, wanted, begins)
            self._begin(self._take(keys[wanted]), runs, is_store=True)
        return keys[left]

    def _runs(self, keys: Numbers, places: Numbers, begins: Mapping[int, int]) -> _Runs:
        """What the blocks at these places of an offer continue, where it is not the block at the place
        before."""
        first = np.isin(keys, list(begins))
        runs, number = list[tuple[int, int]](), np.cumsum(first)
        for n in np.flatnonzero((np.diff(places, prepend=-2) != 1) | first[places]).tolist():
            place = int(places[n])
            key = begins[int(keys[place])] if first[place] else int(keys[place - 1])
            in_one_run = n and number[places[n - 1]] == number[place]
            if not in_one_run or self._slot_of[key] >= 0:
                runs.append((n, key))
        return runs

    def _each_run(self, slots: Numbers, runs: _Runs) -> Iterator[tuple[Numbers, int | None]]:
        """The runs of a batch, the last one first, and the slot of what each of them continues. If the pool
        does not have that, it is the slot that would be evicted next."""
        end = len(slots)
        for place, key in reversed(runs):
            parent = None if key < 0 else int(self._slot_of[key])
            if parent is not None and parent < 0:
                choice = self._policy.choose(1, ())
                parent = None if choice is None else int(choice.victims[0])
            yield slots[place:end], parent
            end = place
        if end:
            yield slots[:end], None

    def _take(self, keys: Numbers) -> Numbers:
        """Free slots for these keys. They cannot be read yet."""
        filled = np.array([self._free.pop() for _ in range(len(keys))], dtype=np.int64)
        self._slot_of[keys] = filled
        self._key_in[filled] = keys
        self._readable[filled] = False
        return filled

    def _make_room(self, new: Numbers, protected: Numbers) -> int:
        """Evict for the keys of `new`. Returns how many of them there is room for."""
        policy, free = self._policy, len(self._free)
        if len(new) > free:
            evictable = len(policy) - int(np.count_nonzero(self._holds[protected] == 0))
            new = new[: free + evictable]
        names = [self._demand.keys[key] for key in new.tolist()]
        recalled = policy.recall(names)
        if recalled:
            policy.recalled(recalled)
        lacking = len(new) - free
        if lacking <= 0:
            return len(new)
        choice = policy.choose(lacking, frozenset(protected.tolist()))
        if choice is None:
            return free
        victims = np.asarray(choice.victims, dtype=np.int64)
        policy.evicted(choice, self._keys_in(victims))
        self._slot_of[self._key_in[victims]] = -1
        self._readable[victims] = False
        self._free.extend(victims.tolist())
        self.evicted += len(victims)
        return len(new)

    def _keys_in(self, slots: Numbers) -> list[bytes]:
        keys = self._demand.keys
        return [keys[key] for key in self._key_in[slots].tolist()]


_STEPS: dict[type[Operation], Callable[[_Pool, Any], None]] = {
    Offers: _Pool.offer,
    Preempted: _Pool.preempt,
    Finished: _Pool.finish,
    Emptied: _Pool.reset,
    CutOff: _Pool.restart,
}


def _ids(slots: Numbers) -> IdArray:
    """A batch in the form that policies take."""
    return tuple(slots.tolist()) if len(slots) <= SMALL else slots


def _distinct(keys: Numbers) -> Numbers:
    """Each key once, in the order of first use."""
    first = np.unique(keys, return_index=True)[1]
    return keys if len(first) == len(keys) else keys[np.sort(first)]
