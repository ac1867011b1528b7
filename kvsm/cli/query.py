"""`kvsm query`: SQL over the tables of a log. It needs no torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table

from kvsm.cli.log_answers import leave
from kvsm.cli.log_options import json_option, log_argument, trust_options
from kvsm.cli.opened_tables import opened_log
from kvsm.cli.output import Command, complain, say, say_json, say_table
from kvsm.errors import ConfigError

Cell = int | float | str | None


class QueryAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.query/1"):
    """What `kvsm query --json` prints: the rows of a query over the tables of a log.

    log: its directory.
    columns: their names, in order.
    rows: a list of values for each row. A BLOB is in hex.
    more: whether there are more rows than `--limit` allows.
    """

    log: str
    columns: tuple[str, ...]
    rows: list[list[Cell]]
    more: bool


def _print_tables(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from kvsm.explain.tables.schema_text import schema_lines

        say(*schema_lines())
        context.exit()


@click.command(cls=Command)
@log_argument()
@click.argument("query")
@click.option(
    "--tables",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_tables,
    help="List the tables with their columns, and exit.",
)
@click.option(
    "--csv", "as_csv", is_flag=True, help="Print CSV. A text that a spreadsheet would run gets a ' in front."
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Print N rows at most.  [default: 200 in a table, else all]",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Stop the query after S seconds.",
)
@trust_options
@json_option
def query(
    log: Path, query: str, as_csv: bool, limit: int | None, timeout: float, as_json: bool, **trust: Any
) -> None:
    """Answer a SELECT over the tables of LOG.

    QUERY is SQL as SQLite knows it. It can only read. docs/tables.md describes the tables.

    \b
    Examples:
      kvsm query kvsm-log 'SELECT why, COUNT(*) FROM lookups GROUP BY why'
      kvsm query kvsm-log 'SELECT worker, COUNT(*), SUM(good = 0) FROM copies GROUP BY worker'
      kvsm query kvsm-log 'SELECT * FROM requests WHERE finished IS NULL' --csv
    """
    from kvsm.explain.tables.queries import run_query

    if as_csv and as_json:
        raise ConfigError("query prints --csv or --json, not both")
    if limit is None and not (as_csv or as_json):
        limit = 200
    with opened_log(log, **trust) as opened:
        columns, rows = run_query(opened.connection, query, (), timeout)
        shown = ([_cell(value) for value in row] for row in rows)
        if as_csv:
            say_lines(_csv_lines([columns, *([] if limit is None else islice(shown, limit))]))
            if limit is None:
                say_lines(_csv_lines(shown))
        else:
            found = list(islice(shown, limit)) if limit is not None else list(shown)
            more = next(shown, None) is not None
            if as_json:
                say_json(QueryAnswer(log=str(log), columns=tuple(columns), rows=found, more=more))
            else:
                _print(columns, found, more)
        if opened.stopped is not None:
            complain(f"{opened.stopped}; the tables hold what comes before")
        leave(opened.condition, good=opened.stopped is None)


def _cell(value: Any) -> Cell:
    return value.hex() if isinstance(value, bytes) else value


def _print(columns: Sequence[str], rows: Sequence[Sequence[Cell]], more: bool) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(columns):
        numbers = all(isinstance(row[place], int | float | None) for row in rows)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*["" if cell is None else str(cell) for cell in row])
    say_table(table)
    if more:
        complain(f"there are more than {len(rows)} rows; give --limit N, or --csv for all of them")


def _csv_lines(rows: Iterable[Sequence[Cell]]) -> Iterator[str]:
    for row in rows:
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow([_harmless(cell) for cell in row])
        yield line.getvalue()


def _harmless(cell: Cell) -> Cell:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


def say_lines(lines: Iterator[str]) -> None:
    """Print lines, some at a time: there may be millions."""
    while some := list(islice(lines, 1000)):
        say(*some)
