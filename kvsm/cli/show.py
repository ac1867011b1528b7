"""`kvsm show`: the life of one thing in a log, with causes. It needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from kvsm.cli.log_answers import leave
from kvsm.cli.log_options import json_option, log_argument, trust_options
from kvsm.cli.output import Command, say, say_json
from kvsm.errors import ConfigError, LogError
from kvsm.log import LogReader
from kvsm.replay import BlockLife, KeyLife, RequestLife, StoryLine, TransferLife, tell
from kvsm.replay.fold import condition_of


class ShowAnswer(StoryLine, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.show/1"):
    """What `kvsm show --json` prints: one line for each event in the life of a thing.

    event: its number.
    step: the engine's step.
    wall_ns: when it was written (ns since 1970, UTC).
    kind: the class of the event.
    text: the event as a line.
    before, after: the state of the thing; equal if only a cause is told.
    """


@click.command(cls=Command)
@log_argument()
@click.option("--block", type=click.IntRange(min=0), metavar="SLOT", help="A host slot.")
@click.option("--key", metavar="HEX", help="A key, or the hex digits that it starts with.")
@click.option("--request", metavar="ID", help="A request, as in the log or as vLLM's client knows it.")
@click.option("--transfer", type=click.IntRange(min=1), metavar="ID", help="A store or load.")
@trust_options
@json_option
def show(
    log: Path,
    block: int | None,
    key: str | None,
    request: str | None,
    transfer: int | None,
    as_json: bool,
    **trust: Any,
) -> None:
    """Tell the life of one thing in LOG, with causes.

    It shows which request stored a block, what the block was evicted for, and why a request missed. There is
    one line for each event, with the state before and after. With --json each line is a JSON object.
    """
    target = _target(block, key, request, transfer)
    reader = LogReader(log)
    lines = 0
    for line in tell(reader, target, **trust):
        lines += 1
        if as_json:
            say_json(ShowAnswer(**msgspec.structs.asdict(line)))
        else:
            say(_told(line))
    if not lines:
        raise LogError(f"{log}: nothing in this log concerns {target}")
    leave(condition_of(reader))


def _target(
    block: int | None, key: str | None, request: str | None, transfer: int | None
) -> BlockLife | KeyLife | RequestLife | TransferLife:
    if sum(one is not None for one in (block, key, request, transfer)) != 1:
        raise ConfigError("show takes exactly one of --block, --key, --request and --transfer")
    if block is not None:
        return BlockLife(block)
    if request is not None:
        return RequestLife(request)
    if transfer is not None:
        return TransferLife(transfer)
    assert key is not None
    if not key or not set(key.lower().removesuffix("..")) <= set("0123456789abcdef"):
        raise ConfigError(f"--key {key!r} is not made of hex digits")
    return KeyLife(key)


def _told(line: StoryLine) -> str:
    change = line.before if line.before == line.after else f"{line.before} -> {line.after}"
    return f"event {line.event} step {line.step}: {line.text}  [{change}]"
