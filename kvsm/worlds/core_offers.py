"""Offers to the core: which device blocks hold what, and what of it is stored, deferred or dropped."""

from __future__ import annotations

from collections.abc import Sequence

from kvsm.errors import PropertyBroken
from kvsm.events import BlocksTouched, SkipReason, StorePlanned, StoreSkipped
from kvsm.ids import to_list
from kvsm.kv_events import Publisher
from kvsm.log import MemoryLog
from kvsm.offloader import Offloader
from kvsm.plan import TransferJob
from kvsm.properties import Property
from kvsm.worlds.core_books import Books, Copy, Offered
from kvsm.worlds.core_options import CoreOptions

Owners = tuple[tuple[str, int], ...]


class Offers:
    """The core, the books beside it, and the actions that compute and offer device blocks."""

    def __init__(self, options: CoreOptions) -> None:
        self.options = options
        config = options.config()
        self._log = MemoryLog()
        self.core = Offloader(config, self._log, publisher=Publisher(), clock_ns=lambda: 0)
        self.books = Books(
            options.host_blocks,
            config.device_blocks,
            options.workers,
            options.blocks_per_chunk,
            options.defer_ticks,
        )
        self._prompts = [options.keys(prompt) for prompt in range(options.prompts)]
        self._names = [f"r{number}" for number in range(options.requests)]
        self.operations = 0
        """Calls on the core and moves of bytes, each compared. An action makes at least one."""

    def _store(
        self, number: int, prompt: int, start: int, size: int, on: int, twist: int, fresh: int
    ) -> bool:
        """twist: 0 offers as is; 1 the first key twice; 2 all in the same blocks; 3 for nobody."""
        keys = self._prompts[prompt % len(self._prompts)][start : start + size + 1]
        if twist == 1:
            keys = keys + keys[:1]
        if not fresh:
            offered = self._due(self._held(keys, on))
        elif twist == 2:
            offered = self._at_several_positions(keys, on)
        else:
            offered = self._due(self._computed(keys, on))
        if not offered:
            return False
        name = self._names[number % len(self._names)]
        self._offer(() if twist == 3 else ((name, len(offered)),), offered)
        return True

    def _store_two(self, prompt: int, other: int, size: int, on: int, fresh: int) -> bool:
        """Of two requests, which share a prefix, at once; the second's are on the device, or computed too."""
        first = self._computed(self._prompts[prompt % len(self._prompts)][: size + 1], on)
        keys = self._prompts[other % len(self._prompts)][: size + 1]
        second = self._computed(keys, on + len(first)) if fresh else self._held(keys, on)
        first, second = self._due(self._kept(first)), self._due(second)
        if not first and not second:
            return False
        owners = ((self._names[0], len(first)), (self._names[-1] + "-too", len(second)))
        self._offer(owners, [*first, *second])
        return True

    def _compute(self, prompt: int, start: int, on: int) -> bool:
        """The engine computes a block, and keeps it to itself."""
        return bool(self._computed(self._prompts[prompt % len(self._prompts)][start : start + 1], on))

    def _at_several_positions(self, keys: Sequence[bytes], on: int) -> Offered:
        """Compute these keys in the same device blocks, the first one last. If that one is to be stored, they
        are all offered, as by an engine with one block at several positions of a table: the block holds the
        first, and the others have to wait. Else it alone is."""
        offered = self._computed(keys[::-1], on, same=True)
        if not offered or keys[0] in self.books.where or self.options.store_threshold > 1:
            return self._due(offered)
        ((_, blocks),) = offered
        return [(key, blocks) for key in keys]

    def _computed(self, keys: Sequence[bytes], on: int, *, same: bool = False) -> Offered:
        """Compute these keys in idle device blocks. What is written over by a later one is not offered."""
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
        events = len(self._log)
        self.operations += 1
        self.core.rewrite([block for block, _ in written])
        if books.compute(written) != (len(self._log) > events):
            raise PropertyBroken(
                Property.NO_STALE_DATA, f"that {written} were computed, is noted if a load brought them"
            )
        return self._kept(offered)

    def _kept(self, offered: Offered) -> Offered:
        """Those that are where they were computed, still."""
        cells = self.books.device[0]
        return [
            (key, blocks)
            for key, blocks in offered
            if all(cells[block] == (key, part) for part, block in enumerate(blocks))
        ]

    def _held(self, keys: Sequence[bytes], on: int) -> Offered:
        """Where these keys are on the device already, loaded or computed, under a store or not."""
        holder, chunk = self.books.holder, self.options.blocks_per_chunk
        offered: Offered = []
        for key in keys:
            blocks = [block for part in range(chunk) if (block := holder((key, part), on)) is not None]
            if len(blocks) == chunk:
                offered.append((key, tuple(blocks)))
        return offered

    def _due(self, offered: Offered) -> Offered:
        """Those that `store_threshold` lets pass; the books count for themselves."""
        threshold, books = self.options.store_threshold, self.books
        if threshold == 1 or not offered:
            return offered
        keys = list(dict.fromkeys([key for key, _ in offered]))
        self.core.count_offers(keys)
        for key in keys:
            if key not in books.where:
                books.offers[key] = books.offers.pop(key, 0) + 1
        while len(books.offers) > self.options.offer_history:
            books.offers.popitem(last=False)
        due = {key for key in keys if key in books.where or books.offers.get(key, 0) >= threshold}
        for key in keys:
            if self.core.offered_enough(key) != (key in due):
                raise PropertyBroken(
                    Property.STORED_ONCE, f"key {key.hex()} is due at its offer number {threshold}"
                )
        return [(key, blocks) for key, blocks in offered if key in due]

    def _offer(self, owners: Owners, offered: Offered) -> None:
        """Offer, compare with what the books expect, and offer all of it once more."""
        books, log = self.books, self._log
        new, deferred, resident, old = self._expected(offered)
        room = 0
        if len(books.copies) < self.options.max_live_transfers:
            kept = [key for key in resident if not (books.where[key].pins or books.where[key].copies)]
            room = len(books.free) + books.idle - len(kept)
        keys = [key for key, _ in offered]
        blocks = [block for _, chunk in offered for block in chunk]
        since = len(log)
        outcome = self.core.store(owners, keys, blocks)
        stored, waiting = new[:room], sorted(deferred + new[room:])
        if list(outcome.stored) != stored or list(outcome.deferred) != waiting:
            message = f"of {keys}, {list(outcome.stored)} are stored and {outcome.deferred} deferred"
            raise PropertyBroken(Property.STORED_ONCE, f"{message}; the books say {stored} and {waiting}")
        if outcome.keys != tuple([keys[place] for place in stored]) or outcome.resident != len(resident):
            raise PropertyBroken(Property.STORED_ONCE, f"{outcome} does not say what is stored of {keys}")
        self._check_said(owners, since, offered, waiting, old, bool(resident))
        self._take(outcome.job, outcome.keys, outcome.evicted, resident, [offered[place] for place in stored])
        since = len(log)
        self.operations += 1
        again = self.core.store(owners, keys, blocks, range(len(keys)))
        if again.job is not None or not {*waiting, *old}.issuperset(again.deferred):
            raise PropertyBroken(
                Property.STORED_ONCE, f"what was offered a moment ago is stored again: {again}"
            )
        if len(log) - since != bool(again.resident):
            raise PropertyBroken(
                Property.STORED_ONCE, "what was offered a moment ago and waits still is an event"
            )

    def _expected(self, offered: Offered) -> tuple[list[int], list[int], set[bytes], list[int]]:
        """(places to store if there is room, places to defer, resident keys, places of an older epoch)."""
        books = self.books
        new: dict[bytes, int] = {}
        taken: set[int] = set()
        resident: set[bytes] = set()
        deferred, old = [], []
        for place, (key, blocks) in enumerate(offered):
            block, busy = books.where.get(key), books.under_copy(blocks)
            if block is not None and block.stored:
                resident.add(key)
            elif not busy and books.notes and books.is_of_older_epoch(key, blocks):
                old.append(place)
            elif block is not None:
                if books.copies[block.store].sources[key] != blocks:
                    deferred.append(place)
            elif key in new or busy or not taken.isdisjoint(blocks):
                deferred.append(place)
            else:
                new[key] = place
                taken.update(blocks)
        return list(new.values()), deferred, resident, old

    def _check_said(
        self,
        owners: Owners,
        since: int,
        offered: Offered,
        waiting: list[int],
        old: list[int],
        touched: bool,
    ) -> None:
        """What is not stored is said so once, with a reason, and under the name of its owner (S13)."""
        said: list[bytes] = []
        dropped: list[bytes] = []
        for event in self._log[since:]:
            if isinstance(event, StoreSkipped):
                said += event.keys
                if event.reason == SkipReason.OLDER_EPOCH:
                    dropped += event.keys
            if isinstance(event, StorePlanned | StoreSkipped):
                counts = [count for _, count in event.owners]
                if sum(counts) != (len(event.keys) if owners else 0):
                    raise PropertyBroken(Property.STORED_ONCE, f"{event} names owners of more or fewer keys")
        if dropped != [offered[place][0] for place in old]:
            raise PropertyBroken(
                Property.NO_STALE_DATA, f"dropped as of an older epoch are {dropped}, and not places {old}"
            )
        if sorted(said) != sorted([offered[place][0] for place in [*waiting, *old]]):
            raise PropertyBroken(
                Property.STORED_ONCE, f"said to be skipped are {said}, and not places {waiting} and {old}"
            )
        if touched and not any(isinstance(event, BlocksTouched) for event in self._log[since:]):
            raise PropertyBroken(
                Property.FULL_OFFLOAD, "what is resident is touched by an offer, and was not"
            )

    def _take(
        self,
        job: TransferJob | None,
        keys: Sequence[bytes],
        evicted: Sequence[bytes],
        resident: set[bytes],
        stored: Offered,
    ) -> None:
        """What is being stored from here on, and what went for it."""
        books, chunk = self.books, self.options.blocks_per_chunk
        books.evict(evicted, resident)
        if (job is not None) != bool(keys):
            raise PropertyBroken(
                Property.STORED_ONCE, f"{len(keys)} keys are to be stored, and the job is {job}"
            )
        if job is None:
            return
        pairs = self._pairs(job, [block for _, blocks in stored for block in blocks])
        contents = [(key, part) for key in keys for part in range(chunk)]
        copy = Copy(job.transfer, None, pairs, contents, books.epoch)
        copy.sources = dict(stored)
        for key in keys:
            books.offers.pop(key, None)
        books.plan_store(copy, keys)
        self._look_at_leases([block for block, _ in pairs])

    def _pairs(self, job: TransferJob, blocks: Sequence[int]) -> list[tuple[int, int]]:
        sources = to_list(job.device_blocks)
        if sources != list(blocks):
            raise PropertyBroken(
                Property.CORRECT_BYTES, f"a job names device blocks {sources}, and not {list(blocks)}"
            )
        return list(zip(sources, to_list(job.host_blocks), strict=True))

    def _look_at_leases(self, blocks: Sequence[int]) -> None:
        words, books = self.core.ledger.leases.words, self.books
        for block in blocks:
            if (words[block] != 0) != (block in books.leased or block in books.retired):
                held = "is leased, and no copy has it" if words[block] else "is not leased, and a copy has it"
                raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, f"device block {block} {held}")
