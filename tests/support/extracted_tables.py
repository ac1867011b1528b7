"""The tables of some events, as rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from kvsm.core.ledger import Ledger
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.explain.tables.extract import Extractor
from kvsm.explain.tables.row_kinds import KEYS
from kvsm.explain.tables.sqlite_tables import TableWriter, make_tables

Rows = dict[str, list[dict[str, Any]]]


def extracted(config: OffloadConfig, events: Sequence[OffloadingEvent]) -> tuple[Rows, Ledger]:
    """Return the tables of these events, and the ledger after them."""
    connection, ledger = sqlite3.connect(":memory:"), Ledger(config)
    make_tables(connection)
    tables = TableWriter(connection)
    extractor = Extractor(tables)
    for number, event in enumerate(events):
        extractor.follow(ledger, event)
        if number % 50 == 49:
            tables.flush()
    extractor.write_unfinished()
    return rows_of(connection), ledger


def rows_of(connection: sqlite3.Connection) -> Rows:
    connection.row_factory = sqlite3.Row
    tables = {
        table: [dict(row) for row in connection.execute(f"SELECT * FROM {table} ORDER BY {', '.join(keys)}")]
        for table, keys in KEYS.items()
    }
    connection.row_factory = None
    return tables
