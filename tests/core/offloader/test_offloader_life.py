"""The life of an offloader: opened with its log, driven by one thread, closed."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from core_life import keys, new_core, store

from kvsm.core.ledger.snapshot import digest
from kvsm.core.log import LogReader, LogWriter, MemoryLog
from kvsm.core.offloader import Offloader, ReportResult
from kvsm.core.offloader.transferring import LOOK_EVERY
from kvsm.errors import LogError, Poisoned, WrongThread
from kvsm.events import OffloadConfig, OffloadingEvent, RejectReason, ReportRejected
from kvsm.explain.story import rebuild
from kvsm.explain.story.unfinished import unfinished_at_end

CONFIG = OffloadConfig(host_blocks=4, device_blocks=8)
T = TypeVar("T")


def in_thread(call: Callable[[], T], name: str = "another") -> T | BaseException:
    """What the call gives, or raises, in a thread of its own."""
    results: list[T | BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    return results[0]


class TestOpen:
    def test_log_replays_to_the_state_of_the_core_that_was_closed(self, tmp_path: Path) -> None:
        with Offloader.open(CONFIG, tmp_path / "log") as core:
            store(core, "r", keys(2))
        assert digest(rebuild(tmp_path / "log").ledger) == digest(core.ledger)

    def test_later_segments_begin_with_a_snapshot_of_the_core(self, tmp_path: Path) -> None:
        """The first segments may be deleted then."""
        with Offloader.open(CONFIG, tmp_path / "log", segment_bytes=1) as core:
            for step in range(4):
                core.arrive(f"r{step}")
                core.end_step()
        first, *_ = sorted((tmp_path / "log").glob("*.kvsm"))
        first.unlink()
        assert digest(rebuild(tmp_path / "log").ledger) == digest(core.ledger)

    def test_takes_every_option_of_the_log(self) -> None:
        """With the same defaults. What `open` decides itself is left out."""
        takes = inspect.signature(Offloader.open).parameters
        options = dict(inspect.signature(LogWriter).parameters)
        for decided in ("directory", "config", "snapshot", "clock", "first", "checked"):
            del options[decided]
        assert {name: takes[name].default for name in options} == {
            name: one.default for name, one in options.items()
        }

    def test_without_a_directory_there_is_no_log(self) -> None:
        with Offloader.open(CONFIG) as core:
            core.arrive("r")
        assert core.log is None
        assert core.writer is None

    def test_directory_that_holds_a_log_is_refused(self, tmp_path: Path) -> None:
        Offloader.open(CONFIG, tmp_path).close()
        with pytest.raises(LogError, match="holds a log already"):
            Offloader.open(CONFIG, tmp_path)


class TestClose:
    def test_closed_core_takes_no_call(self, tmp_path: Path) -> None:
        core = Offloader.open(CONFIG, tmp_path / "log")
        core.arrive("r")
        core.close()
        with pytest.raises(Poisoned, match="stopped at event 2: it was closed"):
            core.arrive("q")
        with pytest.raises(Poisoned, match="closed"):
            core.end_step()
        assert core.ledger.seq == 2

    def test_twice_is_as_once(self, tmp_path: Path) -> None:
        core = Offloader.open(CONFIG, tmp_path / "log")
        core.close()
        core.close()

    def test_error_in_the_block_is_raised_and_what_was_decided_is_written(self, tmp_path: Path) -> None:
        core = Offloader.open(CONFIG, tmp_path / "log")

        def fail() -> None:
            with core:
                core.arrive("r")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert digest(rebuild(tmp_path / "log").ledger) == digest(core.ledger)


class TestThreads:
    def test_a_second_thread_is_refused_and_leaves_no_trace(self) -> None:
        core, log = new_core()
        core.arrive("r")
        before = digest(core.ledger), len(log)
        error = in_thread(lambda: core.arrive("q"), "sidecar")
        assert isinstance(error, WrongThread)
        assert "'sidecar'" in str(error)
        assert repr(threading.current_thread().name) in str(error)
        assert (digest(core.ledger), len(log)) == before
        core.arrive("q")

    @pytest.mark.parametrize(
        "call",
        [Offloader.end_step, Offloader.reset, Offloader.take_events, Offloader.close],
        ids=["end_step", "reset", "take_events", "close"],
    )
    def test_a_call_that_emits_nothing_is_refused_too(self, call: Callable[[Offloader], object]) -> None:
        """It would count a step, write the log or stop the core beside the thread that drives it."""
        core, _ = new_core()
        core.arrive("r")
        step = core.step
        assert isinstance(in_thread(lambda: call(core)), WrongThread)
        assert core.step == step
        core.arrive("q")

    def test_core_is_built_in_one_thread_and_driven_by_another(self) -> None:
        core, _ = new_core()
        assert in_thread(lambda: core.arrive("r")) is None

    def test_another_thread_takes_over_when_the_driver_has_ended(self) -> None:
        core, _ = new_core()
        in_thread(lambda: core.arrive("r"))
        core.arrive("q")
        assert isinstance(in_thread(lambda: core.arrive("p")), WrongThread)

    def test_one_of_many_threads_that_begin_at_once_drives(self) -> None:
        core, _ = new_core()
        barrier, hold = threading.Barrier(8), threading.Event()
        results: list[object] = []

        def begin(name: str) -> None:
            barrier.wait()
            try:
                results.append(core.arrive(name))
            except WrongThread as error:
                results.append(error)
            hold.wait(10)

        threads = [threading.Thread(target=begin, args=(f"r{number}",)) for number in range(8)]
        for thread in threads:
            thread.start()
        while len(results) < 8:
            pass
        hold.set()
        for thread in threads:
            thread.join()
        assert results.count(None) == len(core.ledger.requests) == 1

    def test_thread_that_ends_within_an_event_hands_nothing_over(self) -> None:
        """Nobody knows what it left: no other thread may go on."""

        class Interrupted(MemoryLog):
            def append(self, event: OffloadingEvent) -> None:  # noqa: ARG002
                raise KeyboardInterrupt

        core, _ = new_core()
        core.log = Interrupted()
        assert isinstance(in_thread(lambda: core.arrive("r")), KeyboardInterrupt)
        with pytest.raises(Poisoned, match="KeyboardInterrupt"):
            core.arrive("q")


def test_report_says_what_became_of_it() -> None:
    """Counted, rejected and last are three answers."""
    core, _ = new_core(workers=2)
    job = core.prepare_store("r", keys(1), [0]).job
    assert job is not None
    core.submit([job.transfer])
    first = core.report(job.transfer, 0, True)
    again = core.report(job.transfer, 0, True)
    last = core.report(job.transfer, 1, True)
    assert first == ReportResult()
    assert again == ReportResult(rejected=RejectReason.DUPLICATE)
    assert last.rejected is None
    assert last.ended is not None
    assert last.ended.good


class TestForgottenSubmit:
    def test_plan_that_is_never_submitted_is_named_once(self, caplog: pytest.LogCaptureFixture) -> None:
        """Its request would wait without a word."""
        core, _ = new_core()
        job = core.prepare_store("r", keys(1), [0]).job
        assert job is not None
        core.match("q", keys(1))
        for _ in range(3 * LOOK_EVERY):
            core.tick()
            core.match("q", keys(1))
            core.end_step()
        (warning,) = [record.getMessage() for record in caplog.records]
        assert warning.startswith(f"transfer {job.transfer}, a store of 1 blocks, was planned")
        assert f"submit([{job.transfer}])" in warning

    def test_request_that_waits_for_it_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        core, _ = new_core(defer_ticks=10_000)
        core.prepare_store("r", keys(1), [0])
        core.match("q", keys(1))
        for _ in range(2 * LOOK_EVERY):
            core.tick()
        assert "requests wait for it: 'q'" in caplog.text

    def test_plan_that_waits_for_a_short_time_is_not_named(self, caplog: pytest.LogCaptureFixture) -> None:
        """An engine may collect jobs for some steps."""
        core, _ = new_core()
        for _ in range(5):
            job = core.prepare_store("r", keys(1), [0]).job
            assert job is not None
            for _ in range(LOOK_EVERY // 2 - 1):
                core.end_step()
            core.submit([job.transfer])
            core.fail_store(job.transfer)
        assert caplog.records == []

    def test_plans_that_are_not_submitted_when_the_core_closes_are_named(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An engine that never calls `submit` may end before the core looks for such plans."""
        core = Offloader.open(CONFIG, tmp_path / "log")
        store(core, "r", keys(1))
        planned = core.prepare_store("r", keys(2, "q"), [1, 2]).job
        assert planned is not None
        core.close()
        core.close()
        (warning,) = caplog.messages
        assert f"closes with plans that were never submitted: store {planned.transfer} (2 blocks)" in warning
        reader = LogReader(tmp_path / "log")
        rebuilt = rebuild(tmp_path / "log")
        found = unfinished_at_end(reader, rebuilt.ledger, rebuilt.condition)
        assert [plan.transfer for plan in found.plans] == [planned.transfer]

    def test_core_that_closes_without_plans_says_nothing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Offloader.open(CONFIG, tmp_path / "log") as core:
            store(core, "r", keys(1))
        assert caplog.records == []


class TestWrongReports:
    """A correct engine never makes them, so a warning says what to do, once for each reason."""

    def test_rank_beyond_the_configuration_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        """With one worker a block is readable after the first report. The warning comes even if the transfer
        has ended by then: the second rank is not late, but not configured."""
        core, log = new_core(workers=1)
        for first in (0, 1):
            transfer = store(core, "r", keys(1, f"p{first}"), first)
            assert core.report(transfer, 1, True) == ReportResult(rejected=RejectReason.WORKER)
            assert log[-1] == ReportRejected(core.ledger.seq, 0, 0, transfer, 1, True, RejectReason.WORKER)
        (warning,) = caplog.messages
        assert warning.startswith("rank 1 reports, but the configuration has 1 worker: ")
        assert "OffloadConfig.workers" in warning

    def test_report_before_the_submission_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        core, _ = new_core()
        job = core.prepare_store("r", keys(1), [0]).job
        assert job is not None
        for _ in range(2):
            assert core.report(job.transfer, 0, True).rejected is RejectReason.NOT_SUBMITTED
        (warning,) = caplog.messages
        assert warning.startswith(
            f"rank 0 reports transfer {job.transfer}, which was planned but not submitted"
        )
        assert f"submit([{job.transfer}])" in warning

    def test_report_to_another_core_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        core, _ = new_core()
        core.report(99, 0, True)
        assert "Give each report to the core that planned the transfer" in caplog.text

    def test_report_of_the_other_direction_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        core, _ = new_core()
        job = core.prepare_store("r", keys(1), [0]).job
        assert job is not None
        core.submit([job.transfer])
        core.complete_load(job.transfer)
        assert "as a copy in the other direction" in caplog.text

    def test_late_and_doubled_reports_are_usual(self, caplog: pytest.LogCaptureFixture) -> None:
        """A reset or a lost copy causes some in every engine."""
        core, _ = new_core(workers=2)
        transfer = store(core, "r", keys(1))
        assert core.report(transfer, 1, True).rejected is RejectReason.STALE
        job = core.prepare_store("r", keys(1, "q"), [1]).job
        assert job is not None
        core.submit([job.transfer])
        core.report(job.transfer, 1, True)
        assert core.report(job.transfer, 1, True).rejected is RejectReason.DUPLICATE
        assert caplog.records == []
