"""A log that is synced in a thread of its own: its writer does not wait, and claims only what is durable."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_life import Life, directory, event, read
from test_log_owner import in_a_fork

from examples import examples
from kvsm.core.log import LogReader
from kvsm.core.log.log_thread import SyncJob
from kvsm.core.log.segment_file import Synced
from kvsm.errors import LogWriteFailed

THREADED: dict[str, Any] = {"durability": "interval", "sync_interval_ms": 0, "sync_thread": True}
MOST_SECONDS = 10


def until(true: Callable[[], bool]) -> None:
    """Wait for this, but not long."""
    deadline = time.monotonic() + MOST_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def kept_and_gaps(path: Path) -> tuple[list[int], list[tuple[int, int]]]:
    """The numbers of the events in a log, and the first and last number of each gap."""
    reader = LogReader(path)
    kept = [one.seq for segment in reader.segments() for batch in segment.batches() for one in batch]
    return kept, reader.gaps


class SlowDisk:
    """A disk whose syncs begin, and end when a test lets them.

    begun: is set while a sync waits. error: what the next sync raises.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._let = threading.Event(), threading.Semaphore(0)
        self.error: OSError | None = None
        self.is_open = False
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def let(self) -> None:
        """Let one sync end."""
        self.begun.clear()
        self._let.release()

    def _sync(self, _: int) -> None:
        if self.is_open:
            return
        self.begun.set()
        assert self._let.acquire(timeout=MOST_SECONDS)
        if self.error is not None:
            raise self.error


def hanging_in_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Life, SlowDisk]:
    """A life of two events, whose sync has begun and not ended."""
    life = Life(tmp_path / "log", **THREADED | options)
    disk = SlowDisk(monkeypatch)
    life.append(2)
    assert disk.begun.wait(MOST_SECONDS)
    return life, disk


def test_a_flush_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold up the engine. Readers see the events at once, and the end of the log waits for all."""
    life, disk = hanging_in_a_sync(tmp_path, monkeypatch)
    life.append(3)
    assert [one.seq for one in LogReader(tmp_path / "log").events()] == [1, 2, 3, 4, 5]
    closing = threading.Thread(target=life.writer.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    disk.is_open = True
    disk.let()
    closing.join(MOST_SECONDS)
    reader = LogReader(tmp_path / "log")
    assert [one.seq for one in reader.events()] == [1, 2, 3, 4, 5]
    assert reader.end.value == "closed"


def test_durable_is_what_was_written_when_the_sync_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came during the sync may be in it or not. A reader takes a torn end behind it for a power loss."""
    life, disk = hanging_in_a_sync(tmp_path, monkeypatch)
    segment = life.writer._place.segment
    life.append(3)
    assert segment.synced.seq == 0
    disk.let()
    until(lambda: bool(life.append(1)) and segment.synced.seq > 0)
    assert segment.synced.seq == 2
    disk.is_open = True
    disk.let()
    life.writer.close()


@pytest.mark.parametrize("choice", ["stop", "continue"])
def test_a_failed_sync_in_the_thread_loses_all_since_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    """No failure is silent: the next flush finds it, as if it had synced itself."""
    life, disk = hanging_in_a_sync(tmp_path, monkeypatch, on_failure=choice)
    segment = life.writer._place.segment
    disk.error, disk.is_open = OSError(errno.EIO, os.strerror(errno.EIO)), choice == "continue"
    disk.let()
    until(lambda: segment.sync_failure is not None)
    if choice == "stop":
        with pytest.raises(LogWriteFailed, match=r"events 1 to 3 could not be written: .*Input/output error"):
            life.append(1)
        return
    life.append(1)
    assert life.writer.broken_from == 1
    assert life.writer.dropped == 3
    written = life.append(4)
    life.writer.close()
    assert kept_and_gaps(tmp_path / "log") == ([one.seq for one in written], [(1, 3)])


def test_a_sync_that_fails_long_before_the_next_one_is_due_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An opening asked for it, and was abandoned: so no other sync is due."""
    life = Life(tmp_path / "log", **THREADED | {"sync_interval_ms": 3_600_000, "on_failure": "continue"})
    disk, place = SlowDisk(monkeypatch), life.writer._place
    life.writer._syncing.thread.begin(SyncJob(place.segment, Synced(place.offset, 0, time.monotonic_ns())))
    assert disk.begun.wait(MOST_SECONDS)
    life.append(1)
    disk.error, disk.is_open = OSError(errno.EIO, os.strerror(errno.EIO)), True
    disk.let()
    until(lambda: place.segment.sync_failure is not None)
    life.append(1)
    assert life.writer.broken_from == 1
    life.writer.close()


def test_a_failed_write_during_a_failing_sync_loses_what_both_lose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sync was of earlier events than the write, and these are not durable either."""
    life, disk = hanging_in_a_sync(tmp_path, monkeypatch, on_failure="continue")

    def full(*_: object) -> int:
        disk.error, disk.is_open = OSError(errno.EIO, "sync"), True
        disk.let()
        raise OSError(errno.ENOSPC, "write")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(LogWriteFailed, match="events 1 to 3 could not be written"):
            life.append(1)  # Not even the mark can be written.


def test_a_forked_process_does_not_wait_for_a_thread_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads do not survive a fork. A child that closes the writer must not hang."""
    life, disk = hanging_in_a_sync(tmp_path, monkeypatch)
    assert in_a_fork(lambda: life.writer.close() or "closed") == "closed"
    disk.is_open = True
    disk.let()
    life.writer.close()
    assert read(tmp_path / "log") == ([event(1), event(2)], None, None)


@contextmanager
def moody_disk(seed: int) -> Iterator[list[str]]:
    """Syncs take a random time, and some fail. Yields what went wrong: two syncs of one file at once."""
    chance, locks, wrong = random.Random(seed), dict[int, threading.Lock](), list[str]()

    def sync(descriptor: int) -> None:
        busy = locks.setdefault(os.fstat(descriptor).st_ino, threading.Lock())
        if not busy.acquire(blocking=False):
            wrong.append("two syncs at once")
            return
        try:
            time.sleep(chance.choice([0, 0, 0.0005]))
            if chance.random() < 0.1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        finally:
            busy.release()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", sync)
        yield wrong


@settings(max_examples=examples(10), deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([1, 500, 1 << 20]))
def test_whatever_the_disk_does_a_reader_has_each_event_or_its_gap(seed: int, segment_bytes: int) -> None:
    """A failed sync reaches one caller only, so no two run at once."""
    chance = random.Random(seed)
    with directory() as path:
        life = Life(path, segment_bytes=segment_bytes, on_failure="continue", **THREADED)
        with moody_disk(seed) as wrong:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    "kvsm.core.log.writer.FRAME_EVENTS", 8
                )  # A broken log is tried again after as many.
                try:
                    for _ in range(20):
                        life.append(chance.choice([1, 2, 9]))
                    life.writer.close()
                except LogWriteFailed:
                    return  # The mark of a loss could not be made durable.
            assert not wrong
        kept, gaps = kept_and_gaps(path)
        missing = [seq for first, last in gaps for seq in range(first, last + 1)]
        whole = range(1, max(kept + missing, default=0) + 1)
        assert sorted(kept + missing) == list(whole)
        assert len(kept) == life.writer.events
