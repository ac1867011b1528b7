"""`kvsm replay`: rebuild the state of a log at its end or after any event. It needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.log_answers import leave, print_rows
from kvsm.cli.log_options import json_option, log_argument, trust_options
from kvsm.cli.output import Command, complain, say_json
from kvsm.core.ledger import Ledger
from kvsm.core.ledger.snapshot import digest
from kvsm.errors import IllegalTransition, InvalidEvent
from kvsm.explain.story import LogCondition, Rebuilt, Trust, rebuild
from kvsm.explain.why.fates import kind_of
from kvsm.states.block import BlockState
from kvsm.states.words import STATE_MASK


class LedgerSummary(msgspec.Struct, frozen=True):
    """A ledger in numbers.

    life: number of processes that have written the log so far.
    held: slots that are neither free nor idle.
    transfers: live transfers by direction and state.
    """

    seq: int
    step: int
    tick: int
    epoch: int
    life: int
    blocks: dict[str, int]
    free: int
    idle: int
    held: int
    index: int
    transfers: dict[str, int]
    requests: dict[str, int]
    digest: str


class ReplayAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.replay/1"):
    """What `kvsm replay --json` prints: the state of a log at an event.

    first: the first event that was folded; a snapshot holds the state before it.
    events: number of events folded.
    entries: number of blocks named in these events.
    seconds: wall time.
    """

    first: int
    events: int
    entries: int
    seconds: float
    state: LedgerSummary
    condition: LogCondition


def state_of(ledger: Ledger) -> LedgerSummary:
    """Summarize a ledger for `kvsm replay`."""
    states = np.bincount(ledger.blocks.view & STATE_MASK, minlength=len(BlockState)).tolist()
    free, idle = len(ledger.free), ledger.evictable()
    return LedgerSummary(
        ledger.seq,
        ledger.step,
        ledger.tick,
        ledger.epoch,
        ledger.life,
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
@log_argument()
@click.option("--at", type=click.IntRange(min=1), metavar="SEQ", help="The state after this event.")
@click.option(
    "--step", type=click.IntRange(min=0), metavar="N", help="The state at the end of this engine step."
)
@trust_options
@json_option
def replay(log: Path, at: int | None, step: int | None, as_json: bool, **trust: Any) -> None:
    """Rebuild the state after any event of LOG, and print it.

    LOG is a directory of segments. Without --at and --step every event is folded. With one of them the fold
    starts from the nearest snapshot before that point.
    """
    try:
        with Trust(**trust).guarded(log):
            rebuilt = rebuild(log, seq=at, step=step, **trust)
            state = state_of(rebuilt.ledger)
    except (IllegalTransition, InvalidEvent) as error:
        complain(f"{log}: {error}; `kvsm verify` shows what led there")
        raise SystemExit(ExitCode.BROKEN) from None
    if as_json:
        answer = ReplayAnswer(
            first=rebuilt.first,
            events=rebuilt.events,
            entries=rebuilt.entries,
            seconds=round(rebuilt.seconds, 6),
            state=state,
            condition=rebuilt.condition,
        )
        say_json(answer)
    else:
        _print_state(log, rebuilt, state)
    leave(rebuilt.condition)


def _print_state(log: Path, rebuilt: Rebuilt, state: LedgerSummary) -> None:
    rate = rebuilt.entries / rebuilt.seconds if rebuilt.seconds else 0
    origin = "" if rebuilt.first == 1 else f", from the snapshot before event {rebuilt.first}"
    capacity = rebuilt.ledger.config.host_blocks
    print_rows(
        ("log", str(log)),
        (
            "state",
            f"after event {state.seq:,}, step {state.step:,}, tick {state.tick:,}, epoch {state.epoch:,}"
            + (f", life {state.life:,}" if state.life > 1 else ""),
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
