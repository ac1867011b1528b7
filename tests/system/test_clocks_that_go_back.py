"""A monotonic clock that goes back by an hour delays nothing by an hour."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvsm import OffloadConfig, Offloader
from kvsm.core.log import MemoryLog
from kvsm.core.offloader import LogFlush
from kvsm.events import Direction
from kvsm.explain.metric_places import SUM
from kvsm.explain.metrics import SecondsHistogram
from kvsm.system.steady_clock import SteadyClock
from kvsm.tiers.disk.health import FAILURES, FIRST_PAUSE_S, HealthWatch
from kvsm.tiers.hand_over.leases import LeaseEnd, LeaseTable
from kvsm.vllm.deadlines import TransferDeadlines

HOUR = 3600.0
CONFIG = OffloadConfig(host_blocks=4, device_blocks=4)


class SetClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 2 * HOUR

    def __call__(self) -> float:
        return self.now


class Flushed(MemoryLog):
    """A log that counts its flushes."""

    count = 0

    def flush(self) -> None:
        self.count += 1


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


def test_a_steady_clock_continues_from_its_last_value(clock: SetClock) -> None:
    steady = SteadyClock(clock)
    before = steady()
    clock.now -= HOUR
    assert steady() == before
    clock.now += 5
    assert steady() == before + 5


def test_a_transfer_is_given_up_in_time(clock: SetClock) -> None:
    deadlines = TransferDeadlines(10.0, 0, clock)
    deadlines.began(1, Direction.STORE)
    clock.now -= HOUR
    assert deadlines.overdue() == []
    clock.now += 10
    assert deadlines.overdue() == [1]


def test_a_lease_ends_in_time(clock: SetClock) -> None:
    table = LeaseTable(10.0, clock)
    table.offer("before", b"prompt", 4)
    clock.now -= HOUR
    table.offer("after", b"prompt", 4)
    clock.now += 10
    table.expire()
    assert table.take_ended() == [("before", LeaseEnd.EXPIRED), ("after", LeaseEnd.EXPIRED)]


def test_a_lease_does_not_end_at_once(clock: SetClock) -> None:
    table = LeaseTable(10.0, clock)
    table.offer("before", b"prompt", 4)
    clock.now -= HOUR
    clock.now += 9
    assert not table.has_ended()


def test_a_disk_is_probed_in_time(clock: SetClock) -> None:
    watch = HealthWatch("disk", clock)
    for _ in range(FAILURES):
        watch.failed("full")
    clock.now -= HOUR
    clock.now += FIRST_PAUSE_S
    assert watch.read().takes_stores
    assert watch.refusal() == ""


def test_a_log_is_synced_in_time(tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if no event follows."""
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(clock.now * 1e9))
    core = Offloader.open(CONFIG, tmp_path / "log", sync_interval_ms=100)
    assert core.writer is not None
    core.writer.flush()
    core.arrive("r")
    core.writer.flush()
    clock.now -= HOUR
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    core.writer.flush()
    assert synced
    core.close()


def test_events_are_flushed_in_time(clock: SetClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core may delay the flush of a step by 100 ms."""
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(clock.now * 1e9))
    flushed = Flushed()
    core = Offloader(CONFIG, flushed, flush_within_ms=100)
    core.arrive("r")
    core.flush_log(LogFlush.STEP_ENDED)
    clock.now -= HOUR
    core.flush_log(LogFlush.STEP_ENDED)
    core.flush_log(LogFlush.STEP_ENDED)
    assert flushed.count == 2


def test_no_duration_is_negative() -> None:
    """A counter that decreases is refused by Prometheus, or counts as a restart."""
    histogram = SecondsHistogram("lookup_seconds")
    histogram.observe(-HOUR)
    assert histogram.take_growth() == {"0": 1, SUM: 0}
