"""Actions of the core world on requests: arrive, match, load, advance, preempt, finish."""

from __future__ import annotations

from collections.abc import Sequence

from kvsm.check.worlds.core_bench import CoreActions
from kvsm.check.worlds.core_books import BookedBlock, BookedCopy, Content
from kvsm.errors import LimitReached, PropertyBroken
from kvsm.properties import Property


class RequestActions(CoreActions):
    """The calls of the core that name a request."""

    def arrive(self, number: int) -> bool:
        """Announce the request to the core."""
        name = self.bench.name(number)
        self.core.arrive(name)
        self.books.book(name)
        return True

    def match(self, number: int, prompt: int, start: int, size: int) -> bool:
        """Match a part of a prompt, and repeat the call: the same answer, and no event (S8)."""
        name = self.bench.name(number)
        keys = self.bench.prompt(prompt)[start : start + size + 1]
        match = self.core.match(name, keys)
        hits, waits_for = self.books.match(name, keys)
        if (match.hits, match.waits_for) != (hits, waits_for):
            broken = Property.PUBLISH_AFTER_COMMIT if match.hits > hits else Property.STORED_SO_SERVED
            raise PropertyBroken(broken, f"{name} was answered {match}; the books say {hits}, {waits_for}")
        events = len(self.log)
        self.bench.operations += 1
        if self.core.match(name, keys) != match or len(self.log) != events:
            message = f"{name} asked the same again, and got another answer or caused an event"
            raise PropertyBroken(Property.LEGAL_CALLS, message)
        return True

    def ask(self, number: int) -> bool:
        """Ask whether the request may match, and what it waits for."""
        name = self.bench.name(number)
        book = self.books.requests.get(name)
        free = book is None or not (book.load or book.over)
        if self.core.may_match(name) != free:
            message = f"the core says that {name} may match: {not free}; the books say {free}"
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)
        answer, expected = self.core.waits_for(name), self.books.waits_for(name)
        if answer != expected:
            message = f"{name} waits for {answer}; the books say {expected}"
            raise PropertyBroken(Property.PROGRESS, message)
        return True

    def release(self, number: int) -> bool:
        """Release a match without loading it."""
        name = self.bench.name(number)
        self.core.release(name)
        self.books.release(name)
        return True

    def preempt(self, number: int) -> bool:
        """Preempt the request: the engine frees its device blocks."""
        name = self.bench.name(number)
        self.core.preempt(name)
        self.books.preempt(name)
        return True

    def finish(self, number: int, aborted: int) -> bool:
        """Finish the request. The core may keep its record only while a load of it is in flight (S4)."""
        name = self.bench.name(number)
        released, expected = self.core.finish(name, aborted=bool(aborted)), self.books.finish(name)
        if released != expected:
            message = f"{name} is over; the core says released: {released}, the books say {expected}"
            raise PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)
        return True

    def advance(self, number: int, settled: int, ahead: int) -> bool:
        """Move the request's cursors."""
        name = self.bench.name(number)
        book = self.books.requests.get(name)
        if book is not None and book.over:
            return False
        self.core.arrive(name)
        book = self.books.book(name)
        book.cursors = (settled, 0), (settled + ahead, ahead)
        self.core.advance([(name, *book.cursors)])
        return True

    def load(self, place: int, accepted: int, pattern: int) -> bool:
        """Load the first `accepted` blocks of a match, or the parts of them that `pattern` selects."""
        books = self.books
        matches = [(name, book) for name, book in books.requests.items() if book.matched]
        if not matches:
            return False
        name, book = matches[place % len(matches)]
        accepted = min(accepted, len(book.matched))
        contents, parts = self._parts_of(book.matched[:accepted], pattern)
        idle = books.idle_device_blocks()
        if len(idle) < len(contents):
            return False
        blocks = idle[: len(contents)]
        whole = len(parts) == accepted * self.options.blocks_per_chunk
        full = len(books.copies) >= self.options.max_live_transfers
        void = any(block.void for block in book.matched)
        self.core.admit(name, on_host=accepted * self.options.blocks_per_chunk)
        try:
            job = self.core.prepare_load(name, blocks, () if whole else parts)
        except LimitReached as refusal:
            if not (full and accepted and not void):
                message = f"a load of {name} was refused: {refusal}"
                raise PropertyBroken(Property.LEGAL_CALLS, message) from refusal
            return True
        if (job is not None) != (accepted > 0 and not void and not full):
            message = f"{name} loads {accepted} of {len(book.matched)} blocks, void: {void}; the job is {job}"
            raise PropertyBroken(Property.MATCH_HOLDS, message)
        if job is None:
            books.release(name)
            book.fresh = not accepted
        else:
            pairs = self.bench.pairs_of(job, blocks)
            books.plan_load(BookedCopy(job.transfer, name, pairs, contents, books.epoch), accepted)
            self.bench.check_leases(blocks)
        return True

    def load_nothing(self, number: int) -> bool:
        """Ask for the load of a request without a match: it must load nothing (S7)."""
        name, events = self.bench.name(number), len(self.log)
        book = self.books.requests.get(name)
        if book is not None and book.matched:
            return False
        job = self.core.prepare_load(name, [0] * self.options.blocks_per_chunk)
        if job is not None or len(self.log) != events:
            raise PropertyBroken(Property.MATCH_HOLDS, f"{name} has no match, and loads {job}")
        return True

    def _parts_of(self, blocks: Sequence[BookedBlock], pattern: int) -> tuple[list[Content], list[int]]:
        """(contents, parts) to load of these blocks.

        pattern: 0 selects all parts; else a block of two parts loads both, the first or the second, in turn.
        """
        contents, parts, chunk = [], [], self.options.blocks_per_chunk
        for place, block in enumerate(blocks):
            for part in range(chunk):
                if chunk == 1 or not pattern or (place + pattern + part) % 3:
                    contents.append((block.key, part))
                    parts.append(place * chunk + part)
        return contents, parts
