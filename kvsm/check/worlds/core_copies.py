"""Actions of copies in the core world: submitted, cancelled, carried out, reported in every way, and lost."""

from __future__ import annotations

from kvsm.check.worlds.core_bench import CoreActions
from kvsm.check.worlds.core_books import BookedCopy
from kvsm.core.offloader import Ended, ReportResult
from kvsm.errors import PropertyBroken
from kvsm.events import Direction, ReportRejected
from kvsm.ids import to_list
from kvsm.properties import Property


class CopyActions(CoreActions):
    """Every call of the core that names a transfer, and the moves of bytes at the workers."""

    def submit(self, place: int) -> bool:
        """Hand one planned copy to the workers."""
        planned = self.bench.planned()
        return bool(planned) and self._submit([planned[place % len(planned)]])

    def submit_all(self) -> bool:
        """Hand every planned copy to the workers."""
        planned = self.bench.planned()
        return bool(planned) and self._submit(planned)

    def _submit(self, copies: list[BookedCopy]) -> bool:
        self.core.submit([copy.id for copy in copies])
        for copy in copies:
            copy.since = self.books.tick
        return True

    def land(self, place: int, worker: int) -> bool:
        """The bytes of one worker's shard move. Nothing is reported yet."""
        copies = self.bench.submitted()
        copy = copies[place % len(copies)] if copies else None
        worker %= self.options.workers
        if copy is None or copy.reported >> worker & 1:
            return False
        self.books.land(copy, worker)
        return True

    def land_lost(self, place: int, worker: int) -> bool:
        """A worker writes although its transfer was given up: this can happen at any time (S3)."""
        lost = self.books.lost
        if lost:
            self.books.land(lost[place % len(lost)], worker % self.options.workers)
        return bool(lost)

    # Reports.

    def report(self, place: int, worker: int) -> bool:
        """A worker reports success; its bytes have moved by then."""
        copies = self.bench.submitted()
        return bool(copies) and self._report(copies[place % len(copies)], worker, True)

    def fail(self, place: int, worker: int) -> bool:
        """A worker reports failure."""
        copies = self.bench.submitted()
        return bool(copies) and self._report(copies[place % len(copies)], worker, False)

    def report_early(self, place: int, worker: int, good: int) -> bool:
        """A report on a transfer that was not submitted: it must be rejected (S5)."""
        copies = self.bench.planned()
        return bool(copies) and self._report(copies[place % len(copies)], worker, bool(good))

    def report_late(self, place: int, worker: int, good: int) -> bool:
        """A report on a transfer that has ended: it must be rejected (S5)."""
        copies = self.bench.ended
        return bool(copies) and self._report(copies[place % len(copies)], worker, bool(good))

    def report_as(self, place: int, worker: int, good: int, right: int) -> bool:
        """Report through the calls that name a direction: the right one, or the other."""
        copy = self.bench.live_copy(place)
        if copy is None:
            return False
        direction = Direction.STORE if copy.store == bool(right) else Direction.LOAD
        return self._report(copy, worker, bool(good), direction)

    def report_stray(self, which: int, good: int) -> bool:
        """A report on a transfer, or of a worker, that does not exist: it must be rejected (S5)."""
        live, seq = next(iter(self.books.copies), 1), self.core.ledger.seq
        strays = ((seq + 3, 0), (0, 0), (-1, 0), (live, self.options.workers), (live, -1))
        transfer, worker = strays[which]
        events = len(self.log)
        self._check_rejected(self.core.report(transfer, worker, bool(good)), events, transfer, worker)
        return True

    def _report(self, copy: BookedCopy, worker: int, good: bool, direction: Direction | None = None) -> bool:
        """Hand a report to the core. The books know whether it counts."""
        books, worker = self.books, worker % self.options.workers
        runs = copy.id in books.copies and copy.submitted and not copy.reported >> worker & 1
        if runs and good and not copy.landed >> worker & 1:
            books.land(copy, worker)
        events = len(self.log)
        result = self._call(copy.id, worker, good, direction)
        if not runs or (direction is not None and (direction is Direction.STORE) != copy.store):
            self._check_rejected(result, events, copy.id, worker)
            return True
        if result.rejected is not None or type(self.log[-1]) is ReportRejected:
            message = f"the report of worker {worker} on transfer {copy.id} was rejected"
            raise PropertyBroken(Property.STALE_REPORTS, message)
        copy.reported |= 1 << worker
        copy.failed |= not good
        if copy.reported == books.all_workers:
            whole = not copy.failed and not copy.void
            self._check_end(copy, result.ended, whole)
            self._close(copy, whole, failed=copy.failed and not copy.void)
        elif result.ended is not None:
            message = f"transfer {copy.id} ended before every worker had reported"
            raise PropertyBroken(Property.PUBLISH_AFTER_COMMIT, message)
        return True

    def _call(self, transfer: int, worker: int, good: bool, direction: Direction | None) -> ReportResult:
        core = self.core
        if direction is None:
            return core.report(transfer, worker, good)
        if direction is Direction.STORE:
            return (core.complete_store if good else core.fail_store)(transfer, worker)
        return (core.complete_load if good else core.fail_load)(transfer, worker)

    def _check_rejected(self, result: ReportResult, events: int, transfer: int, worker: int) -> None:
        """The core must have recorded the report as rejected, and have told its caller the same reason."""
        told = self.log[-1].reason if type(self.log[-1]) is ReportRejected else None
        if told is None or result != ReportResult(None, told) or len(self.log) != events + 1:
            message = f"a wrong report of worker {worker} on transfer {transfer} was not rejected"
            raise PropertyBroken(Property.STALE_REPORTS, message)

    # Ends.

    def cancel(self, place: int) -> bool:
        """Take a copy back. This works only before it is submitted (S3)."""
        copy = self.bench.live_copy(place)
        if copy is None:
            return False
        ended = self.core.cancel(copy.id)
        if copy.submitted:
            if ended is not None:
                message = f"transfer {copy.id} was taken back, but the workers have it"
                raise PropertyBroken(Property.NO_REUSE_IN_FLIGHT, message)
            return True
        self._check_end(copy, ended, False)
        self._close(copy, False)
        return True

    def end_late(self, place: int) -> bool:
        """Cancel and lose a transfer that has ended: nothing happens (S8)."""
        over, events = self.bench.ended, len(self.log)
        transfer = over[place % len(over)].id if over else 0
        if self.core.cancel(transfer) or self.core.lose(transfer) or len(self.log) != events:
            raise PropertyBroken(Property.STALE_REPORTS, f"transfer {transfer} was over, and ended again")
        return True

    def lose(self, place: int) -> bool:
        """Give up a copy. This works only after it was submitted."""
        copy = self.bench.live_copy(place)
        if copy is None or not self._may_lose():
            return False
        ended = self.core.lose(copy.id)
        if copy.submitted:
            self._close_lost(copy, ended)
        elif ended is not None:
            raise PropertyBroken(Property.PROGRESS, f"transfer {copy.id} was lost, but no worker has it")
        return True

    def lose_overdue(self) -> bool:
        """Give up the copies that have reached their bound in ticks, and no others (S9)."""
        ticks, tick = self.options.transfer_ticks, self.books.tick
        overdue = [one for one in self.bench.submitted() if ticks and tick - one.since >= ticks]
        if overdue and not self._may_lose():
            return False
        lost = self.core.lose_overdue()
        if [ended.transfer for ended in lost] != [copy.id for copy in overdue]:
            message = f"the core gave up {lost}; at their bound are {[one.id for one in overdue]}"
            raise PropertyBroken(Property.PROGRESS, message)
        for copy, ended in zip(overdue, lost):
            self._close_lost(copy, ended)
        return True

    def _may_lose(self) -> bool:
        """Whether enough slots and device blocks are left to go on with."""
        books, chunk = self.books, self.options.blocks_per_chunk
        return len(books.free) + books.idle > 1 and len(books.retired) <= chunk

    def _close_lost(self, copy: BookedCopy, ended: Ended | None) -> None:
        self._check_end(copy, ended, False, lost=True)
        self.books.lost.append(copy)
        self._close(copy, False, lost=True)

    def _check_end(self, copy: BookedCopy, ended: Ended | None, good: bool, lost: bool = False) -> None:
        if ended is None:
            message = f"transfer {copy.id} has nothing left to wait for, but did not end"
            raise PropertyBroken(Property.PROGRESS, message)
        if ended.good != good:
            message = f"the core says that transfer {copy.id} ended with good={ended.good}; it is {good}"
            raise PropertyBroken(Property.FAILURE_IS_NOT_SUCCESS, message)
        told = (ended.transfer, ended.direction is Direction.STORE, ended.request, ended.lost)
        if told != (copy.id, copy.store, copy.request, lost):
            message = f"transfer {copy.id} ended, but the core reports {ended}"
            raise PropertyBroken(Property.STALE_REPORTS, message)
        if to_list(ended.device_blocks) != [block for block, _ in copy.pairs]:
            message = f"transfer {copy.id} ended with other device blocks: {ended}"
            raise PropertyBroken(Property.STALE_REPORTS, message)

    def _close(self, copy: BookedCopy, good: bool, failed: bool = False, lost: bool = False) -> None:
        self.books.end(copy, good, failed, lost)
        self.bench.keep_ended([copy])
        self.bench.check_leases([block for block, _ in copy.pairs])
