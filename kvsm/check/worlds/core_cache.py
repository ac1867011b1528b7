"""Actions of the core world on the whole cache: questions, time, wrong calls, reset and restart."""

from __future__ import annotations

from collections.abc import Callable

from kvsm.check.worlds.core_bench import CoreActions, CoreBench
from kvsm.core.kv_events import Publisher
from kvsm.core.offloader import LookupResult, Offloader, expect_misuse
from kvsm.errors import KvsmError, PropertyBroken
from kvsm.properties import Property
from kvsm.tiers.warm_restart import KILLED


class CacheActions(CoreActions):
    """The calls of the core that name neither a request nor a transfer."""

    def __init__(self, bench: CoreBench) -> None:
        super().__init__(bench)
        self.announced: set[bytes] = set()
        """The keys that a consumer of the KV events believes to be readable."""

    # Questions.

    def lookup(self, prompt: int, place: int) -> bool:
        """Ask whether one key is stored, in flight, or missing."""
        key = self.bench.prompt(prompt)[place]
        answer, block = self.core.lookup(key), self.books.where.get(key)
        expected = LookupResult.MISS
        if block is not None:
            expected = LookupResult.HIT if block.stored else LookupResult.HIT_PENDING
        if answer is not expected:
            early = answer is LookupResult.HIT
            broken = Property.PUBLISH_AFTER_COMMIT if early else Property.MATCH_HOLDS
            message = f"the core says that key {key.hex()} is a {answer.value}; it is a {expected.value}"
            raise PropertyBroken(broken, message)
        return True

    def in_flight(self, prompt: int) -> bool:
        """Ask which copy touches one of the blocks of a prompt."""
        where, keys = self.books.where, self.bench.prompt(prompt)
        blocks = [where[key] for key in keys if key in where]
        answer = self.core.in_flight([block.slot for block in blocks])
        expected = next((block.store for block in blocks if not block.stored), None)
        if expected is None:
            loads = [copy for copy in self.books.copies.values() if not copy.store]
            expected = next((load.id for load in loads if not set(load.blocks).isdisjoint(blocks)), None)
        if answer != expected:
            message = f"the core says that transfer {answer} touches {keys}; the books say {expected}"
            raise PropertyBroken(Property.PROGRESS, message)
        return True

    def leased(self, block: int) -> bool:
        """Ask whether a copy touches this device block or block 0."""
        blocks = [block, 0]
        answer, expected = self.core.leased(blocks), self.books.under_copy(blocks)
        if answer != expected:
            message = f"the core says that device blocks {blocks} are leased: {answer}; it is {expected}"
            raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)
        return True

    def touch(self, prompt: int, place: int) -> bool:
        """Use keys without a load. The core must emit an event exactly if one of the keys is resident."""
        keys = self.bench.prompt(prompt)[place:]
        where, events = self.books.where, len(self.log)
        self.core.touch([*keys, *keys[:1]])
        if (len(self.log) > events) != any(key in where and where[key].stored for key in keys):
            message = f"a touch of {keys} touches exactly the resident keys"
            raise PropertyBroken(Property.FULL_OFFLOAD, message)
        return True

    def flush(self) -> bool:
        """Let the workers wait for all submitted copies."""
        named, expected = self.core.flush(), tuple([copy.id for copy in self.bench.submitted()])
        if named != expected:
            message = f"the workers are to wait for {named}; the copies under way are {expected}"
            raise PropertyBroken(Property.LAST_STEP, message)
        return True

    def flush_one(self, place: int) -> bool:
        """Let the workers wait for one copy. The core must ignore an id that no transfer has."""
        copy = self.bench.live_copy(place)
        if copy is None:
            return False
        named = self.core.flush([copy.id, self.core.ledger.seq + 1])
        if named != ((copy.id,) if copy.submitted else ()):
            message = f"the workers are to wait for {named}; asked for was {copy.id} alone"
            raise PropertyBroken(Property.LAST_STEP, message)
        return True

    def take_events(self) -> bool:
        """Take the KV events. A consumer's set of keys must now equal the readable keys (S10)."""
        for event in self.core.take_events():
            if event.removed:
                self.announced.difference_update(event.keys)
            else:
                self.announced.update(event.keys)
        readable = {key for key, block in self.books.where.items() if block.stored}
        if self.announced != readable:
            wrong = sorted(self.announced ^ readable)
            raise PropertyBroken(Property.EVENTS_ARE_STATE, f"the KV events are wrong about keys {wrong}")
        return True

    # Time and the reset.

    def tick(self) -> bool:
        """Let time pass. The core must emit an event exactly if something waits for a bound."""
        events = len(self.log)
        self.core.tick()
        if self.books.let_time_pass(self.options.transfer_ticks) != (len(self.log) > events):
            raise PropertyBroken(Property.PROGRESS, "a tick is an event exactly if something waits for it")
        return True

    def end_step(self) -> bool:
        """End the engine's step."""
        self.core.end_step()
        return True

    def reset(self) -> bool:
        """Empty the cache, twice: the second reset changes nothing (S8)."""
        books, log, planned = self.books, self.log, self.bench.planned()
        events = len(log)
        at_rest, happened = self.core.reset(), books.reset()
        if happened:
            self.bench.keep_ended(planned)
        if (len(log) > events) != happened or at_rest != (not books.copies):
            message = f"a reset answered {at_rest}, but {len(books.copies)} copies are left"
            raise PropertyBroken(Property.NO_STALE_DATA, message)
        if self.core.ledger.index:
            message = f"a reset left {len(self.core.ledger.index)} keys that can be found"
            raise PropertyBroken(Property.NO_STALE_DATA, message)
        events = len(log)
        self.bench.operations += 1
        if self.core.reset() != at_rest or len(log) != events:
            raise PropertyBroken(Property.LEGAL_CALLS, "the second of two resets changed something")
        return True

    def restart(self) -> bool:
        """Kill the process, with its whole log written, and start another one on its pool.

        A router forgets the keys of the killed process; the new one publishes all that it has.
        """
        bench, books = self.bench, self.books
        bench.keep_ended(list(books.copies.values()))
        books.restart()
        bench.core = Offloader.restarted(
            self.core.ledger,
            self.core.config,
            bench.log,
            ended=KILLED,
            publisher=Publisher(),
            clock_ns=lambda: 0,
        )
        expect_misuse(bench.core)
        self.announced.clear()
        return True

    # Wrong calls.

    def misuse(self, which: int) -> bool:
        """Make a wrong call: the core must refuse it and change nothing (S8)."""
        call = self._wrong_calls()[which]
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
            message = f"wrong call number {which} was refused, but it is an event"
            raise PropertyBroken(Property.LEGAL_CALLS, message)
        return True

    def _wrong_calls(self) -> list[Callable[[], object] | None]:
        """The wrong calls, by number; None for a call that cannot be made in the present state."""
        core, books = self.core, self.books
        planned, submitted = self.bench.planned(), self.bench.submitted()
        chunk, size = self.options.blocks_per_chunk, self.core.config.device_blocks
        matched = next((name for name, book in books.requests.items() if book.matched), None)
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
