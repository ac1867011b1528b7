"""`kvsm query`: run SQL or a named query over the tables of a log. It needs no torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import click
import msgspec
from click.shell_completion import CompletionItem

from kvsm.cli.log_answers import leave
from kvsm.cli.log_options import json_option, log_argument, trust_options, window_options
from kvsm.cli.opened_tables import opened_log
from kvsm.cli.output import Command, complain, is_terminal, say, say_json, say_rows, say_table
from kvsm.errors import ConfigError
from kvsm.explain.story.window import LogPoint, Window
from kvsm.explain.tables.named_queries import NAMED_QUERIES, NamedQuery, QueryParameter, named_query

Cell = int | float | str | None

FORMATS = ("table", "tsv", "csv", "json")


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


class ListedQuery(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.query-list/1"):
    """What `kvsm query --list --json` prints: one line for each named query.

    name: its name, for `--named`.
    question: the question that it answers.
    parameters: its parameters, for `--set`.
    sql: the query, with the defaults and the values of `--set` filled in.
    """

    name: str
    question: str
    parameters: tuple[QueryParameter, ...]
    sql: str


class _QueryName(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """The name of a named query."""

    name = "name"

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        """Complete the name of a query; each completion shows the query's question."""
        found = [query for query in NAMED_QUERIES if query.name.startswith(incomplete)]
        return [CompletionItem(query.name, help=query.question) for query in found]


def _given(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Return the values of `--set` by the names of their parameters."""
    given = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise click.BadParameter(f"{text!r} is no NAME=VALUE.", ctx, param)
        if name in given:
            raise click.BadParameter(f"{name} is given twice.", ctx, param)
        given[name] = value
    return given


def _print_tables(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from kvsm.explain.tables.schema_text import schema_lines

        say(*schema_lines())
        context.exit()


@click.command(cls=Command)
@log_argument(required=False)
@click.argument("query", required=False, metavar="[QUERY]")
@click.option("--named", type=_QueryName(), metavar="NAME", help="Run this named query; see --list.")
@click.option(
    "--set",
    "given",
    multiple=True,
    callback=_given,
    metavar="NAME=VALUE",
    help="Give a parameter of the named query a value. Repeatable.",
)
@click.option(
    "--list",
    "only_list",
    is_flag=True,
    help="List the named queries, or the one of --named with its SQL, and exit.",
)
@click.option(
    "--tables",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_tables,
    help="List the tables with their columns, and exit.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="How to print the rows: a table for people; tsv and csv, a line for each row; or one JSON object. "
    "In csv a cell that a spreadsheet would run gets a ' prefix.  [default: table on a terminal, else tsv]",
)
@click.option("--csv", "as_csv", is_flag=True, help="Short for --format csv.")
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
@window_options
@trust_options
@json_option
def query(
    log: Path | None,
    query: str | None,
    named: str | None,
    given: dict[str, str],
    only_list: bool,
    form: str | None,
    as_csv: bool,
    limit: int | None,
    timeout: float,
    since: LogPoint | None,
    until: LogPoint | None,
    as_json: bool,
    **trust: Any,
) -> None:
    """Run a SELECT, or a named query, over the tables of LOG.

    QUERY is SQL in SQLite's dialect, and can only read. docs/tables.md describes the tables and the named
    queries. --since and --until select the rows of a named query by their column `event`. A pipe gets whole
    cells, with a tab between them.

    \b
    Examples:
      kvsm query --list                           the named queries
      kvsm query --list --named late-reports      one of them: its parameters, and SQL to start from
      kvsm query kvsm-log --named late-reports --set seconds=0.5 --set worker=3
      kvsm query kvsm-log 'SELECT why, COUNT(*) FROM lookups GROUP BY why'
      kvsm query kvsm-log 'SELECT worker, COUNT(*), SUM(good = 0) FROM copies GROUP BY worker'
      kvsm query kvsm-log 'SELECT * FROM requests WHERE finished IS NULL' --csv
    """
    chosen = None if named is None else named_query(named)
    if chosen is None and (given or since or until):
        raise ConfigError("--set, --since and --until go with --named; in SQL, write the values into QUERY")
    if only_list:
        _print_list(chosen, given, as_json)
        return
    if log is None:
        raise click.UsageError("Missing argument 'LOG'.")
    if (chosen is None) == (query is None):
        raise ConfigError("query takes one of QUERY and --named NAME; see kvsm query --list")
    forms = {form} if form is not None else set[str]()
    forms |= {name for name, wanted in (("csv", as_csv), ("json", as_json)) if wanted}
    if len(forms) > 1:
        raise ConfigError(f"query prints one format, not {' and '.join(sorted(forms))}")
    sql = query if chosen is None else chosen.filled(given)
    assert sql is not None
    form = forms.pop() if forms else "table" if is_terminal() else "tsv"
    if limit is None and form == "table":
        limit = 200
    _answer(log, sql, (since, until), (form, limit), timeout, trust)


def _answer(
    log: Path,
    sql: str,
    ends: tuple[LogPoint | None, LogPoint | None],
    wanted: tuple[str, int | None],
    timeout: float,
    trust: dict[str, Any],
) -> None:
    """Run the query, and print its rows. wanted: (one of `FORMATS`, the most rows or None)."""
    from kvsm.explain.tables.queries import run_query

    form, limit = wanted
    with opened_log(log, **trust) as opened:
        window = opened.window(*ends)
        columns, rows = run_query(opened.connection, sql, (), timeout)
        shown = ([_cell(value) for value in row] for row in _within(window, rows))
        rows_shown = islice(shown, limit)
        if form == "tsv":
            say_rows(chain([columns], ([_text(cell) for cell in row] for row in rows_shown)))
        elif form == "csv":
            say_lines(_csv_lines(chain([columns], rows_shown)))
        elif form == "table":
            _print(columns, list(rows_shown))
        else:
            found = list(rows_shown)
            more = next(shown, None) is not None
            say_json(QueryAnswer(log=str(log), columns=tuple(columns), rows=found, more=more))
        if form != "json" and next(shown, None) is not None:
            complain(f"there are more than {limit} rows; give --limit N, or --format tsv for all of them")
        if opened.stopped is not None:
            complain(f"{opened.stopped}; the tables hold what comes before")
        leave(opened.condition, good=opened.stopped is None)


def _within(window: Window, rows: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Select the rows whose first column, the event, is in the window."""
    return rows if window == Window() else (row for row in rows if row[0] in window)


def _print_list(chosen: NamedQuery | None, given: dict[str, str], as_json: bool) -> None:
    listed = NAMED_QUERIES if chosen is None else (chosen,)
    if as_json:
        for one in listed:
            say_json(
                ListedQuery(
                    name=one.name, question=one.question, parameters=one.parameters, sql=one.filled(given)
                )
            )
        return
    from kvsm.explain.tables.schema_text import named_query_lines

    if chosen is not None:
        say(*named_query_lines(chosen, given))
        return
    width = max(len(one.name) for one in listed)
    say(*[f"{one.name:<{width}}  {one.question}" for one in listed])


def _cell(value: Any) -> Cell:
    return value.hex() if isinstance(value, bytes) else value


def _text(cell: Cell) -> str:
    return "" if cell is None else str(cell)


def _print(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(columns):
        numbers = all(isinstance(row[place], int | float | None) for row in rows)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row))
    say_table(table)


def _csv_lines(rows: Iterable[Sequence[Cell]]) -> Iterator[str]:
    for row in rows:
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow([_harmless(cell) for cell in row])
        yield line.getvalue()


def _harmless(cell: Cell) -> Cell:
    """Put a ' in front of a cell that a spreadsheet would take for a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


def say_lines(lines: Iterator[str]) -> None:
    """Print lines in batches: there may be millions."""
    while some := list(islice(lines, 1000)):
        say(*some)
