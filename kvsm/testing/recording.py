"""Record the events of an offload core during a test, save them as a log, and show the lives of things in it.

A test may make hundreds of cores before it fails. Hypothesis runs the smallest failing example last. So the
`Recorder` that was made last has the relevant events, and the pytest plugin saves them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvsm.core.ledger import Ledger
from kvsm.core.log import LogReader, LogWriter, MemoryLog, WholeState
from kvsm.core.log.fold import walk
from kvsm.core.policies import POLICIES
from kvsm.errors import ConfigError, KvsmError
from kvsm.events import LogOpened, OffloadConfig, OffloadingEvent
from kvsm.explain.story import BlockLife, KeyLife, RequestLife, TransferLife, Trust, render, tell
from kvsm.explain.story.concern import concern

MOST_THINGS, MOST_LINES = 3, 12
"""Most life stories in a report, and most lines of each (the last ones)."""

Thing = BlockLife | KeyLife | RequestLife | TransferLife


class Recorder(MemoryLog):
    """A log in memory whose events the pytest plugin saves if the test fails."""

    def __init__(self) -> None:
        super().__init__()
        remember(self)


_latest: list[Sequence[OffloadingEvent]] = []
"""The events of the core that was made last, if any."""


def remember(events: Sequence[OffloadingEvent]) -> None:
    """Let the plugin save these events, and those that are added later, if the test fails."""
    _latest[:] = [events]


def remembered() -> Sequence[OffloadingEvent]:
    """The events of the core that was made last; empty if there is none."""
    return _latest[0] if _latest else ()


def forget() -> None:
    """Forget the remembered events, because a new test begins."""
    _latest.clear()


def save(events: Sequence[OffloadingEvent], directory: str | os.PathLike[str]) -> None:
    """Write events as a log that `kvsm show`, `kvsm replay` and `kvsm verify` read.

    events: from the first event of a core on.
    directory: made if absent; must be empty.

    Raises `LogError`.
    """
    # Only a second segment needs a snapshot, and this log has one segment.
    with LogWriter(directory, config=config_of(events), snapshot=WholeState, durability="none") as log:
        for event in events:
            log.append(event)


def event_lines(events: Iterable[OffloadingEvent]) -> Iterator[str]:
    """Yield one line for each event, in the words of `kvsm show`."""
    return (f"event {event.seq} step {event.step}: {render(event)}" for event in events)


def fold(events: Sequence[OffloadingEvent]) -> Ledger:
    """Fold events, from a core's first one on, to a ledger. Raises the error of a refused event."""
    ledger = Ledger(config_of(events))
    for event in events:
        ledger.apply(event)
    return ledger


def keep(directory: Path, message: str) -> list[str]:
    """Save the remembered events of a test that failed with `message`. Returns the lines of the report."""
    events = remembered()
    try:
        save(events, directory)
    except KvsmError as error:
        return [f"the events of this test could not be kept: {error}"]
    said = [f"{len(events)} events are in {directory}", f"$ kvsm verify {directory}{_allowance(events)}"]
    return said + story(directory, message)


def _allowance(events: Sequence[OffloadingEvent]) -> str:
    """The option that a reader of this log needs for its policy."""
    policy = config_of(events).policy
    return "" if policy in POLICIES else f" --allow-policy {policy}"


def config_of(events: Sequence[OffloadingEvent]) -> OffloadConfig:
    """The configuration of the core that made these events."""
    if not events or not isinstance(events[0], LogOpened):
        raise ConfigError("these events do not begin with LogOpened, the first event of a core")
    return events[0].config


def story(log: Path, message: str) -> list[str]:
    """The life stories of the slots, requests, keys and transfers that a message names, as in `kvsm show`.

    If the message names nothing that is in the log: of those that the last event concerns.
    """
    lines: list[str] = []
    # The test made this log: its policy and its sizes are trusted.
    config = LogReader(log).head.config
    trust = Trust((config.policy,), max(config.host_blocks, config.device_blocks))
    try:
        lives = _lives(log, _named(message), trust) or _lives(log, _last_concerned(log, trust), trust)
    except KvsmError as error:
        return [f"the log stops there: {error}"]
    for thing, life in lives[:MOST_THINGS]:
        lines.append(f"$ kvsm show {log} {_option(thing)}")
        lines += life[-MOST_LINES:]
    return lines


def _lives(log: Path, things: Sequence[Thing], trust: Trust) -> list[tuple[Thing, list[str]]]:
    lives = []
    for thing in things:
        lines = [line.told() for line in tell(log, thing, **trust._asdict())]
        if lines:
            lives.append((thing, lines))
    return lives


_NAMED = re.compile(
    r"(?<!device )\b(slot|block|transfer|store|load|request)s? ([\w.-]*\w)"
    r"|\bkeys? ([0-9a-f]{6,}(?:\.\.[0-9a-f]*)?)"
)


def _named(message: str) -> list[Thing]:
    """The things that a message names, each once."""
    things: dict[str, Thing] = {}
    for noun, name, key in _NAMED.findall(message):
        thing: Thing
        if key:
            thing = KeyLife(key)
        elif noun == "request":
            thing = RequestLife(name)
        elif not name.isdecimal():
            continue
        else:
            thing = BlockLife(int(name)) if noun in ("slot", "block") else TransferLife(int(name))
        things.setdefault(_option(thing), thing)
    return list(things.values())


def _last_concerned(log: Path, trust: Trust) -> list[Thing]:
    """The transfers, requests and slots that the last event with any of them concerns."""
    things: list[Thing] = []
    for ledger, event, _ in walk(LogReader(log), trust):
        found = concern(ledger, event)
        ledger.apply(event)
        concerned: list[Thing] = [
            *map(TransferLife, found.transfers),
            *map(RequestLife, found.requests),
            *map(BlockLife, found.slots),
        ]
        # An event may concern device blocks or keys only.
        things = concerned or things
    return things


def _option(thing: Thing) -> str:
    noun, _, name = str(thing).partition(" ")
    return f"--{'block' if noun == 'slot' else noun} {name}"
