"""A refutation as a story: numbered steps, what each step changed, and why the end is wrong.

The actions are repeated on the model, and the state is described before and after each step. Only changes
are shown. The story ends with the broken property, what the check found, and the last step that changed a
thing named by the check: look there first.

If the model runs the real offload core, its events can be written as a log. `kvsm show`, `kvsm verify` and
`kvsm replay` read this log even if it ends in a broken state.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvsm.check.explore.model import Model, Refutation
from kvsm.check.worlds.world import Finding
from kvsm.core.log import RUN_BYTES, LogWriter, WholeState
from kvsm.errors import LogError
from kvsm.events import LogOpened, OffloadingEvent
from kvsm.system.printable import printable

Described = dict[str, str]
"""The things of a state by name, each as text. A thing that does not exist is absent."""


class Describable(Model[Any, Any], Protocol):
    """A model whose states can be described."""

    def describe(self, state: Any) -> Described: ...


class StateChange(msgspec.Struct, frozen=True):
    """A thing of a state before and after a step. An empty text means that it did not exist."""

    thing: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.thing}: {self.before or 'nothing'} -> {self.after or 'gone'}"


class CounterexampleStep(msgspec.Struct, frozen=True):
    """One action with what it changed. number: from 1."""

    number: int
    action: str
    changes: tuple[StateChange, ...]


class Counterexample(msgspec.Struct, frozen=True):
    """A refutation step by step.

    circle: the number of the step that enters an endless cycle; 0 if none does.
    because: a sentence that names the step to look at first.
    """

    model: str
    bounds: str
    finding: Finding
    steps: tuple[CounterexampleStep, ...]
    circle: int
    because: str


def retell(model: Describable, refutation: Refutation) -> Counterexample:
    """Repeat the actions of a refutation and describe each step."""
    state = list(model.initial())[refutation.start]
    seen, steps = model.describe(state), []
    for number, action in enumerate(refutation.path, 1):
        # The last action may raise, because it breaks a check. A live state then shows what the action had
        # changed so far, if the state can still be described.
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
    """The last step that changed a thing named in the finding."""
    for step in reversed(steps):
        for change in step.changes:
            if re.search(rf"\b{re.escape(change.thing)}\b", finding.message):
                return f"step {step.number} ({step.action}) was the last to change {change}"
    return f"step {len(steps)} ({steps[-1].action}) led there" if steps else "the initial state is wrong"


def render(told: Counterexample) -> str:
    """The story as lines for people. No name in it breaks a line."""
    lines = [f"{told.model}: {told.finding.property} is broken, in {len(told.steps)} steps"]
    lines.append(f"within {told.bounds}")
    width = len(str(len(told.steps)))
    for step in told.steps:
        lines.append(f"{step.number:>{width + 2}}. {step.action}")
        lines += [f"{'':{width + 4}}{change}" for change in step.changes]
    if told.circle:
        lines.append(f"and again from step {told.circle} on, endlessly")
    lines += [f"broken: {told.finding}", f"because: {told.because}"]
    return "\n".join(map(printable, lines))


def save_log(events: Sequence[OffloadingEvent], directory: Path) -> None:
    """Write the events of one core as a log. Raises `LogError` if that is impossible."""
    if not events or not isinstance(events[0], LogOpened):
        raise LogError(f"{directory}: no log: these are not the events of a core from its start")
    # One segment, because a second one would need a snapshot of a state that may be broken. The events decide
    # the clock and the run id, so that the same finding gives the same log, byte for byte.
    with LogWriter(
        directory,
        config=events[0].config,
        snapshot=WholeState,
        durability="none",
        segment_bytes=1 << 40,
        clock=lambda: events[-1].wall_ns,
        run=blake2b(msgspec.msgpack.encode(list(events)), digest_size=RUN_BYTES).digest(),
    ) as log:
        for event in events:
            log.append(event)
