"""The figures of `kvsm report` and `kvsm whatif` are counted a second time in the worlds: events are state
(S10)."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_bugs import plant
from replay_life import Life, key

from examples import examples
from kvsm.check.walks.targets import TARGETS, draw_case
from kvsm.check.walks.walk import walk
from kvsm.check.worlds import report_oracles, run_figures
from kvsm.check.worlds.past_log import PastLog
from kvsm.check.worlds.report_oracles import REPORT_ORACLES
from kvsm.check.worlds.serving_world import ServingWorld
from kvsm.check.worlds.two_tiers import TwoTierWorld
from kvsm.check.worlds.whatif_oracles import demand_of
from kvsm.check.worlds.world import World
from kvsm.errors import PropertyBroken
from kvsm.events import LogOpened, OffloadConfig, OffloadingEvent
from kvsm.explain.report import cache_measures, copy_measures, engine_measures
from kvsm.explain.whatif import demand, simulate
from kvsm.properties import Property

Log = list[OffloadingEvent]


@cache
def drawn_logs() -> list[tuple[OffloadConfig, Log]]:
    """Logs of the serving world and the tiers, at rest."""
    found = []
    for target, seed in (("serving", 2), ("serving", 13), ("tiers", 8), ("tiers", 9)):
        random = Random(seed)
        world: Any = draw_case(target, random).make()
        assert isinstance(world, (ServingWorld, TwoTierWorld))
        with suppress(IndexError):  # Nothing is left to do.
            for _ in range(300):
                world.do(world.draw(random))
        while (action := world.wind_down()) is not None:
            world.do(action)
        log = [*(world.events if isinstance(world, ServingWorld) else world.log)]
        assert isinstance(log[0], LogOpened)
        found.append((log[0].config, log))
    return found


def check_all() -> None:
    for config, log in drawn_logs():
        run_figures._figures(config, log)


@pytest.fixture(autouse=True)
def every_log_is_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_figures, "_COUNTED_AGAIN", 1)


def test_the_figures_of_drawn_logs_agree_and_some_have_a_demand() -> None:
    check_all()
    assert any(demand_of(PastLog(config, log)) is not None for config, log in drawn_logs())


@settings(deadline=None, max_examples=examples(20))
@given(st.lists(st.tuples(*[st.none() | st.integers(0, 3)] * 3), max_size=4))
def test_figures_agree_whichever_numbers_an_admission_has(admissions: list[tuple[int | None, ...]]) -> None:
    """A caller of the core may give any of the three numbers, or none."""
    life = Life(host_blocks=4)
    for number, numbers in enumerate(admissions):
        request = f"r{number}"
        life.core.match(request, [key(0)])
        life.core.admit(request, *numbers)
        life.core.finish(request)
    run_figures._figures(life.config, list(life.events))


def test_figures_of_groups_agree_up_to_the_last_group_that_a_report_shows() -> None:
    """An engine has fewer than 256 groups. Keys with a larger number are not vLLM's."""
    life = Life(host_blocks=4)
    keys = [key(3)[:-4] + group.to_bytes(4, "big") for group in (0, 1, 255, 256)]
    life.stored("r", keys, range(4))
    life.core.finish("r")
    run_figures._figures(life.config, list(life.events))


def test_a_request_that_has_matched_nothing_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("check_metrics", "check_past_metrics"):
        monkeypatch.setattr(run_figures, check, lambda *_: None)  # The log is not at rest.
    life = Life(host_blocks=4)
    life.core.match("r", [])
    run_figures._figures(life.config, list(life.events))


@pytest.mark.parametrize("name", REPORT_ORACLES)
def test_each_figure_of_a_report_is_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figure, oracle = REPORT_ORACLES[name]
    changed = {**REPORT_ORACLES, name: (lambda tables: (figure(tables), "more"), oracle)}
    monkeypatch.setattr(report_oracles, "REPORT_ORACLES", changed)
    with pytest.raises(PropertyBroken, match=f"for {name}, but a second count gives") as caught:
        check_all()
    assert caught.value.property is Property.EVENTS_ARE_STATE


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (cache_measures.hit_figures, "sum(on_device), sum(on_host)", "sum(on_host), sum(on_host)"),
        (cache_measures.eviction_figures, "gone_ns - stored_ns", "gone_ns - planned_ns"),
        (cache_measures.eviction_figures, "blocks * unread", "unread"),
        (cache_measures.group_figures, "hits = 0", "hits > 0"),
        (cache_measures.pool_figures, "max(storing)", "min(storing)"),
        (cache_measures.reset_figures, "count(*)", "sum(epoch + 1)"),
        (copy_measures.copy_figures, "= '{CUT_OFF}'", "!= '{CUT_OFF}'"),
        (copy_measures.copy_figures, "target IS NULL", "1"),
        (copy_measures.wait_figures, "sum(loading_ns)", "sum(deferred_ns)"),
        (copy_measures._elsewhere, "sum(slots)", "count(*)"),
        (engine_measures.request_figures, "sum(preemptions > 0)", "sum(preemptions)"),
        (engine_measures.restart_figures, "storing + planned", "storing + kept"),
        (demand.DemandReader._note_end, "TransferState.FAILED, TransferState.LOST", "TransferState.LOST,"),
        (demand.DemandReader._note_end, "event.step - planned", "event.step - planned + 1"),
        (simulate._served, "lookup.on_device", "lookup.on_host"),
        (simulate.counted_lookups, "not lookup.resumed", "True"),
    ],
)
def test_a_wrong_figure_is_seen(
    function: Any, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, function, right, wrong)
    with pytest.raises(PropertyBroken):
        check_all()


@pytest.mark.parametrize("target", ["serving", "tiers"])
def test_the_worlds_compare_reports(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"skips": (lambda _: "wrong", lambda _: "right")}
    monkeypatch.setattr(report_oracles, "REPORT_ORACLES", changed)
    known = TARGETS[target]

    def drawn(random: Random) -> World:
        return known.world(known.draw(random))

    failure = walk(drawn, 3, runs=1).failure
    assert failure is not None
    assert "the report says wrong for skips" in failure.finding.message


def test_one_of_some_logs_is_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count costs as much as the tables. The length of the log decides, so that a failure is repeated."""
    counted = list[int]()
    monkeypatch.setattr(run_figures, "_COUNTED_AGAIN", 3)
    monkeypatch.setattr(run_figures, "check_tables", lambda _, past: counted.append(len(past.log)))
    for check in ("check_metrics", "check_past_metrics", "check_report", "check_whatif"):
        monkeypatch.setattr(run_figures, check, lambda *_: None)  # The parts of a log are not at rest.
    config, log = drawn_logs()[0]
    for end in range(60, 66):
        run_figures._figures(config, log[:end])
    assert counted == [60, 63]
