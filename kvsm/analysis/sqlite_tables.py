"""The tables of `rows.py` in SQLite: their schema, how rows are written, and how they are read.

The schema is made from the classes of the rows, so a column is declared once. A row that is written again
replaces the one with the same key: that of a thing that went on.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from msgspec.structs import astuple

from kvsm.analysis.lives import Wanted
from kvsm.analysis.rows import KEYS, TABLES, Row
from kvsm.errors import ConfigError, LogError
from kvsm.replay.window import Window

INDEXES: dict[str, tuple[str, ...]] = {
    "lookups": ("request", "missed"),
    "transfers": ("ended",),
    "blocks": ("key", "gone"),
}
"""Columns that are looked up often, besides the keys of the tables."""

_TYPES = {int: "INTEGER", str: "TEXT", bool: "INTEGER"}
_R = TypeVar("_R", bound=Row)


def schema() -> list[str]:
    """The statements that make the tables."""
    return [_create(table) for table in TABLES]


def index_statements() -> list[str]:
    """The statements that make the indexes of the tables."""
    return [
        f"CREATE INDEX {table}_by_{column} ON {table} ({column})"
        for table, columns in INDEXES.items()
        for column in columns
    ]


def columns_of(table: str) -> dict[str, tuple[type, bool]]:
    """Column -> (its type, whether it may be None), in order."""
    return {name: _plain(hint) for name, hint in get_type_hints(TABLES[table]).items()}


def _plain(hint: Any) -> tuple[type, bool]:
    kinds = get_args(hint) or (hint,)
    return next(kind for kind in kinds if kind is not NoneType), NoneType in kinds


def _create(table: str) -> str:
    keys = KEYS[table]
    alone = len(keys) == 1
    lines = []
    for name, (kind, optional) in columns_of(table).items():
        needed = "" if optional else " NOT NULL"
        lines.append(f"{name} {_TYPES[kind]}{' PRIMARY KEY' if alone and name in keys else needed}")
    if alone:
        return f"CREATE TABLE {table} ({', '.join(lines)})"
    return f"CREATE TABLE {table} ({', '.join(lines)}, PRIMARY KEY ({', '.join(keys)})) WITHOUT ROWID"


@cache
def _insert(table: str) -> str:
    marks = ", ".join("?" * len(TABLES[table].__struct_fields__))
    return f"INSERT OR REPLACE INTO {table} VALUES ({marks})"


def write(connection: sqlite3.Connection, rows: dict[str, list[Row]], wanted: Iterable[Wanted] = ()) -> None:
    """Write rows, and then note which blocks are wanted.

    Raises `LogError` for a number that no kvsm writes.
    """
    try:
        for table, some in rows.items():
            if some:
                connection.executemany(_insert(table), map(astuple, some))
        connection.executemany(
            "UPDATE blocks SET wanted = ?, wanted_ns = ?, wanted_by = ? WHERE transfer = ? AND slot = ?",
            wanted,
        )
    except OverflowError as error:
        raise LogError(f"the log holds a number that is larger than any kvsm writes: {error}") from error


def within(window: Window, column: str = "event") -> tuple[str, tuple[int, ...]]:
    """A condition in SQL that an event is in the window, and its parameters. Empty: a whole log."""
    bounds = [(">=", window.first), ("<=", window.last)]
    given = [(sign, event) for sign, event in bounds if event is not None]
    return " AND ".join(f"{column} {sign} ?" for sign, _ in given), tuple(event for _, event in given)


def read(
    connection: sqlite3.Connection, table: str, kind: type[_R], where: str, params: Sequence[Any]
) -> Iterator[_R]:
    """The rows of a table in the order of its key. where: a condition in SQL; empty: all rows."""
    condition = f" WHERE {where}" if where else ""
    query = f"SELECT * FROM {table}{condition} ORDER BY {', '.join(KEYS[table])}"
    try:
        cursor = connection.execute(query, params)
    except sqlite3.Error as error:
        raise ConfigError(f"the table {table} cannot be read where {where!r}: {error}") from error
    return map(_maker(kind, table), cursor)


def _maker(kind: type[_R], table: str) -> Callable[[tuple[Any, ...]], _R]:
    """What makes a row from its columns. SQLite has no bool."""
    places = [place for place, (one, _) in enumerate(columns_of(table).values()) if one is bool]
    if not places:
        return lambda columns: kind(*columns)

    def make(columns: tuple[Any, ...]) -> _R:
        values = list(columns)
        for place in places:
            values[place] = None if values[place] is None else bool(values[place])
        return kind(*values)

    return make
