"""`follow` says what an event changed. It is compared with the whole ledger before and after the event."""

from __future__ import annotations

from typing import Any

import pytest
from core_walks import walked
from hypothesis import given, settings
from replay_life import CONFIGS, OPERATIONS, Life, Operations

from examples import examples
from kvsm.check.walks.walk import random_of
from kvsm.check.worlds.core_options import draw_options
from kvsm.core.ledger import Ledger, follow
from kvsm.core.ledger.snapshot import snapshot
from kvsm.errors import InvalidEvent
from kvsm.events import OffloadConfig, OffloadingEvent, StepEnded
from kvsm.states.request import RequestState
from kvsm.states.transfer import TransferState


def assert_changes_are_all(config: OffloadConfig, events: list[OffloadingEvent]) -> None:
    ledger = Ledger(config)
    for event in events:
        transfers = dict(ledger.transfers)
        states = {id: transfer.state for id, transfer in transfers.items()}
        requests = states_of_requests(ledger)
        changes = follow(ledger, event)
        after, after_requests = ledger.transfers, states_of_requests(ledger)
        assert ([] if changes.planned is None else [changes.planned.id]) == [
            id for id in after if id not in transfers
        ]
        assert sorted(changes.submitted) == [
            id
            for id, state in states.items()
            if state is TransferState.PLANNED and id in after and after[id].state is not state
        ]
        assert [transfer.id for transfer in changes.ended] == [id for id in transfers if id not in after]
        assert not {transfer.state for transfer in changes.ended} & LIVE
        moved = {
            name for name in requests | after_requests if requests.get(name) is not after_requests.get(name)
        }
        assert moved <= set(changes.requests)


LIVE = {TransferState.PLANNED, TransferState.SUBMITTED, TransferState.ABANDONED}


def states_of_requests(ledger: Ledger) -> dict[str, RequestState]:
    return {name: request.state for name, request in ledger.requests.items()}


@settings(deadline=None, max_examples=examples(60))
@given(OPERATIONS, CONFIGS)
def test_changes_are_all_that_an_event_changed(operations: Operations, config: dict[str, Any]) -> None:
    """A transfer that ends unseen would be in flight forever in a report."""
    life = Life(**config).drive(operations).drain()
    assert_changes_are_all(life.config, life.events)


@pytest.mark.parametrize("run", range(8))
def test_changes_are_all_in_the_world_of_the_core(run: int) -> None:
    """The same over random walks of the core's world, which meets every kind of event."""
    world, _ = walked(draw_options(random_of(4, run)), run, 500)
    assert_changes_are_all(world.events[0].config, world.events)


def test_an_event_that_cannot_follow_changes_nothing() -> None:
    """A refused event leaves no trace."""
    ledger = Ledger(OffloadConfig(host_blocks=2, device_blocks=2))
    before = snapshot(ledger)
    with pytest.raises(InvalidEvent, match="expected event 1"):
        follow(ledger, StepEnded(2, 0, 0))
    assert snapshot(ledger) == before
