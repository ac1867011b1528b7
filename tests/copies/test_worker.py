"""The worker: every accepted job is reported exactly once, plans run in order, copies are counted."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.copies import FailingCopyEngine, HostCopyEngine, SimulatedCopyEngine, threaded
from kvsm.copies.worker import CopyStatistics, Worker, smallest_host_pool
from kvsm.core.plan import TransferJob, TransferPlan, WorkerReport
from kvsm.errors import ConfigError, PropertyBroken, TransferFailed
from kvsm.events import Direction
from kvsm.properties import Property

BLOCKS = 8
OUT_OF_RANGE = BLOCKS


def pools() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.ones((BLOCKS, 4), np.uint8), np.zeros((BLOCKS, 4), np.uint8)


def store(transfer: int, device_block: int, host_block: int) -> TransferJob:
    return TransferJob(transfer, Direction.STORE, (device_block,), (host_block,))


def load(transfer: int, device_block: int, host_block: int) -> TransferJob:
    return TransferJob(transfer, Direction.LOAD, (device_block,), (host_block,))


@given(
    seed=st.integers(0, 2**32),
    batches=st.lists(st.lists(st.tuples(st.sampled_from(Direction), st.integers(0, BLOCKS)))),
    polls=st.integers(0, 3),
)
@settings(max_examples=examples(100), deadline=None)
def test_every_job_is_reported_exactly_once(
    seed: int, batches: list[list[tuple[Direction, int]]], polls: int
) -> None:
    """Progress (S9), failure is not success (S6): each transfer is reported once, whether it is good,
    failed or refused (block 8 is out of range)."""
    worker = Worker(3, FailingCopyEngine(HostCopyEngine(*pools()), seed, 0.3))
    reports: list[WorkerReport] = []
    submitted: dict[int, tuple[Direction, int]] = {}
    for batch in batches:
        jobs = []
        for direction, block in batch:
            jobs.append(TransferJob(len(submitted), direction, (block,), (0,)))
            submitted[len(submitted)] = (direction, block)
        worker.submit(jobs)
        for _ in range(polls):
            reports += worker.poll()
    worker.close()
    reports += worker.poll()
    assert sorted(report.transfer for report in reports) == sorted(submitted)
    assert {report.worker for report in reports} <= {3}
    for report in reports:
        assert report.good is (report.error == "")
        if submitted[report.transfer][1] == OUT_OF_RANGE:
            assert "device block 8 is not in its pool of 8" in report.error

    statistics = worker.statistics()
    assert statistics.rank == 3
    for direction, counted in ((Direction.STORE, statistics.store), (Direction.LOAD, statistics.load)):
        of_direction = [report for report in reports if submitted[report.transfer][0] is direction]
        good = sum(report.good for report in of_direction)
        assert (counted.transfers, counted.failed) == (len(of_direction), len(of_direction) - good)
        assert counted.bytes == 4 * good


def test_a_doubled_job_is_refused_before_anything_of_the_batch_runs() -> None:
    """Stale reports change nothing (S5), no reuse in flight (S3): a bad report instead would end a transfer
    whose first copy still runs."""
    device, host = pools()
    worker = Worker(0, SimulatedCopyEngine(device, host, seed=1))
    worker.submit([store(1, 1, 1)])
    with pytest.raises(TransferFailed, match="transfer 1 was submitted twice to worker 0"):
        worker.submit([store(2, 2, 2), store(1, 3, 3)])
    with pytest.raises(TransferFailed, match="transfer 4 was submitted twice to worker 0"):
        worker.submit([store(4, 4, 4), store(4, 5, 5)])
    worker.close()
    assert worker.poll() == [WorkerReport(1, 0, True)]
    assert host[:, 0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


def test_a_job_that_was_refused_is_live_until_it_is_reported() -> None:
    worker = Worker(0, HostCopyEngine(*pools()))
    worker.close()
    worker.submit([store(1, 0, 0)])
    with pytest.raises(TransferFailed, match="submitted twice"):
        worker.submit([store(1, 0, 0)])
    assert [(report.transfer, report.good) for report in worker.poll()] == [(1, False)]


def test_a_transfer_that_was_reported_is_forgotten() -> None:
    """A worker that runs for weeks keeps nothing of what it has reported."""
    worker = Worker(0, SimulatedCopyEngine(*pools(), seed=1))
    for _ in range(2):
        worker.submit([store(1, 0, 0)])
        worker.wait([1])
        assert worker.poll() == [WorkerReport(1, 0, True)]


def test_jobs_after_close_are_reported_as_failed() -> None:
    """Progress (S9): a scheduler that submits late still hears the end of its transfer."""
    worker = Worker(0, HostCopyEngine(*pools()))
    worker.close()
    worker.submit([store(1, 0, 0)])
    assert worker.poll() == [WorkerReport(1, 0, False, "transfer 1: the engine is closed")]


def test_waiting_leaves_the_reports_to_poll() -> None:
    with closing(Worker(0, HostCopyEngine(*pools()))) as worker:
        worker.submit([store(1, 1, 1), store(2, OUT_OF_RANGE, 2), store(3, 3, 3)])
        worker.wait([1, 2, 3])
        assert sorted((report.transfer, report.good) for report in worker.poll()) == [
            (1, True),
            (2, False),
            (3, True),
        ]


class Calls(SimulatedCopyEngine):
    """An engine that records the calls to it."""

    def __init__(self) -> None:
        super().__init__(*pools(), seed=1)
        self.asked: list[tuple[str, list[int]]] = []

    def submit(self, job: TransferJob, after: Any = None) -> None:
        if job.transfer == 666:
            raise RuntimeError("driver gone")
        self.asked.append(("submit", [job.transfer]))
        super().submit(job, after)

    def wait(self, transfers: Iterable[int]) -> None:
        named = list(transfers)
        if named:
            self.asked.append(("wait", named))
        super().wait(named)


def test_a_plan_waits_for_the_old_starts_the_new_and_waits_for_those() -> None:
    """Order of copies (S12), flush at last step (S17): flushed transfers of earlier steps have ended before
    anything of this step may touch memory."""
    engine = Calls()
    worker = Worker(0, engine)
    worker.start(TransferPlan(stores=(store(1, 1, 1), store(2, 2, 2))))
    worker.start(TransferPlan((load(3, 3, 3),), (store(4, 4, 4), store(5, 5, 5)), flush=(4, 1, 3)))
    assert engine.asked == [
        ("submit", [1]),
        ("submit", [2]),
        ("wait", [1]),
        ("submit", [3]),
        ("submit", [4]),
        ("submit", [5]),
        ("wait", [4, 3]),
    ]


@given(
    seed=st.integers(0, 2**32),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sets(st.integers(0, 20))), max_size=6),
)
@settings(max_examples=examples(100), deadline=None)
def test_what_a_plan_flushes_has_ended_when_it_returns(
    seed: int, steps: list[tuple[int, int, set[int]]]
) -> None:
    """Flush at last step (S17): transfers of this step and of earlier ones; each is still reported exactly
    once."""
    worker = Worker(0, FailingCopyEngine(HostCopyEngine(*pools()), seed, 0.3))
    given_before, reported = 0, []
    for loads, stores, flush in steps:
        numbers = range(given_before, given_before + loads + stores)
        jobs = [(load if number < given_before + loads else store)(number, 0, 1) for number in numbers]
        given_before += len(jobs)
        worker.start(TransferPlan(tuple(jobs[:loads]), tuple(jobs[loads:]), tuple(sorted(flush))))
        reported += [report.transfer for report in worker.poll()]
        assert {transfer for transfer in flush if transfer < given_before} <= set(reported)
    worker.close()
    reported += [report.transfer for report in worker.poll()]
    assert sorted(reported) == list(range(given_before))


def test_one_job_that_cannot_start_is_reported_and_the_others_of_the_plan_run() -> None:
    """Failure is not success (S6), progress (S9): if starting a job raises anything, the other jobs are
    still reported."""
    worker = Worker(0, Calls())
    bad = TransferJob(666, Direction.STORE, (0,), (0,))
    worker.start(TransferPlan((load(1, OUT_OF_RANGE, 0),), (bad, store(2, 2, 2)), flush=(1, 2, 666)))
    assert sorted((report.transfer, report.good) for report in worker.poll()) == [
        (1, False),
        (2, True),
        (666, False),
    ]


def test_a_poll_that_raises_takes_no_report_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress (S9): the next poll still reports what was refused."""
    engine = Calls()
    worker = Worker(0, engine)
    worker.submit([TransferJob(666, Direction.STORE, (0,), (0,))])

    def raises() -> None:
        raise PropertyBroken(Property.COPY_ORDER, "a race")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "poll", raises)
        with pytest.raises(PropertyBroken):
            worker.poll()
    assert [(report.transfer, report.good) for report in worker.poll()] == [(666, False)]


def test_a_plan_with_a_doubled_transfer_starts_nothing() -> None:
    """Stale reports change nothing (S5): also if it is flushed, so that the end of the first is not taken
    for the end of the second."""
    device, host = pools()
    worker = Worker(0, SimulatedCopyEngine(device, host, seed=1))
    worker.start(TransferPlan(stores=(store(1, 1, 1),)))
    with pytest.raises(TransferFailed, match="submitted twice"):
        worker.start(TransferPlan((load(2, 2, 2),), (store(1, 3, 3),), flush=(1,)))
    worker.close()
    assert [report.transfer for report in worker.poll()] == [1]
    assert host[:, 0].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


def test_a_rank_whose_copying_threads_died_reports_every_transfer_as_bad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Progress (S9): transfers in flight and later ones; the scheduler never waits in vain."""

    def gone() -> float:
        raise SystemExit("clock gone")

    monkeypatch.setattr(threaded, "perf_counter", gone)
    with closing(Worker(0, HostCopyEngine(*pools()))) as worker:
        worker.start(TransferPlan(stores=(store(1, 1, 1), store(2, 2, 2)), flush=(1, 2)))
        worker.start(TransferPlan(loads=(load(3, 3, 3),), flush=(3,)))
        reports = worker.poll()
    assert sorted((report.transfer, report.good) for report in reports) == [
        (1, False),
        (2, False),
        (3, False),
    ]
    assert all("a copying thread died of SystemExit: clock gone" in report.error for report in reports)


def test_ranks_agree_on_the_smallest_host_pool() -> None:
    """A transfer names the same host blocks on every rank, so each rank must have them."""
    workers = [
        Worker(rank, SimulatedCopyEngine(np.zeros((2, 4), np.uint8), np.zeros((size, 4), np.uint8), seed=1))
        for rank, size in enumerate((7, 5, 9))
    ]
    assert [worker.num_host_blocks for worker in workers] == [7, 5, 9]
    assert smallest_host_pool(workers) == 5
    with pytest.raises(ConfigError, match="no workers"):
        smallest_host_pool([])


def test_ranks_in_one_process_copy_their_own_shards() -> None:
    """Correct bytes (S15): each worker copies in its own pools, and its reports name its rank."""
    device_pools = [np.full((BLOCKS, 4), rank + 1, np.uint8) for rank in range(3)]
    host_pools = [np.zeros((BLOCKS, 4), np.uint8) for _ in range(3)]
    workers = [
        Worker(rank, HostCopyEngine(device, host))
        for rank, (device, host) in enumerate(zip(device_pools, host_pools))
    ]
    for worker in workers:
        worker.submit([store(1, 2, 5)])
    for worker in workers:
        worker.close()
        [report] = worker.poll()
        assert report.arguments()[:4] == (1, worker.rank, True, "")
    assert [host[5].tolist() for host in host_pools] == [[1] * 4, [2] * 4, [3] * 4]


def test_statistics_measure_the_host_engine() -> None:
    """Seconds come from the copies themselves, and a snapshot stays as it was taken."""
    with closing(Worker(0, HostCopyEngine(*pools()))) as worker:
        before = worker.statistics()
        worker.submit([store(1, 0, 0), load(2, 1, 1)])
        worker.wait([1, 2])
        worker.poll()
        after = worker.statistics()
    assert before.store == CopyStatistics()
    assert (after.store.bytes, after.load.bytes) == (4, 4)
    assert after.store.seconds > 0
    assert after.store.gigabytes_per_second == pytest.approx(4 / after.store.seconds / 1e9)


def test_a_rate_without_time_is_zero() -> None:
    """The simulated engine has no clock; its rate is not a division by zero."""
    assert CopyStatistics(transfers=1, bytes=10).gigabytes_per_second == 0.0


def test_a_worker_changes_its_engine_when_everything_is_reported() -> None:
    """Every transfer is reported once: what the old engine still has would be lost."""
    device, host = pools()
    with closing(HostCopyEngine(device, host)) as old, closing(HostCopyEngine(device, host)) as new:
        worker = Worker(0, old)
        worker.submit([store(1, 0, 0)])
        with pytest.raises(TransferFailed, match=r"worker 0 cannot change its copy engine: transfers \[1\]"):
            worker.use(new)
        old.drain()
        worker.poll()
        worker.use(new)
        worker.submit([store(2, 1, 1)])
        new.drain()
        assert [report.transfer for report in worker.poll()] == [2]
