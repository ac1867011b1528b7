"""Whatever consumes events handles every kind of event; a message here names the file that does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from replay_life import CONFIGS, OPERATIONS, Life, Operations
from test_core_world import walked

from kvsm.checker.walk import random_of
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.ids import to_list
from kvsm.ledger import Ledger
from kvsm.replay.concern import concern
from kvsm.worlds.core import draw_options

# What an event concerns.

State = dict[str, dict[Any, object]]
"""Sort of thing -> thing -> all that the ledger knows of it."""


def state_of(ledger: Ledger) -> State:
    held = {slot: key for key, slot in ledger.index.items()}
    brought, stale = ledger.provenance.brought, ledger.provenance.stale
    return {
        "slots": {
            slot: (word, ledger.generation[slot], held.get(slot))
            for slot, word in enumerate(ledger.blocks.words)
        },
        "device_blocks": {
            block: (word, brought.get(block), stale.get(block))
            for block, word in enumerate(ledger.leases.words)
        },
        "transfers": {
            id: (one.word, one.since, one.reported, one.flush) for id, one in ledger.transfers.items()
        },
        "requests": {
            name: (one.word, to_list(one.pins), one.awaits, one.patience, one.load, one.settled, one.offered)
            for name, one in ledger.requests.items()
        },
    }


def changed(before: State, after: State) -> dict[str, set[Any]]:
    """The things of each sort that are new, gone, or no longer as they were."""
    return {
        sort: {
            thing
            for thing in before[sort].keys() | after[sort].keys()
            if before[sort].get(thing) != after[sort].get(thing)
        }
        for sort in before
    }


def assert_concern_names_every_change(config: OffloadConfig, events: list[OffloadingEvent]) -> None:
    ledger = Ledger(config)
    before = state_of(ledger)
    for event in events:
        found = concern(ledger, event)
        ledger.apply(event)
        after = state_of(ledger)
        for sort, things in changed(before, after).items():
            left_out = things - set(getattr(found, sort))
            assert not left_out, f"{event} changes {sort} {left_out}, and concern() does not say so"
        before = after


@settings(deadline=None)
@given(OPERATIONS, CONFIGS)
def test_what_an_event_changes_it_concerns(operations: Operations, config: dict[str, Any]) -> None:
    """Else `kvsm show` leaves the event out of a life that it changed."""
    life = Life(**config).drive(operations).drain()
    assert_concern_names_every_change(life.config, life.events)


@pytest.mark.parametrize("run", range(12))
def test_what_an_event_changes_it_concerns_in_the_world_of_the_core(run: int) -> None:
    """The same over random walks of the core's world, which meets every kind of event."""
    world, _ = walked(draw_options(random_of(3, run)), run, 600)
    assert_concern_names_every_change(world.events[0].config, world.events)
