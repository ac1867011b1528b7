"""Export the tables of a log to Arrow, pandas and Parquet. Needs the extra `kvsm[analysis]`."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from kvsm.errors import ConfigError
from kvsm.explain.tables.row_kinds import KEYS, TABLES
from kvsm.explain.tables.sqlite_tables import columns_of

BATCH_ROWS = 1 << 16


def arrow_module(name: str = "pyarrow") -> Any:
    """Import `pyarrow`, or one of its submodules. Raises `ConfigError` if it is not installed."""
    # By name: pyarrow has no type hints, so an import statement fails in an embedder's strict type check.
    try:
        return import_module(name)
    except ImportError:
        message = "Arrow, DataFrame and Parquet need pyarrow; install it with pip install 'kvsm[analysis]'"
        raise ConfigError(message) from None


def check_table(table: str) -> None:
    """Raise `ConfigError` if there is no such table."""
    if table not in TABLES:
        raise ConfigError(f"there is no table {table!r}; there are {', '.join(TABLES)}")


def arrow_schema(table: str) -> Any:
    """The Arrow schema of a table. Raises `ConfigError` if there is no such table."""
    check_table(table)
    pa = arrow_module()
    types = {int: pa.int64(), str: pa.string(), bool: pa.bool_()}
    fields = [pa.field(name, types[kind], optional) for name, (kind, optional) in columns_of(table).items()]
    return pa.schema(fields)


def arrow_batches(connection: sqlite3.Connection, table: str) -> Iterator[Any]:
    """Yield the rows of a table as Arrow record batches of at most `BATCH_ROWS` rows."""
    pa, schema = arrow_module(), arrow_schema(table)
    flags = [kind is bool for kind, _ in columns_of(table).values()]
    cursor = connection.execute(f"SELECT * FROM {table} ORDER BY {', '.join(KEYS[table])}")
    while rows := cursor.fetchmany(BATCH_ROWS):
        columns = [
            [None if value is None else bool(value) for value in column] if flag else column
            for column, flag in zip(zip(*rows), flags)
        ]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema)]
        yield pa.record_batch(arrays, schema=schema)


def write_parquet(connection: sqlite3.Connection, table: str, path: Path, log: str) -> int:
    """Write a table to a file, with the log's name as its first column. Returns the number of rows.

    The file is written under a temporary name, and renamed to `path` when it is complete.
    """
    pa = arrow_module()
    schema = arrow_schema(table).insert(0, pa.field("log", pa.string(), False))
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    rows = 0
    try:
        with arrow_module("pyarrow.parquet").ParquetWriter(beside, schema, compression="zstd") as writer:
            for batch in arrow_batches(connection, table):
                names = pa.array([log] * batch.num_rows, pa.string())
                writer.write_batch(pa.record_batch([names, *batch.columns], schema=schema))
                rows += batch.num_rows
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    return rows
