"""When a copy ran: its worker says how long it was queued and took, and `report` splits waits by that."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest
from extracted_tables import extracted
from hypothesis import given, settings
from scheduler_traffic import ACTS, drive

from examples import examples
from kvsm import events as ev
from kvsm.check.worlds.small_engine import SmallEngine
from kvsm.check.worlds.small_workers import copy_times
from kvsm.copies import HostCopyEngine
from kvsm.copies.copy_engine import CopyResult
from kvsm.copies.worker import Worker
from kvsm.core import native
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.errors import WrongArgument
from kvsm.events import Direction, OffloadConfig
from kvsm.explain.report.copy_detectors import slow_loads
from kvsm.explain.report.detectors import Limit
from kvsm.explain.report.figures import WaitSplit
from kvsm.explain.report.log_report import make_report
from kvsm.explain.tables.opened import open as open_log
from kvsm.ids import IdArray

MS = 1_000_000


class GatedEngine(HostCopyEngine):
    """Each copy waits until it is let through."""

    def __init__(self, *pools: Any) -> None:
        self.gate = Event()
        super().__init__(*pools, threads=1)

    def copy_blocks(self, direction: Direction, device_blocks: IdArray, host_blocks: IdArray) -> None:
        assert self.gate.wait(10)
        super().copy_blocks(direction, device_blocks, host_blocks)


def test_a_copy_is_queued_while_the_one_before_it_runs() -> None:
    """One thread: the second copy begins when the first has ended."""
    device, host = (np.zeros((4, 64), dtype=np.uint8) for _ in range(2))
    worker = Worker(0, engine := GatedEngine(device, host))
    worker.submit([TransferJob(n, Direction.STORE, (n,), (n,)) for n in (1, 2)])
    engine.gate.wait(0.02)
    engine.gate.set()
    worker.wait([1, 2])
    first, second = worker.poll()
    worker.close()
    assert first.queued_us is not None
    assert first.copied_us is not None
    assert first.copied_us >= 15_000
    assert second.queued_us is not None
    assert second.queued_us >= first.queued_us + first.copied_us - 1
    assert second.copied_us is not None


def test_a_job_that_cannot_run_has_no_copy_time() -> None:
    """Nothing of it ran, and nothing is made up."""
    device, host = (np.zeros((4, 64), dtype=np.uint8) for _ in range(2))
    worker = Worker(3, engine := HostCopyEngine(device, host))
    engine.close()
    worker.submit([TransferJob(1, Direction.STORE, (1,), (1,))])
    [report] = worker.poll()
    assert (report.good, report.queued_us, report.copied_us) == (False, None, None)


def test_an_engine_that_knows_a_part_says_a_part() -> None:
    """A GPU times its copies; when they began, the host does not know."""
    assert CopyResult(1, Direction.LOAD, True, lasted=0.25).report(2, 7.0) == WorkerReport(
        1, 2, True, "", None, 250_000
    )
    assert CopyResult(1, Direction.LOAD, True).report(2, 7.0) == WorkerReport(1, 2, True)
    timed = CopyResult(1, Direction.LOAD, True, began=7.5, lasted=0.25)
    assert timed.report(2, 7.0) == WorkerReport(1, 2, True, "", 500_000, 250_000)


def begun(**options: Any) -> tuple[Offloader, MemoryLog, int]:
    log = MemoryLog()
    core = Offloader(OffloadConfig(host_blocks=4, device_blocks=16, workers=2), log, **options)
    job = core.prepare_store("s", [b"a"], [0]).job
    assert job is not None
    core.submit([job.transfer])
    return core, log, job.transfer


TIMES = [(0, 0), (1, None), (None, 5), ((1 << 63) - 1, 7), (None, None)]


@pytest.mark.parametrize("times", TIMES)
def test_the_log_keeps_what_a_worker_says(times: tuple[int | None, int | None]) -> None:
    core, log, transfer = begun()
    core.report(transfer, 0, True, "", *times)
    assert isinstance(log[-1], ev.WorkerReported)
    assert (log[-1].queued_us, log[-1].copied_us) == times
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(log[-1]), type=ev.WorkerReported) == log[-1]


@pytest.mark.parametrize("body", ["native", "python"])
@pytest.mark.parametrize("times", TIMES)
def test_both_bodies_record_the_same(
    body: str, times: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if body == "python":
        monkeypatch.setattr(native, "WHY_NOT", "a test wants the other body")
    core, log, transfer = begun(clock_ns=lambda: 7)
    assert core.report(transfer, 1, True, "", *times).rejected is None
    assert log[-1] == ev.WorkerReported(log[-1].seq, 0, 7, transfer, 1, True, "", *times)


@pytest.mark.parametrize("wrong", [-1, 1 << 63, 1.5, "1"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_duration_that_no_log_can_hold_is_refused(wrong: Any, place: int) -> None:
    """Nothing is half done: the report can be made again."""
    core, log, transfer = begun()
    times, before = [3, 4], len(log)
    times[place] = wrong
    with pytest.raises(WrongArgument, match="_us"):
        core.report(transfer, 0, True, "", *times)
    assert len(log) == before
    assert core.report(transfer, 0, True, "", 3, 4).rejected is None


def test_times_cost_a_few_bytes() -> None:
    """Two bytes if they are unknown; for a copy of a second, eight more."""
    report = ev.WorkerReported(1000, 10, 1 << 60, 900, 0, True)
    bare = len(msgspec.msgpack.encode(report))
    timed = msgspec.structs.replace(report, queued_us=1_000_000, copied_us=1_000_000)
    assert len(msgspec.msgpack.encode(timed)) == bare + 8


@settings(max_examples=examples(20), deadline=None)
@given(ACTS)
def test_tables_have_the_times_of_every_copy(acts: list[int]) -> None:
    engine = SmallEngine(device_blocks=16, host_blocks=8, workers=2)
    drive(engine, acts)
    for row in extracted(engine.core.config, engine.log)[0]["copies"]:
        known = copy_times(row["transfer"], row["worker"]) if row["reported"] is not None else (None, None)
        told = [None if us is None else us * 1000 for us in known]
        assert [row["queued_ns"], row["copied_ns"]] == told
        assert (row["noticed_ns"] is None) == (told[0] is None)


class Clocked:
    """A core whose clock a test moves, with a log on disk."""

    def __init__(self, directory: Path) -> None:
        self.now, self.directory = 1_700_000_000 * 10**9, directory
        config = OffloadConfig(host_blocks=8, device_blocks=8, defer_ticks=1000)
        self.core = Offloader.open(config, directory, clock_ns=lambda: self.now)

    def after_ms(self, ms: float) -> Offloader:
        """Time passes."""
        self.now += int(ms * MS)
        return self.core

    def stored(self) -> None:
        job = self.core.prepare_store("s", [b"a"], [0]).job
        assert job is not None
        self.core.submit([job.transfer])
        self.core.complete_store(job.transfer)

    def loading(self, request: str) -> int:
        """A load that has just been submitted."""
        assert self.core.match(request, [b"a"]).hits == 1
        job = self.core.prepare_load(request, [1])
        assert job is not None
        self.core.submit([job.transfer])
        return job.transfer

    def report(self) -> Any:
        self.core.close()
        with open_log(self.directory) as log:
            return make_report(log, verify=False)


def test_a_wait_is_split_into_queue_copy_and_the_step_that_noticed(tmp_path: Path) -> None:
    """The load took 5 ms, and the step that took its report came 40 ms after its submission."""
    run = Clocked(tmp_path / "log")
    run.stored()
    load = run.loading("r")
    run.after_ms(40).report(load, 0, True, "", 2_000, 5_000)
    run.core.finish("r")
    found = run.report()
    assert found.waits.loading_ns == 40 * MS
    assert found.waits.loading_split == WaitSplit(2 * MS, 5 * MS, 33 * MS, 0)
    [rank] = found.copies.ranks
    assert [one.max_ns for one in (rank.queued, rank.copied, rank.noticed)] == [2 * MS, 5 * MS, 33 * MS]


def test_a_slow_step_is_not_blamed_on_loads(tmp_path: Path) -> None:
    """Loads of 1 ms in an engine whose steps take 50 ms: no copy is slow."""
    limit = Limit(share=0.2, least=1)
    for name, copied_us, blamed in (("step", 1_000, False), ("copy", 49_000, True)):
        run = Clocked(tmp_path / name)
        run.stored()
        for n in range(5):
            load = run.loading(f"r{n}")
            run.after_ms(50).report(load, 0, True, "", 0, copied_us)
            run.core.finish(f"r{n}")
        assert (slow_loads(run.report(), limit) is not None) == blamed, name


def test_a_wait_that_begins_while_the_copy_runs_has_the_rest_of_it(tmp_path: Path) -> None:
    """Another request waits for a store that was submitted 10 ms before."""
    run = Clocked(tmp_path / "log")
    job = run.core.prepare_store("s", [b"a"], [0]).job
    assert job is not None
    run.core.submit([job.transfer])
    assert run.after_ms(10).match("r", [b"a"]).waits_for == job.transfer
    run.after_ms(20).report(job.transfer, 0, True, "", 4_000, 12_000)
    found = run.report()
    assert found.waits.deferred_split == WaitSplit(0, 6 * MS, 14 * MS, 0)
    assert found.waits.top[0].split == found.waits.deferred_split


def test_what_a_worker_does_not_know_stays_unknown(tmp_path: Path) -> None:
    """A GPU knows how long it copied. The rest may be queue or step."""
    run = Clocked(tmp_path / "log")
    run.stored()
    load = run.loading("r")
    run.after_ms(40).report(load, 0, True, "", None, 5_000)
    assert run.report().waits.loading_split == WaitSplit(0, 5 * MS, 0, 35 * MS)
