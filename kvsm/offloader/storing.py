"""Which offered blocks are stored, where room for them comes from, and why others are not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, chain

import msgspec
import numpy as np

from kvsm import events as ev
from kvsm.events import Direction, Offer, Owners, SkipReason
from kvsm.ids import IdArray, listed, pack
from kvsm.offloader.transfers import Transfers
from kvsm.plan import TransferJob
from kvsm.states.block import BlockState
from kvsm.states.words import STATE_MASK

_STORED = BlockState.STORED


class PreparedStore(msgspec.Struct, frozen=True, gc=False):
    """job: what to copy, None if nothing. keys: what will be stored, in the job's order; `stored` are their
    places in the offer.

    deferred: places in the offer of those to offer again, because something of them is in flight or there
    is no room; ascending. resident: how many are on the host already. evicted: keys that made room.
    """

    job: TransferJob | None
    keys: tuple[bytes, ...] = ()
    deferred: tuple[int, ...] = ()
    resident: int = 0
    evicted: Sequence[bytes] = ()
    stored: Sequence[int] = ()


class Storing(Transfers):
    def prepare_store(
        self, request: str, keys: Sequence[bytes], device_blocks: Sequence[int]
    ) -> PreparedStore:
        """Offer computed blocks: the i-th chunk of device_blocks holds the content of keys[i].

        Stores those that are new, from the first on, as far as there is room. A key that is resident is
        touched, and not stored again; one in flight from another block, or on a block with another copy in
        flight, is deferred (S13). What is not stored is said so (StoreSkipped).
        """
        return self.store(((request, len(keys)),), keys, device_blocks)

    def store(
        self,
        owners: Owners,
        keys: Sequence[bytes],
        device_blocks: Sequence[int],
        again: Collection[int] = (),
    ) -> PreparedStore:
        """`prepare_store` for several requests at once: one transfer. owners: (request, how many of the keys
        are its), in the order of the keys; none, if the blocks are nobody's. again: places that were
        offered before: that they have to wait still is no event."""
        if len(keys) * self.config.blocks_per_chunk != len(device_blocks):
            raise ValueError(f"{len(keys)} keys for {len(device_blocks)} device blocks")
        sources = self._device_ids(device_blocks)
        found = list(map(self.ledger.index.get, keys))
        new: Sequence[int] = range(len(keys))
        deferred: Sequence[int] = ()
        resident: Sequence[int] = ()
        if found.count(None) < len(found) or not self._all_new(keys, sources):
            new, deferred, resident = self._partition(owners, keys, listed(sources), found, again)
            if resident:
                self._emit(ev.BlocksTouched, pack(resident))
        if not len(new):
            return PreparedStore(None, (), tuple(deferred), len(resident))
        wanted = tuple(keys) if len(new) == len(keys) else tuple([keys[place] for place in new])
        room, evicted = self._make_room(wanted, resident)
        if room < len(new):
            reason = SkipReason.POOL_FULL if self._has_room_for_transfer() else SkipReason.TOO_MANY_TRANSFERS
            self._skip(owners, keys, new[room:], reason, again)
            deferred = sorted([*deferred, *new[room:]])
            new, wanted = new[:room], wanted[:room]
        if len(new) < len(keys):
            owners, sources = _owners_of(owners, new), self._sources_of(sources, new)
        job = self._plan_store(owners, wanted, sources) if room else None
        return PreparedStore(job, wanted, tuple(deferred), len(resident), evicted, new)

    def _sources_of(self, sources: IdArray, places: Sequence[int]) -> IdArray:
        """The device blocks of some places of an offer."""
        numbers, chunk = listed(sources), self.config.blocks_per_chunk
        return self._device_ids(
            [numbers[n] for place in places for n in range(place * chunk, (place + 1) * chunk)]
        )

    def _plan_store(self, owners: Owners, keys: tuple[bytes, ...], sources: IdArray) -> TransferJob:
        packed, blocks = pack(self.ledger.free.first(len(keys))), pack(sources)
        self._emit(ev.StorePlanned, owners, keys, packed, blocks)
        seq = self.ledger.seq
        hosts = packed
        if self.config.blocks_per_chunk > 1:
            hosts = self._host_blocks(self.ledger.transfers[seq].slots)
        return TransferJob(seq, Direction.STORE, blocks, hosts)

    def skip(self, owners: Owners, keys: Sequence[bytes], reason: str) -> None:
        """Record that these keys are not stored, and why."""
        self._emit(ev.StoreSkipped, owners, tuple(keys), reason)

    def _skip(
        self,
        owners: Owners,
        keys: Sequence[bytes],
        places: Sequence[int],
        reason: str,
        again: Collection[int],
    ) -> None:
        fresh = [place for place in places if place not in again] if again else places
        if fresh:
            self.skip(_owners_of(owners, fresh), [keys[place] for place in fresh], reason)

    def advance(self, offers: Sequence[Offer]) -> None:
        """Record how far the blocks of these requests have been dealt with: (request, settled, offered)."""
        if offers:
            self._emit(ev.BlocksOffered, tuple(offers))

    def count_offers(self, keys: Sequence[bytes]) -> None:
        """Note that these were offered by a request for the first time; those on the host need no count."""
        fresh = tuple([key for key in keys if key not in self.ledger.index])
        if fresh:
            self._emit(ev.OffersCounted, fresh)

    def offered_enough(self, key: bytes) -> bool:
        """Whether a key is stored by now, as far as `store_threshold` says."""
        return self.ledger.offers.times.get(key, 0) >= self.config.store_threshold or key in self.ledger.index

    def rewrite(self, device_blocks: Sequence[int]) -> None:
        """The engine gave these away to be computed. An event only if it matters what a load brought there:
        one of an older epoch; and one of this epoch too, if a key does not tell the content of each block."""
        stale, brought = self.ledger.provenance.stale, self.ledger.provenance.brought
        if self.config.blocks_per_chunk > 1:
            rewritten = [block for block in device_blocks if block in stale or block in brought]
        else:
            rewritten = [block for block in device_blocks if block in stale] if stale else []
        if rewritten:
            self._emit(ev.BlocksRewritten, pack(rewritten))

    def _all_new(self, keys: Sequence[bytes], device_blocks: IdArray) -> bool:
        """The common case of an offer: distinct keys, on distinct device blocks that no copy touches."""
        if len(keys) > 1 and (len(set(keys)) != len(keys) or not self.ledger.leases.distinct(device_blocks)):
            return False
        if self.ledger.provenance.stale:
            return False
        leases = self.ledger.leases.look(device_blocks)
        return not any(leases) if type(leases) is list else not np.any(leases)

    def _partition(
        self,
        owners: Owners,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        found: Sequence[int | None],
        again: Collection[int],
    ) -> tuple[list[int], list[int], list[int]]:
        """Split an offer: (places to store, places to offer again, slots of the resident)."""
        chunk, words = self.config.blocks_per_chunk, self.ledger.blocks.words
        # The index names ALLOCATED to LOADING blocks; those from STORED on can be read. Mostly all can.
        lacking = [
            place for place, slot in enumerate(found) if slot is None or words[slot] & STATE_MASK < _STORED
        ]
        left = set(lacking)
        resident = dict.fromkeys([slot for n, slot in enumerate(found) if slot is not None and n not in left])
        new: dict[bytes, int] = {}
        taken: set[int] = set()
        skipped: dict[str, list[int]] = {}
        for place in lacking:
            key, sources = keys[place], blocks[place * chunk : (place + 1) * chunk]
            reason = self._why_not(key, sources, found[place], new, taken)
            if reason is None:
                new[key] = place
                taken.update(sources)
            elif reason:
                skipped.setdefault(reason, []).append(place)
        for reason, places in skipped.items():
            self._skip(owners, keys, places, reason, again)
        skipped.pop(SkipReason.OLDER_EPOCH, None)
        return list(new.values()), sorted(chain.from_iterable(skipped.values())), list(resident)

    def _why_not(
        self, key: bytes, sources: Sequence[int], slot: int | None, new: dict[bytes, int], taken: set[int]
    ) -> str | None:
        """Why a block that is not resident is not stored now: a `SkipReason`, or "" if it is being stored
        from this very block; None if it can be."""
        words, stale = self.ledger.leases.words, self.ledger.provenance.stale
        leased = any(words[block] for block in sources)
        if stale and not leased:
            *begins, last = sources
            if stale.get(last) == key or not stale.keys().isdisjoint(begins):
                return SkipReason.OLDER_EPOCH
        if slot is not None:
            # Blocks under their own store are dealt with. From other blocks, if only one of the chunk is
            # another, the key waits for that store.
            own = leased and listed(self.ledger.transfers[self.ledger.generation[slot]].device_blocks)
            return "" if own and all(block in own for block in sources) else SkipReason.KEY_IN_FLIGHT
        if key in new:
            return SkipReason.KEY_IN_FLIGHT
        if leased or not taken.isdisjoint(sources):
            return SkipReason.DEVICE_BLOCK_IN_FLIGHT
        return None

    def _make_room(self, keys: tuple[bytes, ...], protected: Sequence[int]) -> tuple[int, Sequence[bytes]]:
        """(for how many of these keys there is room, the keys that were evicted for them)."""
        ledger = self.ledger
        if not self._has_room_for_transfer():
            return 0, ()
        policy, free = ledger.policy, len(ledger.free)
        if len(keys) > free:
            # What the offer itself found resident is not evicted for the rest of it.
            evictable = len(policy) - sum([slot in policy for slot in protected])
            keys = keys[: free + evictable]
        recalled = policy.recall(keys) if keys else ()
        if recalled:
            self._emit(ev.KeysRecalled, recalled)
        lacking = len(keys) - free
        if lacking <= 0:
            return len(keys), ()
        choice = policy.choose(lacking, frozenset(protected))
        if choice is None:
            return free, ()
        evicted = ledger.keys_of(choice.victims)
        # The plan is the event after the eviction, and its number names the transfer.
        self._emit(ev.BlocksEvicted, pack(choice.victims), pack(choice.moved), ledger.seq + 2)
        return len(keys), evicted


def _owners_of(owners: Owners, places: Sequence[int]) -> Owners:
    """The owners of some places of an offer, which ascend."""
    if len(owners) < 2:
        return tuple([(name, len(places)) for name, _ in owners])
    ends = list(accumulate(count for _, count in owners))
    counts = [0] * len(owners)
    owner = 0
    for place in places:
        while place >= ends[owner]:
            owner += 1
        counts[owner] += 1
    return tuple([(name, count) for (name, _), count in zip(owners, counts) if count])
