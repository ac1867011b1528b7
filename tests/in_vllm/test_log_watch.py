"""An event log that cannot be written, and goes on: vLLM's log says it, and so do the metrics."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hanging_copies import Clock
from log_life import Disk, disk
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvsm.core.ledger.snapshot import snapshot
from kvsm.core.log import LateLog, LogReader, LogWriter, WholeState, writer
from kvsm.core.log.stop_mark import NAME
from kvsm.core.log.writer import FRAME_EVENTS
from kvsm.core.offloader import LogFlush
from kvsm.errors import LogError
from kvsm.events import OffloadConfig
from kvsm.explain.metrics import Metrics
from kvsm.vllm import log_watch
from kvsm.vllm.connector_stats import STATS_INTERVAL_S, StatsSource
from kvsm.vllm.engine_offloader import EngineOffloader, open_engine_offloader
from kvsm.vllm.extra_config import ConnectorOptions
from kvsm.vllm.log_stats import LogStats, metric_definitions
from kvsm.vllm.log_watch import AGAIN_S, LogWatch
from kvsm.vllm.manager_recorder import ManagerRecorder
from kvsm.vllm.recording_manager import RecordingManager

CONFIG = OffloadConfig(host_blocks=4, device_blocks=8)


@contextmanager
def heard() -> Iterator[list[str]]:
    """What vLLM's log says."""
    lines: list[str] = []

    def note(text: str, *values: object) -> None:
        lines.append(text % values)

    with patch.object(log_watch.log, "warning", note), patch.object(log_watch.log, "error", note):
        yield lines


class Rig:
    """An engine's core with a log on a small disk. A step adds two events."""

    def __init__(self, directory: Path, limited: Disk) -> None:
        options = ConnectorOptions(cpu_bytes_to_use=1, event_log=str(directory), log_durability="none")
        self.core: EngineOffloader = open_engine_offloader(CONFIG, options, 0, None)
        assert self.core.event_log is not None
        self.watch: LogWatch = self.core.event_log
        self.clock, self.disk = Clock(), limited
        self.watch.clock = self.clock.read
        (self.log,) = directory.iterdir()

    def step(self, times: int = 1) -> int:
        """Returns the number of the last event."""
        for _ in range(times):
            self.core.offloader.arrive(f"r{self.core.offloader.step}")
            self.core.offloader.end_step()
            self.watch.flush()  # The end of a step may wait a little for it.
        return self.core.offloader.ledger.seq


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with disk(1 << 20) as limited:
        yield Rig(tmp_path, limited)


def test_a_full_disk_is_said_at_once_and_then_once_a_minute(rig: Rig) -> None:
    """Nothing is dropped in silence. The line names the file, the reason and the missing events."""
    with heard() as lines:
        last = rig.step(3)
        assert lines == []
        rig.disk.free = 0
        rig.step()
        (line,) = lines
        assert line.startswith(f"kvsm: the event log cannot be written: {rig.log}/")
        assert "No space left on device" in line
        assert line.endswith(f"Events {last + 1} to {last + 2} are missing in it")
        rig.clock.advance(AGAIN_S - 1)
        rig.step(9)
        assert len(lines) == 1
        rig.clock.advance(1)
        now = rig.step()
        assert len(lines) == 2
        assert lines[1].endswith(f"Events {last + 1} to {now} are missing in it")


def test_a_log_that_goes_on_says_where_its_gap_is(rig: Rig) -> None:
    """The events that the line names are those of `LogReader.gaps`. A second failure is told as the first."""
    with heard() as lines:
        last = rig.step(3)
        for _ in range(2):
            lines.clear()
            rig.disk.free = 0
            rig.step()
            rig.disk.free = 1 << 20
            while len(lines) < 2:
                last = rig.step()
            rig.step()
        rig.watch.close()
    reader = LogReader(rig.log)
    for _ in (segment.events() for segment in reader.segments()):
        pass
    first, end = reader.gaps[-1]
    assert len(reader.gaps) == 2
    assert end - first + 1 >= FRAME_EVENTS
    assert lines[0].endswith(f"Events {first} to {first + 1} are missing in it")
    assert lines[1:] == [
        f"kvsm: the event log could not be written for a while. Events {first} to {end} are missing in it"
    ]
    assert end == last


def test_a_deleted_directory_is_said(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """No write fails: the file is still there for the process that writes it. The log begins again."""
    monkeypatch.setattr(writer, "LOOK_INTERVAL_NS", 0)
    with heard() as lines:
        rig.step(2)
        shutil.rmtree(rig.log)
        last = rig.step()
        rig.step(3)
    assert lines == [
        f"kvsm: the event log could not be written for a while. Events 1 to {last} are missing in it"
    ]
    assert rig.core.metrics.gauges()["log_broken"] == 0
    assert rig.core.metrics.values()["log_events_dropped"] == last


def test_a_log_that_ends_broken_says_so(rig: Rig) -> None:
    last = rig.step()
    with heard() as lines:
        rig.disk.free = 0
        rig.step()
        rig.core.close()
    assert len(lines) == 2
    assert lines[1].startswith("kvsm: the event log ends broken. Events ")
    assert f" {last + 1} to " in lines[1]


def test_a_log_that_cannot_be_closed_raises_nothing_into_vllm(rig: Rig) -> None:
    """vLLM is shutting down its workers, and must go on with that."""
    with heard() as lines, patch.object(LogWriter, "close", side_effect=log_watch.LogError("no end")):
        rig.core.close()
    assert lines == ["kvsm: the event log could not be completed: no end"]


def test_statistics_tell_that_the_log_is_broken(rig: Rig) -> None:
    """Also if no event has happened since the last statistics were taken."""
    source = StatsSource(rig.core.metrics)
    source.clock = count(step=STATS_INTERVAL_S).__next__
    rig.step()
    taken = source.take()
    assert taken is not None
    assert list(taken.data["log_broken"][""].values()) == [0]
    rig.disk.free = 0
    rig.core.offloader.arrive("unwritten")
    source.take()
    with heard():
        rig.watch.flush()
        taken = source.take()
        assert taken is not None
        assert list(taken.data["log_broken"][""].values()) == [1]
        assert taken.data["log_events_dropped"] == {"": 1}
        assert source.take() is None
        rig.disk.free = 1 << 20
        rig.step(FRAME_EVENTS)
        taken = source.take()
    assert taken is not None
    assert list(taken.data["log_broken"][""].values()) == [0]
    assert rig.core.metrics.values()["log_events_dropped"] == taken.data["log_events_dropped"][""] + 1


def test_the_metrics_of_a_log_count_its_gaps(rig: Rig) -> None:
    """The process that wrote the log counted the same."""
    with heard():
        rig.disk.free = 0
        rig.step()
        rig.disk.free = 1 << 20
        rig.step(FRAME_EVENTS)
        rig.core.close()
    lost = rig.core.metrics.values()["log_events_dropped"]
    assert lost >= FRAME_EVENTS
    assert Metrics.of(LogReader(rig.log)).values()["log_events_dropped"] == lost


def test_a_recorders_log_is_heard_too(tmp_path: Path) -> None:
    """vLLM's manager knows nothing of a log: its statistics get two metrics more."""
    with disk(1 << 20) as limited, heard() as lines:
        event_log = LogWriter(
            tmp_path / "log",
            config=CONFIG,
            snapshot=lambda: WholeState(snapshot(recorder.ledger)),
            durability="none",
            on_failure="continue",
        )
        recorder = ManagerRecorder(CONFIG, event_log)
        recorder.log = LogWatch(event_log, event_log, recorder.ledger)
        manager = RecordingManager(CPUOffloadingManager(4, "lru"), recorder, LogStats(event_log))
        whole = manager.get_stats()
        limited.free = 0
        recorder.arrive("r")
        recorder.end_step()
        broken = manager.get_stats()
        again = manager.get_stats()
    assert len(lines) == 1
    titles = set(metric_definitions())
    assert titles == {"vllm:kvsm_log_broken", "vllm:kvsm_log_events_dropped"}
    assert titles.isdisjoint(whole.reduce())
    told = broken.reduce()
    assert {title: told[title] for title in titles} == {
        "vllm:kvsm_log_broken": 1,
        "vllm:kvsm_log_events_dropped": 3,
    }
    assert titles.isdisjoint(again.reduce())


def test_a_log_keeps_a_limit_that_is_far_below_a_segment(tmp_path: Path) -> None:
    """The segments of a log without a limit have 64 MiB. A log with a lower limit has smaller ones."""
    limit = 200_000
    options = ConnectorOptions(
        cpu_bytes_to_use=1, event_log=str(tmp_path), log_durability="none", log_max_bytes=limit
    )
    core = open_engine_offloader(CONFIG, options, 0, None)
    (log,) = tmp_path.iterdir()
    sizes = []
    for step in range(10_000):
        core.offloader.arrive(f"{step}")
        core.offloader.finish(f"{step}")
        core.offloader.end_step()
        if step % 500 == 0:
            core.offloader.flush_log(LogFlush.REPORTS_TAKEN)
            sizes.append(sum(file.stat().st_size for file in log.iterdir()))
    core.close()
    assert limit // 2 < max(sizes) <= limit
    reader = LogReader(log)
    assert reader.head.seq > 1, "the limit was never reached"


@pytest.mark.parametrize("given", [{}, {"log_on_failure": "stop"}])
def test_an_engine_starts_where_no_log_can_be_written(tmp_path: Path, given: dict[str, str]) -> None:
    """A file stands where the directory should be made, which stops root too. `stop` refuses the start."""
    place = tmp_path / "file"
    place.touch()
    options = ConnectorOptions(
        cpu_bytes_to_use=1, event_log=str(place / "logs"), log_durability="none", **given
    )
    if given:
        with pytest.raises(LogError, match=r"no directory can be made in .*; make room there or"):
            open_engine_offloader(CONFIG, options, 0, None)
        return
    engine = open_engine_offloader(CONFIG, options, 0, None)
    core, watch = engine.offloader, engine.event_log
    assert watch is not None
    late, clock = core.writer or watch._writer, Clock()
    assert isinstance(late, LateLog)
    late.clock = clock.read
    with heard() as lines:
        core.arrive("r")
        core.end_step()
        assert len(lines) == 1
        assert "cannot be written" in lines[0]
        assert "Events 1 to 3 are missing" in lines[0]
        assert engine.metrics.log_health() == (3, 1)
        place.unlink()
        clock.now = late._again_at + 1
        core.reset()
        assert "for a while" in lines[1]
    core.finish("r")
    dropped = late.dropped
    engine.close()
    (log,) = (place / "logs").iterdir()
    reader = LogReader(log)
    assert [event.seq for event in reader.events()] == list(range(dropped + 1, core.ledger.seq + 1))
    assert reader.head.seq == dropped


@pytest.fixture
def _hears_no_signals() -> Iterator[None]:
    """The process writes signals to no file yet: an engine of another test may not have shut down."""
    before = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(before)


@pytest.mark.usefixtures("_hears_no_signals")
def test_a_log_that_begins_late_has_the_mark_of_stops_from_then_on(tmp_path: Path) -> None:
    """So has another log of the process, which shares the mark."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.touch()
    engines = []
    for place in (first, second):
        options = ConnectorOptions(cpu_bytes_to_use=1, event_log=str(place / "logs"), log_durability="none")
        engines.append(open_engine_offloader(CONFIG, options, 0, None))
    engine, other = engines
    engine.mark_stops()
    engine.share_mark_with(other)
    assert not [*tmp_path.rglob(NAME)]
    assert engine.event_log is not None
    late, clock = engine.event_log._writer, Clock()
    assert isinstance(late, LateLog)
    late.clock = clock.read
    clock.now = late._again_at + 1
    first.unlink()
    for one in engines:
        one.offloader.reset()
    assert len([*tmp_path.rglob(NAME)]) == 2
    for one in engines:
        one.close()
    assert not [*tmp_path.rglob(NAME)]
