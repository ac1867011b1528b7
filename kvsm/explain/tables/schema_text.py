"""The tables in words, from the classes of rows: for `kvsm query --tables` and docs/tables.md."""

from __future__ import annotations

from inspect import getdoc

from kvsm.explain.tables.row_kinds import KEYS, TABLES, Gone
from kvsm.explain.tables.sqlite_tables import columns_of

_NAMES = {int: "integer", str: "text", bool: "0 or 1"}


def table_says(table: str) -> list[str]:
    """What a table is and what its columns mean, in lines."""
    return (getdoc(TABLES[table]) or "").splitlines()


def columns_say(table: str) -> list[tuple[str, str]]:
    """Each column with its type, in order."""
    return [
        (name, f"{_NAMES[kind]}, or NULL" if optional else _NAMES[kind])
        for name, (kind, optional) in columns_of(table).items()
    ]


def schema_lines() -> list[str]:
    """All tables, for a terminal."""
    lines = []
    for table in TABLES:
        lines += ["", f"{table}   (key: {', '.join(KEYS[table])})", ""]
        lines += [f"  {line}".rstrip() for line in table_says(table)]
        lines += ["", *[f"    {name:<20}{kind}" for name, kind in columns_say(table)]]
    gone = [f"    {one.value}" for one in Gone]
    return [*lines[1:], "", "Why a key is gone (`why`):", "", *gone]


def schema_page() -> str:
    """All tables, as Markdown."""
    parts = [_PAGE]
    for table in TABLES:
        parts.append(f"\n## {table}\n\n")
        parts.append("\n".join(table_says(table)).replace("\n    ", " ") + "\n\n")
        parts.append(f"Key: {', '.join(f'`{name}`' for name in KEYS[table])}.\n\n")
        parts.append("| column | type |\n| --- | --- |\n")
        parts += [f"| `{name}` | {kind} |\n" for name, kind in columns_say(table)]
    parts.append("\n## Why a key is gone\n\n")
    parts += [f"- `{one.value}`\n" for one in Gone]
    return "".join(parts)


_PAGE = """\
# The tables of a log

<!-- Written by `PYTHONPATH=specs python -m write_docs` from row_kinds.py. Do not edit. -->

What `kvsm query`, `kvsm export --parquet` and `kvsm.open` give. [incidents.md](incidents.md) shows queries
that help in an incident.

- Event numbers count from 1. Wall times (`_ns`) are Unix time in nanoseconds. Steps are the engine's.
- A column is NULL if the log does not tell it, or not yet.
- Where a log lacks events, a thing that began or ended there has the last event that the log lacks as its
  beginning or end, and no step and no time.
"""
