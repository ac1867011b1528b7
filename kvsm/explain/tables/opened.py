"""Open a log to read its events and tables.

with kvsm.open("log") as log:
    for lookup in log.lookups("why = ?", ("evicted",)):
        print(lookup.request, lookup.cause, lookup.cause_requests)
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import Any

from kvsm.core.log import LogReader
from kvsm.core.log.fold import with_stop
from kvsm.errors import ConfigError, LogError
from kvsm.events import OffloadingEvent
from kvsm.explain.story import Trust
from kvsm.explain.story.names import matching
from kvsm.explain.story.window import EVERYTHING, Window, began_ns
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
from kvsm.explain.tables.table_index import KeptTables, Progress, open_tables, window_tables


class OpenedLog:
    """A log whose tables can be read. Use it as a context manager, or call `close`, to close the tables.

    directory: the log's directory.
    config: the configuration of the core that wrote the log.
    condition: how the log ends, and whether it is damaged or lacks events.
    first, last: numbers of its first and last event.
    began_ns, ended_ns: wall times of these two events (Unix time in ns).
    log_began_ns: wall time of the first event of the log, from which times after its start count.
    stopped: why the tables end before the log does: the error for damage, or for an event that cannot follow;
        None: they cover the whole log.
    connection: the SQLite database of the tables, read-only.
    window: the part of the log that the tables cover.
    note: why the tables could not be stored in an index (`kvsm.explain.tables.table_index`); None: they were,
        or the log is too small for an index.
    """

    def __init__(self, reader: LogReader, tables: KeptTables, window: Window = EVERYTHING) -> None:
        self.directory, self.config = reader.directory, reader.head.config
        self.condition = with_stop(tables.condition, reader.directory)
        self.stopped, self.note = tables.stopped, tables.note
        self._tables = tables
        self.connection = tables.connection
        self.connection.execute("PRAGMA query_only = ON")
        ends = "SELECT event, wall_ns FROM events ORDER BY event {} LIMIT 1"
        self.first, self.began_ns = self.connection.execute(ends.format("ASC")).fetchone()
        self.last, self.ended_ns = self.connection.execute(ends.format("DESC")).fetchone()
        self.window = window
        self.log_began_ns = self.began_ns if window == EVERYTHING else began_ns(reader)

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
        rows = self.connection.execute(
            "SELECT request, MIN(arrived) AS came FROM requests WHERE request = ?"
            " OR (request >= ? AND request < ?) GROUP BY request ORDER BY came, request",
            (name, f"{name}-", f"{name}."),
        )
        return matching(name, [request for request, _ in rows])


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
    progress: called with the number of the last event that was read, from time to time.
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
        raise tables.stopped or LogError(f"{reader.directory}: there is no whole event in this log")
    return OpenedLog(reader, tables, window)
