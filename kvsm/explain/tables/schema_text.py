"""The tables and the named queries in words: for `kvsm query --tables` and `--list`, and docs/tables.md."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import getdoc

from kvsm.explain.tables.named_queries import ANY, NAMED_QUERIES, NamedQuery, QueryParameter
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
    parts.append(_NAMED)
    for query in NAMED_QUERIES:
        parts.append(f"\n### {query.name}\n\n{query.question}\n\n")
        parts.append("| parameter | default | meaning |\n| --- | --- | --- |\n")
        for one in query.parameters:
            parts.append(f"| `{one.name}` | {_default_of(one)} | {one.sentence}{_choices_of(one)} |\n")
    return "".join(parts)


def named_query_lines(query: NamedQuery, given: Mapping[str, str]) -> list[str]:
    """A named query for a terminal: its question, its parameters, and its SQL with the values of `given`.

    Raises `ConfigError` for a value that the query does not take.
    """
    width = max(len(one.name) for one in query.parameters)
    return [
        f"{query.name}: {query.question}",
        "",
        *[
            f"  {one.name:<{width}}  {one.sentence}{_choices_of(one)}"
            f"  [{one.type.value}, default: {_default_of(one)}]"
            for one in query.parameters
        ],
        "",
        *query.filled(given).splitlines(),
    ]


def _default_of(one: QueryParameter) -> str:
    return f"{one.default} {one.unit}" if one.unit and one.default != ANY else one.default


def _choices_of(one: QueryParameter) -> str:
    """The choices, if there are few: the kinds of events are in kvsm/events.py."""
    if not one.choices:
        return ""
    return f" One of {', '.join(one.choices)}." if len(one.choices) <= 10 else " See kvsm/events.py."


_PAGE = """\
# The tables of a log

<!-- Written by `PYTHONPATH=specs python -m write_docs` from rows and named queries. Do not edit. -->

What `kvsm query`, `kvsm export --parquet` and `kvsm.open` give. [incidents.md](incidents.md) shows queries
that help in an incident.

- Event numbers count from 1. Wall times (`_ns`) are Unix time in nanoseconds. Steps are the engine's.
- A column is NULL if the log does not tell it, or not yet.
- Where a log lacks events, a thing that began or ended there has the last event that the log lacks as its
  beginning or end, and no step and no time.
"""

_NAMED = """
## Named queries

`kvsm query DIR --named NAME` asks one of these; `--set NAME=VALUE` changes a parameter. Its SQL is what
`kvsm query --list --named NAME` prints: start your own query from there. The first columns are `event`,
`step` and `time` (UTC): where the row begins. `any` restricts nothing. A thing whose time is not in the log
is left out where times are compared.
"""
