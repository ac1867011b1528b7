"""`kvsm timeline`: draw a log as one offline HTML page, or as a trace for Perfetto. It needs no torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec

from kvsm.cli.log_answers import leave, print_rows
from kvsm.cli.log_options import json_option, log_argument, trust_options, window_options
from kvsm.cli.opened_tables import opened_log
from kvsm.cli.output import Command, complain, say_json, say_text
from kvsm.cli.progress import counting
from kvsm.errors import ConfigError
from kvsm.explain.story import Trust
from kvsm.explain.story.window import LogPoint
from kvsm.explain.timeline.page import make_page
from kvsm.explain.timeline.perfetto import perfetto_trace
from kvsm.explain.timeline.window_data import MOST_EVENTS, Timeline, read_timeline
from kvsm.system.private_files import write_whole

_STANDARD_OUTPUT = Path("-")
_LARGEST = 500_000
"""The most events that `--events` allows: a browser can still show a list of this length."""


class TimelineAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.timeline/1"):
    """What `kvsm timeline --json` prints: what was written.

    log: the directory of the log.
    page: the HTML file; null: none was asked for.
    trace: the Perfetto trace; null: none was asked for.
    first, last: numbers of the first and last event shown.
    events: events shown.
    left_out: what is not shown, a line each.
    notes: what is wrong with the log, and what is left out.
    seconds: wall time.
    """

    log: str
    page: str | None
    trace: str | None
    first: int
    last: int
    events: int
    left_out: list[str]
    notes: list[str]
    seconds: float


@click.command(cls=Command)
@log_argument()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the page here; - prints it.",
)
@click.option(
    "--perfetto",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a trace for Perfetto's viewer here (.pftrace).",
)
@window_options
@click.option(
    "--events",
    "most_events",
    type=click.IntRange(1, _LARGEST),
    default=MOST_EVENTS,
    show_default=True,
    help="The most events to show: the last ones of the window.",
)
@click.option("--force", is_flag=True, help="Write over files that exist.")
@trust_options
@json_option
def timeline(
    log: Path,
    output: Path | None,
    perfetto: Path | None,
    since: LogPoint | None,
    until: LogPoint | None,
    most_events: int,
    force: bool,
    as_json: bool,
    **trust: Any,
) -> None:
    """Draw LOG as an offline HTML page, or as a trace for Perfetto.

    It has tracks for requests, the copies of each rank, the host pool and resets, and an arrow from each
    eviction to the later miss. The page is one HTML file and loads nothing from a network. Click anything in
    it to see its cause. The block's state machine is drawn beside it and highlights the selected event.

    \b
    Examples:
      kvsm timeline DIR -o t.html                     open t.html in a browser
      kvsm timeline DIR -o t.html --since +12.5s --until +20s
      kvsm timeline DIR --perfetto t.pftrace          open t.pftrace at ui.perfetto.dev
    """
    _refuse_targets(output, perfetto, force, as_json)
    began = time.perf_counter()
    with opened_log(log, **trust) as opened, counting("drawn", "events") as progress:
        window = opened.window(since, until)
        found = read_timeline(opened, window, Trust(**trust), most_events, progress)
        condition, stopped = opened.condition, opened.stopped
    if output == _STANDARD_OUTPUT:
        say_text(make_page(*found[:3]))
    elif output is not None:
        _write(output, make_page(*found[:3]).encode("ascii"))
    if perfetto is not None:
        _write(perfetto, b"".join(perfetto_trace(found.stream, found.tables)))
    answer = _answer(log, output, perfetto, found, time.perf_counter() - began)
    if as_json:
        say_json(answer)
    elif output != _STANDARD_OUTPUT:
        _print_answer(answer)
    for line in found.left_out:
        complain(line)
    if stopped is not None:
        complain(f"the log cannot be read further: {stopped}")
    leave(condition, good=stopped is None)


def _refuse_targets(output: Path | None, perfetto: Path | None, force: bool, as_json: bool) -> None:
    """Raise `ConfigError`, before the log is read, if a target is missing or unusable."""
    if output is None and perfetto is None:
        raise ConfigError("say where to write: -o FILE.html for a page, --perfetto FILE.pftrace for a trace")
    if output == _STANDARD_OUTPUT and as_json:
        raise ConfigError("-o - prints the page, and --json prints an answer: choose one of them")
    if output is not None and output == perfetto:
        raise ConfigError(f"{output}: the page and the trace need two files")
    for target in (output, perfetto):
        if target is None or (target is output and target == _STANDARD_OUTPUT):
            continue
        if not target.parent.is_dir():
            raise ConfigError(f"{target}: there is no directory {target.parent}")
        if target.is_dir():
            raise ConfigError(f"{target}: is a directory; give the name of a file")
        if target.exists() and not force:
            raise ConfigError(f"{target}: exists; --force writes over it")


def _write(target: Path, content: bytes) -> None:
    """Write the file atomically: after an error, an old file is unchanged. Raises `ConfigError`."""
    try:
        write_whole(target, content)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from error


def _answer(
    log: Path, output: Path | None, perfetto: Path | None, found: Timeline, seconds: float
) -> TimelineAnswer:
    return TimelineAnswer(
        log=str(log),
        page=None if output is None else str(output),
        trace=None if perfetto is None else str(perfetto),
        first=found.stream.number[0],
        last=found.stream.number[-1],
        events=len(found.stream.number),
        left_out=found.left_out,
        notes=found.head.notes,
        seconds=round(seconds, 3),
    )


def _print_answer(answer: TimelineAnswer) -> None:
    rows = [
        ("log", answer.log),
        ("events", f"{answer.events:,} ({answer.first:,} to {answer.last:,})"),
        ("time", f"{answer.seconds:.1f} s"),
    ]
    for name, what in (("page", answer.page), ("trace", answer.trace)):
        if what is not None:
            rows.append((name, f"{what}, {Path(what).stat().st_size / 1e6:.1f} MB"))
    print_rows(*rows)
