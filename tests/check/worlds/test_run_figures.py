"""The engine's own record of a run objects to each figure of a log that differs from it (S10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from planted_bugs import plant

from kvsm import events as ev
from kvsm.check.walks.targets import draw_case
from kvsm.check.walks.walk import walk
from kvsm.check.worlds import metric_oracles, run_figures
from kvsm.check.worlds.run_figures import (
    COPIED_OUT,
    IMPORTED,
    LOADED,
    ON_DISK,
    STORED,
    AdmittedRequest,
    CopiedSlots,
    RunNotes,
)
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.errors import PropertyBroken
from kvsm.properties import Property
from kvsm.tiers import DiskTier
from kvsm.tiers.disk_tier import TierCounts


def served_twice(*, on_device: bool = False) -> SmallEngine:
    """The second request has both blocks of the first one: it loads them, or finds them on the device."""
    engine = SmallEngine(prefix_cache=on_device)
    for name in ("first", "second"):
        engine.arrive(SmallRequest(name, range(9), 1))
        engine.run()
    return engine


def broken(check: Callable[[], Any]) -> str:
    with pytest.raises(PropertyBroken) as caught:
        check()
    assert caught.value.property is Property.EVENTS_ARE_STATE
    return caught.value.message


ADMITTED = ev.RequestAdmitted(9, 0, 0, "r", 3, 1, 2, None, False)


@pytest.mark.parametrize("place", range(5))
def test_each_field_of_an_admission_is_compared(place: int) -> None:
    fields: list[Any] = ["r", 3, 1, 2, False]
    notes = RunNotes()
    notes.admit(8, *fields)
    notes.check_action([ADMITTED])
    fields[place] = "q" if place == 0 else not fields[place]
    notes = RunNotes()
    notes.admit(8, *fields)
    message = broken(lambda: notes.check_action([ADMITTED]))
    assert message.count("3, 1, 2") + message.count("AdmittedRequest(") == 2


def test_an_admission_that_is_missing_or_too_many_is_seen() -> None:
    notes = RunNotes()
    assert "the engine admits no request" in broken(lambda: notes.check_action([ADMITTED]))
    notes.admit(8, "r", 3, 1, 2, False)
    assert "the log says nothing" in broken(lambda: notes.check_action([]))
    notes.begin_action()
    notes.check_action([])


COUNTED = {"admitted", "asked", "on the device", "on the host", STORED}
FIGURES = {
    "metrics": COUNTED | {"hits", LOADED, COPIED_OUT, IMPORTED},
    "tables": COUNTED | {LOADED, COPIED_OUT, IMPORTED},
    "report": COUNTED,
}


def test_each_source_has_its_figures_and_they_are_those_of_the_engine() -> None:
    engine = served_twice()
    engine.notes.check(engine.core.config, engine.log)
    figures = run_figures._figures(engine.core.config, engine.log)
    assert {name: {*one} for name, one in figures.items()} == FIGURES


def test_hits_on_the_device_and_no_hits_at_all_are_compared() -> None:
    for engine in (served_twice(on_device=True), SmallEngine()):
        engine.notes.check(engine.core.config, engine.log)


@pytest.mark.parametrize(
    ("name", "figure"), [(name, one) for name in FIGURES for one in sorted(FIGURES[name])]
)
def test_each_figure_of_each_source_is_compared(
    name: str, figure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served_twice()
    figures = run_figures._figures(engine.core.config, engine.log)
    figures[name][figure] += 1
    monkeypatch.setattr(run_figures, "_figures", lambda *_: figures)
    message = broken(lambda: engine.notes.check(engine.core.config, engine.log))
    assert message.startswith(f"{name} says {figures[name][figure]} for {figure}, ")


def test_the_metrics_are_counted_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = served_twice()
    monkeypatch.setitem(metric_oracles.ORACLES, "blocks_stored", lambda *_: 77)
    assert "77" in broken(lambda: engine.notes.check(engine.core.config, engine.log))


def test_what_the_engine_has_noted_is_added_up() -> None:
    """A request that had blocks before is admitted once."""
    noted = [
        CopiedSlots(STORED, 3),
        AdmittedRequest("a", 5, 1, 2, False),
        AdmittedRequest("b", 4, 2, 0, False),
        AdmittedRequest("a", 5, 3, 1, True),
        CopiedSlots(STORED, 4),
        CopiedSlots(IMPORTED, 1),
    ]
    figures = {"admitted": 2, "hits": 1, "asked": 9, "on the device": 3, "on the host": 2}
    copied = {STORED: 7, LOADED: 0, COPIED_OUT: 0, IMPORTED: 1}
    assert run_figures._truth(noted) == figures | copied


def test_after_a_crash_what_the_log_has_is_kept() -> None:
    engine = served_twice()
    last, notes = len(engine.log), RunNotes()
    notes.crash(engine.notes, last)
    notes.check(engine.core.config, engine.log)
    for place, one in enumerate(engine.notes._noted):
        notes.crash(engine.notes, one.event)
        assert len(notes._noted) > place
        notes.crash(engine.notes, one.event - 1)
        assert len(notes._noted) <= place


def test_a_world_that_is_loaded_without_events_has_nothing_to_compare() -> None:
    engine = served_twice()
    RunNotes().check(engine.core.config, [])
    RunNotes().check(engine.core.config, engine.log[1:])


def test_a_copy_counts_once_all_ranks_have_ended_it_well() -> None:
    """Not if a rank fails, nor after a reset."""
    for good, resets in ((True, False), (False, False), (True, True)):
        engine = SmallEngine(prefix_cache=False, workers=2)
        engine.arrive(SmallRequest("first", range(5), 9))
        for _ in range(2):
            engine.step()
            engine.compute()
        (transfer,) = engine.copies
        if resets:
            engine.reset()
        engine.carry_out(transfer, 0)
        engine.carry_out(transfer, 1, good=good)
        engine.hand_on()
        engine.run()
        engine.notes.check(engine.core.config, engine.log)


def test_the_counts_of_the_disk_are_compared() -> None:
    log = SmallEngine().log
    notes = RunNotes()
    notes.copy(1, ON_DISK, 3)
    notes.copy(1, IMPORTED, 2)
    notes.check_disk(TierCounts(to_disk=3, from_disk=2), log)
    for wrong in (TierCounts(to_disk=2, from_disk=2), TierCounts(to_disk=3, from_disk=3)):
        assert "the disk tier says" in broken(lambda wrong=wrong: notes.check_disk(wrong, log))
    notes.check_disk(TierCounts(), log[1:])  # A world that is loaded without events has nothing to compare.


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (DiskTier._note_store, "self.counts.to_disk += blocks", "self.counts.to_disk += 1"),
        (DiskTier.report, "+= len(ended.device_blocks)", "+= 1 + len(ended.device_blocks)"),
    ],
)
def test_a_wrong_count_of_the_disk_is_found(
    function: Any, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, function, right, wrong)
    failure = walk(lambda random: draw_case("tiers", random).make(), 3, runs=4).failure
    assert failure is not None
    assert "the disk tier says" in failure.finding.message
