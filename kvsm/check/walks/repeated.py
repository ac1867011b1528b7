"""Determinism (S11): the same actions in another process give the same log, byte for byte.

One process cannot show it: a set of strings keeps its order there, and so do objects that are sorted by
address. The other process has another hash seed, other addresses and a later clock. It reads the actions from
its standard input, and writes the events of its log to its standard output, both as msgpack.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import zip_longest
from random import Random
from typing import Any

import msgspec

from kvsm.check.walks.reduce import rerun
from kvsm.check.walks.targets import WalkCase, case_of
from kvsm.check.walks.walk import WalkedRun, WalkFailure, WorldRuns, random_of
from kvsm.check.worlds.world import Action, Finding, World
from kvsm.events import OffloadingEvent
from kvsm.properties import Property
from kvsm.system.stopping import IsOver, never

REPEATED_OF, REPEATED_PLACE = 100, 20
"""Of 100 runs, the one at this place is made again. Another process takes as long as several runs."""


class _Actions(msgspec.Struct, frozen=True):
    """What the other process does: these actions, in the world of a target with these options."""

    target: str
    options: dict[str, Any]
    actions: tuple[Action, ...]


class RepeatedRuns(WorldRuns):
    """Runs of kvsm's worlds. A share of them is repeated in another process.

    draw: draws the world of a run.
    """

    def __init__(self, draw: Callable[[Random], WalkCase], seed: int) -> None:
        super().__init__(self._make, seed)
        self._draw = draw

    def _make(self, random: Random) -> World:
        return self._draw(random).make()

    def run(self, number: int, is_over: IsOver = never) -> WalkedRun:
        done: list[Action] = []
        world, run = self.make(number, done, is_over)
        if run.failure is None and number % REPEATED_OF == REPEATED_PLACE and len(world.events):
            case = self._draw(random_of(self.seed, number))
            finding = differing_log(case, done, world.events)
            if finding is not None:
                return msgspec.structs.replace(run, failure=WalkFailure(number, tuple(done), finding))
        return run


def differing_log(
    case: WalkCase, actions: Sequence[Action], events: Sequence[OffloadingEvent] | None = None
) -> Finding | None:
    """Do the actions again in another process, and compare the logs. Returns the difference, if there is one.

    events: the log of these actions; None: do them in this process, too.
    """
    if not case.has_log:
        return None
    here = encoded(rerun(case.make, actions).world.events if events is None else events)
    there = _events_of_another_process(case, tuple(actions))
    for number, (one, other) in enumerate(zip_longest(here, there), 1):
        if one != other:
            message = (
                f"the same actions give other events in a process with another hash seed: event {number} is "
                f"{_told(one)} here, and {_told(other)} there"
            )
            return Finding(Property.DETERMINISM, message)
    return None


def encoded(events: Sequence[OffloadingEvent]) -> list[bytes]:
    """Return the bytes of each event, as in a log."""
    return list(map(msgspec.msgpack.encode, events))


def _told(event: bytes | None) -> str:
    return "missing" if event is None else str(msgspec.msgpack.decode(event))


def _events_of_another_process(case: WalkCase, actions: tuple[Action, ...]) -> list[bytes]:
    """Return the encoded events of these actions in a process with another hash seed."""
    asked = _Actions(case.target, msgspec.to_builtins(case.options), actions)
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    answer = subprocess.run(
        [sys.executable, "-m", "kvsm.check.walks.repeated"],
        input=msgspec.msgpack.encode(asked),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": seed},
        check=True,
        # Ctrl-C ends the walk after this run, and not this process.
        start_new_session=True,
    )
    return msgspec.msgpack.decode(answer.stdout, type=list[bytes])


def main() -> None:
    """Do the actions on standard input, and write the events to standard output."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # The walk may end first. Then nobody waits for the events.
    asked = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Actions)
    outcome = rerun(case_of(asked.target, asked.options).make, asked.actions)
    sys.stdout.buffer.write(msgspec.msgpack.encode(encoded(outcome.world.events)))


if __name__ == "__main__":
    main()
