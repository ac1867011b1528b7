"""Store the tables of a log beside it as `index.sqlite`: extend them where they end, or make them anew.

The index is optional: it saves reading a large log again, and can be deleted at any time. It is committed at
the end of each segment, so an interrupted indexing resumes there. It also stores the ledger and the state of
the extractor at the event where it ends. A log that is still written is read up to its last whole frame, and
from there on the next time.

An index is used only if no other user can have made or changed it, and if it fits the log as it is now. It
has a digest of the bytes of each segment that was read. A segment is taken as unchanged if its inode, size
and times are (among them `ctime`, which no program can set); otherwise its digest is computed again, which
takes a second for each GB.

============================================  ==================================================
what is found                                 what is done
============================================  ==================================================
a log of less than `SMALL_LOG` bytes          read the log each time; make no file
a redacted copy of a log                      make tables in a temporary file, with a note that
                                              says why. Leave the directory unchanged.
a directory that others may change, or that   the same
this user may not change; a file of another
user, a link, or a file that is no index
an index of another run or version, of other  make it anew. A copied index is on another inode, and
segments or other bytes in them, on another   another user may have made it.
inode, or damaged
another process is at work on it              wait up to `WAIT_SECONDS`, then use a temporary file
============================================  ==================================================

An index still has the events of segments that retention has deleted since.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import msgspec
import zstandard

from kvsm.core.ledger import Ledger
from kvsm.core.ledger.snapshot import restore_foreign, snapshot
from kvsm.core.log import LogReader, Segment
from kvsm.core.log.fold import condition_of, go_on, refuse_malformed
from kvsm.core.log.frames import MARK_OFFSET, PREAMBLE_BYTES, segment_paths
from kvsm.core.log.log_directory import INDEX_NAME, LOCK_NAME
from kvsm.errors import ConfigError, IllegalTransition, InvalidEvent, KvsmError, LogDamaged, LogError
from kvsm.events import OffloadingEvent
from kvsm.explain.redaction import copy_mark
from kvsm.explain.story import LogCondition, Trust
from kvsm.explain.story.window import EVERYTHING, Window
from kvsm.explain.tables.extract import Extractor, SavedExtractor
from kvsm.explain.tables.sqlite_tables import TableWriter, make_tables, schema
from kvsm.system.private_files import open_private, why_not_private

SMALL_LOG = 1 << 20
"""Logs smaller than this (bytes) get no index: reading them takes about half a second."""

CHECKED_BYTES = 64 << 20
"""An index up to this size is searched for damage when it is opened: about a tenth of a second."""

WAIT_SECONDS = 30.0
"""How long to wait for another process that updates the index."""

_APPLICATION = 0x6B76736D
_VERSION = 6
"""Increase it when the meaning of the tables or of the saved state changes. A changed schema is detected."""

_TICK_NS = 100_000_000
"""A file that changes twice within a tick of its clock may keep its `ctime`. Ticks (ns) are shorter."""

_CHUNK_BYTES = 1 << 20

_FLUSH_EVENTS = 4096
_STATE_SCHEMA = "CREATE TABLE _state (saved BLOB)"
_MEMO_SCHEMA = "CREATE TABLE _memos (name TEXT PRIMARY KEY, event INTEGER, value BLOB)"
_HEADER = b"SQLite format 3\x00"


class ReadProgress(msgspec.Struct, frozen=True):
    """How far a log has been read into its tables. event: the last event that was read; 0 before the first
    one.
    read_bytes, log_bytes: bytes that were read, of the bytes to read.
    index: the index that is made from nothing; None: an index is extended, or none is made.
    """

    event: int
    read_bytes: int
    log_bytes: int
    index: Path | None


Progress = Callable[[ReadProgress], None]
"""Called before the first event is read, from time to time, and at the end. Not called if nothing is read."""


class KeptTables(msgspec.Struct):
    """Tables that can be read.

    condition: how the log ends, and whether it is damaged or lacks events.
    stopped: why the tables end before the log does; None: they cover the whole log.
    note: why they could not be stored beside the log; None: they were, or the log is small.
    memos: whether the database has the table for `memo`.
    path: the file of the index; None: `remember` cannot write to it.
    """

    connection: sqlite3.Connection
    condition: LogCondition
    stopped: KvsmError | None
    note: str | None = None
    memos: bool = False
    path: Path | None = None

    def memo(self, name: str, event: int) -> bytes | None:
        """The value cached under a name for the log up to `event`; None: there is none for this event."""
        if not self.memos:
            return None
        query = "SELECT value FROM _memos WHERE name = ? AND event = ?"
        found = self.connection.execute(query, (name, event)).fetchone()
        return None if found is None else bytes(found[0])

    def remember(self, name: str, event: int, value: bytes) -> None:
        """Cache a value computed from the log up to `event`. Does nothing if the index cannot be written."""
        if self.path is None:
            return
        with suppress(sqlite3.Error), closing(sqlite3.connect(self.path, isolation_level=None)) as writer:
            writer.execute("INSERT OR REPLACE INTO _memos VALUES (?, ?, ?)", (name, event, value))


class SeenSegment(msgspec.Struct, frozen=True):
    """A segment file as it was before its events were read.

    size: in bytes.
    mark: the bytes of its mark, which a writer changes in place.
    digest: of the bytes behind its preamble.
    identity: its inode, `mtime` and `ctime` (ns).
    seen_ns: when it was read (Unix time).
    """

    size: int
    mark: bytes
    digest: bytes
    identity: tuple[int, int, int]
    seen_ns: int

    def is_in(self, path: Path) -> bool:
        """Whether the file still has these bytes. More may follow."""
        status = path.stat()
        settled = self.seen_ns - self.identity[2] > _TICK_NS
        if settled and (status.st_size, _identity(status)) == (self.size, self.identity):
            return True
        return status.st_size >= self.size and _read_segment(path, self.size)[1] == self.digest


def _see(path: Path) -> SeenSegment:
    """Read a segment file. Raises `OSError`."""
    status, seen_ns = path.stat(), time.time_ns()
    return SeenSegment(status.st_size, *_read_segment(path, status.st_size), _identity(status), seen_ns)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _read_segment(path: Path, size: int) -> tuple[bytes, bytes]:
    """Return the mark of a segment file, and the digest of its bytes from the preamble to `size`."""
    digest, left = blake2b(digest_size=16), size - PREAMBLE_BYTES
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # It may be a pipe.
        mark = file.read(PREAMBLE_BYTES)[MARK_OFFSET:]
        while left > 0 and (data := file.read(min(left, _CHUNK_BYTES))):
            digest.update(data)
            left -= len(data)
    return mark, digest.digest()


class SavedIndex(msgspec.Struct):
    """The state of an index, to resume indexing where it ends.

    place: device and inode of the index file.
    run: the run that wrote the log.
    segments: name -> the file of each segment that was read. The last one may have grown since.
    present: names of the segments that the log had.
    gaps, broken_from: as in `LogCondition`, for the part that was read.
    condition: the condition of the whole log; None: it was not read to its end.
    ledger: snapshot of the ledger after the last event.
    extractor: state of the extractor after the last event.
    """

    place: tuple[int, int]
    run: bytes
    segments: dict[str, SeenSegment]
    present: list[str]
    gaps: list[tuple[int, int]]
    broken_from: int | None
    condition: LogCondition | None
    ledger: bytes
    extractor: SavedExtractor


class _IndexMismatch(KvsmError):
    """The index does not fit the log as it is now."""


def open_tables(reader: LogReader, trust: Trust, progress: Progress | None) -> KeptTables:
    """Make the tables of a log, or read them from its index. Raises as `kvsm.explain.story.rebuild` does."""
    trust.check(reader.head.config, reader.directory)
    if sum(status.st_size for status in _status(reader).values()) < SMALL_LOG:
        return _temporary(reader, trust, progress, None)
    try:
        _refuse_copy(reader.directory)
        _refuse_shared(reader.directory)
        if not os.access(reader.directory, os.W_OK):
            return _read_only(reader)
        with _exclusive(reader.directory):
            return _kept(reader, trust, progress)
    except (ConfigError, OSError, sqlite3.Error) as error:
        note = f"the index is not kept beside the log, and the log is read each time: {error}"
        return _temporary(reader, trust, progress, note)


def window_tables(reader: LogReader, trust: Trust, progress: Progress | None, window: Window) -> KeptTables:
    """Make the tables of a part of a log, in a temporary file. Raises as `open_tables` does.

    The fold begins at the last snapshot before the window.
    """
    trust.check(reader.head.config, reader.directory)
    return _temporary(reader, trust, progress, None, window)


def unread_bytes(reader: LogReader) -> int:
    """Return the number of bytes of a log that are not indexed, as far as that is known without a lock."""
    sizes = {name: status.st_size for name, status in _status(reader).items()}
    path = reader.directory / INDEX_NAME
    with suppress(OSError, sqlite3.Error, _IndexMismatch):
        place = os.stat(path)
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            for name, seen in _saved_state(connection, (place.st_dev, place.st_ino), reader).segments.items():
                sizes[name] = max(0, sizes.get(name, 0) - seen.size)
    return sum(sizes.values())


def _temporary(
    reader: LogReader, trust: Trust, progress: Progress | None, note: str | None, window: Window = EVERYTHING
) -> KeptTables:
    """Make tables in a temporary file, deleted when they are closed; SQLite keeps small ones in memory."""
    connection = sqlite3.connect("", isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("BEGIN")
        make_tables(connection)
        indexer = _Indexer(connection, reader, trust, progress, window=window)
        stopped = indexer.read_to_end(None)
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return KeptTables(connection, condition_of(reader), stopped, note)


def _refuse_copy(directory: Path) -> None:
    """Raise `ConfigError` if the directory is a redacted copy: looking at it must not change it."""
    if copy_mark.is_marked(directory):
        kept = f"delete its file {copy_mark.NAME} to keep an index"
        raise ConfigError(f"{directory} is a redacted copy, and is not changed; {kept}")


def _refuse_shared(directory: Path) -> None:
    """Raise `ConfigError` if another user may change files in the directory."""
    found = directory.stat()
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"other users may change what is in {directory}")


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Lock the index for this process. Raises `ConfigError` if another process holds the lock too long.

    The lock has its own file, because the process that writes the log holds the lock of the directory.
    """
    descriptor, _ = open_private(directory / LOCK_NAME, "the lock of an index")
    try:
        until = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ConfigError("another process is at work on it") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _read_only(reader: LogReader) -> KeptTables:
    """Read the tables from an index in a read-only directory. Raises `ConfigError` if it cannot be used."""
    path = (reader.directory / INDEX_NAME).absolute()
    found = os.lstat(path)
    reason = why_not_private(found)
    if reason is not None:
        raise ConfigError(f"{path} {reason}")
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", isolation_level=None, uri=True)
    try:
        saved = _saved_state(connection, (found.st_dev, found.st_ino), reader)
        if saved.condition is None or not _is_settled(saved, reader) or Path(f"{path}-wal").exists():
            raise _IndexMismatch
    except (_IndexMismatch, sqlite3.Error) as error:
        connection.close()
        raise ConfigError(f"{reader.directory} is read-only, and its index is not up to date") from error
    return KeptTables(connection, saved.condition, None, memos=True)


def _kept(reader: LogReader, trust: Trust, progress: Progress | None) -> KeptTables:
    path = reader.directory / INDEX_NAME
    descriptor, _ = open_private(path, "an index")
    try:
        header = os.pread(descriptor, 72, 0)
        place = os.fstat(descriptor).st_dev, os.fstat(descriptor).st_ino
    finally:
        os.close(descriptor)
    if header and (header[:16] != _HEADER or header[68:72] != _APPLICATION.to_bytes(4, "big")):
        raise ConfigError(f"{path} is no index of kvsm; move it away")
    try:
        return _updated(path, place, reader, trust, progress)
    except (_IndexMismatch, sqlite3.DatabaseError) as error:
        if isinstance(error, sqlite3.OperationalError):
            raise  # For example, the disk is full. The index itself may be right.
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(f"{path}{suffix}")
        descriptor, _ = open_private(path, "an index")
        place = os.fstat(descriptor).st_dev, os.fstat(descriptor).st_ino
        os.close(descriptor)
        return _updated(path, place, reader, trust, progress)


def _updated(
    path: Path, place: tuple[int, int], reader: LogReader, trust: Trust, progress: Progress | None
) -> KeptTables:
    """Read the tables from this file, after adding the events that it lacks. Raises `_IndexMismatch`."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cache_size = -65536")
        saved = None
        if path.stat().st_size:
            saved = _saved_state(connection, place, reader)
        else:
            connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        condition = None if saved is None else saved.condition
        stopped = None
        if condition is None or saved is None or not _is_settled(saved, reader):
            connection.execute("BEGIN IMMEDIATE")
            if saved is None:
                make_tables(connection)
                connection.execute(_STATE_SCHEMA)
                connection.execute(_MEMO_SCHEMA)
            indexer = _Indexer(
                connection, reader, trust, progress, saved, index=path if saved is None else None
            )
            stopped = indexer.read_to_end(place)
            condition = indexer.condition()
            connection.execute("COMMIT")
        # Start a read transaction, so that this connection does not see later updates by other processes.
        connection.execute("BEGIN")
        connection.execute("SELECT COUNT(*) FROM _state").fetchone()
    except BaseException:
        connection.close()
        raise
    return KeptTables(connection, condition, stopped, memos=True, path=path)


def _saved_state(connection: sqlite3.Connection, place: tuple[int, int], reader: LogReader) -> SavedIndex:
    """Return the saved state of an index. Raises `_IndexMismatch` if it does not fit, and `sqlite3.Error`."""
    if connection.execute("PRAGMA user_version").fetchone() != (_VERSION,):
        raise _IndexMismatch
    made = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"
    if {sql for (sql,) in connection.execute(made)} != {*schema(), _STATE_SCHEMA, _MEMO_SCHEMA}:
        raise _IndexMismatch
    size = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
    small = connection.execute(size).fetchone()[0] <= CHECKED_BYTES
    if small and connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
        raise _IndexMismatch
    found = connection.execute("SELECT saved FROM _state").fetchall()
    try:
        saved = msgspec.msgpack.decode(zstandard.decompress(found[0][0]), type=SavedIndex)
    except (IndexError, TypeError, zstandard.ZstdError, msgspec.MsgspecError):
        raise _IndexMismatch from None
    if saved.place != place or saved.run != reader.head.run or not _bytes_agree(saved, reader):
        raise _IndexMismatch
    return saved


def _bytes_agree(saved: SavedIndex, reader: LogReader) -> bool:
    """Whether the segments that were read are unchanged. Retention may have deleted the oldest ones, and the
    last one may have grown."""
    sizes = {name: status.st_size for name, status in _status(reader).items()}
    last, oldest = max(saved.segments), min(sizes)
    kept = {name: seen for name, seen in saved.segments.items() if name >= oldest}
    if last not in sizes or any(name not in kept for name in sizes if name < last):
        return False
    if any(sizes.get(name) != seen.size for name, seen in kept.items() if name != last):
        return False
    for name, seen in kept.items():
        with suppress(FileNotFoundError):  # Retention may delete it meanwhile.
            if not seen.is_in(reader.directory / name):
                return False
    return True


def _is_settled(saved: SavedIndex, reader: LogReader) -> bool:
    """Whether the log has not grown since it was read to its end, and its last mark is the same."""
    found = _status(reader)
    last = max(saved.segments)
    seen = saved.segments[last]
    return (
        sorted(found) == saved.present
        and saved.present[-1] == last
        and seen.size == found[last].st_size
        and seen.mark == _read_segment(reader.directory / last, 0)[0]
    )


def _status(reader: LogReader) -> dict[str, os.stat_result]:
    """Name -> status of each segment file of the log."""
    found = {}
    for path in segment_paths(reader.directory):
        with suppress(FileNotFoundError):  # Retention may delete it meanwhile.
            found[path.name] = path.stat()
    return found


class _Indexer:
    """Extends tables with the events of a log after their last one, and saves the state in the index.

    saved: the state of an index to resume from; None: the tables are empty.
    window: the events that get rows. Events before it are only folded, and events behind it are not read.
    index: the index that is made from nothing, for `ReadProgress`.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        reader: LogReader,
        trust: Trust,
        progress: Progress | None,
        saved: SavedIndex | None = None,
        window: Window = EVERYTHING,
        index: Path | None = None,
    ) -> None:
        self._connection, self._reader, self._window = connection, reader, window
        self._trust, self._progress, self._index = trust, progress, index
        self._read_bytes = self._log_bytes = 0
        self._tables = TableWriter(connection)
        self._ledger: Ledger | None = None
        self._segments: dict[str, SeenSegment] = {}
        self._gaps: list[tuple[int, int]] = []
        self._broken_from: int | None = None
        if saved is None:
            self._extractor = Extractor(self._tables)
            return
        try:
            self._ledger = restore_foreign(saved.ledger, reader.head.config)
            self._extractor = Extractor(self._tables, saved.extractor, self._ledger)
        except ValueError as error:
            raise _IndexMismatch from error
        self._segments, self._gaps, self._broken_from = saved.segments, saved.gaps, saved.broken_from
        self._extractor.go_on()

    def condition(self) -> LogCondition:
        """The condition of the whole log: from the saved state for earlier segments, else from the reader."""
        condition = condition_of(self._reader)
        broken_from = condition.broken_from if self._broken_from is None else self._broken_from
        gaps = (*self._gaps, *(gap for gap in condition.gaps if gap not in self._gaps))
        return msgspec.structs.replace(condition, gaps=gaps, broken_from=broken_from)

    def read_to_end(self, place: tuple[int, int] | None) -> KvsmError | None:
        """Read the log to its end. Returns why the tables end before the log does; None: they do not.

        place: device and inode of the file in which to save the state; None: do not save it.

        Raises `_IndexMismatch` if the log is not the one that was read before.
        """
        stopped: KvsmError | None = None
        holding = self._window.first if self._ledger is None else self._ledger.seq + 1
        sizes = self._sizes()
        self._log_bytes = sum(sizes.values())
        self._report_progress(0)
        with self._trust.guarded(self._reader.directory):
            try:
                for segment in self._reader.segments(holding):
                    self._read(segment)
                    self._read_bytes += sizes.get(segment.path.name, 0)
                    if self._is_over():
                        break
                    if place is not None and segment.successor is not None:
                        self._save(place, None)
                        self._connection.execute("COMMIT")
                        self._connection.execute("BEGIN IMMEDIATE")
            except (LogDamaged, IllegalTransition, InvalidEvent) as error:
                stopped = error
        if self._ledger is None:
            raise stopped or LogError(f"{self._reader.directory}: there is no whole event in this log")
        self._extractor.write_unfinished()
        if place is not None:
            self._save(place, None if stopped else self.condition())
        self._report_progress(0)
        return stopped

    def _sizes(self) -> dict[str, int]:
        """Name -> size of each segment file that will be read (bytes)."""
        whole = {name for name in self._segments if name != max(self._segments)}
        found = {name: status.st_size for name, status in _status(self._reader).items() if name not in whole}
        first, last = self._window
        if first is not None:
            begin = max(
                (name for name in found if int(Path(name).stem) <= first), default=min(found, default="")
            )
            found = {name: size for name, size in found.items() if name >= begin}
        return {name: size for name, size in found.items() if last is None or int(Path(name).stem) <= last}

    def _read(self, segment: Segment) -> None:
        """Add the events of a segment that the tables lack."""
        if self._segments:
            # The previous segment is complete now, and may have got its last record since it was read.
            with suppress(FileNotFoundError):
                last = self._reader.directory / max(self._segments)
                self._segments[last.name] = _see(last)
        segment_seen = _see(segment.path)
        begun = self._ledger is not None and segment.gap is None and segment.head.seq < self._ledger.seq
        self._trust.admit(segment)
        if not begun:
            self._ledger = go_on(self._ledger, segment, self._trust)
        assert self._ledger is not None
        ledger, seen = self._ledger, segment.head.seq
        since_flush = 0
        for batch in segment.batches():
            seen = batch[-1].seq
            if batch[0].seq <= ledger.seq:
                if seen > ledger.seq:
                    raise _IndexMismatch  # A frame that was read before is longer now.
                continue
            self._follow(ledger, batch)
            if self._is_over():
                break
            since_flush += len(batch)
            if since_flush >= _FLUSH_EVENTS:
                since_flush = 0
                self._tables.flush()
                self._report_progress(segment.offset)
        if seen < ledger.seq:
            raise _IndexMismatch  # Events that were read before are missing now.
        self._segments[segment.path.name] = segment_seen

    def _follow(self, ledger: Ledger, batch: list[OffloadingEvent]) -> None:
        follow, (first, last) = self._extractor.follow, self._window
        if first is not None and batch[0].seq < first:
            before = first - batch[0].seq
            for event in batch[:before]:
                refuse_malformed(event)
            ledger.apply_all(batch[:before])
            batch = batch[before:]
        for event in batch:
            if last is not None and event.seq > last:
                return
            refuse_malformed(event)
            follow(ledger, event)

    def _is_over(self) -> bool:
        """Whether the window ends at the last event that was read."""
        assert self._ledger is not None
        return self._window.last is not None and self._ledger.seq >= self._window.last

    def _save(self, place: tuple[int, int], condition: LogCondition | None) -> None:
        """Save the state. condition: of the whole log; None: it was not read to its end."""
        assert self._ledger is not None
        self._tables.flush()
        so_far = self.condition()
        saved = SavedIndex(
            place,
            self._reader.head.run,
            self._segments,
            sorted(_status(self._reader)),
            list(so_far.gaps),
            so_far.broken_from,
            condition,
            snapshot(self._ledger),
            self._extractor.save(),
        )
        self._connection.execute("DELETE FROM _state")
        packed = zstandard.compress(msgspec.msgpack.encode(saved), 1)
        self._connection.execute("INSERT INTO _state VALUES (?)", (packed,))

    def _report_progress(self, of_segment: int) -> None:
        """Report progress. of_segment: bytes that were read of the segment that is being read."""
        if self._progress is not None:
            read = min(self._read_bytes + of_segment, self._log_bytes)  # The log may grow meanwhile.
            event = 0 if self._ledger is None else self._ledger.seq
            self._progress(ReadProgress(event, read, self._log_bytes, self._index))
