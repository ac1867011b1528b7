"""A log, opened: its events and its tables.

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
from kvsm.explain.tables.table_index import KeptTables, Progress, open_tables


class OpenedLog:
    """A log whose tables can be read. A context manager: leave it, or call `close`, to let the tables go.

    directory: of the log.
    config: its configuration.
    condition: what was found out about the log besides its events.
    first, last: numbers of its first and last event.
    began_ns, ended_ns: their wall times (Unix time in ns).
    stopped: why the tables end before the log does: the error of damage, or of an event that cannot follow.
        None: they hold all of the log.
    connection: the database of the tables. It can only be read.
    note: why the tables are not kept for the next time (`kvsm.explain.tables.table_index`), if they should
    be.
    """

    def __init__(self, reader: LogReader, tables: KeptTables) -> None:
        self.directory, self.config = reader.directory, reader.head.config
        self.condition = with_stop(tables.condition, reader.directory)
        self.stopped, self.note = tables.stopped, tables.note
        self._tables = tables
        self.connection = tables.connection
        self.connection.execute("PRAGMA query_only = ON")
        ends = "SELECT event, wall_ns FROM events ORDER BY event {} LIMIT 1"
        self.first, self.began_ns = self.connection.execute(ends.format("ASC")).fetchone()
        self.last, self.ended_ns = self.connection.execute(ends.format("DESC")).fetchone()

    def __enter__(self) -> OpenedLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the tables go."""
        self.connection.close()

    def events(self, first: int | None = None, last: int | None = None) -> Iterator[OffloadingEvent]:
        """The events from `first` to `last`, streamed. Raises `LogError` if the log does not keep `first`."""
        for segment in LogReader(self.directory).segments(first):
            for event in segment.events():
                if last is not None and event.seq > last:
                    return
                if first is None or event.seq >= first:
                    yield event

    # The tables. where: a condition in SQL, with ? for each of `params`. Rows come in the order of their key.

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
        """Runs of blocks of one store that lived alike."""
        return read(self.connection, "block_runs", BlockRunRow, where, params)

    def skips(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[SkipRow]:
        """Offered blocks that were not stored."""
        return read(self.connection, "skips", SkipRow, where, params)

    def resets(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[ResetRow]:
        """The resets of the cache."""
        return read(self.connection, "resets", ResetRow, where, params)

    def restarts(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[RestartRow]:
        """The processes that went on with the log of another one."""
        return read(self.connection, "restarts", RestartRow, where, params)

    def rejections(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[RejectionRow]:
        """The reports of workers that changed nothing."""
        return read(self.connection, "rejections", RejectionRow, where, params)

    def occupancy(self, where: str = "", params: Sequence[Any] = ()) -> Iterator[OccupancyRow]:
        """Samples of the pool."""
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
        """The result of a query over the tables. The tables cannot be changed.

        Raises `ConfigError` for a query that SQLite refuses.
        """
        try:
            return self.connection.execute(query, params)
        except sqlite3.Error as error:
            raise ConfigError(f"the query cannot be run: {error}") from error

    def memo(self, name: str) -> bytes | None:
        """What `remember` kept of this log as it is; None: nothing."""
        return self._tables.memo(name, self.last)

    def remember(self, name: str, value: bytes) -> None:
        """Keep what follows from the log as it is, in its index. Nothing if there is no index to write to."""
        self._tables.remember(name, self.last, value)

    def resolve_request(self, name: str) -> list[str]:
        """The requests that the log means by `name`, in the order in which they arrived.

        As `kvsm.explain.story.names.matching`: the request of this name or, if there is none, each one whose
        name begins with it and a hyphen. An engine appends these characters to the name that a client gave.
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
) -> OpenedLog:
    """Open a log: make its tables, or take them from its index (`kvsm.explain.tables.table_index`).

    directory: of the log. It may still be written; the tables hold what was there when it was opened.
    allow_policies, max_slots: as in `kvsm.explain.story.Trust`.
    progress: is told the number of the event up to which the log was read.

    Damage and an event that cannot follow end the tables; `OpenedLog.stopped` tells them. Raises `LogError`
    if there is no log, no whole event in it, or if it claims more than is allowed.
    """
    reader, trust = LogReader(directory), Trust(allow_policies, max_slots)
    tables = open_tables(reader, trust, progress)
    if tables.connection.execute("SELECT 1 FROM events LIMIT 1").fetchone() is None:
        tables.connection.close()
        raise tables.stopped or LogError(f"{reader.directory}: there is no whole event in this log")
    return OpenedLog(reader, tables)
