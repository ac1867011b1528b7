"""`kvsm export`: the tables of logs as Parquet files, for DuckDB, pandas and others. It needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.log_options import chosen_log, json_option, trust_options
from kvsm.cli.opened_tables import opened_log
from kvsm.cli.output import Command, complain, say, say_json
from kvsm.core.log import LogReader
from kvsm.errors import ConfigError, LogError
from kvsm.explain.tables.row_kinds import TABLES


class ExportedLog(msgspec.Struct, frozen=True, kw_only=True):
    """One log of an export.

    log: its directory, as in the column `log`.
    name: the name of its file in each table's directory, without the suffix.
    rows: the number of rows of each table.
    whole: whether the whole log was read, and no event is missing.
    """

    log: str
    name: str
    rows: dict[str, int]
    whole: bool


class ExportAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.export/1"):
    """What `kvsm export --json` prints: which files were written.

    directory: the directory of the files. logs: the logs that were read.
    """

    directory: str
    logs: list[ExportedLog]


@click.command(cls=Command)
@click.argument("logs", nargs=-1, required=True, metavar="LOG...", type=click.Path(path_type=Path))
@click.option(
    "--parquet",
    "out",
    required=True,
    metavar="OUT",
    type=click.Path(path_type=Path, file_okay=False),
    help="The directory to write to. It is created if it is missing.",
)
@click.option(
    "--table",
    "tables",
    multiple=True,
    type=click.Choice(list(TABLES)),
    help="Only this table. Repeatable.  [default: all]",
)
@trust_options
@json_option
def export(logs: tuple[Path, ...], out: Path, tables: tuple[str, ...], as_json: bool, **trust: Any) -> None:
    """Write the tables of each LOG as Parquet files.

    Writes one file for each log and table, OUT/TABLE/RUN.parquet, with `log` as its first column. RUN is the
    id of the log's run: a second export of the same log replaces its files. DuckDB can read the files of one
    table from all logs at once. The extra kvsm[analysis] is needed.

    \b
    Examples:
      kvsm export kvsm-log --parquet tables
      kvsm export /logs/*/kvsm-log --parquet fleet --table lookups --table copies
      duckdb -c "SELECT log, why, COUNT(*) FROM 'fleet/lookups/*.parquet' GROUP BY ALL"

    Exits with 1 if a log is damaged or lacks events. The events before the damage are exported.
    """
    from kvsm.explain.tables.arrow import arrow_module

    arrow_module()
    chosen = [chosen_log(log) for log in logs]
    runs = [LogReader(log).head.run.hex() for log in chosen]
    if len(set(runs)) < len(runs):
        twice = next(run for run in runs if runs.count(run) > 1)
        same = [str(log) for log, run in zip(chosen, runs) if run == twice]
        raise ConfigError(f"{' and '.join(same)} are one run; give each log once")
    found = [_exported(log, run, out, tables or tuple(TABLES), trust) for log, run in zip(chosen, runs)]
    if as_json:
        say_json(ExportAnswer(directory=str(out), logs=found))
    else:
        for one in found:
            rows = f"{sum(one.rows.values()):,} rows of {len(one.rows)} tables"
            say(f"{one.log}: {rows} in {out}/*/{one.name}.parquet")
    if not all(one.whole for one in found):
        raise SystemExit(ExitCode.BROKEN)


def _exported(log: Path, run: str, out: Path, tables: tuple[str, ...], trust: dict[str, Any]) -> ExportedLog:
    """Write the files of one log. Raises `LogError` if they cannot be written."""
    from kvsm.explain.tables.arrow import write_parquet

    with opened_log(log, **trust) as opened:
        rows = {}
        try:
            for table in tables:
                (out / table).mkdir(parents=True, exist_ok=True)
                path = out / table / f"{run}.parquet"
                rows[table] = write_parquet(opened.connection, table, path, str(log))
        except OSError as error:
            raise LogError(f"{out}: cannot be written: {error.strerror or error}") from error
        for note in opened.condition.notes():
            complain(f"{log}: {note}")
        if opened.stopped is not None:
            complain(f"{opened.stopped}; the tables hold what comes before")
        whole = opened.stopped is None and opened.condition.complete
    return ExportedLog(log=str(log), name=run, rows=rows, whole=whole)
