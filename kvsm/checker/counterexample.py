"""A refutation as a story: numbered steps, each with what it changed, and why the end is wrong.

The actions are done again on the model, and the state is described before and after each. A thing that stays
as it is, is not told again. At the end stand the property, what the check said of it, and the last step that
changed a thing which the check names: that is where to look first.

If the model runs the real offload core, its events are written as a log that `kvsm show`, `kvsm verify` and
`kvsm replay` read, even if it ends in a state that is broken.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvsm.checker.model import Model, Refutation
from kvsm.errors import LogError
from kvsm.events import LogOpened, OffloadingEvent
from kvsm.log import LogWriter
from kvsm.worlds.world import Finding

Described = dict[str, str]
"""Each thing of a state by its name, with what is to be said of it. What is absent is nothing yet."""


class Describable(Model[Any, Any], Protocol):
    """A model whose states can be told."""

    def describe(self, state: Any) -> Described: ...


class StateChange(msgspec.Struct, frozen=True):
    """A thing of a state, before and after a step; empty where there was, or is, none."""

    thing: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.thing}: {self.before or 'nothing'} -> {self.after or 'gone'}"


class CounterexampleStep(msgspec.Struct, frozen=True):
    """number: from 1."""

    number: int
    action: str
    changes: tuple[StateChange, ...]


class Counterexample(msgspec.Struct, frozen=True):
    """circle: the number of the step with which it begins to go round for ever; 0 if it does not."""

    model: str
    bounds: str
    finding: Finding
    steps: tuple[CounterexampleStep, ...]
    circle: int
    because: str


def retell(model: Describable, refutation: Refutation) -> Counterexample:
    """Do its actions again."""
    state = list(model.initial())[refutation.start]
    seen, steps = model.describe(state), []
    for number, action in enumerate(refutation.path, 1):
        # The last action may raise: it is what is broken. A live state shows how far it has come by then,
        # as far as it can still be described.
        after = None
        try:
            after = model.next(state, action)
        except Exception:
            if number < len(refutation.path):
                raise
        state, before = state if after is None else after, seen
        with suppress(Exception):
            seen = model.describe(state)
        steps.append(CounterexampleStep(number, action_text(action), _changes(before, seen)))
    circle = refutation.circle + 1
    because = _because(refutation.finding, steps)
    return Counterexample(model.name, model.bounds, refutation.finding, tuple(steps), circle, because)


def action_text(action: Any) -> str:
    """An action for people: `start 0 1`."""
    return " ".join(map(str, action)) if isinstance(action, tuple) else str(action)


def _changes(before: Described, after: Described) -> tuple[StateChange, ...]:
    things = [*before, *(thing for thing in after if thing not in before)]
    pairs = ((thing, before.get(thing, ""), after.get(thing, "")) for thing in things)
    return tuple(StateChange(*pair) for pair in pairs if pair[1] != pair[2])


def _because(finding: Finding, steps: Sequence[CounterexampleStep]) -> str:
    """The last step that changed a thing which is named in the finding."""
    for step in reversed(steps):
        for change in step.changes:
            if re.search(rf"\b{re.escape(change.thing)}\b", finding.message):
                return f"step {step.number} ({step.action}) was the last to change {change}"
    return f"step {len(steps)} ({steps[-1].action}) led there" if steps else "it is so from the start"


def render(told: Counterexample) -> str:
    """As lines for people."""
    lines = [f"{told.model}: {told.finding.property} is broken, in {len(told.steps)} steps"]
    lines.append(f"within {told.bounds}")
    width = len(str(len(told.steps)))
    for step in told.steps:
        lines.append(f"{step.number:>{width + 2}}. {step.action}")
        lines += [f"{'':{width + 4}}{change}" for change in step.changes]
    if told.circle:
        lines.append(f"and from step {told.circle} on again, for ever")
    lines += [f"broken: {told.finding}", f"because: {told.because}"]
    return "\n".join(lines)


def save_log(events: Sequence[OffloadingEvent], directory: Path) -> None:
    """Write events of one core as a log. Raises `LogError` if there are none, or the directory is in use."""
    if not events or not isinstance(events[0], LogOpened):
        raise LogError(f"{directory}: no log, for these are not the events of a core from its start on")
    # One segment: a later one would need a snapshot of a state that may be broken. The clock is that of the
    # last event: the same finding gives the same log, byte for byte.
    with LogWriter(
        directory,
        config=events[0].config,
        snapshot=bytes,
        durability="none",
        segment_bytes=1 << 40,
        clock=lambda: events[-1].wall_ns,
    ) as log:
        for event in events:
            log.append(event)
