"""`kvsm logs`: list the event logs of a directory, and delete old ones."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import click
import msgspec

from kvsm.cli.log_options import json_option
from kvsm.cli.output import Command, say, say_json, say_table
from kvsm.core.log.past_logs import ListedLog, delete_past_logs, logs_in

_MIB = 1 << 20


class LogOfDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """An event log.

    path: its directory.
    bytes: size of its segments.
    written_ns: Unix time of the last write to it (ns).
    state: `written` by a process now, or owned by another user; `kept` for a warm restart; or `past`.
    deleted: whether this command deleted it.
    """

    path: str
    bytes: int
    written_ns: int
    state: str
    deleted: bool


class LogsAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.logs/1"):
    """What `kvsm logs --json` prints: the event logs of a directory, the newest last."""

    directory: str
    logs: list[LogOfDirectory]


@click.command(cls=Command)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--max-bytes",
    type=click.IntRange(min=0),
    metavar="N",
    help="Delete past logs, the oldest first, until they have at most N bytes together.",
)
@json_option
def logs(directory: Path, max_bytes: int | None, as_json: bool) -> None:
    """List the event logs in DIR, and delete old ones on request.

    DIR is the `event_log` of an engine, or the `pool_dir` of one that restarts warm. A log is past if no
    engine continues it: each start with `event_log` begins a new one, and each cold start on a kept pool
    moves the old one aside. Only past logs are deleted. The option `past_logs_max_bytes` does the same at
    each start of an engine.

    \b
    Examples:
      kvsm logs /var/log/kvsm
      kvsm logs /dev/shm/kvsm-a --max-bytes 0
      kvsm logs /var/log/kvsm --json | jq '[.logs[].bytes] | add'
    """
    found = logs_in(directory)
    deleted = set() if max_bytes is None else set(delete_past_logs(directory, max_bytes))
    answers = [_answer(one, one.path in deleted) for one in found]
    if as_json:
        say_json(LogsAnswer(directory=str(directory), logs=answers))
        return
    if not found:
        say(f"{directory}: no event log lies here")
        return
    from rich.table import Table

    table = Table("log", "MiB", "last write (UTC)", "state", box=None, pad_edge=False)
    for one in answers:
        when = datetime.fromtimestamp(one.written_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        state = "past: deleted" if one.deleted else one.state
        table.add_row(Path(one.path).name, f"{one.bytes / _MIB:.1f}", when, state)
    say_table(table)


def _answer(found: ListedLog, deleted: bool) -> LogOfDirectory:
    state = "written" if found.is_written else "past" if found.is_past else "kept"
    return LogOfDirectory(
        path=str(found.path),
        bytes=found.bytes,
        written_ns=found.written_ns,
        state=state,
        deleted=deleted,
    )
