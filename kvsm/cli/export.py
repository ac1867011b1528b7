"""`kvsm export`: write the tables of logs as Parquet files, or a copy of a log without names.

It needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    whole: whether the log was read to its end and no event is missing.
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


class CopiedLog(msgspec.Struct, frozen=True, kw_only=True):
    """A redacted copy of a log.

    log: the directory of the log.
    directory: the directory of the copy.
    events: number of events that were copied.
    whole: whether all of the log was copied; false if it is damaged.
    policy_withheld: whether an eviction policy of another package, or `auto`, was replaced by
        `WithheldPolicy`.
    """

    log: str
    directory: str
    events: int
    whole: bool
    policy_withheld: bool


class RedactAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.redact/1"):
    """What `kvsm export --redact OUT --json` prints: what was copied, and what was renamed.

    logs: the copies: of the log and, if it was found, of the log of its disk tier.
    renamed: what was renamed -> how many times.
    """

    logs: list[CopiedLog]
    renamed: dict[str, int]


@click.command(cls=Command)
@click.argument("logs", nargs=-1, required=True, metavar="LOG...", type=click.Path(path_type=Path))
@click.option(
    "--parquet",
    metavar="OUT",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the tables to this directory. It is created if it is missing.",
)
@click.option(
    "--redact",
    metavar="OUT",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write a copy of LOG without names to this new directory.",
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
def export(
    logs: tuple[Path, ...],
    parquet: Path | None,
    redact: Path | None,
    tables: tuple[str, ...],
    as_json: bool,
    **trust: Any,
) -> None:
    """Write LOG as Parquet tables, or as a redacted copy.

    --parquet writes one file for each log and table, OUT/TABLE/RUN.parquet, with `log` as its first column.
    RUN is the id of the log's run: a second export of the same log replaces its files. DuckDB can read the
    files of one table from all logs at once. The extra kvsm[analysis] is needed.

    --redact writes a log that every command reads, for an issue or a colleague. Requests, keys, tiers,
    engines, weights, run and pool ids, error texts and policies of other packages get new names. Numbers,
    sizes and times stay. The old names cannot be recovered from the copy. If LOG has a disk tier, its log is
    copied to OUT/disk, with the same new names. No code that LOG names is run. The files of the copy belong
    to your user: the tar options below leave out your name.

    \b
    Examples:
      kvsm export kvsm-log --parquet tables
      kvsm export /logs/*/kvsm-log --parquet fleet --table lookups --table copies
      duckdb -c "SELECT log, why, COUNT(*) FROM 'fleet/lookups/*.parquet' GROUP BY ALL"
      kvsm export kvsm-log --redact for-the-issue
      tar --owner=0 --group=0 --numeric-owner -czf for-the-issue.tar.gz for-the-issue

    Exits with 1 if a log is damaged or lacks events. The events before the damage are exported.
    """
    if (parquet is None) == (redact is None):
        raise click.UsageError("give one of --parquet OUT and --redact OUT")
    if redact is not None:
        if len(logs) > 1 or tables or trust["allow_policies"]:
            raise click.UsageError("--redact copies one LOG, and takes neither --table nor --allow-policy")
        _redact(chosen_log(logs[0]), redact, trust["max_slots"], as_json)
    elif parquet is not None:
        _export_tables(logs, parquet, tables or tuple(TABLES), trust, as_json)


def _redact(log: Path, out: Path, max_slots: int | None, as_json: bool) -> None:
    """Copy a log and the log of its disk tier, and print what was renamed."""
    from kvsm.explain.other_tier import is_named_disk, log_of
    from kvsm.explain.redaction.names import NewNames
    from kvsm.explain.redaction.redacted_log import redact_log
    from kvsm.tiers.disk_tier import DISK

    if log.resolve() in out.resolve().parents:
        raise ConfigError(f"{out} is in the log {log}; name a directory elsewhere")
    names = NewNames()
    copies: list[CopiedLog] = []
    below: Path | None = None
    fetches: Collection[int] = ()
    if not is_named_disk(log):
        disk = log_of(DISK, log)
        below = disk.log
        if below is not None and not disk.one_process:
            out /= log.resolve().name  # A name such as "engine0" shows that several processes wrote the log.
    for source, directory in ((log, out), (below, out / DISK)):
        if source is None:
            continue
        copy = redact_log(source, directory, names, max_slots, fetches)
        fetches = copy.fetches
        if copy.damage is not None:
            complain(f"{copy.damage}; the copy holds the events before it")
        copies.append(
            CopiedLog(
                log=str(source),
                directory=str(directory),
                events=copy.events,
                whole=copy.damage is None,
                policy_withheld=copy.withheld,
            )
        )
    if as_json:
        say_json(RedactAnswer(logs=copies, renamed=dict(sorted(names.renamed.items()))))
    else:
        _say_copies(copies, names.renamed)
    if not all(one.whole for one in copies):
        raise SystemExit(ExitCode.BROKEN)


def _say_copies(copies: list[CopiedLog], renamed: Mapping[str, int]) -> None:
    for one in copies:
        say(f"{one.log}: {one.events:,} events copied to {one.directory}")
        if one.policy_withheld:
            say(
                f"{one.log}: its eviction policy is from another package, or has hashes of keys: the copy "
                "does not name it"
            )
    counts = [f"{count:,} x {what}" for what, count in sorted(renamed.items())]
    say(f"renamed: {', '.join(counts) or 'nothing'}", "kept: numbers, sizes and times")


def _export_tables(
    logs: tuple[Path, ...], out: Path, tables: tuple[str, ...], trust: dict[str, Any], as_json: bool
) -> None:
    """Write the tables of logs, and print how many rows they have."""
    from kvsm.explain.tables.arrow import arrow_module

    arrow_module()
    chosen = [chosen_log(log) for log in logs]
    runs = [LogReader(log).head.run.hex() for log in chosen]
    if len(set(runs)) < len(runs):
        twice = next(run for run in runs if runs.count(run) > 1)
        same = [str(log) for log, run in zip(chosen, runs) if run == twice]
        raise ConfigError(f"{' and '.join(same)} are one run; give each log once")
    found = [_exported(log, run, out, tables, trust) for log, run in zip(chosen, runs)]
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
            complain(f"{opened.stopped}; the tables hold the events before it")
        whole = opened.stopped is None and opened.condition.complete
    return ExportedLog(log=str(log), name=run, rows=rows, whole=whole)
