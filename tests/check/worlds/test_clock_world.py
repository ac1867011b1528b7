"""The clock world accepts the shipped code, and finds code that trusts a clock which goes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvsm.check.walks.targets import draw_case
from kvsm.check.walks.walk import walk
from kvsm.check.worlds.clock_world import (
    _JUMPS_S,
    _PASSES_MS,
    _SETS_MS,
    SYNC_S,
    TIMEOUT_S,
    ClockWorld,
    FaultyClocks,
    FlightBook,
    _numbers,
)
from kvsm.check.worlds.serving_world import RequestSpec, ServingOptions
from kvsm.check.worlds.world import Action
from kvsm.core.log.syncing import Syncing
from kvsm.errors import PropertyBroken
from kvsm.events import Direction
from kvsm.explain import metrics
from kvsm.explain.metric_places import HistogramValue
from kvsm.explain.tables.open_rows import RequestInProgress
from kvsm.properties import Property
from kvsm.tiers.disk.health import LONGEST_PAUSE_S, HealthWatch
from kvsm.tiers.hand_over.leases import LeaseTable

ARRIVE, STEP, BACK, LONG, SHORT = ("arrive",), ("step",), ("back", 3600), ("pass", 61_000), ("pass", 150)
STEPS = (STEP, STEP, STEP)
COPYING = (ARRIVE, *STEPS, BACK, LONG, *STEPS)
LEASED = (ARRIVE, ("offer",), BACK, LONG, STEP)
FAILING = (*[("disk_store", 0)] * 3, BACK, LONG, ("disk_store", 0))
# Far ahead, far back and ahead again: the clock is where it was when the pause began.
RETURNED = (
    *[("disk_store", 0)] * 3,
    *[(name, 100_000) for name in ("ahead", "back", "back", "ahead")],
    ("disk_store", 0),
)
LOGGED = (ARRIVE, STEP, BACK, SHORT, STEP)


def run(*actions: Action) -> None:
    """Do these actions, then come to rest."""
    request = RequestSpec(tuple(range(9)), 9)
    world = ClockWorld(
        ServingOptions(
            requests=(request, request),
            device_blocks=12,
            slots=8,
            workers=1,
            chunk_tokens=4,
            defer_ticks=3,
            prefix_cache=False,
        )
    )
    for action in actions:
        assert world.do(action), action
    while (winding := world.wind_down()) is not None:
        world.do(winding)
    world.check()


@pytest.mark.parametrize("actions", [COPYING, LEASED, FAILING, RETURNED, LOGGED])
def test_the_shipped_code_keeps_its_bounds(actions: tuple[Action, ...]) -> None:
    run(*actions)


def found(*actions: Action) -> str:
    with pytest.raises(PropertyBroken) as caught:
        run(*actions)
    assert caught.value.property in (Property.PROGRESS, Property.EVENTS_ARE_STATE)
    return caught.value.message


def unchanged(clock: Callable[[], float]) -> Callable[[], float]:
    return clock


def test_a_deadline_that_goes_back_with_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsm.vllm.deadlines.SteadyClock", unchanged)
    assert found(*COPYING) == "the oldest store is overdue for 2 steps"


def test_a_lease_that_goes_back_with_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsm.tiers.hand_over.leases.SteadyClock", unchanged)
    assert found(*LEASED) == "lease 0 has not ended, 1 s after its time"


def test_a_pause_that_goes_back_with_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HealthWatch, "_left_s", lambda watch, now: max(0.0, watch._probe_at - now))
    assert "a pause of the disk lasts 61 s" in found(*FAILING)


def test_a_log_that_is_synced_by_a_clock_that_went_back(monkeypatch: pytest.MonkeyPatch) -> None:
    in_time = Syncing.sync_in_time

    def late(syncing: Syncing, place: Any, now: int, opening: Any) -> None:
        if now >= place.segment.synced.at_ns:
            in_time(syncing, place, now, opening)

    monkeypatch.setattr(Syncing, "sync_in_time", late)
    assert found(*LOGGED).endswith("was flushed 0.15 s ago, and is not durable")


def late_flights(ended: bool = False) -> tuple[FaultyClocks, FlightBook]:
    """A store that has been in flight for 61 s; an earlier store has ended just now, or none has."""
    clocks = FaultyClocks()
    flights = FlightBook(clocks)
    for transfer in (1, 2) if ended else (2,):
        flights.begin(transfer, Direction.STORE)
    clocks.seen_s += 61
    if ended:
        flights.end(1)
    return clocks, flights


def test_a_copy_that_is_overdue_for_a_second_step_is_reported() -> None:
    _, flights = late_flights()
    flights.check([])
    with pytest.raises(PropertyBroken, match="the oldest store is overdue for 2 steps"):
        flights.check([])


def test_an_end_restarts_the_time_of_the_copies_behind_it() -> None:
    clocks, flights = late_flights(ended=True)
    for _ in range(3):
        flights.check([])
    with pytest.raises(PropertyBroken, match="transfer 2 is given up after 0 s"):
        flights.check([2])
    flights.begin(2, Direction.STORE)
    clocks.seen_s += 61
    flights.check([2])


def test_no_copy_is_late_if_none_is_in_flight() -> None:
    """Time that passes between two copies is not counted for the next one."""
    clocks, flights = late_flights()
    flights.end(2)
    for _ in range(3):
        clocks.seen_s += 61
        flights.check([])


def test_a_disk_that_will_not_be_tried_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HealthWatch, "_left_s", lambda *_: 61.0)
    assert found(*[("disk_store", 0)] * 4) == "the disk will be tried in 61 s"


def test_a_lease_that_ends_before_its_time_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsm.check.worlds.clock_world.LeaseTable", lambda _, now: LeaseTable(30.0, now))
    assert found(ARRIVE, ("offer",), ("pass", 20_000), ("pass", 20_000), STEP) == (
        "lease 0 expires 20 s too early"
    )


def test_each_clock_may_move_either_way_and_each_lease_may_be_claimed() -> None:
    world = ClockWorld(draw_case("clocks", Random(1)).options)
    assert world.do(("offer",))
    actions = {*world._clock_actions()}
    assert {("disk_store", 0), ("disk_store", 1), ("claim", 0), ("offer",)} <= actions
    assert {(name, seconds) for name in ("back", "ahead") for seconds in _JUMPS_S} <= actions
    assert {("pass", ms) for ms in _PASSES_MS} | {("wall", -ms) for ms in _SETS_MS} <= actions
    assert {("wall", ms) for ms in _SETS_MS} <= actions


@pytest.mark.parametrize(
    ("bound_ms", "tried"),
    [(SYNC_S * 1000, _PASSES_MS), (TIMEOUT_S * 1000, _PASSES_MS), (LONGEST_PAUSE_S, _JUMPS_S)],
)
def test_times_on_both_sides_of_each_bound_are_tried(bound_ms: float, tried: Sequence[int]) -> None:
    assert min(tried) < bound_ms < max(tried)


def test_each_number_of_the_metrics_is_watched() -> None:
    seconds = HistogramValue((1.0,), (1, 2), 0.5)
    values = {"first": 1, "ended": {"store": 2, "load": 3}, "seconds": seconds, "text": "no number"}
    assert dict(_numbers(values)) == {
        "first": 1,
        "ended store": 2,
        "ended load": 3,
        "seconds sum": 0.5,
        "seconds 0": 1,
        "seconds 1": 2,
    }


def test_each_request_of_the_log_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr("kvsm.check.worlds.clock_readers.explain_request", lambda _, name: asked.append(name))
    run(ARRIVE, STEP, ARRIVE, STEP)
    assert len(set(asked)) == 2


def test_a_span_that_ends_before_it_begins_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    span = SimpleNamespace(name="wait", start_ns=7, end_ns=5)
    monkeypatch.setattr("kvsm.check.worlds.clock_readers.request_spans", lambda _: [[span]])
    assert found(ARRIVE, STEP) == "the span wait takes -2 ns"


# The second request waits for a store of the first one, and meanwhile the wall clock is set back.
WAITING = (ARRIVE, STEP, STEP, ARRIVE, STEP, ("wall", -500))


def test_a_negative_duration_in_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestInProgress, "wait_ns", lambda row, until: until - row.since.wall_ns)
    assert "takes -5000" in found(*WAITING)


def test_a_counter_that_decreases(monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(buckets: metrics.Buckets, grown: dict[int, float], _: float) -> None:
        grown[buckets.sum] -= buckets is metrics._SECONDS_WAITED

    monkeypatch.setattr(metrics.Buckets, "observe", observe)
    assert "the counter deferral_seconds sum decreases" in found(*WAITING)


def test_random_walks_find_nothing() -> None:
    assert walk(lambda random: draw_case("clocks", random).make(), 5, runs=2).failure is None
