"""`kvsm fork`: re-run the real core from any event of a log, with changes. It needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from kvsm.cli.diff import print_diff
from kvsm.cli.log_options import json_option, log_argument, trust_options
from kvsm.cli.opened_tables import opened_log
from kvsm.cli.output import Command, say, say_json
from kvsm.cli.progress import counting
from kvsm.core.policies import POLICIES
from kvsm.errors import ConfigError
from kvsm.explain.other_future import Forked, OtherChoices
from kvsm.explain.other_future import fork as fork_log
from kvsm.explain.two_logs import LogDiff
from kvsm.explain.two_logs import diff as compare
from kvsm.explain.verify.unavoidable import Unavoidable, unavoidable


class ForkAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.fork/1"):
    """What `kvsm fork --json` prints: what the core did when it was re-run with changes.

    log: directory of the new log.
    forked: what the core did, and where it diverged.
    difference: between the old log and the new one.
    """

    log: str
    forked: Forked
    difference: LogDiff


class _Late(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """`TRANSFER:EVENTS`, as (transfer, events)."""

    name = "late"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the value. Fails if it has another form."""
        transfer, _, events = value.partition(":")
        if not transfer.isdigit() or not events.isdigit():
            self.fail(f"{value!r} is not TRANSFER:EVENTS, for example 1017:200", param, ctx)
        return int(transfer), int(events)


_TRANSFER = click.IntRange(min=1)


@click.command(cls=Command)
@log_argument()
@click.option("--at", type=click.IntRange(min=1), metavar="SEQ", help="The last event kept from LOG.")
@click.option(
    "--unavoidable",
    "chart",
    is_flag=True,
    help="Find up to which event a broken property is avoidable; no --at.",
)
@click.option("--policy", metavar="NAME", help=f"Another eviction policy: {', '.join(POLICIES)}.")
@click.option("--abort", multiple=True, metavar="REQUEST", help="Abort this request at once. Repeatable.")
@click.option("--reset", is_flag=True, help="Reset the cache at once.")
@click.option(
    "--fail", type=_TRANSFER, multiple=True, metavar="TRANSFER", help="Make its reports bad. Repeatable."
)
@click.option(
    "--lose", type=_TRANSFER, multiple=True, metavar="TRANSFER", help="Drop its reports. Repeatable."
)
@click.option(
    "--late",
    type=_Late(),
    multiple=True,
    metavar="TRANSFER:EVENTS",
    help="Delay its reports by EVENTS events. Repeatable.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The new log.  [default: LOG-fork-SEQ]",
)
@trust_options
@json_option
def fork(log: Path, at: int | None, chart: bool, output: Path | None, as_json: bool, **options: Any) -> None:
    """Re-run LOG from event SEQ with changes; show where it diverges.

    The calls that the engine made after SEQ are repeated on the real core. Without changes, the core decides
    as in LOG. The engine is not simulated: its calls stay the same, so the fork shows what kvsm would have
    done with them. The new log is a log like any other: verify it, show it, report on it.

    \b
    Examples:
      kvsm fork LOG --at 1200 --policy arc         another policy, from event 1200 on
      kvsm fork LOG --at 1200 --late 1017:500      the reports of transfer 1017 come 500 events later
      kvsm fork LOG --at 1200 --abort r7 --reset   r7 is aborted, then the cache is reset
      kvsm fork LOG --unavoidable                  from which event on was the broken property certain?

    \b
    Exit code: 0 if the new log is written; 2 for input that cannot be used (nothing is written then).
    """
    trust = {name: options.pop(name) for name in ("allow_policies", "max_slots")}
    late = dict(options.pop("late"))
    if chart == (at is not None):
        raise ConfigError("fork takes either --at SEQ or --unavoidable")
    if at is None:
        _chart(_unavoidable(log, trust), as_json)
        return
    directory = output or log.resolve().parent / f"{log.resolve().name}-fork-{at}"
    forked = fork_log(log, at, OtherChoices(**options, late=late), directory, **trust)
    with opened_log(log, **trust) as one, opened_log(directory, **trust) as other:
        found = compare(one, other)
        if as_json:
            say_json(ForkAnswer(log=str(directory), forked=forked, difference=found))
            return
        say(*_told(directory, forked), "")
        print_diff(found, one, other)


def _unavoidable(log: Path, trust: dict[str, Any]) -> Unavoidable:
    """Fork the log at many events. On a terminal, a line counts the forks."""
    with counting("verified", "forks") as progress:
        return unavoidable(log, progress=progress, **trust)


def _chart(found: Unavoidable, as_json: bool) -> None:
    """Print a line for each fork, and up to which event the core avoids the broken property."""
    if as_json:
        say_json(found)
        return
    say(f"Event {found.event} breaks {found.broken}. Forked before it, with the same calls:", "")
    width = len(f"{found.event:,}")
    for probe in found.probes:
        verdict = "avoided" if probe.broken is None else f"breaks {probe.broken}"
        say(f"  from event {probe.at:>{width},}  {'.' if probe.broken is None else '#'}  {verdict}")
    last = found.avoided_until
    if last is None:
        say("", "No fork avoids it: the calls of the engine break it, or the state was wrong from the start.")
    elif last == found.event - 1:
        say("", f"kvsm's core avoids it up to the end: it would not decide event {found.event} itself.")
    else:
        say("", f"kvsm's core avoids it up to event {last:,}. From event {last + 1:,} on it is certain.")


def _told(directory: Path, forked: Forked) -> list[str]:
    lines = [f"The fork is a log of {forked.last:,} events: {directory}"]
    if forked.parted is None:
        lines.append("The core decided what the log says, event for event.")
    else:
        lines.append(f"The same up to event {forked.parted - 1}; the first other event is {forked.parted}.")
    if forked.not_offered:
        lines.append(
            f"Not offered: {forked.not_offered:,} blocks that the log's core skipped. The log does not "
            f"record where they are on the device."
        )
    if forked.stopped is not None:
        lines.append(f"The fork ends where the log cannot go on: {forked.stopped}")
    if forked.pointless:
        lines.append(f"Left out: {forked.pointless:,} calls about what does not exist in the fork.")
    return lines
