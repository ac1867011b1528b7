"""What the second book compares by itself, at the event, and how a breakage is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replay_life import Life, key, random_life

from kvsm import events as ev
from kvsm.core.ledger import HANDLERS, Ledger
from kvsm.core.ledger.invariants import Violation
from kvsm.explain.story import Auditor, verify_log
from kvsm.explain.verify.witness import Witness
from kvsm.properties import Property


def stored_two() -> Life:
    """Slots 0 and 1 are idle, and slots 2 and 3 are free."""
    life = Life(host_blocks=4, workers=1)
    life.stored("r0", [key(0), key(1)], [0, 1])
    return life


def ledger_of(life: Life) -> Ledger:
    ledger = Ledger(life.config)
    ledger.apply_all(life.events)
    return ledger


COUNTS: list[tuple[Callable[[Ledger], Any], str]] = [
    (lambda ledger: ledger.free.remove((2,)), "1 slots are in the free queue; there must be 2"),
    (lambda ledger: ledger.policy._queue.remove((0,)), "1 blocks may be evicted; there must be 2"),
    (lambda ledger: ledger.index.pop(key(0)), "1 slots are in the index; there must be 2"),
    (
        lambda ledger: ledger.offers.times.update({b"x": 1}),
        "1 keys are remembered as offered; there must be 0",
    ),
]


@pytest.mark.parametrize(("change", "message"), COUNTS)
def test_each_list_is_counted(change: Callable[[Ledger], Any], message: str) -> None:
    """A log with only this fault is told what is wrong, and not only that something is."""
    ledger = ledger_of(stored_two())
    witness = Witness.of(ledger)
    assert witness.compare_all(ledger) == []
    change(ledger)
    assert message in [one.message for one in witness.compare_all(ledger)]


ASKS: list[tuple[str, Callable[[Any], Any], Property, str]] = [
    ("r1", lambda one: setattr(one, "pins", ()), Property.MATCH_HOLDS, "holds a match: False"),
    ("r2", lambda one: setattr(one, "load", 999), Property.ONE_RELEASE_PER_HOLD, "names its load: 999"),
    ("r3", lambda one: setattr(one, "awaits", 999), Property.PROGRESS, "waits for transfer 999"),
]


@pytest.mark.parametrize(("name", "change", "broken", "says"), ASKS)
def test_each_thing_that_a_request_holds_or_waits_for_is_compared(
    name: str, change: Callable[[Any], Any], broken: Property, says: str
) -> None:
    life = stored_two()
    life.core.match("r1", [key(0)])
    life.core.match("r2", [key(1)])
    life.core.prepare_load("r2", [5])
    assert life.core.prepare_store("r0", [key(2)], [2]).job is not None
    assert life.core.match("r3", [key(2)]).waits_for is not None
    ledger = ledger_of(life)
    witness = Witness.of(ledger)
    assert witness._compare_asks(ledger, [name]) == []
    change(ledger.requests[name])
    (found,) = witness._compare_asks(ledger, [name])
    assert (found.property, found.requests) == (broken, (name,))
    assert found.message.startswith(f"request {name} {says}; it must be ")


@pytest.mark.parametrize(("is_kept", "says"), [(True, "is kept after"), (False, "is forgotten before")])
def test_a_request_that_only_one_book_has_is_named(is_kept: bool, says: str) -> None:
    life = stored_two()
    life.core.arrive("r1")
    ledger = ledger_of(life)
    witness = Witness.of(ledger)
    (witness._known if is_kept else ledger.requests).pop("r1")
    assert f"request r1 {says} its end" in [one.message for one in witness.compare_all(ledger)]


@pytest.mark.parametrize("change", [change for change, _ in COUNTS[:3]])
def test_each_list_is_counted_at_an_event_that_names_other_slots(change: Callable[[Ledger], Any]) -> None:
    life = stored_two()
    auditor = Auditor(ledger_of(life))
    change(auditor.ledger)
    seen = len(life.events)
    life.core.match("r1", [key(1)])
    assert auditor.apply_all(life.events[seen:])[1]


@pytest.mark.usefixtures("_python_folds")
def test_a_pinned_block_that_stays_in_the_eviction_order_for_another_is_seen_at_the_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of blocks that may be evicted is right."""
    handler = HANDLERS[ev.HitMatched]

    def mistaken(ledger: Any, event: Any) -> None:
        handler(ledger, event)
        ledger.policy._queue.remove((1,))
        ledger.policy._queue.append((0,))

    life = stored_two()
    auditor = Auditor(ledger_of(life))
    seen = len(life.events)
    life.core.match("r1", [key(0)])
    monkeypatch.setitem(HANDLERS, ev.HitMatched, mistaken)
    done, found = auditor.apply_all(life.events[seen:])
    assert life.events[seen + done - 1].kind == "HitMatched"
    assert "slot 0 must not be in the eviction order" in [one.message for one in found]


@pytest.mark.usefixtures("_python_folds")
def test_an_allocated_slot_that_stays_in_the_free_queue_for_another_is_seen_at_the_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of free slots is right."""
    handler = HANDLERS[ev.StorePlanned]

    def mistaken(ledger: Any, event: Any) -> None:
        handler(ledger, event)
        ledger.free.remove((3,))
        ledger.free.append((2,))

    life = stored_two()
    auditor = Auditor(ledger_of(life))
    seen = len(life.events)
    life.core.prepare_store("r1", [key(2)], [2])
    monkeypatch.setitem(HANDLERS, ev.StorePlanned, mistaken)
    done, found = auditor.apply_all(life.events[seen:])
    assert life.events[seen + done - 1].kind == "StorePlanned"
    assert "slot 2 must not be in the free queue" in [one.message for one in found]


def test_a_load_that_ends_well_after_a_reset_has_brought_nothing() -> None:
    """What it has copied is of the epoch before the reset, and nobody computes with it."""
    life = stored_two()
    life.core.match("r1", [key(0)])
    job = life.core.prepare_load("r1", [5])
    assert job is not None
    life.core.submit([job.transfer])
    life.core.reset()
    life.core.report(job.transfer, 0, True)
    auditor = Auditor(Ledger(life.config))
    assert auditor.apply_all(life.events) == (len(life.events), [])
    assert auditor.check() == []


def test_everything_is_checked_as_often_as_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A change that mends itself shows only in a full check between the two events."""
    random_life(1, 400, tmp_path / "log", writer={"segment_bytes": 2000}).close()
    check, checks = Auditor.check, list[int]()

    def counted(auditor: Auditor) -> list[Violation]:
        checks.append(auditor.ledger.seq)
        return check(auditor)

    monkeypatch.setattr(Auditor, "check", counted)
    verify_log(tmp_path / "log")
    seldom = len(checks)
    verify_log(tmp_path / "log", every=1)
    assert len(checks) - seldom > 2 * seldom


def test_a_report_on_a_plan_that_has_not_left_is_named() -> None:
    """Stale reports (S5): the ledger refuses it, and the book says why."""
    life = stored_two()
    job = life.core.prepare_store("r1", [key(2)], [2]).job
    assert job is not None
    auditor = Auditor(ledger_of(life))
    report = ev.WorkerReported(len(life.events) + 1, 0, 0, job.transfer, 0, True)
    found = auditor.apply(report)
    assert [one.property for one in found] == [Property.STALE_REPORTS]
    assert found[0].message == f"transfer {job.transfer} does not wait for the report of worker 0"


@pytest.mark.usefixtures("_python_folds")
def test_the_events_before_a_fold_that_stops_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The violation names nothing, so what led there is what the event itself is about."""
    life = Life(tmp_path / "log", host_blocks=4, workers=1)
    job = life.core.prepare_store("r0", [key(0)], [0]).job
    life.ended(job)
    life.core.match("r1", [key(0)])
    life.close()

    def stopping(*_: Any) -> None:
        raise RuntimeError("no fold")

    monkeypatch.setitem(HANDLERS, ev.HitMatched, stopping)
    breakage = verify_log(tmp_path / "log").breakage
    assert breakage is not None
    assert breakage.violations[0].message.startswith("the fold stops here: RuntimeError")
    assert any("StorePlanned" in line for line in breakage.led_there)
    first, *_, last = breakage.told()
    assert first.startswith(f"first broken by event {breakage.event}, step ")
    assert last.strip() == breakage.led_there[-1]
