"""A request that is served fairly ends within a stated number of steps, in the targets with a small engine.

Each planted bug delays one request only as long as others are busy. So the world comes to rest within the
bound of its wind-down, and without these checks nothing is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvsm.check.worlds.fair_service import FairService
from kvsm.check.worlds.serving_world import EndingServing, RequestSpec, ServingOptions
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.world import Action
from kvsm.core.plan import WorkerReport
from kvsm.core.scheduler import OffloadScheduler, StepResults
from kvsm.core.scheduler.device_blocks import DeviceBlocks
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

LONG = RequestSpec(tuple(range(100, 108)), 9)
SHARED = RequestSpec(tuple(range(9)), 2)
STEP, ARRIVE, COPY, REPORT = ("step",), ("arrive",), ("copy", 0, 0), ("report", 0)


def world(*requests: RequestSpec, device_blocks: int = 16, defer_ticks: int = 2) -> EndingServing:
    return EndingServing(
        ServingOptions(
            requests=requests,
            device_blocks=device_blocks,
            slots=16,
            workers=1,
            prefix_cache=False,
            chunk_tokens=4,
            defer_ticks=defer_ticks,
        )
    )


def run(tried: EndingServing, *actions: Action) -> None:
    """Do these actions, then come to rest."""
    for action in actions:
        assert tried.do(action), action
    while (winding := tried.wind_down()) is not None:
        tried.do(winding)
    tried.check()


def assert_only_this_check_finds(
    make: Callable[[], EndingServing], actions: tuple[Action, ...], message: str
) -> None:
    with pytest.raises(PropertyBroken) as caught:
        run(make(), *actions)
    assert caught.value.property is Property.PROGRESS
    assert message in caught.value.message
    with pytest.MonkeyPatch.context() as without:
        without.setattr(FairService, "check", lambda *_: None)
        without.setattr(FairService, "note_failed", lambda *_: None)
        run(make(), *actions)


# The second request shares its prompt with the first one, whose store stays under way.
WAITING = (ARRIVE, STEP, STEP, ARRIVE, STEP, STEP, STEP, STEP)


def test_a_request_may_be_told_to_wait_in_as_many_steps_as_it_has_ticks() -> None:
    tried = world(SHARED, SHARED)
    run(tried, *WAITING)


def test_a_request_that_is_told_to_wait_for_ever_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = OffloadScheduler.get_num_new_matched_tokens

    def waits(scheduler: OffloadScheduler, request: Any, local: int) -> tuple[int | None, bool]:
        if request.request_id == "r1" and scheduler.offloader.ledger.transfers:
            return None, False
        return ask(scheduler, request, local)

    monkeypatch.setattr(OffloadScheduler, "get_num_new_matched_tokens", waits)
    monkeypatch.setattr("kvsm.check.worlds.small_engine.check_answer", lambda *_: None)
    message = "request r1 is told to wait in 3 steps, and may wait for 2 ticks"
    assert_only_this_check_finds(lambda: world(SHARED, SHARED), WAITING, message)


def test_a_deferred_request_that_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time to wait is not over before the copy ends."""
    monkeypatch.setattr("kvsm.core.offloader.matching.may_defer", lambda *_: True)
    monkeypatch.setattr("kvsm.check.worlds.small_engine.check_answer", lambda *_: None)
    message = "request r1 is told to wait in 3 steps, and may wait for 2 ticks"
    assert_only_this_check_finds(lambda: world(SHARED, SHARED), WAITING, message)


# The first request is stored. The next one with its prompt loads it, while a third one is stored.
STORED = (ARRIVE, STEP, STEP, COPY, REPORT, STEP, COPY, REPORT, STEP, STEP)
LOADING = (*STORED, ARRIVE, ARRIVE, STEP, STEP, COPY, REPORT, STEP, STEP)


def test_a_load_whose_end_is_passed_on_when_no_copy_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    take = OffloadScheduler.update_connector_output
    held_back: dict[OffloadScheduler, list[Any]] = {}

    def delayed(scheduler: OffloadScheduler, reports: list[WorkerReport]) -> StepResults:
        results, late = take(scheduler, reports), held_back.setdefault(scheduler, [])
        late.extend(results.loads)
        if scheduler.offloader.ledger.transfers:
            return StepResults((), results.finished_sending)
        loads = tuple(late)
        late.clear()
        return StepResults(loads, results.finished_sending)

    monkeypatch.setattr(OffloadScheduler, "update_connector_output", delayed)
    message = "the load of request r1 has ended, and a step later the request waits for it"
    assert_only_this_check_finds(lambda: world(SHARED, SHARED, LONG), LOADING, message)


def test_a_load_that_fails_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    note = OffloadScheduler._note_load_end

    def failing(scheduler: OffloadScheduler, name: str, *, good: bool, lost: bool = False) -> None:
        note(scheduler, name, good=good and not scheduler.offloader.ledger.transfers, lost=lost)

    monkeypatch.setattr(OffloadScheduler, "_note_load_end", failing)
    message = "the load of request r1 fails, and nothing has gone wrong since it began"
    assert_only_this_check_finds(lambda: world(SHARED, SHARED, LONG), LOADING, message)


def test_device_blocks_that_come_back_when_no_copy_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    release = DeviceBlocks.release
    held_back: dict[DeviceBlocks, list[Any]] = {}

    def delayed(blocks: DeviceBlocks, ended: Any) -> None:
        late = held_back.setdefault(blocks, [])
        late.append(ended)
        while late and not blocks._offloader.ledger.transfers:
            release(blocks, late.pop())

    monkeypatch.setattr(DeviceBlocks, "release", delayed)
    actions = (ARRIVE, STEP, STEP, STEP, STEP, ARRIVE, COPY, REPORT, STEP, STEP, STEP)
    message = "request r1 lacks room, but nothing needs device blocks"
    assert_only_this_check_finds(lambda: world(SHARED, LONG, device_blocks=4), actions, message)


def test_a_request_that_is_computed_in_more_steps_than_it_has_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = SmallEngine._schedule

    def sets_back(engine: SmallEngine, request: Any, *more: Any) -> None:
        if engine.copies and request.num_computed_tokens == 8:
            request.num_computed_tokens = 4
        schedule(engine, request, *more)

    monkeypatch.setattr(SmallEngine, "_schedule", sets_back)
    actions = (ARRIVE, STEP, STEP, STEP, STEP, STEP)
    message = "4 steps have computed request r0, and it is not over"
    assert_only_this_check_finds(lambda: world(SHARED), actions, message)
