"""The common options of commands that read a log: LOG itself, how far to trust it, which part to read.

    @click.command(cls=Command)
    @log_argument()
    @window_options
    @trust_options
    @json_option
    def report(log: Path, since: LogPoint | None, until: LogPoint | None, as_json: bool, **trust: Any): ...

`trust` holds `allow_policies` and `max_slots`. `since` and `until` go to
`kvsm.explain.story.window.find_window`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvsm.cli.output import complain
from kvsm.core.log import LogReader
from kvsm.core.log.frames import segment_paths
from kvsm.errors import ConfigError, LogError
from kvsm.explain.story.times import utc
from kvsm.explain.story.window import LogPoint, point_of

_Command = TypeVar("_Command", bound=Callable[..., Any])


def log_argument(name: str = "log", *, required: bool = True) -> Callable[[_Command], _Command]:
    """Add the argument LOG to a command, as a `Path` to a log's own directory.

    name: the parameter's name, for a command with several logs.
    required: False: LOG may be left out; then the parameter is None.
    """
    path = click.Path(path_type=Path)
    return click.argument(name, type=path, callback=_chosen, metavar=name.upper(), required=required)


def trust_options(command: _Command) -> _Command:
    """`--allow-policy` and `--max-slots`: the fields of `kvsm.explain.story.Trust`."""
    allow = click.option(
        "--allow-policy",
        "allow_policies",
        metavar="MODULE:CLASS",
        multiple=True,
        help="Run the code of this eviction policy if LOG names it. Repeatable.",
    )
    slots = click.option(
        "--max-slots",
        type=click.IntRange(min=1),
        metavar="N",
        help="Refuse a LOG that claims more than N host slots or device blocks.  "
        "[default: 1048576 or its size in bytes, whichever is larger]",
    )
    return allow(slots(command))


def json_option(command: _Command) -> _Command:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")(command)


def window_options(command: _Command) -> _Command:
    """`--since` and `--until`, each a `kvsm.explain.story.window.LogPoint` or None."""
    since = click.option(
        "--since",
        callback=_point,
        metavar="POINT",
        help="Begin here: an event number (1200), a time after the first event of LOG (+12.5s, +300ms, +5m), "
        "or UTC (2026-11-22T11:04:29).",
    )
    until = click.option(
        "--until", callback=_point, metavar="POINT", help="End here, in the same forms. It is included."
    )
    return since(until(command))


def chosen_log(path: Path) -> Path:
    """Return the log at `path` or, if `path` is a directory of logs, the newest of them.

    The newest is the log whose last segment was begun last. Prints on standard error which log was chosen.

    Raises `LogError` if there is no log.
    """
    if segment_paths(path):
        return path
    found = [(began, log) for log in _directories_in(path) if (began := _newest_ns(log)) is not None]
    if not found:
        what = "it is empty" if not any(path.iterdir()) else "neither here nor in a directory in it"
        raise LogError(f"{path}: no log here ({what}); a log is a directory of .kvsm segments")
    began_ns, newest = max(found)
    others = f", the newest of the {len(found)} logs" if len(found) > 1 else ", the only log"
    complain(f"reading {newest}{others} in {path}; its last segment was begun at {utc(began_ns)}")
    return newest


def _chosen(ctx: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    # Shell completion only parses the command line: the log need not exist yet.
    if path is None or ctx.resilient_parsing:
        return path
    # Commands that are printed name the log; `Path` drops the "./" before a hyphen.
    return chosen_log(path.absolute() if str(path).startswith("-") else path)


def _point(ctx: click.Context, param: click.Parameter, text: str | None) -> LogPoint | None:
    try:
        return None if text is None else point_of(text)
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def _directories_in(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return sorted(path / entry.name for entry in entries if entry.is_dir())
    except OSError as error:
        raise LogError(f"{path}: cannot be listed: {error}") from error


def _newest_ns(log: Path) -> int | None:
    """Return when the last segment of a log was begun (ns); None if there is no log in this directory.

    If the head of that segment cannot be read, the newest modification time of a segment is returned.
    """
    try:
        last = segment_paths(log)[-1:]
        if not last:
            return None
        for segment in LogReader(log).segments(int(last[0].stem)):
            return segment.head.created_ns
    except LogError:
        pass
    try:
        return max((one.stat().st_mtime_ns for one in log.glob("*.kvsm")), default=None)
    except OSError:
        return None
