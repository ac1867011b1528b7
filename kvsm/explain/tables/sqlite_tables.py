"""The tables of `row_kinds.py` in SQLite: schema, writer and reader.

The schema is made from the row classes, so each column is declared once. Rows are upserts: later events
update the row with the same key.

There are many blocks, and most blocks of a store live alike. So `block_runs` has one row for each run of such
blocks, and the view `blocks` has one for each block. Two internal tables give the view its slots and keys:

- `_stores` has the keys and slots of a store in one row. `life - store` is a block's position in that row.
  Keys of another length or KV cache group have a row of their own.
- `_numbers` has the numbers below `RUN_BLOCKS`.

The largest table has a row for each event. `_events` holds a number for each kind, and the view `events`
shows the names.

Everything is plain SQL, so `sqlite3` and DuckDB can read the file too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from msgspec.structs import astuple, replace

from kvsm.errors import ConfigError, LogError
from kvsm.events import KINDS
from kvsm.explain.tables import key_history
from kvsm.explain.tables.row_kinds import KEYS, TABLES, BlockRow, BlockRunRow, EventRow, Row

INDEXES: dict[str, tuple[str, ...]] = {
    "lookups": ("request",),
    "transfers": ("ended",),
    "block_runs": ("transfer", "gone"),
}
"""Indexed columns of each table, besides its key: queries often search by them."""

RUN_BLOCKS = 4096
"""Most blocks in one run."""
_NUMBERS = """
INSERT INTO _numbers
WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers LIMIT ?) SELECT n FROM numbers
"""

_TYPES = {int: "INTEGER", str: "TEXT", bool: "INTEGER"}
_VIEWS = ("blocks", "events")
_KIND_NUMBERS = {kind.__name__: number for number, kind in enumerate(KINDS)}
_PLACE = "r.life + n.n - s.life"
_DERIVED = {
    "life": "r.life + n.n",
    "slot": f"CAST(substr(s.slots, 1 + ({_PLACE}) * s.slot_digits, s.slot_digits) AS INTEGER)",
    "key": f"lower(hex(substr(s.keys, 1 + ({_PLACE}) * s.key_bytes, s.key_bytes)))",
}
_R = TypeVar("_R", bound=Row)


def schema() -> list[str]:
    """The SQL statements that create the tables."""
    return [
        *[_create(table) for table in TABLES if table not in _VIEWS],
        "CREATE TABLE _stores (life INTEGER PRIMARY KEY, key_bytes INTEGER, keys BLOB, slot_digits INTEGER,"
        " slots TEXT)",
        "CREATE TABLE _numbers (n INTEGER PRIMARY KEY)",
        key_history.SCHEMA,
        _create_blocks(),
        "CREATE TABLE _events (event INTEGER PRIMARY KEY, step INTEGER NOT NULL, wall_ns INTEGER NOT NULL,"
        " kind INTEGER NOT NULL)",
        _create_events(),
        *[
            f"CREATE INDEX {table}_by_{column} ON {table} ({column})"
            for table, columns in INDEXES.items()
            for column in columns
        ],
    ]


def make_tables(connection: sqlite3.Connection) -> None:
    """Create the tables in an empty database."""
    for statement in schema():
        connection.execute(statement)
    connection.execute(_NUMBERS, (RUN_BLOCKS,))


@cache
def columns_of(table: str) -> Mapping[str, tuple[type, bool]]:
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


def _create_blocks() -> str:
    columns = [f"{_DERIVED.get(name, f'r.{name}')} AS {name}" for name in BlockRow.__struct_fields__]
    return (
        f"CREATE VIEW blocks AS SELECT {', '.join(columns)} FROM block_runs r"
        " CROSS JOIN _numbers n ON n.n < r.blocks LEFT JOIN _stores s ON s.life = r.store"
    )


def _create_events() -> str:
    names = " ".join([f"WHEN {number} THEN '{name}'" for name, number in _KIND_NUMBERS.items()])
    return f"CREATE VIEW events AS SELECT event, step, wall_ns, CASE kind {names} END AS kind FROM _events"


@cache
def _insert(table: str) -> str:
    marks = ", ".join("?" * len(TABLES[table].__struct_fields__))
    return f"INSERT OR REPLACE INTO {table} VALUES ({marks})"


class TableWriter:
    """Writes rows in batches, and looks up earlier rows for an extractor."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._rows: dict[str, list[Row]] = {table: [] for table in TABLES if table not in _VIEWS}
        self._events: list[tuple[int, int, int, int]] = []
        self._stores: list[tuple[int, int, bytes, int, str]] = []

    def add(self, table: str, row: Row) -> None:
        """Buffer a row until the next `flush`."""
        self._rows[table].append(row)

    def add_event(self, row: EventRow) -> None:
        """Buffer the row of an event."""
        self._events.append((row.event, row.step, row.wall_ns, _KIND_NUMBERS[row.kind]))

    def add_store(self, life: int, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Buffer the keys and slots of blocks with consecutive lives, as one row of `_stores`.

        life: the life of the first block.
        keys: all of one length.
        """
        digits = len(str(max(slots)))
        listed = f"%0{digits}d" * len(slots) % tuple(slots)
        self._stores.append((life, len(keys[0]), b"".join(keys), digits, listed))

    def flush(self) -> None:
        """Write the buffered rows. Raises `LogError` for a number that is too large for SQLite."""
        try:
            for table, rows in self._rows.items():
                if rows:
                    self.connection.executemany(_insert(table), map(astuple, rows))
                    rows.clear()
            if self._events:
                self.connection.executemany("INSERT INTO _events VALUES (?, ?, ?, ?)", self._events)
                self._events.clear()
            if self._stores:
                self.connection.executemany("INSERT INTO _stores VALUES (?, ?, ?, ?, ?)", self._stores)
                self._stores.clear()
        except OverflowError as error:
            raise LogError(f"the log holds a number that is larger than any kvsm writes: {error}") from error

    def key_of(self, life: int) -> bytes:
        """The key of a life; empty if there is no such life."""
        found = self._found(
            "SELECT substr(keys, 1 + (? - life) * key_bytes, key_bytes) FROM _stores"
            " WHERE life <= ? ORDER BY life DESC LIMIT 1",
            (life, life),
        )
        return b"" if found is None else bytes(found[0])

    def run_of(self, life: int) -> BlockRunRow | None:
        """The run that has this life; None: the life has not ended."""
        found = self._found("SELECT * FROM block_runs WHERE life <= ? ORDER BY life DESC LIMIT 1", (life,))
        run = None if found is None else BlockRunRow(*found)
        return run if run is not None and life < run.life + run.blocks else None

    def requests_of(self, transfer: int) -> str | None:
        """The requests of a transfer that has ended, as a JSON list; None: there is no such row."""
        found = self._found("SELECT requests FROM transfers WHERE transfer = ?", (transfer,))
        return None if found is None else str(found[0])

    def want(self, run: BlockRunRow, life: int, event: int, wall_ns: int, request: str) -> None:
        """Mark one block of a run as wanted by a lookup. The block gets a run of its own.

        life: the block's life.
        event, wall_ns, request: the lookup.
        """
        before, after = life - run.life, run.life + run.blocks - life - 1
        parts = [replace(run, life=life, blocks=1, wanted=event, wanted_ns=wall_ns, wanted_by=request)]
        if before:
            parts.append(replace(run, blocks=before))
        if after:
            parts.append(replace(run, life=life + 1, blocks=after))
        self.connection.executemany(_insert("block_runs"), map(astuple, parts))

    def _found(self, query: str, params: Sequence[Any]) -> tuple[Any, ...] | None:
        self.flush()
        found: tuple[Any, ...] | None = self.connection.execute(query, params).fetchone()
        return found


def read(
    connection: sqlite3.Connection, table: str, kind: type[_R], where: str, params: Sequence[Any]
) -> Iterator[_R]:
    """Yield the rows of a table, sorted by its key. where: an SQL condition; empty: all rows."""
    condition = f" WHERE {where}" if where else ""
    query = f"SELECT * FROM {table}{condition} ORDER BY {', '.join(KEYS[table])}"
    try:
        cursor = connection.execute(query, params)
    except sqlite3.Error as error:
        raise ConfigError(f"the table {table} cannot be read where {where!r}: {error}") from error
    return map(_maker(kind, table), cursor)


def _maker(kind: type[_R], table: str) -> Callable[[tuple[Any, ...]], _R]:
    """Return a function that makes a row from its columns, with bools, which SQLite lacks."""
    places = [place for place, (kind_of, _) in enumerate(columns_of(table).values()) if kind_of is bool]
    if not places:
        return lambda columns: kind(*columns)

    def make(columns: tuple[Any, ...]) -> _R:
        values = list(columns)
        for place in places:
            values[place] = None if values[place] is None else bool(values[place])
        return kind(*values)

    return make
