"""`kvsm tail`: print the last events of a log, and each new event. It needs no torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click
import msgspec

from kvsm.cli.log_answers import leave
from kvsm.cli.log_options import json_option, log_argument
from kvsm.cli.output import Command, complain, say, say_json
from kvsm.core.log import LogFollower, LogReader, stop_notice, stopped_by
from kvsm.core.log.fold import condition_of
from kvsm.core.log.frames import first_event, segment_paths
from kvsm.errors import LogError
from kvsm.events import KINDS, LoadPlanned, OffloadingEvent, StorePlanned
from kvsm.explain.story.concern import named_by_fields
from kvsm.explain.story.event_filter import EventFilter, is_failure
from kvsm.explain.story.names import full_name
from kvsm.explain.story.render import dated, render

POLL_SECONDS = 0.2
QUIET_SECONDS = 30.0
"""After this time without an event, a notice says that nothing is written."""

MOST_SEGMENTS = 4
"""With --follow, the most segments to search for the last events. More would take minutes, not seconds."""

_KIND_HELP = "Events of this kind, such as WorkerReported. Repeatable."

_KINDS = {kind.__name__.lower(): kind for kind in KINDS}


class TailAnswer(msgspec.Struct, frozen=True, tag_field="schema", tag="kvsm.tail/1"):
    """What `kvsm tail --json` prints: one line for each event.

    event: its number.
    step: the engine's step.
    wall_ns: when it was written (ns since 1970, UTC).
    after_start_ns: time since the first event of the log that is kept (ns).
    kind: the class of the event.
    text: its kind and its fields, as a line.
    requests, transfers: ids in its fields; for a plan, also the transfer that it plans.
    worker: the rank in its fields, or null.
    failed: whether `--failed` would print it.
    """

    event: int
    step: int
    wall_ns: int
    after_start_ns: int
    kind: str
    text: str
    requests: tuple[str, ...]
    transfers: tuple[int, ...]
    worker: int | None
    failed: bool


def _kinds(
    ctx: click.Context, param: click.Parameter, names: tuple[str, ...]
) -> tuple[type[OffloadingEvent], ...]:
    """Return the kinds of events with these names. Suggests similar names for an unknown one."""
    for name in names:
        if name.lower() not in _KINDS:
            near = [_KINDS[one].__name__ for one in get_close_matches(name.lower(), _KINDS, cutoff=0.5)]
            meant = f"Did you mean {' or '.join(near)}?" if near else "docs/metrics.md lists them."
            raise click.BadParameter(f"There is no kind of event {name!r}. {meant}", ctx, param)
    return tuple([_KINDS[name.lower()] for name in names])


@click.command(cls=Command)
@log_argument()
@click.option("--kind", "kinds", multiple=True, callback=_kinds, metavar="KIND", help=_KIND_HELP)
@click.option(
    "--request", metavar="ID", help="About this request: its id in LOG, or as vLLM's client sees it."
)
@click.option("--transfer", type=click.IntRange(min=1), metavar="ID", help="About this store or load.")
@click.option("--worker", type=click.IntRange(min=0), metavar="RANK", help="About this rank.")
@click.option(
    "--failed",
    is_flag=True,
    help="Only failures: bad copies, rejected reports, lost copies, voided loads, killed processes.",
)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="First print the last N of these events.",
)
@click.option("--follow/--no-follow", default=True, help="Then wait for new events.  [default: follow]")
@json_option
def tail(log: Path, lines: int, follow: bool, as_json: bool, **wanted: Any) -> None:
    """Print the last events of LOG, and each new one.

    Each event has one line: its time (UTC, and since the first event of LOG), its number, the engine's step,
    its kind and its fields. An event must meet all given conditions. The command ends when the engine closes
    LOG, or with Ctrl-C. It folds no event, so it also prints a log that `kvsm verify` refuses.
    """
    if wanted["request"] is not None and not follow:
        # In a growing log, the request may still appear.
        full_name(LogReader(log), wanted["request"])
    printer = _EventPrinter(log, wanted, as_json)
    printer.last_events(lines, MOST_SEGMENTS if follow else None)
    while follow and not printer.follower.closed:
        time.sleep(POLL_SECONDS)
        printer.new_events()
    leave(condition_of(printer.follower))


class _EventPrinter:
    """Prints the wanted events of a log. wanted: the conditions of an `EventFilter`."""

    def __init__(self, log: Path, wanted: dict[str, Any], as_json: bool) -> None:
        self._log, self._conditions, self._as_json = log, wanted, as_json
        self.follower, self._filter = LogFollower(log), EventFilter(**wanted)
        self._began_ns: int | None = None
        self._quiet_since: float | None = time.monotonic()

    def last_events(self, lines: int, most_segments: int | None) -> None:
        """Print the last wanted events that are already in the log, at most `lines`.

        most_segments: the most segments to search for them; None: all.
        """
        starts = [first_event(path) for path in segment_paths(self._log)]
        most = len(starts) if most_segments is None else min(most_segments, len(starts))
        segments, found = 1, deque[OffloadingEvent](maxlen=lines)
        while True:
            # A filter must see the events in order. So each try starts again, from twice as far back.
            self.follower = LogFollower(self._log, starts[-segments])
            self._filter = EventFilter(**self._conditions)
            found = deque(self._wanted_events(), maxlen=lines)
            if len(found) == lines or segments == most:
                break
            segments = min(2 * segments, most)
        if len(found) < lines and most < len(starts):
            complain(f"events before {starts[-most]} were not looked at; --no-follow looks at all")
        for event in found:
            self._print(event)

    def new_events(self) -> None:
        """Print the wanted events that were written since the last call."""
        for event in self._wanted_events():
            self._print(event)
        if self._quiet_since is not None and time.monotonic() - self._quiet_since > QUIET_SECONDS:
            self._quiet_since = None
            name = stopped_by(self._log)
            why = stop_notice(name) if name else "the engine has nothing to decide, hangs or was killed"
            complain(
                f"nothing was written for {QUIET_SECONDS:.0f} s, and the log is not closed: {why}; still "
                "waiting (Ctrl-C ends)"
            )

    def _wanted_events(self) -> Iterator[OffloadingEvent]:
        for segment, events in self.follower.poll():
            if events:
                self._quiet_since = time.monotonic()
            elif segment.gap is not None:
                first, last = segment.gap
                deleted = segment.gap in self.follower.overtaken
                why = (
                    "retention (max_bytes) deleted them before they were read"
                    if deleted
                    else "a write failed"
                )
                complain(f"events {first} to {last} are missing: {why}")
            yield from filter(self._filter.fits, events)

    def _print(self, event: OffloadingEvent) -> None:
        if self._began_ns is None:
            self._began_ns = _began_ns(self._log, event.wall_ns)
        if self._as_json:
            say_json(_answer(event, self._began_ns))
        else:
            say(dated(event.seq, event.step, event.wall_ns, self._began_ns, render(event)))


def _began_ns(log: Path, otherwise: int) -> int:
    """Return the wall time of the oldest event in the log (ns); `otherwise` if it is deleted meanwhile."""
    with suppress(LogError):
        return next((event.wall_ns for event in LogReader(log).events()), otherwise)
    return otherwise


def _answer(event: OffloadingEvent, began_ns: int) -> TailAnswer:
    named = named_by_fields(event)
    plans = (event.seq,) if isinstance(event, StorePlanned | LoadPlanned) else ()
    return TailAnswer(
        event=event.seq,
        step=event.step,
        wall_ns=event.wall_ns,
        after_start_ns=event.wall_ns - began_ns,
        kind=event.kind,
        text=render(event),
        requests=tuple(named.requests),
        transfers=(*plans, *named.transfers),
        worker=getattr(event, "worker", None),
        failed=is_failure(event),
    )
