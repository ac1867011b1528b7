"""`kvsm replay`, `kvsm verify` and `kvsm show`: what a log can tell. They need no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvsm.cli.output import Command, complain, say, say_json, say_table
from kvsm.errors import ConfigError, IllegalTransition, InvalidEvent, LogError
from kvsm.invariants import PROPERTIES
from kvsm.ledger import Ledger
from kvsm.log import LogReader
from kvsm.replay import (
    BlockLife,
    KeyLife,
    LogCondition,
    Rebuilt,
    RequestLife,
    StoryLine,
    TransferLife,
    Trust,
    Verification,
    rebuild,
    tell,
    verify_log,
)
from kvsm.replay.fates import kind_of
from kvsm.replay.fold import condition_of
from kvsm.snapshot import digest
from kvsm.states.block import BlockState
from kvsm.states.words import STATE_MASK

_log = click.argument("log", type=click.Path(path_type=Path))
_allow = click.option(
    "--allow-policy",
    "allow_policies",
    metavar="MODULE:CLASS",
    multiple=True,
    help="Run the code of this eviction policy if LOG names it. Repeatable.",
)
_max_slots = click.option(
    "--max-slots",
    type=click.IntRange(min=1),
    metavar="N",
    help="Refuse a LOG that claims more host slots or device blocks.  [default: 1048576, or its bytes]",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


class LedgerSummary(msgspec.Struct, frozen=True):
    """A ledger in numbers.

    held: slots that are neither free nor idle.
    transfers: live transfers by direction and state.
    """

    seq: int
    step: int
    tick: int
    epoch: int
    blocks: dict[str, int]
    free: int
    idle: int
    held: int
    index: int
    transfers: dict[str, int]
    requests: dict[str, int]
    digest: str


def state_of(ledger: Ledger) -> LedgerSummary:
    """What `kvsm replay` prints of a ledger."""
    states = np.bincount(ledger.blocks.view & STATE_MASK, minlength=len(BlockState)).tolist()
    free, idle = len(ledger.free), len(ledger.policy)
    return LedgerSummary(
        ledger.seq,
        ledger.step,
        ledger.tick,
        ledger.epoch,
        {state.name: states[state] for state in BlockState},
        free,
        idle,
        ledger.config.host_blocks - free - idle,
        len(ledger.index),
        _tally(f"{kind_of(one)} {one.state.name}" for one in ledger.transfers.values()),
        _tally(one.state.name for one in ledger.requests.values()),
        digest(ledger),
    )


def _tally(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


@click.command(cls=Command)
@_log
@click.option("--at", type=click.IntRange(min=1), metavar="SEQ", help="The state after this event.")
@click.option(
    "--step", type=click.IntRange(min=0), metavar="N", help="The state at the end of this engine step."
)
@_allow
@_max_slots
@_json
def replay(log: Path, at: int | None, step: int | None, as_json: bool, **trust: Any) -> None:
    """Rebuild the state from LOG, a directory of segments, and print it.

    Without --at and --step every event is folded. With one of them the fold starts from the nearest snapshot
    before that point.
    """
    try:
        with Trust(**trust).guarded(log):
            rebuilt = rebuild(log, seq=at, step=step, **trust)
            state = state_of(rebuilt.ledger)
    except (IllegalTransition, InvalidEvent) as error:
        complain(f"{log}: {error}; `kvsm verify` shows what led there")
        raise SystemExit(1) from None
    if as_json:
        facts = {
            "first": rebuilt.first,
            "events": rebuilt.events,
            "entries": rebuilt.entries,
            "seconds": round(rebuilt.seconds, 6),
        }
        say_json({**facts, "state": state, "condition": _facts(rebuilt.condition)})
    else:
        _print_state(log, rebuilt, state)
    _leave(rebuilt.condition)


def _print_state(log: Path, rebuilt: Rebuilt, state: LedgerSummary) -> None:
    rate = rebuilt.entries / rebuilt.seconds if rebuilt.seconds else 0
    origin = "" if rebuilt.first == 1 else f", from the snapshot before event {rebuilt.first}"
    capacity = rebuilt.ledger.config.host_blocks
    _print_rows(
        ("log", str(log)),
        (
            "state",
            f"after event {state.seq:,}, step {state.step:,}, tick {state.tick:,}, epoch {state.epoch:,}",
        ),
        ("folded", f"{rebuilt.events:,} events, {rebuilt.entries:,} entries{origin}"),
        ("time", f"{rebuilt.seconds:.3f} s, {rate:,.0f} entries/s"),
        ("blocks", _counts(state.blocks)),
        ("slots", f"{capacity:,}: {state.free:,} free, {state.idle:,} idle, {state.held:,} held"),
        ("index", f"{state.index:,} keys"),
        ("transfers", _counts(state.transfers)),
        ("requests", _counts(state.requests)),
        ("digest", state.digest),
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"


@click.command(cls=Command)
@_log
@_allow
@_max_slots
@_json
def verify(log: Path, as_json: bool, **trust: Any) -> None:
    """Check every property that a log can show, at every event of LOG.

    Names the first event that breaks one, and the last ten events of the same slots, transfers or requests.
    Exits with 1 if a property is broken, or if the log is damaged or lacks events.
    """
    verification = _verify_with_progress(log, trust)
    if as_json:
        facts = msgspec.structs.asdict(verification)
        say_json({"good": verification.good, **facts, "condition": _facts(verification.condition)})
    else:
        _print_verification(verification)
    _leave(verification.condition, good=verification.good)


def _verify_with_progress(log: Path, trust: dict[str, Any]) -> Verification:
    console = Console(stderr=True)
    if not console.is_terminal:
        return verify_log(log, **trust)
    columns = (TextColumn("verified {task.completed:,.0f} events"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("verify", total=None)
        return verify_log(log, progress=lambda events: progress.update(task, completed=events), **trust)


def _print_verification(found: Verification) -> None:
    rate = found.events / found.seconds if found.seconds else 0
    whole = found.damage is None and found.condition.complete
    broken = "no violation" if whole else "no violation in what is left of an incomplete log"
    if found.violations:
        broken = f"broken: {', '.join(sorted({str(one.property) for one in found.violations}))}"
    _print_rows(
        ("log", found.log),
        ("events", f"{found.events:,} ({found.first:,} to {found.last:,}), {found.entries:,} entries"),
        ("time", f"{found.seconds:.3f} s, {rate:,.0f} events/s"),
        ("properties", ", ".join(map(str, PROPERTIES))),
        ("digest", found.digest),
        ("verdict", broken),
    )
    if found.breakage is not None:
        breakage = found.breakage
        say("", f"first broken by event {breakage.event}, step {breakage.step}: {breakage.text}")
        for violation in breakage.violations:
            say(f"  {violation.property}: {violation.message}", f"      {violation.property.sentence}")
        say("", "what led there:", *[f"  {line}" for line in breakage.led_there])
    if found.damage is not None:
        complain(found.damage)


@click.command(cls=Command)
@_log
@click.option("--block", type=click.IntRange(min=0), metavar="SLOT", help="A host slot.")
@click.option("--key", metavar="HEX", help="A key, or the hex digits that it starts with.")
@click.option("--request", metavar="ID", help="A request, as in the log or as vLLM's client knows it.")
@click.option("--transfer", type=click.IntRange(min=1), metavar="ID", help="A store or load.")
@_allow
@_max_slots
@_json
def show(
    log: Path,
    block: int | None,
    key: str | None,
    request: str | None,
    transfer: int | None,
    as_json: bool,
    **trust: Any,
) -> None:
    """Tell the life of one thing in LOG, with causes: which request stored a block, what it was evicted for,
    why a request missed.

    One line for each event, with the state before and after. With --json each line is a JSON object.
    """
    target = _target(block, key, request, transfer)
    reader = LogReader(log)
    lines = 0
    for line in tell(reader, target, **trust):
        lines += 1
        if as_json:
            say_json(line)
        else:
            say(_told(line))
    if not lines:
        raise LogError(f"{log}: nothing in this log concerns {target}")
    _leave(condition_of(reader))


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


# What the commands share.


def _print_rows(*rows: tuple[str, str]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    say_table(table)


def _facts(condition: LogCondition) -> dict[str, object]:
    """A log's condition, each field with its name."""
    torn = None if condition.torn is None else condition.torn._asdict()
    return {**msgspec.structs.asdict(condition), "torn": torn}


def _leave(condition: LogCondition, good: bool = True) -> None:
    """Say on stderr what is wrong with the log. Exit with 1 if a property is broken or events are lost."""
    for note in condition.notes():
        complain(note)
    if not good or not condition.complete:
        raise SystemExit(1)
