"""`kvsm show`: print the history of a block, key, request or transfer in a log. It needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from kvsm.cli.log_answers import leave
from kvsm.cli.log_options import json_option, log_argument, trust_options, window_options
from kvsm.cli.output import Command, say, say_json
from kvsm.core.log import LogReader
from kvsm.core.log.fold import condition_of
from kvsm.errors import ConfigError, LogError
from kvsm.explain.story import BlockLife, KeyLife, RequestLife, Story, StoryLine, TransferLife, Trust
from kvsm.explain.story.names import full_name
from kvsm.explain.story.times import duration
from kvsm.explain.story.window import LogPoint, Window, find_window

GAP_STEPS, GAP_NS = 100, 10**9
"""A gap between two lines is printed if it is at least this long."""
WAIT_STEPS, WAIT_NS = 2, 10**7
"""The same limits for a gap in which the thing waited for a copy."""


class ShowAnswer(StoryLine, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.show/1"):
    """What `kvsm show --json` prints: one line for each event in the life of a thing.

    event: its number.
    step: the engine's step.
    wall_ns: when it was written (ns since 1970, UTC).
    kind: the class of the event; empty in the last line if the thing has not ended where the log ends.
    text: the event as a line.
    before, after: the state of the thing; equal if the event is only a cause.
    after_start_ns: time since the first event of the log (ns).
    gap_steps, gap_ns: steps and time since the line before; 0 in the first line.
    waited: whether the thing waited for a copy meanwhile.
    """


@click.command(cls=Command)
@log_argument()
@click.option("--block", type=click.IntRange(min=0), metavar="SLOT", help="A host slot.")
@click.option("--key", metavar="HEX", help="A key as it is shown, or the hex digits that it begins with.")
@click.option("--request", metavar="ID", help="A request: its id in LOG, or as vLLM's client sees it.")
@click.option("--transfer", type=click.IntRange(min=1), metavar="ID", help="A store or load.")
@window_options
@trust_options
@json_option
def show(
    log: Path,
    block: int | None,
    key: str | None,
    request: str | None,
    transfer: int | None,
    since: LogPoint | None,
    until: LogPoint | None,
    as_json: bool,
    **trust: Any,
) -> None:
    """Show the history of a block, key, request or transfer in LOG.

    The history includes causes: which request stored a block, what the block was evicted for, why a request
    missed. Each event has one line: its time (UTC, and since the first event of LOG), what happened, and the
    state before and after. A long gap gets a line, too. With --json, each line is a JSON object.
    """
    reader = LogReader(log)
    target = _target(reader, block, key, request, transfer)
    window = find_window(reader, since, until)
    story = Story(reader, target, Trust(**trust))
    lines = 0
    for line in _lines(story, window):
        lines += 1
        if as_json:
            say_json(ShowAnswer(**msgspec.structs.asdict(line)))
        else:
            say(*_told(line))
    if not lines:
        where = "this log" if window == Window() else "this part of the log"
        raise LogError(f"{log}: nothing in {where} concerns {target}")
    leave(condition_of(reader))


def _target(
    reader: LogReader, block: int | None, key: str | None, request: str | None, transfer: int | None
) -> BlockLife | KeyLife | RequestLife | TransferLife:
    if sum(one is not None for one in (block, key, request, transfer)) != 1:
        raise ConfigError("show takes exactly one of --block, --key, --request and --transfer")
    if block is not None:
        return BlockLife(block)
    if request is not None:
        return RequestLife(full_name(reader, request))
    if transfer is not None:
        return TransferLife(transfer)
    assert key is not None
    return KeyLife(key)


def _lines(story: Story, window: Window) -> Iterator[StoryLine]:
    """Yield the lines in the window and, if it includes the end of the log, a line on what is open there."""
    for line in story:
        if window.last is not None and line.event > window.last:
            return
        if line.event in window:
            yield line
    end = story.end()
    if end is not None and window.last is None:
        yield end


def _told(line: StoryLine) -> Iterator[str]:
    """Format a line for people, and before it the gap if that is long."""
    steps, ns = (WAIT_STEPS, WAIT_NS) if line.waited else (GAP_STEPS, GAP_NS)
    if line.gap_steps >= steps or line.gap_ns >= ns:
        what = "waited" if line.waited else "no event for"
        yield f"    {what} {_steps(line.gap_steps)}, {duration(line.gap_ns)}"
    yield line.told()


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"
