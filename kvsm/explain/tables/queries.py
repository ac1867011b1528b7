"""Run users' queries over the tables of a log: only SELECT, and with a time limit."""

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
"""Instructions of SQLite's virtual machine between two checks of the time limit: less than a millisecond."""


def run_query(
    connection: sqlite3.Connection, query: str, params: Sequence[Any], seconds: float
) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
    """Run a query that only reads. Returns (names of the columns, iterator over the rows).

    seconds: time limit, from now to the last row. Ctrl-C ends the query too.

    Raises `ConfigError` for a query that is wrong, takes too long, or does anything but SELECT, and
    `LogError` for a damaged index. The iterator over the rows raises the same errors.
    """
    until = time.monotonic() + seconds
    timed_out: list[bool] = []

    def is_over() -> bool:
        if time.monotonic() > until:
            timed_out.append(True)
        return bool(timed_out)

    # Use these table functions once before the authorizer is set: SQLite declares them at their first use,
    # and the authorizer would refuse that.
    connection.execute("SELECT 1 FROM json_each('[]'), json_tree('[]')")
    connection.set_authorizer(_may)
    connection.set_progress_handler(is_over, _STEPS)
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
    """The authorizer that SQLite calls for each action of a query: `SQLITE_OK` or `SQLITE_DENY`."""
    if action not in _ALLOWED:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and second in _FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_READ and first is not None and first.startswith("sqlite_"):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _clear(error: BaseException, timed_out: list[bool], seconds: float) -> BaseException:
    """Convert an error of SQLite to one with a clear message."""
    text = str(error)
    if timed_out:
        return ConfigError(
            f"the query took more than {seconds:g} s and was stopped; ask for less, or give --timeout"
        )
    if text == "interrupted":
        return KeyboardInterrupt()  # Ctrl-C was raised in `is_over`, so SQLite interrupted the query.
    if "malformed" in text or "not a database" in text:
        return LogError(f"the index beside the log is damaged ({text}); delete index.sqlite, and ask again")
    if "not authorized" in text or "prohibited" in text:
        return ConfigError("the query does more than SELECT; the tables can only be read")
    return ConfigError(f"the query cannot be run: {text}; `kvsm query --tables` lists the tables and columns")
