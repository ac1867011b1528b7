"""Walks with `load_only_if_faster`: each declined hit is recomputed from the log (`declined_hits`)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from planted_bugs import plant

from kvsm.check.walks.walk import walk
from kvsm.check.worlds.layer_options import draw_layers
from kvsm.check.worlds.timed_serving import TimedServing
from kvsm.core.ledger import expected_times, restart, times
from kvsm.core.offloader import slow_hits
from kvsm.core.scheduler.scheduler import OffloadScheduler
from kvsm.events import SlowHitFound
from kvsm.properties import Property

RUNS = 10
"""Walks of the code without a bug."""


def world_of(random: Random) -> TimedServing:
    return TimedServing(draw_layers(random))


def test_walks_without_a_bug_break_nothing() -> None:
    made: list[TimedServing] = []

    def make(random: Random) -> TimedServing:
        made.append(world_of(random))
        return made[-1]

    assert walk(make, 1, runs=RUNS).failure is None
    found = [event for world in made for event in world.events if isinstance(event, SlowHitFound)]
    assert any(event.declined for event in found), "a walk that declines nothing shows nothing"
    assert any(event.blocks_ahead for event in found)


def ignores_loads_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, expected_times.expected, "(ahead + blocks)", "blocks")


def keeps_the_first_times(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, times.times_measured, "ledger.times = times", "ledger.times = ledger.times or times")


def keeps_the_times_of_the_last_process(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, restart.restarted, "ledger.times, ledger.declined_hits = None, 0", "pass")


def declines_whatever_was_declined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, OffloadScheduler._declines, "tracked.declined = None", "pass")


def declines_without_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = "core.declines(tracked.name, blocks, tokens)"
    plant(monkeypatch, OffloadScheduler._declines, decided, "True")


def never_loads_a_slow_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (times, slow_hits):
        monkeypatch.setattr(module, "LOADED_EVERY", 1000)


def loads_a_slow_hit_without_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, OffloadScheduler._declines, "return tracked.declined is True", "return False")


def waits_for_a_hit_that_it_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        OffloadScheduler.get_num_new_matched_tokens,
        "\n    if self._declines(tracked, len(slots), end):",
        "\n    if core.in_flight(slots) is None and self._declines(tracked, len(slots), end):",
    )


QUICK = (declines_without_an_event,)
SLOW = (
    ignores_loads_in_flight,
    waits_for_a_hit_that_it_declines,
    keeps_the_first_times,
    keeps_the_times_of_the_last_process,
    declines_whatever_was_declined_once,
    loads_a_slow_hit_without_an_event,
    never_loads_a_slow_hit,
)


@pytest.mark.parametrize(
    ("bug", "seed"),
    [*((bug, 6) for bug in QUICK), *(pytest.param(bug, 1, marks=pytest.mark.slow) for bug in SLOW)],
)
def test_a_wrong_decision_is_found(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[..., None], seed: int
) -> None:
    """The seeds find each bug early."""
    bug(monkeypatch)
    failure = walk(world_of, seed, runs=80).failure
    assert failure is not None
    assert failure.finding.property is Property.STORED_SO_SERVED
