"""Simulate the demand of a log on a host pool of another size, policy or store threshold.

    simulate(demand, Scenario(host_blocks=4000, policy="arc", store_threshold=1))

The eviction policies are kvsm's own code. The pool around them is a model: a slot is free, filled or being
copied. It follows the rules of `kvsm.core.offloader.storing` and `kvsm.core.scheduler`:

- a lookup serves the prefix of its blocks that the pool has, and holds it until the load has ended;
- an offer touches the blocks that the pool has, and stores the others as far as there is room;
- blocks that a load brought are not offered, and so not touched, before the request ends;
- blocks that found no room are offered again at the end of a step in which a copy has ended; so are blocks
  whose key is being stored from another device block;
- a request that ends offers all its blocks again if the pool has lost one of them, else only the rest;
- a block is stored at its `store_threshold`-th offer, if the policy admits it;
- after a reset, blocks that a load brought before it are not stored from the same device blocks.

Some inputs come from the log, although another pool would change them a little: when requests come and go,
which blocks the device has, and how many steps a copy takes. Copies do not fail. A lookup that finds a block
in flight waits for it.

A restart ends all copies: unfinished stores leave nothing, and stored blocks stay. The sizes and options of
the log's first process are used throughout; restarts with others are not validated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.core.ledger import OfferHistory
from kvsm.core.offloader.admission import Room, ask, may_refuse
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
    loaded: the chunks that a load has brought since its last offer: (first, end).
    found: how many of its chunks were found at its last lookup, on the device or the host.
    stale: keys that a load brought before a reset: they are not stored from its device blocks.
    watched_from: number of evictions when it was admitted, or when it made its first offer without a load.
    refused: chunks that the policy refused since it got its blocks. It does not offer them again.
    """

    __slots__ = ("chain", "found", "loaded", "offered", "refused", "settled", "stale", "watched_from")

    def __init__(self, chain: Sequence[int]) -> None:
        self.chain: Numbers = np.array(chain, dtype=np.int64)
        self.restart()
        self.found = self.watched_from = 0
        self.stale = _NO_KEYS

    def restart(self) -> None:
        """Move it back to the start: all chunks will be offered again."""
        self.settled = self.offered = 0
        self.loaded = _NOTHING
        self.refused = set[int]()

    def load(self, first: int, end: int) -> None:
        """Note that these chunks were loaded: they are not offered until the request ends."""
        if first:
            self.loaded = first, end
        else:
            self.settled = self.offered = end

    def unsettled(self, upto: int) -> list[tuple[int, int]]:
        """The chunks to offer next, as (first, end) of each run, if the request has computed `upto`."""
        first, end = self.loaded
        runs = (
            [(self.settled, min(first, upto)), (max(self.settled, end), upto)]
            if end
            else [(self.settled, upto)]
        )
        for chunk in [chunk for chunk in self.refused if chunk >= self.settled]:
            parts = [((begin, chunk), (chunk + 1, end)) for begin, end in runs if begin <= chunk < end]
            others = [(begin, end) for begin, end in runs if not begin <= chunk < end]
            runs = sorted([*others, *[part for both in parts for part in both if part[0] < part[1]]])
        return runs


_NOTHING = (0, 0)
_NO_KEY = -1
_NO_KEYS: Numbers = np.array((), dtype=np.int64)
_NO_PLACES: Numbers = np.array((), dtype=np.int64)


class _Part(NamedTuple):
    """Chunks of one request that follow each other in a batch.

    before: the key before them; -1: they begin a prompt.
    chunks: their numbers in the request, ascending. keys: their keys.
    """

    life: int
    cursor: _Cursor
    before: int
    chunks: Numbers
    keys: Numbers


class _OfferedBatch:
    """The chunks that requests offer together.

    keys: all of them; a key may be there twice.
    before: the key before each place; -1: the place begins a prompt.
    part: the number of the part of each place.
    begins: whether a part begins at a place.
    is_first: whether the key of a place is not at an earlier place too.
    """

    __slots__ = ("before", "begins", "is_first", "keys", "part", "parts")

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.parts = parts
        self.keys: Numbers = np.concatenate([part.keys for part in parts])
        sizes = [len(part.keys) for part in parts]
        starts = np.cumsum([0, *sizes[:-1]])
        self.part = np.repeat(np.arange(len(parts)), sizes)
        self.begins = np.zeros(len(self.keys), dtype=np.bool_)
        self.begins[starts] = True
        self.before: Numbers = np.roll(self.keys, 1)
        self.before[starts] = [part.before for part in parts]
        self.is_first = np.zeros(len(self.keys), dtype=np.bool_)
        self.is_first[np.unique(self.keys, return_index=True)[1]] = True

    def chunks(self) -> Numbers:
        """The number of the chunk at each place, in its request."""
        chunks: Numbers = np.concatenate([part.chunks for part in self.parts])
        return chunks


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
        self._is_loaded = np.zeros(len(demand.keys) + 1, dtype=np.bool_)
        """Key -> whether the latest device block with this content was written by a load."""
        self._cursors: dict[int, _Cursor] = {}
        self._copies: list[_Copy] = []
        self._step = self._started = self._epoch = 0
        self._waiting: dict[int, None] = {}
        """Requests (lives) with chunks to be offered again: there was no room, or the key is in flight."""
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
        self._life_of: Numbers = np.full(size, -1, dtype=np.int64)
        """The request that stored the block in each slot."""
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
        cursor.watched_from, cursor.stale = self.evicted, _NO_KEYS
        cursor.found = lookup.first + len(hits)
        self._is_loaded[self._key_in[hits]] = True
        if not len(hits):
            return 0
        held = hits[self._readable[hits]]
        self._hold(held)
        self._begin(held, is_store=False)
        chunk, end = self._demand.config.blocks_per_chunk, lookup.first + len(hits)
        cursor.load(-(-lookup.on_device // chunk), end)
        return max(0, end * chunk - lookup.on_device)

    def offer(self, offers: Offers) -> None:
        """Offer the chunks that requests have computed, and those that wait."""
        due = {life: (self._cursor(life), upto) for life, upto in offers.offers}
        self._offer({**due, **{life: waiting for life, waiting in self._again().items() if life not in due}})

    def preempt(self, preempted: Preempted) -> None:
        """Move the request's cursor back to the start: it will offer everything again."""
        cursor = self._cursor(preempted.life)
        cursor.restart()
        cursor.found, cursor.stale = 0, _NO_KEYS
        self._waiting.pop(preempted.life, None)

    def finish(self, finished: Finished) -> None:
        """Offer a request's chunks for the last time: all, if the pool has lost one that is settled."""
        cursor = self._cursor(finished.life)
        if finished.chunks:
            if self._has_lost_one(cursor):
                cursor.settled, cursor.loaded = 0, _NOTHING
            self._offer({finished.life: (cursor, finished.chunks)})
        self._waiting.pop(finished.life, None)
        del self._cursors[finished.life]

    def _has_lost_one(self, cursor: _Cursor) -> bool:
        """Whether the pool lacks a chunk that the request has settled or loaded."""
        if cursor.refused or self.evicted <= cursor.watched_from:
            return False
        known = cursor.chain[: max(cursor.settled, cursor.loaded[1])]
        return bool(np.any(self._slot_of[known[known >= 0]] < 0))

    def reset(self, _emptied: Emptied) -> None:
        """Empty the pool, and move all cursors back to the start."""
        self._empty()
        self._epoch += 1
        self._waiting.clear()
        for cursor in self._cursors.values():
            cursor.restart()
            found = cursor.chain[: cursor.found]
            cursor.stale = np.union1d(cursor.stale, found[self._is_loaded[found]])

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
        """Advance to a step. Copies end at the start of a step; what waits is offered again at its end."""
        while self._step < step:
            self._offer(self._again())
            self._step = min(step, self._copies[0].ends) if self._copies else step
            while self._copies and self._copies[0].ends <= self._step:
                self._end(heappop(self._copies))

    def _again(self) -> dict[int, tuple[_Cursor, int]]:
        """Return the requests with chunks to offer again; none if no copy has ended since the last offer."""
        if not self._changed:
            return {}
        self._changed = False
        waiting = [(life, self._cursor(life)) for life in self._waiting]
        return {life: (cursor, cursor.offered) for life, cursor in waiting}

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

    def _offer(self, offers: Mapping[int, tuple[_Cursor, int]]) -> None:
        """Offer chunks of requests as one batch. offers: (cursor, chunks that are computed), by life."""
        parts: list[_Part] = []
        begun = []
        for life, (cursor, computed) in offers.items():
            upto = max(computed, cursor.offered, cursor.loaded[1])
            if not cursor.offered and cursor.loaded == _NOTHING:
                begun.append(cursor)
            for first, end in cursor.unsettled(upto):
                part = self._part(life, cursor, first, end)
                if len(part.keys):
                    parts.append(part)
            self._is_loaded[cursor.chain[max(cursor.offered, cursor.found) : upto]] = False
            cursor.settled = cursor.offered = upto
            cursor.loaded = _NOTHING
            self._waiting.pop(life, None)
        if parts:
            batch = _OfferedBatch(parts)
            left = self._store(batch)
            for part, chunk in zip(batch.part[left].tolist(), batch.chunks()[left].tolist()):
                cursor = parts[part].cursor
                cursor.settled = min(cursor.settled, chunk)
                self._waiting[parts[part].life] = None
        for cursor in begun:
            cursor.watched_from = self.evicted

    def _part(self, life: int, cursor: _Cursor, first: int, end: int) -> _Part:
        """The chunks from `first` to `end` that a request offers."""
        keys = cursor.chain[first:end]
        kept = keys >= 0
        if self._scenario.store_threshold > 1:
            self._count(cursor.chain[max(first, cursor.offered) : end])
            kept &= self._offered_enough(keys)
        if len(cursor.stale):
            kept &= (self._slot_of[keys] >= 0) | ~np.isin(keys, cursor.stale)
        chunks = first + np.flatnonzero(kept)
        before = int(cursor.chain[chunks[0] - 1]) if len(chunks) and chunks[0] else _NO_KEY
        return _Part(life, cursor, before, chunks, keys[kept])

    def _count(self, keys: Numbers) -> None:
        """Count an offer of each of these keys that the pool lacks. A request counts once per key."""
        self._offers.count(keys[(keys >= 0) & (self._slot_of[keys] < 0)].tolist())

    def _offered_enough(self, keys: Numbers) -> NDArray[np.bool_]:
        """Return which keys have been offered `store_threshold` times, or are in the pool."""
        times, threshold = self._offers.times, self._scenario.store_threshold
        enough = [times.get(key, 0) >= threshold for key in keys.tolist()]
        return np.array(enough, dtype=np.bool_) | (self._slot_of[keys] >= 0)

    def _store(self, batch: _OfferedBatch) -> Numbers:
        """Touch the keys that the pool has, and store the others. Returns the places whose chunks must be
        offered again."""
        slots = self._slot_of[batch.keys]
        is_new = slots < 0
        is_readable = ~is_new & self._readable[slots]
        places = np.flatnonzero(is_readable & batch.is_first)
        resident = slots[places]
        for run, parent in self._each_run(resident, self._runs(batch, places)):
            idle = run[self._holds[run] == 0]
            if len(idle):
                self._policy.touched(_ids(idle), parent)
        waits = is_new & ~batch.is_first
        for place in np.flatnonzero(~is_new & ~is_readable).tolist():
            waits[place] = self._is_another(batch, place, int(slots[place]))
        places = np.flatnonzero(is_new & batch.is_first)
        refused, unasked = self._ask(batch, places, resident)
        waits[unasked] = True
        places = np.setdiff1d(places, np.concatenate([refused, unasked]))
        if len(places):
            keys = batch.keys[places]
            room = self._make_room(keys, resident)
            waits[places[room:]] = True
            if room:
                self.stored += room
                slots = self._take(keys[:room])
                self._life_of[slots] = [batch.parts[part].life for part in batch.part[places[:room]].tolist()]
                self._begin(slots, self._runs(batch, places[:room]), is_store=True)
        if len(refused):
            self._policy.refused([self._demand.keys[key] for key in batch.keys[refused].tolist()])
        return np.flatnonzero(waits)

    def _ask(self, batch: _OfferedBatch, new: Numbers, resident: Numbers) -> tuple[Numbers, Numbers]:
        """Return those of the new places that the policy does not admit, and those that must wait.

        resident: the slots of the batch's resident keys, which are not evicted for it.
        """
        if len(new) <= len(self._free) or not may_refuse(self._policy):
            return _NO_PLACES, _NO_PLACES
        names = self._demand.keys
        parents = {
            place: b"" if key < 0 else names[key]
            for place, key in zip(np.flatnonzero(batch.begins).tolist(), batch.before[batch.begins].tolist())
        }
        has = {names[key] for key in batch.before[batch.begins].tolist() if self._slot_of[key] >= 0}
        barred = frozenset(resident.tolist())
        evictable = len(self._policy) - int(np.count_nonzero(self._holds[resident] == 0))
        room = Room(len(self._free), evictable, barred)
        keys = [names[key] for key in batch.keys.tolist()]
        refused, unasked = ask(self._policy, keys, new.tolist(), parents, has.__contains__, room)
        for place, chunk in zip(refused, batch.chunks()[list(refused)].tolist()):
            batch.parts[batch.part[place]].cursor.refused.add(chunk)
        return np.array(refused, dtype=np.int64), np.array(unasked, dtype=np.int64)

    def _is_another(self, batch: _OfferedBatch, place: int, slot: int) -> bool:
        """Whether the block in flight to this slot is another device block than the one offered at a place.

        A request that found the block on the device shares it with the request that stores it.
        """
        part = batch.parts[batch.part[place]]
        return part.life != self._life_of[slot] and bool(batch.chunks()[place] >= part.cursor.found)

    def _runs(self, batch: _OfferedBatch, places: Numbers) -> _Runs:
        """Split the blocks at these places of a batch into runs, each with the key that its first continues.

        Within a run each block continues the one before it. A block before a run that the pool lacks is
        skipped: the run continues the block before that one, as far as the batch tells it.
        """
        runs = list[tuple[int, int]]()
        for n in np.flatnonzero((np.diff(places, prepend=-2) != 1) | batch.begins[places]).tolist():
            place = at = int(places[n])
            while not batch.begins[at] and self._slot_of[batch.before[at]] < 0:
                at -= 1
            key = int(batch.before[at])
            in_one_run = n and batch.part[places[n - 1]] == batch.part[place]
            if not in_one_run or (key >= 0 and self._slot_of[key] >= 0):
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
