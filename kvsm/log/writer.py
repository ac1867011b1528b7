"""Writing the log: batched, rotated, synced as chosen. No failure is silent.

`LogWriter.append` puts an event on a list. A flush encodes the list as one frame and writes it with one
system call. The embedder chooses what happens if that call fails:

- `stop`: what is written stays whole. `LogWriteFailed` is raised now and by every later call.
- `continue`: the segment is marked, in place, as broken from the first lost event on. Events are counted and
  dropped until a new segment can be opened. It begins with a snapshot: readers continue there, and report
  the lost events as a gap.

`close(error)` writes a last record, which says how the run ended, and marks the log as closed. A log without
it was not closed: readers say so.

The mark overwrites bytes that the segment reserved, because a full disk has no room for new ones. A file
system that copies on write may refuse even that: then the writer stops.

One thread owns a writer. A log is one life of the core: a writer never opens an existing log.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, NoReturn

from msgspec.structs import replace

from kvsm.errors import ConfigError, LogError, LogWriteFailed, described
from kvsm.events import SCHEMA_VERSION, OffloadConfig, OffloadingEvent
from kvsm.log.frames import (
    CLOSED,
    MARK_OFFSET,
    RUN_BYTES,
    FrameEncoder,
    SegmentHead,
    SegmentTail,
    encode_mark,
    encode_preamble,
    first_event,
    segment_path,
)
from kvsm.states import machines_digest

Durability = Literal["none", "interval", "every"]
OnFailure = Literal["stop", "continue"]

FRAME_EVENTS = 512
"""Most events of one frame. With more, an event does not get cheaper."""

FRAME_BYTES = 1 << 20
"""About the largest frame. The size of the last frame tells how many events that is."""


ERROR_TEXT = 2000
"""Most characters of the text of the error with which a log is closed."""


class LogWriter:
    """Appends events to a new log.

    directory: made if absent; must be empty.
    config: recorded in each segment.
    snapshot: returns the ledger's state after the last appended event; called when a segment opens.
    durability: `none` leaves syncing to the kernel. `interval` syncs at the first flush after
        `sync_interval_ms`, and at the end. `every` syncs at each flush.
    sync_interval_ms: for `interval` (ms).
    segment_bytes: a new segment opens after this many bytes of events.
    max_bytes: limit of all segments together; None keeps all. When a segment opens, the oldest ones are
        deleted until it has room to become full.
    compress: with zstd.
    on_failure: `stop` or `continue`, as above.
    clock: Unix time (ns); recorded only.
    run: id of this run (16 bytes), recorded in each segment; random if None. No other log may have it.

    Raises `LogError` if the directory cannot be used, `ConfigError` for an option that cannot work.

    The attributes `events` and `bytes_written` count what was written, deleted segments included; `dropped`
    counts lost events; `broken_from` is the first lost event, or None. `failure` says what fails now, and
    where; it is None while the log is written as it should be.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        config: OffloadConfig,
        snapshot: Callable[[], bytes],
        durability: Durability = "interval",
        sync_interval_ms: int = 100,
        segment_bytes: int = 64 << 20,
        max_bytes: int | None = None,
        compress: bool = False,
        on_failure: OnFailure = "stop",
        clock: Callable[[], int] = time.time_ns,
        run: bytes | None = None,
    ) -> None:
        _check_options(durability, sync_interval_ms, segment_bytes, max_bytes, on_failure, run)
        self.directory = Path(directory)
        self.events = self.dropped = self.bytes_written = 0
        self.broken_from: int | None = None
        self.failure: str | None = None
        self._config, self._snapshot, self._clock = config, snapshot, clock
        self._syncs, self._continues = durability != "none", on_failure == "continue"
        self._sync_interval_ns = 0 if durability == "every" else sync_interval_ms * 1_000_000
        self._segment_bytes, self._max_bytes = segment_bytes, max_bytes
        self._run = os.urandom(RUN_BYTES) if run is None else run
        self._encoder = FrameEncoder(self._run, compress)
        self._pending: list[OffloadingEvent] = []
        self._next, self._flush_at, self._frame_events = 1, FRAME_EVENTS, FRAME_EVENTS
        self._lost, self._resume_at = False, 0
        self._refusal: LogError | None = None
        self._closed: deque[tuple[Path, int]] = deque()
        _claim(self.directory)
        try:
            self._use(self._publish(self._make_segment(lambda: b"", 0)))
        except FileExistsError as error:
            raise LogError(f"{self.directory}: another writer has just started a log here") from error
        except OSError as error:
            raise LogWriteFailed(f"{self.directory}: no log can be started: {error}") from error

    def append(self, event: OffloadingEvent) -> None:
        """Add the next event; the next flush writes it. Takes about 0.1 us.

        Raises `LogError` if its number is not the next one, and `LogWriteFailed` as `flush` does.
        """
        seq = event.seq
        if seq != self._next:
            raise self._refusal or LogError(
                f"{self.directory}: event {seq} was appended where {self._next} is next"
            )
        self._next = seq + 1
        self._pending.append(event)
        if seq >= self._flush_at:
            self.flush()

    def flush(self) -> None:
        """Write what was appended as one frame. Sync, and open a new segment, if due.

        Raises `LogWriteFailed` if that fails and `on_failure` is `stop`.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._lost:
            self.dropped += len(self._pending)
        elif self._pending:
            self._write(self._pending)
        self._pending = []
        self._flush_at = self._next - 1 + self._frame_events
        if self._lost:
            if self.dropped >= self._resume_at:
                self._start_next_segment()
        elif self._segment.size >= self._rotate_at and self._sync():
            self._start_next_segment()

    def close(self, error: BaseException | None = None) -> None:
        """Flush, sync, write how the run ended, and close. Idempotent.

        error: what ended the run; None if it ended well.

        Raises `LogWriteFailed` as `flush` does.
        """
        if self._segment.closed:
            return
        try:
            self.flush()
            if not self._lost and self._sync():
                self._end(None if error is None else described(error))
        except LogWriteFailed as failure:
            with suppress(OSError, LogWriteFailed):  # If this fails, readers say that the log was not closed.
                self._segment.cut(self._segment.size)
                self._end(str(failure))
            raise
        finally:
            self._segment.close()
            self._refuse(self._refusal or LogError(f"{self.directory}: this writer is closed"))

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def _end(self, error: str | None) -> None:
        """Write the record of the log's end: a tail, and then the mark."""
        text = None if error is None else error[:ERROR_TEXT].encode(errors="backslashreplace").decode()
        size = self._segment.size
        try:
            self._complete(self._tail(SegmentTail(follows=False, error=text)))
        except OSError as failure:
            self._take_back_tail(size)
            if not self._continues:
                self._stop("all events are written, but not how the run ended", failure)
            return
        # After the sync: behind this mark each byte was written, so a wrong byte is damage and no tear.
        with suppress(OSError):  # The tail says the same.
            self._segment.mark(CLOSED)
            if self._syncs:
                self._segment.sync()

    def _tail(self, tail: SegmentTail) -> bytes:
        return self._encoder.tail(tail, self._following, self._synced())

    def _complete(self, tail: bytes) -> None:
        """Write and sync the last record of a segment."""
        self._segment.write(tail)
        self.bytes_written += len(tail)
        if self._syncs:
            self._segment.sync()

    def _take_back_tail(self, size: int) -> None:
        """The segment goes on behind its first `size` bytes, or the log ends there."""
        written = self._segment.size
        try:
            self._segment.cut(size)
        except OSError as error:
            self._stop("no event can follow a record of the end that could not be removed", error)
        self.bytes_written -= written - size

    def _synced(self) -> int:
        """Up to which byte the segment has been synced."""
        return self._synced_size if self._syncs else 0

    def _write(self, events: list[OffloadingEvent]) -> None:
        try:
            frame = self._encoder.events(events, self._synced())
            self._segment.write(frame)
        except OSError as error:
            self._lose(events[0].seq, self._segment.size, error)
            return
        except Exception as error:  # Not the disk's fault: the next events would be lost too.
            self._stop(f"events from {events[0].seq} on cannot be encoded", error)
        self._following = events[-1].seq + 1
        self.events += len(events)
        self.bytes_written += len(frame)
        self._frame_events = max(1, min(FRAME_EVENTS, FRAME_BYTES * len(events) // len(frame)))
        if self._syncs and time.monotonic_ns() - self._synced_ns >= self._sync_interval_ns:
            self._sync()

    def _sync(self) -> bool:
        """Make the segment durable, if `durability` asks for it. False if events were lost.

        After a failed sync nobody knows which pages reached the disk. So all events since the last good sync
        count as lost.
        """
        if not self._syncs or self._segment.size == self._synced_size:
            return True
        try:
            self._segment.sync()
        except OSError as error:
            self.events -= self._next - 1 - self._synced_seq
            self.bytes_written -= self._segment.size - self._synced_size
            self._lose(self._synced_seq + 1, self._synced_size, error)
            return False
        self._note_synced(self._segment)
        return True

    def _note_synced(self, segment: SegmentFile) -> None:
        self._synced_seq, self._synced_size = self._next - 1, segment.size
        self._synced_ns = time.monotonic_ns()

    def _lose(self, first: int, size: int, cause: OSError) -> None:
        """Events from `first` on are lost: cut the segment to `size`, then mark it or stop."""
        last = self._next - 1
        which = f"event {first}" if first == last else f"events {first} to {last}"
        failure = f"{which} could not be written"
        if not self._continues:
            with suppress(OSError):  # If this fails, a torn end is left, and readers cut it.
                self._segment.cut(size)
                self._following = first
            self._stop(failure, cause)
        try:
            self._segment.cut(size)
            if self._syncs:  # A marked segment is complete, so the mark must not reach the disk first.
                self._segment.sync()
            self._segment.mark(first)
            if self._syncs:
                self._segment.sync()
        except OSError as error:
            self._stop(f"{failure} ({cause}), nor can the log be marked as broken", error)
        self.dropped += last - first + 1
        if self.broken_from is None:
            self.broken_from = first
        self.failure = f"{self._segment.path}: {failure}: {cause}"
        self._lost, self._resume_at = True, 0

    def _start_next_segment(self) -> None:
        """Open the next segment, and delete the oldest ones beyond `max_bytes`.

        If that fails and `on_failure` is `continue`, no event is lost by it: a good segment grows, and a
        broken one waits for the next attempt.
        """
        old, size = self._segment, self._segment.size
        new: SegmentFile | None = None
        try:
            tail = b"" if self._lost else self._tail(SegmentTail(follows=True))
            new = self._make_segment(self._snapshot, size + len(tail))
            if tail:
                self._complete(tail)
            self._publish(new)
        except BaseException as error:
            if new is not None:
                new.discard()
                if not self._lost:
                    self._take_back_tail(size)
            if not isinstance(error, OSError):
                raise
            failure = f"no segment can follow event {self._next - 1}"
            if not self._continues:
                self._stop(f"{failure}, the last one written", error)
            self.failure = self.failure or f"{self._segment.path}: {failure}: {error}"
            self._rotate_at = self._segment.size + self._segment_bytes
            self._resume_at = self.dropped + FRAME_EVENTS
            return
        self._closed.append((old.path, old.size))
        old.close()
        self._use(new)
        try:
            self._drop_oldest()
        except OSError as error:
            if not self._continues:
                self._stop(f"{self._closed[0][0].name} is too old to keep, and cannot be deleted", error)

    def _make_segment(self, snapshot: Callable[[], bytes], last_size: int) -> SegmentFile:
        """A new segment with its head, not yet under its name. If that fails, no file is left.

        last_size: of the segment before it (bytes).
        """
        segment = SegmentFile(segment_path(self.directory, self._next))
        try:
            # Before the snapshot is taken: so an attempt costs little while the disk is full.
            segment.write(encode_preamble())
            head = SegmentHead(
                SCHEMA_VERSION,
                machines_digest(),
                self._config,
                self._next - 1,
                self._clock(),
                snapshot(),
                self._run,
                self._next,
            )
            size = segment.size + len(self._encoder.head(head))
            self._oldest = self._oldest_beside(size, last_size)
            segment.write(self._encoder.head(replace(head, oldest=self._oldest)))
            if self._syncs:
                segment.sync()
        except BaseException:
            segment.discard()
            raise
        return segment

    def _publish(self, segment: SegmentFile) -> SegmentFile:
        """Give a segment the name by which readers find it. If that fails, no file is left."""
        try:
            segment.publish()
            if self._syncs:
                _sync_directory(self.directory)
        except BaseException:
            segment.discard()
            raise
        return segment

    def _use(self, segment: SegmentFile) -> None:
        """Write to this segment from now on."""
        self._segment, self._lost, self._following = segment, False, self._next
        self.failure = None
        self.bytes_written += segment.size
        self._rotate_at = segment.size + self._segment_bytes
        self._note_synced(segment)

    def _oldest_beside(self, new_size: int, last_size: int) -> int:
        """The first event that the log keeps when a segment opens that has `new_size` bytes so far."""
        if self._max_bytes is None:
            return 1
        kept = [*self._closed, (self._segment.path, last_size)] if last_size else []
        total = new_size + self._segment_bytes + sum(size for _, size in kept)
        for path, size in kept:
            if total <= self._max_bytes:
                return first_event(path)
            total -= size
        return self._next

    def _drop_oldest(self) -> None:
        """Delete what retention drops now. The head of the open segment says it already."""
        while self._closed and first_event(self._closed[0][0]) < self._oldest:
            self._closed[0][0].unlink(missing_ok=True)
            self._closed.popleft()

    def _stop(self, failure: str, cause: Exception) -> NoReturn:
        error = LogWriteFailed(f"{self._segment.path}: {failure}: {cause}")
        self.failure = str(error)
        self._refuse(error)
        raise error from cause

    def _refuse(self, refusal: LogError) -> None:
        """Answer every later call with `refusal`. `append` finds out, because no event has number -1."""
        self._refusal, self._next = refusal, -1


class SegmentFile:
    """A segment that is being written. A failed write leaves `size` as it was; `cut` removes the rest.

    It is made under another name, which also keeps a second writer out. `publish` gives it its own name: so
    readers never see a segment without a head.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.closed = path, 0, False
        self._name = path.with_suffix(".new")
        self._descriptor = os.open(self._name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def publish(self) -> None:
        """Give the file the name by which readers find it."""
        if self.path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.path))
        self._name = self._name.rename(self.path)

    def discard(self) -> None:
        """Delete the file."""
        self.close()
        self._name.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Append all of `data`."""
        done = os.pwrite(self._descriptor, data, self.size)
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], self.size + done)
        self.size += len(data)

    def sync(self) -> None:
        """Wait until the bytes are on the disk."""
        os.fdatasync(self._descriptor)

    def cut(self, size: int) -> None:
        """Keep the first `size` bytes."""
        os.ftruncate(self._descriptor, size)
        self.size = size

    def mark(self, number: int) -> None:
        """Mark the segment: events from `number` on were lost, or the log is `CLOSED`."""
        os.pwrite(self._descriptor, encode_mark(number), MARK_OFFSET)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if not self.closed:
            self.closed = True
            os.close(self._descriptor)


def _check_options(
    durability: str,
    sync_interval_ms: int,
    segment_bytes: int,
    max_bytes: int | None,
    on_failure: str,
    run: bytes | None,
) -> None:
    if run is not None and len(run) != RUN_BYTES:
        raise ConfigError(f"run has {len(run)} bytes; it must have {RUN_BYTES}")
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


def _claim(directory: Path) -> None:
    """Make the directory, which must be empty: two lives of the core never share one."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = next(iter(sorted(directory.iterdir())), None)
    except (FileExistsError, NotADirectoryError) as error:
        raise LogError(f"{directory}: a log is a directory, and a file stands here: {error}") from error
    except OSError as error:
        raise LogError(f"{directory}: no log can be started: {error}") from error
    if found is not None:
        what = "holds a log already" if found.suffix == ".kvsm" else f"is not empty (it holds {found.name})"
        raise LogError(f"{directory}: {what}; each run writes to a new directory of its own")


def _sync_directory(directory: Path) -> None:
    """Make the names in it durable: without its name a synced file is lost."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
