"""Actions of the core world that bring blocks to the host: offers of computed device blocks, and imports.

They check which blocks the core stores, defers or drops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvsm.check.worlds.core_bench import CoreActions
from kvsm.check.worlds.core_books import BookedCopy, Offered
from kvsm.core.offloader import PreparedStore
from kvsm.core.offloader.admission import may_refuse
from kvsm.errors import PropertyBroken
from kvsm.events import BlocksTouched, Owners, SkipReason, StorePlanned, StoreSkipped
from kvsm.ids import to_list
from kvsm.properties import Property

SOURCE = "engine p-1"
"""The engine whose blocks are imported."""


class ExpectedOffer(NamedTuple):
    """The answer to an offer that follows from the books. A place is a position among the offered keys."""

    storable: list[int]
    """Places of keys to store, as far as there is room."""
    deferred: list[int]
    """Places of keys that must wait for a copy in flight."""
    resident: set[bytes]
    """Keys that are stored already."""
    stale: list[int]
    """Places of keys whose bytes were loaded before the last reset."""


class OfferActions(CoreActions):
    """Offers and imports. Each is compared with the books, then repeated, which must store nothing (S13)."""

    def store(self, number: int, prompt: int, start: int, size: int, on: int, twist: int, fresh: int) -> bool:
        """Offer a part of a prompt: the keys `start` to `start + size`.

        on: chooses among the possible device blocks.
        twist: 0 changes nothing, 1 offers the first key twice, 2 all keys in the same blocks, 3 no owner.
        fresh: 1 computes the part first; 0 offers what the device holds of it.
        """
        before = self._done_so_far()
        keys = self.bench.prompt(prompt)[start : start + size + 1]
        if twist == 1:
            keys = keys + keys[:1]
        if not fresh:
            offered = self._due(self._held(keys, on))
        elif twist == 2:
            offered = self._at_several_positions(keys, on)
        else:
            offered = self._due(self._computed(keys, on))
        if not offered:
            return self._done_so_far() != before
        self._offer(() if twist == 3 else ((self.bench.name(number), len(offered)),), offered)
        return True

    def store_two(self, prompt: int, other: int, size: int, on: int, fresh: int) -> bool:
        """Offer the prefixes of two requests at once. fresh: 1 computes both prefixes, 0 only the first."""
        before = self._done_so_far()
        first = self._computed(self.bench.prompt(prompt)[: size + 1], on)
        keys = self.bench.prompt(other)[: size + 1]
        second = self._computed(keys, on + len(first)) if fresh else self._held(keys, on)
        first, second = self._due(self._still_there(first)), self._due(second)
        if not first and not second:
            return self._done_so_far() != before
        names = self.bench.names
        self._offer(((names[0], len(first)), (f"{names[-1]}-too", len(second))), [*first, *second])
        return True

    def compute(self, prompt: int, start: int, on: int) -> bool:
        """Compute one chunk without an offer."""
        return bool(self._computed(self.bench.prompt(prompt)[start : start + 1], on))

    def import_blocks(self, number: int, prompt: int, start: int, size: int, twist: int) -> bool:
        """Import a part of a prompt from another engine, and repeat the import at once: that copies nothing.

        twist: 0 changes nothing, 1 imports the first key twice, 2 without an owner.
        """
        keys = self.bench.prompt(prompt)[start : start + size + 1]
        if twist == 1:
            keys = keys + keys[:1]
        owners = () if twist == 2 else ((self.bench.name(number), len(keys)),)
        where, first = self.books.where, len(self.log)
        resident = {key for key in keys if key in where and where[key].stored}
        places = [n for n, key in enumerate(keys) if key not in where and key not in keys[:n]]
        room = self._room(resident)
        outcome = self.core.import_blocks(owners, keys, SOURCE)
        imported = list(outcome.stored)
        if (imported, outcome.deferred, outcome.resident) != (places[:room], (), len(resident)):
            message = f"of {keys}, places {imported} are imported; the books say {places[:room]}"
            raise PropertyBroken(Property.STORED_ONCE, message)
        left = [keys[place] for place in places[room:]]
        self._check_events(owners, first, left, [], resident)
        self._book_import(outcome, resident, [keys[place] for place in places[:room]])
        self.bench.operations += 1
        if self.core.import_blocks(owners, keys, SOURCE).job is not None:
            message = f"an import of {keys} that was repeated at once is made again"
            raise PropertyBroken(Property.STORED_ONCE, message)
        return True

    def _done_so_far(self) -> tuple[int, int]:
        """Numbers that change when blocks are computed or offers are counted, even if no key is due yet."""
        return self.bench.operations, len(self.log)

    # Contents of device blocks.

    def _at_several_positions(self, keys: Sequence[bytes], on: int) -> Offered:
        """Pair several keys with one chunk of device blocks.

        An engine offers this if its block table names a block at several positions. The chunk holds the first
        key; the other keys must wait. If the first key is on the host already, it is offered alone.
        """
        offered = self._computed(keys[::-1], on, same=True)
        if not offered or keys[0] in self.books.where or self.options.store_threshold > 1:
            return self._due(offered)
        ((_, blocks),) = offered
        return [(key, blocks) for key in keys]

    def _computed(self, keys: Sequence[bytes], on: int, *, same: bool = False) -> Offered:
        """Compute these keys in idle device blocks. Leaves out keys whose blocks a later key has overwritten.

        on: the first of the idle device blocks to use.
        same: compute all keys in the same blocks.
        """
        books, chunk = self.books, self.options.blocks_per_chunk
        idle = books.idle_device_blocks()
        if not idle or not keys:
            return []
        offered, written = [], []
        for place, key in enumerate(keys):
            first = on + (0 if same else place * chunk)
            blocks = tuple([idle[(first + part) % len(idle)] for part in range(chunk)])
            offered.append((key, blocks))
            written += [(block, (key, part)) for part, block in enumerate(blocks)]
        events = len(self.log)
        self.bench.operations += 1
        self.core.rewrite([block for block, _ in written])
        if books.compute(written) != (len(self.log) > events):
            message = f"computing {written} is an event exactly if a load had brought one of these blocks"
            raise PropertyBroken(Property.NO_STALE_DATA, message)
        return self._still_there(offered)

    def _still_there(self, offered: Offered) -> Offered:
        """The offered keys whose device blocks still hold them."""
        cells = self.books.device[0]
        return [
            (key, blocks)
            for key, blocks in offered
            if all(cells[block] == (key, part) for part, block in enumerate(blocks))
        ]

    def _held(self, keys: Sequence[bytes], on: int) -> Offered:
        """Those of the keys that the device holds, loaded or computed. A store may be reading the blocks."""
        holder, chunk = self.books.holder, self.options.blocks_per_chunk
        offered: Offered = []
        for key in keys:
            blocks = [block for part in range(chunk) if (block := holder((key, part), on)) is not None]
            if len(blocks) == chunk:
                offered.append((key, tuple(blocks)))
        return offered

    def _due(self, offered: Offered) -> Offered:
        """Count an offer of each key. Returns the keys that were offered `store_threshold` times by now."""
        threshold, books = self.options.store_threshold, self.books
        if threshold == 1 or not offered:
            return offered
        keys = list(dict.fromkeys([key for key, _ in offered]))
        self.core.count_offers(keys)
        for key in keys:
            if key not in books.where:
                books.offers[key] = books.offers.pop(key, 0) + 1
        while len(books.offers) > self.core.config.counted_keys:
            books.offers.popitem(last=False)
        due = {key for key in keys if key in books.where or books.offers.get(key, 0) >= threshold}
        for key in keys:
            if self.core.offered_enough(key) != (key in due):
                message = f"key {key.hex()} is due at its offer number {threshold}, not before or after"
                raise PropertyBroken(Property.STORED_ONCE, message)
        return [(key, blocks) for key, blocks in offered if key in due]

    # Outcome of an offer.

    def _offer(self, owners: Owners, offered: Offered) -> None:
        expected = self._expected(offered)
        room = self._room(expected.resident)
        keys = [key for key, _ in offered]
        blocks = [block for _, chunk in offered for block in chunk]
        events, free = len(self.log), len(self.books.free)
        outcome = self.core.store(owners, keys, blocks)
        refused = self._refused(outcome, expected.storable, free)
        stored = [place for place in expected.storable[:room] if place not in refused]
        without_room = [place for place in expected.storable[room:] if place not in refused]
        waiting = sorted(expected.deferred + without_room)
        if list(outcome.stored) != stored or list(outcome.deferred) != waiting:
            message = f"of {keys}, {list(outcome.stored)} are stored and {outcome.deferred} deferred"
            raise PropertyBroken(Property.STORED_ONCE, f"{message}; the books say {stored} and {waiting}")
        resident = len(expected.resident)
        if outcome.keys != tuple([keys[place] for place in stored]) or outcome.resident != resident:
            message = f"{outcome} does not name what is stored of {keys}"
            raise PropertyBroken(Property.STORED_ONCE, message)
        stale = [keys[place] for place in expected.stale]
        left = [keys[place] for place in (*waiting, *refused)]
        self._check_events(owners, events, left, stale, expected.resident)
        self._book_store(outcome, expected.resident, [offered[place] for place in stored])
        if not refused:  # The policy may admit now what it has just refused.
            self._offer_again(owners, keys, blocks, {*waiting, *expected.stale})

    def _refused(self, outcome: PreparedStore, storable: Sequence[int], free: int) -> set[int]:
        """The places of an offer that the policy refused. It may refuse only if the offer needs evictions."""
        refused = set(outcome.refused)
        may = may_refuse(self.core.ledger.policy) and len(storable) > free
        if refused and not (may and refused.issubset(storable)):
            message = f"places {sorted(refused)} are refused; {storable} are new, and {free} slots are free"
            raise PropertyBroken(Property.STORED_ONCE, message)
        return refused

    def _room(self, resident: set[bytes]) -> int:
        """How many slots a store may use: free ones and evictable ones, except those of the offer itself."""
        books = self.books
        if len(books.copies) >= self.options.max_live_transfers:
            return 0
        kept = [key for key in resident if not (books.where[key].pins or books.where[key].copies)]
        return len(books.free) + books.idle - len(kept)

    def _expected(self, offered: Offered) -> ExpectedOffer:
        books = self.books
        new: dict[bytes, int] = {}
        taken: set[int] = set()
        resident: set[bytes] = set()
        deferred, stale = [], []
        for place, (key, blocks) in enumerate(offered):
            block, busy = books.where.get(key), books.under_copy(blocks)
            if block is not None and block.stored:
                resident.add(key)
            elif not busy and books.notes and books.is_of_older_epoch(key, blocks):
                stale.append(place)
            elif block is not None:
                if books.copies[block.store].sources[key] != blocks:
                    deferred.append(place)
            elif key in new or busy or not taken.isdisjoint(blocks):
                deferred.append(place)
            else:
                new[key] = place
                taken.update(blocks)
        return ExpectedOffer(list(new.values()), deferred, resident, stale)

    def _check_events(
        self, owners: Owners, first: int, left: list[bytes], stale: list[bytes], resident: set[bytes]
    ) -> None:
        """Check that the log names each key that is not stored once, with a reason and its owner (S13).

        first: the index of the offer's first event in the log.
        left, stale: the keys that must wait or are refused, and the keys whose bytes are from an older epoch.
        """
        skipped: list[bytes] = []
        dropped: list[bytes] = []
        for event in self.log[first:]:
            if isinstance(event, StoreSkipped):
                skipped += event.keys
                if event.reason == SkipReason.OLDER_EPOCH:
                    dropped += event.keys
            if isinstance(event, StorePlanned | StoreSkipped):
                counts = [count for _, count in event.owners]
                if sum(counts) != (len(event.keys) if owners else 0):
                    message = f"the owners in {event} do not add up to its keys"
                    raise PropertyBroken(Property.STORED_ONCE, message)
        if dropped != stale:
            message = f"the core dropped {dropped} as data of an older epoch; the books say {stale}"
            raise PropertyBroken(Property.NO_STALE_DATA, message)
        if sorted(skipped) != sorted([*left, *stale]):
            message = f"the log says that {skipped} were skipped; the books say {left} and {stale}"
            raise PropertyBroken(Property.STORED_ONCE, message)
        touched = any(isinstance(event, BlocksTouched) for event in self.log[first:])
        if resident and not touched:
            message = f"an offer touches the keys that are resident, but not {resident}"
            raise PropertyBroken(Property.FULL_OFFLOAD, message)

    def _book_store(self, outcome: PreparedStore, resident: set[bytes], stored: Offered) -> None:
        """Book the evictions and the store of an offer."""
        books, keys, job = self.books, outcome.keys, outcome.job
        books.evict(outcome.evicted, resident)
        if (job is not None) != bool(keys):
            message = f"{len(keys)} keys are to be stored, but the job is {job}"
            raise PropertyBroken(Property.STORED_ONCE, message)
        if job is None:
            return
        pairs = self.bench.pairs_of(job, [block for _, blocks in stored for block in blocks])
        contents = [(key, part) for key in keys for part in range(self.options.blocks_per_chunk)]
        copy = BookedCopy(job.transfer, None, pairs, contents, books.epoch)
        copy.sources = dict(stored)
        books.plan_store(copy, keys)
        self.bench.check_leases([block for block, _ in pairs])

    def _book_import(self, outcome: PreparedStore, resident: set[bytes], keys: list[bytes]) -> None:
        """Book the evictions and the copy of an import."""
        books, job, chunk = self.books, outcome.job, self.options.blocks_per_chunk
        books.evict(outcome.evicted, resident)
        if outcome.keys != tuple(keys) or (job is not None) != bool(keys):
            message = f"{keys} are to be imported, but the job is {job} for {outcome.keys}"
            raise PropertyBroken(Property.STORED_ONCE, message)
        if job is None:
            return
        if len(job.device_blocks):
            message = f"an import names device blocks {to_list(job.device_blocks)}"
            raise PropertyBroken(Property.CORRECT_BYTES, message)
        contents = [(key, part) for key in keys for part in range(chunk)]
        copy = BookedCopy(job.transfer, None, [], contents, books.epoch)
        copy.imports, copy.sources = to_list(job.host_blocks), dict.fromkeys(keys, ())
        books.plan_store(copy, keys)

    def _offer_again(
        self, owners: Owners, keys: Sequence[bytes], blocks: Sequence[int], may_wait: set[int]
    ) -> None:
        events = len(self.log)
        self.bench.operations += 1
        again = self.core.store(owners, keys, blocks, range(len(keys)))
        if again.job is not None or not may_wait.issuperset(again.deferred):
            message = f"an offer that was repeated at once is stored again: {again}"
            raise PropertyBroken(Property.STORED_ONCE, message)
        if len(self.log) - events != bool(again.resident):
            message = "an offer that was repeated at once, and must still wait, is an event"
            raise PropertyBroken(Property.STORED_ONCE, message)
