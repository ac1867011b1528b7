"""Simulate the demand of a log on a host pool of another size, policy or store threshold.

    simulate(demand, Scenario(host_blocks=4000, policy="arc", store_threshold=1))

The eviction policies are kvsm's own code. The pool around them is a model: a slot is free, filled or being
copied. It follows the rules of `kvsm.core.offloader.storing` and `kvsm.core.scheduler.offer_batch`:

- a lookup serves the prefix of its blocks that the pool has, and holds it until the load has ended;
- an offer touches the blocks that the pool has, and stores the others as far as there is room;
- blocks that found no room are offered again when a copy has ended;
- a request that ends offers all its blocks again if the pool has evicted any since it was admitted;
- a block is stored with its `store_threshold`-th offer.

Some inputs come from the log, although another pool would change them a little: when requests come and go,
which blocks the device has, and how many steps a copy takes. Copies do not fail. A lookup that finds a block
in flight waits for it.

A restart ends all copies: unfinished stores leave nothing, and stored blocks stay. The sizes and options of
the log's first process are used throughout; restarts with others are not validated.

Not modelled: after a reset the core does not store again blocks that a load brought before the reset. The
simulation stores them, so its prediction for a log with many resets is up to 1.4 points too high.
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
    """The result of some lookups, in device blocks.

    lookups: number of lookups.
    asked: blocks that they asked for.
    on_device, on_host: how many of these the device had, and the host served.
    stored, evicted: host slots that were filled, and emptied to make room; 0 in a log's own result.
    """

    lookups: int
    asked: int
    on_device: int
    on_host: int
    stored: int = 0
    evicted: int = 0

    @property
    def host_share(self) -> float:
        """The share of the asked blocks that the host served."""
        return self.on_host / self.asked if self.asked else 0.0

    @property
    def found_share(self) -> float:
        """The share of the asked blocks that were not computed: on the device, or served by the host."""
        return (self.on_device + self.on_host) / self.asked if self.asked else 0.0


def counted_lookups(demand: Demand, window: Window = EVERYTHING) -> list[Lookup]:
    """The lookups that count, as in all figures of a run: each request's used lookup at its first admission.

    `simulate` serves the lookups of resumed requests too, but they do not count.

    window: only lookups in it count.
    """
    lookups = [operation for operation in demand.operations if isinstance(operation, Lookup)]
    return [lookup for lookup in lookups if not lookup.resumed and lookup.seq in window]


def recorded(lookups: Sequence[Lookup]) -> Served:
    """The log's own result for these lookups."""
    return _served(lookups, {lookup.seq: lookup.on_host for lookup in lookups})


def _served(lookups: Sequence[Lookup], on_host: Mapping[int, int]) -> Served:
    return Served(
        len(lookups),
        sum(lookup.asked for lookup in lookups),
        sum(lookup.on_device for lookup in lookups),
        sum(on_host[lookup.seq] for lookup in lookups),
    )


def simulate(demand: Demand, scenario: Scenario, lookups: Sequence[Lookup]) -> Served:
    """Predict what the host would have served.

    lookups: the lookups that count (`counted_lookups`). All operations are simulated, so that earlier ones
        fill the pool.

    Raises `ConfigError` for an unknown policy.
    """
    pool, on_host = _Pool(demand, scenario), {}
    for operation in demand.operations:
        pool.go_to(operation.step)
        if isinstance(operation, Lookup):
            on_host[operation.seq] = pool.lookup(operation)
        else:
            _STEPS[type(operation)](pool, operation)
    served = _served(lookups, on_host)
    served.stored, served.evicted = pool.stored, pool.evicted
    return served


class _Cursor:
    """How far a request has offered its chunks.

    chain: its keys. settled, offered: as in `BlocksOffered`, in chunks.
    admitted_at: number of evictions before it was admitted.
    """

    __slots__ = ("admitted_at", "chain", "offered", "settled")

    def __init__(self, chain: Sequence[int]) -> None:
        self.chain: Numbers = np.array(chain, dtype=np.int64)
        self.settled = self.offered = self.admitted_at = 0


_Runs = Sequence[tuple[int, int]]
"""(place, key) of the first block of each run in a batch: the block at this place continues the block of this
key; -1: it begins a prompt."""


class _Copy(NamedTuple):
    """A copy in flight.

    ends: the step at which it ends.
    number: orders copies that end in the same step.
    epoch: the epoch in which it began; a reset begins another one.
    runs: of the stored blocks.
    """

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
        # The last entry is for the key UNKNOWN, which is -1, and stays empty.
        self._slot_of: Numbers = np.full(len(demand.keys) + 1, -1, dtype=np.int64)
        self._cursors: dict[int, _Cursor] = {}
        self._copies: list[_Copy] = []
        self._step = self._started = self._epoch = 0
        self._waiting: dict[int, None] = {}
        """Requests (lives) with offered chunks that found no room."""
        self._changed = False
        """Whether a copy has ended since these chunks were offered."""
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
        """Fill the empty pool with the keys that it had where the log begins, the oldest first."""
        if keys:
            filled = self._take(np.array(keys, dtype=np.int64))
            self._readable[filled] = True
            for slot, key in zip(filled.tolist(), keys):
                self._policy.admitted((slot,), (self._demand.keys[key],))

    # The operations.

    def lookup(self, lookup: Lookup) -> int:
        """Serve the prefix that the pool has. Returns how many device blocks it adds to the device's hit."""
        cursor = self._cursor(lookup.life)
        found = self._slot_of[cursor.chain[lookup.first : lookup.end]]
        lacking = np.flatnonzero(found < 0)
        hits = found[: lacking[0]] if len(lacking) else found
        cursor.admitted_at = self.evicted
        if not len(hits):
            return 0
        held = hits[self._readable[hits]]
        self._hold(held)
        self._begin(held, is_store=False)
        chunk = self._demand.config.blocks_per_chunk
        return max(0, (lookup.first + len(hits)) * chunk - lookup.on_device)

    def offer(self, offers: Offers) -> None:
        """Offer the chunks that requests have computed."""
        self._offer([(life, self._cursor(life), upto) for life, upto in offers.offers])

    def preempt(self, preempted: Preempted) -> None:
        """Move the request's cursor back to the start: it will offer everything again."""
        cursor = self._cursor(preempted.life)
        cursor.settled = cursor.offered = 0
        self._waiting.pop(preempted.life, None)

    def finish(self, finished: Finished) -> None:
        """Offer a request's chunks for the last time: all if the pool has evicted since its admission."""
        cursor = self._cursor(finished.life)
        if finished.chunks:
            if self.evicted > cursor.admitted_at:
                cursor.settled = 0
            self._offer([(finished.life, cursor, finished.chunks)])
        self._waiting.pop(finished.life, None)
        del self._cursors[finished.life]

    def reset(self, _emptied: Emptied) -> None:
        """Empty the pool, and move all cursors back to the start."""
        self._empty()
        self._epoch += 1
        self._waiting.clear()
        for cursor in self._cursors.values():
            cursor.settled = cursor.offered = 0

    def restart(self, _cut_off: CutOff) -> None:
        """End all requests, copies and holds of the last process. Unfinished stores leave nothing."""
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
        """Advance to a step: end the copies that are done by then, and offer again what found no room."""
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
        """The keys of `part` that have enough offers for `store_threshold`, or that the pool has.

        Counts the offers between `cursor.offered` and `upto`, so each key counts once for each request.
        """
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
        """Touch the keys that the pool has, and store the others. Returns the keys that found no room.

        begins: first key of each request's part of the offer -> the key before it in the prompt; -1: none.
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
        """Split the blocks at these places of an offer into runs, each with the key that its first continues.

        Within a run each block continues the one before it.
        """
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
        """Yield (slots of a run, slot of the block that it continues), the last run first.

        The second is None if the run begins a prompt. If the pool lacks the continued block, it is the slot
        that would be evicted next; None: there is none.
        """
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
        """Assign free slots to these keys. They are not readable yet."""
        filled = np.array([self._free.pop() for _ in range(len(keys))], dtype=np.int64)
        self._slot_of[keys] = filled
        self._key_in[filled] = keys
        self._readable[filled] = False
        return filled

    def _make_room(self, new: Numbers, protected: Numbers) -> int:
        """Evict to make room for the keys of `new`. Returns for how many of them there is room.

        protected: slots that must not be evicted.
        """
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
    """Slots in the form that policies expect: a tuple if there are few."""
    return tuple(slots.tolist()) if len(slots) <= SMALL else slots


def _distinct(keys: Numbers) -> Numbers:
    """Remove duplicates, keeping the first of each key."""
    first = np.unique(keys, return_index=True)[1]
    return keys if len(first) == len(keys) else keys[np.sort(first)]
