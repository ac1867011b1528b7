"""A world of the offload core alone: every public call in any order, and copies whose bytes move at any time.

This world has no engine and no worker. Its actions call the real `Offloader`: matches, loads (of all matched
blocks, of the first ones, of parts of chunks), offers (doubled keys, one device block under two keys, shared
prefixes), imports of blocks from another engine, preemptions and aborts. Other actions move bytes, and report
success, failure, too late, twice, and as workers that do not exist. After each action its answer, and a few
counts that a leak would change, are compared with the reference books (`kvsm.check.worlds.core_books`);
`check` compares everything. A comparison costs less than the call.

Of the core's public calls only `skip` is left out: it only records what its caller passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import product
from random import Random

from kvsm.check.worlds.core_bench import CoreBench
from kvsm.check.worlds.core_cache import CacheActions
from kvsm.check.worlds.core_copies import CopyActions
from kvsm.check.worlds.core_offers import OfferActions
from kvsm.check.worlds.core_options import LIVE, OVER, CoreOptions, action_kinds
from kvsm.check.worlds.core_requests import RequestActions
from kvsm.check.worlds.describing import describe_ledger
from kvsm.check.worlds.metric_oracles import check_metrics
from kvsm.check.worlds.past_log import PastLog, in_time
from kvsm.check.worlds.past_metrics import check_past_metrics
from kvsm.check.worlds.world import Action
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.invariants import Violation, check_ledger, check_rest
from kvsm.core.ledger.snapshot import digest
from kvsm.core.offloader import Offloader
from kvsm.errors import PropertyBroken
from kvsm.events import OffloadingEvent
from kvsm.explain.metrics import Metrics
from kvsm.ids import to_list
from kvsm.properties import Property

_ENTRIES_PER_WEIGHT = 4
"""Entries in the drawing table of an action whose weight is 1."""

_COUNTS = (
    (Property.STORED_ONCE, "keys are on the host or on their way there"),
    (Property.CONSERVATION, "slots are free"),
    (Property.ONE_RELEASE_PER_HOLD, "blocks can be evicted"),
    (Property.STALE_REPORTS, "transfers are live"),
    (Property.ONE_RELEASE_PER_HOLD, "requests are known"),
)


class CoreWorld:
    """A `World` of the offload core alone.

    books: the reference books.
    most_in_flight: the largest number of live copies (planned or submitted) so far.
    """

    def __init__(self, options: CoreOptions | None = None) -> None:
        self.options = options = options or CoreOptions()
        self._bench = bench = CoreBench(options)
        self.books = bench.books
        self.most_in_flight = 0
        self._cache = CacheActions(bench)
        self._kinds = action_kinds(options)
        self._moves: dict[str | int, Callable[..., bool]] = {}
        for group in (RequestActions(bench), OfferActions(bench), CopyActions(bench), self._cache):
            self._moves |= {name: getattr(group, name) for name in self._kinds if hasattr(group, name)}
        self.favour(lambda _: 1.0)

    @property
    def events(self) -> Sequence[OffloadingEvent]:
        """The log so far."""
        return self._bench.log

    @property
    def core(self) -> Offloader:
        """The core under test. A restart replaces it."""
        return self._bench.core

    @property
    def operations(self) -> int:
        """Calls on the core and moves of bytes so far, each compared with the books."""
        return self._bench.operations

    # What may happen.

    def favour(self, share: Callable[[str], float]) -> None:
        """Scale the weight of each kind of action in `draw` by `share(name)`; 0 excludes it."""
        self._table = [
            (name, sizes, min(sizes, default=1) > 0)
            for name, (weight, sizes) in self._kinds.items()
            for _ in range(round(weight * share(name) * _ENTRIES_PER_WEIGHT))
        ]

    def actions(self) -> list[Action]:
        """All actions that may happen now."""
        found: list[Action] = []
        for name, (_, sizes) in self._kinds.items():
            found += [(name, *numbers) for numbers in product(*(range(self._size(size)) for size in sizes))]
        return found

    def draw(self, random: Random) -> Action:
        """Draw one of the actions that may happen now, by weight."""
        table, number = self._table, random.random
        while True:
            name, sizes, is_static = table[int(number() * len(table))]
            if is_static:
                return (name, *[int(number() * size) for size in sizes])
            lengths = [self._size(size) for size in sizes]
            if 0 not in lengths:
                return (name, *[int(number() * size) for size in lengths])

    def _size(self, size: int) -> int:
        if size > 0:
            return size
        if size == LIVE:
            return len(self.books.copies)
        return len(self._bench.ended if size == OVER else self.books.lost)

    def do(self, action: Action) -> bool:
        """Carry out the action and compare counts. Returns False if it cannot happen now."""
        move = self._moves.get(action[0])
        if move is None or not move(*action[1:]):
            return False
        self._bench.operations += 1
        self._compare_counts()
        return True

    def describe(self) -> dict[str, str]:
        return describe_ledger(self.core.ledger)

    def wind_down(self) -> Action | None:
        """The next action on the way to rest; None at rest."""
        for copy in self.books.copies.values():
            if not copy.submitted:
                return ("submit", 0)
            worker = next(rank for rank in self.books.workers if not copy.reported >> rank & 1)
            place = [submitted.id for submitted in self._bench.submitted()].index(copy.id)
            return ("report", place, worker)
        for number, name in enumerate(self._bench.names):
            if name in self.books.requests:
                return ("finish", number, 0)
        return None

    # What must hold.

    def _compare_counts(self) -> None:
        """Compare a few counts that most defects would change."""
        ledger, books = self.core.ledger, self.books
        if len(books.copies) > self.most_in_flight:
            self.most_in_flight = len(books.copies)
        counted = (
            len(ledger.index),
            len(ledger.free),
            ledger.evictable(),
            len(ledger.transfers),
            len(ledger.requests),
        )
        expected = (
            len(books.where),
            len(books.free),
            books.idle,
            len(books.copies),
            len(books.requests),
        )
        if counted != expected:
            # The ledger's own checks may give a more exact message.
            _raise_first(check_ledger(ledger))
            for (broken, noun), ours, theirs in zip(_COUNTS, counted, expected):
                if ours != theirs:
                    raise PropertyBroken(broken, f"{ours} {noun}; the books say {theirs}")

    def check(self) -> None:
        """Compare everything; at rest also fold the log. Raises `PropertyBroken`."""
        self._check_data()
        self._check_requests()
        self._cache.take_events()
        ledger, books = self.core.ledger, self.books
        if set(ledger.transfers) != set(books.copies):
            message = f"transfers {[*ledger.transfers]} are live; the books say {[*books.copies]}"
            raise PropertyBroken(Property.STALE_REPORTS, message)
        leased = set(to_list(ledger.leases.view.nonzero()[0]))
        if leased != books.leased.keys() | books.retired:
            message = f"device blocks {sorted(leased)} are leased; the books say {sorted(books.leased)}"
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)
        if list(ledger.offers.times.items()) != list(books.offers.items()):
            message = f"the core counted offers {ledger.offers.times}; the books say {books.offers}"
            raise PropertyBroken(Property.STORED_ONCE, message)
        _raise_first(check_ledger(ledger))
        if self.wind_down() is None:
            _raise_first(check_rest(ledger))
            if self.options.folds_log:
                self._check_fold()

    def _check_data(self) -> None:
        """Check that each readable key has its own bytes on every worker (S2, S15)."""
        ledger, books, chunk = self.core.ledger, self.books, self.options.blocks_per_chunk
        for key, block in books.where.items():
            if ledger.index.get(key) != block.slot:
                message = f"key {key.hex()} is in slot {block.slot}; the index says {ledger.index.get(key)}"
                raise PropertyBroken(Property.STORED_ONCE, message)
            for part in range(chunk if block.stored else 0):
                if not books.has_everywhere(block.slot * chunk + part, (key, part)):
                    message = f"key {key.hex()} can be read, but slot {block.slot} holds other bytes"
                    raise PropertyBroken(Property.PUBLISH_AFTER_COMMIT, message)

    def _check_requests(self) -> None:
        for name, entry in self.core.ledger.requests.items():
            book = self.books.requests.get(name)
            if book is None:
                message = f"request {name} is over, but the core still knows it"
                raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)
            if entry.load != (book.load.id if book.load else 0):
                message = f"request {name} names load {entry.load}; the books say {book.load}"
                raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)
            slots = [block.slot for block in book.matched]
            if to_list(entry.pins) != slots:
                message = f"request {name} pins slots {to_list(entry.pins)}; its match counted {slots}"
                raise PropertyBroken(Property.MATCH_HOLDS, message)
            if (entry.settled, entry.offered) != book.cursors:
                message = f"request {name} has cursors {entry.settled}, {entry.offered}, not {book.cursors}"
                raise PropertyBroken(Property.STORED_ONCE, message)

    def _check_fold(self) -> None:
        folded = Ledger(self.core.config)
        metrics = Metrics(folded)
        timed = in_time(self.events)
        for event in timed:
            folded.apply(event)
            metrics.append(event)
        check_metrics(metrics, timed)
        check_past_metrics(metrics, PastLog(self.core.config, timed))
        if digest(folded) != digest(self.core.ledger):
            raise PropertyBroken(Property.EVENTS_ARE_STATE, "the log folds to another state")

    # Equality.

    def fingerprint(self) -> bytes:
        """16 bytes: equal for worlds with the same future behaviour.

        Transfers are named by their order. Ticks, epochs and other numbers that only grow enter as distances.
        Slots and device blocks keep their numbers, because the order of their allocation depends on them.
        """
        return blake2b(repr(self._canonical()).encode(), digest_size=16).digest()

    def _canonical(self) -> tuple[object, ...]:
        ledger, books = self.core.ledger, self.books
        rank = {copy: number for number, copy in enumerate(books.copies, 1)}
        copies = [
            (
                transfer.pairs,
                transfer.imports,
                transfer.contents,
                transfer.request,
                transfer.void,
                transfer.failed,
                transfer.landed,
                transfer.reported,
            )
            for transfer in books.copies.values()
        ]
        ages = [
            (
                transfer.epoch - books.epoch,
                books.tick - transfer.since,
                transfer.submitted,
                ledger.transfers[transfer.id].flush,
            )
            for transfer in books.copies.values()
        ]
        requests = [
            (name, book.fresh, book.over, book.loading, book.cursors, rank.get(book.waits, 0))
            for name, book in sorted(books.requests.items())
        ]
        holds = [
            (
                [(block.slot, block.void) for block in book.matched],
                rank[book.load.id] if book.load else 0,
                book.patience >= 0 and max(0, book.patience - books.tick) + 1,
            )
            for _, book in sorted(books.requests.items())
        ]
        slots = [(key, block.slot, block.stored, block.pins) for key, block in sorted(books.where.items())]
        notes = [(block, key, epoch < books.epoch) for block, (key, epoch) in sorted(books.notes.items())]
        pool = to_list(ledger.free.order()), ledger.policy.snapshot(), list(books.offers.items())
        cells = books.device, books.host, sorted(books.retired), ledger.blocks.words.tolist()
        lost = [(transfer.pairs, transfer.imports, transfer.store) for transfer in books.lost]
        over = bool(self._bench.ended), sorted(self._cache.announced)
        return copies, ages, requests, holds, slots, notes, pool, cells, lost, over


def _raise_first(violations: Sequence[Violation]) -> None:
    for violation in violations:
        raise PropertyBroken(violation.property, violation.message)
