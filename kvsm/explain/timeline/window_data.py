"""Read a window of an opened log once, for both the page and the trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvsm.core.log.trust import Trust
from kvsm.explain.story.window import Window
from kvsm.explain.tables.opened import OpenedLog
from kvsm.explain.timeline.columns import WindowTables, read_tables
from kvsm.explain.timeline.page import PageHead
from kvsm.explain.timeline.stream import EventStream, read_stream

MOST_EVENTS = 100_000
"""Default for the most events on a page. The page was measured with this number (docs/incidents.md)."""


class Timeline(NamedTuple):
    """A window of a log: its description, its events, and the rows of its tables.

    left_out: what was left out because there is too much, as lines. The head's notes include them.
    """

    head: PageHead
    stream: EventStream
    tables: WindowTables
    left_out: list[str]


def read_timeline(
    log: OpenedLog,
    window: Window,
    trust: Trust,
    most_events: int = MOST_EVENTS,
    progress: Callable[[int], None] | None = None,
) -> Timeline:
    """Read a window of a log, at most its last `most_events` events.

    trust: the limits with which the log was opened.
    progress: called from time to time with the number of events read so far.

    Raises `LogError` if the log has no event in the window.
    """
    first = max(log.first, window.first or log.first)
    last = min(log.last, window.last or log.last)
    left_out = []
    if last - first >= most_events:
        begin = last - most_events + 1
        left_out.append(
            f"events {first:,} to {begin - 1:,} are left out: the timeline has the last {most_events:,} of "
            "the window; --since and --until choose others, --events takes more"
        )
        first = begin
    with trust.guarded(log.directory):
        stream = read_stream(log.directory, trust, first, last, progress)
    if log.clock_jumps:
        stream.at = [at + log.shift_ns(event) for at, event in zip(stream.at, stream.number, strict=True)]
    tables = read_tables(log, first, last)
    left_out += tables.left_out
    stopped = [] if log.stopped is None else [f"the log cannot be read further: {log.stopped}"]
    notes = [*log.condition.notes(), *stopped, *left_out]
    head = PageHead(str(log.directory), log.began_ns, (log.first, log.last), notes)
    return Timeline(head, stream, tables, left_out)
