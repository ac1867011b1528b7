"""Segments that take several flushes to open: events go on, readers see each of them once, nobody waits."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from log_life import Life, event, names, read
from log_openings import slow_openings
from test_log_sync_thread import MOST_SECONDS, THREADED, until

from kvsm.core.log import EventsTakenBack, LogFollower, LogReader, StateCopy
from kvsm.core.log.frames import segment_path
from kvsm.core.log.segment_maker import SegmentMaker
from kvsm.errors import LogWriteFailed


class PiecewiseState:
    """A copy of a state that takes some calls. dropped: whether nobody needs it any more."""

    def __init__(self, snapshot: bytes, calls: int) -> None:
        self._snapshot, self._calls, self.dropped = snapshot, calls, False

    def go_on(self) -> bool:
        """A piece more."""
        assert not self.dropped
        self._calls -= 1
        return self._calls <= 0

    def pieces(self) -> Sequence[bytes]:
        """Byte for byte."""
        return [self._snapshot[place : place + 1] for place in range(len(self._snapshot))]

    def drop(self) -> None:
        """It is not asked again."""
        self.dropped = True


@pytest.fixture(autouse=True)
def one_piece_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush has no time for a second one."""
    monkeypatch.setattr("kvsm.core.log.opening._COPY_NS", 0)


class SlowLife(Life):
    """A life whose state is copied in five calls. copies: of its states."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.copies: list[PiecewiseState] = []
        super().__init__(directory, **options)

    def snapshot(self) -> StateCopy:
        self.copies.append(PiecewiseState(str(self.seq).encode(), 5))
        return self.copies[-1]


def test_a_state_is_copied_in_several_flushes(tmp_path: Path) -> None:
    """Each takes a piece. The segment begins where the copy was begun, and has the events since then."""
    life = SlowLife(tmp_path / "log", segment_bytes=1)
    for flush in range(1, 6):
        assert names(tmp_path / "log") == [1]
        life.append(flush)
    assert names(tmp_path / "log") == [1, 2]
    life.writer.close()
    assert [one.head.snapshot for one in LogReader(tmp_path / "log").segments()] == [b"", b"1"]
    assert read(tmp_path / "log") == ([event(seq) for seq in range(1, 16)], None, None)


class BrokenState(PiecewiseState):
    """There is no memory for it."""

    def go_on(self) -> bool:
        raise MemoryError


@pytest.mark.parametrize("choice", ["stop", "continue"])
def test_a_state_that_cannot_be_copied_keeps_the_log_in_its_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: Any
) -> None:
    """It is a segment that cannot be opened: no event is lost, and it is told."""
    monkeypatch.setattr(SlowLife, "snapshot", lambda _: BrokenState(b"", 1))
    life = SlowLife(tmp_path / "log", segment_bytes=1, on_failure=choice)
    if choice == "stop":
        with pytest.raises(LogWriteFailed, match="no segment can follow event 3"):
            life.append(3)
    else:
        life.append(3)
        assert "no segment can follow event 3" in str(life.writer.failure)
        life.append(2)
        life.writer.close()
    assert os.listdir(tmp_path / "log") == [f"{1:020}.kvsm"]
    assert len(read(tmp_path / "log")[0]) == life.seq


def test_a_log_that_is_closed_meanwhile_ends_in_the_segment_before(tmp_path: Path) -> None:
    life = SlowLife(tmp_path / "log", segment_bytes=1)
    life.append(3)
    life.append(1)
    life.writer.close()
    assert os.listdir(tmp_path / "log") == [f"{1:020}.kvsm"]
    assert [one.dropped for one in life.copies] == [True]
    assert read(tmp_path / "log") == ([event(seq) for seq in range(1, 5)], None, None)


def test_no_flush_waits_for_a_thread_that_opens_a_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot may take seconds to write. Flushes go on, and a reader has their events at once."""
    life, may_write = SlowLife(tmp_path / "log", segment_bytes=1), threading.Event()
    really = SegmentMaker.write_head

    def write_head(*arguments: Any) -> None:
        assert may_write.wait(MOST_SECONDS)
        really(*arguments)

    monkeypatch.setattr("kvsm.core.log.opening.AT_ONCE_BYTES", -1)
    monkeypatch.setattr(SegmentMaker, "write_head", write_head)
    for _ in range(20):
        life.append(3)
    assert len(read(tmp_path / "log")[0]) == 60
    assert names(tmp_path / "log") == [1]
    may_write.set()
    until(lambda: bool(life.append(1)) and len(names(tmp_path / "log")) > 1)
    life.writer.close()
    assert read(tmp_path / "log") == ([event(seq) for seq in range(1, life.seq + 1)], None, None)


def test_a_segment_opens_even_if_each_flush_begins_a_sync(tmp_path: Path) -> None:
    """It must become as durable as the one before it, which becomes more durable all the time."""
    with slow_openings():
        life = Life(tmp_path / "log", segment_bytes=1, **THREADED)
        for _ in range(20):
            life.append(1)
        assert len(names(tmp_path / "log")) > 1
        life.writer.close()


def test_a_follower_that_has_read_ahead_gets_each_event_once(tmp_path: Path) -> None:
    """It has read events in the old segment that the new one has, too."""
    life = SlowLife(tmp_path / "log", segment_bytes=1)
    follower, seen = LogFollower(tmp_path / "log"), []
    for _ in range(12):
        life.append(1)
        seen += [one.seq for news in follower.poll() for one in news.events]
    assert len(names(tmp_path / "log")) > 1
    assert seen == list(range(1, 13))
    life.writer.close()


def test_a_reader_that_was_at_the_end_goes_on_in_the_new_segment(tmp_path: Path) -> None:
    """It listed the directory before the new segment had its name."""
    life = SlowLife(tmp_path / "log", segment_bytes=1)
    life.append(3)
    life.append(2)
    seen, states = [], []
    for segment in LogReader(tmp_path / "log").segments():
        states.append(segment.head.snapshot)
        for one in segment.events():
            seen.append(one.seq)
            if seen == [1, 2, 3, 4, 5]:
                for _ in range(4):
                    life.append(1)
    assert (seen, states) == (list(range(1, 10)), [b"", b"3"])
    life.writer.close()


def test_what_both_segments_have_counts_for_the_limit(tmp_path: Path) -> None:
    """So the writer ends the opening when that would become too much."""
    life = SlowLife(tmp_path / "log", segment_bytes=10, max_bytes=6000)
    most = 0
    for _ in range(200):
        life.append(5)
        most = max(most, sum(file.stat().st_size for file in (tmp_path / "log").iterdir()))
    life.writer.close()
    assert most <= 6000
    assert len(names(tmp_path / "log")) >= 2


def test_nothing_is_deleted_before_the_new_name_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss could take the new name, and the older segments would be gone already."""
    names_changed, deleted = [], []
    rename, fsync, unlink = os.rename, os.fsync, Path.unlink

    def note_rename(*paths: Any) -> None:
        rename(*paths)
        names_changed.append(paths)

    def note_sync(descriptor: int) -> None:
        fsync(descriptor)
        names_changed.clear()

    def note_unlink(path: Path, missing_ok: bool = False) -> None:
        assert path.suffix != ".kvsm" or not names_changed
        deleted.append(path)
        unlink(path, missing_ok)

    for name, call in (("rename", note_rename), ("fsync", note_sync)):
        monkeypatch.setattr(os, name, call)
    monkeypatch.setattr(Path, "unlink", note_unlink)
    with slow_openings():
        options = {**THREADED, "sync_interval_ms": 3_600_000}  # No sync comes by itself.
        life = Life(tmp_path / "log", segment_bytes=1000, max_bytes=6000, **options)
        for _ in range(200):
            life.append(9)
        life.writer.close()
    assert [path for path in deleted if path.suffix == ".kvsm"]


def test_the_name_of_a_new_segment_becomes_durable_without_new_events(tmp_path: Path) -> None:
    """Its bytes were synced before it got its name. Until the name is synced as well, a power loss leaves
    only the previous segment, whose last events may not be synced."""
    with slow_openings():
        life = Life(tmp_path / "log", segment_bytes=1, **THREADED)
        until(lambda: bool(life.append(1)) and len(names(tmp_path / "log")) > 1)

        def is_durable() -> bool:
            life.writer.flush()
            return life.writer._place.segment.name_is_durable

        until(is_durable)
        life.writer.close()


def test_a_killed_process_leaves_all_events_in_the_segment_before(tmp_path: Path) -> None:
    """The segment that it was making has no name. The next life deletes it."""
    life = SlowLife(tmp_path / "log", segment_bytes=1)
    life.append(3)
    life.append(1)
    life.kill()
    assert read(tmp_path / "log")[0] == [event(seq) for seq in range(1, 5)]


def test_a_snapshot_in_pieces_is_compressed(tmp_path: Path) -> None:
    life = SlowLife(tmp_path / "log", segment_bytes=1, compress=True)
    for _ in range(12):
        life.append(1)
    life.writer.close()
    states = [one.head.snapshot for one in LogReader(tmp_path / "log").segments()]
    assert states[1] == str(names(tmp_path / "log")[1] - 1).encode()


class EndlessLife(SlowLife):
    """A life whose state takes long to copy."""

    def snapshot(self) -> StateCopy:
        return PiecewiseState(str(self.seq).encode(), 10_000)


def test_with_a_limit_a_writer_waits_for_a_slow_state(tmp_path: Path) -> None:
    """Otherwise what both segments have would grow until the limit has no room for events."""
    life = EndlessLife(tmp_path / "log", segment_bytes=1000, max_bytes=6000)
    for _ in range(200):
        life.append(5)
    life.writer.close()
    assert len(names(tmp_path / "log")) >= 2
    assert life.writer.events == 1000


def test_a_follower_that_read_ahead_and_came_too_late_misses_only_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had events of the new segment from the old one. Then the new one is deleted before it is opened."""
    life = SlowLife(tmp_path / "log", segment_bytes=1)
    follower = LogFollower(tmp_path / "log")
    life.append(1)
    life.append(1)
    assert [one.seq for news in follower.poll() for one in news.events] == [1, 2]
    for _ in range(20):
        life.append(1)
    second, third = names(tmp_path / "log")[1:3]
    assert second == 2
    move_to = follower._move_to

    def move_too_late(path: Path, gap: tuple[int, int] | None) -> None:
        move_to(path, gap)
        if int(path.stem) == second:
            for deleted in (1, second):  # the oldest first
                segment_path(tmp_path / "log", deleted).unlink()

    monkeypatch.setattr(follower, "_move_to", move_too_late)
    seen = [one.seq for news in follower.poll() for one in news.events]
    assert follower.overtaken == [(3, third - 1)]
    assert seen == list(range(third, 23))
    life.writer.close()


def test_a_follower_that_read_ahead_is_told_what_the_new_segment_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last events were copied without a sync. Then a sync of the new segment fails, and they are lost."""
    with slow_openings():
        life = Life(tmp_path / "log", segment_bytes=100, on_failure="continue", **THREADED)
        follower = LogFollower(tmp_path / "log")
        while len(names(tmp_path / "log")) == 1:
            list(follower.poll())
            life.append(1)

        def fail(_: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with suppress(LogWriteFailed):  # The mark cannot be synced either.
                for _ in range(5):
                    life.append(1)
        with pytest.raises(EventsTakenBack):
            list(follower.poll())
