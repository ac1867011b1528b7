"""`kvsm why`: explain a miss, a wait or a failure in a log, the answer first. It needs no torch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
import msgspec

from kvsm.cli.log_answers import leave
from kvsm.cli.log_options import json_option, log_argument, trust_options, window_options
from kvsm.cli.opened_tables import opened_log
from kvsm.cli.output import Command, complain, say, say_json
from kvsm.core.log import LogReader
from kvsm.errors import ConfigError, LogError
from kvsm.explain.other_tier import other_tier
from kvsm.explain.story.names import only_match
from kvsm.explain.story.times import moment
from kvsm.explain.story.window import EVERYTHING, LogPoint, Window
from kvsm.explain.tables.log_parts import log_part
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.why.causes import Evidence, Explanation
from kvsm.explain.why.questions import explain_block, explain_keys, explain_request, explain_transfer
from kvsm.ids import render_key

MOST_ID = (1 << 63) - 1
"""The largest number that the tables can hold."""

MOST_COMMANDS = 4
"""The most commands at the end of an answer."""


class Elsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """What the log of the other tier says of a key.

    tier: `host` or `disk`.
    log: directory of its log; null if no such log lies beside the first one.
    key: in hex.
    explanation: null if that log does not contain the key, or cannot be read.
    why_not: the reason if `explanation` is null.
    """

    tier: str
    log: str | None
    key: str
    explanation: Explanation | None = None
    why_not: str | None = None


class WhyAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.why/1"):
    """What `kvsm why --json` prints: what happened to a request, key, transfer or slot, and why.

    log: its directory.
    explanations: one for each thing that was named; several only if several keys begin with the given digits.
    elsewhere: what the log of the other tier says of the same keys.
    """

    log: str
    explanations: tuple[Explanation, ...]
    elsewhere: tuple[Elsewhere, ...] = ()


@click.command(cls=Command)
@log_argument()
@click.argument("request", required=False)
@click.option("--key", metavar="HEX", help="A key as it is shown, or the hex digits that it begins with.")
@click.option("--transfer", type=click.IntRange(1, MOST_ID), metavar="ID", help="A store or load.")
@click.option("--block", type=click.IntRange(min=0), metavar="SLOT", help="A host slot.")
@click.option("--whole", is_flag=True, help="Index the whole of a large LOG, and explain from all of it.")
@window_options
@trust_options
@json_option
def why(
    log: Path,
    request: str | None,
    key: str | None,
    transfer: int | None,
    block: int | None,
    whole: bool,
    since: LogPoint | None,
    until: LogPoint | None,
    as_json: bool,
    **trust: Any,
) -> None:
    """Explain a miss, a wait or a failure in LOG.

    Name a request, key, transfer or host slot. REQUEST is an id as in LOG, or as vLLM's client sees it. The
    answer comes first, in a few sentences, and then the events that prove it, each with its number, step, UTC
    time and seconds after the start. `kvsm show` prints the whole history.

    Host pool and disk have a log each. A key is looked up in the other log, too, if that lies beside LOG.

    Of a large LOG without an index, only the events that name the request or transfer, and some events before
    them, are read. Keys and slots need the index.
    """
    if sum(one is not None for one in (request, key, transfer, block)) != 1:
        raise ConfigError("why takes exactly one of REQUEST, --key, --transfer and --block")
    part = EVERYTHING if whole else log_part(LogReader(log), request, transfer)
    with opened_log(log, part, **trust) as opened:
        window = opened.window(since, until)
        found = _explanations(opened, request, key, transfer, block, window)
        elsewhere = _elsewhere(opened, found, trust)
        if as_json:
            say_json(WhyAnswer(log=str(log), explanations=found, elsewhere=elsewhere))
        else:
            _print(opened.directory, opened.log_began_ns, found)
            _print_elsewhere(elsewhere, opened.log_began_ns)
        if part != EVERYTHING:
            complain(f"read from events {opened.first:,} to {opened.last:,}; --whole reads the whole log")
        if opened.stopped is not None:
            complain(f"{opened.stopped}; the answer is about what comes before")
        leave(opened.condition, good=opened.stopped is None)


def _explanations(
    log: OpenedLog,
    request: str | None,
    key: str | None,
    transfer: int | None,
    block: int | None,
    window: Window,
) -> tuple[Explanation, ...]:
    if request is not None:
        return (explain_request(log, _named(log, request), window),)
    if transfer is not None:
        return (explain_transfer(log, transfer),)
    if block is not None:
        return (explain_block(log, block, window),)
    assert key is not None
    return explain_keys(log, key, window)


def _named(log: OpenedLog, name: str) -> str:
    """Return the full name of a request. Raises `LogError`, with similar names, unless one matches."""
    found = log.resolve_request(name)
    if name in found:
        return name
    if len(found) == 1:
        return found[0]
    names = found or [row for (row,) in log.sql("SELECT DISTINCT request FROM requests ORDER BY arrived")]
    return only_match(name, names, log.directory)


def _elsewhere(
    log: OpenedLog, found: tuple[Explanation, ...], trust: dict[str, Any]
) -> tuple[Elsewhere, ...]:
    """Explain the same keys by the log of the other tier; empty if there is no other tier."""
    keys = [one.key for one in found if one.key is not None]
    other = other_tier(log) if keys else None
    if other is None:
        return ()
    if other.log is None:
        where = f"no log of the {other.tier} lies beside {log.directory}"
        return tuple(Elsewhere(tier=other.tier, log=None, key=key, why_not=where) for key in keys)
    try:
        with opened_log(other.log, **trust) as opened:
            return tuple(_explained_by(opened, other.tier, key) for key in keys)
    except LogError as error:
        return tuple(
            Elsewhere(tier=other.tier, log=str(other.log), key=key, why_not=str(error)) for key in keys
        )


def _explained_by(log: OpenedLog, tier: str, key: str) -> Elsewhere:
    try:
        explanation, why_not = explain_keys(log, key)[0], None
    except LogError as error:
        explanation, why_not = None, str(error)
    return Elsewhere(tier=tier, log=str(log.directory), key=key, explanation=explanation, why_not=why_not)


def _print(directory: Path, began_ns: int, found: tuple[Explanation, ...], indent: str = "") -> None:
    for one in found:
        say(f"{indent}{one.about}", *(f"{indent}  {sentence}" for sentence in one.answer), "")
        say(f"{indent}  evidence:" if one.evidence else f"{indent}  the log has no further evidence")
        say(*(f"{indent}  {_line(began_ns, line)}" for line in one.evidence))
        if one.left_out:
            say(f"{indent}  ... and {one.left_out:,} more lines")
        things = dict.fromkeys(line.show for line in one.evidence)
        shown = [_command(directory, *thing) for thing in things][:MOST_COMMANDS]
        if shown:
            say("", f"{indent}  the whole story of each thing:")
            say(*(f"{indent}    {line}" for line in shown))


def _print_elsewhere(found: tuple[Elsewhere, ...], began_ns: int) -> None:
    """Print the other tier's explanations. began_ns: start of the user's log, to which times are relative."""
    for one in found:
        if one.log is None or one.explanation is None:
            say("", f"on the {one.tier}: {one.why_not}")
        else:
            say("", f"on the {one.tier}, by {one.log}:")
            _print(Path(one.log), began_ns, (one.explanation,), "  ")


def _command(directory: Path, option: str, value: str) -> str:
    """Return a command line to paste. A key has the form in which other commands print it."""
    if option == "--key":
        value = render_key(bytes.fromhex(value))
    return shlex.join(["kvsm", "show", str(directory), option, value])


def _line(began_ns: int, line: Evidence) -> str:
    when = moment(line.wall_ns, began_ns)
    return f"event {line.event:,}  step {line.step:,}  {when}  {line.text}"
