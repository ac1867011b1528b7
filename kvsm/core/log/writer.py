"""Writes a log: in batches, in segments, synced as configured. No failure is silent.

`LogWriter.append` puts an event on a list. A flush encodes the list as one frame and writes it with one
system call. The embedder chooses what happens if that call fails:

- `stop`: the written events stay intact. `LogWriteFailed` is raised now and by every later call.
- `continue`: the segment is marked, in place, as broken from the first lost event on. Events are counted and
  dropped until a new segment can be opened. It begins with a snapshot: readers continue there, and report
  the lost events as a gap.

`close(error)` writes a last record, which says how the run ended, and marks the log as closed. A log without
it was not closed: readers say so.

The mark overwrites bytes that the segment reserved, because a full disk has no room for new ones. A file
system that copies on write may refuse even that: then the writer stops.

A call may be interrupted at any line, by Ctrl-C for example. Three rules keep the log whole:

- Each call commits by one assignment: `WritePlace` is replaced, never edited.
- Bytes are written at the offset in `WritePlace`. So an interrupted write is repeated at the same place.
- An operation of several steps is recorded before its first step. `_settle` finishes it in the next call.

One thread at a time may call a writer, and only in the process that made it. This process holds the lock of
the directory until it closes the writer, or dies. `continued.py` describes how a writer continues a log.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, NoReturn

from msgspec.structs import replace

from kvsm.core.ledger.state_copy import StateCopy, WholeState
from kvsm.core.log.continued import EndedLog, begin_life, new_log
from kvsm.core.log.flush_mark import UNBOUND, LogBinding, set_marks
from kvsm.core.log.frames import CLOSED, RUN_BYTES, FrameEncoder, SegmentTail, read_back
from kvsm.core.log.log_directory import WHAT_TO_DO
from kvsm.core.log.log_thread import LogThread
from kvsm.core.log.minutes import WrittenMinutes
from kvsm.core.log.opening import Opening
from kvsm.core.log.retention import FRAME_BYTES, Retention
from kvsm.core.log.segment_file import Loss, SegmentFile, UnsyncedMark, WritePlace
from kvsm.core.log.segment_maker import SegmentMaker
from kvsm.core.log.syncing import Durability, Syncing
from kvsm.errors import ConfigError, LogError, LogWriteFailed, described
from kvsm.events import OffloadConfig, OffloadingEvent

OnFailure = Literal["stop", "continue"]

ERROR_TEXT = 2000
"""The most characters of the error with which a log is closed."""

FRAME_EVENTS = 512
"""The most events of one frame. Larger frames are not cheaper per event."""

LOOK_INTERVAL_NS = 1_000_000_000
"""Interval at which a flush checks whether the file was deleted."""

_REFUSED = -(1 << 62)
"""The expected next event of a closed or failed writer. No event has such a number."""


def _note_fork() -> None:
    global _forks
    _forks += 1


_forks = 0
"""Number of forks between the first process and this one. In a forked child a writer finds another number."""

os.register_at_fork(after_in_child=_note_fork)


class _NextFrame(NamedTuple):
    """A frame: the number of its first event, the number of its events, and its bytes."""

    first: int
    num_events: int
    data: bytes


class _FrameMaker:
    """Makes the frames of the events, in order.

    most_events: the most events of the next frame, so that it has about `FRAME_BYTES`, estimated from the
        last frame.
    """

    def __init__(self, encoder: FrameEncoder) -> None:
        self.most_events = FRAME_EVENTS
        self._encoder = encoder
        self._made = _NextFrame(0, 0, b"")

    def make(self, place: WritePlace) -> _NextFrame:
        """Return the frame of the first unwritten events, the same frame until it is written.

        A reader may have read some bytes of a frame whose write was interrupted. So no other frame may be
        written at its place.
        """
        if self._made.first != place.first:
            events = place.events[:FRAME_EVENTS]
            count = len(events)
            data = self._encoder.events(events, place.segment.synced.offset)
            fitting = FRAME_BYTES * count // len(data)
            self.most_events = FRAME_EVENTS if fitting >= FRAME_EVENTS else max(fitting, 1)
            self._made = _NextFrame(place.first, count, data)
            self._encoder.keep()
        return self._made


class LogWriter:
    """Appends events to a new log, or to one that has ended.

    directory: made if absent, readable only by its owner; must be empty. Or the end of a log, as `find_end`
        returns it: the writer continues that log, and releases the directory's lock when it is closed.
    config: recorded in each segment; the configuration of the state after the last event.
    snapshot: returns a copy of the ledger's state after the last appended event. It is called when the next
        segment begins to open. With a large state that takes several flushes (`opening.py`).
    durability: `none` leaves syncing to the kernel. `interval` syncs at the first flush after
        `sync_interval_ms`, and at the end. `every` syncs at each flush.
    sync_interval_ms: for `interval` (ms).
    sync_thread: whether `interval` syncs in a thread of its own, so that only the end of the log, and a new
        segment behind lost events, wait for the disk.
    segment_bytes: a new segment opens after this many bytes of events, or earlier if `max_bytes` asks for it.
    max_bytes: limit of all files together, at each instant; None keeps all. The oldest segments are deleted.
        A snapshot that is too large for it counts as a failed write.
    compress: whether to compress with zstd. Then a repeated key takes a few bytes (`event_stream.py`).
    on_failure: `stop` or `continue`, as above.
    clock: Unix time (ns); recorded only.
    run: id of this run (16 bytes), recorded in each segment; random if None. No other log may have it. A log
        that is continued keeps its own.
    first: number of the first event. A log that does not begin with event 1 begins with a snapshot.
    binding: to the pools of this log, if they outlive this process.
    checked: whether each event is known to be readable: a core made it, or a reader returned it. Then
        `append` takes 0.1 us. Otherwise `append` decodes each event to check it, which takes about 1 us.

    Raises `LogError` if the directory cannot be used, `ConfigError` for an option that cannot work.

    `events` and `bytes_written` include deleted segments. `dropped` counts lost events; `broken_from` is the
    first lost event or None; `failure` describes the current failure, or is None.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | EndedLog,
        *,
        config: OffloadConfig,
        snapshot: Callable[[], StateCopy],
        durability: Durability = "interval",
        sync_interval_ms: int = 100,
        sync_thread: bool = False,
        segment_bytes: int = 64 << 20,
        max_bytes: int | None = None,
        compress: bool = False,
        on_failure: OnFailure = "stop",
        clock: Callable[[], int] = time.time_ns,
        run: bytes | None = None,
        first: int = 1,
        binding: LogBinding = UNBOUND,
        checked: bool = False,
    ) -> None:
        _check_options(durability, sync_interval_ms, segment_bytes, max_bytes, on_failure, run, first)
        life = 1
        if isinstance(directory, EndedLog):
            life, run = directory.life, directory.run or run
            first = directory.seq + 1 if directory.seq else first
        self.directory = directory.claimed.path if isinstance(directory, EndedLog) else Path(directory)
        self.broken_from: int | None = None
        self.failure: str | None = None
        self._snapshot, self._marks, self._checked = snapshot, binding.marks, checked
        self._syncing = Syncing(durability, sync_interval_ms, sync_thread)
        self._syncs, self._continues = self._syncing.syncs, on_failure == "continue"
        self._opening_thread = LogThread("kvsm-log-segment")
        self._segment_bytes, self._first = segment_bytes, first
        run = os.urandom(RUN_BYTES) if run is None else run
        self._encoder = FrameEncoder(run, compress, life)
        self._frames = _FrameMaker(self._encoder)
        self._retention, self._limited = Retention(max_bytes, segment_bytes), max_bytes is not None
        head = config, clock, run, life, binding.life_id
        self._maker = SegmentMaker(*head, compress, self._retention, self._syncs)
        # The first flush deletes the segments that a new life drops.
        self._resume_at, self._look_at_ns, self._settled = 0, 0, False
        self._flushed_ns = self._nothing_until_ns = self._only_write_until_ns = 0
        # Monotonic times. From `_flushed_ns` until `_nothing_until_ns`, a flush without new events does
        # nothing. From `_flushed_ns` until `_only_write_until_ns`, a flush only writes.
        self._refusal: LogError | None = None
        self._closed, self._ended, self._forks = False, False, _forks
        self._calls: list[object] = []
        self._opening: Opening | None = None
        self._place: WritePlace
        self._begin(directory, first)

    @property
    def events(self) -> int:
        """Number of events that were written."""
        return self._place.written

    @property
    def dropped(self) -> int:
        """Number of events that were lost."""
        return self._place.dropped

    @property
    def bytes_written(self) -> int:
        """Bytes of all segments, deleted ones included."""
        return self._retention.written_bytes()

    def use_config(self, config: OffloadConfig) -> None:
        """Record another config from the next segment on. Call it right before an event that changes it.

        Raises `ConfigError` if `max_bytes` has no room for it.
        """
        self._maker.use_config(config)

    def append(self, event: OffloadingEvent) -> None:
        """Add the next event; the next flush writes it.

        Raises `LogError` if its number is not the next one, or if no reader could read it (unless `checked`):
        then nothing is added. Raises `LogWriteFailed` as `flush` does.
        """
        if not self._checked:
            event = self._read_back(event)
        place = self._place
        events = place.events
        count = len(events)
        if event.seq != place.first + count:
            raise self._refusal or LogError(
                f"{self.directory}: event {event.seq} was appended where {place.first + count} is next"
            )
        events.append(event)
        if count + 1 >= self._frames.most_events:
            self.flush()

    def _read_back(self, event: OffloadingEvent) -> OffloadingEvent:
        try:
            return read_back(event)
        except ValueError as error:
            is_event = isinstance(event, OffloadingEvent)
            name = f"event {event.seq}, {event.kind}," if is_event else f"{event!r:.80}"
            raise LogError(
                f"{self.directory}: {name} was not appended, because no reader could read it: {error}. "
                f"Give its fields the types in kvsm.events; kvsm.ids.pack makes the form of ids"
            ) from error

    def flush(self) -> None:
        """Write the appended events as one frame. Sync, and open a new segment, if due.

        Raises `LogWriteFailed` if that fails and `on_failure` is `stop`, and `LogError` in a process that was
        forked, or while another call has not returned.
        """
        if not self._place.events and self._flushed_ns <= time.monotonic_ns() < self._nothing_until_ns:
            return
        self._alone(self._flush)

    def close(self, error: BaseException | None = None) -> None:
        """Flush, sync, write how the run ended, and close. Idempotent.

        error: the error that ended the run; None if it ended well.

        Raises `LogWriteFailed` as `flush` does. In a process that was forked it leaves the log to the process
        that writes it.
        """
        if self._closed:
            self._claimed.close()
            return
        if self._forks != _forks:
            self._shut()
            return
        self._alone(lambda: self._close(None if error is None else described(error)))

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def _alone(self, call: Callable[[], None]) -> None:
        """Make this call, or raise `LogError` if another call has not returned."""
        mark, calls = object(), self._calls
        try:
            calls.append(mark)
            if calls[0] is not mark or self._forks != _forks:
                self._refuse_call()
            call()
        finally:
            if mark in calls:
                calls.remove(mark)

    def _refuse_call(self) -> NoReturn:
        if self._forks != _forks:
            problem = f"this is process {os.getpid()}, forked from the one that made this log; only that one"
            raise LogError(f"{self.directory}: {problem} may write it, so make another log here")
        problem = "another call of this writer has not returned"
        raise LogError(f"{self.directory}: {problem}; let one thread use it, and no signal handler")

    def _flush(self, closing: bool = False) -> None:
        if self._refusal is not None:
            raise self._refusal
        if not self._settled:
            self._settle()
        only_write_until_ns = self._only_write_until_ns
        self._settled, self._nothing_until_ns, self._only_write_until_ns = False, 0, 0
        now = time.monotonic_ns()
        if not self._flushed_ns <= now < only_write_until_ns or closing or not self._only_write():
            self._flush_all(now, closing)
        set_marks(self._marks, self._place)
        self._note_times(now, closing or self._opening is not None)
        self._settled = True

    def _only_write(self) -> bool:
        """Write the pending events. Returns whether there is nothing else to do."""
        if self._place.events:
            self._write_events()
        place = self._place
        return place.segment.loss is None and place.offset < place.segment.full_at

    def _flush_all(self, now: int, closing: bool) -> None:
        """Do all that is due at `now` (monotonic)."""
        if not self._look_at_ns - LOOK_INTERVAL_NS <= now < self._look_at_ns:
            self._look(now)
        segment = self._place.segment
        if closing:
            self._abandon_opening()
        if segment.loss is None and self._place.events:
            self._write_events()
        if segment.loss is None and self._syncs:
            self._sync(due_at=now)
        if segment.loss is None and not closing:
            self._open(self._change_segment)
        if segment.loss is not None:
            self._drop_events()
            if self._place.dropped >= self._resume_at:
                self._open(self._resume)

    def _note_times(self, now: int, is_busy: bool) -> None:
        """Note when the next flush has something to do. An engine flushes in every step, and most steps
        decide nothing or little.

        is_busy: whether the next flush may have to do more than write.
        """
        segment, self._flushed_ns = self._place.segment, now
        if is_busy:
            return
        self._nothing_until_ns = min(now + self._syncing.interval_ns, self._look_at_ns)
        if segment.loss is not None or not segment.announced or self._syncing.thread.is_busy:
            return
        if self._retention.oldest() >= segment.oldest:
            due_ns = self._syncing.due_ns(segment, now)
            self._only_write_until_ns = min(due_ns, self._look_at_ns) if self._syncs else self._look_at_ns

    def _settle(self) -> None:
        """Finish the operation of an interrupted call."""
        self._abandon_opening()
        segment = self._place.segment
        if segment.sync_failure is not None and segment.loss is None:
            self._lose_unsynced(segment.sync_failure)
        elif segment.loss is not None and not segment.marked:
            self._handle_loss()
        self._leave_complete_segments()

    def _close(self, error: str | None) -> None:
        try:
            if isinstance(self._refusal, LogWriteFailed):
                raise self._refusal
            if self._refusal is None:
                self._look(time.monotonic_ns())
                self._flush(closing=True)
            if self._place.segment.loss is None and self._sync():
                self._end_well(error)
        except LogWriteFailed as failure:
            with suppress(OSError):  # If this fails too, readers say that the log was not closed.
                self._drop_opening()
                self._write_end(str(failure))
                self._mark_closed()
            self._shut()
            raise
        except Exception:
            self._shut()
            raise
        # An interrupt leaves the log open: a second call can still end it well.
        self._shut()

    def _end_well(self, error: str | None) -> None:
        """Write the tail, then the mark, which says that the log is complete."""
        self._announce()
        try:
            self._write_end(error)
        except OSError as failure:
            if not self._continues:
                self._stop("all events are written, but not how the run ended", failure)
            self.failure = f"{self._place.segment.path}: the record of its end is missing: {failure}"
            return
        try:
            self._mark_closed()
        except OSError as failure:
            self._stop("all events are written, but the mark of a closed log perhaps in part", failure)

    def _write_end(self, error: str | None) -> None:
        """Write and sync the tail. After it only the mark may be written.

        If that fails, try to cut the tail again.
        """
        if self._ended:
            return
        text = None if error is None else error[:ERROR_TEXT].encode(errors="backslashreplace").decode()
        tail, place = SegmentTail(text), self._place
        segment, loss = place.segment, place.segment.loss
        following = self._first + place.written + place.dropped if loss is None else loss.first
        try:
            # The number of an event takes up to 9 bytes.
            self._retention.make_room(len(self._encoder.tail(tail, following, 0)) + 8)
            tail = replace(tail, oldest=self._retention.oldest())
            segment.write(self._encoder.tail(tail, following, segment.synced.offset), place.offset)
            if self._syncs:
                segment.sync()
        except OSError:
            with suppress(OSError):
                segment.cut(place.offset)
            segment.sync_failure = None  # Everything before the tail had been synced.
            raise
        self._refuse(self._refusal or LogError(f"{self.directory}: this writer is closed"))
        self._ended = True

    def _mark_closed(self) -> None:
        self._place.segment.mark(CLOSED)
        if self._syncs:
            self._place.segment.sync()

    def _shut(self) -> None:
        """Close the files, and refuse further events."""
        self._closed = True
        failed = isinstance(self._refusal, LogWriteFailed)
        self._refuse(self._refusal or LogError(f"{self.directory}: this writer is closed"))
        if self._forks == _forks:
            self._syncing.thread.end()
            with suppress(OSError):  # No reader sees an unpublished segment.
                self._drop_opening()
            self._opening_thread.end()
        try:
            for segment in self._retention.segments:
                segment.close()
        except OSError as error:
            # Synced bytes are on the disk even if closing fails.
            if not self._syncs and not failed and self._forks == _forks:
                self._stop("its last events may be missing, because it could not be closed", error)
        finally:
            self._claimed.close()

    def _write_events(self) -> None:
        """Write the pending events as one frame. First finish the frame of an interrupted write, if any."""
        while (place := self._place).events:
            try:
                first, count, data = self._frames.make(place)
            except Exception as error:  # Not a disk error, so later events would fail too.
                self._stop(f"events from {place.first} on cannot be encoded", error)
            try:
                if self._limited:
                    self._make_room(len(data))
                place.segment.write(data, place.offset)
            except OSError as error:
                self._lose(first, place.offset, error)
                return
            self._place = WritePlace(
                place.segment,
                place.offset + len(data),
                first + count,
                place.events[count:],
                place.written + count,
                place.dropped,
            )
            self._minutes.count(place.events[:count])

    def _make_room(self, size: int) -> None:
        """Delete old segments until a frame of this size (bytes) may be written."""
        if self._opening is None:
            self._retention.make_room(size)
        else:
            self._retention.make_room(2 * size)
            self._retention.opening_bytes += size

    def _drop_events(self) -> None:
        """Drop the pending events after a loss, and count them as lost."""
        place = self._place
        loss = place.segment.loss
        assert loss is not None
        following = place.first + len(place.events)
        dropped = loss.dropped + following - loss.first if self._continues else loss.dropped
        self._place = WritePlace(place.segment, loss.offset, following, [], loss.written, dropped)

    def _sync(self, due_at: int | None = None) -> bool:
        """Sync the segment, if `durability` asks for it. Returns False if events were lost.

        due_at: sync only if a sync is due at this time (monotonic, ns), perhaps in a thread; None: sync now
            and wait.

        After a failed sync it is unknown which pages reached the disk. So all events since the last good sync
        count as lost.
        """
        try:
            if due_at is None:
                self._syncing.sync(self._place)
            else:
                self._syncing.sync_in_time(self._place, due_at, self._opening)
        except OSError as error:
            self._lose_unsynced(error)
            return False
        return True

    def _lose_unsynced(self, cause: OSError) -> None:
        synced = self._place.segment.synced
        self._lose(synced.seq + 1, synced.offset, cause)

    def _look(self, now: int) -> None:
        """Check whether the segment was deleted; then all of its events are lost."""
        self._look_at_ns = now + LOOK_INTERVAL_NS
        place = self._place
        if place.segment.loss is not None:
            return
        try:
            deleted = place.segment.is_deleted()
        except OSError as error:
            self._lose(place.first, place.offset, error)
            return
        if deleted:
            cause = OSError(errno.ENOENT, "somebody has deleted this file of a running log")
            self._retention.note_deleted()
            self._lose(place.segment.first, 0, cause)

    def _lose(self, first: int, offset: int, cause: OSError) -> None:
        """Record that events from `first` on, at byte `offset` of the segment, are lost, and handle it."""
        self._only_write_until_ns = 0
        self._abandon_opening()
        place = self._place
        self._syncing.thread.wait()
        synced = place.segment.synced
        if place.segment.sync_failure is not None and synced.offset < offset:
            first, offset = synced.seq + 1, synced.offset
        written = place.written - (place.first - first)
        place.segment.loss = Loss(first, offset, cause, written, place.dropped)
        self._resume_at = 0
        self._handle_loss()

    def _handle_loss(self) -> None:
        """Drop the lost events and cut the segment; then mark it or stop, by `on_failure`."""
        segment = self._place.segment
        loss = segment.loss
        assert loss is not None
        last = self._place.first + len(self._place.events) - 1
        which = f"event {last}" if loss.first >= last else f"events {loss.first} to {last}"
        failure = f"{which} could not be written"
        self._drop_events()
        if not self._continues:
            with suppress(OSError):  # If this fails, a torn end is left, and readers cut it.
                segment.cut(loss.offset)
            self._stop(failure, loss.cause)
        try:
            segment.cut(loss.offset)
            if self._syncs:
                segment.sync()  # The mark says that each byte is there, so they reach the disk before it.
            segment.mark(loss.first)
            if self._syncs:
                segment.sync()
        except OSError as error:
            self._stop(f"{failure} ({loss.cause}), nor can the log be marked as broken", error)
        if self.broken_from is None:
            self.broken_from = loss.first
        self.failure = f"{segment.path}: {failure}: {loss.cause}"
        segment.marked = True

    def _begin(self, directory: str | os.PathLike[str] | EndedLog, first: int) -> None:
        """Lock the directory, unless `directory` is locked already, and open the first segment."""
        end = directory if isinstance(directory, EndedLog) else new_log(directory, self._syncs)
        self._claimed = end.claimed
        segment = SegmentFile(self.directory, first, end.replaces)
        try:
            snapshot = WholeState if first == 1 else self._snapshot
            begin_life(end, segment, self._maker, self._retention, snapshot, self._syncs)
        except BaseException:
            if end is not directory:
                end.claimed.close()
            raise
        self._place = WritePlace(segment, segment.size, first, [], 0, 0)
        self._minutes = WrittenMinutes(first)

    def _open(self, step: Callable[[], None]) -> None:
        """Do a step of opening the next segment. If it fails, no event is lost."""
        try:
            step()
        except LogWriteFailed:
            raise
        except Exception as error:
            self._stay(error)

    def _change_segment(self) -> None:
        """If this segment is full, begin or continue opening the next one."""
        place = self._place
        if self._retention.oldest() < place.segment.oldest or not place.segment.announced:
            self._leave_complete_segments()
        if place.offset < place.segment.full_at:
            return
        opening = self._opening or self._begin_opening(self._syncing.waits)
        if self._limited and opening.overlap(place) > self._retention.both_bytes:
            if not self._sync():
                return
            opening.complete(place)
        elif not opening.go_on(place) or self._syncing.thread.is_busy:
            return
        self._hand_over()

    def _resume(self) -> None:
        """Open a segment behind lost events, without delay."""
        self._begin_opening(waits=True).complete(self._place)
        self._hand_over()

    def _begin_opening(self, waits: bool) -> Opening:
        place = self._place
        segment = SegmentFile(self.directory, place.first)
        if self._continues:
            self._claimed.hold()  # The directory may have been deleted.
        segment.remove_leftover()
        self._encoder.begin_stream()
        before = self._minutes.open(place.first)
        self._opening = Opening(segment, place, self._maker, self._opening_thread, waits, before)
        self._opening.begin(self._snapshot)
        return self._opening

    def _hand_over(self) -> None:
        """Finish the opening: from now on events go to the new segment."""
        place, opening = self._place, self._opening
        assert opening is not None
        if place.segment.loss is None and self._syncing.waits and not self._sync():
            return
        opening.finish(place)
        self._place = replace(place, segment=opening.segment, offset=opening.segment.size)
        self._minutes.fill_new()
        self.failure = None
        self._drop_opening()
        self._leave_complete_segments()

    def _stay(self, cause: Exception) -> None:
        """Handle a failed opening: an intact segment grows on, a broken one waits for the next attempt."""
        self._abandon_opening()
        place = self._place
        failure = f"no segment can follow event {place.first - 1}"
        if not self._continues:
            self._stop(f"{failure}, the last one written", cause)
        self.failure = self.failure or f"{place.segment.path}: {failure}: {cause}"
        place.segment.full_at = place.offset + self._segment_bytes
        self._resume_at = place.dropped + FRAME_EVENTS

    def _abandon_opening(self) -> None:
        """Abandon the opening, and delete its file."""
        try:
            self._drop_opening()
        except OSError as error:
            self._stop("no event can follow while a segment that was not opened cannot be deleted", error)

    def _drop_opening(self) -> None:
        """Forget the opening. Delete its file unless events go to its segment already."""
        opening = self._opening
        if opening is not None and opening.segment is not self._place.segment:
            self._minutes.give_up_new()
            opening.give_up()
        self._retention.opening_bytes, self._opening = 0, None

    def _leave_complete_segments(self) -> None:
        """Close the segment before the newest one, and delete the segments that retention drops."""
        newest, segments = self._place.segment, self._retention.segments
        self._retention.add(newest)
        try:
            if len(segments) > 1:
                segments[-2].close()
        except OSError as error:
            if not self._syncs:
                name = segments[-2].path.name
                self._stop(f"the last events of {name} may be missing: it could not be closed", error)
        self._announce()
        try:
            if newest.name_is_durable:
                self._retention.delete_before(newest.oldest)
        except OSError as error:
            failure = "the oldest segments cannot be deleted"
            if not self._continues:
                self._stop(failure, error)
            self.failure = f"{newest.path}: {failure}: {error}"

    def _announce(self) -> None:
        """Name the newest segment in the one before it, once its own name is durable.

        If only the sync of that mark fails and `on_failure` is `continue`, the next flush tries again.
        """
        failure = "the mark of the segment before it may be partly written"
        try:
            self._retention.announce_newest(self._syncs)
        except UnsyncedMark as error:
            if not self._continues:
                self._stop(failure, error)
            self.failure = f"{self._place.segment.path}: {failure}: {error}"
        except OSError as error:
            self._stop(failure, error)

    def _stop(self, failure: str, cause: Exception) -> NoReturn:
        advice = f"; {WHAT_TO_DO}" if isinstance(cause, OSError) else ""
        error = LogWriteFailed(f"{self._place.segment.path}: {failure}: {cause}{advice}")
        self.failure = str(error)
        self._refuse(error)
        raise error from cause

    def _refuse(self, refusal: LogError) -> None:
        """Raise `refusal` in every later call. `append` notices by the event number that it expects."""
        self._refusal, self._nothing_until_ns = refusal, 0
        place = self._place
        self._place = WritePlace(place.segment, place.offset, _REFUSED, [], place.written, place.dropped)


def _check_options(
    durability: str,
    sync_interval_ms: int,
    segment_bytes: int,
    max_bytes: int | None,
    on_failure: str,
    run: bytes | None,
    first: int,
) -> None:
    """Raise `ConfigError` for an invalid option of `LogWriter`."""
    if run is not None and len(run) != RUN_BYTES:
        raise ConfigError(f"run has {len(run)} bytes; it must have {RUN_BYTES}")
    if first < 1:
        raise ConfigError(f"first is {first}; events count from 1")
    if durability not in ("none", "interval", "every"):
        raise ConfigError(f"durability is {durability!r}; it must be none, interval or every")
    if on_failure not in ("stop", "continue"):
        raise ConfigError(f"on_failure is {on_failure!r}; it must be stop or continue")
    if sync_interval_ms < 0:
        raise ConfigError(f"sync_interval_ms is {sync_interval_ms}; it must be 0 or more")
    if segment_bytes < 1:
        raise ConfigError(f"segment_bytes is {segment_bytes}; it must be 1 or more")
    if max_bytes is not None and max_bytes < 2 * segment_bytes:
        raise ConfigError(f"max_bytes is {max_bytes}; it must hold two segments of {segment_bytes} bytes")
