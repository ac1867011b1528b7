"""`kvsm diff`: the first differences between two logs of one workload. It needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.log_options import json_option, log_argument, trust_options
from kvsm.cli.opened_tables import opened_log
from kvsm.cli.output import Command, complain, say, say_json, say_table
from kvsm.explain.story.times import moment
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.two_logs import Changed, LogDiff, Parting, StoryStep
from kvsm.explain.two_logs import diff as compare
from kvsm.ids import render_key


@click.command(cls=Command)
@log_argument("good")
@log_argument("bad")
@trust_options
@json_option
def diff(good: Path, bad: Path, as_json: bool, **trust: Any) -> None:
    """Show the first difference between two logs of one workload. Then compare their figures.

    GOOD and BAD are aligned by request and by key, not by event number or time. Each request and each key
    has a story: what was looked up, stored, evicted and loaded, what failed, how it ended. Waits and the
    order of reports differ from run to run and are not compared. The eight characters that vLLM's server
    appends to a request's name are ignored. If the logs share no key, because block hashes start from a
    random value, a key is named by the request that stored it first.

    \b
    Examples:
      kvsm diff monday/kvsm-log tuesday/kvsm-log
      kvsm diff GOOD BAD --json

    \b
    Exit code: 0 if all stories are equal; 1 if not; 2 for input that cannot be used.
    """
    with opened_log(good, **trust) as one, opened_log(bad, **trust) as other:
        found = compare(one, other)
        if as_json:
            say_json(found)
        else:
            print_diff(found, one, other)
        _complain_of(one)
        _complain_of(other)
    if not found.same:
        raise SystemExit(ExitCode.BROKEN)


def _complain_of(log: OpenedLog) -> None:
    """Print on standard error what is wrong with a log: its stories may be cut short."""
    if log.stopped is not None:
        complain(f"{log.directory}: cannot be read further: {log.stopped}")
    for note in log.condition.notes():
        complain(f"{log.directory}: {note}")


def print_diff(found: LogDiff, good: OpenedLog, bad: OpenedLog) -> None:
    """Print a comparison for people: settings, the first stories that differ, figures."""
    if found.keys_by_owner:
        say("The logs share no key. A key is named by the request that stored it first.", "")
    _print_changed("setting", found.settings)
    if found.same:
        say(f"All {found.things:,} requests and keys have the same story in both logs.")
        return
    share = f"{found.parted:,} of {found.things:,} requests and keys have different stories."
    say(f"{share} They differ here first:", "", *_told(found.partings[0], good, bad), "")
    rest = found.partings[1:]
    if rest:
        say(f"The next {len(rest)}:" if len(rest) > 1 else "The other one:", "")
    for parting in rest:
        say(*_told(parting, good, bad), "")
    _print_changed("figure", found.figures)


def _told(parting: Parting, good: OpenedLog, bad: OpenedLog) -> list[str]:
    more = f" and {parting.others:,} more" if parting.others else ""
    lines = [_short(parting.about) + more]
    if parting.common is not None:
        lines.append(f"  both  {_text(parting.common)}")
    lines.append(f"  good  {_step(parting.good, good)}")
    lines.append(f"  bad   {_step(parting.bad, bad)}")
    return lines


def _step(step: StoryStep | None, log: OpenedLog) -> str:
    if step is None:
        return "nothing more"
    cause = "" if step.cause is None else f", {step.cause}"
    when = f"event {step.event}, {moment(step.wall_ns, log.began_ns)}"
    return f"{_text(step)}{cause}  ({when})"


def _text(step: StoryStep) -> str:
    return step.text if step.key is None else f"{step.text}, at key {_short(step.key)}"


def _short(text: str) -> str:
    """Return the text with each key in the form that `kvsm show --key` accepts."""
    return _KEY.sub(lambda key: render_key(bytes.fromhex(key[0])), text)


_KEY = re.compile(r"\b(?:[0-9a-f]{2}){16,}\b")


def _print_changed(what: str, changed: Sequence[Changed]) -> None:
    if not changed:
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name, justify in ((what, "left"), ("good", "right"), ("bad", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for one in changed:
        table.add_row(one.name, _shown(one.good), _shown(one.bad))
    say_table(table)
    say("")


def _shown(value: object) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if type(value) is int else str(value)
