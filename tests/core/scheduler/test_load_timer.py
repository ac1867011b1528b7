"""The times of loads and of computation that `LoadTimer` notes."""

from __future__ import annotations

from random import Random
from typing import Any

from core_life import store

from kvsm import events as ev
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import Offloader
from kvsm.core.plan import TransferJob, WorkerReport
from kvsm.core.scheduler.load_timer import FEWEST, SAMPLES, LoadTimer, line
from kvsm.events import OffloadConfig

KEYS = [b"key-%d" % number for number in range(8)]


class Rig:
    """A core with stored blocks, whose loads and steps take the times that a test gives."""

    def __init__(self, workers: int = 1) -> None:
        self.log, self.now, self.loads = MemoryLog(), 0, 0
        config = OffloadConfig(host_blocks=8, device_blocks=64, workers=workers)
        self.core = Offloader(config, self.log, clock_ns=lambda: 0)
        store(self.core, "stored", KEYS)
        self.timer = LoadTimer(self.core)

    def begin(self, blocks: int) -> TransferJob:
        """Plan and submit a load."""
        name, self.loads = f"load-{self.loads}", self.loads + 1
        self.core.match(name, KEYS[:blocks])
        first = 8 + 8 * (self.loads % 4)
        job = self.core.prepare_load(name, range(first, first + blocks))
        assert job is not None
        self.core.submit([job.transfer])
        self.timer.submitted([job])
        return job

    def end(self, job: TransferJob, *times: tuple[int | None, int | None], good: bool = True) -> None:
        """Report a load from all workers. times: (queued, copied) of each worker (us)."""
        for worker, (queued_us, copied_us) in enumerate(times):
            report = WorkerReport(job.transfer, worker, good, "", queued_us, copied_us)
            self.core.report(*report.arguments())
            self.timer.reported([report])

    def load(self, blocks: int, us: int) -> None:
        self.end(self.begin(blocks), (0, us))

    def step(self, tokens: int, us: int, idle_us: int = 0) -> None:
        self.now += 1000 * idle_us
        self.timer.step_scheduled(self.now, tokens, tokens)
        self.now += 1000 * us
        self.timer.step_ended(self.now)

    @property
    def times(self) -> Any:
        return self.core.ledger.times

    def noted(self) -> int:
        return sum(isinstance(event, ev.TimesMeasured) for event in self.log)


def measured(rig: Rig) -> Rig:
    """Let loads take 50 us and 10 us for each block, and tokens 2 us."""
    for number in range(SAMPLES):
        blocks = 1 + number % 4
        rig.load(blocks, 50 + 10 * blocks)
        rig.step(100, 200)
    return rig


def test_times_follow_from_loads_of_several_sizes_and_from_steps() -> None:
    assert measured(Rig()).times == (50, 10_000, 2_000)


def test_ranks_that_report_together_count_with_the_slowest_one() -> None:
    """vLLM brings the reports of all ranks at once: when the first one is read, the load is over."""
    rig = Rig(workers=2)
    for number in range(SAMPLES):
        blocks = 1 + number % 4
        job = rig.begin(blocks)
        reports = [
            WorkerReport(job.transfer, rank, True, "", 0, us) for rank, us in enumerate((1, 50 + 10 * blocks))
        ]
        for report in reports:
            rig.core.report(*report.arguments())
        rig.timer.reported(reports)
        rig.step(100, 200)
    assert rig.times == (50, 10_000, 2_000)


def test_a_load_that_one_of_its_ranks_did_not_time_is_not_measured() -> None:
    rig = Rig(workers=2)
    for _ in range(SAMPLES):
        job = rig.begin(1)
        reports = [WorkerReport(job.transfer, 0, True, "", 0, 9), WorkerReport(job.transfer, 1, True, "")]
        for report in reports:
            rig.core.report(*report.arguments())
        rig.timer.reported(reports)
        rig.step(100, 200)
    assert rig.times is None


def test_few_measurements_are_not_noted() -> None:
    rig = Rig()
    for number in range(FEWEST - 1):
        rig.load(1 + number, 100)
        rig.step(100, 200)
    assert rig.times is None


def test_an_idle_engine_does_not_count_as_computing() -> None:
    rig = measured(Rig())
    for _ in range(SAMPLES):
        rig.step(100, 200, idle_us=1_000_000)
    assert rig.times == (50, 10_000, 2_000)


def test_a_step_that_was_scheduled_ahead_counts_from_the_end_of_the_step_before() -> None:
    rig = measured(Rig())
    rig.timer.step_scheduled(rig.now, 100, 100)
    for _ in range(SAMPLES):
        rig.timer.step_scheduled(rig.now, 100, 100)
        rig.now += 200_000
        rig.timer.step_ended(rig.now)
    assert rig.times == (50, 10_000, 2_000)


def test_steps_that_only_decode_are_not_measured() -> None:
    rig = measured(Rig())
    for _ in range(SAMPLES):
        rig.timer.step_scheduled(rig.now, 256, 0)
        rig.now += 50_000_000
        rig.timer.step_ended(rig.now)
    assert rig.times == (50, 10_000, 2_000)


def test_the_slowest_rank_decides() -> None:
    rig = Rig(workers=2)
    for _ in range(SAMPLES):
        rig.end(rig.begin(2), (10, 50), (100, 100))
        rig.step(100, 200)
    assert rig.times == (0, 100_000, 2_000)


def test_a_load_behind_others_counts_their_blocks() -> None:
    """So the time for each block is that of a block, however many loads are in flight."""
    rig = Rig()
    for _ in range(SAMPLES):
        jobs = [rig.begin(2) for _ in range(3)]
        for place, job in enumerate(jobs):
            rig.end(job, (20 * place, 20))
        rig.step(100, 200)
    assert rig.times == (0, 10_000, 2_000)


def test_loads_that_fail_or_have_no_times_are_not_measured() -> None:
    rig = measured(Rig())
    for _ in range(SAMPLES):
        rig.end(rig.begin(1), (None, None))
        rig.end(rig.begin(2), (0, None))
    rig.end(rig.begin(2), (0, 90_000), good=False)
    assert rig.times == (50, 10_000, 2_000)


def test_one_late_load_changes_nothing() -> None:
    rig = measured(Rig())
    rig.load(1, 900_000)
    assert rig.times == (50, 10_000, 2_000)


def test_small_changes_are_not_noted_and_large_ones_are() -> None:
    rig = measured(Rig())
    before = rig.noted()
    for _ in range(SAMPLES):
        rig.step(100, 230)
    assert rig.noted() == before
    for _ in range(SAMPLES):
        rig.step(100, 400)
    assert rig.noted() > before
    assert rig.times[2] >= 3_000


def test_loads_of_one_size_tell_no_start() -> None:
    assert line([(4, 100)] * 5) == (0, 25_000)


def test_times_of_any_reports_can_be_noted() -> None:
    """Whatever the workers report, the core takes the times, and they are between the extremes."""
    for seed in range(200):
        random = Random(seed)
        rig = Rig()
        most = 10 ** random.randint(0, 17)
        for _ in range(3 * SAMPLES):
            rig.load(random.randint(1, 8), random.randint(0, most))
            rig.step(random.randint(1, 4096), random.randint(0, 10**6))
        assert rig.times is None or all(0 <= time <= 1 << 40 for time in rig.times)
        pairs = [(random.randint(1, 8), random.randint(0, most)) for _ in range(SAMPLES)]
        start_us, block_ns = line(pairs)
        assert 0 <= start_us <= most + 1
        assert 0 <= block_ns <= 1000 * most
