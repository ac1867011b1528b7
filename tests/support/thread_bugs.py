"""Thread bugs to plant in kvsm's code, each with the scope of `kvsm check threads` that finds it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

from museum.exhibit import Edit, changes
from mutants import MUTANTS

from kvsm.properties import Property

_THREADED = "kvsm.copies.threaded:ThreadedCopyEngine"
_STREAMS = "kvsm.copies.streams:StreamCopyEngine"
_VERIFYING = "kvsm.copies.verifying:VerifyingCopyEngine"
_DISK = "kvsm.tiers.disk.disk_engine:DiskCopyEngine"
_SUBMITTER = "kvsm.cuda_io.cuda_engine:ThreadSubmitter"
_FOLLOWER = "kvsm.core.log.follower:LogFollower"
_THREAD = "kvsm.core.log.log_thread:LogThread"
_OPENING = "kvsm.core.log.opening:Opening"


class ThreadBug(NamedTuple):
    """A thread bug.

    says: what is wrong. scope: the scope that finds it. breaks: the property that is reported as broken.
    preemptions: the number of preemptions that the scope needs.
    """

    says: str
    scope: str
    breaks: Property
    preemptions: int
    edits: tuple[Edit, ...]

    def planted(self) -> ExitStack:
        """Plant the bug until the end of a `with` block."""
        stack = ExitStack()
        for change in changes(self.edits):
            stack.enter_context(change.made())
        return stack


BUGS = (
    ThreadBug(
        "M118: the last piece of a copy decides whether it was good",
        "copies",
        Property.FAILURE_IS_NOT_SUCCESS,
        1,
        MUTANTS["M118"].edits,
    ),
    ThreadBug(
        "M119: waiting for a load does not wait for its proof",
        "verifying",
        Property.COPY_ORDER,
        0,
        MUTANTS["M119"].edits,
    ),
    ThreadBug(
        "M114: a dead submitter fails what the device already has",
        "dead-submitters",
        Property.LEGAL_CALLS,
        0,
        MUTANTS["M114"].edits,
    ),
    ThreadBug(
        "a thread puts a copy back before it has claimed its piece",
        "store-lines",
        Property.PROGRESS,
        1,
        (
            Edit(
                f"{_THREADED}._serve",
                """
                transfer.claimed = last = first + transfer.piece_blocks
                if last < len(transfer.host_blocks):
                    self._queue.put(transfer)
                """,
                """
                last = first + transfer.piece_blocks
                if last < len(transfer.host_blocks):
                    self._queue.put(transfer)
                transfer.claimed = last
                """,
            ),
        ),
    ),
    ThreadBug(
        "the pieces that are left are counted without the lock",
        "store-lines",
        Property.PROGRESS,
        1,
        (
            Edit(
                f"{_THREADED}._end_piece",
                """
                with self._changed:
                    transfer.seconds += seconds
                """,
                """
                transfer.pieces_left -= 1
                with self._changed:
                    transfer.seconds += seconds
                """,
            ),
            Edit(
                f"{_THREADED}._end_piece",
                """
                if transfer.pieces_left == 1:
                    self._finished.append(transfer.result(self.layout.block_bytes))
                transfer.pieces_left -= 1
                """,
                """
                if transfer.pieces_left == 0:
                    self._finished.append(transfer.result(self.layout.block_bytes))
                """,
            ),
        ),
    ),
    ThreadBug(
        "the first thread that dies ends all copies, also those under way",
        "dying",
        Property.LEGAL_CALLS,
        1,
        (Edit(f"{_THREADED}._run", "if self._broken and not self._serving:", "if self._broken:"),),
    ),
    ThreadBug(
        "a close stops the threads before the last piece",
        "closing",
        Property.PROGRESS,
        1,
        (
            Edit(
                f"{_THREADED}.close",
                """
                self._await(list(self._live.values()))
                self._stop_threads()
                """,
                """
                self._stop_threads()
                self._await(list(self._live.values()))
                """,
            ),
        ),
    ),
    ThreadBug(
        "a copy is accepted outside the lock",
        "closing",
        Property.PROGRESS,
        0,
        (
            Edit(
                f"{_THREADED}.submit",
                """
                with self._changed:
                    check_accepted(job.transfer, self._live, self._broken, self._closed)
                """,
                """
                check_accepted(job.transfer, self._live, self._broken, self._closed)
                with self._changed:
                """,
            ),
        ),
    ),
    ThreadBug(
        "the end of a copy wakes nobody",
        "copies",
        Property.PROGRESS,
        0,
        (Edit(f"{_THREADED}._end_piece", "self._changed.notify_all()", "pass"),),
    ),
    ThreadBug(
        "a failed sync counts as good",
        "log",
        Property.FAILURE_IS_NOT_SUCCESS,
        1,
        (Edit("kvsm.core.log.log_thread:SyncJob.end", "if self.segment.sync_failure is None:", "if True:"),),
    ),
    ThreadBug(
        "a sync counts as good before it has ended",
        "log",
        Property.FAILURE_IS_NOT_SUCCESS,
        0,
        (
            Edit(
                f"{_THREAD}.take_end",
                "if self._running is not None and self._running.ended.is_set():",
                "if self._running is not None:",
            ),
        ),
    ),
    ThreadBug(
        "a segment is synced while its thread syncs it",
        "log",
        Property.FAILURE_IS_NOT_SUCCESS,
        0,
        (Edit("kvsm.core.log.syncing:Syncing.sync", "self.thread.wait()"),),
    ),
    ThreadBug(
        "a follower asks whether a segment is complete when it has read it",
        "rotated",
        Property.LEGAL_CALLS,
        2,
        (
            Edit(
                f"{_FOLLOWER}.poll",
                """
                successor = self._following()
                try:
                    yield from self._news(successor)
                """,
                """
                try:
                    yield from self._news(None)
                    successor = self._following()
                """,
            ),
        ),
    ),
    ThreadBug(
        "a new segment lacks the last events that went to the one before it",
        "opened",
        Property.LEGAL_CALLS,
        1,
        (Edit(f"{_OPENING}.finish", "self._copy_events()"),),
    ),
    ThreadBug(
        "a reader of a new segment reads again what the one before it had",
        "opened",
        Property.EVENTS_ARE_STATE,
        1,
        (Edit("kvsm.core.log.reader:Segment._read_on", "if events[0].seq > self._seen:", "if True:"),),
    ),
    ThreadBug(
        "a reader does not read on although the segment was ended while it read",
        "read-once",
        Property.LEGAL_CALLS,
        2,
        (
            Edit(
                "kvsm.core.log.reader:Segment.batches",
                "while self._look_around(file):",
                "if self._look_around(file) and False:",
            ),
        ),
    ),
    ThreadBug(
        "a follower does not expect that a segment goes while it reads",
        "rotated-deletes",
        Property.LEGAL_CALLS,
        0,
        (Edit(f"{_FOLLOWER}.poll", "except SegmentGone:", "except ZeroDivisionError:"),),
    ),
    ThreadBug(
        "a flush covers the stores that came while it ran",
        "disk",
        Property.FAILURE_IS_NOT_SUCCESS,
        2,
        (
            Edit(
                f"{_DISK}._serve_flushes",
                """
                waiting = [self._to_flush.get()]
                while not self._to_flush.empty():
                """,
                """
                waiting = [self._to_flush.get()]
                early = self._flush() if waiting[0] else ""
                while not self._to_flush.empty():
                """,
            ),
            Edit(f"{_DISK}._serve_flushes", 'error = self._flush() if stores else ""', 'error = early or ""'),
        ),
    ),
    ThreadBug(
        "M67: a store does not note which flushes had failed when it began",
        "disk",
        Property.FAILURE_IS_NOT_SUCCESS,
        1,
        MUTANTS["M67"].edits,
    ),
    ThreadBug(
        "52399f7: what a store has written before a flush failed can be loaded",
        "disk-interval",
        Property.FAILURE_IS_NOT_SUCCESS,
        1,
        (Edit(f"{_DISK}._end_piece", "self._forget(transfer)", "pass"),),
    ),
    ThreadBug(
        "M150: a store is good although a flush failed while it was written",
        "disk-interval",
        Property.FAILURE_IS_NOT_SUCCESS,
        1,
        MUTANTS["M150"].edits,
    ),
    ThreadBug(
        "stores are flushed when the engine is closed, and never before",
        "disk-interval",
        Property.PROGRESS,
        0,
        (Edit(f"{_DISK}._flush_now_and_then", "if self._written:", "if self._written and ends:"),),
    ),
    ThreadBug(
        "what was stored last is not flushed when the engine is closed",
        "disk-interval",
        Property.FAILURE_IS_NOT_SUCCESS,
        0,
        (Edit(f"{_DISK}._flush_now_and_then", "if self._written:", "if self._written and not ends:"),),
    ),
    ThreadBug(
        "compute is held before the load was handed over",
        "submitters",
        Property.COPY_ORDER,
        0,
        (Edit(f"{_STREAMS}._issued_among", "self._submitters[direction].flush()", "pass"),),
    ),
    ThreadBug(
        "ff3279d: who closes second closes the device under what runs",
        "closed-twice",
        Property.NO_REUSE_IN_FLIGHT,
        2,
        (
            Edit(
                f"{_STREAMS}.close",
                """
                with self._lock:
                    self._closed = True
                # A second call also waits, and finishes the close if the first call was interrupted (Ctrl-C).
                self.drain()
                """,
                """
                with self._lock:
                    first, self._closed = not self._closed, True
                if first:
                    self.drain()
                """,
            ),
        ),
    ),
    ThreadBug(
        "a flush behind a dead submitter waits for ever",
        "dead-submitters",
        Property.PROGRESS,
        0,
        (
            Edit(
                f"{_SUBMITTER}._run",
                "while not self._queue.empty():  # a flush may wait behind calls that will not run",
                "while False:",
            ),
        ),
    ),
    ThreadBug(
        "a caller claims its turn although an earlier copy is not queued yet",
        "dead-submitters",
        Property.PROGRESS,
        1,
        (Edit(f"{_SUBMITTER}.claim", "if self._dead or self._unfinished:", "if self._dead:"),),
    ),
    ThreadBug(
        "the proof of a load wakes nobody",
        "verifying",
        Property.PROGRESS,
        0,
        (Edit(f"{_VERIFYING}._prove", "self._changed.notify_all()", "pass"),),
    ),
    ThreadBug(
        "ff3279d: compute is held for the copy of a load, and not for its proof",
        "verifying",
        Property.COPY_ORDER,
        0,
        (Edit(f"{_VERIFYING}.hold_compute", "self._await_proofs(named)", "pass"),),
    ),
)
