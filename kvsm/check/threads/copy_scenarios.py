"""Scenarios of the copy engines whose threads copy: the host engine, and the engine that verifies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from kvsm.check.threads.control import control
from kvsm.check.threads.primitives import ControlledThread
from kvsm.check.threads.scenario import ThreadScenario
from kvsm.copies.copy_engine import CopyEngine, CopyResult
from kvsm.copies.host import HostCopyEngine
from kvsm.copies.threaded import ThreadedTransfer
from kvsm.core.plan import TransferJob
from kvsm.errors import PropertyBroken, TransferFailed
from kvsm.events import Direction
from kvsm.ids import IdArray, pack
from kvsm.properties import Property

BLOCK_BYTES = 8
_THREADED = "kvsm.copies.threaded"
_HOST = "kvsm.copies.host"
SMALL_PIECES = {f"{_THREADED}:SHARED_BYTES": 1}
"""Cuts even a transfer of few bytes into a piece for each thread."""


def job(transfer: int, direction: Direction, blocks: Sequence[int]) -> TransferJob:
    """A transfer between the blocks of the same numbers."""
    keys, generations = names(blocks)
    return TransferJob(transfer, direction, pack(list(blocks)), pack(list(blocks)), keys, generations)


def names(blocks: Iterable[int]) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """The keys and generations of these host blocks, for pools that are kept."""
    numbers = tuple(blocks)
    return tuple(b"block %d" % number for number in numbers), tuple(1 + number for number in numbers)


def content(number: int) -> Any:
    """The bytes of a block in the pool that is read."""
    return np.full(BLOCK_BYTES, 100 + number, np.uint8)


class WatchedCopies(HostCopyEngine):
    """The host engine. It tracks the pieces that are being copied, and some pieces fail.

    bad: for a transfer the numbers of the first pair of pieces that fail.
    deadly: for a transfer the first pair of a piece after which its thread dies.
    """

    def __init__(self, blocks: int, threads: int) -> None:
        self.device = np.zeros((blocks, BLOCK_BYTES), np.uint8)
        self.host = np.zeros((blocks, BLOCK_BYTES), np.uint8)
        self.bad: dict[int, int] = {}
        self.deadly: dict[int, int] = {}
        self.copying: Counter[int] = Counter()
        self.failed: set[int] = set()
        self.over: set[int] = set()
        """Transfers whose result was returned to the caller."""
        super().__init__([self.device], self.host, threads)

    def copy_part(self, job: TransferJob, first: int, device_blocks: IdArray, host_blocks: IdArray) -> None:
        transfer = job.transfer
        self.copying[transfer] += 1
        try:
            # Memory is copied without the interpreter's lock: others run between its begin and its end.
            control().reach(f"copies from pair {first} of transfer {transfer} on")
            if transfer in self.over:
                fail_for_reuse(transfer, "is still copied after its result")
            if self.bad.get(transfer) == first:
                self.failed.add(transfer)
                raise OSError(f"pair {first} cannot be copied")
            super().copy_part(job, first, device_blocks, host_blocks)
            control().reach(f"has copied from pair {first} of transfer {transfer} on")
        finally:
            self.copying[transfer] -= 1
        if self.deadly.get(transfer) == first:
            self.failed.add(transfer)
            raise _DeadlyPiece

    def _end_piece(self, transfer: ThreadedTransfer, seconds: float, error: str) -> None:
        if error == "_DeadlyPiece":
            raise MemoryError("no memory for the books of a piece")
        super()._end_piece(transfer, seconds, error)


class _DeadlyPiece(Exception):
    """After this piece the bookkeeping of its thread fails."""


def fail_for_reuse(transfer: int, what: str) -> NoReturn:
    """End the run, because memory of a transfer may be used again too early."""
    control().fail(PropertyBroken(Property.NO_REUSE_IN_FLIGHT, f"transfer {transfer} {what}"))


class Ends:
    """How the transfers of an engine ended, by the results that its caller received."""

    def __init__(self, engine: CopyEngine, watched: WatchedCopies) -> None:
        self.engine, self.watched = engine, watched
        self.results: dict[int, CopyResult] = {}

    def poll(self) -> None:
        """Take new results, and check each of them."""
        for result in self.engine.poll():
            transfer, watched = result.transfer, self.watched
            if transfer in self.results:
                raise PropertyBroken(Property.PROGRESS, f"transfer {transfer} ends twice")
            self.results[transfer] = result
            if result.good and transfer in watched.failed:
                raise PropertyBroken(
                    Property.FAILURE_IS_NOT_SUCCESS, f"transfer {transfer} is good, and a piece of it failed"
                )
            if watched.copying[transfer]:
                fail_for_reuse(transfer, "is still copied when its result comes")
            watched.over.add(transfer)

    def expect(self, *transfers: int) -> None:
        """These have ended, and their results were polled."""
        for transfer in transfers:
            if transfer not in self.results:
                raise PropertyBroken(Property.PROGRESS, f"transfer {transfer} has no result")

    def expect_bytes(self, transfer: int, target: Any, blocks: Sequence[int]) -> None:
        """A good transfer has brought these blocks."""
        if self.results[transfer].good:
            for block in blocks:
                if not np.array_equal(target[block], content(block)):
                    raise PropertyBroken(
                        Property.CORRECT_BYTES,
                        f"transfer {transfer} is good, and block {block} has other bytes",
                    )


class HostCopies(ThreadScenario):
    """A store of several pieces, of which one may fail, and a load behind it."""

    says = "a caller of the host copy engine stores in pieces, of which any may fail, and loads"
    sizes: Mapping[str, int] = {"pieces": 2, "threads": 2, "loads": 1}
    modules = (_THREADED, _HOST)
    line_modules = (_THREADED,)
    constants = SMALL_PIECES
    notable = ("a piece fails", "all pieces are good", "a load ends before an older store")

    def body(self) -> None:
        run, pieces, loads = control(), self.size["pieces"], self.size["loads"]
        engine = WatchedCopies(pieces + loads, self.size["threads"])
        bad = run.choose("the piece that fails, or none", pieces + 1)
        if bad < pieces:
            engine.bad[1] = bad
        for block in range(pieces):
            engine.device[block] = content(block)
        for block in range(pieces, pieces + loads):
            engine.host[block] = content(block)
        ends = Ends(engine, engine)
        engine.submit(job(1, Direction.STORE, range(pieces)))
        for number in range(loads):
            engine.submit(job(2 + number, Direction.LOAD, [pieces + number]))
        ends.poll()
        if loads:
            engine.wait([2])
            ends.poll()
            ends.expect(2)
            if 1 not in ends.results:
                run.note_reached("a load ends before an older store")
        engine.drain()
        ends.poll()
        ends.expect(*range(1, 2 + loads))
        engine.close()
        run.note_reached("all pieces are good" if ends.results[1].good else "a piece fails")
        ends.expect_bytes(1, engine.host, range(pieces))
        for number in range(loads):
            ends.expect_bytes(2 + number, engine.device, [pieces + number])
        if not ends.results[1].good and bad == pieces:
            raise PropertyBroken(Property.PROGRESS, f"a good copy is bad: {ends.results[1].error}")


class HostClosing(ThreadScenario):
    """One thread submits and polls while another one closes the engine."""

    says = "one caller of the host copy engine submits and polls while another one closes it"
    sizes: Mapping[str, int] = {"copies": 2, "pieces": 2, "threads": 2}
    modules = (_THREADED, _HOST)
    line_modules = (_THREADED,)
    constants = SMALL_PIECES
    notable = ("a copy is refused", "a copy is accepted", "the close comes first")

    def body(self) -> None:
        run, pieces, copies = control(), self.size["pieces"], self.size["copies"]
        engine = WatchedCopies(pieces * copies, self.size["threads"])
        for block in range(pieces * copies):
            engine.device[block] = content(block)
        ends, accepted = Ends(engine, engine), list[int]()

        def submit() -> None:
            for number in range(copies):
                blocks = range(pieces * number, pieces * (number + 1))
                try:
                    engine.submit(job(1 + number, Direction.STORE, blocks))
                except TransferFailed:
                    run.note_reached("a copy is refused" if number else "the close comes first")
                else:
                    accepted.append(1 + number)
                    run.note_reached("a copy is accepted")
                ends.poll()

        submitter = ControlledThread(target=submit, name="submitter")
        submitter.start()
        engine.close()
        if any(engine.copying.values()):
            fail_for_reuse(0, "of some number is copied after the close")
        submitter.join()
        ends.poll()
        ends.expect(*accepted)
        for transfer in accepted:
            first = pieces * (transfer - 1)
            ends.expect_bytes(transfer, engine.host, range(first, first + pieces))


class HostDying(ThreadScenario):
    """A copying thread dies in the bookkeeping of a piece."""

    says = "a copying thread of the host copy engine dies while others copy"
    sizes: Mapping[str, int] = {"pieces": 2, "threads": 2}
    modules = (_THREADED, _HOST)
    line_modules = (_THREADED,)
    constants = SMALL_PIECES
    notable = ("a copy behind it is good", "a copy behind it is bad", "a copy behind it is refused")

    def body(self) -> None:
        run, pieces = control(), self.size["pieces"]
        engine = WatchedCopies(pieces + 1, self.size["threads"])
        engine.deadly[1] = run.choose("the piece after which a thread dies", pieces)
        ends, accepted = Ends(engine, engine), [1]
        engine.submit(job(1, Direction.STORE, range(pieces)))
        try:
            engine.submit(job(2, Direction.STORE, [pieces]))
            accepted.append(2)
        except TransferFailed:
            run.note_reached("a copy behind it is refused")
        ends.poll()
        engine.drain()
        ends.poll()
        ends.expect(*accepted)
        engine.close()
        if 2 in ends.results:
            run.note_reached(f"a copy behind it is {'good' if ends.results[2].good else 'bad'}")
