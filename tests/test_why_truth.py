"""What kvsm says of every miss and every wait of a whole run, against a reference that saw it from outside.

The runs are random walks of the core's world and of the serving world: all store modes, hybrid groups,
preemptions, resets, failures, losses, chunks. `fate_reference` keeps plain books of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import NamedTuple

import msgspec
from fate_reference import NEVER, OutsideBooks, Reason

from kvsm import events as ev
from kvsm.analysis.rows import Gone
from kvsm.checker.targets import TARGETS
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.ledger import Ledger
from kvsm.replay.concern import concern
from kvsm.replay.fates import Fates
from kvsm.replay.fold import Moment
from kvsm.replay.render import render_owners
from kvsm.worlds.core_options import draw_options
from kvsm.worlds.core_world import CoreWorld
from kvsm.worlds.serving import ServingOptions, ServingWorld

CORE_RUNS, SERVING_RUNS = range(16), range(40)
ACTIONS = 900


class Run(NamedTuple):
    """A whole run: its events, and the books that were kept of it from outside."""

    name: str
    config: OffloadConfig
    events: Sequence[OffloadingEvent]
    books: OutsideBooks


def core_run(seed: int, actions: int = ACTIONS) -> Run:
    """Any calls of the core, sensible or not."""
    random = Random(seed)
    world = CoreWorld(draw_options(random))
    books = OutsideBooks(world.core, world.events)
    for _ in range(actions):
        world.do(world.draw(random))
    return Run(f"core {seed}", world.core.config, world.events, books)


def serving_run(seed: int, actions: int = ACTIONS) -> Run:
    """A small engine with a few dozen requests and every disturbance."""
    random = Random(seed)
    options = TARGETS["serving"].draw(random)
    assert isinstance(options, ServingOptions)
    options = msgspec.structs.replace(options, transfer_ticks=random.choice((0, 0, 4)))
    world = ServingWorld(options)
    books = OutsideBooks(world.engine.core, world.engine.log)
    for _ in range(actions):
        action = world.draw(random)
        if action == ("step",) and not world.may_step():
            break
        world.do(action)
    return Run(f"serving {seed}", world.engine.core.config, world.engine.log, books)


@cache
def runs() -> tuple[Run, ...]:
    """The runs that all tests of this file look at."""
    return *map(core_run, CORE_RUNS), *map(serving_run, SERVING_RUNS)


def misses(run: Run) -> list[tuple[int, Reason]]:
    """The event of each recorded answer that names a missed key, and why that key could not be read."""
    return [(one.event, one.reason) for one in run.books.lookups if one.reason is not None]


def test_the_runs_meet_every_reason() -> None:
    """A reason that no run meets would be checked by nothing."""
    met = Counter((one.why, one.before is not None) for run in runs() for _, one in misses(run))
    every = {(why, False) for why in Gone if why is not Gone.BEFORE_LOG}
    assert every | {(Gone.SKIPPED, True)} == set(met), met


# `kvsm show`.

TOLD = {
    Gone.NEVER_STORED: "never stored",
    Gone.IN_FLIGHT: "store {transfer} of {requests} is still in flight",
    Gone.EVICTED: "evicted at event {at} to make room for store {transfer} of {requests}",
    Gone.RESET: "reset at event {at}",
    Gone.STORE_FAILED: "store {transfer} of {requests} failed at event {at}",
    Gone.LOAD_FAILED: "load {transfer} of {requests} failed at event {at}",
    Gone.CANCELLED: "store {transfer} of {requests} was cancelled at event {at}",
    Gone.LOST: "{transfer} of {requests} was lost at event {at}",
}
"""How the story of a request says why a key was missed."""


def told_by_fates(run: Run) -> dict[int, str]:
    """What `Fates` says at each lookup that missed a key, by event."""
    ledger, fates, told = Ledger(run.config), Fates(lambda _: True), {}
    for event, following in zip(run.events, [*run.events[1:], None]):
        moment = Moment(ledger, event, following)
        found = concern(ledger, event)
        if isinstance(event, ev.HitMatched) and event.missed is not None:
            told[event.seq] = fates.why(ledger, event.missed)
        fates.before(moment, found)
        fates.after(moment, ledger.apply(event))
    return told


def must_be_told(reason: Reason) -> tuple[str, list[str]]:
    """(why the key is gone, in words; if it was offered and skipped since, one of these must be told too)"""
    gone = (reason.before or NEVER) if reason.why is Gone.SKIPPED else reason
    requests = render_owners([(name, 1) for name in gone.requests])
    text = TOLD[gone.why].format(at=gone.at and gone.at[1], transfer=gone.transfer, requests=requests)
    if reason.why is not Gone.SKIPPED or reason.at is None:
        return text, []
    first, last = reason.at
    return text, [f"offered at event {n} and skipped ({reason.skip})" for n in range(first, last + 1)]


def test_show_tells_why_each_key_was_missed() -> None:
    """For every miss of every run: the cause, its event, the transfer behind it and whose that was."""
    for run in runs():
        told = told_by_fates(run)
        reasons = dict(misses(run))
        assert told.keys() == reasons.keys(), run.name
        for event, reason in reasons.items():
            text, skipped = must_be_told(reason)
            where = f"{run.name}, event {event}: {told[event]!r}, and it was {reason}"
            assert text in told[event], where
            assert any(one in told[event] for one in skipped) == ("skipped" in told[event]), where
            assert bool(skipped) == ("skipped" in told[event]), where
