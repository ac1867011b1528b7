"""The offload core alone: every public call, in every order, and copies whose bytes move when they please.

There is no engine here and no worker. Whoever drives this world calls the real `Offloader`: matches, loads
(of a part, of some places), offers (doubled keys, one device block under two keys, prefixes that are
shared), preempts and aborts, lets bytes move, reports (good, bad, late, doubled, of a worker that does not
exist), resets. Each answer is compared at once with what plain books say (`kvsm.worlds.core_books`), and so
are the counts that a leak would change; `check` compares everything. It is made for speed: a comparison
costs less than the call.

Of the core's public calls only `skip` is left out: it writes into the log what it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import product
from random import Random

from kvsm.errors import KvsmError, LimitReached, PropertyBroken
from kvsm.events import OffloadingEvent
from kvsm.ids import to_list
from kvsm.invariants import Violation, check_ledger, check_rest
from kvsm.ledger import Ledger
from kvsm.offloader import LookupResult
from kvsm.properties import Property
from kvsm.snapshot import digest
from kvsm.worlds.core_books import Block, Content, Copy
from kvsm.worlds.core_copies import Copies
from kvsm.worlds.core_options import LIVE, OVER, CoreOptions, action_kinds, draw_options
from kvsm.worlds.describing import describe_ledger
from kvsm.worlds.world import Action

_GRAINS = 4
"""Entries in the table to draw from, of an action whose weight is 1."""
_COUNTS = (
    (Property.STORED_ONCE, "keys are on the host or on their way there"),
    (Property.CONSERVATION, "slots are free"),
    (Property.ONE_RELEASE_PER_HOLD, "blocks can be evicted"),
    (Property.STALE_REPORTS, "transfers are live"),
    (Property.ONE_RELEASE_PER_HOLD, "requests are known"),
)


class CoreWorld(Copies):
    """See above. A `World`; two that were made with the same options and to which the same was done are
    equal. most_in_flight: the most copies that were planned or under way at once."""

    def __init__(self, options: CoreOptions | None = None) -> None:
        options = options or CoreOptions()
        super().__init__(options)
        self.most_in_flight = 0
        self._announced: set[bytes] = set()
        self._kinds = action_kinds(options)
        self._moves: dict[str | int, Callable[..., bool]] = {
            name: getattr(self, "_" + name) for name in self._kinds
        }
        self.favour(lambda _: 1.0)

    def favour(self, share: Callable[[str], float]) -> None:
        """Let `draw` give only this share of what it would give of each kind; of each none, if it is 0."""
        self._table = [
            (name, sizes, min(sizes, default=1) > 0)
            for name, (weight, sizes) in self._kinds.items()
            for _ in range(round(weight * share(name) * _GRAINS))
        ]

    @property
    def events(self) -> Sequence[OffloadingEvent]:
        return self._log

    # What may happen.

    def actions(self) -> list[Action]:
        found: list[Action] = []
        for name, (_, sizes) in self._kinds.items():
            found += [(name, *numbers) for numbers in product(*(range(self._size(one)) for one in sizes))]
        return found

    def draw(self, random: Random) -> Action:
        table, number = self._table, random.random
        while True:
            name, sizes, is_static = table[int(number() * len(table))]
            if is_static:
                return (name, *[int(number() * size) for size in sizes])
            lengths = [self._size(one) for one in sizes]
            if 0 not in lengths:
                return (name, *[int(number() * size) for size in lengths])

    def _size(self, size: int) -> int:
        if size > 0:
            return size
        return len(self.books.copies if size == LIVE else self._over if size == OVER else self.books.lost)

    def do(self, action: Action) -> bool:
        move = self._moves.get(action[0])
        if move is None or not move(*action[1:]):
            return False
        self.operations += 1
        self._compare_counts()
        return True

    def describe(self) -> dict[str, str]:
        return describe_ledger(self.core.ledger)

    def wind_down(self) -> Action | None:
        for copy in self.books.copies.values():
            if copy.since < 0:
                return ("submit", 0)
            worker = next(one for one in self.books.workers if not copy.reported >> one & 1)
            place = [one.id for one in self._submitted()].index(copy.id)
            return ("report", place, worker)
        for number, name in enumerate(self._names):
            if name in self.books.requests:
                return ("finish", number, 0)
        return None

    def _name(self, number: int) -> str:
        return self._names[number % len(self._names)]

    # What a request does.

    def _arrive(self, number: int) -> bool:
        name = self._name(number)
        self.core.arrive(name)
        self.books.book(name)
        return True

    def _match(self, number: int, prompt: int, start: int, size: int) -> bool:
        name = self._name(number)
        keys = self._prompts[prompt % len(self._prompts)][start : start + size + 1]
        match = self.core.match(name, keys)
        hits, waits_for = self.books.match(name, keys)
        if (match.hits, match.waits_for) != (hits, waits_for):
            readable = Property.PUBLISH_AFTER_COMMIT if match.hits > hits else Property.MATCH_HOLDS
            raise PropertyBroken(readable, f"{name} was answered {match}; the books say {hits}, {waits_for}")
        events = len(self._log)
        self.operations += 1
        if self.core.match(name, keys) != match or len(self._log) != events:
            raise PropertyBroken(
                Property.LEGAL_CALLS, f"{name} asked the same again, and it was another answer, or an event"
            )
        return True

    def _ask(self, number: int) -> bool:
        name = self._name(number)
        book = self.books.requests.get(name)
        free = book is None or not (book.load or book.over)
        if self.core.may_match(name) != free:
            raise PropertyBroken(
                Property.ONE_RELEASE_PER_HOLD, f"whether {name} may match, is answered {not free}"
            )
        answer, expected = self.core.waits_for(name), self.books.waits_for(name)
        if answer != expected:
            raise PropertyBroken(Property.PROGRESS, f"{name} waits for {answer}; the books say {expected}")
        return True

    def _release(self, number: int) -> bool:
        name = self._name(number)
        self.core.release(name)
        self.books.release(name)
        return True

    def _preempt(self, number: int) -> bool:
        name = self._name(number)
        self.core.preempt(name)
        self.books.preempt(name)
        return True

    def _finish(self, number: int, aborted: int) -> bool:
        name = self._name(number)
        released, expected = self.core.finish(name, aborted=bool(aborted)), self.books.finish(name)
        if released != expected:
            raise PropertyBroken(
                Property.ONE_RELEASE_PER_HOLD,
                f"{name} is over, and released is {released}: only its load holds it",
            )
        return True

    def _advance(self, number: int, settled: int, ahead: int) -> bool:
        name = self._name(number)
        book = self.books.requests.get(name)
        if book is not None and book.over:
            return False
        self.core.arrive(name)
        book = self.books.book(name)
        book.cursors = (settled, 0), (settled + ahead, ahead)
        self.core.advance([(name, *book.cursors)])
        return True

    # Loads.

    def _load(self, place: int, accepted: int, pattern: int) -> bool:
        """Of one of the matches, its first blocks, and of these what the pattern says."""
        books, chunk = self.books, self.options.blocks_per_chunk
        matches = [(name, book) for name, book in books.requests.items() if book.matched]
        if not matches:
            return False
        name, book = matches[place % len(matches)]
        matched = book.matched
        accepted = min(accepted, len(matched))
        contents, parts = self._wanted(matched[:accepted], pattern)
        idle = books.idle_device_blocks()
        if len(idle) < len(contents):
            return False
        blocks = idle[: len(contents)]
        whole = len(parts) == accepted * chunk
        full = len(books.copies) >= self.options.max_live_transfers
        void = any(block.void for block in matched)
        try:
            job = self.core.prepare_load(name, blocks, () if whole else parts)
        except LimitReached as refusal:
            if not (full and accepted and not void):
                raise PropertyBroken(
                    Property.LEGAL_CALLS, f"a load of {name} was refused: {refusal}"
                ) from refusal
            return True
        if (job is not None) != (accepted > 0 and not void and not full):
            message = f"{name} loads {accepted} of {len(matched)} blocks, void: {void}; the job is {job}"
            raise PropertyBroken(Property.MATCH_HOLDS, message)
        if job is not None:
            copy = Copy(job.transfer, name, self._pairs(job, blocks), contents, books.epoch)
            books.plan_load(copy, accepted)
            self._look_at_leases(blocks)
        else:
            books.release(name)
            book.fresh = not accepted
        return True

    def _load_nothing(self, number: int) -> bool:
        """A request that matches nothing has nothing to load, whatever it says (S8)."""
        name, events = self._name(number), len(self._log)
        book = self.books.requests.get(name)
        if book is not None and book.matched:
            return False
        job = self.core.prepare_load(name, [0] * self.options.blocks_per_chunk)
        if job is not None or len(self._log) != events:
            raise PropertyBroken(Property.MATCH_HOLDS, f"{name} matches nothing, and loads {job}")
        return True

    def _wanted(self, blocks: Sequence[Block], pattern: int) -> tuple[list[Content], list[int]]:
        """Which places of these blocks are loaded: all, or of each in turn all, the last, or the first."""
        contents, parts, chunk = [], [], self.options.blocks_per_chunk
        for place, block in enumerate(blocks):
            for part in range(chunk):
                if chunk == 1 or not pattern or (place + pattern + part) % 3:
                    contents.append((block.key, part))
                    parts.append(place * chunk + part)
        return contents, parts

    # Time, questions, the cache as a whole.

    def _flush(self) -> bool:
        named, expected = self.core.flush(), tuple([copy.id for copy in self._submitted()])
        if named != expected:
            raise PropertyBroken(
                Property.LAST_STEP, f"workers are to wait for {named}; under way are {expected}"
            )
        return True

    def _flush_one(self, place: int) -> bool:
        copy = self._any(place)
        if copy is None:
            return False
        named = self.core.flush([copy.id, self.core.ledger.seq + 1])
        if named != ((copy.id,) if copy.since >= 0 else ()):
            raise PropertyBroken(
                Property.LAST_STEP, f"workers are to wait for {named}, when asked for {copy.id} alone"
            )
        return True

    def _lookup(self, prompt: int, place: int) -> bool:
        key = self._prompts[prompt % len(self._prompts)][place]
        answer, block = self.core.lookup(key), self.books.where.get(key)
        expected = LookupResult.MISS
        if block is not None:
            expected = LookupResult.HIT if block.stored else LookupResult.HIT_PENDING
        if answer is not expected:
            readable = Property.PUBLISH_AFTER_COMMIT if answer is LookupResult.HIT else Property.MATCH_HOLDS
            raise PropertyBroken(readable, f"key {key.hex()} is a {answer.value}; it is a {expected.value}")
        return True

    def _in_flight(self, prompt: int) -> bool:
        where, keys = self.books.where, self._prompts[prompt % len(self._prompts)]
        blocks = [where[key] for key in keys if key in where]
        answer = self.core.in_flight([block.slot for block in blocks])
        expected = next((block.store for block in blocks if not block.stored), None)
        if expected is None:
            loads = [copy for copy in self.books.copies.values() if not copy.store]
            expected = next((one.id for one in loads if not set(one.blocks).isdisjoint(blocks)), None)
        if answer != expected:
            raise PropertyBroken(
                Property.PROGRESS, f"in flight of {keys} is {answer}; the books say {expected}"
            )
        return True

    def _leased(self, block: int) -> bool:
        blocks = [block, 0]
        if self.core.leased(blocks) != self.books.under_copy(blocks):
            raise PropertyBroken(
                Property.NO_REUSE_IN_FLIGHT,
                f"whether a copy touches one of {blocks}, is answered the wrong way",
            )
        return True

    def _touch(self, prompt: int, place: int) -> bool:
        keys = self._prompts[prompt % len(self._prompts)][place:]
        where, events = self.books.where, len(self._log)
        self.core.touch([*keys, *keys[:1]])
        if (len(self._log) > events) != any(key in where and where[key].stored for key in keys):
            raise PropertyBroken(
                Property.FULL_OFFLOAD, f"what is resident of {keys} is touched, and nothing else is"
            )
        return True

    def _tick(self) -> bool:
        events = len(self._log)
        self.core.tick()
        if self.books.let_time_pass(self.options.transfer_ticks) != (len(self._log) > events):
            raise PropertyBroken(
                Property.PROGRESS, "time passes for those that wait for a bound, and for nobody else"
            )
        return True

    def _end_step(self) -> bool:
        self.core.end_step()
        return True

    def _take_events(self) -> bool:
        """What consumers of the events hold is what can be read (S10)."""
        for event in self.core.take_events():
            if event.removed:
                self._announced.difference_update(event.keys)
            else:
                self._announced.update(event.keys)
        readable = {key for key, block in self.books.where.items() if block.stored}
        if self._announced != readable:
            wrong = sorted(self._announced ^ readable)
            raise PropertyBroken(Property.EVENTS_ARE_STATE, f"the events tell another story of keys {wrong}")
        return True

    def _reset(self) -> bool:
        books, log = self.books, self._log
        events, planned = len(log), self._planned()
        at_rest, happened = self.core.reset(), books.reset()
        if happened:
            self._over += planned
            self._forget_older()
        if (len(log) > events) != happened or at_rest != (not books.copies):
            raise PropertyBroken(
                Property.NO_STALE_DATA, f"a reset said {at_rest}, and {len(books.copies)} copies are left"
            )
        if self.core.ledger.index:
            raise PropertyBroken(
                Property.NO_STALE_DATA, f"a reset left {len(self.core.ledger.index)} keys to be found"
            )
        events = len(log)
        self.operations += 1
        if self.core.reset() != at_rest or len(log) != events:
            raise PropertyBroken(Property.LEGAL_CALLS, "a reset twice is as once")
        return True

    def _misuse(self, which: int) -> bool:
        """What the engine got wrong is refused, and nothing has changed."""
        call = self._misuses()[which]
        if call is None:
            return False
        seq = self.core.ledger.seq
        try:
            call()
        except (KvsmError, ValueError):
            pass
        else:
            raise PropertyBroken(Property.LEGAL_CALLS, f"wrong call number {which} was accepted")
        if self.core.ledger.seq != seq:
            raise PropertyBroken(
                Property.LEGAL_CALLS, f"wrong call number {which} was refused, and is an event"
            )
        return True

    def _misuses(self) -> list[Callable[[], object] | None]:
        core, books = self.core, self.books
        planned, submitted = self._planned(), self._submitted()
        chunk, size = self.options.blocks_per_chunk, self.core.config.device_blocks
        matched = next((name for name, one in books.requests.items() if one.matched), None)
        pins = len(books.requests[matched].matched) if matched else 0
        void = matched and any(block.void for block in books.requests[matched].matched)
        busy = sorted(books.leased)[:chunk]
        busy = busy * chunk if len(busy) < chunk else busy
        return [
            lambda: core.submit([core.ledger.seq + 5]),
            (lambda: core.submit([planned[0].id] * 2)) if planned else None,
            (lambda: core.submit([submitted[0].id])) if submitted else None,
            (lambda: core.prepare_load(matched, [size] * chunk)) if matched else None,
            (lambda: core.prepare_load(matched, busy)) if matched and busy and not void else None,
            (lambda: core.prepare_load(matched, [0] * chunk * (pins + 1))) if matched else None,
            lambda: core.prepare_store("r0", [b"a", b"b"], [0] * chunk),
            lambda: core.prepare_store("r0", [b"a"], [*range(1, chunk), size]),
        ]

    # What must hold.

    def _compare_counts(self) -> None:
        """A few numbers that most of what can go wrong would change."""
        ledger, books = self.core.ledger, self.books
        if len(books.copies) > self.most_in_flight:
            self.most_in_flight = len(books.copies)
        counted = (
            len(ledger.index),
            len(ledger.free),
            len(ledger.policy),
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
            # The ledger may tell more exactly what is wrong with it.
            self._check_ledger()
            for (property, noun), ours, theirs in zip(_COUNTS, counted, expected):
                if ours != theirs:
                    raise PropertyBroken(property, f"{ours} {noun}, and it should be {theirs}")

    def check(self) -> None:
        self._check_data()
        self._check_requests()
        self._take_events()
        ledger, books = self.core.ledger, self.books
        if set(ledger.transfers) != set(books.copies):
            raise PropertyBroken(
                Property.STALE_REPORTS, f"transfers {[*ledger.transfers]} live, and not {[*books.copies]}"
            )
        leased = set(to_list(ledger.leases.view.nonzero()[0]))
        if leased != books.leased.keys() | books.retired:
            raise PropertyBroken(
                Property.ONE_RELEASE_PER_HOLD,
                f"device blocks {sorted(leased)} are leased, and not those of copies",
            )
        if list(ledger.offers.times.items()) != list(books.offers.items()):
            raise PropertyBroken(
                Property.STORED_ONCE, f"counted offers are {ledger.offers.times}, and not {books.offers}"
            )
        self._check_ledger()
        if self.wind_down() is None:
            _raise_first(check_rest(ledger))
            if self.options.folds_log:
                self._check_fold()

    def _check_ledger(self) -> None:
        _raise_first(check_ledger(self.core.ledger))

    def _check_data(self) -> None:
        """What can be found holds its own bytes on every worker (S2, S15)."""
        ledger, books, chunk = self.core.ledger, self.books, self.options.blocks_per_chunk
        for key, block in books.where.items():
            if ledger.index.get(key) != block.slot:
                raise PropertyBroken(
                    Property.STORED_ONCE, f"key {key.hex()} is looked for in slot {ledger.index.get(key)}"
                )
            for part in range(chunk if block.stored else 0):
                if not books.has_everywhere(block.slot * chunk + part, (key, part)):
                    raise PropertyBroken(
                        Property.PUBLISH_AFTER_COMMIT, f"key {key.hex()} can be read, and has other bytes"
                    )

    def _check_requests(self) -> None:
        for name, entry in self.core.ledger.requests.items():
            book = self.books.requests.get(name)
            if book is None:
                raise PropertyBroken(
                    Property.ONE_RELEASE_PER_HOLD,
                    f"request {name} is over, and the core has not forgotten it",
                )
            if entry.load != (book.load.id if book.load else 0):
                raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, f"request {name} does not know its load")
            if to_list(entry.pins) != [block.slot for block in book.matched]:
                raise PropertyBroken(
                    Property.MATCH_HOLDS, f"request {name} holds {entry.pins}, and not what was counted"
                )
            if (entry.settled, entry.offered) != book.cursors:
                raise PropertyBroken(
                    Property.STORED_ONCE, f"request {name} has other cursors than {book.cursors}"
                )

    def _check_fold(self) -> None:
        folded = Ledger(self.core.config)
        for event in self._log:
            folded.apply(event)
        if digest(folded) != digest(self.core.ledger):
            raise PropertyBroken(Property.EVENTS_ARE_STATE, "the log folds to another state")

    def fingerprint(self) -> bytes:
        """Transfers are named by their order; of numbers that only grow, what counts are the distances. Slots
        and device blocks keep their names: they stand in orders that decide what is handed out."""
        return blake2b(repr(self._canonical()).encode(), digest_size=16).digest()

    def _canonical(self) -> tuple[object, ...]:
        ledger, books = self.core.ledger, self.books
        rank = {copy: number for number, copy in enumerate(books.copies, 1)}
        copies = [
            (one.pairs, one.contents, one.request, one.void, one.failed, one.landed, one.reported)
            for one in books.copies.values()
        ]
        ages = [
            (one.epoch - books.epoch, books.tick - one.since, one.since >= 0, ledger.transfers[one.id].flush)
            for one in books.copies.values()
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
        lost = [(one.pairs, one.store) for one in books.lost]
        over = bool(self._over), sorted(self._announced)
        return copies, ages, requests, holds, slots, notes, pool, cells, lost, over


def _raise_first(violations: Sequence[Violation]) -> None:
    for violation in violations:
        raise PropertyBroken(violation.property, violation.message)


__all__ = ["CoreOptions", "CoreWorld", "draw_options"]
