"""Open a log to read its events and tables.

with kvsm.open("log") as log:
    for lookup in log.lookups("why = ?", ("evicted",)):
        print(lookup.request, lookup.cause, lookup.cause_requests)
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import msgspec

from kvsm.core.log import LogReader
from kvsm.core.log.fold import with_stop
from kvsm.errors import ConfigError, LogError
from kvsm.events import OffloadingEvent
from kvsm.explain.story import Trust
from kvsm.explain.story.names import matching
from kvsm.explain.story.window import (
    EVERYTHING,
    LogPoint,
    PointUnit,
    Window,
    began_ns,
    find_window,
    window_between,
)
from kvsm.explain.tables.row_kinds import (
    BlockRow,
    BlockRunRow,
    CopyRow,
    LookupRow,
    OccupancyRow,
    RejectionRow,
    RequestRow,
    RequestStateRow,
    ResetRow,
    RestartRow,
    SkipRow,
    TransferRow,
)
from kvsm.explain.tables.sqlite_tables import read
from kvsm.explain.tables.steady_time import ClockJump, find_jumps, shift_at, use_steady_time
from kvsm.explain.tables.table_index import KeptTables, Progress, open_tables, window_tables


class OpenedLog:
    """A log whose tables can be read. Use it as a context manager, or call `close`, to close the tables.

    directory: the log's directory.
    config: the configuration of the core that wrote the log.
    condition: how the log ends, and whether it is damaged or lacks events.
    first, last: numbers of its first and last event.
    began_ns, ended_ns: times of these two events (Unix time in ns, steady).
    log_began_ns: time of the first event of the log, from which times after its start count.
    clock_jumps: where the clock of the engine was set. All times in the tables are steady
        (`kvsm.explain.tables.steady_time`), so they differ from what the clock said after the first jump.
    stopped: why the tables end before the log does: the error for damage, or for an event that cannot follow;
        None: they cover the whole log.
    connection: the SQLite database of the tables, read-only.
    part: the events that the tables cover. `EVERYTHING`: all of the log.
    note: why the tables could not be stored in an index (`kvsm.explain.tables.table_index`); None: they were,
        or the log is too small for an index.
    """

    def __init__(self, reader: LogReader, tables: KeptTables, window: Window = EVERYTHING) -> None:
        self.directory, self.config = reader.directory, reader.head.config
        self.condition = with_stop(tables.condition, reader.directory)
        self.stopped, self.note = tables.stopped, tables.note
        self._tables = tables
        self.connection = tables.connection
        self.clock_jumps = self._use_steady_time()
        self.connection.execute("PRAGMA query_only = ON")
        ends = "SELECT event, wall_ns FROM events ORDER BY event {} LIMIT 1"
        self.first, self.began_ns = self.connection.execute(ends.format("ASC")).fetchone()
        self.last, self.ended_ns = self.connection.execute(ends.format("DESC")).fetchone()
        self.part = window
        self.log_began_ns = self.began_ns if window == EVERYTHING else began_ns(reader)

    def _use_steady_time(self) -> tuple[ClockJump, ...]:
        """Hide the tables behind views with steady times if the clock jumped. The jumps are cached."""
        (last,) = self.connection.execute("SELECT max(event) FROM events").fetchone()
        if (kept := self._tables.memo(_JUMPS, last)) is not None:
            with suppress(msgspec.MsgspecError):
                return use_steady_time(
                    self.connection, msgspec.msgpack.decode(kept, type=tuple[ClockJump, ...])
                )
        jumps = find_jumps(self.connection)
        self._tables.remember(_JUMPS, last, msgspec.msgpack.encode(jumps))
        return use_steady_time(self.connection, jumps)

    def shift_ns(self, event: int) -> int:
        """Steady time minus the clock's time at an event (ns): 0 unless the clock jumped before."""
        return shift_at(self.clock_jumps, event)

    def window(self, since: LogPoint | None, until: LogPoint | None) -> Window:
        """As `find_window`, in steady time."""
        if not self.clock_jumps or (since is None and until is None):
            return find_window(LogReader(self.directory), since, until)
        return window_between(_TableTimes(self), since, until)

    def __enter__(self) -> OpenedLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the tables."""
        self.connection.close()

    def events(self, first: int | None = None, last: int | None = None) -> Iterator[OffloadingEvent]:
        """Stream the events from `first` to `last`. Raises `LogError` if the log no longer has event `first`.

        first, last: None: from the log's first event, to its last.
        """
        for segment in LogReader(self.directory).segments(first):
            for event in segment.events():
                if last is not None and event.seq > last:
                    return
                if first is None or event.seq >= first:
                    yield event

    # The tables. where: an SQL condition, with a `?` for each of `params`. Rows are sorted by their key.

    def requests(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[RequestRow]:
        """The requests."""
        return read(self.connection, "requests", RequestRow, where, params)

    def request_states(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[RequestStateRow]:
        """The stays of requests in their states."""
        return read(self.connection, "request_states", RequestStateRow, where, params)

    def lookups(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[LookupRow]:
        """The lookups of prefixes."""
        return read(self.connection, "lookups", LookupRow, where, params)

    def transfers(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[TransferRow]:
        """The stores and loads."""
        return read(self.connection, "transfers", TransferRow, where, params)

    def copies(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[CopyRow]:
        """Each rank's part of the submitted transfers."""
        return read(self.connection, "copies", CopyRow, where, params)

    def blocks(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[BlockRow]:
        """The lives of blocks."""
        return read(self.connection, "blocks", BlockRow, where, params)

    def block_runs(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[BlockRunRow]:
        """The lives of blocks, with consecutive blocks of a store that lived alike in one row."""
        return read(self.connection, "block_runs", BlockRunRow, where, params)

    def skips(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[SkipRow]:
        """Offered blocks that were not stored."""
        return read(self.connection, "skips", SkipRow, where, params)

    def resets(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[ResetRow]:
        """The resets of the cache."""
        return read(self.connection, "resets", ResetRow, where, params)

    def restarts(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[RestartRow]:
        """The restarts: a process resumed the log of an earlier process."""
        return read(self.connection, "restarts", RestartRow, where, params)

    def rejections(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[RejectionRow]:
        """The rejected reports of workers."""
        return read(self.connection, "rejections", RejectionRow, where, params)

    def occupancy(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[OccupancyRow]:
        """Samples of how the slots of the pool are used."""
        return read(self.connection, "occupancy", OccupancyRow, where, params)

    def arrow(self, table: str) -> Any:
        """A table as a `pyarrow.Table`. Needs the extra `kvsm[analysis]`. Raises `ConfigError` without it."""
        from kvsm.explain.tables.arrow import arrow_batches, arrow_module, arrow_schema

        batches = arrow_batches(self.connection, table)
        return arrow_module().Table.from_batches(batches, arrow_schema(table))

    def frame(self, table: str) -> Any:
        """A table as a pandas `DataFrame`. Needs the extra `kvsm[analysis]`."""
        return self.arrow(table).to_pandas()

    def sql(self, query: str, params: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run an SQL query over the tables. The tables cannot be changed.

        Raises `ConfigError` for a query that SQLite refuses.
        """
        try:
            return self.connection.execute(query, params)
        except sqlite3.Error as error:
            raise ConfigError(f"the query cannot be run: {error}") from error

    def memo(self, name: str) -> bytes | None:
        """The value that `remember` cached for the log up to its current last event; None: there is none."""
        return self._tables.memo(name, self.last)

    def remember(self, name: str, value: bytes) -> None:
        """Cache a value computed from the log in its index. Does nothing if no index can be written."""
        self._tables.remember(name, self.last, value)

    def resolve_request(self, name: str) -> list[str]:
        """The ids of the requests that `name` matches, in the order of their arrival.

        Like `kvsm.explain.story.names.matching`: the request with this id or, if there is none, all requests
        whose ids begin with `name` and a hyphen, because an engine appends to the id that a client sent.
        """
        try:
            name.encode()
        except UnicodeEncodeError:
            return []  # A lone surrogate, which no id in a log has.
        rows = self.connection.execute(
            "SELECT request, MIN(arrived) AS came FROM requests WHERE request = ?"
            " OR (request >= ? AND request < ?) GROUP BY request ORDER BY came, request",
            (name, f"{name}-", f"{name}."),
        )
        return matching(name, [request for request, _ in rows])


class _TableTimes:
    """The steady times of an opened log."""

    def __init__(self, log: OpenedLog) -> None:
        self.directory, self.first, self.began_ns = log.directory, log.first, log.log_began_ns
        self._log = log

    def first_from(self, point: LogPoint) -> int | None:
        """As in `EventTimes`."""
        column = "event" if point.unit is PointUnit.EVENT else "wall_ns"
        query = f"SELECT event FROM events WHERE {column} >= ? ORDER BY event LIMIT 1"
        found = self._log.sql(query, (point.value,)).fetchone()
        return None if found is None else int(found[0])

    def last(self) -> tuple[int, int]:
        """As in `EventTimes`."""
        return self._log.last, self._log.ended_ns


_JUMPS = "clock jumps 1"
"""Key of the jumps of the clock in the index. Increase the number when `find_jumps` changes."""


def open(
    directory: str | os.PathLike[str],
    *,
    allow_policies: Collection[str] = (),
    max_slots: int | None = None,
    progress: Progress | None = None,
    window: Window = EVERYTHING,
) -> OpenedLog:
    """Open a log: make its tables, or read them from its index (`kvsm.explain.tables.table_index`).

    directory: the log's directory. The log may still be written; the tables cover what it has now.
    allow_policies, max_slots: as in `kvsm.explain.story.Trust`.
    progress: called from time to time while the log is read (`table_index.ReadProgress`).
    window: the events that the tables cover. A part of a log has no index: its tables are made each time, and
        `first` and `last` of the opened log are those of the part.

    The tables end before damage, or before an event that cannot follow; `OpenedLog.stopped` has the error.
    Raises `LogError` if there is no log, if it has no whole event, or if it exceeds the allowed limits.
    """
    reader, trust = LogReader(directory), Trust(allow_policies, max_slots)
    if window == EVERYTHING:
        tables = open_tables(reader, trust, progress)
    else:
        tables = window_tables(reader, trust, progress, window)
    if tables.connection.execute("SELECT 1 FROM events LIMIT 1").fetchone() is None:
        tables.connection.close()
        part = "" if window.first is None else f" from event {window.first} on"
        raise tables.stopped or LogError(f"{reader.directory}: there is no whole event{part} in this log")
    return OpenedLog(reader, tables, window)
