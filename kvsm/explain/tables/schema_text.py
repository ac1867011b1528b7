"""Describe the tables and named queries as text: `kvsm query --tables` and `--list`, and docs/tables.md."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import getdoc

from kvsm.explain.tables.named_queries import ANY, NAMED_QUERIES, NamedQuery, QueryParameter
from kvsm.explain.tables.row_kinds import KEYS, TABLES, Gone
from kvsm.explain.tables.sqlite_tables import columns_of

_NAMES = {int: "integer", str: "text", bool: "0 or 1"}


def table_says(table: str) -> list[str]:
    """The description of a table and its columns, as lines."""
    return (getdoc(TABLES[table]) or "").splitlines()


def columns_say(table: str) -> list[tuple[str, str]]:
    """(name, type) of each column, in order."""
    return [
        (name, f"{_NAMES[kind]}, or NULL" if optional else _NAMES[kind])
        for name, (kind, optional) in columns_of(table).items()
    ]


def schema_lines() -> list[str]:
    """Describe all tables, as lines for a terminal."""
    lines = []
    for table in TABLES:
        lines += ["", f"{table}   (key: {', '.join(KEYS[table])})", ""]
        lines += [f"  {line}".rstrip() for line in table_says(table)]
        lines += ["", *[f"    {name:<20}{kind}" for name, kind in columns_say(table)]]
    gone = [f"    {why.value}" for why in Gone]
    return [*lines[1:], "", "Why a key is gone (`why`):", "", *gone]


def schema_page() -> str:
    """Describe all tables and named queries, as Markdown."""
    parts = [_PAGE]
    for table in TABLES:
        parts.append(f"\n## {table}\n\n")
        parts.append("\n".join(table_says(table)).replace("\n    ", " ") + "\n\n")
        parts.append(f"Key: {', '.join(f'`{name}`' for name in KEYS[table])}.\n\n")
        parts.append("| column | type |\n| --- | --- |\n")
        parts += [f"| `{name}` | {kind} |\n" for name, kind in columns_say(table)]
    parts.append("\n## Why a key is gone\n\n")
    parts += [f"- `{why.value}`\n" for why in Gone]
    parts.append(_NAMED)
    for query in NAMED_QUERIES:
        parts.append(f"\n### {query.name}\n\n{query.question}\n\n")
        parts.append("| parameter | default | meaning |\n| --- | --- | --- |\n")
        for parameter in query.parameters:
            meaning = f"{parameter.sentence}{_choices_of(parameter)}"
            parts.append(f"| `{parameter.name}` | {_default_of(parameter)} | {meaning} |\n")
    return "".join(parts)


def named_query_lines(query: NamedQuery, given: Mapping[str, str]) -> list[str]:
    """Describe a named query, as lines for a terminal: its question, its parameters, and its filled SQL.

    Raises `ConfigError` as `NamedQuery.filled` does.
    """
    width = max(len(parameter.name) for parameter in query.parameters)
    return [
        f"{query.name}: {query.question}",
        "",
        *[
            f"  {parameter.name:<{width}}  {parameter.sentence}{_choices_of(parameter)}"
            f"  [{parameter.type.value}, default: {_default_of(parameter)}]"
            for parameter in query.parameters
        ],
        "",
        *query.filled(given).splitlines(),
    ]


def _default_of(parameter: QueryParameter) -> str:
    if parameter.unit and parameter.default != ANY:
        return f"{parameter.default} {parameter.unit}"
    return parameter.default


def _choices_of(parameter: QueryParameter) -> str:
    """List the choices if there are at most 10. Only the kinds of events are more: see kvsm/events.py."""
    choices = parameter.choices
    if not choices:
        return ""
    return f" One of {', '.join(choices)}." if len(choices) <= 10 else " See [events.py](../kvsm/events.py)."


_PAGE = """\
# The tables of a log

<!-- Written by `PYTHONPATH=specs python -m write_docs` from rows and named queries. Do not edit. -->

`kvsm query`, `kvsm export --parquet` and `kvsm.open` read these tables. [incidents.md](incidents.md) has
queries for incidents.

- Event numbers count from 1. Wall times (`_ns`) are Unix time in nanoseconds. Steps are the engine's.
- If the clock of the engine was set, all later times are corrected by the jump. The logged times are in the
  tables of the schema `main`, such as `main.events`.
- A column is NULL if its value is not in the log, or not yet.
- A log may lack events. If a thing began or ended in such a gap, its beginning or end is the last missing
  event, and its step and time are NULL.
"""

_NAMED = """
## Named queries

`kvsm query DIR --named NAME` runs one of these queries; `--set NAME=VALUE` sets a parameter. To start your
own query, print its SQL with `kvsm query --list --named NAME`. The first columns are `event`, `step` and
`time` (UTC): the place in the log where the row begins. The value `any` does not restrict the query. A query
that compares times omits things whose time is not in the log.
"""
