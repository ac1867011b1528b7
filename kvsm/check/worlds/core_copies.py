"""Actions of the core world on copies: submit, cancel, move bytes, report (in every way), lose."""

from __future__ import annotations

from kvsm.check.worlds.core_bench import CoreActions
from kvsm.check.worlds.core_books import BookedCopy
from kvsm.core.offloader import Ended, ReportResult
from kvsm.errors import PropertyBroken
from kvsm.events import Direction, RejectReason, ReportRejected
from kvsm.ids import to_list
from kvsm.properties import Property


class CopyActions(CoreActions):
    """The calls of the core that name a transfer, and the moves of bytes at the workers."""

    def submit(self, place: int) -> bool:
        """Submit one planned copy to the workers."""
        planned = self.bench.planned()
        return bool(planned) and self._submit([planned[place % len(planned)]])

    def submit_all(self) -> bool:
        """Submit every planned copy to the workers."""
        planned = self.bench.planned()
        return bool(planned) and self._submit(planned)

    def _submit(self, copies: list[BookedCopy]) -> bool:
        self.core.submit([copy.id for copy in copies])
        for copy in copies:
            copy.since = self.books.tick
        return True

    def land(self, place: int, worker: int) -> bool:
        """Move the bytes of one worker's shard, without a report."""
        copies = self.bench.submitted()
        copy = copies[place % len(copies)] if copies else None
        worker %= self.options.workers
        if copy is None or copy.reported >> worker & 1:
            return False
        self.books.land(copy, worker)
        return True

    def land_lost(self, place: int, worker: int) -> bool:
        """Let a worker carry out a copy that was given up: this can happen at any time (S3)."""
        lost = self.books.lost
        if lost:
            self.books.land(lost[place % len(lost)], worker % self.options.workers)
        return bool(lost)

    # Reports.

    def report(self, place: int, worker: int) -> bool:
        """Let a worker report success, after its bytes have moved."""
        copies = self.bench.submitted()
        return bool(copies) and self._report(copies[place % len(copies)], worker, True)

    def fail(self, place: int, worker: int) -> bool:
        """Let a worker report failure."""
        copies = self.bench.submitted()
        return bool(copies) and self._report(copies[place % len(copies)], worker, False)

    def report_early(self, place: int, worker: int, good: int) -> bool:
        """Report on a transfer that was not submitted: the core must reject it (S5)."""
        copies = self.bench.planned()
        return bool(copies) and self._report(copies[place % len(copies)], worker, bool(good))

    def report_late(self, place: int, worker: int, good: int) -> bool:
        """Report on a transfer that has ended: the core must reject it (S5)."""
        copies = self.bench.ended
        return bool(copies) and self._report(copies[place % len(copies)], worker, bool(good))

    def report_as(self, place: int, worker: int, good: int, right: int) -> bool:
        """Report through a call that names a direction: the right one, or the wrong one if `right` is 0."""
        copy = self.bench.live_copy(place)
        if copy is None:
            return False
        direction = Direction.STORE if copy.store == bool(right) else Direction.LOAD
        return self._report(copy, worker, bool(good), direction)

    def report_stray(self, which: int, good: int) -> bool:
        """Report on a transfer, or as a worker, that does not exist: the core must reject it (S5)."""
        live, seq = next(iter(self.books.copies), 1), self.core.ledger.seq
        strays = ((seq + 3, 0), (0, 0), (-1, 0), (live, self.options.workers), (live, -1))
        transfer, worker = strays[which]
        events = len(self.log)
        result = self.core.report(transfer, worker, bool(good))
        self._check_rejected(result, events, transfer, worker)
        if (result.rejected is RejectReason.WORKER) != (worker not in range(self.options.workers)):
            message = f"a report of worker {worker} was rejected for another reason: {result.rejected}"
            raise PropertyBroken(Property.STALE_REPORTS, message)
        return True

    def _report(self, copy: BookedCopy, worker: int, good: bool, direction: Direction | None = None) -> bool:
        """Give a report to the core, and compare its answer with the books."""
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
        """Check that the core has logged the rejection, and has returned the same reason."""
        logged = self.log[-1].reason if type(self.log[-1]) is ReportRejected else None
        if logged is None or result != ReportResult(None, logged) or len(self.log) != events + 1:
            message = f"a wrong report of worker {worker} on transfer {transfer} was not rejected"
            raise PropertyBroken(Property.STALE_REPORTS, message)

    # Ends.

    def cancel(self, place: int) -> bool:
        """Cancel a copy. The core may do so only before the copy is submitted (S3)."""
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
        """Cancel and lose a transfer that has ended: nothing may happen (S8)."""
        over, events = self.bench.ended, len(self.log)
        transfer = over[place % len(over)].id if over else 0
        if self.core.cancel(transfer) or self.core.lose(transfer) or len(self.log) != events:
            raise PropertyBroken(Property.STALE_REPORTS, f"transfer {transfer} was over, and ended again")
        return True

    def lose(self, place: int) -> bool:
        """Give up a copy. The core may do so only after the copy was submitted."""
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
        overdue = [copy for copy in self.bench.submitted() if ticks and tick - copy.since >= ticks]
        if overdue and not self._may_lose():
            return False
        lost = self.core.lose_overdue()
        if [ended.transfer for ended in lost] != [copy.id for copy in overdue]:
            message = f"the core gave up {lost}; at their bound are {[copy.id for copy in overdue]}"
            raise PropertyBroken(Property.PROGRESS, message)
        for copy, ended in zip(overdue, lost):
            self._close_lost(copy, ended)
        return True

    def _may_lose(self) -> bool:
        """Whether a loss leaves enough slots and device blocks for further stores and loads."""
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
        returned = (ended.transfer, ended.direction is Direction.STORE, ended.request, ended.lost)
        if returned != (copy.id, copy.store, copy.request, lost):
            message = f"transfer {copy.id} ended, but the core reports {ended}"
            raise PropertyBroken(Property.STALE_REPORTS, message)
        if to_list(ended.device_blocks) != [block for block, _ in copy.pairs]:
            message = f"transfer {copy.id} ended with other device blocks: {ended}"
            raise PropertyBroken(Property.STALE_REPORTS, message)

    def _close(self, copy: BookedCopy, good: bool, failed: bool = False, lost: bool = False) -> None:
        self.books.end(copy, good, failed, lost)
        self.bench.keep_ended([copy])
        self.bench.check_leases([block for block, _ in copy.pairs])
