"""The engine of the targets `serving` and `router` sees stores that are lost or never tried again."""

from __future__ import annotations

from random import Random

import pytest

from kvsm.check.walks.drawn_options import draw_routed, draw_serving
from kvsm.check.worlds.serving_world import EndingServing, RequestSpec, ServingOptions
from kvsm.core.scheduler.offers import OffersState
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

TWO = RequestSpec(tuple(range(5)), 2), RequestSpec(tuple(range(50, 55)), 9)


def run_to_rest(world: EndingServing) -> None:
    for _ in world.options.requests:
        world.do(("arrive",))
    while (action := world.wind_down()) is not None:
        world.do(action)


def one_slot() -> EndingServing:
    """The first request fills the host until its end. Meanwhile the chunk of the second one waits."""
    return EndingServing(
        ServingOptions(requests=TWO, slots=1, device_blocks=8, workers=1, checks_stores=True)
    )


def test_a_store_may_wait_for_room() -> None:
    run_to_rest(one_slot())


def test_a_waiting_store_that_is_never_tried_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the request it is offered again, so the host has it in the end."""
    monkeypatch.setattr(OffersState, "tries_again", lambda *_: False)
    with pytest.raises(PropertyBroken) as caught:
        run_to_rest(one_slot())
    assert caught.value.property is Property.STORED_ONCE
    assert caught.value.message.endswith("is not stored, and the host has room")


def test_the_targets_check_what_each_step_stores() -> None:
    """Not with a threshold: a chunk that is offered too seldom has no store."""
    for number in range(20):
        drawn = draw_serving(Random(number))
        assert drawn.checks_stores == (drawn.store_threshold == 1)
        assert draw_routed(Random(number)).checks_stores
