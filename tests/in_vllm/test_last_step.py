"""`last_step`: copies in flight when no request is left (flush at last step, S17).

In vLLM's real schedulers (`real_scheduler`), and in a real engine in the caller's own process.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hanging_copies import TIMEOUT_S
from real_scheduler import Engine, walk
from scenes import play
from scheduler_shapes import Shape
from vllm import envs

from kvsm.events import Direction
from kvsm.explain.story import verify_log
from kvsm.vllm import scheduler_side
from kvsm.vllm.step_messages import StepPlan, StepReports

STORE = Direction.STORE

FLUSH = {"last_step": "flush"}

SHAPES = (
    Shape(host_blocks=160, extra=FLUSH),
    Shape(is_async=True, shards=2, host_blocks=160, extra=FLUSH),
    Shape(is_async=True, runner=2, stages=2, groups=2, device_blocks=34, host_blocks=160, extra=FLUSH),
)


DISK = Shape(host_blocks=160, disk_blocks=400, extra=FLUSH)


def all_answers(engine: Engine) -> None:
    """Step until every request has ended. Copies may still be in flight."""
    while engine.scheduler.has_unfinished_requests():
        engine.step()


def steps_to_rest(engine: Engine) -> int:
    """Return the number of further steps that the engine runs."""
    before = engine.counts["steps"]
    engine.drain()
    return engine.counts["steps"] - before


def in_flight(engine: Engine) -> Counter[Direction]:
    return Counter(transfer.direction for transfer in engine.ledger.transfers.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_one_last_step_reports_every_copy(shape: Shape) -> None:
    """With `flush` the engine takes as many steps as it may have in flight, and no more."""
    engine = Engine(shape, seed=5)
    engine.arrive(0, 40, 3, 2)
    all_answers(engine)
    assert in_flight(engine)[STORE]
    assert steps_to_rest(engine) <= shape.most_steps
    assert engine.counts["flushes"]
    engine.close()


def test_the_steps_after_the_last_request_wait_for_the_copies_to_the_disk() -> None:
    """Each of these steps waits for all copies in flight. After them, all stored blocks are on both tiers."""
    for shape in (DISK, DISK._replace(is_async=True, shards=2)):
        engine = Engine(shape, seed=5)
        engine.arrive(0, 40, 3, 2)
        all_answers(engine)
        # The host's copies, then those to the disk; as many steps may be in flight already.
        assert steps_to_rest(engine) <= 2 * shape.most_steps + 1
        host, disk = engine._ledgers()
        assert disk.index.keys() == host.index.keys()
        assert len(disk.index) > 8
        engine.close()


def test_flush_waits_for_a_load_whose_request_was_aborted() -> None:
    """No request is left that would wait for the load."""
    engine = Engine(Shape(is_async=True, device_blocks=48, host_blocks=160, extra=FLUSH), seed=0)
    engine.arrive(0, 40, 1, 1)
    engine.drain()
    engine.reset(running=False, connector=False)
    engine.arrive(0, 40, 1, 1)
    assert engine.schedule()
    engine.abort(0)
    assert in_flight(engine)[Direction.LOAD] == 1
    assert engine.schedule()
    assert [job.transfer for job in engine.plan.loads] == []
    assert list(engine.plan.flush) == list(engine.ledger.transfers)
    assert steps_to_rest(engine) <= 1
    engine.close()


def test_flush_waits_for_a_store_whose_request_was_preempted() -> None:
    """The request lost its blocks to others while a store still read them. Then all are aborted."""
    engine = Engine(Shape(is_async=True, device_blocks=26, host_blocks=160, extra=FLUSH), seed=0)
    for family in (2, 4, 6):
        engine.arrive(family, 30, 2, 12)
    storing: set[str] = set()
    while not storing:
        assert engine.schedule() or engine.deliver()
        preempted = {name for name, one in engine.scheduler.requests.items() if one.num_preemptions}
        owners = {
            name
            for one in engine.ledger.transfers.values()
            for name, _ in one.owners
            if one.direction is STORE
        }
        storing = preempted & owners
    for _ in range(3):
        engine.abort(0)
    assert in_flight(engine)[STORE]
    assert steps_to_rest(engine) <= 2
    assert engine.counts["flushes"]
    engine.close()


def test_a_copy_that_hangs_holds_the_last_step_no_longer_than_its_time() -> None:
    """The engine continues after `transfer_timeout_s`, gives the copy up, and reaches rest."""
    engine = Engine(Shape(is_async=True, device_blocks=48, hanging=1.0, extra=FLUSH), seed=1)
    engine.arrive(0, 20, 1, 2)
    all_answers(engine)
    began = engine.clock.now
    engine.drain()
    # A step itself takes a second.
    assert TIMEOUT_S <= engine.clock.now - began <= TIMEOUT_S + 10
    assert engine.counts["retired slots"]
    engine.close()


def test_random_lives_of_engines_that_flush() -> None:
    """Seeded walks. `real_scheduler` checks in each step for which copies it may and must wait."""
    counts = Counter[str]()
    for seed, shape in enumerate(SHAPES):
        counts += walk(seed, acts=250, shape=shape)
        counts += walk(seed, acts=250, shape=shape._replace(failing=0.2, hanging=0.1, device_blocks=48))
    counts += walk(9, acts=250, shape=DISK._replace(host_blocks=24, is_async=True))
    assert counts["flushes"] > 10
    assert counts["failed loads"]


# In the caller's own process.


class OwnProcess(Engine):
    """vLLM's `LLM` in the caller's process: it takes a step only while a client waits for an answer."""

    def after_the_last_answer(self) -> Counter[Direction]:
        """Serve all requests. Returns the copies that are in flight then."""
        while self.scheduler.has_unfinished_requests():
            self.step()
        return in_flight(self)


@pytest.fixture
def _own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert not envs.VLLM_ENABLE_V1_MULTIPROCESSING


@pytest.mark.usefixtures("_own_process")
@pytest.mark.parametrize("is_async", [False, True])
def test_an_engine_in_its_callers_process_needs_no_further_step(is_async: bool) -> None:
    """With `flush` every copy is reported when the last answer is there. Otherwise stores are left."""
    for extra, left in ((FLUSH, 0), ({}, 1)):
        engine = OwnProcess(Shape(is_async=is_async, extra=extra), seed=5)
        for _ in range(2):
            engine.arrive(0, 40, 3, 2)
        stores = engine.after_the_last_answer()[STORE]
        assert bool(stores) == bool(left)
        # It may serve again.
        engine.arrive(0, 40, 5, 2)
        engine.after_the_last_answer()
        engine.drain()
        engine.close()


@pytest.mark.usefixtures("_own_process")
@pytest.mark.parametrize("is_async", [False, True])
def test_an_engine_in_its_callers_process_has_all_on_disk_with_the_last_answer(is_async: bool) -> None:
    """All blocks are on disk, although the engine runs no further step. It can serve again from the disk."""
    engine = OwnProcess(DISK._replace(is_async=is_async, host_blocks=14), seed=5)
    for family in (0, 2, 0):
        engine.arrive(family, 40, 3, 2)
        assert not engine.after_the_last_answer()
        host, disk = engine._ledgers()
        assert not disk.transfers
        assert {key for key in host.index if host.readable(host.index[key])} <= disk.index.keys()
        engine.reset(running=False, connector=False)
    assert engine._side._disk.counts()["disk_blocks_loaded"]
    engine.drain()
    engine.close()


@pytest.mark.usefixtures("_own_process")
@pytest.mark.parametrize("failing", [0.0, 1.0])
def test_a_load_that_ends_outside_a_step_is_told_in_the_next(failing: float) -> None:
    """Its request was aborted. vLLM keeps the request's blocks until a worker reports the load."""
    engine = OwnProcess(Shape(is_async=True, device_blocks=48, extra=FLUSH), seed=2)
    engine.arrive(0, 40, 1, 1)
    engine.after_the_last_answer()
    engine.drain()
    engine.reset(running=False, connector=False)
    engine.ranks[0].copies._engine.rate = failing
    engine.arrive(0, 40, 2, 1)
    assert engine.schedule()
    assert in_flight(engine)[Direction.LOAD] == 1
    assert engine.execute()
    engine.abort(0)
    assert not in_flight(engine)
    assert engine.scheduler.requests, "vLLM has not heard of the load yet"
    engine.drain()
    engine.close()


@pytest.mark.usefixtures("_own_process")
def test_random_lives_in_the_callers_process() -> None:
    """The last step is taken inside calls of vLLM, with steps in flight and copies that fail and hang."""
    counts = Counter[str]()
    roomy = Shape(device_blocks=26, host_blocks=160, extra=FLUSH)
    for seed in range(4):
        counts += walk(
            seed, acts=250, shape=roomy._replace(is_async=bool(seed % 2), failing=0.1 * (seed > 1))
        )
    assert counts["loads"]
    assert counts["aborts"]
    for seed in range(2):
        walk(seed, acts=250, shape=roomy._replace(is_async=bool(seed), device_blocks=48, hanging=0.1))
        walk(seed, acts=250, shape=DISK._replace(host_blocks=24, is_async=bool(seed)))


def test_a_real_engine_in_its_callers_process(tmp_path: Path) -> None:
    """All stores are on the host when the last answer is there. The log has nothing open."""
    told = play(["serve_once"], tmp_path, last_step="flush")
    facts: dict[str, Any] = {name: values[0] for name, values in told.facts.items()}
    assert facts["in flight after the last answer"] == 0
    assert facts["blocks on the host"] == facts["full blocks"]
    (log,) = tmp_path.iterdir()
    assert verify_log(log).good


def test_a_last_step_in_the_own_process_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM does not schedule this step, and reports no end of it. All later steps would have wrong times."""

    class Worker:
        def start(self, step: StepPlan) -> None:
            assert not step.computes

        def handed_reports(self) -> StepReports:
            return StepReports(())

        take_all_reports = handed_reports

    engine = Engine(Shape(host_blocks=160, extra={**FLUSH, "load_only_if_faster": True}), seed=5)
    engine.arrive(0, 40, 3, 2)
    all_answers(engine)
    side = engine.scheduler.connector._side
    assert in_flight(engine)[STORE]
    assert not side._timer._steps
    monkeypatch.setattr(scheduler_side, "only_worker", lambda _: Worker())
    side._flush_in_own_process(None)
    assert not side._timer._steps
    engine.scheduler.shutdown()
