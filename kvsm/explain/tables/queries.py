"""Queries of other people over the tables of a log: only SELECT, and only for some time."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvsm.errors import ConfigError, LogError

_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_RECURSIVE,
    sqlite3.SQLITE_FUNCTION,
}
_FORBIDDEN_FUNCTIONS = {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"}
_STEPS = 10_000
"""Instructions of SQLite's machine between two looks at the clock: less than a millisecond."""


def run_query(
    connection: sqlite3.Connection, query: str, params: Sequence[Any], seconds: float
) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """(names of the columns, rows) of a query that only reads.

    seconds: the longest time that it may take. Ctrl-C ends it too.

    Raises `ConfigError` for a query that is wrong, takes too long, or does anything but SELECT. So do the
    rows, and `LogError` for a damaged index.
    """
    until = time.monotonic() + seconds
    timed_out: list[bool] = []

    def look() -> bool:
        if time.monotonic() > until:
            timed_out.append(True)
        return bool(timed_out)

    # SQLite declares these table functions at their first use, and an authorizer would refuse that.
    connection.execute("SELECT 1 FROM json_each('[]'), json_tree('[]')")
    connection.set_authorizer(_may)
    connection.set_progress_handler(look, _STEPS)
    try:
        cursor = connection.execute(query, params)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        raise _clear(error, timed_out, seconds) from error
    if cursor.description is None:
        raise ConfigError("the query is empty, or no SELECT; the tables can only be read")

    def rows() -> Iterator[tuple[Any, ...]]:
        while True:
            try:
                row = cursor.fetchone()
            except (sqlite3.Error, OverflowError) as error:
                raise _clear(error, timed_out, seconds) from error
            if row is None:
                return
            yield row

    return [column[0] for column in cursor.description], rows()


def _may(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Whether a part of a query is allowed, as SQLite asks it."""
    if action not in _ALLOWED:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and second in _FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_READ and first is not None and first.startswith("sqlite_"):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _clear(error: BaseException, timed_out: list[bool], seconds: float) -> BaseException:
    """The error that a person understands."""
    text = str(error)
    if timed_out:
        return ConfigError(
            f"the query took more than {seconds:g} s and was stopped; ask for less, or give --timeout"
        )
    if text == "interrupted":
        return KeyboardInterrupt()  # Ctrl-C was raised in `look`, and SQLite took it for a refusal to go on.
    if "malformed" in text or "not a database" in text:
        return LogError(f"the index beside the log is damaged ({text}); delete index.sqlite, and ask again")
    if "not authorized" in text or "prohibited" in text:
        return ConfigError("the query does more than SELECT; the tables can only be read")
    return ConfigError(f"the query cannot be run: {text}; `kvsm query --tables` lists the tables and columns")
