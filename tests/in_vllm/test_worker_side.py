"""`WorkerSide`: how long a step waits for copies, and what it tells of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np
from real_scheduler import Engine
from scheduler_shapes import Shape

from kvsm.copies import HostCopyEngine
from kvsm.copies.worker import Worker
from kvsm.core.plan import TransferJob, TransferPlan
from kvsm.events import Direction
from kvsm.vllm.rank_copies import A_MOMENT_S
from kvsm.vllm.step_messages import StepPlan

JOB = TransferJob(1, Direction.STORE, (0, 1), (0, 1))


class HeldCopies(HostCopyEngine):
    """Copies end when the step has paused this number of times."""

    def __init__(self, pauses: int) -> None:
        super().__init__(np.zeros((4, 64), np.uint8), np.zeros((4, 64), np.uint8))
        self.pauses_left = pauses

    def poll(self) -> Any:
        if self.pauses_left > 0:
            return []
        self.drain()
        return super().poll()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(Shape(device_blocks=48), 0)
    yield made
    made.discard()


def carry_out(engine: Engine, pauses: int, computes: bool) -> tuple[list[float], Any]:
    """Run a step that copies. Returns its pauses, and the reports in its output."""
    side, slept = engine.ranks[0].connector._side, []
    copies = HeldCopies(pauses)
    side._worker = Worker(0, copies)

    def pause(pause_s: float) -> None:
        slept.append(pause_s)
        copies.pauses_left -= 1

    side.pause = pause
    side.begin_step(StepPlan(0, TransferPlan(stores=(JOB,)), computes=computes))
    reports = side.build_connector_worker_meta()
    copies.close()
    return slept, () if reports is None else reports.reports


def test_a_step_that_computes_nothing_waits_until_its_copies_end(engine: Engine) -> None:
    """Its output reports them, so requests whose loads have ended begin to compute together."""
    slept, reports = carry_out(engine, 2, computes=False)
    assert slept == list(A_MOMENT_S[:2])
    assert [report.transfer for report in reports] == [JOB.transfer]


def test_a_step_that_computes_nothing_waits_a_moment_and_no_longer(engine: Engine) -> None:
    """Progress (S9): a copy that hangs does not keep the engine from new requests."""
    assert carry_out(engine, 1000, computes=False) == (list(A_MOMENT_S), ())


def test_a_step_that_computes_waits_for_no_copy(engine: Engine) -> None:
    assert carry_out(engine, 1, computes=True) == ([], ())


def test_the_workers_hear_which_steps_compute() -> None:
    engine, seen = Engine(Shape(device_blocks=48), 0), set()
    for number in range(6):
        engine.arrive(number % 2, 30, 1, 3)
        for _ in range(4):
            engine.step()
            output = engine.latest.output
            assert output.kv_connector_metadata.computes == bool(output.total_num_scheduled_tokens)
            seen.add(output.kv_connector_metadata.computes)
    engine.drain()
    engine.close()
    assert seen == {True, False}


def test_statistics_are_sent_once_and_only_if_a_copy_has_ended(engine: Engine) -> None:
    """vLLM asks in every step. What is sent adds up to what was copied."""
    side, copied = engine.ranks[0].connector._side, 0
    copies = HeldCopies(0)
    side._worker = worker = Worker(0, copies)
    assert side.get_kv_connector_stats() is None
    for transfer in range(1, 4):
        side.start(StepPlan(0, TransferPlan(stores=(TransferJob(transfer, Direction.STORE, (0,), (1,)),))))
        side.take_reports()
        sent = side.get_kv_connector_stats()
        copied += sent.data["copied_bytes"]["store"]
        assert copied == worker.statistics().store.bytes == 64 * transfer
        assert side.get_kv_connector_stats() is None
    copies.close()


def test_a_new_worker_begins_its_statistics_at_nothing(engine: Engine) -> None:
    """A pool is made again if the scheduler counts more blocks. No counter falls."""
    side = engine.ranks[0].connector._side
    for transfer in (1, 2):
        copies = HeldCopies(0)
        side._make(4)
        side._worker._engine = copies
        side.start(StepPlan(0, TransferPlan(stores=(TransferJob(transfer, Direction.STORE, (0,), (1,)),))))
        side.take_reports()
        sent = side.get_kv_connector_stats()
        assert sent is not None
        assert sent.data["copied_bytes"] == {"store": 64}
        copies.close()
