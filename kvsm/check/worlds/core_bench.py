"""The state that the core world's actions share: the real core, its log, and its reference books."""

from __future__ import annotations

from collections.abc import Sequence

from kvsm.check.worlds.core_books import BookedCopy, ReferenceBooks
from kvsm.check.worlds.core_options import CoreOptions
from kvsm.core.kv_events import Publisher
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader, expect_misuse
from kvsm.core.plan import TransferJob
from kvsm.errors import PropertyBroken
from kvsm.ids import to_list
from kvsm.properties import Property

_ENDED_KEPT = 16
"""How many ended transfers are remembered, to report on them too late."""


class CoreBench:
    """The core under test and its reference books.

    prompts: the keys of each prompt.
    names: the names of the requests.
    ended: the most recently ended transfers, oldest first.
    operations: calls on the core and moves of bytes so far, each compared with the books.
    """

    def __init__(self, options: CoreOptions) -> None:
        config = options.config()
        self.options = options
        self.log = MemoryLog()
        self.core = Offloader(config, self.log, publisher=Publisher(), clock_ns=lambda: 0)
        expect_misuse(self.core)
        self.books = ReferenceBooks(
            options.host_blocks,
            config.device_blocks,
            options.workers,
            options.blocks_per_chunk,
            options.defer_ticks,
        )
        self.prompts = [options.keys(prompt) for prompt in range(options.prompts)]
        self.names = [f"r{number}" for number in range(options.requests)]
        self.ended: list[BookedCopy] = []
        self.operations = 0

    def name(self, number: int) -> str:
        """The name of the request with this number."""
        return self.names[number % len(self.names)]

    def prompt(self, number: int) -> list[bytes]:
        """The keys of the prompt with this number."""
        return self.prompts[number % len(self.prompts)]

    def planned(self) -> list[BookedCopy]:
        """The copies that were not submitted yet."""
        return [copy for copy in self.books.copies.values() if not copy.submitted]

    def submitted(self) -> list[BookedCopy]:
        """The copies that the workers have."""
        return [copy for copy in self.books.copies.values() if copy.submitted]

    def live_copy(self, place: int) -> BookedCopy | None:
        """The live copy, planned or submitted, at this place (modulo their number); None without one."""
        copies = list(self.books.copies.values())
        return copies[place % len(copies)] if copies else None

    def keep_ended(self, copies: Sequence[BookedCopy]) -> None:
        """Remember these copies, so that a worker can report on them too late."""
        self.ended += copies
        del self.ended[:-_ENDED_KEPT]

    def pairs_of(self, job: TransferJob, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """(device block, host block) of each block of the job, whose device blocks must be `blocks` (S15)."""
        sources = to_list(job.device_blocks)
        if sources != list(blocks):
            message = f"a job names device blocks {sources} instead of {list(blocks)}"
            raise PropertyBroken(Property.CORRECT_BYTES, message)
        return list(zip(sources, to_list(job.host_blocks), strict=True))

    def check_leases(self, blocks: Sequence[int]) -> None:
        """Check that each of these device blocks is leased exactly if a copy holds it (S3)."""
        words, books = self.core.ledger.leases.words, self.books
        for block in blocks:
            if (words[block] != 0) != (block in books.leased or block in books.retired):
                held = "is leased, but no copy has it" if words[block] else "is not leased, but a copy has it"
                raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, f"device block {block} {held}")


class CoreActions:
    """Base of the groups of actions. Each public method is the action of its name.

    A method returns False, with nothing changed, if the action cannot happen now. It raises `PropertyBroken`
    if an answer of the core differs from the books.
    """

    def __init__(self, bench: CoreBench) -> None:
        self.bench, self.options = bench, bench.options
        self.books, self.log = bench.books, bench.log

    @property
    def core(self) -> Offloader:
        """The core under test. A restart replaces it."""
        return self.bench.core
