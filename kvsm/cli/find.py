"""`kvsm find`: the events of a log that fit a pattern. It needs no torch, and does not fold the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.log_answers import leave
from kvsm.cli.log_options import json_option, log_argument, window_options
from kvsm.cli.output import Command, complain, say, say_json
from kvsm.core.log import LogReader
from kvsm.core.log.fold import condition_of, refuse_malformed
from kvsm.events import KINDS, OffloadingEvent
from kvsm.explain.pattern_search import Found, search
from kvsm.explain.patterns import GRAMMAR, EventPattern, PatternError, Thing, parse
from kvsm.explain.story.render import dated, render, render_ids, render_keys, render_requests
from kvsm.explain.story.times import duration
from kvsm.explain.story.window import LogPoint, Window, find_window
from kvsm.system.printable import printable


class FoundEvent(msgspec.Struct, frozen=True):
    """An event.

    event: its number.
    step: the engine's step.
    wall_ns: when it was written (ns since 1970, UTC).
    kind: its class.
    text: its fields as a line.
    """

    event: int
    step: int
    wall_ns: int
    kind: str
    text: str


class FindAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="kvsm.find/1"):
    """What `kvsm find --json` prints: one line for each event that fits.

    first: the event.
    second: the one that follows or precedes it; null with `not`, and if single events are looked for.
    thing: what was compared: transfer, request, key, slot or device_block; null: nothing.
    things: what both have in common or, with `not`, what the second one is missing for; keys in hex.
    cut: with `not`: the log begins or ends inside of the span, so the second event may be outside of the log.
    """

    first: FoundEvent
    second: FoundEvent | None
    thing: str | None
    things: tuple[str | int, ...]
    cut: bool


_EPILOG = "\n\n".join(
    [
        "\b\nThe query:\n" + "\n".join(f"  {line}" for line in GRAMMAR.splitlines()),
        "Two events belong together if they name the same thing. The query may say which ('same request'). "
        "If not, it is the first of these that both kinds name: transfer, request, key, slot, "
        "device_block. An event that plans a transfer names it. An event that names several things is "
        "looked at for each one.",
        "With 'not', an event near the end of LOG is told, too, if its span goes on behind the end.",
        "\b\nExamples:\n"
        '  kvsm find LOG "StorePlanned not followed by WorkerReported within 1000 events"\n'
        '  kvsm find LOG "WorkerReported(good = false, worker = 3)"\n'
        '  kvsm find LOG "HitMatched(#slots > 100) preceded by CacheReset same nothing within 2 s"\n'
        '  kvsm find LOG "StoreSkipped(reason = \\"pool full\\") followed by HitMatched same request"',
        "Kinds of events, described in kvsm/events.py: " + ", ".join(kind.__name__ for kind in KINDS) + ".",
    ]
)


@click.command(cls=Command, epilog=_EPILOG)
@log_argument()
@click.argument("query")
@window_options
@json_option
def find(log: Path, query: str, since: LogPoint | None, until: LogPoint | None, as_json: bool) -> None:
    """List the events of LOG that fit QUERY.

    QUERY names events, alone or by what follows or precedes them. Each event is shown with its wall time.
    With --json each line is a JSON object. Exits with 0 whether or not an event fits.
    """
    pattern = _parsed(query)
    reader = LogReader(log)
    window = find_window(reader, since, until)
    stream = _Stream(reader, window, pattern)
    found = 0
    for one in search(pattern, stream, whole=stream.whole):
        found += 1
        if as_json:
            say_json(_answer(pattern, one))
        else:
            say(*_told(pattern, one, stream))
    if not as_json:
        say(f"{found:,} found in {stream.events:,} events")
    leave(condition_of(reader))


def _parsed(query: str) -> EventPattern:
    """The pattern. A text that is none is shown with a mark under the wrong part."""
    try:
        return parse(query)
    except PatternError as error:
        before, wrong = (
            printable(error.text[: error.column]),
            printable(error.text[error.column : error.column + error.width]),
        )
        complain(str(error))
        complain(f"  {error.text}")
        complain(f"  {' ' * len(before)}{'^' * max(1, len(wrong))}")
        raise SystemExit(ExitCode.UNUSABLE) from None


class _Stream:
    """The events of a window, counted.

    whole: whether the log has no event before them.
    began_ns: wall time of the log's first event.
    last: the last event so far.
    """

    def __init__(self, reader: LogReader, window: Window, pattern: EventPattern) -> None:
        self._reader, self._window = reader, window
        self._kinds = pattern.first.kinds | (pattern.second.kinds if pattern.second else set())
        self.events = 0
        self.last: OffloadingEvent | None = None
        first = next(event for segment in reader.segments() for event in segment.events())
        self.began_ns = first.wall_ns
        self.whole = first.seq == 1 and (window.first is None or window.first == 1)

    def __iter__(self) -> Iterator[OffloadingEvent]:
        first, last = self._window
        for segment in self._reader.segments(first):
            for event in segment.events():
                if last is not None and event.seq > last:
                    return
                if first is None or event.seq >= first:
                    if type(event) in self._kinds:
                        refuse_malformed(event)
                    self.events += 1
                    self.last = event
                    yield event


def _answer(pattern: EventPattern, found: Found) -> FindAnswer:
    return FindAnswer(
        first=_event(found.first),
        second=None if found.second is None else _event(found.second),
        thing=None if pattern.thing is None else pattern.thing.name.lower(),
        things=tuple(one.hex() if isinstance(one, bytes) else one for one in found.things),
        cut=found.cut,
    )


def _event(event: OffloadingEvent) -> FoundEvent:
    return FoundEvent(event.seq, event.step, event.wall_ns, event.kind, render(event))


def _told(pattern: EventPattern, found: Found, stream: _Stream) -> Iterator[str]:
    first, second = found.first, found.second
    common = f"  [{_NAMED[pattern.thing](found.things)}]" if pattern.thing and found.things else ""
    if second is not None:
        yield _line(first, stream)
        events, steps = abs(second.seq - first.seq), abs(second.step - first.step)
        passed = duration(abs(second.wall_ns - first.wall_ns))
        side = "later" if second.seq > first.seq else "before"
        distance = f"{_counted(events, 'event')}, {_counted(steps, 'step')}, {passed} {side}"
        yield f"    {_line(second, stream)}{common}  ({distance})"
        return
    cut = ""
    if found.cut and stream.last is not None and stream.last.seq > first.seq:
        cut = f"  (LOG ends {_counted(stream.last.seq - first.seq, 'event')} later)"
    elif found.cut:
        cut = "  (the span reaches to outside of LOG)"
    yield f"{_line(first, stream)}{common}{cut}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _line(event: OffloadingEvent, stream: _Stream) -> str:
    return dated(event.seq, event.step, event.wall_ns, stream.began_ns, render(event))


_NAMED: dict[Thing, Callable[[Any], str]] = {
    Thing.TRANSFER: lambda ids: render_ids("transfer", ids),
    Thing.REQUEST: render_requests,
    Thing.KEY: render_keys,
    Thing.SLOT: lambda ids: render_ids("slot", ids),
    Thing.DEVICE_BLOCK: lambda ids: render_ids("device block", ids),
}
"""What two events have in common, in words."""
