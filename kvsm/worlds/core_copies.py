"""Copies in the core world: submitted, taken back, carried out, reported in every way, and lost."""

from __future__ import annotations

from kvsm.errors import PropertyBroken
from kvsm.events import Direction, ReportRejected
from kvsm.ids import to_list
from kvsm.offloader import Ended
from kvsm.properties import Property
from kvsm.worlds.core_books import Copy
from kvsm.worlds.core_offers import Offers
from kvsm.worlds.core_options import CoreOptions

_LATE = 16
"""How many transfers that are over may still be reported."""


class Copies(Offers):
    """The actions of workers and of whoever drives them."""

    def __init__(self, options: CoreOptions) -> None:
        super().__init__(options)
        self._over: list[Copy] = []

    def _forget_older(self) -> None:
        del self._over[:-_LATE]

    def _submitted(self) -> list[Copy]:
        return [copy for copy in self.books.copies.values() if copy.since >= 0]

    def _planned(self) -> list[Copy]:
        return [copy for copy in self.books.copies.values() if copy.since < 0]

    def _any(self, place: int) -> Copy | None:
        copies = list(self.books.copies.values())
        return copies[place % len(copies)] if copies else None

    def _submit(self, place: int) -> bool:
        planned = self._planned()
        return bool(planned) and self._submit_these([planned[place % len(planned)]])

    def _submit_all(self) -> bool:
        planned = self._planned()
        return bool(planned) and self._submit_these(planned)

    def _submit_these(self, copies: list[Copy]) -> bool:
        self.core.submit([copy.id for copy in copies])
        for copy in copies:
            copy.since = self.books.tick
        return True

    def _land(self, place: int, worker: int) -> bool:
        copies = self._submitted()
        copy = copies[place % len(copies)] if copies else None
        worker %= self.options.workers
        if copy is None or copy.reported >> worker & 1:
            return False
        self.books.land(copy, worker)
        return True

    def _land_lost(self, place: int, worker: int) -> bool:
        """Nobody knows when a worker that was given up stops writing (S3)."""
        lost = self.books.lost
        if lost:
            self.books.land(lost[place % len(lost)], worker % self.options.workers)
        return bool(lost)

    def _report(self, place: int, worker: int) -> bool:
        """Good: its bytes have moved by then."""
        copies = self._submitted()
        return bool(copies) and self._hear(copies[place % len(copies)], worker, True)

    def _report_early(self, place: int, worker: int, good: int) -> bool:
        """A copy that was not submitted has nothing to report."""
        copies = self._planned()
        return bool(copies) and self._hear(copies[place % len(copies)], worker, bool(good))

    def _fail(self, place: int, worker: int) -> bool:
        copies = self._submitted()
        return bool(copies) and self._hear(copies[place % len(copies)], worker, False)

    def _report_as(self, place: int, worker: int, good: int, right: int) -> bool:
        """By the calls that name a direction, the right one or the other."""
        copy = self._any(place)
        if copy is None:
            return False
        direction = Direction.STORE if copy.store == bool(right) else Direction.LOAD
        return self._hear(copy, worker, bool(good), direction)

    def _report_late(self, place: int, worker: int, good: int) -> bool:
        copies = self._over
        return bool(copies) and self._hear(copies[place % len(copies)], worker, bool(good))

    def _report_stray(self, which: int, good: int) -> bool:
        """Of a transfer or of a worker that does not exist."""
        live, seq = next(iter(self.books.copies), 1), self.core.ledger.seq
        transfer, worker = (
            (seq + 3, 0),
            (0, 0),
            (-1, 0),
            (live, self.options.workers),
            (live, -1),
        )[which]
        events = len(self._log)
        self._must_be_rejected(self.core.report(transfer, worker, bool(good)), events, transfer, worker)
        return True

    def _must_be_rejected(self, ended: Ended | None, events: int, transfer: int, worker: int) -> None:
        if ended is not None or len(self._log) != events + 1 or type(self._log[-1]) is not ReportRejected:
            message = f"a report of worker {worker} on transfer {transfer} was taken"
            raise PropertyBroken(
                Property.STALE_REPORTS, f"{message}: it is late, doubled, or names what does not exist"
            )

    def _hear(self, copy: Copy, worker: int, good: bool, direction: Direction | None = None) -> bool:
        """Hand a report to the core. Whether it counts, the books know."""
        books, worker = self.books, worker % self.options.workers
        runs = copy.id in books.copies and copy.since >= 0 and not copy.reported >> worker & 1
        if runs and good and not copy.landed >> worker & 1:
            books.land(copy, worker)
        events = len(self._log)
        ended = self._call(copy.id, worker, good, direction)
        if not runs or (direction is not None and (direction is Direction.STORE) != copy.store):
            self._must_be_rejected(ended, events, copy.id, worker)
            return True
        if type(self._log[-1]) is ReportRejected:
            raise PropertyBroken(
                Property.STALE_REPORTS, f"the report of worker {worker} on transfer {copy.id} was rejected"
            )
        copy.reported |= 1 << worker
        copy.failed |= not good
        if copy.reported == books.all_workers:
            whole = not copy.failed and not copy.void
            self._check_end(copy, ended, whole)
            self._close(copy, whole, failed=copy.failed and not copy.void)
        elif ended is not None:
            raise PropertyBroken(
                Property.PUBLISH_AFTER_COMMIT, f"transfer {copy.id} ended before every worker had reported"
            )
        return True

    def _call(self, transfer: int, worker: int, good: bool, direction: Direction | None) -> Ended | None:
        core = self.core
        if direction is None:
            return core.report(transfer, worker, good)
        if direction is Direction.STORE:
            return (core.complete_store if good else core.fail_store)(transfer, worker)
        return (core.complete_load if good else core.fail_load)(transfer, worker)

    def _check_end(self, copy: Copy, ended: Ended | None, good: bool, lost: bool = False) -> None:
        if ended is None:
            raise PropertyBroken(
                Property.PROGRESS, f"transfer {copy.id} has nothing left to wait for, and did not end"
            )
        if ended.good != good:
            raise PropertyBroken(
                Property.FAILURE_IS_NOT_SUCCESS,
                f"transfer {copy.id} ended, and good is said to be {ended.good}",
            )
        told = (ended.transfer, ended.direction is Direction.STORE, ended.request, ended.lost)
        if told != (copy.id, copy.store, copy.request, lost):
            raise PropertyBroken(Property.STALE_REPORTS, f"the end of transfer {copy.id} is told as {ended}")
        if to_list(ended.device_blocks) != [block for block, _ in copy.pairs]:
            raise PropertyBroken(
                Property.STALE_REPORTS, f"transfer {copy.id} ended with other device blocks: {ended}"
            )

    def _close(self, copy: Copy, good: bool, failed: bool = False, lost: bool = False) -> None:
        self.books.end(copy, good, failed, lost)
        self._over.append(copy)
        self._forget_older()
        self._look_at_leases([block for block, _ in copy.pairs])

    def _cancel(self, place: int) -> bool:
        copy = self._any(place)
        if copy is None:
            return False
        ended = self.core.cancel(copy.id)
        if copy.since >= 0:
            if ended is not None:
                raise PropertyBroken(
                    Property.NO_REUSE_IN_FLIGHT, f"transfer {copy.id} was taken back, and workers have it"
                )
            return True
        self._check_end(copy, ended, False)
        self._close(copy, False)
        return True

    def _end_late(self, place: int) -> bool:
        """What is over can be neither taken back nor lost (S8)."""
        transfer, events = self._over[place % len(self._over)].id if self._over else 0, len(self._log)
        if self.core.cancel(transfer) or self.core.lose(transfer) or len(self._log) != events:
            raise PropertyBroken(Property.STALE_REPORTS, f"transfer {transfer} was over, and ended again")
        return True

    def _lose(self, place: int) -> bool:
        copy = self._any(place)
        if copy is None or not self._may_lose():
            return False
        ended = self.core.lose(copy.id)
        if copy.since >= 0:
            self._check_lost(copy, ended)
        elif ended is not None:
            raise PropertyBroken(Property.PROGRESS, f"transfer {copy.id} was lost, and no worker has it")
        return True

    def _lose_overdue(self) -> bool:
        ticks, tick = self.options.transfer_ticks, self.books.tick
        overdue = [one for one in self._submitted() if ticks and tick - one.since >= ticks]
        if overdue and not self._may_lose():
            return False
        lost = self.core.lose_overdue()
        if [ended.transfer for ended in lost] != [copy.id for copy in overdue]:
            raise PropertyBroken(
                Property.PROGRESS, f"lost are {lost}; at their bound are {[one.id for one in overdue]}"
            )
        for copy, ended in zip(overdue, lost):
            self._check_lost(copy, ended)
        return True

    def _may_lose(self) -> bool:
        """Whether enough is left to go on with."""
        books, chunk = self.books, self.options.blocks_per_chunk
        return len(books.free) + books.idle > 1 and len(books.retired) <= chunk

    def _check_lost(self, copy: Copy, ended: Ended | None) -> None:
        self._check_end(copy, ended, False, lost=True)
        self.books.lost.append(copy)
        self._close(copy, False, lost=True)
