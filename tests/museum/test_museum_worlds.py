"""The museum's worlds: none finds a bug in the correct code, and each detects its planted bugs."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from museum.checkers import CHECKERS
from museum.drawn_worlds import log_ahead, routed_serving, wrong_books_of_a_core
from mutants import MUTANTS
from planted_bugs import plant
from replay_life import Life, key

from kvsm.check.walks.targets import draw_case
from kvsm.check.walks.walk import walk
from kvsm.check.worlds.audited import ledger_difference
from kvsm.check.worlds.core_options import CoreOptions
from kvsm.check.worlds.core_world import CoreWorld
from kvsm.check.worlds.log_ahead import LogAheadOptions, LogAheadWorld, WrittenLog
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.check.worlds.worker_ranks import WorkerRanksWorld, draw_worker_ranks
from kvsm.check.worlds.wrong_books import (
    CHANGE_BOOKS,
    NOT_IN_BOOKS,
    WRONG,
    WRONG_LEDGERS,
    _loads_void,
    _slot_left_at_rest,
)
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.core.offloader.emitter import EventEmitter
from kvsm.core.scheduler import StoreMode
from kvsm.errors import PropertyBroken
from kvsm.properties import Property


def test_each_property_is_in_the_books_or_it_is_said_why_not() -> None:
    assert {one.property for one in WRONG}.isdisjoint(NOT_IN_BOOKS)
    assert {one.property for one in WRONG} | {*NOT_IN_BOOKS, Property.EVENTS_ARE_STATE} == {*Property}


def test_a_check_that_does_not_object_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsm.core.ledger.invariants.CHECKS", ())
    world = wrong_books_of_a_core(Random(1))
    with pytest.raises(PropertyBroken, match="the invariants says: nothing"):
        world.do(CHANGE_BOOKS)


def test_a_ledger_with_one_waiting_request_can_be_made_wrong() -> None:
    life = Life()
    life.core.arrive("r")
    job = life.core.prepare_store("r", [key(0)], [0]).job
    assert job is not None
    assert life.core.defer("r", job.transfer)
    change = next(one.change for one in WRONG_LEDGERS if one.says == "nobody knows that a request waits")
    assert change(life.core.ledger)
    assert life.core.ledger.deferred == {}


def test_books_are_made_wrong_only_where_the_change_is_an_error() -> None:
    """A ledger at rest can hold no copy; a voided match can be loaded no longer."""
    life = Life()
    life.core.arrive("r")
    for number in range(2):
        job = life.core.prepare_store("r", [key(number)], [number]).job
        assert job is not None
        if number == 0:
            life.core.submit([job.transfer])
            for worker in range(life.config.workers):
                life.core.report(job.transfer, worker, True)
            assert life.core.match("r", [key(0)]).hits == 1
            assert _loads_void(life.core.ledger) is None
    life.core.finish("r")
    assert not life.core.ledger.requests
    assert len(life.core.ledger.transfers) == 1
    assert not _slot_left_at_rest(life.core.ledger)


def test_a_lazy_store_that_stops_while_the_host_has_room_is_seen() -> None:
    with MUTANTS["M10"].put_back():
        failure = walk(lambda random: draw_case("serving", random).make(), 1, runs=8).failure
    assert failure is not None
    assert "is next to go, and is not on the host, which has room" in failure.finding.message


def test_a_field_that_a_snapshot_forgets_is_seen() -> None:
    """Events are state (S10): the restored copy is compared field by field, not as a snapshot."""
    world, random = CoreWorld(CoreOptions()), Random(3)
    while not any(one.since for one in world.core.ledger.transfers.values()):
        world.do(world.draw(random))
    ledger = world.core.ledger
    copy = restore(snapshot(ledger))
    assert ledger_difference(ledger, copy) is None
    next(one for one in copy.transfers.values() if one.since).since = 0
    assert "since" in str(ledger_difference(ledger, copy))


def test_jobs_that_leave_before_the_log_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsm.check.worlds.log_ahead.WrittenLog.flush", lambda _self: None)
    result = walk(lambda _random: LogAheadWorld(LogAheadOptions(core=CoreOptions())), 1, runs=1)
    assert result.failure is not None
    assert result.failure.finding.property is Property.EVENTS_ARE_STATE


@pytest.mark.parametrize("seed", range(1, 5))
def test_what_a_step_decides_behind_a_flush_is_written(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are state (S10).

    With every seed, a flush within a step does not cover the step's later events.
    """
    assert walk(log_ahead, seed, runs=6).failure is None
    plant(
        monkeypatch,
        EventEmitter.flush_log,
        "self._flushed_seq == ledger.seq - 1",
        "self.log.flushed_in == self.step",
    )
    flush = WrittenLog.flush

    def note_step(log: Any) -> None:
        log.flushed_in = log[-1].step
        flush(log)

    monkeypatch.setattr(WrittenLog, "flush", note_step)
    failure = walk(log_ahead, seed, runs=6).failure
    assert failure is not None
    assert failure.finding.property is Property.EVENTS_ARE_STATE


def test_workers_keep_every_promise() -> None:
    """Progress (S9), order of copies (S12), correct bytes (S15), with engines that refuse jobs."""
    result = walk(lambda random: WorkerRanksWorld(draw_worker_ranks(random)), 5, runs=5)
    assert result.failure is None, result.failure


def test_a_loaded_chunk_that_the_host_lost_is_offered_when_its_request_ends() -> None:
    """No lost store (S13). The host evicts it before the request has offered anything."""
    engine = SmallEngine(device_blocks=12, host_blocks=1, prefix_cache=False, checks_stores=True)
    first = engine.arrive(SmallRequest("first", range(5), 1))
    engine.run()
    assert first.finished
    again = engine.arrive(SmallRequest("again", range(5), 1))
    engine.step()
    assert again.loading
    engine.carry_out_all()
    engine.hand_on()
    (key,) = engine.core.ledger.index
    evicting = engine.core.store((), [b"another" + bytes(4)], [11])
    assert list(evicting.evicted) == [key]
    assert evicting.job is not None
    engine.core.submit([evicting.job.transfer])
    engine.core.report(evicting.job.transfer, 0, True)
    engine.finish(again)
    assert key in engine.core.ledger.index
    assert engine.config.store is StoreMode.EAGER


def test_a_router_knows_chunks_and_blocks_that_cannot_be_described() -> None:
    """Events are state (S10)."""
    assert walk(routed_serving, 2, runs=10).failure is None
    with MUTANTS["M109"].put_back():
        failure = walk(routed_serving, 2, runs=10).failure
    assert failure is not None
    assert failure.finding.property is Property.EVENTS_ARE_STATE


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS, ids=lambda one: one.name)
def test_the_right_code_is_clean(checker: object) -> None:
    assert checker.look() is None  # type: ignore[attr-defined]
